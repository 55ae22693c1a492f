"""Guided decoding: responses that match a regular expression, by tables that the decode loop reads.

An automaton over bytes becomes one over tokens. Tokens that lead from every state to the same state form a class, so
that the tables hold states x classes, not states x vocabulary. A response is drawn as if each token were drawn again
until the automaton allows it. This is not the model's distribution over the texts that match.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.errors import UserError
from rlhf_jax.generate.regex import Dfa, compile_regex
from rlhf_jax.types import Array

MOST_STATES = 2**17
"""Of all expressions together; more are refused."""
MOST_ENTRIES = 2**26
"""Of a table, 256 MiB; expressions that need more are refused."""
NEVER = np.iinfo(np.int32).max
"""Distance of a state from which no text that matches is reached."""


class Automaton(NamedTuple):
    """Which tokens may follow: of S states and C classes of tokens, both padded to powers of two."""

    table: Array  # [S, C] int32, the state after a token of the class
    classes: Array  # [V] int32, the class of each token
    distance: Array  # [S] int32, fewest tokens to a state in which the text matches; NEVER: none is reached

    def states(self, start: Array, tokens: Array) -> Array:
        """The states of a response, before its first token and after each.

        Args:
          start: [B] int32.
          tokens: [B, T] int32.

        Returns:
          [B, T + 1] int32.
        """

        def step(state: Array, token: Array) -> tuple[Array, Array]:
            return (after := self.table[state, self.classes[token]]), after

        after = jax.lax.scan(step, start, tokens.T)[1]
        return jnp.concatenate([start[:, None], after.T], axis=1)

    def mask(self, logits: Array, state: Array, left: Array, excluded: float = -jnp.inf) -> Array:
        """Excludes the tokens after which the text cannot match within the tokens that are left.

        Args:
          logits: [..., V] float.
          state: [...] int32, before the token.
          left: [...] int32, tokens after this one.
          excluded: in place of the logits of excluded tokens.

        Returns:
          [..., V] float.
        """
        allowed = self.distance[self.table[state]] <= left[..., None]
        return jnp.where(allowed[..., self.classes[: logits.shape[-1]]], logits, excluded)


class Guide(NamedTuple):
    """Which texts each row may have."""

    automaton: Automaton
    start: Array  # [N] int32, the state of each row before its first token


def token_automaton(
    expressions: Sequence[str | None],
    token_bytes: Sequence[bytes | None],
    *,
    stop_ids: Collection[int],
    excluded_ids: Collection[int] = (),
    most_tokens: int,
) -> tuple[Automaton, np.ndarray]:
    """The tables of expressions for a vocabulary.

    Args:
      expressions: `regex.compile_regex` has the syntax; None: any text.
      token_bytes: [V], what each token adds to a text; None or no bytes: a special token, which no expression matches.
      stop_ids: ids that end a response, allowed where the text matches.
      excluded_ids: ids that are never sampled, as special tokens.
      most_tokens: of a response.

    Returns:
      (Automaton of numpy arrays, [len(expressions)] int32 the start of each expression)

    Raises:
      UserError: an expression is refused, or no sequence of `most_tokens` tokens matches it; there is no stop id; the
        table is too large.
    """
    usable_stops = sorted(set(stop_ids) - set(excluded_ids))
    if not usable_stops:
        raise UserError("a regular expression needs a token that ends responses: set stop_token eos")
    transitions, accepting, starts = _union([None if text is None else compile_regex(text) for text in expressions])
    dead = len(accepting) - 1
    used = [b"" if text is None else text for text in token_bytes]
    for i in (*usable_stops, *excluded_ids):
        used[i] = b""
    functions, function = _after_tokens(transitions, used)
    # Two more functions: special tokens are a part of any text but of no expression, stop ids follow a match.
    states = np.arange(dead + 1, dtype=np.int32)
    any_text = np.isin(states, [start for start, text in zip(starts, expressions) if text is None])
    function[[i for i, text in enumerate(used) if not text]] = len(functions)
    function[usable_stops] = len(functions) + 1
    functions += [np.where(any_text, states, dead), np.where(accepting, states, dead)]
    present, classes = np.unique(function, return_inverse=True)
    table = np.stack([functions[i] for i in present], axis=1)
    distance = _distances(table, accepting)
    for start, text in zip(starts, expressions):
        if distance[start] == NEVER:
            raise UserError(f"no sequence of the tokenizer's tokens matches the regular expression {text!r}")
        if distance[start] > most_tokens:
            raise UserError(
                f"regular expression {text!r} needs at least {distance[start]} tokens; a response has at most "
                f"{most_tokens}"
            )
    rows, columns = (1 << (n - 1).bit_length() for n in table.shape)
    padding = ((0, rows - table.shape[0]), (0, columns - table.shape[1]))
    table = np.pad(table, padding, constant_values=dead)
    distance = np.pad(distance, padding[0], constant_values=NEVER)
    return Automaton(table, classes.astype(np.int32), distance), starts  # type: ignore[arg-type]  # numpy, see above


def _too_large(what: str) -> str:
    return f"the regular expressions {what}: use fewer of them, or smaller counts in {{m,n}}"


def _union(dfas: Sequence[Dfa | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(transitions [S, 256] int32, accepting [S] bool, starts) of all automata; the last state has no way out."""
    parts = [Dfa(np.zeros((1, 256), np.int32), np.ones(1, bool)) if dfa is None else dfa for dfa in dfas]
    sizes = [len(dfa.accepting) for dfa in parts]
    starts = np.cumsum([0, *sizes])[:-1].astype(np.int32)
    if (dead := sum(sizes)) > MOST_STATES:
        raise UserError(_too_large(f"have {dead:,} states together, more than {MOST_STATES:,}"))
    moved = [np.where(dfa.transitions < 0, dead, dfa.transitions + start) for dfa, start in zip(parts, starts)]
    transitions = np.concatenate([*moved, np.full((1, 256), dead)]).astype(np.int32)
    return transitions, np.concatenate([*(dfa.accepting for dfa in parts), [False]]), starts


def _after_tokens(transitions: np.ndarray, token_bytes: Sequence[bytes]) -> tuple[list[np.ndarray], np.ndarray]:
    """(functions from state to state, [V] the function of each token): byte after byte for all tokens at a time, since
    few functions differ."""
    lengths = np.array([len(text) for text in token_bytes])
    padded = np.zeros((len(token_bytes), max(lengths.max(initial=0), 1)), np.uint8)
    for i, text in enumerate(token_bytes):
        padded[i, : len(text)] = np.frombuffer(text, np.uint8)
    columns, kinds = np.unique(transitions, axis=1, return_inverse=True)  # bytes that nothing tells apart are one kind
    functions = [np.arange(len(transitions), dtype=np.int32)]
    numbers = {functions[0].tobytes(): 0}
    function = np.zeros(len(token_bytes), np.int64)
    for place in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > place)
        pairs, inverse = np.unique(
            function[longer] * 256 + kinds.reshape(-1)[padded[longer, place]], return_inverse=True
        )
        after = []
        for pair in pairs:
            composed = columns[functions[pair // 256], pair % 256]
            after.append(numbers.setdefault(composed.tobytes(), len(functions)))
            if after[-1] == len(functions):
                functions.append(composed)
                if len(functions) * len(transitions) > MOST_ENTRIES:
                    raise UserError(_too_large(f"need a table of more than {MOST_ENTRIES:,} entries"))
        function[longer] = np.array(after)[inverse]
    return functions, function


def _distances(table: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """[S] int32, fewest tokens to an accepting state."""
    distance = np.where(accepting, 0, NEVER).astype(np.int64)
    while True:
        shorter = np.minimum(distance, np.minimum(distance[table].min(axis=1) + 1, NEVER))
        if (shorter == distance).all():
            return distance.astype(np.int32)
        distance = shorter

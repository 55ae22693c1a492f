"""Regular expressions to deterministic finite automata over UTF-8 bytes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from re import _constants as syntax  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from rlhf_jax.errors import UserError

MOST_NODES = 100_000
"""Nodes of the nondeterministic automaton, beyond which an expression is refused."""
MOST_STATES = 20_000
"""States of the deterministic automaton, beyond which an expression is refused."""

Range = tuple[int, int]  # first and last, both included

# Surrogates are no characters.
_CHARACTERS = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_CATEGORIES: dict[Any, tuple[Range, ...]] = {
    syntax.CATEGORY_DIGIT: ((48, 57),),
    syntax.CATEGORY_SPACE: ((9, 13), (32, 32)),
    syntax.CATEGORY_WORD: ((48, 57), (65, 90), (95, 95), (97, 122)),
}
_NEGATED = {
    syntax.CATEGORY_NOT_DIGIT: syntax.CATEGORY_DIGIT,
    syntax.CATEGORY_NOT_SPACE: syntax.CATEGORY_SPACE,
    syntax.CATEGORY_NOT_WORD: syntax.CATEGORY_WORD,
}
_REFUSED = {
    syntax.ASSERT: "a look-around (?=...)",
    syntax.ASSERT_NOT: "a look-around (?!...)",
    syntax.GROUPREF: r"a back-reference \1",
    syntax.GROUPREF_EXISTS: "a conditional group (?(1)...)",
    syntax.ATOMIC_GROUP: "an atomic group (?>...)",
    syntax.POSSESSIVE_REPEAT: "a possessive quantifier",
}


@dataclasses.dataclass(frozen=True)
class Dfa:
    """A deterministic automaton over bytes; it starts in state 0.

    Attributes:
      transitions: [S, 256] int32, the next state after each byte; -1: there is none.
      accepting: [S] bool.
    """

    transitions: np.ndarray
    accepting: np.ndarray

    def matches(self, text: bytes) -> bool:
        """Whether the automaton accepts the whole text."""
        state = 0
        for byte in text:
            state = self.transitions[state, byte]
            if state < 0:
                return False
        return bool(self.accepting[state])


def compile_regex(pattern: str) -> Dfa:
    r"""The automaton that accepts the texts which `re.fullmatch(pattern, text, re.ASCII)` matches, as UTF-8.

    `^` and `\A` at the start and `$` and `\Z` at the end are allowed. `\d`, `\w` and `\s` are ASCII's.

    Args:
      pattern: in the syntax of Python's `re`.

    Raises:
      UserError: it is no regular expression, needs more than a finite automaton (look-around, back-references, atomic
        groups, word boundaries), has other flags than (?s) and (?x), or is too large.
    """
    try:
        tree = parser.parse(pattern)
        nodes = _Nodes(pattern)
        end = nodes.sequence(_without_anchors(list(tree)), nodes.new(), bool(tree.state.flags & re.DOTALL))
        nodes.check_flags(tree.state.flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{pattern!r} is no regular expression: {error}") from None
    return nodes.determinised(end)


def _without_anchors(items: list[Any]) -> list[Any]:
    starts = ((syntax.AT, syntax.AT_BEGINNING), (syntax.AT, syntax.AT_BEGINNING_STRING))
    ends = ((syntax.AT, syntax.AT_END), (syntax.AT, syntax.AT_END_STRING))
    items = items[1:] if items and items[0] in starts else items
    return items[:-1] if items and items[-1] in ends else items


class _Nodes:
    """A nondeterministic automaton (Thompson's): node 0 is its start."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.empty: list[list[int]] = []  # of each node, the nodes that it reaches without a byte
        self.edges: list[list[tuple[Range, int]]] = []  # of each node, ranges of bytes and the node that they lead to

    def new(self) -> int:
        if len(self.empty) == MOST_NODES:
            raise UserError(f"regular expression {self.pattern!r} is too large: use smaller counts in {{m,n}}")
        self.empty.append([])
        self.edges.append([])
        return len(self.empty) - 1

    def check_flags(self, flags: int) -> None:
        """Refuses (?i) and the like."""
        if other := flags & ~(re.DOTALL | re.VERBOSE | re.UNICODE | re.ASCII):
            raise self._refused(f"the flag {re.RegexFlag(other).name}")

    def _refused(self, what: str) -> UserError:
        return UserError(f"regular expression {self.pattern!r} has {what}, which decoding cannot follow; leave it out")

    # --- from the parsed expression

    def sequence(self, items: Iterable[Any], start: int, dot_all: bool) -> int:
        """Adds items one after another from node `start`; returns the node after them."""
        for item in items:
            start = self._item(item, start, dot_all)
        return start

    def _item(self, item: Any, start: int, dot_all: bool) -> int:
        kind, value = item
        if kind is syntax.SUBPATTERN:
            _, added, removed, items = value
            self.check_flags(added)
            return self.sequence(items, start, (dot_all or bool(added & re.DOTALL)) and not removed & re.DOTALL)
        if kind is syntax.BRANCH:
            end = self.new()
            for branch in value[1]:
                first = self.new()
                self.empty[start].append(first)
                self.empty[self.sequence(branch, first, dot_all)].append(end)
            return end
        if kind in (syntax.MAX_REPEAT, syntax.MIN_REPEAT):
            least, most, repeated = value
            return self._repeat(least, most, repeated, start, dot_all)
        if kind is syntax.ANY:
            return self._characters(_CHARACTERS if dot_all else _complement(((10, 10),)), start)
        if kind in (syntax.LITERAL, syntax.NOT_LITERAL, syntax.IN):
            return self._characters(_ranges(kind, value), start)
        if kind is syntax.AT:
            raise self._refused("an anchor or a word boundary inside of it")
        raise self._refused(_REFUSED.get(kind, str(kind)))

    def _repeat(self, least: int, most: Any, items: Any, start: int, dot_all: bool) -> int:
        for _ in range(least):
            start = self.sequence(items, start, dot_all)
        if most is syntax.MAXREPEAT:
            again, end = self.new(), self.new()
            self.empty[start].append(again)
            self.empty[self.sequence(items, again, dot_all)].append(again)
            self.empty[again].append(end)
            return end
        end = self.new()
        self.empty[start].append(end)
        for _ in range(most - least):
            start = self.sequence(items, start, dot_all)
            self.empty[start].append(end)
        return end

    def _characters(self, ranges: Sequence[Range], start: int) -> int:
        """Adds one character of the ranges, as UTF-8; bytes that end in the same way share their nodes."""
        end = self.new()
        rest: dict[tuple[Range, ...], int] = {(): end}

        def node(suffix: tuple[Range, ...]) -> int:
            if suffix not in rest:
                rest[suffix] = self.new()
                self.edges[rest[suffix]].append((suffix[0], node(suffix[1:])))
            return rest[suffix]

        for low, high in ranges:
            for first, *suffix in _utf8(low, high):
                self.edges[start].append((first, node(tuple(suffix))))
        return end

    # --- to a deterministic one

    def determinised(self, end: int) -> Dfa:
        """The automaton of the sets of nodes (the powerset construction), with `end` accepting."""
        # Bytes that no edge tells apart are one class.
        borders = sorted({0, 256, *(x for edges in self.edges for (low, high), _ in edges for x in (low, high + 1))})
        first = {byte: i for i, byte in enumerate(borders)}
        steps = [[(first[low], first[high + 1], node) for (low, high), node in edges] for edges in self.edges]
        start = self._closed([0])
        states, order = {start: 0}, [start]
        rows = []
        for state in order:  # which grows
            targets: list[set[int]] = [set() for _ in borders[:-1]]
            for node in state:
                for low, high, target in steps[node]:
                    for i in range(low, high):
                        targets[i].add(target)
            row = []
            for target_nodes in targets:
                reached = self._closed(target_nodes) if target_nodes else None
                if reached is not None and reached not in states:
                    if len(states) == MOST_STATES:
                        raise UserError(f"regular expression {self.pattern!r} has more than {MOST_STATES:,} states")
                    states[reached] = len(states)
                    order.append(reached)
                row.append(-1 if reached is None else states[reached])
            rows.append(row)
        transitions = np.repeat(np.array(rows, np.int32), np.diff(borders), axis=1)
        return Dfa(transitions, np.array([end in state for state in order]))

    def _closed(self, nodes: Iterable[int]) -> frozenset[int]:
        """The nodes, and those that they reach without a byte; only those that have an edge or none at all."""
        reached = set(nodes)
        queue = list(reached)
        while queue:
            for node in self.empty[queue.pop()]:
                if node not in reached:
                    reached.add(node)
                    queue.append(node)
        return frozenset(node for node in reached if self.edges[node] or not self.empty[node])


def _ranges(kind: Any, value: Any) -> tuple[Range, ...]:
    """The characters of a literal or a set."""
    if kind is syntax.LITERAL:
        return ((value, value),)
    if kind is syntax.NOT_LITERAL:
        return _complement(((value, value),))
    ranges: list[Range] = []
    negated = False
    for part, inner in value:
        if part is syntax.NEGATE:
            negated = True
        elif part is syntax.RANGE:
            ranges.append(inner)
        elif part is syntax.CATEGORY:
            ranges += _complement(_CATEGORIES[_NEGATED[inner]]) if inner in _NEGATED else _CATEGORIES[inner]
        else:
            ranges.append((inner, inner))
    return _complement(ranges) if negated else tuple(ranges)


def _complement(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """All other characters."""
    gaps, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    return (*gaps, (start, _CHARACTERS[-1][1])) if start <= _CHARACTERS[-1][1] else tuple(gaps)


def _utf8(low: int, high: int) -> Iterable[tuple[Range, ...]]:
    """Ranges of bytes, one for each byte of a character, whose products are the characters from low to high."""
    for start, end in (*((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)),):
        if max(low, start) <= min(high, end):
            yield from _products(chr(max(low, start)).encode(), chr(min(high, end)).encode())


def _products(low: bytes, high: bytes) -> Iterable[tuple[Range, ...]]:
    """The same, of characters with equally many bytes."""
    if low[0] == high[0]:
        for rest in _products(low[1:], high[1:]) if len(low) > 1 else ((),):
            yield ((low[0], low[0]), *rest)
        return
    size = len(low) - 1
    first, last = b"\x80" * size, b"\xbf" * size
    start, end = low[0], high[0]
    if low[1:] != first:
        yield from (((start, start), *rest) for rest in _products(low[1:], last))
        start += 1
    if high[1:] != last:
        end -= 1
    if start <= end:
        yield ((start, end), *((0x80, 0xBF),) * size)
    if high[1:] != last:
        yield from (((high[0], high[0]), *rest) for rest in _products(first, high[1:]))

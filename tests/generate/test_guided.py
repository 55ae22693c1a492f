"""Guided decoding: every response matches, drawn as if each token were drawn again until it may follow."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import generate as gen
from rlhf_jax.errors import UserError
from rlhf_jax.generate import guided
from rlhf_jax.generate.guided import NEVER, Guide, token_automaton
from rlhf_jax.models import custom_shape
from rlhf_jax.types import PartialResponses, PromptBatch
from tests.helpers import decoding as dec
from tests.helpers.decoding import ROWS, SAMPLING, STOPS, TOKENS, VOCABULARY

EXPRESSIONS = (
    "yes|no",
    r"-?\d+(\.\d+)?",
    r"(?s)<think>.{1,30}</think>",
    r'\{"name": "(search|add)", "x": -?[0-9]+\}',
    r"\\boxed\{[^{}]+\}",
    r"[A-Z][a-z]*( [a-z]+){1,9}\.",
    "é+[ü-ÿ]?",
    None,
)
DECODINGS = {
    "plain": gen.Decoding(block=8),
    "shrinking": gen.Decoding(shrink=True),
    "slots": gen.Decoding(slots=ROWS // 4, refill=1 / ROWS),
    "drafts": gen.Decoding(draft="ngram", draft_tokens=3),
    "everything": gen.Decoding(block=8, slots=ROWS // 2, shrink=True, draft="ngram", draft_tokens=3),
}


@functools.cache
def vocabulary() -> list[bytes | None]:
    """Single bytes, the two of é and ÿ among them, and pieces of several; ids 0 to 9 are special."""
    pieces = [bytes([byte]) for byte in b'abcdefghiknorstxyzXY0129-.,<>/{}\\": \xc3\xa9\xbf']
    pieces += [b"yes", b"no", b"<think>", b"</think>", b"th", b"ink", b"\\boxed{", b'{"', b'": "', b"search", b"add"]
    pieces += [b"name", b"10", b"\xc3\xa9", b" a", b" th", b"}", b"\n"]
    return [None] * 10 + pieces + [None] * (VOCABULARY - 10 - len(pieces))


def text_of(response, length) -> bytes:
    """The text of a response without its stop token."""
    return b"".join(vocabulary()[i] or b"" for i in response[:length] if i not in STOPS)


@functools.cache
def guide() -> Guide:
    """Row i may have texts of expression i modulo their number."""
    automaton, starts = token_automaton(EXPRESSIONS, vocabulary(), stop_ids=STOPS, most_tokens=TOKENS)
    return jax.tree.map(jnp.asarray, Guide(automaton, starts[np.arange(ROWS) % len(EXPRESSIONS)]))


@functools.cache
def least_tokens() -> np.ndarray:
    return np.asarray(guide().automaton.distance[guide().start])


def limits_of(seed: int) -> np.ndarray:
    """Most tokens of each row, often hardly enough."""
    rng = np.random.default_rng(seed)
    return np.maximum(np.minimum(least_tokens() + rng.integers(0, 6, ROWS), TOKENS), 1)


@pytest.mark.parametrize("name", DECODINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_response_matches_however_it_is_decoded(name, seed):
    model, params = dec.model_of("gpt_neox")
    limits = limits_of(seed) if seed else np.full(ROWS, TOKENS)
    options = {"limits": limits, "seed": seed, "guide": guide()}
    out, _ = dec.decode(model, params, dec.prompts_of(seed), DECODINGS[name], **options)
    dec.assert_follows(model, params, out, limits, seed=seed, guide=guide())
    for row, (response, length) in enumerate(zip(out.response, out.lengths)):
        expression = EXPRESSIONS[row % len(EXPRESSIONS)]
        if expression is not None:
            assert re.fullmatch(expression, text_of(response, length).decode(), re.ASCII), (row, response[:length])
    assert out.ended.any() and not out.ended.all()


@pytest.mark.parametrize(
    "sampling",
    [
        gen.Sampling(TOKENS, 0.0, stop_ids=STOPS, fill_id=9),
        gen.Sampling(TOKENS, 1.3, top_k=3, stop_ids=STOPS, fill_id=9),
        gen.Sampling(TOKENS, 1.0, top_p=0.5, min_p=0.05, stop_ids=STOPS, fill_id=9),
        gen.Sampling(TOKENS, 1.0, repetition_penalty=1.5, stop_ids=STOPS, fill_id=9),
    ],
    ids=["greedy", "top_k", "top_p and min_p", "repetition_penalty"],
)
def test_options_of_sampling_choose_among_the_tokens_that_may_follow(sampling):
    model, params = dec.model_of("gpt_neox")
    limits = np.full(ROWS, TOKENS)
    out, _ = dec.decode(model, params, dec.prompts_of(2), limits=limits, sampling=sampling, guide=guide())
    dec.assert_follows(model, params, out, limits, sampling=sampling, guide=guide())
    for row in range(ROWS):
        expression = EXPRESSIONS[row % len(EXPRESSIONS)]
        text = text_of(out.response[row], out.lengths[row]).decode(errors="replace")
        assert expression is None or re.fullmatch(expression, text, re.ASCII)


def test_a_rollout_that_stops_goes_on_where_its_texts_were():
    model, params = dec.model_of("gpt_neox")
    prompts, keys = dec.prompts_of(4), jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(4), jnp.arange(ROWS))
    options = {"group": dec.GROUP, "keys": keys, "guide": guide()}
    whole = gen.generate(model, params, prompts, jax.random.key(4), SAMPLING, **options)
    part = gen.generate(
        model, params, prompts, jax.random.key(4), SAMPLING, decoding=gen.Decoding(max_steps=4), **options
    )
    begun = PartialResponses(part.response, part.logprobs, part.lengths, part.ended)
    rest = gen.generate(model, params, prompts, jax.random.key(4), SAMPLING, begun=begun, **options)
    np.testing.assert_array_equal(rest.response, whole.response)
    np.testing.assert_array_equal(rest.lengths, whole.lengths)


TINY = [b"a", b"b", b"ab", b"ba", b"", None]  # and a stop token


@pytest.mark.parametrize("expression", ["(ab)+", "a|b{2,3}", "a{3}b?", "[ab]{0,4}", "b*a", "(?:ab|ba){2}"])
def test_a_token_may_follow_if_some_tokens_complete_a_match(expression):
    """By enumeration of all texts of at most four tokens."""
    stop, most = len(TINY), 4
    automaton, (start,) = token_automaton([expression], [*TINY, None], stop_ids=[stop], most_tokens=most)
    automaton = jax.tree.map(jnp.asarray, automaton)
    usable = range(4)

    def spelled(ids):
        return b"".join(TINY[i] for i in ids).decode()

    completions = {n: [ids for k in range(n + 1) for ids in itertools.product(usable, repeat=k)] for n in range(most)}
    seen = 0
    for length in range(most):
        left = most - length - 1
        for prefix in itertools.product(usable, repeat=length):
            follow = [
                any(re.fullmatch(expression, spelled((*prefix, token, *rest))) for rest in completions[left])
                for token in usable
            ]
            ends = bool(re.fullmatch(expression, spelled(prefix)))
            if not ends and not any(follow):
                continue  # is never reached
            state = automaton.states(jnp.array([start]), jnp.array([prefix], jnp.int32).reshape(1, length))[:, -1]
            logits = automaton.mask(jnp.zeros((1, stop + 1)), state, jnp.array([left]))
            assert np.isfinite(logits[0]).tolist() == [*follow, False, False, ends], (prefix, left)
            seen += 1
    assert seen > 3


def test_log_probabilities_are_those_of_the_tokens_that_may_follow():
    model, params = dec.model_of("gpt_neox")
    automaton, starts = token_automaton(["a"], vocabulary(), stop_ids=STOPS, most_tokens=TOKENS)
    only = jax.tree.map(jnp.asarray, Guide(automaton, np.repeat(starts, ROWS)))
    out, _ = dec.decode(model, params, dec.prompts_of(0), guide=only)
    assert (out.lengths == 2).all() and (out.logprobs[:, 0] == 0).all()
    # Of the second token, one of two stop ids.
    assert (out.logprobs[:, 1] < 0).all() and set(out.response[:, 1]) <= set(STOPS)


def test_any_text_is_what_is_sampled_without_a_guide():
    model, params = dec.model_of("gpt_neox")
    automaton, starts = token_automaton([None, "yes|no"], vocabulary(), stop_ids=STOPS, most_tokens=TOKENS)
    free = jax.tree.map(jnp.asarray, Guide(automaton, np.repeat(starts[:1], ROWS)))
    sampling = gen.Sampling(TOKENS, 1.0, stop_ids=STOPS, fill_id=9, suppress_ids=(11, 12))
    wanted, _ = dec.decode(model, params, dec.prompts_of(0), sampling=sampling)
    out, _ = dec.decode(model, params, dec.prompts_of(0), sampling=sampling, guide=free)
    for field in ("response", "lengths", "ended", "logprobs"):
        np.testing.assert_array_equal(getattr(out, field), getattr(wanted, field), field)


def test_ids_that_are_never_sampled_lead_to_no_dead_end():
    excluded = [i for i, text in enumerate(vocabulary()) if text == b"yes" or text == b"y"]
    automaton, starts = token_automaton(
        ["yes|no"], vocabulary(), stop_ids=STOPS, excluded_ids=excluded, most_tokens=TOKENS
    )
    model, params = dec.model_of("gpt_neox")
    only = jax.tree.map(jnp.asarray, Guide(automaton, np.repeat(starts, ROWS)))
    sampling = gen.Sampling(TOKENS, 1.0, stop_ids=STOPS, fill_id=9, suppress_ids=tuple(excluded))
    out, _ = dec.decode(model, params, dec.prompts_of(0), sampling=sampling, guide=only)
    assert {text_of(*row) for row in zip(out.response, out.lengths)} == {b"no"}


@pytest.mark.parametrize(
    "expressions, options, says",
    [
        (["yes"], {"stop_ids": ()}, "needs a token that ends responses: set stop_token eos"),
        (["yes"], {"excluded_ids": STOPS}, "needs a token that ends responses"),
        (
            ["no", "(?s).{90}!"],
            {},
            r"no sequence of the tokenizer's tokens matches the regular expression '(?s).{90}!'",
        ),
        ([None, "[xy]{41}"], {}, "regular expression '[xy]{41}' needs at least 41 tokens; a response has at most 40"),
        (["(?i)a"], {}, "has the flag IGNORECASE"),
        ([f"{i}.{{1,600}}" for i in range(28)], {}, "expressions have 134,474 states together, more than 131,072: use"),
    ],
)
def test_expressions_that_no_response_can_match_are_refused(expressions, options, says):
    with pytest.raises(UserError) as error:
        token_automaton(expressions, vocabulary(), **{"stop_ids": STOPS, "most_tokens": TOKENS, **options})
    assert says in str(error.value)


@pytest.mark.runs
def test_a_thousand_samples_of_a_large_vocabulary_match():
    """Of 150,000 tokens of up to twelve bytes, and a row of seven expressions each."""
    rows, count, tokens = 1008, 150_000, 32
    rng = np.random.default_rng(0)
    letters = np.frombuffer('abcdefghijklmnopqrstuvwxyzABC0123456789 .-{}":,<>/\\é\n'.encode(), np.uint8)
    spelled = [None, None, *(bytes([byte]) for byte in range(256))]
    spelled += [rng.choice(letters, rng.integers(2, 13)).tobytes() for _ in range(count - len(spelled))]
    expressions = [text for text in EXPRESSIONS if text is not None]
    automaton, starts = token_automaton(expressions, spelled, stop_ids=[1], most_tokens=tokens)
    model = custom_shape("1x16x2", count, 64)
    params = model.init(jax.random.key(0))
    prompts = PromptBatch(np.full((1, 1), 40, np.int32), np.ones(1, np.int32), np.zeros(1, np.int32))
    sampling = gen.Sampling(tokens, 1.0, stop_ids=(1,))
    options = {"group": rows, "decoding": gen.Decoding(slots=126)}
    sample = jax.jit(
        lambda guide: gen.generate(model, params, prompts, jax.random.key(0), sampling, guide=guide, **options)
    )
    out = jax.tree.map(np.asarray, sample(Guide(automaton, np.resize(starts, rows))))
    texts = set()
    for row, (response, length) in enumerate(zip(out.response, out.lengths)):
        text = b"".join(spelled[i] or b"" for i in response[:length]).decode()
        expression = expressions[row % len(expressions)]
        assert re.fullmatch(expression, text, re.ASCII), (expression, text)
        texts.add(text)
    assert len(texts) > rows / 2


def test_a_table_that_does_not_fit_is_refused_while_it_is_computed(monkeypatch):
    monkeypatch.setattr(guided, "MOST_ENTRIES", 1000)
    with pytest.raises(UserError, match="the regular expressions need a table of more than 1,000 entries: use fewer"):
        token_automaton([".{1,30}"], vocabulary(), stop_ids=STOPS, most_tokens=TOKENS)


def test_tables_have_sizes_of_powers_of_two_and_few_classes():
    automaton, starts = token_automaton([".{1,300}"], vocabulary(), stop_ids=STOPS, most_tokens=TOKENS)
    states, classes = automaton.table.shape
    assert states == 4096 and classes <= 32 and automaton.classes.shape == (VOCABULARY,)
    assert automaton.distance[starts[0]] == 1 and (automaton.distance[2402:] == NEVER).all()

"""Decoding in slots: no option of it changes what a row samples, and each takes the steps that it should."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.generate import Decoding, Sampling
from tests.helpers import decoding as dec
from tests.helpers import slot_steps
from tests.helpers.decoding import COLUMNS, GROUP, PROMPTS, ROWS, SAMPLING, TOKENS, VOCABULARY

PLAIN = Decoding(block=1000)
EVERYTHING = Decoding(block=8, slots=ROWS // 2, shrink=True, draft="ngram", draft_tokens=3)
OPTIONS = {
    "blocks": Decoding(block=8),
    "shrinking": Decoding(block=16, shrink=True),
    "half as many slots": Decoding(block=16, slots=ROWS // 2, refill=0.25),
    "a quarter, refilled one by one": Decoding(slots=ROWS // 4, refill=1 / ROWS),
    "slots that do not divide the rows, refilled together": Decoding(slots=5, refill=1.0),
    "one slot": Decoding(slots=1),
    "more slots than rows": Decoding(slots=3 * ROWS, shrink=True, block=7),
    "drafts": Decoding(block=16, draft="ngram"),
    "everything": EVERYTHING,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a rollout is given but for its options."""

    seed: int
    shift: int  # which of the model's tokens are the stop tokens
    limits: tuple[int, ...]
    lengths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def data(self):
        options = {"limits": np.array(self.limits), "expected": np.array(self.order), "seed": self.seed}
        return dec.prompts_of(self.seed, self.lengths), options


def params_of(name: str, shift: int):
    model, params = dec.model_of(name)
    if "embed_out" in params:
        params = {**params, "embed_out": {"kernel": jnp.roll(params["embed_out"]["kernel"], shift, axis=1)}}
    return model, params


# Most rows are of a few tokens, some of all.
some_limits = st.one_of(st.integers(1, TOKENS), st.sampled_from([1, 2, TOKENS, TOKENS + 5]))
cases = st.builds(
    Case,
    seed=st.integers(0, 10**6),
    shift=st.integers(0, VOCABULARY - 1),
    limits=st.tuples(*[some_limits] * ROWS),
    lengths=st.tuples(*[st.integers(1, COLUMNS)] * PROMPTS),
    order=st.permutations(range(ROWS)).map(tuple),
)
ONE = Case(0, 0, (TOKENS,) * 4 + tuple(range(1, ROWS - 3)), (COLUMNS, 1, 5, 7, 2, 9, 12, 4), tuple(range(ROWS)))
few = settings(max_examples=4, deadline=None, derandomize=True)


@functools.lru_cache(maxsize=64)
def plain(case: Case):
    model, params = params_of("gpt_neox", case.shift)
    prompts, options = case.data
    out, steps = dec.decode(model, params, prompts, PLAIN, **options)
    dec.assert_follows(model, params, out, options["limits"], seed=case.seed)
    return out, steps


def test_simulated_steps_are_those_by_hand():
    # 2 slots with rows of 4, 1, 2 and 8 steps: one ends after a step, two after two more, the last after eight.
    assert slot_steps.refill([5, 2, 3, 9], 2) == (1 + 2 + 8, 2 * 11)
    assert slot_steps.refill([9, 5, 3, 2], 2) == (8, 16)
    # 2 of 4 slots wait for each other: the two rows that end after 1 and 3 steps are replaced together.
    assert slot_steps.refill([2, 4, 10, 10, 3, 3], 4, 0.5) == (9, 36)
    assert slot_steps.refill([2, 4, 10, 10, 9, 1], 4, 0.25).steps == 1 + 8
    # 16 slots for a step, 8 for nine more.
    assert slot_steps.refill([2] * 8 + [11] * 8, 16, shrink=True) == (10, 16 + 9 * 8)


def simulated(lengths, expected, decoding):
    order = np.argsort(-np.asarray(expected, np.float32), kind="stable")
    slots = decoding.slots or len(lengths)
    return slot_steps.refill(list(lengths[order]), slots, decoding.refill, decoding.shrink)


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_changes_tokens_or_logprobs_and_each_takes_the_simulated_steps(name):
    decoding = OPTIONS[name]

    @few
    @given(case=cases)
    def check(case):
        wanted, _ = plain(case)
        model, params = params_of("gpt_neox", case.shift)
        prompts, options = case.data
        out, steps = dec.decode(model, params, prompts, decoding, **options)
        dec.assert_same(model, params, out, wanted, seed=case.seed)
        expected = simulated(out.lengths, case.order, decoding)
        if decoding.draft is None:
            assert (int(steps.steps[0]), int(steps.slot_steps[0])) == expected
        else:
            assert int(steps.steps[0]) <= 1.2 * expected.steps  # refills come at other times

    check()


def test_rows_stop_by_themselves_and_at_limits_in_what_is_compared():
    out, steps = plain(ONE)
    limits = np.minimum(ONE.limits, TOKENS)
    assert out.ended.any() and (~out.ended & (out.lengths == TOKENS)).any()
    assert (~out.ended & (out.lengths == limits) & (limits < TOKENS)).any() and (out.lengths == 1).any()
    assert int(steps.steps[0]) == max(out.lengths) - 1


@few
@given(case=cases, row=st.integers(0, ROWS - 1))
def test_each_row_is_that_of_the_row_alone(case, row):
    wanted, _ = plain(case)
    model, params = params_of("gpt_neox", case.shift)
    prompts, options = case.data
    prompt = jax.tree.map(lambda x: x[row // GROUP, None], prompts)
    limits = options["limits"][[row]]
    alone, _ = dec.decode(model, params, prompt, Decoding(block=8), limits=limits, rows=[row], group=1, seed=case.seed)
    dec.assert_same(model, params, alone, jax.tree.map(lambda x: x[[row]], wanted), rows=[row], seed=case.seed)


@few
@given(case=cases)
def test_chunks_of_prompts_change_nothing(case):
    wanted, _ = plain(case)
    model, params = params_of("gpt_neox", case.shift)
    prompts, options = case.data
    out, _ = dec.decode(model, params, prompts, Decoding(block=8, slots=3), chunk=PROMPTS // 2, **options)
    dec.assert_same(model, params, out, wanted, seed=case.seed)


@few
@given(case=cases)
def test_rows_of_different_prompts_refill_slots_without_groups(case):
    model, params = params_of("gpt_neox", case.shift)
    prompts, limits = dec.prompts_of(case.seed, case.lengths), np.array(case.limits[:PROMPTS])
    decoding = Decoding(block=8, slots=3, draft="ngram")
    options = {"limits": limits, "expected": case.order[:PROMPTS], "seed": case.seed, "group": 1}
    out, _ = dec.decode(model, params, prompts, decoding, **options)
    dec.assert_follows(model, params, out, limits, seed=case.seed)


@pytest.mark.parametrize("decoding", [Decoding(block=4), EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_windows_shorter_than_the_text_are_those_of_a_forward_pass(name, decoding):
    model, params = dec.model_of(name)

    @few
    @given(case=cases)
    def check(case):
        prompts, options = case.data
        out, _ = dec.decode(model, params, prompts, decoding, **options)
        dec.assert_follows(model, params, out, options["limits"], seed=case.seed)

    check()
    long, _ = dec.decode(model, params, dec.prompts_of(1), decoding)
    dec.assert_follows(model, params, long, TOKENS)
    assert max(long.lengths) > 2 * max(window or 0 for window in model.config.layer_window)


@pytest.mark.parametrize(
    "sampling",
    [
        dataclasses.replace(SAMPLING, repetition_penalty=1.3),
        dataclasses.replace(SAMPLING, temperature=0.0),
    ],
    ids=["repetition penalty", "greedy"],
)
def test_drafts_in_refilled_slots_keep_the_repetition_penalty_and_the_greedy_choice(sampling):
    model, params = dec.model_of("gpt_neox")

    @few
    @given(case=cases)
    def check(case):
        prompts, options = case.data
        out, _ = dec.decode(model, params, prompts, EVERYTHING, sampling=sampling, **options)
        dec.assert_follows(model, params, out, options["limits"], seed=case.seed, sampling=sampling)

    check()


AFTER = np.arange(VOCABULARY).reshape(-1, 4)[:, [1, 2, 3, 0]].ravel()
"""Of a model whose text repeats: after token 4 i + j comes 4 i + (j + 1) mod 4."""


def repeating():
    model, params = dec.model_of("gpt_neox")
    table = 100 * params["backbone"]["embed_in"]["embedding"]
    params = {**params, "embed_out": {"kernel": jnp.zeros_like(table).at[AFTER].set(table).T}}
    return model, {**params, "backbone": {**params["backbone"], "embed_in": {"embedding": table}}}


def test_drafts_of_a_text_that_repeats_take_fewer_steps():
    # With the pair before it a token is known from the sixth on.
    model, params = repeating()
    sampling, prompts = Sampling(TOKENS, 0.0), dec.prompts_of(0)
    for count in (1, 4):
        decoding = Decoding(draft="ngram", draft_tokens=count)
        out, steps = dec.decode(model, params, prompts, decoding, sampling=sampling)
        last = out.prompt_tokens[:, -1]
        for t in range(TOKENS):
            last = AFTER[last]
            np.testing.assert_array_equal(out.response[:, t], last)
        assert int(steps.steps[0]) <= 4 + -(-(TOKENS - 5) // (1 + count))


def test_a_stop_token_among_right_drafts_ends_its_row():
    model, params = repeating()
    prompts = dec.prompts_of(0)
    # Prompt i is 4 i, 4 i + 1, 4 i + 2, 4 i + 3, 4 i, ...: all drafts are right from the first step on.
    tokens = (4 * np.arange(PROMPTS)[:, None] + np.arange(COLUMNS)[None] % 4).astype(np.int32)
    prompts = dataclasses.replace(prompts, tokens=tokens, lengths=np.full_like(prompts.lengths, COLUMNS))
    sampling = Sampling(TOKENS, 0.0, stop_ids=(0, 5, 10, 15), fill_id=9)
    decoding = Decoding(draft="ngram", draft_tokens=4, slots=ROWS // 2)
    out, _ = dec.decode(model, params, prompts, decoding, sampling=sampling)
    dec.assert_follows(model, params, out, TOKENS, sampling=sampling)
    assert out.lengths.reshape(PROMPTS, GROUP)[:, 0].tolist() == [1, 2, 3, 4, *[TOKENS] * 4]


INT8 = 0.02
"""Most that a log-probability of a cache in int8 is off: keys and values keep 7 bits."""


@pytest.mark.parametrize("name", ["gpt_neox", "mistral"])
def test_an_int8_cache_has_nearly_the_logprobs_of_float32_for_its_tokens(name):
    model, params = dec.model_of(name)
    decoding = dataclasses.replace(EVERYTHING, cache_dtype="int8")
    prompts, limits = dec.prompts_of(2), np.array(ONE.limits)
    out, _ = dec.decode(model, params, prompts, decoding, limits=limits)
    logprobs = dec.forward_logprobs(model, params, out)
    chosen = np.take_along_axis(logprobs, out.response[..., None], axis=-1)[..., 0]
    inside = np.arange(TOKENS)[None] < out.lengths[:, None]
    off = np.abs(np.where(inside, out.logprobs - chosen, 0.0)).max()
    assert 1e-5 < off < INT8, off


# --- the comparison itself


def test_a_differing_token_passes_only_on_an_edge_of_the_inverse_cdf():
    logprobs = np.log([0.25, 0.25, 1e-7, 0.5])
    assert dec.on_an_edge(logprobs, 0, 1, 0.25 + 5e-6) and dec.on_an_edge(logprobs, 1, 0, 0.25 - 5e-6)
    assert not dec.on_an_edge(logprobs, 0, 1, 0.2501)
    assert dec.on_an_edge(logprobs, 1, 3, 0.5)  # over a token that hardly has a share
    assert not dec.on_an_edge(logprobs, 0, 3, 0.5) and not dec.on_an_edge(logprobs, 0, 3, 0.25)


def wrong(name, change):
    out, _ = plain(ONE)
    value = getattr(out, name).copy()
    change(value)
    return dataclasses.replace(out, **{name: value})


def set_token(response):
    response[-1, 0] = 11


def spoil_logprob(logprobs):
    logprobs[-1, 0] += 1e-4


def lengthen(lengths):
    lengths[-1] += 1


@pytest.mark.parametrize("name, change", [("response", set_token), ("logprobs", spoil_logprob), ("lengths", lengthen)])
def test_a_wrong_token_logprob_or_length_is_found(name, change):
    model, params = params_of("gpt_neox", 0)
    out, spoilt = plain(ONE)[0], wrong(name, change)
    with pytest.raises(AssertionError):
        dec.assert_follows(model, params, spoilt, np.array(ONE.limits), seed=ONE.seed)
    with pytest.raises(AssertionError):
        dec.assert_same(model, params, spoilt, out, seed=ONE.seed)

"""What a rollout leaves for later ones: lengths by prompt, and responses that go on in the next update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import stages
from rlhf_jax.config import GRPOConfig, PPOConfig, RLOOConfig
from rlhf_jax.config.check import check
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import partial_rollouts
from rlhf_jax.types import Rollout, RolloutState, Unfinished
from tests.helpers.runs import RLOO_OPTIONS, compilations, rollout_of

LENGTH, BATCH, GROUP = 12, 8, 2
OPTIONS = {**RLOO_OPTIONS, "run_dir": None, "num_generations": GROUP, "response_length": LENGTH}
# Ids that random weights sample often, so that lengths differ.
OPTIONS |= {"temperature": 5.0, "stop_token_ids": tuple(range(10, 40))}
PARTIAL = {"rollout_max_steps": 4, "old_logprobs": "sampler"}


def brevity(completion_ids, **_):
    return [-0.1 * len(ids) for ids in completion_ids]


def stage_of(**options):
    return stages.open_stage(RLOOConfig(**{**OPTIONS, **options}), reward_funcs=[brevity])


def by_place(stage, updates):
    """Of each update: rows and responses of the places whose responses are finished, and the state after it."""
    state, found = stage.state, []
    for step in range(updates):
        before = state.rollout.unfinished
        rows = partial_rollouts.rows_of_update(stage.train_data, stage.config.seed, jax.device_get(before))
        state, _, _ = stage.train_step(state, step)
        found.append((rows, jax.device_get(state.rollout.unfinished)))
    return found


@pytest.mark.parametrize("engine", [{}, {"decode_slots": 4, "draft": "ngram"}])
def test_responses_that_go_on_are_those_of_a_rollout_without_a_limit(engine):
    whole = stage_of(learning_rate=0.0)
    prompts = whole.train_data.batch(whole.config.seed, 0, BATCH // GROUP)
    wanted = rollout_of(whole, prompts, group_size=GROUP)
    whole.close()
    assert int(wanted.lengths.max()) > PARTIAL["rollout_max_steps"] + 1, "nothing goes on"
    stage = stage_of(learning_rate=0.0, **PARTIAL, **engine)
    first = np.full(BATCH // GROUP, -1)
    for update, (rows, after) in enumerate(by_place(stage, 10)):
        if update == 0:
            np.testing.assert_array_equal(rows, prompts.rows)
        for place in np.flatnonzero(~after.held & (first < 0)):
            first[place] = update
            own = slice(place * GROUP, (place + 1) * GROUP)
            np.testing.assert_array_equal(after.response[own], np.asarray(wanted.response)[own])
            np.testing.assert_array_equal(after.lengths[own], np.asarray(wanted.lengths)[own])
            np.testing.assert_array_equal(after.ended[own], np.asarray(wanted.ended)[own])
            np.testing.assert_allclose(after.logprobs[own], np.asarray(wanted.logprobs)[own], atol=1e-5)
    assert (first >= 0).all() and len(set(first)) > 1
    assert compilations(stage, ("generate", "experience", "update")) == {"generate": 1, "experience": 1, "update": 1}
    stage.close()


def test_tokens_keep_the_log_probabilities_of_the_policy_that_sampled_them():
    stage = stage_of(learning_rate=3e-2, **PARTIAL)
    went_on, before = 0, None
    for _, after in by_place(stage, 6):
        if before is not None:
            for row in np.flatnonzero(np.repeat(before.held, GROUP)):
                n = before.lengths[row]
                np.testing.assert_array_equal(after.response[row, :n], before.response[row, :n])
                np.testing.assert_array_equal(after.logprobs[row, :n], before.logprobs[row, :n])
                went_on += after.lengths[row] > n
        before = after
    assert went_on > 3
    stage.close()


def test_prompts_are_taken_in_the_order_of_the_data_and_none_is_left_out():
    stage = stage_of(learning_rate=0.0, **PARTIAL)
    taken, held = [], np.zeros(BATCH // GROUP, bool)
    for rows, after in by_place(stage, 8):
        taken += rows[~held].tolist()
        held = after.held
    wanted = np.concatenate([stage.train_data.rows_of(42, step, BATCH // GROUP) for step in range(8)])
    assert taken == wanted[: len(taken)].tolist() and len(taken) > BATCH // GROUP
    stage.close()


def test_an_update_learns_from_finished_groups_alone():
    """Rows that go on have no share in a mean; an update without a finished group changes nothing."""
    stage = stage_of(learning_rate=1e-2, **{**PARTIAL, "rollout_max_steps": 1}, stop_token=None, stop_token_ids=None)
    state = stage.state
    start = jax.device_get(state.params)
    with pytest.warns(UserWarning, match="no response is finished"):
        state, metrics, _ = stage.train_step(state, 0)
    # Lengths of no response would be the start that the alarms of length and eos compare with.
    assert "objective/scores" not in metrics and not [name for name in metrics if "length" in name or "clipped" in name]
    for a, b in zip(*map(jax.tree.leaves, (start, jax.device_get(state.params))), strict=True):
        np.testing.assert_array_equal(a, b)
    stage.close()


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_tokens_stand_beside_their_responses_in_the_tables(beta):
    stage = stage_of(learning_rate=0.0, log_completions=True, beta=beta, **PARTIAL)
    state, tables = stage.state, []
    for step in range(5):
        state, _, _ = stage.train_step(state, step)
        rows, tokens = stage.training_completions()
        assert len(rows) == len(tokens)
        for row, of_tokens in zip(rows, tokens, strict=True):
            assert row["completion"] in "".join(of_tokens["tokens"]).replace("<|endoftext|>", "")
            assert ("kl" in of_tokens) == (beta > 0) and len(of_tokens.get("kl", of_tokens["tokens"])) > 0
        tables.append(len(rows))
    assert 0 < min(filter(None, tables)) < BATCH
    stage.close()


def test_what_is_kept_of_a_rollout_by_hand():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    rollout = Rollout(
        prompt_tokens=jnp.zeros((4, 1), jnp.int32),
        prompt_lengths=jnp.ones(4, jnp.int32),
        response=jnp.zeros((4, 5), jnp.int32),
        lengths=jnp.array([3, 5, 2, 4]),
        ended=jnp.array([True, False, True, False]),
        logprobs=jnp.zeros((4, 5)),
        response_mask=jnp.ones((4, 5), bool),
    )
    before = Unfinished(
        rows=jnp.array([7, 1], jnp.int32),
        held=jnp.array([True, False]),
        response=rollout.response,
        logprobs=rollout.logprobs,
        lengths=rollout.lengths,
        ended=rollout.ended,
        keys=jnp.zeros((4, 2), jnp.uint32),
        taken=jnp.int32(9),
        began=jnp.array([1, 0], jnp.int32),
    )
    keys = jax.random.split(jax.random.key(0), 4)
    state = RolloutState(jnp.full(8, -1.0), before)
    out, after = jax.jit(lambda *args: partial_rollouts.keep(*args, jnp.int32(3), mesh))(
        state, rollout, jnp.array([7, 1], jnp.int32), keys
    )
    assert out.lengths.tolist() == [3, 5, -1, -1]  # 5 is the limit; the row of 4 tokens goes on, and its group with it
    assert after.unfinished.held.tolist() == [False, True] and after.unfinished.rows.tolist() == [7, 1]
    assert after.unfinished.began.tolist() == [1, 3]
    assert after.unfinished.lengths.tolist() == [3, 5, 2, 4] and int(after.unfinished.taken) == 10
    assert after.response_lengths.tolist() == [-1] * 7 + [4.0]
    expected = partial_rollouts.expected_lengths(after.response_lengths, jnp.array([7, 0]), 5)
    assert expected.tolist() == [4.0, 5.0]  # a new prompt may be as long as the limit


def test_the_lengths_of_a_prompt_are_those_of_its_last_visit_and_order_changes_no_token():
    found = []
    for first in (True, False):
        stage = stage_of(decode_slots=4, decode_longest_first=first, max_train_samples=4, learning_rate=1e-2)
        state = stage.state
        for step in range(3):
            rows = stage.train_data.batch(stage.config.seed, step, BATCH // GROUP).rows
            state, metrics, _ = stage.train_step(state, step)
            found.append(jax.device_get(metrics))
            if first:
                lengths = np.asarray(state.rollout.response_lengths)
                assert (lengths > 0).all() and len(rows) == len(lengths)
                assert lengths.mean() == pytest.approx(float(metrics["completions/mean_length"]), rel=1e-6)
            else:
                assert state.rollout is None
        stage.close()
    for a, b in zip(found[:3], found[3:]):
        for name in ("completions/mean_length", "objective/scores", "grad_norm"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RLOOConfig(decode_slots=1000, batch_size=8), "decode_slots 1000 exceeds batch_size 8"),
        (RLOOConfig(decode_slots=4, batch_size=8, rollout_batch_size=4), "Remove rollout_batch_size"),
        (RLOOConfig(rollout_max_steps=9), "needs old_logprobs sampler"),
        (GRPOConfig(kv_cache_dtype="int8"), "with importance_sampling_correction true"),
        (PPOConfig(kv_cache_dtype="int8"), "use kv_cache_dtype auto"),
        (
            RLOOConfig(rollout_max_steps=9, old_logprobs="sampler", batch_size=8, rollout_batch_size=4),
            "decode_slots bounds the memory",
        ),
    ],
)
def test_options_of_decoding_that_exclude_each_other_are_named(config, said):
    with pytest.raises(UserError, match=said):
        check(config)

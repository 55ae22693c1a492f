"""Rewards that fail in a run: what it says, what it keeps, how it continues; and rows without a score."""

import functools
import os
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax
from rlhf_jax import models
from rlhf_jax.config import PPOConfig
from rlhf_jax.rewards import RewardFailure
from rlhf_jax.trainers import forward, ppo
from rlhf_jax.types import Rollout, TrainState
from tests import reward_runs
from tests.models_common import assert_trees_equal, distance, random_params
from tests.reward_runs import B, Watch, bytes_of, compiled_once, judge, leave_one_out, lines, rloo, table  # noqa: F401
from tests.reward_server import Server, answers, closes, hangs, takes

# --- servers that fail

QUICK = {"reward_server_batch_size": 4, "reward_server_retries": 1, "reward_server_timeout": 5.0}


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def unfailing(tmp_path_factory):
    """(RLOO's run, PPO's run) with a server that never failed."""
    server, folder = Server(), tmp_path_factory.mktemp("unfailing")
    results = [
        rlhf_jax.run(config(folder / config.__name__, reward_server=server.url, **QUICK))
        for config in (rloo, reward_runs.ppo)
    ]
    server.close()
    return results


NOT_A_NUMBER = b'{"scores": [1.0, NaN, 2.0, 3.0]}'
FAULTS = {
    "500": (lambda _: answers(500, {"error": "no memory"}), r"status 500 .*no memory.*; tried 2 times\. Row [04]: "),
    "429": (lambda _: answers(429, {}, Retry_After="0.05"), r"status 429 .*; tried 2 times\. Row [04]: prompt"),
    "hangs": (hangs, r"no whole answer within 1 s; tried 2 times\. Row [04]: prompt"),
    "closes": (lambda _: closes, r"no answer \(.*; tried 2 times\. Row [04]: prompt"),
    "wrong count": (lambda _: answers(200, {"scores": [1.0]}), r"1 scores for 4 rows: .* Row [04]: prompt"),
    "NaN": (lambda _: answers(200, NOT_A_NUMBER), r"a score of nan; .* Row [15]: prompt '.*', completion '"),
    "text": (lambda _: answers(200, {"scores": ["good"] * 4}), r"a score of 'good'; .* Row [04]: prompt"),
}


def options_of(fault, server):
    return {**QUICK, "reward_server": server.url, "reward_server_timeout": 1.0 if fault == "hangs" else 5.0}


def assert_first_update_is_kept(folder, whole):
    assert bytes_of(folder).splitlines() == bytes_of(whole.run_dir).splitlines()[:1]
    assert os.listdir(folder / "checkpoints") == ["1"]
    assert os.listdir(folder / "completions") == ["training_1.jsonl"]
    assert not os.path.exists(folder / "policy") and not os.path.exists(folder / "finished.json")


def assert_same_run(result, whole):
    assert bytes_of(result.run_dir) == bytes_of(whole.run_dir)
    assert bytes_of(result.paths["policy"], "model.safetensors") == bytes_of(whole.paths["policy"], "model.safetensors")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_server_ends_the_run_which_continues_with_a_healed_one(fault, server, unfailing, tmp_path, capsys):
    trouble, said = FAULTS[fault]
    config = rloo(tmp_path / "run", **options_of(fault, server))
    server.script.extend([takes(0)] * 2)  # an update asks twice
    server.forever = trouble(server)
    with pytest.raises(RewardFailure, match=f"^reward server {re.escape(server.url)}: .*{said}"):
        rlhf_jax.run(config)
    assert len(server.requests) <= 2 + 2 * 2
    assert_first_update_is_kept(tmp_path / "run", unfailing[0])
    server.forever = None
    assert_same_run(rlhf_jax.run(config), unfailing[0])
    assert "continuing after update 1 of 3" in capsys.readouterr().out


def test_ppo_continues_after_a_failing_server_too(server, unfailing, tmp_path):
    config = reward_runs.ppo(tmp_path / "run", **options_of("500", server))
    server.script.extend([takes(0)] * 2)
    server.forever = answers(500, "down")
    with pytest.raises(RewardFailure, match=re.escape(server.url)):
        rlhf_jax.run(config)
    assert_first_update_is_kept(tmp_path / "run", unfailing[1])
    server.forever = None
    assert_same_run(rlhf_jax.run(config), unfailing[1])


@pytest.mark.parametrize("failure", ["raise", "drop"])
def test_what_heals_within_the_retries_changes_nothing(failure, server, unfailing, tmp_path):
    config = rloo(tmp_path / "run", reward_failure=failure, **options_of("500", server))
    server.script.extend([answers(500, "busy"), takes(0), takes(0), answers(429, {}, Retry_After="0.1"), closes])
    result = rlhf_jax.run(config)
    assert len(server.requests) == 6 + 3
    if failure == "raise":
        assert_same_run(result, unfailing[0])
    else:
        plain = [{**line, "rewards/dropped": 0.0} for line in lines(unfailing[0].run_dir)]
        assert lines(result.run_dir) == plain


PLANS = [(None, "500", "429"), ("hangs", "closes", "wrong count"), ("NaN", "text", None)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: ", ".join(fault or "fine" for fault in plan))
def test_dropped_rows_are_counted_and_teach_nothing_and_the_run_goes_on(plan, server, tmp_path):
    options = {**options_of(plan[0], server), "reward_failure": "drop"}

    def prepare(step):
        server.forever = FAULTS[plan[step]][0](server) if plan[step] else None

    watch = Watch(prepare)
    with pytest.warns(UserWarning) as warned:
        result = rlhf_jax.run(rloo(tmp_path / "run", **options), callbacks=[watch])
    found = lines(result.run_dir)
    assert [line["rewards/dropped"] for line in found] == [B if fault else 0 for fault in plan]
    assert watch.moved == [fault is None for fault in plan]
    assert [line["episode"] for line in found] == [B, 2 * B, 3 * B]
    said = [str(warning.message) for warning in warned]
    told = [text for text in said if text.startswith(f"reward server {server.url}: ")]
    for text, fault in zip(told, filter(None, plan), strict=True):
        assert re.search(FAULTS[fault][1], text) and text.endswith("; its rows are left out")
    nothing = [text for text in said if text.endswith("no response has a score; nothing is learned from it")]
    assert [text.partition(":")[0] for text in nothing] == [f"update {i}" for i, f in enumerate(plan, 1) if f]


# --- functions that fail


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A run whose function never failed."""
    return rlhf_jax.run(rloo(tmp_path_factory.mktemp("runs") / "judged"), reward_funcs=judge)


def troubled(trouble):
    """`judge`, but for update 2."""

    def judge(prompts, completions, trainer_state, **_):
        found = reward_runs.judge(prompts, completions)
        return trouble(found) if trainer_state.global_step == 1 else found

    return judge


@pytest.mark.parametrize("fault", ["raises", "hangs", "returns NaN"])
def test_a_failing_function_is_named_and_what_was_done_is_kept(fault, judged, tmp_path):
    free = threading.Event()
    trouble, said = {
        "raises": (lambda found: {}["key"], rf"raised KeyError: 'key' \({re.escape(__file__)}, line \d+\)"),
        "hangs": (lambda found: free.wait(60), r"gave no answer within 1 s\. Row 0: prompt '.*', completion '"),
        "returns NaN": (
            lambda found: [*found[:3], float("nan"), *found[4:]],
            r"returned nan for row 3\. .* Row 3: prompt '.*', completion '",
        ),
    }[fault]
    config = rloo(tmp_path / "run", reward_timeout=1.0)
    with pytest.raises(RewardFailure, match=f"^reward function judge {said}"):
        rlhf_jax.run(config, reward_funcs=troubled(trouble))
    free.set()
    assert_first_update_is_kept(tmp_path / "run", judged)
    assert_same_run(rlhf_jax.run(config, reward_funcs=judge), judged)


# --- rows without a score


def test_rows_that_no_function_scores_are_shown_and_left_out(tmp_path):
    def picky(prompts, completions, trainer_state, **_):
        found = judge(prompts, completions)
        return {0: found, 1: [None, *found[1:]], 2: [None] * B}[trainer_state.global_step]

    watch = Watch()
    with pytest.warns(UserWarning) as warned:
        result = rlhf_jax.run(rloo(tmp_path / "run"), reward_funcs=picky, callbacks=[watch])
    rows, found = table(result.run_dir, 2), lines(result.run_dir)
    said = [str(warning.message) for warning in warned if "None" in str(warning.message)]
    assert [text.partition(",")[0] for text in said] == [
        f"every reward function returned None for {count} of {B} rows" for count in (1, B)
    ]
    first = f"Row 0: prompt {rows['prompt'][0]!r}, completion {rows['completion'][0]!r}"
    assert first in said[0]
    assert np.isnan(rows["picky"]).tolist() == [True] + [False] * (B - 1)
    np.testing.assert_allclose(rows["advantage"], leave_one_out(rows["picky"]), rtol=1e-4, atol=1e-6)
    assert rows["advantage"][0] == 0 and np.abs(rows["advantage"][1:]).max() > 0
    wanted = np.nanmean(judge(rows["prompt"], rows["completion"])[1:])
    np.testing.assert_allclose([found[1]["rewards/picky/mean"], found[1]["reward"]], wanted, rtol=1e-5)
    assert np.isnan(found[2]["rewards/picky/mean"]) and watch.moved == [True, True, False]


V, C, N, T = 61, 5, 6, 7
EOS = 3
SCORABLE = np.array([True, False, True, True, False, True])
MODEL = models.custom_shape("1x16x2", V, 64)
NETS = forward.Networks(MODEL, MODEL, MODEL)


def batch_of_responses():
    """(rollout, scores), with lengths of every kind in scored and unscored rows."""
    rng = np.random.default_rng(0)
    lengths = np.array([0, 4, T, 1, T, 3])
    ended = np.array([False, True, False, True, True, True])
    response = np.where(np.arange(T)[None] < lengths[:, None], rng.integers(4, V, (N, T)), EOS)
    response[ended, lengths[ended] - 1] = EOS
    rollout = Rollout(
        prompt_tokens=jnp.asarray(rng.integers(4, V, (N, C)), jnp.int32),
        prompt_lengths=jnp.array([5, 2, 3, 1, 5, 4], jnp.int32),
        response=jnp.asarray(response, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        ended=jnp.asarray(ended),
        logprobs=jnp.asarray(rng.normal(size=(N, T)) - 3, jnp.float32),
        response_mask=jnp.ones((N, T), bool),
    )
    return rollout, jnp.asarray(rng.normal(size=N), jnp.float32)


OF_TOKENS = PPOConfig(response_length=T, whiten_rewards=True, missing_eos_penalty=1.0, old_logprobs="sampler")
OF_SEQUENCES = PPOConfig(
    response_length=T, score_position="eos", whiten_ddof=0, loss_aggregation="seq_mean", num_mini_batches=2
)


@functools.cache
def ppo_programs(config):
    """make_experience, and an update by plain gradient descent, at the same params."""
    params = {
        "policy": random_params(MODEL, ("causal",), 0),
        "value": random_params(MODEL, ("scalar",), 1),
    }
    ref, kl_coef = random_params(MODEL, ("causal",), 2), jnp.float32(config.kl_coef)

    def experience(rollout, scores, scorable):
        return ppo.make_experience(
            NETS, params, ref, rollout, scores, kl_coef, config, EOS, scorable=jnp.asarray(scorable)
        )

    def update(experience):
        zero, optimizer = jnp.int32(0), optax.identity()
        state = TrainState(params, optimizer.init(params), zero, zero, jnp.uint32(0), kl_coef, jnp.uint32(0))
        shuffles = jnp.tile(jnp.arange(experience.lengths.shape[0]), (config.num_ppo_epochs, 1))
        state, found = ppo.update(NETS, optimizer, state, experience, shuffles, jnp.float32(0.1), config)
        return jax.tree.map(jnp.subtract, state.params, params), found

    return jax.jit(experience), jax.jit(update)


@pytest.mark.parametrize("config", [OF_TOKENS, OF_SEQUENCES], ids=["tokens", "sequences"])
def test_ppo_never_reads_a_row_without_a_score(config):
    experience, update = ppo_programs(config)
    rollout, scores = batch_of_responses()
    garbage = np.random.default_rng(1)

    def spoilt(rows):
        """The batch with nonsense in some rows; when the responses ended stays, as lengths are told of all."""
        other = rollout.replace(
            response=jnp.asarray(garbage.integers(4, V, (N, T)), jnp.int32),
            logprobs=jnp.asarray(garbage.normal(size=(N, T)) * 50, jnp.float32),
        )
        mixed = jax.tree.map(lambda a, b: jnp.where(rows.reshape((N,) + (1,) * (a.ndim - 1)), b, a), rollout, other)
        return mixed, jnp.where(rows, jnp.array([1e9, jnp.nan, -jnp.inf] * 2), scores)

    clean, found = experience(rollout, scores, SCORABLE)
    dirty, found_dirty = experience(*spoilt(jnp.asarray(~SCORABLE)), SCORABLE)
    assert_trees_equal(found_dirty, found)
    for name in ("logprobs", "values", "advantages", "returns"):
        np.testing.assert_array_equal(getattr(dirty, name)[SCORABLE], getattr(clean, name)[SCORABLE])
    (step, learned), (step_dirty, learned_dirty) = update(clean), update(dirty)
    assert_trees_equal((step_dirty, learned_dirty), (step, learned))
    assert min(np.abs(x).max() for x in jax.tree.leaves(step)) > 0
    # It is the mark that protects: scored, the same rows change nearly everything.
    _, read = experience(rollout, scores, np.ones(N, bool))
    changed = {name for name in found if not np.array_equal(read[name], found[name])}
    assert {"objective/kl", "objective/entropy", "objective/scores", "objective/scores_std"} <= changed


def test_ppo_learns_of_the_scored_rows_what_it_learns_of_them_alone():
    experience, update = ppo_programs(OF_TOKENS)
    rollout, scores = batch_of_responses()
    made, found = experience(rollout, scores, SCORABLE)
    alone, wanted = experience(jax.tree.map(lambda x: x[SCORABLE], rollout), scores[SCORABLE], np.ones(4, bool))
    of_all_responses = ("val/num_eos_tokens", "val/response_length")
    for name in set(wanted) - set(of_all_responses):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert float(found["val/num_eos_tokens"]) == 4.0 and float(wanted["val/num_eos_tokens"]) == 2.0
    np.testing.assert_allclose(made.advantages[SCORABLE], alone.advantages, rtol=1e-4, atol=1e-5)
    (step, learned), (step_alone, learned_alone) = update(made), update(alone)
    assert max(jax.tree.leaves(jax.tree.map(distance, step, step_alone))) < 1e-4
    for name in set(learned) - {"val/first_ratio_error", "policy/first_approxkl"}:
        np.testing.assert_allclose(learned[name], learned_alone[name], rtol=1e-4, atol=1e-6, err_msg=name)

"""Rewards of every kind drive real runs to their end: what is logged is what they say of the recorded responses."""

import asyncio
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import data, models
from rlhf_jax.algorithms import reward_model
from rlhf_jax.models.io import hf
from tests.helpers.reward_runs import B, T, assert_learned_from, judge, means, rloo, table
from tests.helpers.reward_server import serving
from tests.helpers.runs import lines


def assert_driven(result, name, said, updates=3):
    """Each update's mean and deviation, and the table, are what `said` makes of the recorded rows."""
    found = lines(result.run_dir)
    assert [line["step"] for line in found] == list(range(1, updates + 1))
    assert os.path.exists(os.path.join(result.run_dir, "finished.json")) and os.path.isdir(result.paths["policy"])
    every = []
    for line in found:
        rows = table(result.run_dir, line["step"])
        wanted = np.array(said(rows), np.float64)
        np.testing.assert_allclose(rows[name], wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(line[f"rewards/{name}/mean"], wanted.mean(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(line[f"rewards/{name}/std"], wanted.std(ddof=1), rtol=1e-4, atol=1e-5)
        every.extend(wanted)
    assert np.ptp(every) > 0.05  # it does tell responses apart


async def patient(prompts, completions, **_):
    await asyncio.sleep(0.01)
    return [float(len(completion)) / 10 if "a" in completion else None for completion in completions]


@rlhf_jax.jax_reward
def even(tokens, lengths):
    inside = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    return jnp.sum((tokens % 2 == 0) & inside, axis=1).astype(jnp.float32) / jnp.maximum(lengths, 1)


@rlhf_jax.jax_reward
def dense(tokens, lengths):
    return jnp.where(tokens % 3 == 0, 0.5, -0.25)  # beyond the end too, where nobody may read it


def recorder(completion_ids, log_extra, **_):
    """Says nothing of a response, but keeps its ids: some have no text."""
    log_extra("ids", completion_ids)
    return [0.0] * len(completion_ids)


# --- one reward


def test_a_plain_function_drives_a_run(golden_rloo):
    assert_driven(golden_rloo, "judge", lambda rows: judge(rows["prompt"], rows["completion"]))
    assert_learned_from(golden_rloo, lambda rows: rows["judge"])


def test_an_async_function_drives_a_run(tmp_path):
    async def unhurried(prompts, completions):
        await asyncio.sleep(0.01)
        return judge(prompts, completions)

    result = rlhf_jax.run(rloo(tmp_path / "run"), reward_funcs=[unhurried])
    assert_driven(result, "unhurried", lambda rows: judge(rows["prompt"], rows["completion"]))
    assert_learned_from(result, lambda rows: rows["unhurried"])


@pytest.mark.parametrize("function", [even, dense], ids=["a response", "a token"])
def test_a_jax_function_drives_a_run(function, tmp_path):
    def said(rows):
        padded = jnp.array([row + [0] * (T - len(row)) for row in rows["ids"]])
        found = np.asarray(function(padded, jnp.array([len(row) for row in rows["ids"]])))
        return found if found.ndim == 1 else [x[: len(row)].sum() for x, row in zip(found, rows["ids"])]

    config = rloo(tmp_path / "run", reward_weights=(2.0, 0.0))
    result = rlhf_jax.run(config, reward_funcs=[function, recorder])
    assert_driven(result, function.__name__, said)
    assert_learned_from(result, lambda rows: 2.0 * np.array(said(rows)))
    # Nothing comes to the host when it is alone; the responses are the same.
    alone = rlhf_jax.run(rloo(tmp_path / "alone", reward_weights=(2.0,)), reward_funcs=function)
    np.testing.assert_allclose(means(alone, function.__name__), means(result, function.__name__), rtol=1e-5)


# --- reward models and servers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two reward models, and a policy that ends nearly every response early."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), data.load_tokenizer("synthetic")
    rows = 128  # as many as a model from scratch has: it may sample ids that are no token's
    model = models.custom_shape("1x16x2", vocab_size=rows, max_positions=96)
    paths = {name: str(folder / name) for name in ("one", "two", "policy")}
    for seed, name in enumerate(("one", "two")):
        params = jax.device_get(model.init(jax.random.key(seed), heads=("scalar",), score_std=1.0))
        hf.save(paths[name], model, params, kind="scalar")
    params = jax.device_get(model.init(jax.random.key(2), heads=("causal",)))
    towards_eos = params["embed_out"]["kernel"][:, tokenizer.eos_id]
    params["backbone"]["final_layer_norm"]["bias"] = 6.0 * towards_eos / np.square(towards_eos).sum()
    hf.save(paths["policy"], model, params, kind="causal")
    for path in paths.values():
        data.save_tokenizer(tokenizer, path)
    return paths


def scores_by_hand(path, rows):
    """[B] of a reward model that reads the sampled ids."""
    model, params = hf.load(path, kind="scalar")
    tokenizer = data.load_tokenizer(path)
    ids = [tokenizer.encode(prompt) + own for prompt, own in zip(rows["prompt"], rows["ids"])]
    tokens = np.full((len(ids), 96), tokenizer.pad_id, np.int32)
    for row, own in enumerate(ids):
        tokens[row, : len(own)] = own
    lengths = np.array([len(own) for own in ids], np.int32)
    return np.asarray(reward_model.score_texts(model, params, tokens, lengths, dtype=jnp.float32))


def test_an_ensemble_of_reward_models_drives_a_run(checkpoints, tmp_path):
    ensemble = {
        "reward_model_path": checkpoints["one"],
        "more_reward_models": (checkpoints["two"],),
        "reward_ensemble": "mean_minus_std",
        "reward_ensemble_std_coef": 0.5,
        "reward_weights": (1.0, 0.0),
    }
    result = rlhf_jax.run(rloo(tmp_path / "run", **ensemble), reward_funcs=recorder)

    def said(rows):
        each = np.array([scores_by_hand(checkpoints[name], rows) for name in ("one", "two")])
        return each.mean(axis=0) - 0.5 * each.std(axis=0)

    assert_driven(result, "ensemble_mean_minus_std", said)
    assert_learned_from(result, said)


def test_a_served_model_gives_the_rewards_of_the_model_itself(checkpoints, tmp_path):
    # A server cannot know which responses ended, and closes each text with eos; so let all end.
    policy = {"sft_model_path": checkpoints["policy"], "scratch_model": None, "tokenizer_name_or_path": None}
    policy["learning_rate"] = 1e-4
    model = {"reward_model_path": checkpoints["one"], "reward_input": "text"}
    of_model = rlhf_jax.run(rloo(tmp_path / "model", **policy, **model))
    with serving(checkpoints["one"], "--max_batch", "4", "--no_token") as url:
        of_server = rlhf_jax.run(rloo(tmp_path / "server", **policy, reward_server=url, reward_server_batch_size=3))
    ended = [line["completions/clipped_ratio"] for line in lines(of_server.run_dir)]
    assert ended == [0.0] * 3 and lines(of_server.run_dir)[0]["completions/max_length"] > 1
    np.testing.assert_allclose(means(of_server, "server"), means(of_model, "one"), rtol=1e-4, atol=1e-5)
    assert_driven(of_server, "server", lambda rows: rows["server"])
    for step in (1, 2, 3):
        served, own = table(of_server.run_dir, step), table(of_model.run_dir, step)
        assert served["completion"] == own["completion"]
        np.testing.assert_allclose(served["server"], own["one"], rtol=1e-4, atol=1e-5)


# --- several


def test_the_score_is_the_weighted_sum_of_all_that_apply(checkpoints, tmp_path):
    weights = {"one": 1.5, "judge": -0.5, "patient": 2.0, "even": 0.25, "recorder": 1.0}
    config = rloo(tmp_path / "run", reward_model_path=checkpoints["one"], reward_weights=tuple(weights.values()))
    result = rlhf_jax.run(config, reward_funcs=[judge, patient, even, recorder])

    def scores(rows):
        return sum(weight * np.nan_to_num(np.array(rows[name])) for name, weight in weights.items())

    assert_learned_from(result, scores)
    missing = 0
    for line in lines(result.run_dir):
        rows = table(result.run_dir, line["step"])
        np.testing.assert_allclose(line["reward"], scores(rows).mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rows["one"], scores_by_hand(checkpoints["one"], rows), rtol=1e-5, atol=1e-5)
        said = asyncio.run(patient(rows["prompt"], rows["completion"]))
        missing += said.count(None)
        np.testing.assert_allclose(rows["patient"], np.array(said, np.float64), rtol=1e-6)
        np.testing.assert_allclose(line["rewards/patient/mean"], np.nanmean(rows["patient"]), rtol=1e-5)
    assert 0 < missing < 3 * B

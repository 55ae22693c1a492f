"""Runs in which something is not finite: they stop or skip, say why, keep the rows, and go on from what is whole."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax
from rlhf_jax import train
from rlhf_jax.algorithms import sft
from rlhf_jax.config import RewardConfig, SFTConfig
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.runtime.callbacks import Callback
from rlhf_jax.runtime.monitor import NonFinite
from rlhf_jax.utils.strict_json import with_floats
from tests.helpers.arrays import same_bits
from tests.helpers.reward_runs import SHARED, B, bytes_of, copied, ppo, rloo
from tests.helpers.runs import Killed, compilations, lines

pytestmark = pytest.mark.runs

TEXTS = {
    **{name: SHARED[name] for name in ("tokenizer_name_or_path", "dataset_test_split", "learning_rate", "report_to")},
    **{"model_name_or_path": None, "scratch_model": "2x32x4", "query_length": 24, "max_length": 32},
    **{"length_buckets": (32,), "batch_size": 4, "max_steps": 4, "save_steps": 0},
}


def rows_of(folder, step):
    return [json.loads(line) for line in bytes_of(folder, f"nonfinite/{step}.jsonl").splitlines()]


def finite_weights(path, kind="causal"):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(hf.load(path, kind=kind)[1])))


class Meddler(Callback):
    """Keeps the state before the first update and after each, and may change what a stage's rewards or data say."""

    def __init__(self, scores=None, prepare=lambda stage: None):
        self.scores, self.prepare = scores or {}, prepare
        self.stage, self.states, self.seen = None, [], []

    def on_train_begin(self, stage, control):
        self.stage = stage
        self.prepare(stage)
        learn, step_of = stage.train_step, [0]
        self.states.append(copied(stage.state))

        def train_step(state, step, *tick):
            step_of[0] = step + 1
            state, *others = learn(state, step, *tick)
            self.states.append(copied(state))
            return state, *others

        stage.train_step = train_step
        if hasattr(stage, "scorer"):
            real = stage.scorer.score

            def score(*args, **options):
                scored = real(*args, **options)
                if step_of[0] not in self.scores:
                    return scored
                row, value = self.scores[step_of[0]]
                return dataclasses.replace(scored, scores=scored.scores.at[row].set(value))

            stage.scorer.score = score

    def on_step_end(self, step, found, control):
        self.seen.append(step)

    def kept(self, update):
        """Whether an update left params, optimizer state and reference as they were, bit for bit."""
        names = ("params", "opt_state", "ref_params", "kl_coef")
        before, after = self.states[update - 1 : update + 1]
        return same_bits([getattr(before, n) for n in names], [getattr(after, n) for n in names])


@rlhf_jax.jax_reward
def evens(tokens, lengths):
    return jnp.sum(tokens % 2 == 0, axis=1).astype(jnp.float32)


def with_row(value, row=3):
    """A reward on the device that always goes wrong for one row."""

    @rlhf_jax.jax_reward
    def broken(tokens, lengths):
        return jnp.where(jnp.arange(tokens.shape[0]) == row, value, evens(tokens, lengths))

    return broken


OF_PPO = {"value_model": "shared_backbone", "log_completions": False, "num_mini_batches": 2}
OF_RLOO = {"log_completions": False, "beta": 0.05, "num_generations": 2}

# --- PPO and RLOO


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A PPO run in which nothing goes wrong."""
    return rlhf_jax.run(ppo(tmp_path_factory.mktemp("runs") / "good", **OF_PPO), reward_funcs=evens)


def test_a_bad_update_stops_a_run_which_then_goes_on_without_it(good, tmp_path, capsys):
    where, meddler = tmp_path / "run", Meddler({2: (3, jnp.nan)})
    with pytest.raises(NonFinite) as raised:
        rlhf_jax.run(ppo(where, **OF_PPO), reward_funcs=evens, callbacks=[meddler])
    said = str(raised.value)
    assert said.startswith("update 2: a score is not a finite number") and "--on_nonfinite skip" in said
    assert os.path.join("nonfinite", "2.jsonl") in said and (raised.value.update, raised.value.whole) == (2, True)
    # Update 3 had been started before the metrics of update 2 were read; neither has changed anything.
    assert len(meddler.states) == 4 and meddler.kept(2) and meddler.kept(3) and not meddler.kept(1)
    assert meddler.seen == [1, 2]
    for after in meddler.states[2:]:
        assert same_bits(after.replace(nonfinite=np.int32(0)), meddler.states[1]) and int(after.nonfinite) == 1
    # What was written: the line and the rows of the bad update; the checkpoint of the one before it.
    found = lines(where)
    assert [line["step"] for line in found] == [1, 2] and bytes_of(where).splitlines()[0] == bytes_of(
        good.run_dir
    ).splitlines()[0]
    assert found[1]["nonfinite/score"] == found[1]["nonfinite/in_a_row"] == found[1]["nonfinite/updates"] == 1
    assert found[1]["nonfinite/steps_applied"] == 0 and np.isnan(found[1]["objective/scores"])
    assert os.listdir(where / "checkpoints") == ["1"] and os.listdir(where / "nonfinite") == ["2.jsonl"]
    first, *others = rows_of(where, 2)
    assert set(first) == {"row", "prompt", "response", "score", "not_finite"}
    assert first["score"] == "NaN" and first["not_finite"][0] == "score" and "TL;DR:" in first["prompt"]
    assert len(others) == B - 1 and all(row["not_finite"] == ["advantage"] for row in others)  # whitened together
    assert "update 1, which is saved" in capsys.readouterr().out

    # The same command goes on, and is what it would have been: here the reward is healed.
    resumed = rlhf_jax.run(ppo(where, **OF_PPO), reward_funcs=evens)
    assert bytes_of(where) == bytes_of(good.run_dir) and not os.listdir(where / "nonfinite")
    assert bytes_of(resumed.paths["policy"], "model.safetensors") == bytes_of(good.paths["policy"], "model.safetensors")
    assert compilations(meddler.stage) == {"generate": 1, "experience": 1, "update": 1}


@pytest.mark.parametrize("wrong", ["Infinity", "-Infinity"])
def test_a_run_that_skips_goes_on_to_the_end(wrong, tmp_path, capsys):
    """The first update and the last are bad; a clip would make a score of the infinities."""
    value = with_floats({"x": wrong})["x"]
    meddler = Meddler({1: (3, value), 3: (0, value)})
    config = rloo(tmp_path / "run", on_nonfinite="skip", sync_ref_model=True, reward_clip_range=(-9.0, 9.0), **OF_RLOO)
    result = rlhf_jax.run(config, reward_funcs=evens, callbacks=[meddler])
    assert [meddler.kept(update) for update in (1, 2, 3)] == [True, False, True]
    found = lines(result.run_dir)
    assert [line.get("nonfinite/updates") for line in found] == [1, None, 2]
    assert [line.get("nonfinite/in_a_row") for line in found] == [1, 0, 1]
    assert [line["episode"] for line in found] == [B, 2 * B, 3 * B]
    assert [int(state.step) for state in meddler.states] == [0, 1, 2, 3]
    assert sorted(os.listdir(tmp_path / "run" / "nonfinite")) == ["1.jsonl", "3.jsonl"]
    (worst, *_) = rows_of(result.run_dir, 3)
    assert worst["score"] == wrong and "score" in worst["not_finite"]
    assert finite_weights(result.paths["policy"]) and "skipped (1 in a row)" in capsys.readouterr().out
    assert meddler.stage.programs.jitted.update._cache_size() == 1


def test_a_run_that_skips_ends_after_so_many_in_a_row(tmp_path):
    meddler = Meddler({2: (0, jnp.inf), 3: (1, jnp.nan)})
    config = rloo(tmp_path / "run", on_nonfinite="skip", max_nonfinite=2, **{**OF_RLOO, "total_episodes": 6 * B})
    with pytest.raises(NonFinite, match="update 3: a score .* the last of 2 in a row"):
        rlhf_jax.run(config, reward_funcs=evens, callbacks=[meddler])
    assert [int(state.step) for state in meddler.states] == [0, 1, 2, 2, 2]
    assert all(meddler.kept(update) for update in (2, 3, 4))
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["2"]
    # It continues where it was: one bad update is behind it.
    again = Meddler({3: (0, jnp.nan)})
    with pytest.raises(NonFinite, match="update 3"):
        rlhf_jax.run(config, reward_funcs=evens, callbacks=[again])
    more = dataclasses.replace(config, max_nonfinite=3)
    result = rlhf_jax.run(more, reward_funcs=evens, callbacks=[Meddler({3: (0, jnp.nan)})])
    assert [line.get("nonfinite/updates") for line in lines(result.run_dir)] == [None, 1, 2, None, None, None]


def test_a_half_applied_update_is_never_saved(tmp_path, capsys):
    """The second optimizer step of update 2 is bad: the first has moved the params."""
    plain = optax.scale_by_schedule(lambda count: jnp.where(count == 3, jnp.nan, -1e-2))
    for every, kept in ((0, []), (1, ["1"])):
        where, meddler = tmp_path / str(every), Meddler()
        config = rloo(where, num_mini_batches=2, save_steps=every, **OF_RLOO)
        with pytest.raises(NonFinite, match="update 2.*optimizer.*1 optimizer steps") as raised:
            rlhf_jax.run(config, reward_funcs=evens, optimizer=plain, callbacks=[meddler])
        assert not raised.value.whole and os.listdir(where / "checkpoints") == kept
        assert "which is saved" not in capsys.readouterr().out
        half = meddler.states[2]
        assert int(half.nonfinite) == 1 and int(half.step) == 1 and not meddler.kept(2)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(half.params))
        assert len(rows_of(where, 2)) == B  # each by itself is finite


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_reward_on_the_device_is_told_before_anything_is_learned(value, tmp_path):
    meddler = Meddler()
    with pytest.raises(NonFinite, match="update 1.*score"):
        rlhf_jax.run(rloo(tmp_path / "run", **OF_RLOO), reward_funcs=with_row(value), callbacks=[meddler])
    assert meddler.kept(1) and os.listdir(tmp_path / "run" / "checkpoints") == []
    worst = rows_of(tmp_path / "run", 1)[0]
    assert worst["not_finite"][0] == "score" and not np.isfinite(float(worst["score"]))


def test_rows_of_the_device_may_still_be_dropped(tmp_path):
    config = rloo(tmp_path / "run", reward_failure="drop", **OF_RLOO)
    with pytest.warns(UserWarning, match="finite.*1 of 8"):
        result = rlhf_jax.run(config, reward_funcs=with_row(np.nan))
    assert [line["rewards/dropped"] for line in lines(result.run_dir)] == [1, 1, 1]
    assert not any(name.startswith("nonfinite") for line in lines(result.run_dir) for name in line)


# --- SFT and reward models

DEMONSTRATIONS = [{"prompt": "r/family sad", "completion": " lost keys" + " juan" * (i == 9)} for i in range(16)]


def fit(folder, **options):
    return SFTConfig(run_dir=str(folder), **{**TEXTS, **options})


def poison(monkeypatch):
    """The loss of a batch with juan in it is NaN; the update (1-based) whose batch that is."""
    real = sft.token_losses
    stage = rlhf_jax.stages.open_stage(fit("unused"), train_dataset=DEMONSTRATIONS)
    (juan,) = stage.tokenizer.encode(" juan")

    def token_losses(model, params, tokens, lengths, **options):
        return real(model, params, tokens, lengths, **options) + jnp.where(jnp.any(tokens == juan), jnp.nan, 0.0)

    monkeypatch.setattr(sft, "token_losses", token_losses)
    rows = [stage.train_data.rows_of(stage.config.seed, step, 4) for step in range(4)]
    return next(step for step, chosen in enumerate(rows, 1) if 9 in chosen), rows


def test_sft_stops_at_a_bad_loss_and_goes_on_as_if_it_had_skipped(monkeypatch, tmp_path, capsys):
    bad, rows = poison(monkeypatch)
    meddler = Meddler()
    whole = rlhf_jax.run(
        fit(tmp_path / "whole", on_nonfinite="skip"), train_dataset=DEMONSTRATIONS, callbacks=[meddler]
    )
    assert [meddler.kept(update) for update in (1, 2, 3, 4)] == [update == bad for update in (1, 2, 3, 4)]
    assert finite_weights(whole.paths["policy"]) and meddler.stage.update_step._cache_size() == 1
    config = json.loads(bytes_of(whole.run_dir, "config.json")) | {"run_dir": str(tmp_path / "run")}
    config["on_nonfinite"] = "stop"
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in DEMONSTRATIONS))
    (tmp_path / "config.json").write_text(json.dumps(config | {"dataset_name": str(data)}))
    assert train.main(["--config", str(tmp_path / "config.json")]) == 2
    said = capsys.readouterr().err
    assert f"error: update {bad}: the loss is not a finite number. Nothing of this update reached" in said
    found = rows_of(tmp_path / "run", bad)
    assert [row["row"] for row in found] == rows[bad - 1].tolist()
    texts = [row["text"] for row in found]
    assert all("lost keys" in text for text in texts) and [" juan" in text for text in texts].count(True) == 1
    assert train.main(["--config", str(tmp_path / "config.json"), "--on_nonfinite", "skip"]) == 0
    assert lines(tmp_path / "run") == lines(whole.run_dir)
    assert bytes_of(tmp_path / "run", "policy/model.safetensors") == bytes_of(
        whole.paths["policy"], "model.safetensors"
    )


def test_a_reward_model_does_not_learn_from_a_margin_that_is_no_number(tmp_path):
    pairs = [
        {"prompt": "r/family sad", "chosen": " lost keys", "rejected": " keys lost lost" + " keys" * (i % 3)}
        for i in range(16)
    ]
    config = RewardConfig(run_dir=str(tmp_path / "run"), on_nonfinite="skip", **TEXTS)

    def spoil(stage):
        for step, wrong in enumerate((jnp.nan, -jnp.inf, jnp.inf)):
            stage.train_data.margin[stage.train_data.rows_of(config.seed, step, 4)[1]] = wrong

    meddler = Meddler(prepare=spoil)
    result = rlhf_jax.run(config, train_dataset=pairs, callbacks=[meddler])
    found = lines(result.run_dir)
    # A margin that is missed by -inf is a loss of 0: only the other two are bad.
    assert [line.get("nonfinite/loss") for line in found] == [1, None, 1, None]
    assert [meddler.kept(update) for update in (1, 2, 3, 4)] == [True, False, True, False]
    assert {"row", "chosen", "rejected", "margin"} == set(rows_of(result.run_dir, 3)[0])
    assert "Infinity" in [row["margin"] for row in rows_of(result.run_dir, 3)]
    assert finite_weights(result.paths["reward_model"], "scalar")


# --- early_stop


def constant(completions, **_):
    return [1.0] * len(completions)


class KillIn(Callback):
    """In the second update; the first has its checkpoint then."""

    def on_train_begin(self, stage, control):
        learn = stage.train_step

        def train_step(state, step, *tick):
            if step == 1:
                raise Killed
            return learn(state, step, *tick)

        stage.train_step = train_step


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "early"
    return rlhf_jax.run(rloo(folder, early_stop=("reward_std",), save_steps=1, **OF_RLOO), reward_funcs=constant)


def test_an_alarm_of_early_stop_ends_the_run_with_its_exports(early):
    found = lines(early.run_dir)
    assert [line["alarm/reward_std"] for line in found] == [1.0, 1.0]  # of 3 updates; metrics come one update late
    assert os.path.exists(os.path.join(early.run_dir, "finished.json")) and os.path.isdir(early.paths["policy"])


def test_a_killed_run_ends_by_the_same_alarm_at_the_same_update(early, tmp_path, capsys):
    config = rloo(tmp_path / "run", early_stop=("reward_std",), save_steps=1, **OF_RLOO)
    with pytest.raises(Killed):
        rlhf_jax.run(config, reward_funcs=constant, callbacks=[KillIn()])
    assert len(lines(tmp_path / "run")) == 1 and "alarm reward_std:" in capsys.readouterr().out
    resumed = rlhf_jax.run(config, reward_funcs=constant)
    assert bytes_of(tmp_path / "run") == bytes_of(early.run_dir)
    assert bytes_of(resumed.paths["policy"], "model.safetensors") == bytes_of(
        early.paths["policy"], "model.safetensors"
    )
    out = capsys.readouterr().out
    assert "resuming after update 1" in out and "stopping; an alarm" in out
    assert "alarm reward_std:" not in out  # it has been told
    # Killed after its last checkpoint: it is not trained further.
    os.remove(os.path.join(resumed.run_dir, "finished.json"))
    rlhf_jax.run(config, reward_funcs=constant)
    assert bytes_of(tmp_path / "run") == bytes_of(early.run_dir)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"early_stop": ("kl_abov",)}, "early_stop: 'kl_abov' .*kl_below, kl_above"),
        ({"early_stop": ("kl_above",), "alarm_kl_above": None}, "early_stop: .*kl_above is disabled.*alarm_kl_above"),
        ({"max_nonfinite": 0}, "max_nonfinite is 0; it must be at least 1"),
        ({"target_kl": 0.0}, "target_kl is 0.0; it must be above 0"),
    ],
)
def test_impossible_options_are_refused_by_name(options, said, tmp_path):
    with pytest.raises(UserError, match=said):
        rlhf_jax.run(rloo(tmp_path / "run", **options), reward_funcs=constant)

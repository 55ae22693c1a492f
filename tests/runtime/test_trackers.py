"""report_to wandb and trackio, through stand-ins that record every call (tests/helpers/fake_trackers)."""

import json
import os
import sys
import types

import pytest

from rlhf_jax import train
from rlhf_jax.config import SFTConfig
from rlhf_jax.errors import UserError
from rlhf_jax.metrics.logger import read_metrics
from rlhf_jax.runtime import trackers
from rlhf_jax.runtime.callbacks import Control
from tests.helpers.paths import ROOT
from tests.helpers.runs import KillAt, Killed, ppo_config, sft_config, wordiness

STEP = "train/step"  # of a line of metrics.jsonl


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The calls so far, after which there are none."""
    path = tmp_path / "calls.jsonl"
    monkeypatch.setenv("FAKE_TRACKERS", str(path))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "helpers" / "fake_trackers"))
    for name in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def taken():
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    yield taken
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def begun(callback, folder, **options):
    folder.mkdir(exist_ok=True)
    config = SFTConfig(run_dir=str(folder), **options)
    callback.on_train_begin(types.SimpleNamespace(config=config, name="sft"), Control())
    return callback


def test_metrics_have_transformers_names():
    found = trackers.tracker_names(
        {"loss": 1, "objective/kl": 2, "eval/scores": 3, "eval_objective/kl": 4, "eval_a_loss": 5}
    )
    assert found == {
        "train/loss": 1,
        "train/objective/kl": 2,
        "eval/scores": 3,
        "eval/objective/kl": 4,
        "eval/a_loss": 5,
    }


def test_wandb_gets_metrics_over_the_step_and_tables(calls, tmp_path):
    callback = begun(trackers.WandbCallback(), tmp_path / "run", project="mine", run_name="first", seed=7)
    callback.on_step_end(1, {"loss": 0.5, "eval/loss": 0.25}, Control())
    callback.on_completions(1, [{"prompt": "p", "score": 1.0}, {"prompt": "q", "score": None}], "samples")
    callback.close()
    (_, _, options), *others = calls()
    assert (options["project"], options["name"], options["resume"]) == ("mine", "first", "allow")
    assert options["config"]["seed"] == 7 and options["config"]["stage"] == "sft"
    assert options["dir"] == str(tmp_path / "run") and len(options["id"]) == 8
    rows = [{"step": 1, "prompt": "p", "score": 1.0}, {"step": 1, "prompt": "q", "score": None}]
    assert others == [
        ["wandb", "define_metric", "train/global_step", {}],
        ["wandb", "define_metric", "*", {"step_metric": "train/global_step", "step_sync": True}],
        ["wandb", "log", {"train/loss": 0.5, "eval/loss": 0.25, "train/global_step": 1}],
        ["wandb", "log", {"completions/samples": rows, "train/global_step": 1}],
        ["wandb", "finish"],
    ]


def test_trackio_gets_the_same_at_its_steps(calls, tmp_path):
    callback = begun(trackers.TrackioCallback(), tmp_path / "run")
    callback.on_step_end(3, {"loss": 0.5}, Control())
    callback.on_completions(3, [{"prompt": "p"}], "training")
    callback.close()
    (_, _, options), *others = calls()
    assert (
        options["project"] == "rlhf_jax"
        and options["resume"] == "allow"
        and options["name"].startswith(os.path.relpath(tmp_path / "run"))
    )
    assert others == [
        ["trackio", "log", {"train/loss": 0.5}, 3],
        ["trackio", "log", {"completions/training": [{"step": 3, "prompt": "p"}]}, 3],
        ["trackio", "finish"],
    ]


@pytest.mark.parametrize("kind", [trackers.WandbCallback, trackers.TrackioCallback])
def test_a_folder_keeps_its_run(calls, tmp_path, kind):
    key = "id" if kind.name == "wandb" else "name"
    names = []
    for folder in ("a", "a", "b"):
        begun(kind(), tmp_path / folder).close()
        names.append(calls()[0][2][key])
    assert names[0] == names[1] != names[2]
    assert json.loads((tmp_path / "a" / "trackers.json").read_text())[kind.name][key] == names[0]


def test_a_url_s_query_goes_nowhere(calls, tmp_path):
    begun(trackers.WandbCallback(), tmp_path / "run", dataset_name="https://host/x?key=s3cret")
    assert "s3cret" not in json.dumps(calls())


def test_what_is_not_installed_or_unknown_is_said(monkeypatch):
    real = trackers.importlib.util.find_spec
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    with pytest.raises(UserError, match="--report_to wandb needs `pip install wandb`"):
        trackers.parse_report_to(("tensorboard", "wandb"))
    with pytest.raises(UserError, match="--report_to comet.*tensorboard, wandb, trackio"):
        trackers.parse_report_to(("comet",))
    assert "wandb" not in trackers.parse_report_to(("all",)) and "tensorboard" in trackers.parse_report_to(("all",))


def test_a_missing_package_is_known_before_anything_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install trackio"):
        train.run(sft_config(tmp_path / "run", report_to=("trackio",), dataset_name="/nothing"))
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_start_ends_the_run_with_its_reason(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FAILS", "init")
    with pytest.raises(UserError, match="--report_to wandb.*no network"):
        begun(trackers.WandbCallback(), tmp_path / "run")


def test_a_tracker_that_fails_later_costs_its_report_alone(calls, tmp_path, monkeypatch, capsys):
    callback = begun(trackers.WandbCallback(), tmp_path / "run")
    monkeypatch.setenv("FAKE_FAILS", "log")
    for step in (1, 2):
        callback.on_step_end(step, {"loss": 1.0}, Control())
    callback.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: sft: wandb") and "no network" in line


def reported(calls, config, **objects):
    """A run that is killed in its second update and continued: {tracker: {(step, metric): value}}."""
    with pytest.raises(Killed):
        train.run(config, callbacks=[KillAt(2)], **objects)
    before = calls()
    train.run(config, **objects)
    after = calls()
    found = {}
    for name in config.report_to:
        first, second = ([call for call in part if call[0] == name] for part in (before, after))
        key = "id" if name == "wandb" else "name"
        assert first[0][1] == second[0][1] == "init" and first[0][2][key] == second[0][2][key]
        assert first[-1][1] == second[-1][1] == "finish"
        logged = found[name] = {}
        for call in first + second:
            if call[1] == "log":
                step = call[2].pop("train/global_step") if name == "wandb" else call[3]
                for metric, value in call[2].items():
                    assert repr(logged.setdefault((step, metric), value)) == repr(value)  # computed twice, the same
    return found


def told(folder):
    """{(step, metric): value} of metrics.jsonl."""
    rows = read_metrics(str(folder / "metrics.jsonl"))
    return shown(
        {(r["step"], metric): v for r in rows for metric, v in trackers.tracker_names(r).items() if metric != STEP}
    )


def shown(logged):
    """Without tables, values as text, for NaN is not itself."""
    return {key: repr(value) for key, value in logged.items() if not isinstance(value, list)}


def test_a_killed_run_goes_on_where_it_was_reported_with_every_metric_of_metrics_jsonl(calls, tmp_path):
    folder = tmp_path / "run"
    found = reported(calls, sft_config(folder, max_steps=3, eval_steps=2, report_to=("wandb", "trackio")))
    assert shown(found["wandb"]) == shown(found["trackio"]) == told(folder) and (2, "eval/loss") in found["wandb"]


@pytest.mark.runs
def test_a_policys_completions_are_reported_too(golden_sft, calls, tmp_path):
    sft, folder = golden_sft.run_dir, tmp_path / "run"
    options = {"report_to": ("wandb", "trackio"), "log_completions": True, "max_eval_samples": 2, "save_steps": 1}
    found = reported(calls, ppo_config(folder, sft, total_episodes=24, **options), reward_funcs=wordiness)
    for logged in found.values():
        assert shown(logged) == told(folder)
        assert logged[3, "completions/training"][0].keys() >= {"step", "prompt", "completion", "advantage"}
        assert len(logged[3, "completions/samples"]) == 2

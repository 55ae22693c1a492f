"""What may have changed when a run goes on, what may not, and what is said of it."""

import dataclasses
import datetime
import json
import pathlib
import shutil
import types

import pytest

import rlhf_jax
from rlhf_jax import train
from rlhf_jax.config import Pipeline, RLOOConfig, SFTConfig
from rlhf_jax.errors import UserError
from rlhf_jax.runtime import run_folder
from tests.helpers.runs import RLOO_OPTIONS

pytestmark = pytest.mark.runs

ROWS = [{"prompt": f"what is {n}?", "completion": f" it is {n % 3}."} for n in range(12)]
CONFIG = SFTConfig(
    model_name_or_path=None,
    scratch_model="1x16x2",
    tokenizer_name_or_path="synthetic",
    dataset_test_split=None,
    query_length=32,
    max_length=64,
    batch_size=4,
    micro_batch_size=4,
    max_steps=4,
    save_steps=1,
    save_total_limit=None,
    report_to=(),
)


def run(folder, rows=ROWS, **changes):
    return rlhf_jax.run(dataclasses.replace(CONFIG, run_dir=str(folder), **changes), train_dataset=rows)


def cut_back(folder, update):
    """As if the run had been killed right after the checkpoint of an update."""
    (folder / "finished.json").unlink()
    for path in (folder / "checkpoints").iterdir():
        if int(path.name) > update:
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, to copy."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of it."""
    return pathlib.Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def folder(finished):
    """A run after 2 of 4 updates."""
    cut_back(finished, 2)
    return finished


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[:8], r'training data: "12 rows, \w+" -> "8 rows, \w+"'),
        (
            [*ROWS[:-1], {"prompt": "what is it?", "completion": " it is it."}],
            r'training data: "12 rows, \w+" -> "12 rows, \w+"',
        ),
    ],
)
def test_data_that_has_changed_is_refused_and_may_be_overridden(folder, capsys, rows, said):
    with pytest.raises(UserError, match=r"--run_dir .* other data or models: .*--override_resume(?s:.*)" + said):
        run(folder, rows)
    assert steps(folder) == [1, 2, 3, 4]  # nothing was touched
    run(folder, rows, override_resume=True)
    assert "warning: --override_resume: training data: " in capsys.readouterr().err
    assert steps(folder) == [1, 2, 3, 4]


def test_a_starting_model_that_has_changed_is_refused(folder, tmp_path):
    start = tmp_path / "start"
    for seed in (1, 2):
        run(tmp_path / f"seed{seed}", seed=seed)
    (tmp_path / "seed1" / "policy").rename(start)
    again = {"scratch_model": None, "tokenizer_name_or_path": None, "model_name_or_path": str(start)}
    run(tmp_path / "tuned", **again)
    cut_back(tmp_path / "tuned", 2)
    start.rename(tmp_path / "before")
    (tmp_path / "seed2" / "policy").rename(start)
    with pytest.raises(UserError, match=rf'model {start}: "\w+" -> "\w+"'):
        run(tmp_path / "tuned", **again)
    start.rename(tmp_path / "other")
    (tmp_path / "before").rename(start)
    assert run(tmp_path / "tuned", **again).metrics["episode"] == 16


def conversations():
    template = (
        "{% if strftime_now('%d') == '30' %} anna{% else %} omar{% endif %}"
        "{% for m in messages %} {{ m.content }}{% endfor %}"
    )
    return {
        "chat_template_kwargs": {"chat_template": template},
        "rows": [{"messages": [{"role": "user", "content": f"what is {n}?"}]} for n in range(12)],
    }


def test_a_resume_on_another_day_sees_the_date_of_the_first(tmp_path, monkeypatch, capsys):
    def on(day):
        today = datetime.date(2026, 1, day)
        date = types.SimpleNamespace(today=lambda: today, fromisoformat=datetime.date.fromisoformat)
        monkeypatch.setattr(run_folder, "datetime", types.SimpleNamespace(date=date))

    folder, options = tmp_path / "run", conversations()
    on(30)
    run(folder, **options)
    assert "the chat template prints 2026-01-30" in capsys.readouterr().out
    metrics, inputs = (folder / "metrics.jsonl").read_bytes(), (folder / "inputs.json").read_bytes()
    assert json.loads(inputs)["date in chat templates"] == "2026-01-30"
    cut_back(folder, 2)
    on(31)
    run(folder, **options)
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert (folder / "inputs.json").read_bytes() == inputs
    run(tmp_path / "other", **options)
    other = json.loads((tmp_path / "other" / "inputs.json").read_bytes())
    assert other["date in chat templates"] == "2026-01-31"
    assert other["training data"] != json.loads(inputs)["training data"]


def test_runs_without_a_date_in_their_prompts_keep_none(folder):
    assert set(json.loads((folder / "inputs.json").read_bytes())) == {"training data", "environments"}


def test_an_option_that_has_changed_is_refused_and_may_be_overridden(folder, capsys):
    with pytest.raises(UserError, match="--override_resume(?s:.*)learning_rate: 3e-06 -> "):
        run(folder, learning_rate=0.1)
    run(folder, learning_rate=0.1, override_resume=True)
    assert "sft: changed since the run began: learning_rate: 3e-06 -> 0.1" in capsys.readouterr().out
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] > 1e-3 for line in lines] == [False, False, True, True]
    assert json.loads((folder / "config.json").read_text())["learning_rate"] == 0.1


def test_a_pipeline_whose_folder_was_renamed_runs_no_finished_stage_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sft = dataclasses.replace(CONFIG, dataset_name="synthetic", max_train_samples=16, max_steps=2)
    rloo = {**RLOO_OPTIONS, "scratch_model": None, "sft_model_path": "{run_dir}/sft/policy", "save_steps": 1}
    rloo |= {"reward_funcs": ("rlhf_jax.data.synthetic:gold_reward",), "num_generations": 2}
    pipeline = Pipeline(run_dir="pipe/", sft=sft, reward=None, ppo=None, rloo=RLOOConfig(**rloo))
    metrics = rlhf_jax.run(pipeline).metrics
    capsys.readouterr()
    (tmp_path / "pipe").rename(tmp_path / "renamed")
    result = rlhf_jax.run(dataclasses.replace(pipeline, run_dir="./renamed"))
    out = capsys.readouterr().out
    assert (
        "./renamed/sft is finished" in out
        and "./renamed/rloo is finished" in out
        and "update" not in out.split("==")[0]
    )
    assert result.metrics == metrics and result.paths == {"policy": "./renamed/rloo/policy"}
    cut_back(tmp_path / "renamed" / "rloo", 1)
    result = rlhf_jax.run(dataclasses.replace(pipeline, run_dir=str(tmp_path / "renamed")))
    assert "rloo: resuming after update 1 of 2" in capsys.readouterr().out
    assert result.metrics == metrics


def test_options_that_only_round_differently_may_change(folder, whole, capsys):
    run(folder, micro_batch_size=2, gradient_checkpointing=True)
    assert "sft: changed since the run began: micro_batch_size: 4 -> 2" in capsys.readouterr().out
    before, after = ([json.loads(x) for x in (at / "metrics.jsonl").read_text().splitlines()] for at in (whole, folder))
    assert [x["loss"] for x in after] == pytest.approx([x["loss"] for x in before], rel=1e-4)


def test_a_finished_run_goes_on_when_it_is_to_be_longer(finished, capsys):
    with pytest.raises(UserError, match="max_steps: 4 -> 6"):
        run(finished, max_steps=6)
    run(finished, max_steps=6, override_resume=True)
    assert steps(finished) == [1, 2, 3, 4, 5, 6]
    assert "sft: resuming after update 4 of 6" in capsys.readouterr().out
    run(finished, max_steps=6)
    assert "is finished (update 6); nothing to do" in capsys.readouterr().out


class StopAt(rlhf_jax.Callback):
    """Ends the run at the end of an update."""

    def __init__(self, step):
        self.step = step

    def on_evaluate(self, step, metrics, control):
        control.stop = step == self.step


def test_a_run_that_ended_early_and_was_killed_while_it_exported_does_not_train_on(tmp_path):
    config = dataclasses.replace(CONFIG, run_dir=str(tmp_path / "run"), eval_steps=1, dataset_test_split="test")
    sets = {"train_dataset": ROWS, "eval_dataset": ROWS[:4]}
    rlhf_jax.run(config, callbacks=[StopAt(2)], **sets)
    whole = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert steps(tmp_path / "run")[-1] < 4
    (tmp_path / "run" / "finished.json").unlink()
    shutil.rmtree(tmp_path / "run" / "policy")
    rlhf_jax.run(config, **sets)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == whole
    assert (tmp_path / "run" / "policy" / "model.safetensors").is_file()


def test_the_best_checkpoint_is_kept_and_exported(tmp_path, capsys):
    class Best(rlhf_jax.Callback):
        values = {}

        def on_step_end(self, step, metrics, control):
            self.values[step] = metrics["grad_norm"]

    best = Best()
    config = dataclasses.replace(
        CONFIG,
        run_dir=str(tmp_path / "run"),
        learning_rate=0.1,
        save_total_limit=1,
        metric_for_best_model="grad_norm",
        greater_is_better=True,
        load_best_model_at_end=True,
    )
    rlhf_jax.run(config, train_dataset=ROWS, callbacks=[best])
    first = max(best.values, key=best.values.get)
    assert first != 4
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == sorted({str(first), "4"})
    assert f"sft: update {first} has the best grad_norm: exporting that" in capsys.readouterr().out
    run(tmp_path / "short", learning_rate=0.1, save_total_limit=1)
    weights = [(tmp_path / at / "policy" / "model.safetensors").read_bytes() for at in ("run", "short")]
    assert weights[0] != weights[1]


def test_a_metric_that_is_none_is_named_after_the_first_save(tmp_path):
    with pytest.raises(UserError, match="--metric_for_best_model los.*grad_norm"):
        run(tmp_path / "run", metric_for_best_model="los")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]
    run(tmp_path / "run", metric_for_best_model="loss")  # it may change
    assert steps(tmp_path / "run") == [1, 2, 3, 4]


def test_save_minutes_saves_by_the_clock(tmp_path):
    run(tmp_path / "run", save_steps=0, save_minutes=1e-6)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 4
    run(tmp_path / "other", save_steps=0.5, save_minutes=600)
    assert sorted(path.name for path in (tmp_path / "other" / "checkpoints").iterdir()) == ["2", "4"]


def test_a_disk_without_room_for_a_checkpoint_is_named_before_the_first_update(tmp_path, monkeypatch):
    monkeypatch.setattr(train.Checkpoints, "room", lambda *_: (3 << 20, 2 << 20))
    with pytest.raises(UserError, match=r"--run_dir .*4 checkpoints 12\.0 MiB.* 2\.0 MiB are free"):
        run(tmp_path / "run")

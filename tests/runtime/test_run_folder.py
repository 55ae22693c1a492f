"""A run's folder: whose it is, what is refused, what a resume forgets."""

import json
import math
import os
import shutil

import pytest

import rlhf_jax
from rlhf_jax.config import RLOOConfig
from rlhf_jax.errors import UserError
from rlhf_jax.runtime import run_folder
from rlhf_jax.runtime.run_folder import RunFolder
from tests.helpers import tiny_rloo

CONFIG = {"stage": "ppo", "seed": 1, "kl_coef": 0.05, "report_to": ("tensorboard",), "save_steps": 10, "run_dir": "x"}


@pytest.fixture
def run_dir(tmp_path):
    return str(tmp_path / "run")


def entered(*args, **options):
    """A run's folder, left again."""
    run = RunFolder.open(*args, **options)
    run.close()
    return run


def used(run_dir, **changes):
    run = entered(run_dir, {**CONFIG, **changes})
    os.makedirs(os.path.join(run.checkpoints, "5"))
    return run


def test_a_new_run_leaves_its_config(run_dir):
    run = entered(run_dir, CONFIG)
    with open(run.config, encoding="utf-8") as file:
        assert json.load(file) == {**CONFIG, "report_to": ["tensorboard"]}
    assert run.finished() is None and run.saved_steps() == []


def test_checking_touches_nothing(run_dir):
    assert run_folder.check(run_dir, CONFIG) is None
    assert not os.path.exists(run_dir)


def test_the_same_config_may_enter_again(run_dir):
    used(run_dir)
    entered(run_dir, dict(CONFIG, report_to=["tensorboard"]))
    entered(run_dir, CONFIG, resume="must")


def test_options_that_change_no_result_may_differ(run_dir):
    used(run_dir)
    changed = {**CONFIG, "report_to": (), "save_steps": 3, "run_dir": "./x", "resume": "must", "logging_steps": 9}
    run = entered(run_dir, changed, resume="must")
    with open(run.config, encoding="utf-8") as file:
        assert json.load(file)["save_steps"] == 3


def test_another_config_is_refused_with_old_and_new_values(run_dir):
    used(run_dir, model={"layers": 2})
    with pytest.raises(UserError) as error:
        entered(run_dir, {**CONFIG, "seed": 2, "kl_coef": None, "gamma": 1.0, "model": {"layers": 4}})
    message = str(error.value)
    assert message.startswith(f"--run_dir {run_dir} contains a run with another config")
    assert message.splitlines()[1:] == [
        "  seed: 1 -> 2",
        "  kl_coef: 0.05 -> null",
        "  gamma: (no such option) -> 1.0",
        "  model.layers: 2 -> 4",
    ]


def test_environments_are_kept_in_order_and_their_differences_listed(run_dir):
    first, second = {"jax": "0.10.2", "devices": "1 x cpu"}, {"jax": "0.11.0", "devices": "1 x cpu", "new": "1"}
    RunFolder.open(run_dir, CONFIG, environment=first).close()
    RunFolder.open(run_dir, CONFIG, environment=second).close()  # no update yet: the run begins
    assert RunFolder(run_dir).environments() == []
    os.makedirs(os.path.join(run_dir, "checkpoints", "5"))
    assert RunFolder(run_dir).environments() == [second]
    assert run_folder.environment_changes(run_dir, first) == ['jax: "0.11.0" -> "0.10.2"']
    for environment in (first, first, second):
        RunFolder.open(run_dir, CONFIG, environment=environment).close()
    assert RunFolder(run_dir).environments() == [second, first, second]
    assert run_folder.environment_changes(run_dir, second) == []


PIPELINE = {"stage": "ppo", "run_dir": "pipe/ppo", "sft_model_path": "pipe/sft/policy", "adapters": ["a=lora/a"]}
PIPELINE |= {"dataset_name": "posts.jsonl", "eval_dataset_name": "near=posts.jsonl,far=trl-lib/tldr"}
PIPELINE |= {"datasets": [{"path": "posts.jsonl"}], "reward_funcs": ["rewards.py:brevity"], "prompt_column": "pipe"}
INPUTS = {"training data": "8 rows, 1", "model pipe/sft/policy": "2"}


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    """The working folder of a run of a pipeline."""
    monkeypatch.chdir(tmp_path)
    for name in ("pipe/sft/policy", "lora/a"):
        os.makedirs(name)
    for name in ("posts.jsonl", "rewards.py"):
        open(name, "w").close()
    run = RunFolder.open("pipe/ppo", PIPELINE, inputs=INPUTS)
    run.close()
    os.makedirs(os.path.join(run.checkpoints, "5"))
    return tmp_path


def respelled(spell, **changes):
    """The options with their paths in another form."""
    config = {**PIPELINE, **{name: spell(PIPELINE[name]) for name in ("run_dir", "sft_model_path", "dataset_name")}}
    config["adapters"] = [f"a={spell('lora/a')}"]
    config["eval_dataset_name"] = f"near={spell('posts.jsonl')},far=trl-lib/tldr"
    config["datasets"] = [{"path": spell("posts.jsonl")}]
    config["reward_funcs"] = [f"{spell('rewards.py')}:brevity"]
    return {**config, **changes}


FORMS = {
    "dot": lambda path: f"./{path}",
    "double": lambda path: path.replace("/", "//"),
    "slash": lambda path: path if path.endswith((".jsonl", ".py")) else f"{path}/",
    "absolute": os.path.abspath,
    "link": lambda path: f"link/{path}",
    "parent": lambda path: f"../{os.path.basename(os.getcwd())}/{path}",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_files_in_another_form_are_the_same_run(pipeline, form):
    (pipeline / "link").symlink_to(pipeline)
    new = respelled(FORMS[form])
    inputs = {"training data": "8 rows, 1", f"model {new['sft_model_path']}": "2"}
    assert run_folder.changes(new["run_dir"], new) == []
    RunFolder.open(new["run_dir"], new, inputs=inputs).close()


@pytest.mark.parametrize("spell", [str, os.path.abspath], ids=["relative", "absolute"])
def test_a_pipeline_that_was_renamed_is_the_same_run(pipeline, spell):
    os.rename("pipe", "renamed")
    new = respelled(spell, run_dir=spell("renamed/ppo"), sft_model_path=spell("renamed/sft/policy"))
    inputs = {"training data": "8 rows, 1", f"model {new['sft_model_path']}": "2"}
    RunFolder.open(new["run_dir"], new, inputs=inputs).close()
    with pytest.raises(UserError, match="other data or models(?s:.*)model .*renamed/sft/policy: .2. -> .3.$"):
        RunFolder.open("renamed/ppo", new, inputs={**inputs, f"model {new['sft_model_path']}": "3"})


def test_a_run_goes_on_from_another_working_folder(pipeline, monkeypatch):
    new = respelled(os.path.abspath)
    os.mkdir("elsewhere")
    monkeypatch.chdir("elsewhere")
    assert run_folder.changes(new["run_dir"], new) == []


def test_other_files_and_names_on_the_hub_are_another_run(pipeline):
    os.makedirs("other/sft/policy")
    for name, value in {
        "sft_model_path": "other/sft/policy",
        "dataset_name": "other.jsonl",
        "eval_dataset_name": "near=posts.jsonl,far=trl-lib/other",
        "adapters": ["a=lora/b"],
        "reward_funcs": ["rewards.py:other"],
        "prompt_column": "./pipe",
        "datasets": [{"path": "posts.jsonl"}, {"path": "posts.jsonl"}],
    }.items():
        (line,) = run_folder.changes("pipe/ppo", {**PIPELINE, name: value})
        assert line == f"{name}: {json.dumps(PIPELINE[name])} -> {json.dumps(value)}"


def test_a_name_on_the_hub_is_a_folder_only_where_there_is_one(pipeline):
    hub = {**PIPELINE, "sft_model_path": "EleutherAI/pythia-14m"}
    RunFolder.open("pipe/ppo", hub, override=True).close()
    there = {**hub, "sft_model_path": "./EleutherAI/pythia-14m"}
    assert len(run_folder.changes("pipe/ppo", there)) == 1
    os.makedirs("EleutherAI/pythia-14m")
    assert run_folder.changes("pipe/ppo", there) == []


def test_folders_in_a_bucket_are_compared_by_their_names(pipeline):
    bucket = {**PIPELINE, "sft_model_path": "gs://bucket/sft/policy"}
    RunFolder.open("pipe/ppo", bucket, override=True).close()
    assert run_folder.changes("pipe/ppo", {**bucket, "sft_model_path": "gs://bucket/sft/policy/"}) == []
    assert len(run_folder.changes("pipe/ppo", {**bucket, "sft_model_path": "gs://bucket/sft/other"})) == 1


def test_an_unreadable_config_is_refused(run_dir):
    run = used(run_dir)
    with open(run.config, "w") as file:
        file.write("{")
    with pytest.raises(UserError, match="config.json is not JSON"):
        run_folder.check(run_dir, CONFIG)


def test_a_folder_of_something_else_is_refused(tmp_path):
    for name in ("thesis.tex", "photos.zip", "a", "b"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match="a, b, photos.zip"):
        run_folder.check(str(tmp_path), CONFIG)
    with pytest.raises(UserError, match="is a file"):
        run_folder.check(str(tmp_path / "a"), CONFIG)


def test_an_empty_folder_and_hidden_files_are_welcome(tmp_path):
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / "config.json.tmp").write_text("{")
    entered(str(tmp_path), CONFIG)


def test_never_refuses_a_used_folder(run_dir):
    entered(run_dir, CONFIG, resume="never")
    entered(run_dir, CONFIG, resume="never")  # nothing of a run is there yet
    used(run_dir)
    with pytest.raises(UserError, match="--resume.*never"):
        entered(run_dir, CONFIG, resume="never")


def test_must_refuses_a_folder_without_a_checkpoint(run_dir):
    with pytest.raises(UserError, match="--resume is must.*no checkpoint"):
        entered(run_dir, CONFIG, resume="must")
    assert not os.path.exists(run_dir)
    entered(run_dir, CONFIG)
    with pytest.raises(UserError, match="--resume is must.*no checkpoint"):
        entered(run_dir, CONFIG, resume="must")


def test_a_finished_run_says_so(run_dir):
    run = used(run_dir)
    run.finish(7, {"loss": 0.5, "kl": float("inf")}, {"policy": "p"}, objects=("reward_funcs",))
    found = {"step": 7, "metrics": {"loss": 0.5, "kl": float("inf")}, "paths": {"policy": "p"}}
    found["objects"] = ["reward_funcs"]
    assert run_folder.check(run_dir, CONFIG) == found
    assert run_folder.check(run_dir, CONFIG, resume="must") == found
    with pytest.raises(UserError, match="seed: 1 -> 2"):
        run_folder.check(run_dir, {**CONFIG, "seed": 2})


def test_a_resume_forgets_what_came_after_its_step(run_dir):
    run = used(run_dir)
    kept = '{"step": 1, "x": 0.1}\n{"step": 2,  "x": "NaN"}\n'
    for path in (run.metrics, run.timings):
        with open(path, "w") as file:
            file.write(kept + '{"step": 3, "x": 1}\n{"step": 10, "x": 1}\n{"step": 2, "x"')
    for step in (2, 3, 10):
        run.write_completions(step, [{"prompt": "p\u2028q", "score": float("nan")}], tokens=[{"tokens": ["a"]}])
        run.write_completions(step, [{"prompt": "p"}], "training", [{"tokens": ["a"]}])
        run.write_calibration(step, [{"pairs": 1}])
    run.cut(2)
    for path in (run.metrics, run.timings):
        with open(path) as file:
            assert file.read() == kept
    names = [f"{kind}2{part}.jsonl" for kind in ("", "training_") for part in ("", ".tokens")]
    calibration = os.path.join(run.path, "calibration")
    assert set(os.listdir(run.completions)) == set(names) and os.listdir(calibration) == ["2.jsonl"]
    run.cut(0)
    assert os.path.getsize(run.metrics) == 0 and os.listdir(run.completions) == os.listdir(calibration) == []


def test_the_last_line_comes_back_with_its_tables(run_dir):
    run = used(run_dir)
    for path in (run.metrics, run.timings):
        with open(path, "w") as file:
            file.write('{"step": 1, "x": 0.5}\n{"step": 2, "wall_time": 9.0, "x": "NaN"}\n')
    run.write_completions(2, [{"prompt": "p"}], "training")
    metrics, timings, completions = run.take_line(2)
    assert [*metrics] == [*timings] == ["x"] and math.isnan(metrics["x"])
    assert completions == {"training": [{"prompt": "p"}]}
    with open(run.metrics) as file:
        assert file.read() == '{"step": 1, "x": 0.5}\n'
    assert os.listdir(run.completions) == ["training_2.jsonl"]


def test_a_cut_that_takes_nothing_leaves_the_files_alone(run_dir):
    run = used(run_dir)
    run.cut(5)
    assert not os.path.exists(run.metrics)
    with open(run.metrics, "w") as file:
        file.write('{"step": 5}\n')
    before = os.stat(run.metrics).st_ino
    run.cut(5)
    assert os.stat(run.metrics).st_ino == before


def test_completions_are_json_lines(run_dir):
    run = used(run_dir)
    run.write_completions(3, [{"prompt": "a\nb", "score": 1.5}, {"prompt": "é", "score": float("nan")}])
    with open(os.path.join(run.completions, "3.jsonl"), encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == [
            {"prompt": "a\nb", "score": 1.5},
            {"prompt": "é", "score": "NaN"},
        ]
    run.write_completions(4, [])
    assert os.listdir(run.completions) == ["3.jsonl"]


def test_a_recipe_is_what_the_run_began_with(run_dir):
    run = entered(run_dir, CONFIG)
    for name in ("first.py", "second.py"):  # nothing was saved: it begins anew
        run.write_recipe(name, {"lr": 0.1})
    os.makedirs(os.path.join(run.checkpoints, "1"))
    run.write_recipe("config.json", {"lr": 0.2})
    with open(os.path.join(run.path, "recipe.json"), encoding="utf-8") as file:
        assert json.load(file) == {"config": "second.py", "options": {"lr": 0.1}}


def test_other_processes_only_get_the_paths(run_dir, monkeypatch):
    monkeypatch.setattr(run_folder, "is_main", lambda: False)
    run = entered(run_dir, CONFIG)
    run.finish(1, {}, {})
    run.write_completions(1, [{"a": 1}])
    run.cut(0)
    assert not os.path.exists(run_dir)


def test_a_folder_that_is_removed_during_a_run_is_the_runs_again(tmp_path):
    calls = []

    def first_token(completion_ids, **_):
        calls.append(len(completion_ids))
        if len(calls) == 2:
            shutil.rmtree(tmp_path / "removed")
        return tiny_rloo.first_token(completion_ids)

    options = {**tiny_rloo.CONFIG, "save_steps": 2}
    finished = {}
    for name, reward in (("whole", tiny_rloo.first_token), ("removed", first_token)):
        config = RLOOConfig(**options, run_dir=str(tmp_path / name))
        finished[name] = rlhf_jax.run(config, reward_funcs=[reward])
    for file in ("metrics.jsonl", "policy/model.safetensors"):
        assert (tmp_path / "removed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    scored = len(calls)
    assert rlhf_jax.run(config, reward_funcs=[first_token]).paths == finished["removed"].paths
    assert len(calls) == scored  # the rerun finds a finished run

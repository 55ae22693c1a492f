"""The command line of a sweep: what is swept, in which order, into which folders, and what is refused."""

import json

import pytest

from rlhf_jax.config import files as config_files
from rlhf_jax.errors import UserError
from rlhf_jax.sweep import plan
from tests.helpers.runs import sft_config


@pytest.fixture
def words(tmp_path):
    """A command line without swept options."""
    path = tmp_path / "sft.json"
    path.write_text(config_files.to_json(sft_config(tmp_path / "unused")))
    return ["--config", str(path), "--run_dir", str(tmp_path / "sweep")]


def test_the_product_in_order_the_last_option_fastest(words, tmp_path):
    sweep = plan.parse([*words, "--learning_rate", "1e-5", "3e-5", "--batch_size", "4", "--seed", "0", "1"])
    assert [run.title for run in sweep.runs] == [
        *("learning_rate=1e-5, seed=0", "learning_rate=1e-5, seed=1"),
        *("learning_rate=3e-5, seed=0", "learning_rate=3e-5, seed=1"),
    ]
    configs = [run.config for run in sweep.runs]
    assert [(config.learning_rate, config.seed) for config in configs] == [(1e-5, 0), (1e-5, 1), (3e-5, 0), (3e-5, 1)]
    assert {config.batch_size for config in configs} == {4}
    assert configs[1].run_dir == str(tmp_path / "sweep" / "learning_rate=1e-5,seed=1")
    assert (sweep.folder, sweep.seeds) == (str(tmp_path / "sweep"), {"seed"})


def test_options_of_a_pipelines_stages_and_its_seed(tmp_path):
    flags = ["--ppo.learning_rate", "1e-5", "3e-5", "--seed", "0", "1", "--output_dir", str(tmp_path)]
    sweep = plan.parse(["--config", "quickstart.py", *flags])
    first, *_, last = [run.config for run in sweep.runs]
    assert (first.ppo.learning_rate, last.ppo.learning_rate) == (1e-5, 3e-5)
    assert (last.sft.seed, last.reward.seed, last.ppo.seed) == (1, 1, 1)
    assert first.sft.run_dir == f"{tmp_path}/ppo.learning_rate=1e-5,seed=0/sft"


def test_presets_switches_and_names_of_trl_are_swept(tmp_path, capsys):
    flags = ["--preset", "dapo", "dr_grpo", "--max_completion_length", "16", "32", "--use_peft", "true", "false"]
    sweep = plan.parse(["--config", "grpo_deepmath.py", *flags, "--run_dir", str(tmp_path)])
    assert len(sweep.runs) == 8 and sweep.runs[0].title == "preset=dapo, max_completion_length=16, use_peft=true"
    assert [run.config.response_length for run in sweep.runs[:4]] == [16, 16, 32, 32]
    assert [run.config.use_peft for run in sweep.runs[:2]] == [True, False]
    assert sweep.runs[0].config.loss_type != sweep.runs[4].config.loss_type
    assert capsys.readouterr().err.count("note: --max_completion_length is --response_length here") == 1


def test_a_list_with_several_words_is_one_value(words):
    sweep = plan.parse([*words, "--length_buckets", "36", "72", "--seed", "0", "1"])
    assert [run.config.length_buckets for run in sweep.runs] == [(36, 72), (36, 72)]


def test_names_of_folders_are_safe_and_differ():
    assert plan.folder_name({"sft_model_path": "runs/a b:c"}) == "sft_model_path=runs%2Fa%20b%3Ac"
    long = [plan.folder_name({"sft_model_path": "a" * 300 + end}) for end in "bc"]
    assert long[0] != long[1] and max(map(len, long)) < 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length_buckets", "36,72", "72"], "--length_buckets takes a list and cannot be swept"),
        (["--length_buckets", "36", "--length_buckets", "72"], "--length_buckets takes a list and cannot be swept"),
        (["--length_buckets", "36", "72"], "nothing to sweep; --length_buckets takes a list"),
        (["--seed", "0"], "nothing to sweep: give an option several values"),
        (["--seed", "0", "1", "--seed", "2"], "--seed is given twice"),
        (["--seed", "0", "1", "0"], "seed=0 and seed=0 are the same run"),
        (["--learning_rate", "1e-5", "0.00001"], "learning_rate=1e-5 and learning_rate=0.00001 are the same run"),
        (["--learning_rate", "1e-5", "-1"], "learning_rate=-1: learning_rate is -1.0; it must be"),
        (["--learning_rate", "1e-5", "fast"], "--learning_rate = 'fast': it must be a number"),
        (["--lerning_rate", "1e-5", "3e-5"], "unknown option --lerning_rate"),
        (["--max_minutes", "1", "2"], "--max_minutes cannot be swept"),
        (["--run_dir", "a", "b"], "--run_dir is given twice"),
        (["--seed", "0", "1", "--distributed", "host:1234"], "a sweep is one process: start each run by itself"),
    ],
)
def test_what_is_refused(words, flags, message):
    with pytest.raises(UserError) as raised:
        plan.parse([*words, *flags])
    assert message in str(raised.value)


def test_a_sweep_needs_its_folder(words):
    with pytest.raises(UserError, match="--run_dir is missing"):
        plan.parse([*words[:2], "--seed", "0", "1"])


def test_the_help(capsys):
    with pytest.raises(SystemExit) as end:
        plan.parse(["--help"])
    assert end.value.code == 0 and "usage: rlhf-jax sweep" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        plan.parse(["--config", "quickstart.py", "--help"])
    assert "rlhf-jax sweep --config quickstart.py" in capsys.readouterr().out


def test_the_folder_of_another_sweep_is_refused(words, tmp_path):
    swept = ["--learning_rate", "1e-5", "3e-5", "--seed", "0", "1"]
    plan.write_record(plan.parse([*words, "--batch_size", "4", *swept]))
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text()) == {
        "config": words[1],
        "flags": {"batch_size": ["4"]},
        "options": {"learning_rate": ["1e-5", "3e-5"], "seed": ["0", "1"]},
    }

    def refused(*flags):
        with pytest.raises(UserError, match="contains another sweep") as raised:
            plan.write_record(plan.parse([*words, *flags]))
        return [line.strip() for line in str(raised.value).splitlines()[1:]]

    assert refused("--batch_size", "8", *swept) == ["--batch_size: 4 before, now 8"]
    assert refused(*swept) == ["--batch_size: 4 before, now not given"]
    assert refused("--batch_size", "4", *swept[:-2], "1", "2") == ["--seed: 0 is left out; values may only be added"]
    assert refused("--batch_size", "4", *swept[:3]) == ["swept options: learning_rate, seed before, now learning_rate"]
    assert refused("--batch_size", "4", *swept[3:], *swept[:3]) == [
        "swept options: learning_rate, seed before, now seed, learning_rate"
    ]
    plan.write_record(plan.parse([*words, "--batch_size", "4", *swept, "2", "--logging_steps", "5"]))
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["options"]["seed"] == ["0", "1", "2"]


def test_a_folder_with_something_else_is_refused(words, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a sweep's folder \(it contains config.json\)"):
        plan.write_record(plan.parse([*words, "--seed", "0", "1"]))
    (tmp_path / "sweep" / "sweep.json").write_text("[]")
    with pytest.raises(UserError, match="sweep.json is damaged"):
        plan.write_record(plan.parse([*words, "--seed", "0", "1"]))

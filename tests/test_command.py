"""The command line: flags, help, and what it says to a typing error."""

import os
import pathlib
import subprocess
import sys

import pytest

from rlhf_jax import command, configfile
from rlhf_jax.config import STAGES, PPOConfig
from rlhf_jax.types import UserError


def ppo(*flags: str):
    return command.parse(["--config", "tldr_ppo.py", *flags])


# --- values


def test_flags_come_over_the_files_values_and_the_last_one_wins():
    config = ppo("--kl_coef", "0.1", "--kl_coef", "0.2")
    assert config.kl_coef == 0.2
    assert config.total_episodes == configfile.load_config("tldr_ppo").total_episodes


FORMS = [
    (["--kl-coef", "0.1"], "kl_coef", 0.1),
    (["--kl_coef=1e-3"], "kl_coef", 1e-3),
    (["--stop_token", "None"], "stop_token", None),
    (["--micro_batch_size", "none"], "micro_batch_size", None),
    (["--whiten_rewards"], "whiten_rewards", True),
    (["--whiten_rewards", "True"], "whiten_rewards", True),
    (["--whiten_rewards", "false"], "whiten_rewards", False),
    (["--no_dry_run"], "dry_run", False),
    (["--no-dry-run"], "dry_run", False),
    (["--whiten_ddof", "0"], "whiten_ddof", 0),
    (["--total_episodes", "1_000"], "total_episodes", 1000),
    (["--mesh_data", "-1"], "mesh_data", -1),
    (["--length_buckets", "64", "128"], "length_buckets", (64, 128)),
    (["--length_buckets=64,128"], "length_buckets", (64, 128)),
    (["--report_to", "none"], "report_to", ()),
    (["--report_to", "tensorboard"], "report_to", ("tensorboard",)),
    (["--dataset_name", "some/data"], "dataset_name", "some/data"),
]


@pytest.mark.parametrize(("flags", "field", "value"), FORMS, ids=[" ".join(form[0]) for form in FORMS])
def test_every_form_of_a_flag_is_read(flags, field, value):
    found = getattr(ppo(*flags), field)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("stage", STAGES)
def test_every_field_is_a_flag_of_its_own_name(stage):
    config = STAGES[stage]()
    for name, hint in configfile.field_types(STAGES[stage]).items():
        value = getattr(config, name)
        words = [str(v) for v in value] if isinstance(value, tuple) else [str(value)]
        assert getattr(command.with_flag(config, name, words), name) == value, (name, hint)


def test_a_pipelines_flags_name_their_stage():
    config = command.parse(["--config", "quickstart", "--ppo.kl_coef", "0.3", "--sft.batch-size=8", "--run_dir", "R"])
    assert (config.ppo.kl_coef, config.sft.batch_size, config.run_dir) == (0.3, 8, "R")
    config = command.parse(["--config", "quickstart", "--seed", "5", "--dry_run", "--output_dir", "Q"])
    assert (config.seed, config.dry_run, config.run_dir) == (5, True, "Q")


def test_a_runs_config_json_takes_flags_too(tmp_path):
    (tmp_path / "config.json").write_text(configfile.to_json(PPOConfig(lam=0.5)))
    config = command.parse(["--config", str(tmp_path / "config.json"), "--gamma", "0.9"])
    assert (config.lam, config.gamma) == (0.5, 0.9)


# --- errors


BAD_FLAGS = [
    (["--kl_cof", "1"], "unknown option --kl_cof. Did you mean kl_coef"),
    (["--zzz", "1"], "unknown option --zzz"),
    (["--kl_coef", "a"], "--kl_coef = 'a': it must be a number"),
    (["--kl_coef"], r"--kl_coef takes one value \(a number\), got none"),
    (["--kl_coef", "1", "2"], "--kl_coef takes one value .*got 2: 1 2"),
    (["--kl_coef", "inf"], "--kl_coef = inf: it must be a finite number"),
    (["--batch_size", "1.5"], "--batch_size = '1.5': it must be a whole number"),
    (["--whiten_rewards", "maybe"], "--whiten_rewards = 'maybe': it must be true or false"),
    (["--kl_estimator", "k4"], "--kl_estimator = 'k4': it must be one of k1, k2, k3"),
    (["--whiten_ddof", "2"], "--whiten_ddof = '2': it must be one of 0, 1"),
    (["--length_buckets", "64", "x"], "--length_buckets = 'x': it must be a whole number"),
    (["--gamma", "None"], "--gamma = 'None': it must be a number"),
    (["--chosen_column", "x"], "--chosen_column is refused. It is an option of reward, not of ppo"),
    (["--no_kl_coef"], "unknown option --no_kl_coef"),
    (["--no_whiten_rewards", "true"], "unknown option --no_whiten_rewards"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS, ids=[" ".join(flags) for flags, _ in BAD_FLAGS])
def test_a_bad_flag_is_told_with_what_to_do(flags, message):
    with pytest.raises(UserError, match=message):
        ppo(*flags)


BAD_PIPELINE_FLAGS = [
    (["--kl_coef", "1"], "three stages, so name the stage: --ppo.kl_coef"),
    (["--learning_rate", "1"], "--sft.learning_rate or --reward.learning_rate or --ppo.learning_rate"),
    (["--kl_cof", "1"], "unknown option --kl_cof. Did you mean ppo.kl_coef"),
    (["--ppo.kl_cof", "1"], "unknown option --ppo.kl_cof. Did you mean kl_coef"),
    (["--rloo.kl_coef", "1"], "unknown option --rloo.kl_coef. Did you mean ppo.kl_coef"),
    (["--ppo.seed", "x"], "--ppo.seed = 'x': it must be a whole number"),
    (["--seed", "x"], "--seed = 'x': it must be a whole number or None"),
    (["--use_vllm"], "--use_vllm is refused. Generation is in-process"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_PIPELINE_FLAGS, ids=[" ".join(f) for f, _ in BAD_PIPELINE_FLAGS])
def test_a_bad_flag_of_a_pipeline_is_told_with_what_to_do(flags, message):
    with pytest.raises(UserError, match=message):
        command.parse(["--config", "quickstart.py", *flags])


def test_a_config_is_needed():
    with pytest.raises(UserError, match=r"--config is missing. Shipped: quickstart\.py"):
        command.parse(["--kl_coef", "0.1"])
    with pytest.raises(UserError, match=r"'tldr_ppo\.py' stands before any flag. Did you mean --config tldr_ppo\.py"):
        command.parse(["tldr_ppo.py"])
    with pytest.raises(UserError, match="--config takes one config, got 0"):
        command.parse(["--config"])


# --- help


def test_help_lists_the_shipped_configs_and_the_stages(capsys):
    with pytest.raises(SystemExit) as end:
        command.parse(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name, line in configfile.shipped_configs().items():
        assert name in text and line in text
    assert all(f"  {stage} " in text for stage in STAGES)


def test_nothing_at_all_shows_the_usage_and_is_an_error(capsys):
    with pytest.raises(SystemExit) as end:
        command.parse([])
    assert end.value.code == 2 and "usage: python -m rlhf_jax.train" in capsys.readouterr().out


@pytest.mark.parametrize("spec", ["tldr_sft.py", "tldr_reward.py", "tldr_ppo.py", "quickstart.py"])
def test_help_of_a_config_has_every_field_with_its_default_and_meaning(spec, capsys):
    with pytest.raises(SystemExit) as end:
        command.parse(["--config", spec, "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    config = configfile.load_config(spec)
    stages = {"": config} if spec != "quickstart.py" else {f"{name}.": getattr(config, name) for name in STAGES}
    for prefix, stage in stages.items():
        for name in configfile.field_types(type(stage)):
            assert f"--{prefix}{name} " in text or f"--{prefix}{name}," in text, name
    if spec == "tldr_ppo.py":
        assert "--kl_coef FLOAT Weight of the KL penalty in the reward. (default: 0.05)" in text
        assert "--total_episodes {None}|INT" in text and "(default: 1000000)" in text


def test_an_error_ends_the_command_with_code_2_and_no_traceback():
    root = pathlib.Path(__file__).parents[1]
    line = [sys.executable, "-m", "rlhf_jax.train", "--config", "tldr_ppo.py", "--kl_cof", "0.1"]
    env = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: unknown option --kl_cof. Did you mean kl_coef")

"""The command line: flags, help, and what it says to a typing error."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from rlhf_jax.config import STAGES, PPOConfig, command_line
from rlhf_jax.config import files as config_files
from rlhf_jax.errors import UserError
from rlhf_jax.option import field_types


def ppo(*flags: str):
    return command_line.parse(["--config", "tldr_ppo.py", *flags])


def rloo(*flags: str):
    return command_line.parse(["--config", "tldr_rloo.py", *flags])


# --- values


def test_flags_come_over_the_files_values_and_the_last_one_wins():
    config = ppo("--kl_coef", "0.1", "--kl_coef", "0.2")
    assert config.kl_coef == 0.2
    assert config.total_episodes == config_files.load_config("tldr_ppo").total_episodes


FORMS = [
    (["--kl-coef", "0.1"], "kl_coef", 0.1),
    (["--kl_coef=1e-3"], "kl_coef", 1e-3),
    (["--stop_token", "None"], "stop_token", None),
    (["--lora_target_modules", "q_proj,v_proj"], "lora_target_modules", ("q_proj", "v_proj")),
    (
        ["--lora_target_modules", r".*\.\d{1,2}\.[q,v]_(proj|a,b)"],
        "lora_target_modules",
        (r".*\.\d{1,2}\.[q,v]_(proj|a,b)",),
    ),
    (["--stop_token_ids", "1", "106"], "stop_token_ids", (1, 106)),
    (["--stop_token_ids=1,106"], "stop_token_ids", (1, 106)),
    (["--stop_token_ids", "7"], "stop_token_ids", (7,)),
    (["--stop_token_ids", "generation_config"], "stop_token_ids", "generation_config"),
    (["--stop_token_ids", "None"], "stop_token_ids", None),
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
    (["--eval_steps", "0.1"], "eval_steps", 0.1),
    (["--eval_steps", "10"], "eval_steps", 10.0),
    (["--reward_weights", "0.5", "1"], "reward_weights", (0.5, 1.0)),
    (["--reward_weights", "none"], "reward_weights", None),
    (["--reward_funcs", "a:f", "b.py:g"], "reward_funcs", ("a:f", "b.py:g")),
    (["--generation_kwargs", '{"top_k": 50, "min_p": null}'], "generation_kwargs", {"top_k": 50, "min_p": None}),
    (['--generation_kwargs={"top_p": 0.9}'], "generation_kwargs", {"top_p": 0.9}),
    (["--generation_kwargs", '{"top_k":', "50}"], "generation_kwargs", {"top_k": 50}),
    (["--generation_kwargs", "None"], "generation_kwargs", None),
    (["--dataset_name", "some/data"], "dataset_name", "some/data"),
]


@pytest.mark.parametrize(("flags", "field", "value"), FORMS, ids=[" ".join(form[0]) for form in FORMS])
def test_every_form_of_a_flag_is_read(flags, field, value):
    found = getattr(ppo(*flags), field)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("stage", STAGES)
def test_every_field_is_a_flag_of_its_own_name(stage):
    config = STAGES[stage]()
    for name, hint in field_types(STAGES[stage]).items():
        value = getattr(config, name)
        words = ([str(v) for v in value] or ["none"]) if isinstance(value, tuple) else [str(value)]
        assert getattr(command_line.with_flag(config, name, words), name) == value, (name, hint)


def test_a_pipelines_flags_name_their_stage():
    config = command_line.parse(
        ["--config", "quickstart", "--ppo.kl_coef", "0.3", "--sft.batch-size=8", "--run_dir", "R"]
    )
    assert (config.ppo.kl_coef, config.sft.batch_size, config.run_dir) == (0.3, 8, "R")
    config = command_line.parse(["--config", "quickstart", "--seed", "5", "--dry_run", "--output_dir", "Q"])
    assert (config.seed, config.dry_run, config.run_dir) == (5, True, "Q")


def test_the_flags_of_a_pipeline_of_one_stage_are_that_stages():
    flags = ["--sft_model_path", "FOLDER", "--batch_size", "16", "--run_dir", "R", "--grpo.beta", "0.1"]
    config = command_line.parse(["--config", "quickstart_smollm2", *flags, "--preset", "dapo"])
    assert (config.grpo.sft_model_path, config.grpo.batch_size, config.run_dir) == ("FOLDER", 16, "R")
    assert (config.grpo.beta, config.grpo.epsilon_high) == (0.1, 0.28)
    with pytest.raises(UserError, match="unknown option --bathc_size. Did you mean batch_size"):
        command_line.parse(["--config", "quickstart_smollm2", "--bathc_size", "16"])


def test_a_pipeline_with_rloo_takes_its_flags():
    config = command_line.parse(["--config", "quickstart_rloo", "--rloo.beta", "0.3", "--rloo.rloo_k", "2"])
    assert (config.rloo.beta, config.rloo.num_generations, config.ppo) == (0.3, 2, None)


def test_one_number_clips_rewards_on_both_sides_as_until_0_21():
    assert rloo("--reward_clip_range", "10.0").reward_clip_range == (10.0,)
    assert rloo("--reward_clip_range", "-1", "2").reward_clip_range == (-1.0, 2.0)
    assert rloo("--reward_clip_range", "None").reward_clip_range is None


# --- TRL's batches of responses


def batches(config) -> tuple[int, int, int | None]:
    return config.batch_size, config.num_mini_batches, config.micro_batch_size


def test_steps_per_generation_keeps_the_rows_of_a_minibatch(capsys):
    config = rloo(
        "--batch_size", "64", "--num_mini_batches", "1", "--micro_batch_size=16", "--steps_per_generation", "8"
    )
    assert batches(config) == (128, 2, 16)
    note = (
        "note: --steps_per_generation 8 is --batch_size 128 --num_mini_batches 2 here (micro_batch_size 16 x 8 = 128 "
    )
    assert note + "responses per update, 64 rows per optimizer step as before)." in capsys.readouterr().err


def test_generation_batch_size_is_batch_size_with_minibatches_as_they_were(capsys):
    config = rloo("--generation_batch_size", "256", "--batch_size", "64", "--num_mini_batches", "1")
    assert batches(config) == (256, 4, 128)
    assert "is --batch_size 256 --num_mini_batches 4 here" in capsys.readouterr().err


def test_the_order_of_flags_does_not_matter_to_steps_per_generation():
    flags = ["--steps_per_generation=4", "--micro_batch_size=32", "--num_mini_batches=2", "--batch_size=128"]
    found = {batches(rloo(*flags[i:], *flags[:i])) for i in range(4)}
    assert found == {(128, 2, 32)}
    assert batches(rloo("--steps_per_generation=3", *flags)) == (128, 2, 32)  # of two, the last


def test_a_stage_of_a_pipeline_takes_steps_per_generation():
    config = command_line.parse(
        ["--config", "quickstart_rloo", "--rloo.steps_per_generation=8", "--rloo.micro_batch_size=32"]
    )
    assert batches(config.rloo) == (256, 4, 32)


BAD_GENERATIONS = [
    (["--micro_batch_size=none", "--steps_per_generation=2"], "so it needs --micro_batch_size .TRL's per_device"),
    (
        ["--steps_per_generation=3"],
        "--steps_per_generation 3: .* x 3 = 384 responses .* / 2048 rows .* = 0.1875 minibatches",
    ),
    (
        ["--generation_batch_size=5000"],
        "--generation_batch_size 5000: .* / 2048 rows .*--batch_size and --num_mini_batches",
    ),
    (
        ["--steps_per_generation=2", "--generation_batch_size=4"],
        "--steps_per_generation and --gen.* exclude each other",
    ),
    (["--steps_per_generation=0"], "--steps_per_generation is 0; it must be at least 1"),
    (["--steps_per_generation=x"], "--steps_per_generation = 'x': it must be a whole number"),
    (
        ["--steps_per_generation=2", "--num_mini_batches=3"],
        "--steps_per_generation .* batch_size 4096 / num_mini_batches 3",
    ),
]


@pytest.mark.parametrize(("flags", "message"), BAD_GENERATIONS, ids=[" ".join(flags) for flags, _ in BAD_GENERATIONS])
def test_generations_that_do_not_come_out_even_are_told(flags, message):
    with pytest.raises(UserError, match=message):
        rloo(*flags)


def test_a_runs_config_json_takes_flags_too(tmp_path):
    (tmp_path / "config.json").write_text(config_files.to_json(PPOConfig(lam=0.5)))
    config = command_line.parse(["--config", str(tmp_path / "config.json"), "--gamma", "0.9"])
    assert (config.lam, config.gamma) == (0.5, 0.9)


def test_the_recipe_is_the_file_without_flags():
    config, recipe = command_line.parse_recipe(["--config", "tldr_ppo.py", "--kl_coef", "0.3"])
    assert (config.kl_coef, recipe.config.kl_coef, recipe.name) == (0.3, 0.05, "tldr_ppo.py")


# --- errors


BAD_FLAGS = [
    (["--kl_cof", "1"], "unknown option --kl_cof. Did you mean kl_coef"),
    (["--metrics", "trl"], "unknown option --metrics. It was removed"),
    (["--zzz", "1"], "unknown option --zzz"),
    (["--gae_lambda", "1"], "unknown option --gae_lambda. It is --lam here"),
    (["--lora-rank", "8"], "unknown option --lora_rank. It is --lora_r here"),
    (["--eps_clip", "0.2"], "It is --cliprange here"),
    (["--loss_type", "dapo"], "--loss_type is not supported. .* an option of grpo"),
    (["--kl_coef", "a"], "--kl_coef = 'a': it must be a number"),
    (["--kl_coef"], r"--kl_coef takes one value \(a number\), got none"),
    (["--kl_coef", "1", "2"], "--kl_coef takes one value .*got 2: 1 2"),
    (["--kl_coef", "inf"], "--kl_coef = inf: it must be a finite number"),
    (["--batch_size", "1.5"], "--batch_size = '1.5': it must be a whole number"),
    (["--whiten_rewards", "maybe"], "--whiten_rewards = 'maybe': it must be true or false"),
    (["--kl_estimator", "k4"], "--kl_estimator = 'k4': it must be one of k1, k2, k3"),
    (["--whiten_ddof", "2"], "--whiten_ddof = '2': it must be one of 0, 1"),
    (["--stop_token_ids", "1", "x"], "--stop_token_ids = 'x': it must be a whole number"),
    (["--stop_token_ids", "generation"], "--stop_token_ids = 'generation': it must be a whole number"),
    (["--length_buckets", "64", "x"], "--length_buckets = 'x': it must be a whole number"),
    (["--gamma", "None"], "--gamma = 'None': it must be a number"),
    (["--chosen_column", "x"], "--chosen_column .* an option of reward, not of ppo"),
    (["--generation_kwargs", "{"], "--generation_kwargs = '{' is not JSON .*it must be a dict"),
    (["--generation_kwargs", "3"], "--generation_kwargs = 3: it must be a dict"),
    (["--reward_weights", "a"], "--reward_weights = 'a': it must be a number"),
    (["--num_generations", "4"], "--num_generations is not supported"),
    (["--no_kl_coef"], "unknown option --no_kl_coef"),
    (["--no_whiten_rewards", "true"], "unknown option --no_whiten_rewards"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS, ids=[" ".join(flags) for flags, _ in BAD_FLAGS])
def test_a_bad_flag_is_told_with_what_to_do(flags, message):
    with pytest.raises(UserError, match=message):
        ppo(*flags)


BAD_PIPELINE_FLAGS = [
    (["--kl_coef", "1"], "3 stages, so name the stage: --ppo.kl_coef"),
    (["--learning_rate", "1"], "--sft.learning_rate or --reward.learning_rate or --ppo.learning_rate"),
    (["--kl_cof", "1"], "unknown option --kl_cof. Did you mean ppo.kl_coef"),
    (["--metrics", "trl"], "unknown option --metrics. It was removed"),
    (["--ppo.metrics", "trl"], "unknown option --ppo.metrics. It was removed"),
    (["--gae_lambda", "1"], "unknown option --gae_lambda. It is --ppo.lam here"),
    (["--lora_rank", "8"], "It is --sft.lora_r or --reward.lora_r or --ppo.lora_r here"),
    (["--ppo.lora_rank", "8"], "unknown option --ppo.lora_rank. It is --ppo.lora_r here"),
    (["--ppo.kl_cof", "1"], "unknown option --ppo.kl_cof. Did you mean kl_coef"),
    (["--rloo.kl_coef", "1"], "--rloo.kl_coef: this config has no stage rloo; it has sft, reward, ppo"),
    (["--rlo.kl_coef", "1"], "unknown option --rlo.kl_coef. Did you mean ppo.kl_coef"),
    (["--num_generations", "1"], "--num_generations is not supported"),
    (["--ppo.seed", "x"], "--ppo.seed = 'x': it must be a whole number"),
    (["--seed", "x"], "--seed = 'x': it must be a whole number or None"),
    (["--use_vllm"], "--use_vllm is not supported"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_PIPELINE_FLAGS, ids=[" ".join(f) for f, _ in BAD_PIPELINE_FLAGS])
def test_a_bad_flag_of_a_pipeline_is_told_with_what_to_do(flags, message):
    with pytest.raises(UserError, match=message):
        command_line.parse(["--config", "quickstart.py", *flags])


def test_flags_of_ppo_are_told_where_a_pipeline_has_rloo():
    with pytest.raises(UserError, match="--ppo.kl_coef: this config has no stage ppo; it has sft, reward, rloo"):
        command_line.parse(["--config", "quickstart_rloo", "--ppo.kl_coef", "1"])
    with pytest.raises(UserError, match="3 stages, so name the stage: --rloo.kl_coef"):
        command_line.parse(["--config", "quickstart_rloo", "--kl_coef", "1"])
    with pytest.raises(UserError, match="name the stage: --rloo.steps_per_generation"):
        command_line.parse(["--config", "quickstart_rloo", "--steps_per_generation", "1"])


def test_a_config_is_needed():
    with pytest.raises(UserError, match=r"--config is missing. Shipped: goldrush\.py, grpo_deepmath\.py"):
        command_line.parse(["--kl_coef", "0.1"])
    with pytest.raises(UserError, match=r"'tldr_ppo\.py' .*Did you mean --config tldr_ppo\.py"):
        command_line.parse(["tldr_ppo.py"])
    with pytest.raises(UserError, match="--config takes one config, got 0"):
        command_line.parse(["--config"])


# --- options of commands without a config file


@dataclasses.dataclass(frozen=True)
class Options:
    """A command."""

    paths: tuple[str, ...] = ()
    """Paths."""
    out: str | None = None
    """A file."""
    quiet: bool = False
    """Says nothing."""
    against: tuple[str, ...] | None = None
    """Names."""


LOOSE = [
    (["a", "b", "--out", "c"], Options(("a", "b"), "c")),
    (["--out", "c", "a", "b"], Options(("a", "b"), "c")),
    (["--quiet", "a"], Options(("a",), quiet=True)),
    (["--quiet", "false", "a"], Options(("a",), quiet=False)),
    (["--paths", "a,b"], Options(("a", "b"))),
    (["a", "--against", "none"], Options(("a",), against=())),
]


@pytest.mark.parametrize(("words", "options"), LOOSE, ids=[" ".join(words) for words, _ in LOOSE])
def test_words_without_a_flag_go_to_one_option(words, options):
    assert command_line.parse_options(words, Options, "c", positional="paths", empty_by_none=["against"]) == options


def test_options_of_other_commands_are_checked_like_those_of_a_config(capsys):
    for words, message in ((["--ot", "x"], "Did you mean out"), (["--quiet=x"], "must be true or false")):
        with pytest.raises(UserError, match=message):
            command_line.parse_options(words, Options, "c", positional="paths")
    assert command_line.parse_options(["--file", "x"], Options, "c", aliases={"file": "out"}).out == "x"
    assert "note: --file is --out here" in capsys.readouterr().err
    for words, status in (([], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as end:
            command_line.parse_options(words, Options, "c", positional="paths")
        assert end.value.code == status and "usage: c PATH ... [--OPTION VALUE ...]" in capsys.readouterr().out


# --- help


def test_help_lists_the_shipped_configs_and_the_stages(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.parse(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name, line in config_files.shipped_configs().items():
        assert name in text and line in text
    assert all(f"  {stage} " in text for stage in STAGES)


def test_nothing_at_all_shows_the_usage_and_is_an_error(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.parse([])
    assert end.value.code == 2 and "usage: rlhf-jax train --config CONFIG" in capsys.readouterr().out


def test_an_error_ends_the_command_with_code_2_and_no_traceback():
    root = pathlib.Path(__file__).parents[2]
    line = [sys.executable, "-m", "rlhf_jax.train", "--config", "tldr_ppo.py", "--kl_cof", "0.1"]
    env = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: unknown option --kl_cof. Did you mean kl_coef")

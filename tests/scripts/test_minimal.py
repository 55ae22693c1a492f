"""scripts/minimal/: each loop has the metrics of the command with the same checkpoints, seed and options."""

import dataclasses
import importlib.util
import pathlib

import jax
import pytest

from rlhf_jax import data, models, train
from rlhf_jax.models.io import hf
from tests.helpers import runs
from tests.helpers.checkpoints import write_policy
from tests.helpers.paths import SCRIPTS

UPDATES, SEED, TOLERANCE = 3, 5, 1e-4
QUIET = {"dataset_test_split": None, "report_to": (), "num_sample_generations": 0, "save_steps": 0}


def script(name):
    """A script of scripts/minimal as a module."""
    spec = importlib.util.spec_from_file_location(f"minimal_{name}", SCRIPTS / "minimal" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_reward_model(folder):
    """A reward model of another shape than the policy, with scores that vary. Returns the folder."""
    tokenizer = data.load_tokenizer("synthetic")
    model = models.custom_shape("1x32x2", vocab_size=tokenizer.vocab_size, max_positions=96)
    params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(1), heads=("scalar",)))
    hf.save(folder, model, jax.device_get(params), kind="scalar", extra_config={"pad_token_id": tokenizer.pad_id})
    data.save_tokenizer(tokenizer, str(folder))
    return folder


def command_metrics(config, folder, **options):
    """Metrics of each update of the command."""
    episodes = UPDATES * config.batch_size
    config = dataclasses.replace(config, run_dir=str(folder), seed=SEED, total_episodes=episodes, **QUIET, **options)
    train.run(config)
    return [line for line in runs.lines(folder) if "grad_norm" in line]


def assert_same_metrics(loop, command, optimizer_steps):
    assert len(loop) == len(command) == UPDATES
    for step, (ours, theirs) in enumerate(zip(loop, command, strict=True)):
        assert len(ours) > 20
        # metrics.jsonl has these two only where something is not finite.
        assert ours.pop("nonfinite/causes") == 0 and ours.pop("nonfinite/steps_applied") == optimizer_steps
        for name, value in ours.items():
            expected = theirs[name]
            assert abs(value - expected) <= TOLERANCE * max(abs(expected), 0.01), f"update {step}, {name}"


@pytest.mark.parametrize("scored_by", ["reward_model", pytest.param("function", marks=pytest.mark.runs)])
def test_ppo_has_the_metrics_of_the_command(tmp_path, scored_by):
    ppo, policy = script("ppo"), write_policy(tmp_path / "sft")
    argv = ["--model", str(policy), "--updates", str(UPDATES), "--seed", str(SEED), "--output", str(tmp_path / "loop")]
    options = {"sft_model_path": str(policy)}
    if scored_by == "reward_model":
        reward = write_reward_model(tmp_path / "reward")
        argv += ["--reward_model", str(reward)]
        options["reward_model_path"] = str(reward)
    else:
        options["reward_funcs"] = ("rlhf_jax.data.synthetic:gold_reward",)
    loop = ppo.main(argv)
    assert_same_metrics(loop, command_metrics(ppo.CONFIG, tmp_path / "command", **options), 8)
    for role, kind in (("policy", "causal"), ("value", "scalar")):
        assert_same_params(tmp_path / "loop" / role, tmp_path / "command" / role, kind)


def test_grpo_has_the_metrics_of_the_command(tmp_path):
    grpo, policy = script("grpo"), write_policy(tmp_path / "sft")
    argv = ["--model", str(policy), "--updates", str(UPDATES), "--seed", str(SEED), "--output", str(tmp_path / "loop")]
    options = {"sft_model_path": str(policy), "reward_funcs": ("rlhf_jax.data.synthetic:gold_reward",)}
    loop = grpo.main(argv)
    assert_same_metrics(loop, command_metrics(grpo.CONFIG, tmp_path / "command", **options), 4)
    assert_same_params(tmp_path / "loop" / "policy", tmp_path / "command" / "policy", "causal")


def assert_same_params(ours: pathlib.Path, theirs: pathlib.Path, kind):
    pairs = zip(*(jax.tree.leaves(hf.load(folder, kind=kind)[1]) for folder in (ours, theirs)), strict=True)
    for a, b in pairs:
        # The gradient of a bias of keys is 0 up to rounding, which Adam scales up.
        assert abs(a - b).max() <= 1e-3

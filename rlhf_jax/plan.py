"""--dry_run: the resolved config, the batch arithmetic, the mesh and the memory, before anything is loaded."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import arithmetic, configfile, data, models, sharding
from rlhf_jax.config import PolicyConfig, PPOConfig, RLOOConfig, SFTConfig, StageConfig
from rlhf_jax.models import hf


def _scratch(config: StageConfig):
    """The model of random weights."""
    rows = 50304
    if config.tokenizer_name_or_path:
        tokenizer = data.load_tokenizer(config.tokenizer_name_or_path, None, vocab_size=None)
        rows = 128 * math.ceil(tokenizer.vocab_size / 128)
    if "x" in config.scratch_model:
        return models.custom_shape(config.scratch_model, rows)
    return models.pythia(config.scratch_model, vocab_size=rows)


def _model(config: StageConfig, path: str | None, revision: str):
    """The model at `path`, from its config.json alone; None where there is none to read."""
    if path is None:
        return None
    if path.startswith(os.path.dirname(config.run_dir) + os.sep) and not os.path.exists(path):
        # An earlier stage of the same pipeline will leave it there.
        raise FileNotFoundError(path)
    return hf.load_model(path, revision=revision)


def parameters(model: Any, head: str) -> int:
    """Number of parameters of a model with one head."""
    shapes = jax.eval_shape(lambda key: model.init(key, heads=(head,)), jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def roles(config: StageConfig) -> list[tuple[str, Any, str, bool]]:
    """(role, model, head, trained) of every model that the stage holds."""
    if not isinstance(config, PolicyConfig):
        head = "causal" if isinstance(config, SFTConfig) else "scalar"
        start = _scratch(config) if config.scratch_model else None
        return [("model", start or _model(config, config.model_name_or_path, config.model_revision), head, True)]
    policy = _scratch(config) if config.scratch_model else _model(config, config.sft_model_path, config.model_revision)
    reward = _model(config, config.reward_model_path, config.reward_model_revision)
    found = [("policy", policy, "causal", True)]
    if isinstance(config, PPOConfig) and config.value_model == "separate":
        value = _model(config, config.value_model_path, config.value_model_revision) or reward or policy
        found.append(("value", value, "scalar", True))
    if not isinstance(config, RLOOConfig) or config.beta:
        found.append(
            ("reference", _model(config, config.ref_model_path, config.ref_model_revision) or policy, "causal", False)
        )
    if reward is not None:
        found.append(("reward", reward, "scalar", False))
    for number, path in enumerate(config.more_reward_models, 2):
        found.append((f"reward {number}", _model(config, path, "main"), "scalar", False))
    return found


def memory_lines(config: StageConfig) -> list[str]:
    """Bytes of each model with its optimizer state, on all devices and on each, in float32."""
    mesh = sharding.make_mesh(config.mesh_data, config.mesh_fsdp, config.mesh_tensor)
    split = mesh.shape["fsdp"] * mesh.shape["tensor"]
    lines, total = [], 0
    for role, model, head, trained in roles(config):
        count = parameters(model, head)
        # Trained: weights, two Adam moments and a gradient, 4 bytes each. Frozen: weights.
        size = count * 4 * (4 if trained else 1)
        total += size
        what = "weights, Adam, gradient" if trained else "weights"
        lines.append(f"{role:<10} {count:>15,} parameters  {size / 2**20:>12,.1f} MiB  ({what})")
    lines.append(f"{'together':<10} {'':>15}             {total / 2**20:>12,.1f} MiB")
    lines.append(f"on each device, split {split} ways: about {total / split / 2**20:,.1f} MiB, activations not counted")
    return lines


def show(config: StageConfig) -> None:
    """Prints the plan of a stage and loads no weights.

    Raises:
      UserError: a model's config cannot be read, or does not fit the run.
    """
    mesh = sharding.make_mesh(config.mesh_data, config.mesh_fsdp, config.mesh_tensor)
    print(configfile.to_json(config))
    platform = mesh.devices.flat[0].platform
    for line in arithmetic.batch_lines(arithmetic.with_micro_batch(config, sharding.row_shards(mesh), platform)):
        print(line)
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    print(f"mesh: {axes} ({mesh.size} {device.platform} device{'s' if mesh.size > 1 else ''}), jax {jax.__version__}")
    try:
        lines = memory_lines(config)
    except FileNotFoundError as error:
        lines = [f"memory: not known before {error} exists"]
    for line in lines:
        print(line)
    print(f"compute {jnp.dtype(config.dtype).name}; dry run: nothing was loaded or written")

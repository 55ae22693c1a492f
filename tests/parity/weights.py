"""Final weights of a replay against the recorded ones, tensor by tensor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.optimizer import learning_rate
from rlhf_jax.models import Model
from rlhf_jax.models.decoder_context import DecoderConfig
from tests.parity.report import Report, distance

WEIGHTS = 1e-4
NOISY_EPSILON = 1e-6  # below it Adam amplifies the rounding of gradients that are 0 in exact arithmetic


def compare_weights(report: Report, role: str, params, theirs, model: Model, epsilon: float, rates: float) -> None:
    """Adds every tensor, layer by layer; `theirs`: as recorded; `rates`: sum of the rates of all optimizer steps."""
    config = model.family.decoder_config(model.config)
    flat = jax.tree_util.tree_leaves_with_path(params)
    for (path, ours), other in zip(flat, jax.tree.leaves(theirs), strict=True):
        name = "/".join(entry.key for entry in path)
        stacked = "/layers/" in name
        pairs = zip(ours, other, strict=True) if stacked else [(ours, other)]
        for layer, (a, b) in enumerate(pairs):
            where = f"layer {layer} {name.split('/layers/')[-1]}" if stacked else name
            a, b = np.asarray(a), np.asarray(b)
            if epsilon < NOISY_EPSILON and name.endswith("query_key_value/bias"):
                # A bias added to every key shifts all scores of a query alike: its gradient is rounding, of which Adam
                # makes steps as large as the rate, in any direction. Two runs can part by twice their sum.
                (a, keys), (b, their_keys) = (split_keys(x, config) for x in (a, b))
                drift = float(np.abs(keys - their_keys).max()) / (2 * rates)
                report.add(f"final {role}, key biases", drift, 1.0, where)
            elif epsilon < NOISY_EPSILON and name.endswith("attention/key/bias"):
                report.add(f"final {role}, key biases", float(np.abs(a - b).max()) / (2 * rates), 1.0, where)
                continue
            report.add(f"final {role}, tensors", distance(a, b), WEIGHTS, where)


def split_keys(bias: np.ndarray, config: DecoderConfig) -> tuple[np.ndarray, np.ndarray]:
    """(query and value parts, key part) of a fused QKV bias, interleaved by head or in blocks."""
    if config.qkv == "interleaved":
        parts = bias.reshape(config.num_attention_heads, 3, -1)
        return parts[:, ::2], parts[:, 1]
    start = config.num_attention_heads * config.head_dim
    keys = slice(start, start + config.num_key_value_heads * config.head_dim)
    return np.delete(bias, keys), bias[keys]


def sum_of_rates(config, steps: int) -> float:
    """The learning rates of all steps of the schedule, summed."""
    return float(sum(learning_rate(config, jnp.int32(step), steps) for step in range(steps)))

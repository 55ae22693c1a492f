"""Checkpoints on disk for tests that load a policy."""

from __future__ import annotations

import pathlib

import jax

from rlhf_jax import data, models
from rlhf_jax.models.io import hf


def write_policy(folder: pathlib.Path) -> pathlib.Path:
    """A GPT-NeoX of one layer with the built-in tokenizer, whose answers vary. Returns the folder."""
    tokenizer = data.load_tokenizer("synthetic")
    model = models.custom_shape("1x16x2", vocab_size=tokenizer.vocab_size, max_positions=96)
    params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(0), heads=("causal",)))
    hf.save(folder, model, jax.device_get(params), kind="causal")
    data.save_tokenizer(tokenizer, str(folder))
    return folder

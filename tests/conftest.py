"""CPU, and no silent broadcasting."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

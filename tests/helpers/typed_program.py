"""A program of a user's, for the type checker alone: mypy reads it and compares what it infers."""

from __future__ import annotations

from typing import assert_type

import jax.numpy as jnp

import rlhf_jax
from rlhf_jax import advantages, losses
from rlhf_jax.inference import Policy
from rlhf_jax.runtime.callbacks import Control
from rlhf_jax.train import Result
from rlhf_jax.types import Array


class Stop(rlhf_jax.Callback):
    """A callback with the signature of the base class."""

    def on_step_end(self, step: int, metrics: dict[str, float], control: Control) -> None:
        """Stops at once."""
        control.stop = True


def program() -> None:
    """Never called."""
    config = rlhf_jax.PPOConfig(learning_rate=1e-5, run_dir="runs/typed")
    result = rlhf_jax.run(config, callbacks=[Stop()], reward_funcs=lambda completions, **columns: [0.0])
    assert_type(result, Result)
    assert_type(result.metrics["objective/kl"], float)
    policy = rlhf_jax.load_policy(result.paths["policy"])
    assert_type(policy, Policy)
    assert_type(policy.generate(["a text", "another"], temperature=0.7), list[str] | str)
    adv, returns = advantages.gae(jnp.zeros((2, 3)), jnp.zeros((2, 3)), gamma=1.0, lam=0.95)
    assert_type(adv, Array)
    assert_type(losses.clipped_policy_loss(adv, returns, adv, jnp.ones((2, 3), bool), cliprange=0.2), Array)

"""An update of optimizer steps that may be skipped, compiled for a device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import nonfinite
from rlhf_jax.algorithms.optimizer import make_optimizer
from rlhf_jax.config import SFTConfig
from rlhf_jax.dry_run import topologies
from rlhf_jax.dry_run.compiling import Program, compile_program
from rlhf_jax.parallel import sharding

PARAMS_BYTES = 8 * 4 * 2**20


def compile_for(device) -> Program:
    """The program; its params are eight arrays of 4 MiB."""
    params = {f"w{i}": jnp.zeros((1024, 1024)) for i in range(8)}
    optimizer = make_optimizer(SFTConfig(model_name_or_path=None, max_grad_norm=1.0), 10)

    def update(params, opt_state, x):
        def step(carry, x):
            params, opt_state, enabled = carry
            grads = jax.tree.map(lambda p: jnp.sin(p * x), params)
            options = {"step": jnp.int32(0), "loss": x, "steps_enabled": enabled}
            return nonfinite.apply_if_finite(optimizer, params, opt_state, grads, **options)[:3], x

        return jax.lax.scan(step, (params, opt_state, jnp.bool_(True)), x)[0][:2]

    where = sharding.replicated(sharding.make_mesh(devices=[device]))
    given = (params, jax.eval_shape(optimizer.init, params), jnp.ones(4))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), given)
    traced = jax.jit(update, donate_argnums=(0, 1)).trace(*shapes)
    return compile_program("update", traced, 0, topologies.compiler_options(device))

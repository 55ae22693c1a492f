"""Our side of rollouts.py, in its own process.

    python scripts/bench/rollouts_ours.py WORK SYSTEM NAME

rollouts.py writes WORK/NAME-case.json. The result goes to WORK/SYSTEM-NAME.json.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_case import peak_rss_mib
from rollouts_case import Rollouts, child_arguments, measure, write

from rlhf_jax.generate import Decoding, Sampling, generate
from rlhf_jax.models.io import hf
from rlhf_jax.types import PromptBatch, Rollout


def program(rollouts: Rollouts) -> Callable[[list[int]], Rollout]:
    """Most tokens of each row -> what `generate` returns; compiled on the first call."""
    model, params = hf.load(rollouts.model)
    params = jax.tree.map(jnp.asarray, params)
    tokens = jnp.asarray(rollouts.prompts, jnp.int32)
    rows, columns = tokens.shape
    prompts = PromptBatch(tokens, jnp.full((rows,), columns, jnp.int32), jnp.arange(rows, dtype=jnp.int32))
    # Without a stop token only the limits end a row.
    sampling = Sampling(max_new_tokens=rollouts.response_length)
    decoding = Decoding(**rollouts.decoding)

    @jax.jit
    def run(params, prompts, key, limits):
        return generate(model, params, prompts, key, sampling, limits=limits, decoding=decoding)

    return lambda limits: run(params, prompts, jax.random.key(rollouts.seed), jnp.asarray(limits, jnp.int32))


def lengths_of(rollout) -> list[int]:
    """Tokens of each response of a rollout."""
    return np.asarray(rollout.lengths).tolist()


def main() -> None:
    """Measures and writes."""
    rollouts, args = child_arguments()
    jax.config.update("jax_platforms", rollouts.device)
    jax.devices()
    imports = peak_rss_mib()
    run = program(rollouts)
    write(args, measure(rollouts, lambda limits: lengths_of(run(limits)), imports))


if __name__ == "__main__":
    main()

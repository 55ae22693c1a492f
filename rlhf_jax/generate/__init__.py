"""Sampling: prompts in, a `Rollout` out, prefill and decoding in one compiled program."""

from typing import TYPE_CHECKING

from rlhf_jax.utils.lazy import attributes

if TYPE_CHECKING:
    from rlhf_jax.generate.chunks import map_in_chunks
    from rlhf_jax.generate.rollout import generate, generate_unstacked
    from rlhf_jax.generate.sampling import Sampling, draw, process_logits
    from rlhf_jax.generate.slots import Decoding, Steps

_HOMES = {
    "Decoding": "slots",
    "Sampling": "sampling",
    "Steps": "slots",
    "draw": "sampling",
    "generate": "rollout",
    "generate_unstacked": "rollout",
    "map_in_chunks": "chunks",
    "process_logits": "sampling",
}
__all__ = [*_HOMES]
__getattr__ = attributes(__name__, _HOMES)

"""The work of a benchmark's case, and the check of its formula against what XLA counts."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from benchmark_case import Case

from rlhf_jax.models.attention import QUERY_BLOCK
from rlhf_jax.stages.work import Shape, Work, rollout_work


def case_work(case: Case, shape: Shape, prompts: Sequence[int]) -> dict[str, Work]:
    """The work of an update's phases, all of whose models have one shape; the benchmark calls `score` reward."""
    roles = ("policy", "reference", "reward", *(("value",) if case.algo == "ppo" else ()))
    phases = rollout_work(
        dict.fromkeys(roles, shape),
        prompts,
        case.group,
        case.response_length,
        case.epochs,
        frozen=case.frozen,
        itemsize=jnp.dtype(case.dtype).itemsize,
    )
    return {"reward" if name == "score" else name: work for name, work in phases.items()}


def blocked(length: int) -> int:
    """Pairs that `attention.causal_attention` multiplies: its blocks extend beyond the diagonal."""
    block = max(QUERY_BLOCK, -(-length // 8))
    stops = [min(start + block, length) for start in range(0, length, block)]
    return sum((stop - start) * stop for start, stop in zip(range(0, length, block), stops))


def counted_by_xla(model, rows: int, length: int) -> float:
    """XLA's FLOP count of a forward pass with logits everywhere. Layers are unrolled: it counts a loop body once.

    Args:
      model: a `models.Model` with a causal head.
      rows, length: of the batch.
    """
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))

    def forward(params, tokens, mask):
        params = model.unstack(params)
        hidden, kept = model.prefill(params, tokens, mask)
        # prefill returns the last position only; logits of the others cost the same.
        logits = model.logits(params, jnp.broadcast_to(hidden[:, None], (*tokens.shape, hidden.shape[-1])))
        return logits, kept

    shapes = (jax.ShapeDtypeStruct((rows, length), kind) for kind in (jnp.int32, jnp.bool_))
    return jax.jit(forward).lower(params, *shapes).cost_analysis()["flops"]


def both_counts(model, rows: int, length: int) -> dict[str, float]:
    """FLOPs of that forward pass by formula and by XLA."""
    logits, pairs = rows * length, rows * blocked(length)
    formula = Shape.of(model).forward(rows * length, pairs, logits, (rows * length, pairs))
    return {"rows": rows, "length": length, "formula": formula, "xla": counted_by_xla(model, rows, length)}

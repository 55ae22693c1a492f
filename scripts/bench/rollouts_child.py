"""One side of rollouts.py, in a process of its own.

    python scripts/bench/rollouts_child.py WORK ours|generate NAME

rollouts.py writes WORK/NAME-case.json. The result goes to WORK/SYSTEM-NAME.json. Each side imports its libraries,
so that the memory of a process is only its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark_case import peak_rss_mib, use_cores, write_result

WARM_UP = 4
"""Most tokens of a row in the rollout that compiles or warms up."""

Generate = Callable[[list[int]], list[int]]
"""Most tokens of each row -> tokens of each response."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The rollouts of a process."""

    model: str
    """Folder of a checkpoint."""
    prompts: list[list[int]]
    """[B][C] tokens, all of the same length."""
    limits: list[int]
    """[B] tokens of each response."""
    response_length: int
    """T: columns of the response."""
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Ours: fields of `generate.Decoding`; absent: its defaults."""
    repeats: int = 1
    """Timed rollouts."""
    cores: int = 1
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(self.limits)

    def write(self, path: Path) -> None:
        """Writes the rollouts for a child process."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Rollouts:
        """Reads what `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def ours(rollouts: Rollouts) -> tuple[Generate, float]:
    """`rlhf_jax.generate`, compiled on the first call; and MiB of the process before it reads weights."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rlhf_jax.generate import Decoding, Sampling, generate
    from rlhf_jax.models.io import hf
    from rlhf_jax.types import PromptBatch

    jax.config.update("jax_platforms", rollouts.device)
    jax.devices()
    imports = peak_rss_mib()
    model, params = hf.load(rollouts.model)
    params = jax.tree.map(jnp.asarray, params)
    tokens = jnp.asarray(rollouts.prompts, jnp.int32)
    rows, columns = tokens.shape
    prompts = PromptBatch(tokens, jnp.full((rows,), columns, jnp.int32), jnp.arange(rows, dtype=jnp.int32))
    # Without a stop token only the limits end a row.
    sampling = Sampling(max_new_tokens=rollouts.response_length)
    decoding = Decoding(**rollouts.decoding)

    @jax.jit
    def program(params, prompts, key, limits):
        return generate(model, params, prompts, key, sampling, limits=limits, decoding=decoding).lengths

    def run(limits: list[int]) -> list[int]:
        lengths = program(params, prompts, jax.random.key(rollouts.seed), jnp.asarray(limits, jnp.int32))
        return np.asarray(lengths).tolist()

    return run, imports


def of_transformers(rollouts: Rollouts) -> tuple[Generate, float]:
    """transformers' `generate` of all rows together with sdpa, until the longest has ended; and MiB as above.

    Every row is sampled from the whole distribution until then, as `generate` does behind an eos. What is behind a
    row's limit is not counted.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Limits(StoppingCriteria):
        """Ends each row at its own number of tokens."""

        def __init__(self, limits: list[int]):
            self.ends = len(rollouts.prompts[0]) + torch.tensor(limits)

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
            return self.ends <= input_ids.shape[1]

    torch.set_num_threads(rollouts.cores)
    imports = peak_rss_mib()
    dtype = getattr(torch, rollouts.dtype)
    model = AutoModelForCausalLM.from_pretrained(rollouts.model, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    config = GenerationConfig(**options, eos_token_id=None, max_new_tokens=rollouts.response_length)
    prompts = torch.tensor(rollouts.prompts)

    def run(limits: list[int]) -> list[int]:
        ends, mask = StoppingCriteriaList([Limits(limits)]), torch.ones_like(prompts)
        tokens = model.generate(prompts, attention_mask=mask, generation_config=config, stopping_criteria=ends)
        columns = tokens.shape[1] - prompts.shape[1]
        if columns != max(limits):
            raise RuntimeError(f"generate returned {columns} columns, not {max(limits)}")
        return list(limits)

    return run, imports


SIDES = {"ours": ours, "generate": of_transformers}


def measure(rollouts: Rollouts, generate: Generate, imports_mib: float) -> dict[str, Any]:
    """Times rollouts after one of `WARM_UP` tokens a row.

    Args:
      rollouts: the rollouts.
      generate: of one of SIDES.
      imports_mib: peak memory of the process before it read weights.

    Returns:
      {"seconds": [...], "first_seconds", "peak_mib", "above_imports_mib"}.

    Raises:
      RuntimeError: a response has another length.
    """
    began = time.perf_counter()
    generate([min(limit, WARM_UP) for limit in rollouts.limits])
    first, seconds = time.perf_counter() - began, []
    for _ in range(rollouts.repeats):
        began = time.perf_counter()
        lengths = generate(rollouts.limits)
        seconds.append(time.perf_counter() - began)
        if lengths != rollouts.limits:
            raise RuntimeError(f"responses of {lengths} tokens, not {rollouts.limits}")
    peak = peak_rss_mib()
    return {"seconds": seconds, "first_seconds": first, "peak_mib": peak, "above_imports_mib": peak - imports_mib}


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("system", choices=SIDES)
    parser.add_argument("name")
    args = parser.parse_args()
    rollouts = Rollouts.read(args.work / f"{args.name}-case.json")
    use_cores(rollouts.cores)
    write_result(args.work, args.system, args.name, measure(rollouts, *SIDES[args.system](rollouts)))


if __name__ == "__main__":
    main()

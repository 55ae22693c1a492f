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
from typing import Any, NamedTuple

from benchmark_case import best_rate, peak_rss_mib, use_cores, write_result

WARM_UP = 4
"""Most tokens of a row in the rollout that compiles or warms up."""

COPY_ENTRIES = 2**26
"""float32 entries whose copy measures bandwidth, as in `rlhf_jax.parallel.peaks`."""

Generate = Callable[[list[int]], tuple[list[int], int]]
"""Most tokens of each row -> (tokens of each response, decode steps)."""


class Side(NamedTuple):
    """A system, ready to generate."""

    generate: Generate
    imports_mib: float
    """Peak memory of the process before it read weights."""
    peak_mib: Callable[[], float]
    """Peak memory so far: of the device if it has memory of its own, else of the process."""
    copy_rate: Callable[[], float]
    """Bytes/s of a large copy on the device, read and written."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The rollouts of a process."""

    model: str
    """Folder of a checkpoint."""
    prompts: list[list[int]]
    """[B] prompts, each a list of its tokens; the systems pad them on the left."""
    limits: list[int]
    """[B] tokens of each response."""
    response_length: int
    """T: columns of the response."""
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Ours: fields of `generate.Decoding`; absent: its defaults."""
    repeats: int = 1
    """Timed rollouts."""
    temperature: float = 1.0
    cores: int = 1
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(self.limits)

    @property
    def padded(self) -> list[list[int]]:
        """[B][C] tokens, prompts with zeros before them."""
        width = max(map(len, self.prompts))
        return [[0] * (width - len(prompt)) + prompt for prompt in self.prompts]

    def write(self, path: Path) -> None:
        """Writes the rollouts for a child process."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Rollouts:
        """Reads what `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def ours(rollouts: Rollouts) -> Side:
    """`rlhf_jax.generate`, compiled on the first call."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rlhf_jax.generate import Decoding, Sampling, generate
    from rlhf_jax.models.io import hf
    from rlhf_jax.parallel import peaks, xla_flags
    from rlhf_jax.types import PromptBatch

    xla_flags.add_those_of_run()
    jax.config.update("jax_platforms", rollouts.device)
    device = jax.devices()[0]

    def peak_mib() -> float:
        return (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**20 or peak_rss_mib()

    imports = peak_mib()
    model, params = hf.load(rollouts.model)
    params = jax.tree.map(jnp.asarray, params)
    tokens, lengths = jnp.asarray(rollouts.padded, jnp.int32), jnp.asarray([len(p) for p in rollouts.prompts])
    prompts = PromptBatch(tokens, lengths.astype(jnp.int32), jnp.arange(len(tokens), dtype=jnp.int32))
    # Without a stop token only the limits end a row.
    sampling = Sampling(max_new_tokens=rollouts.response_length, temperature=rollouts.temperature)
    decoding = Decoding(**rollouts.decoding)

    @jax.jit
    def program(params, prompts, key, limits):
        options = {"dtype": jnp.dtype(rollouts.dtype), "decoding": decoding, "return_steps": True}
        rollout, steps = generate(model, params, prompts, key, sampling, limits=limits, **options)
        return rollout.lengths, steps.steps[0]

    def run(limits: list[int]) -> tuple[list[int], int]:
        lengths, steps = program(params, prompts, jax.random.key(rollouts.seed), jnp.asarray(limits, jnp.int32))
        return np.asarray(lengths).tolist(), int(steps)

    return Side(run, imports, peak_mib, peaks.copy_rate)


def of_transformers(rollouts: Rollouts) -> Side:
    """transformers' `generate` of all rows together with sdpa, until the longest has ended.

    Every row is sampled from the whole distribution until then, as `generate` does behind an eos. What is behind a
    row's limit is not counted.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Limits(StoppingCriteria):
        """Ends each row at its own number of tokens."""

        def __init__(self, limits: list[int]):
            self.ends = prompts.shape[1] + torch.tensor(limits, device=device)

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
            return self.ends <= input_ids.shape[1]

    torch.set_num_threads(rollouts.cores)
    device = torch.device("cpu" if rollouts.device == "cpu" else "cuda")
    cuda = device.type == "cuda"

    def peak_mib() -> float:
        return torch.cuda.max_memory_allocated() / 2**20 if cuda else peak_rss_mib()

    imports = peak_mib()
    dtype = getattr(torch, rollouts.dtype)
    model = AutoModelForCausalLM.from_pretrained(rollouts.model, dtype=dtype, attn_implementation="sdpa").eval()
    model.to(device)
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    options = {"do_sample": True, "temperature": rollouts.temperature, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    config = GenerationConfig(**options, eos_token_id=None, max_new_tokens=rollouts.response_length)
    prompts, lengths = torch.tensor(rollouts.padded, device=device), torch.tensor([len(p) for p in rollouts.prompts])
    mask = (torch.arange(prompts.shape[1]) >= prompts.shape[1] - lengths[:, None]).long().to(device)

    def run(limits: list[int]) -> tuple[list[int], int]:
        ends = StoppingCriteriaList([Limits(limits)])
        tokens = model.generate(prompts, attention_mask=mask, generation_config=config, stopping_criteria=ends)
        columns = tokens.shape[1] - prompts.shape[1]
        if columns != max(limits):
            raise RuntimeError(f"generate returned {columns} columns, not {max(limits)}")
        return list(limits), columns - 1

    def copy_rate() -> float:
        source = torch.zeros(COPY_ENTRIES, device=device)

        def seconds() -> float:
            began = time.perf_counter()
            for _ in range(5):
                source + 1
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        return best_rate([(5 * 8.0 * COPY_ENTRIES, seconds)])

    return Side(run, imports, peak_mib, copy_rate)


SIDES = {"ours": ours, "generate": of_transformers}


def measure(rollouts: Rollouts, side: Side) -> dict[str, Any]:
    """Times rollouts after one of `WARM_UP` tokens a row.

    Args:
      rollouts: the rollouts.
      side: of one of SIDES.

    Returns:
      {"seconds": [...], "first_seconds", "prompt_seconds": of a rollout of one token a row, which has no decode step,
      "steps": decode steps, "peak_mib", "above_imports_mib", "copy_rate": bytes/s}.

    Raises:
      RuntimeError: a response has another length.
    """

    def timed(limits: list[int]) -> tuple[float, int]:
        began = time.perf_counter()
        lengths, steps = side.generate(limits)
        seconds = time.perf_counter() - began
        if lengths != limits:
            raise RuntimeError(f"responses of {lengths} tokens, not {limits}")
        return seconds, steps

    first, _ = timed([min(limit, WARM_UP) for limit in rollouts.limits])
    prompt_seconds, _ = timed([1] * len(rollouts.limits))
    seconds, steps = zip(*(timed(rollouts.limits) for _ in range(rollouts.repeats)), strict=True)
    result = {"seconds": seconds, "first_seconds": first, "prompt_seconds": prompt_seconds, "steps": steps[0]}
    peak = side.peak_mib()
    return result | {"peak_mib": peak, "above_imports_mib": peak - side.imports_mib, "copy_rate": side.copy_rate()}


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("system", choices=SIDES)
    parser.add_argument("name")
    args = parser.parse_args()
    rollouts = Rollouts.read(args.work / f"{args.name}-case.json")
    use_cores(rollouts.cores)
    write_result(args.work, args.system, args.name, measure(rollouts, SIDES[args.system](rollouts)))


if __name__ == "__main__":
    main()

"""transformers' side of rollouts.py, in its own process: `generate` on one batch.

    python scripts/bench/rollouts_transformers.py WORK generate NAME

rollouts.py writes WORK/NAME-case.json. The result goes to WORK/SYSTEM-NAME.json. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmark_case import peak_rss_mib
from rollouts_case import Rollouts, child_arguments, measure, write
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)


class Limits(StoppingCriteria):
    """Ends each row at its own number of tokens."""

    def __init__(self, prompt_length: int, limits: list[int]):
        self.ends = prompt_length + torch.tensor(limits)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        """[B] bool: whether the row has ended."""
        return self.ends <= input_ids.shape[1]


def load(rollouts: Rollouts):
    """The model, in float32 with sdpa, without the eos of its config."""
    model = AutoModelForCausalLM.from_pretrained(
        rollouts.model, dtype=getattr(torch, rollouts.dtype), attn_implementation="sdpa"
    )
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return model.eval()


def one_batch(rollouts: Rollouts) -> Callable[[list[int]], list[int]]:
    """`generate` of all rows together, until the longest has ended: limits -> lengths.

    Every row is sampled from the whole distribution until then, as `generate` does behind an eos. What is behind a
    row's limit is not counted.
    """
    model, prompts = load(rollouts), torch.tensor(rollouts.prompts)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    config = GenerationConfig(**options, eos_token_id=None, max_new_tokens=rollouts.response_length)

    def run(limits: list[int]) -> list[int]:
        criteria = StoppingCriteriaList([Limits(prompts.shape[1], limits)])
        mask = torch.ones_like(prompts)
        tokens = model.generate(prompts, attention_mask=mask, generation_config=config, stopping_criteria=criteria)
        columns = tokens.shape[1] - prompts.shape[1]
        if columns != max(limits):
            raise RuntimeError(f"generate returned {columns} columns, not {max(limits)}")
        return list(limits)

    return run


def main() -> None:
    """Measures and writes."""
    rollouts, args = child_arguments()
    torch.set_num_threads(rollouts.cores)
    imports = peak_rss_mib()
    write(args, measure(rollouts, one_batch(rollouts), imports))


if __name__ == "__main__":
    main()

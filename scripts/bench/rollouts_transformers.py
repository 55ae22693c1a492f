"""transformers' side of rollouts.py, in its own process: `generate` on one batch, or continuous batching.

    python scripts/bench/rollouts_transformers.py WORK generate|continuous NAME

rollouts.py writes WORK/NAME-case.json. The result goes to WORK/SYSTEM-NAME.json. Imports no JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from benchmark_case import peak_rss_mib
from rollouts_case import Rollouts, child_arguments, measure, write
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

NO_EOS = -1  # transformers' value in continuous batching


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


def sampling(rollouts: Rollouts, eos_token_id: int | None) -> GenerationConfig:
    """Sampling from the whole distribution at temperature 1."""
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        **options, eos_token_id=eos_token_id, pad_token_id=0, max_new_tokens=rollouts.response_length
    )


@contextlib.contextmanager
def one_batch(rollouts: Rollouts) -> Iterator[Callable[[list[int]], list[int]]]:
    """`generate` of all rows together, until the longest has ended: limits -> lengths.

    Every row is sampled until then, as `generate` does behind an eos. What is behind a row's limit is not counted."""
    model, config = load(rollouts), sampling(rollouts, None)
    prompts = torch.tensor(rollouts.prompts)

    def run(limits: list[int]) -> list[int]:
        criteria = StoppingCriteriaList([Limits(prompts.shape[1], limits)])
        mask = torch.ones_like(prompts)
        found = model.generate(prompts, attention_mask=mask, generation_config=config, stopping_criteria=criteria)
        columns = found.shape[1] - prompts.shape[1]
        if columns != max(limits):
            raise RuntimeError(f"generate returned {columns} columns, not {max(limits)}")
        return list(limits)

    yield run


def batching(rollouts: Rollouts) -> ContinuousBatchingConfig:
    """Room for `slots` whole rows at a time; prompts share nothing, so nothing is shared."""
    slots = rollouts.slots or len(rollouts.prompts)
    page = ContinuousBatchingConfig.page_size
    pages = -(-(len(rollouts.prompts[0]) + rollouts.response_length) // page)
    return ContinuousBatchingConfig(
        num_blocks=slots * pages,
        max_requests_per_batch=slots,
        max_batch_tokens=max(rollouts.batch_tokens, slots),
        allow_block_sharing=False,
        auto_switch_to_flash=False,
        seed=rollouts.seed,
    )


@contextlib.contextmanager
def continuous(rollouts: Rollouts) -> Iterator[Callable[[list[int]], list[int]]]:
    """The manager of `generate_batch`, which takes a limit for each request: limits -> lengths."""
    model, config = load(rollouts), sampling(rollouts, NO_EOS)
    options = {"generation_config": config, "continuous_batching_config": batching(rollouts)}
    with model.continuous_batching_context_manager(**options, block=True, timeout=5, warmup=False) as manager:

        def run(limits: list[int]) -> list[int]:
            ids = [
                manager.add_request(prompt, max_new_tokens=limit, eos_token_id=NO_EOS)
                for prompt, limit in zip(rollouts.prompts, limits)
            ]
            lengths = {}
            while len(lengths) < len(ids):
                output = manager.get_result(timeout=1)
                if output is None:
                    if not manager.is_running():
                        why = manager.background_thread_status.fatal_error
                        raise RuntimeError(f"the thread of continuous batching ended: {why}")
                    continue
                if output.error is not None:
                    raise RuntimeError(output.error)
                lengths[output.request_id] = len(output.generated_tokens)
            return [lengths[name] for name in ids]

        yield run


def main() -> None:
    """Measures and writes."""
    rollouts, args = child_arguments()
    torch.set_num_threads(rollouts.cores)
    imports = peak_rss_mib()
    side = {"generate": one_batch, "continuous": continuous}[args.system]
    try:
        with side(rollouts) as run:
            result = measure(rollouts, run, imports)
    except Exception as error:
        if args.system != "continuous":
            raise
        result = {"error": f"{type(error).__name__}: {error}"}
    write(args, result)


if __name__ == "__main__":
    main()

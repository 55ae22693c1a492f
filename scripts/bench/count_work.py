"""Compares the FLOPs of the programs of an update with the necessary work.

    python scripts/bench/count_work.py --algo ppo --shape 1b --batch 512 --micro 64 --prompts TLDR.jsonl \
        --tokenizer PYTHIA

Nothing runs and no weights are created: the functions of a stage are traced at these shapes and their matrix products
summed. A scan counts once per iteration, a switch by the branch that each micro-batch of these prompts takes, the
decode loop once per token.

The floor is `rlhf_jax.stages.work`: no padding, no masked keys, no repeated prompts. Bytes of decoding are the operands
of its products, each read once a step; their floor is the weights and the filled cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmark
import jax
import numpy as np
from benchmark_case import Case, our_options
from benchmark_report import case_work

from rlhf_jax import UserError, data
from rlhf_jax.algorithms import microbatch
from rlhf_jax.config import STAGES as CONFIGS
from rlhf_jax.dry_run import memory
from rlhf_jax.parallel import compile_ahead, sharding
from rlhf_jax.stages.work import Shape

PHASES = ("generate", "experience", "update")


@dataclasses.dataclass
class Products:
    """FLOPs of a program's matrix products, and bytes of their operands."""

    flops: float = 0.0
    bytes: float = 0.0

    def add(self, other: Products, times: float = 1.0) -> None:
        """Adds another program's products, `times` times."""
        self.flops += times * other.flops
        self.bytes += times * other.bytes


def product(equation) -> Products:
    """The product of one dot_general."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, right = (v.aval for v in equation.invars)
    summed = math.prod(left.shape[i] for i in contracted)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in (left, right))
    return Products(2.0 * summed * math.prod(equation.outvars[0].aval.shape), float(size))


def count(jaxpr, shares: Sequence[float], turns: int) -> Products:
    """Products of a jaxpr and everything it calls.

    Args:
      jaxpr: of a traced program.
      shares: fraction of calls that take each branch of a switch with that many branches.
      turns: iterations of a `while_loop`.
    """
    total = Products()
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total.add(product(equation))
        elif name == "cond":
            branches = params["branches"]
            weights = shares if len(branches) == len(shares) else [1 / len(branches)] * len(branches)
            for branch, weight in zip(branches, weights):
                total.add(count(branch.jaxpr, shares, turns), weight)
        elif name == "while":
            total.add(count(params["body_jaxpr"].jaxpr, shares, turns), turns)
        else:
            inner = [getattr(value, "jaxpr", value) for key, value in params.items() if "jvp" not in key]
            for called in inner:
                if hasattr(called, "eqns"):
                    total.add(count(called, shares, turns), params.get("length", 1) if name == "scan" else 1)
    return total


def programs(case: Case, model, tokenizer, micro: int) -> tuple[dict[str, Any], Any]:
    """{phase: jaxpr} of generate, experience and update at the case's shapes, and their config."""
    jaxprs: dict[str, Any] = {}
    mesh = sharding.make_mesh(1, 1, 1)

    def build(name: str, program: Any, *args: Any, resident: Any, **arguments: Any) -> Any:
        if name in PHASES:
            jaxprs[name] = program.trace(*args, **arguments).jaxpr
        return compile_ahead.result_shapes(program.eval_shape(*args, **arguments), mesh)

    with tempfile.TemporaryDirectory() as folder:  # config.json and tokenizer are all that a planned stage reads
        Path(folder, "config.json").write_text(json.dumps(model.to_hf_config("scalar")))
        data.save_tokenizer(tokenizer, folder)
        options = our_options(case, Path(folder), micro, "none")
        config = CONFIGS[case.algo](**{**options, "sft_model_path": folder, "reward_model_path": folder})
        memory.abstract_stage(config, mesh).trace_programs(build)
    return jaxprs, config


def shares_of(lengths: Sequence[int], rows: int, widths: Sequence[int]) -> list[float]:
    """Fraction of the micro-batches of `rows` sorted prompts that takes each width."""
    parts = np.sort(np.asarray(lengths)).reshape(-1, rows)
    chosen = np.searchsorted(widths, parts.max(axis=1))
    return [float(np.mean(chosen == i)) for i in range(len(widths))]


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 2: wrong options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=("ppo", "rloo"), default="ppo")
    parser.add_argument("--shape", default="1b", help="a Pythia size, or [FAMILY:]LAYERSxWIDTHxHEADS[xKV][@ROWS]")
    parser.add_argument("--prompts", default="synthetic", help="JSON Lines file with a 'prompt' field, or 'synthetic'")
    parser.add_argument("--tokenizer", default="synthetic", help="folder with tokenizer.json, or 'synthetic'")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    sizes = [("batch", 512), ("micro", 64), ("epochs", 4), ("query_length", 512), ("response_length", 53)]
    for name, default in (*sizes, ("num_generations", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    try:
        jax.config.update("jax_platforms", "cpu")
        fields = {name: value for name, value in vars(args).items() if name in Case.__dataclass_fields__}
        case, tokenizer = Case(**fields), data.load_tokenizer(args.tokenizer)
        model, texts = benchmark.model_of(case.shape, tokenizer), benchmark.texts_of(case, tokenizer)
        lengths = [len(ids) for ids in tokenizer.encode_batch(texts[: case.prompts_per_update])]
        rows = max(args.micro // case.group, 1)
        if len(lengths) < case.prompts_per_update or len(lengths) % rows:
            raise UserError(
                f"--prompts has {len(lengths)} that fit; needed: {case.prompts_per_update}, and a multiple of {rows}"
            )
        jaxprs, config = programs(case, model, tokenizer, args.micro)
        decoded = case.response_length - 1
        shares = shares_of(lengths, rows, microbatch.prompt_widths(config, case.query_length))
        floor = case_work(case, Shape.of(model), lengths)
        print(f"{case.name}, micro-batches of {args.micro}, prompts of {np.mean(lengths):.0f} tokens on average")
        print(f"{'phase':<11} {'TFLOP':>10} {'floor':>10} {'ratio':>6}")
        for phase in PHASES:
            flops = count(jaxprs[phase].jaxpr, shares, decoded).flops
            least = floor[phase].flops
            print(f"{phase:<11} {flops / 1e12:>10.4g} {least / 1e12:>10.4g} {flops / least:>6.2f}")
        decoding = count(jaxprs["generate"].jaxpr, shares, decoded).bytes
        decoding -= count(jaxprs["generate"].jaxpr, shares, 0).bytes
        least = floor["decode"].bytes
        print(f"{'decode':<11} {decoding / 1e9:>10.4g} {least / 1e9:>10.4g} {decoding / least:>6.2f}   GB read")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where compile time goes: for each program of an update its seconds of tracing, lowering and XLA, and its size.

    python scripts/bench/compile_seconds.py --algo ppo --shape 410m --batch 64 --dtype bfloat16 [--topology h100:1]

--topology compiles for accelerators that the machine lacks (extras tpu-aot and gpu-aot); without it, for the devices
that it has. Weights are shapes; nothing runs. Instructions and fusions are those of the optimised program; kernels are
the different ones among the fusions.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark_case import Case, our_options


def config_of(args: argparse.Namespace, folder: Path) -> Any:
    """The config of the benchmark's case, with a model of random weights and a function as reward."""
    from rlhf_jax.config import STAGES

    case = Case(
        algo=args.algo,
        shape=args.shape,
        batch=args.batch,
        epochs=args.epochs,
        dtype=args.dtype,
        query_length=args.query_length,
        response_length=args.response_length,
    )
    options = our_options(case, folder, args.micro, str(folder / "run"))
    options |= {"sft_model_path": None, "scratch_model": args.shape, "reward_model_path": None}
    options |= {"dataset_name": "synthetic", "tokenizer_name_or_path": "synthetic", "max_steps": None}
    options |= dict(word.split("=", 1) for word in args.option)
    return STAGES[args.algo](**{name: value for name, value in options.items() if name != "max_steps"})


def measured(config: Any, mesh: Any, only: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A row of the table for each program."""
    from rlhf_jax.dry_run import compiling, memory

    device = mesh.devices.flat[0]
    stage = memory.abstract_stage(config, mesh)
    rows: list[dict[str, Any]] = []
    tracing = [time.perf_counter()]

    def compile_fn(name: str, traced: Any, others: int) -> Any:
        traced_at = time.perf_counter()
        lowered = traced.lower()
        lowered_at = time.perf_counter()
        program = compiling.compile_for(device)(name, traced, others)  # which lowers it once more
        if program.refused:
            raise SystemExit(f"{name} does not fit: it {program.refused}; try a smaller --batch or --micro")
        rows.append(
            {
                "program": name,
                "trace": traced_at - tracing[0],
                "lower": lowered_at - traced_at,
                "compile": program.seconds - (lowered_at - traced_at),
                "lowered": len(re.findall(r"^\s+%\S+ = ", lowered.as_text(), re.M)),
                **counts(program.text),
            }
        )
        return program

    def begin(program: Any) -> None:
        tracing[0] = time.perf_counter()

    memory.programs(stage, begin, only, compile_fn)
    yield from rows


def counts(text: str) -> dict[str, int]:
    """Sizes of an optimised program's text."""
    ops = collections.Counter(re.findall(r"^\s+(?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", text, re.M))
    names = re.findall(r"fusion\(.*calls=%?([\w.-]+)", text)
    bodies = dict(re.findall(r"^%?([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    kernels = {re.sub(r"%\S+|metadata=\{[^}]*\}|\.\d+", "", bodies.get(name, name)) for name in names}
    return {"instructions": sum(ops.values()), "fusions": len(names), "kernels": len(kernels)}


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="ppo", choices=("ppo", "rloo"))
    parser.add_argument("--shape", default="14m", help="of Pythia, or FAMILY:LAYERSxWIDTHxHEADSxKEYS")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--micro", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--query_length", type=int, default=512)
    parser.add_argument("--response_length", type=int, default=53)
    parser.add_argument("--topology", help="such as h100:1 or v5e:1x1; default: this machine's devices")
    parser.add_argument("--only", nargs="+", default=(), metavar="PROGRAM")
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="text options of the config")
    args = parser.parse_args()
    if args.topology:
        os.environ["JAX_PLATFORMS"] = "cpu"
    from rlhf_jax.dry_run import topologies
    from rlhf_jax.parallel.sharding import make_mesh

    mesh = make_mesh(devices=topologies.topology_devices(args.topology)) if args.topology else make_mesh()
    with TemporaryDirectory() as folder:
        print(f"{'':<12}{'trace':>8}{'lower':>8}{'XLA':>8}{'lowered':>9}{'instr.':>9}{'fusions':>9}{'kernels':>9}")
        for row in measured(config_of(args, Path(folder)), mesh, tuple(args.only)):
            seconds = "".join(f"{row[name]:8.2f}" for name in ("trace", "lower", "compile"))
            sizes = "".join(f"{row[name]:9,}" for name in ("lowered", "instructions", "fusions", "kernels"))
            print(f"{row['program']:<12}{seconds}{sizes}", flush=True)


if __name__ == "__main__":
    main()

"""The table of docs/scaling.md, from programs that XLA compiles for TPU slices that you do not have.

    pip install '.[tpu-aot]'
    python scripts/scaling/scaling.py                 # compiles the missing rows; half a minute each
    python scripts/scaling/scaling.py --only 1b:ppo:v5e:4x4 # one row
    python scripts/scaling/scaling.py --weak          # weak scaling: v5p from 8 to 4,096 chips
    python scripts/scaling/scaling.py --print         # prints the finished rows; also with --weak

No weights are created. An update has 512 responses of 53 tokens to prompts of 512, 4 epochs per batch, bfloat16, and
rematerialized layers; RLOO has 4 responses per prompt. FLOPs are counted in the traced program and divided by the
number of chips. Bytes of memory and bytes sent between chips come from the text of the compiled program
(rlhf_jax/dry_run/hlo.py). Code generation, which is most of a compilation and changes none of this, is left out
(rlhf_jax/dry_run/compiling.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import count_work  # noqa: E402

from rlhf_jax import UserError, data, models
from rlhf_jax.config import PPOConfig, RLOOConfig
from rlhf_jax.dry_run import hlo, memory, topologies
from rlhf_jax.dry_run.compiling import Program
from rlhf_jax.parallel import sharding

# (mesh, micro_batch_size, rollout_batch_size) of each size and slice.
LAYOUTS: dict[str, dict[str, tuple[tuple[int, int, int], int, int]]] = {
    "v5e:4x4": {
        "1b": ((1, 16, 1), 256, 512),
        "2.8b": ((1, 8, 2), 64, 128),
        "6.9b": ((1, 4, 4), 16, 64),
        "12b": ((1, 2, 8), 16, 64),
    },
    "v5e:16x16": {
        "1b": ((2, 32, 4), 512, 512),
        "2.8b": ((2, 32, 4), 256, 512),
        "6.9b": ((1, 32, 8), 128, 512),
        "12b": ((1, 32, 8), 64, 512),
    },
    "v5p:2x2x2": {
        "1b": ((1, 8, 1), 256, 512),
        "2.8b": ((1, 8, 1), 128, 512),
        "6.9b": ((1, 8, 1), 64, 256),
        "12b": ((1, 4, 2), 32, 128),
    },
    "v5p:4x4x8": {
        "1b": ((4, 32, 1), 512, 512),
        "2.8b": ((4, 32, 1), 512, 512),
        "6.9b": ((2, 64, 1), 512, 512),
        "12b": ((1, 64, 2), 512, 512),
    },
}
# Larger slices to try, in order, if one is too small.
LARGER = {"v5e": ("4x8", "8x8", "8x16", "16x16"), "v5p": ("2x2x4", "2x4x4", "4x4x4", "4x4x8")}
# bfloat16 FLOP/s, memory bytes/s, bytes/s of all links of a chip: cloud.google.com/tpu/docs/v5e and v5p.
PEAKS = {"v5e": (197e12, 819e9, 200e9), "v5p": (459e12, 2765e9, 600e9)}
# v5p slices and their mesh; rows grow with `data`.
WEAK = {
    "v5p:2x2x2": (1, 8, 1),
    "v5p:4x4x4": (8, 8, 1),
    "v5p:8x8x8": (64, 8, 1),
    "v5p:16x16x16": (512, 8, 1),
}
# Programs of an update that are compiled; log-probabilities and values need less memory than generation.
PROGRAMS = ("generate", "update")
GIB = 2**30
ROWS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "scaling"


def checkpoint(size: str, folder: str) -> str:
    """A folder with the config.json of a Pythia and a tokenizer."""
    return count_work.planned_checkpoint(
        models.pythia(size), data.load_tokenizer("synthetic"), pathlib.Path(folder, size)
    )


def config_of(algo: str, path: str, mesh: tuple[int, int, int], micro: int, rollout: int, batch: int = 512):
    """The config of a row."""
    shared = {
        "sft_model_path": path,
        "reward_model_path": path,
        "reward_input": "ids",
        "query_length": 512,
        "length_buckets": (512,),
        "response_length": 53,
        "temperature": 0.7,
        "stop_token": "eos",
        "batch_size": batch,
        "micro_batch_size": micro,
        "rollout_batch_size": rollout,
        "num_mini_batches": 1,
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "total_episodes": 1_000_000,
        **dict(zip(("mesh_data", "mesh_fsdp", "mesh_tensor"), mesh)),
    }
    if algo == "ppo":
        return PPOConfig(**shared, num_ppo_epochs=4)
    return RLOOConfig(**shared, num_generations=4, num_iterations=4)


def measure(program: str, algo: str, size: str, topology: str, layout: tuple, batch: int = 512) -> dict:
    """One row with one of its programs, compiled and counted."""
    mesh, micro, rollout = layout
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(algo, checkpoint(size, folder), mesh, micro, rollout, batch)
        devices = topologies.topology_devices(topology)
        stage = memory.abstract_stage(config, sharding.make_mesh(*mesh, devices=devices))
        limit = topologies.capacity(devices[0])
        row: dict[str, Any] = {
            "algo": algo,
            "size": size,
            "topology": topology,
            "mesh": mesh,
            "micro": micro,
            "rollout": rollout,
            "batch": batch,
            "limit": limit,
            "parts": memory.resident_bytes(stage),
            "cache": memory.cache_bytes(stage),
            "programs": {},
        }

        def add(program: Program) -> None:
            row["programs"][program.name] = count(program, len(devices), config.response_length)
            print(f"  {program.name}: {program.seconds:.0f} s, peak {program.peak / GIB:.1f} GiB {program.refused}")
            sys.stdout.flush()

        memory.programs(stage, add, (program,))
    return row


def count(program: Program, chips: int, steps: int) -> dict[str, Any]:
    """What a chip holds, computes, moves and sends in one run of a program; for decoding also in one step."""
    row: dict[str, Any] = {
        "peak": program.peak,
        "own": program.temporary + program.outputs - program.aliased,
        "refused": program.refused,
        "seconds": program.seconds,
        **work(program, chips, steps - 1),
    }
    if program.name == "generate":
        one, none = work(program, chips, 1), work(program, chips, 0)
        row["step"] = {name: one[name] - none[name] for name in one}
    return row


def work(program: Program, chips: int, turns: int) -> dict[str, float]:
    """FLOPs, bytes of memory and bytes sent per chip, with `turns` iterations of the decode loop."""
    flops = count_work.count(program.traced.jaxpr.jaxpr, [1.0], turns).flops / chips
    if program.refused:
        return {"flops": flops}
    sent = sum(c.sent * c.times for c in hlo.collectives(program.text, turns))
    return {"flops": flops, "moved": hlo.traffic(program.text, turns), "sent": sent}


def bound(done: dict[str, float], topology: str) -> tuple[float, str]:
    """Lower bound in seconds by the roofline, and the resource that sets it."""
    peaks = PEAKS[topology.split(":")[0]]
    times = {name: done.get(name, 0.0) / peak for name, peak in zip(("flops", "moved", "sent"), peaks)}
    longest = max(times, key=times.get)
    return times[longest], {"flops": "FLOPs", "moved": "memory", "sent": "links"}[longest]


# --- rows on disk


def stored(folder: pathlib.Path, name: str) -> dict | None:
    """A row that an earlier call wrote; None: there is none."""
    path = folder / f"{name.replace(':', '_')}.json"
    return json.loads(path.read_text()) if path.exists() else None


def fill(folder: pathlib.Path, name: str, make: Callable[..., dict], *args: Any) -> dict:
    """The row on disk, or else `make(program, *args)` for all PROGRAMS, which is written to disk.

    Each runs in a process of its own, since libtpu compiles one program at a time.
    """
    if (row := stored(folder, name)) is None:
        print(name, flush=True)
        rows = [in_process(make, program, *args) for program in PROGRAMS]
        programs = {key: program for row in rows for key, program in row["programs"].items()}
        peak = max([sum(rows[0]["parts"].values()), *(program["peak"] for program in programs.values())])
        fits = peak <= rows[0]["limit"] and not any(program["refused"] for program in programs.values())
        keep(folder, name, row := {**rows[0], "programs": programs, "peak": peak, "fits": fits})
    return row


def keep(folder: pathlib.Path, name: str, row: dict) -> None:
    """Writes a row atomically."""
    part = folder / f"{name.replace(':', '_')}.part"
    part.write_text(json.dumps(row, indent=1) + "\n")
    part.rename(part.with_suffix(".json"))


def in_process(make: Callable[..., dict], *args: Any) -> dict:
    """`make(*args)` in another process; the result comes through a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "row")
        process = multiprocessing.get_context("spawn").Process(target=_write_and_exit, args=(path, make, args))
        process.start()
        process.join()
        if not path.exists():
            raise UserError(f"a process exited with code {process.exitcode} without a row; its output is above")
        return json.loads(path.read_text())


def _write_and_exit(path: pathlib.Path, make: Callable[..., dict], args: tuple) -> None:
    path.write_text(json.dumps(make(*args)))
    sys.stdout.flush()
    os._exit(0)  # ends the compiler, which would still generate machine code


def names() -> list[tuple[str, str, str]]:
    """(size, algorithm, topology) of the table's rows, smallest models first."""
    sizes = ("1b", "2.8b", "6.9b", "12b")
    return [(size, algo, topology) for size in sizes for algo in ("ppo", "rloo") for topology in LAYOUTS]


def smallest(algo: str, size: str, topology: str, folder: pathlib.Path) -> str | None:
    """The smallest larger slice of the same kind on which the row fits; compiles each in turn."""
    kind = topology.split(":")[0]
    chips = len(topologies.topology_devices(topology))
    for shape in LARGER[kind]:
        larger = f"{kind}:{shape}"
        count = len(topologies.topology_devices(larger))
        if count <= chips:
            continue
        (_, _, tensor), micro, rollout = LAYOUTS[topology][size]
        split = min(count // tensor, 128 // tensor)
        layout = (count // tensor // split, split, tensor), max(micro, count // tensor), max(rollout, count // tensor)
        row = fill(folder, f"{size}:{algo}:{larger}", measure, algo, size, larger, layout)
        if row["fits"]:
            return larger
    return None


# --- tables


def table(folder: pathlib.Path) -> list[str]:
    """The finished rows as Markdown."""
    lines = [
        "| model | | slice | mesh | rows a pass | trained | moments | frozen | cache | update's own | peak | of "
        "| a token: GFLOP, MiB moved, at least | an update: TFLOP, GiB moved, GiB sent, at least |",
        "|" + "---|" * 14,
    ]
    missing = 0
    for size, algo, topology in names():
        row = stored(folder, f"{size}:{algo}:{topology}")
        if row is None:
            missing += 1
            continue
        lines.append(line(row))
    if missing:
        lines += ["", f"{missing} of {len(names())} rows are missing."]
    return lines


def line(row: dict) -> str:
    """One row of the table."""
    parts, programs = row["parts"], row["programs"]
    trained = sum(parts.get(role, 0) for role in ("policy", "value"))
    frozen = sum(size for name, size in parts.items() if name not in ("policy", "value", "optimizer"))
    held = [trained, parts["optimizer"], frozen, row["cache"], programs.get("update", {}).get("own", 0)]
    mesh = "x".join(map(str, row["mesh"]))
    head = f"| {row['size']} | {row['algo'].upper()} | {row['topology']} | {mesh} | {row['micro']} | "
    head += " | ".join(f"{size / GIB:.1f}" for size in held)
    limit = f"{row['limit'] / GIB:.4g}"
    if not row["fits"]:
        said = "; ".join(f"{name} {p['refused']}" for name, p in programs.items() if p["refused"])
        larger = f"fits {row['smallest']}" if row.get("smallest") else "larger ones not tried"
        peak = said or f"{row['peak'] / GIB:.1f}"
        return f"{head} | **too much**: {peak} | {limit} | {larger} | |"
    step, update = programs["generate"]["step"], programs["update"]
    (decode, why), (learn, reason) = bound(step, row["topology"]), bound(update, row["topology"])
    token = f"{step['flops'] / 1e9:.1f}, {step['moved'] / 2**20:.0f}, {decode * 1e3:.1f} ms ({why})"
    whole = f"{update['flops'] / 1e12:.0f}, {update['moved'] / GIB:.0f}, {update['sent'] / GIB:.1f}"
    return f"{head} | {row['peak'] / GIB:.1f} | {limit} | {token} | {whole}, {learn:.1f} s ({reason}) |"


def weak_table(folder: pathlib.Path) -> list[str]:
    """Weak scaling as Markdown."""
    lines = [
        "| slice | chips | mesh | responses | program | FLOPs | memory moved | sent | bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for topology, mesh in WEAK.items():
        row = stored(folder, f"weak:{topology}")
        if row is None:
            continue
        chips = mesh[0] * mesh[1] * mesh[2]
        for name, program in row["programs"].items():
            seconds, why = bound(program, topology)
            head = f"| {topology} | {chips:,} | {'x'.join(map(str, mesh))} | {row['batch']:,} | {name} "
            done = f"| {program['flops'] / 1e12:.2f} T | {program['moved'] / GIB:.2f} GiB "
            lines.append(f"{head}{done}| {program['sent'] / GIB:.3f} GiB | {seconds:.3f} s ({why}) |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROWS), help="folder of the rows, one JSON file each (docs/scaling)")
    parser.add_argument("--only", nargs="+", default=[], help="rows to compile, as SIZE:ALGORITHM:SLICE")
    parser.add_argument("--weak", action="store_true", help="weak scaling instead of the table")
    parser.add_argument("--print", action="store_true", help="print the finished rows without compiling")
    parser.add_argument("--no_larger", action="store_true", help="do not search for the smallest slice that fits")
    options = parser.parse_args(argv)
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        known = [":".join(name) for name in names()]
        if unknown := [name for name in options.only if name not in known]:
            raise UserError(f"--only {unknown[0]}: no such row; rows: {' '.join(known)}")
        if options.weak:
            for topology, mesh in WEAK.items():
                rows = 8 * mesh[0] * mesh[1]
                layout = (mesh, rows, rows)
                if not options.print:
                    fill(folder, f"weak:{topology}", measure, "ppo", "1b", topology, layout, rows)
            print("\n".join(weak_table(folder)))
            return 0
        for size, algo, topology in names():
            name = f"{size}:{algo}:{topology}"
            if options.print or (options.only and name not in options.only):
                continue
            layout = LAYOUTS[topology][size]
            row = fill(folder, name, measure, algo, size, topology, layout)
            if not row["fits"] and "smallest" not in row and not options.no_larger:
                row["smallest"] = smallest(algo, size, topology, folder)
                keep(folder, name, row)
        print("\n".join(table(folder)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

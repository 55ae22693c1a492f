"""Memory of RLOO with responses of thousands of tokens, from programs that XLA compiles for TPUs and GPUs.

    pip install '.[tpu-aot]' '.[gpu-aot]'
    python scripts/scaling/long_responses.py                        # compiles what is missing, writes the page
    python scripts/scaling/long_responses.py --tables longest
    python scripts/scaling/long_responses.py --print                # prints the tables without compiling

Qwen2.5-1.5B, trained in full with a reference model and reward functions: 512 responses to prompts of 512 tokens, 8 to
a prompt, bfloat16, each layer recomputed in the backward pass. A device has one row of a micro-batch and samples 8 at a
time.

Table `pieces` has 8,192 tokens, and each option or part of the code alone changed. Table `longest` has the smallest
slice that fits responses of each length. Every program that was compiled is kept in docs/scaling/long_responses.json;
an interrupted call resumes. A compilation for TPUs stops after buffer assignment
(rlhf_jax/dry_run/compiling.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
import tempfile
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import scaling
import slices

from rlhf_jax.algorithms import response_logprobs
from rlhf_jax.config import GRPOConfig, RLOOConfig
from rlhf_jax.dry_run import memory, topologies
from rlhf_jax.generate import Decoding
from rlhf_jax.models import attention
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import programs as stage_programs

GIB = slices.GIB
MODEL, PROMPT, RESPONSE, GROUP = "Qwen2.5-1.5B", 512, 8192, 8
PIECES_ON = ("v5e:2x4", "h100:1")
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32256)
KINDS = (("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4"), ("h100:1", "h100:2", "h100:4", "h100:8"))
PATH = scaling.ROWS / "long_responses.json"
PAGE = slices.DOCS / "long_responses.md"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A change of the run, and the program whose memory it changes."""

    program: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    """Options that are multiplied by the number of row shards."""
    patch: tuple[Any, str, Any] | None = None
    """(module, name, value) of code that no option turns off."""
    algorithm: type = RLOOConfig


# The attention before blocks in loops: SEGMENTS unrolled blocks of queries.
_UNROLLED = -(-(PROMPT + RESPONSE) // attention.SEGMENTS)
PIECES = {
    "update, as it is": Piece("update"),
    "attention in unrolled blocks": Piece("update", patch=(attention, "QUERY_BLOCK", _UNROLLED)),
    "logits of whole rows": Piece("update", patch=(response_logprobs, "LOGIT_ENTRIES", 10**12)),
    "`--gradient_checkpointing false`": Piece("update", {"gradient_checkpointing": False}),
    "`--micro_batch_tokens`, one row a device": Piece(
        "update", {"micro_batch_size": None}, {"micro_batch_tokens": PROMPT + RESPONSE}
    ),
    "generation, as it is": Piece("generate"),
    "cache in one segment": Piece(
        "generate", patch=(stage_programs, "Decoding", functools.partial(Decoding, block=RESPONSE))
    ),
    "`--decode_shrink true`": Piece("generate", {"decode_shrink": True}),
    "`--decode_slots`, 8 a device": Piece("generate", {"rollout_batch_size": None}, {"decode_slots": 8}),
    "the same with `--rollout_max_steps 2048`": Piece(
        "generate",
        {"rollout_max_steps": 2048, "old_logprobs": "sampler", "rollout_batch_size": None},
        rows={"decode_slots": 8},
    ),
    "`--draft ngram`": Piece("generate", {"draft": "ngram"}),
    "`--kv_cache_dtype int8` (GRPO)": Piece(
        "generate", {"kv_cache_dtype": "int8", "importance_sampling_correction": True}, algorithm=GRPOConfig
    ),
}
AS_IT_IS = ("update, as it is", "generation, as it is")


def config_of(piece: Piece, path: str, shards: int, mesh: tuple[int, int, int], response: int) -> Any:
    """The run of the docstring, with a piece changed."""
    base = dataclasses.asdict(slices.rloo_config(path, shards, mesh))
    base |= {"response_length": response, "num_generations": GROUP, "decode_shrink": False}
    base |= {"micro_batch_size": shards, "rollout_batch_size": GROUP * shards, **piece.options}
    base |= {name: count * shards for name, count in piece.rows.items()}
    shared = {field.name for field in dataclasses.fields(piece.algorithm)} & base.keys()
    defaults = dataclasses.asdict(RLOOConfig())
    return piece.algorithm(**{name: base[name] for name in shared if base[name] != defaults.get(name)})


def measure(name: str, topology: str, response: int) -> dict:
    """A piece on one slice; not compiled if models, cache and the sampler's weights alone are too large."""
    piece, devices = PIECES[name], topologies.topology_devices(topology)
    mesh = (1, len(devices), 1)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(piece, slices.checkpoint(MODEL, folder), len(devices), mesh, response)
        with mock.patch.object(*piece.patch) if piece.patch else contextlib.nullcontext():
            stage = memory.abstract_stage(config, sharding.make_mesh(*mesh, devices=devices))
            parts, cache = sum(memory.resident_bytes(stage).values()), memory.cache_bytes(stage)
            row = {"models": parts, "cache": cache, "limit": topologies.capacity(devices[0])}
            row["peak"] = parts + (cache + slices.sampler_bytes(stage) if piece.program == "generate" else 0)
            if row["peak"] > row["limit"]:
                return {**row, "fits": False, "compiled": False}
            (program,) = memory.programs(stage, only=(piece.program,))
    row |= {"peak": program.peak, "temporary": program.temporary, "seconds": round(program.seconds), "compiled": True}
    return {**row, "fits": program.peak <= row["limit"] and not program.refused}


def fill(table: str, name: str, topology: str, response: int) -> dict:
    """The row of a piece on disk, compiled first if it is missing."""
    key = f"{table}:{topology}:{response}:{name}"
    if key not in slices.read(PATH):
        print(key, flush=True)
        slices.keep(PATH, key, row := scaling.in_process(measure, name, topology, response))
        print(f"  {row['peak'] / GIB:.2f} GiB of {row['limit'] / GIB:.2f}", flush=True)
    return slices.read(PATH)[key]


def fill_pieces() -> None:
    """All programs of table `pieces`."""
    for topology in PIECES_ON:
        for name in PIECES:
            fill("pieces", name, topology, RESPONSE)


def fill_longest() -> None:
    """Of each length, slices from small to large until update and generation fit."""
    for kind in KINDS:
        slice_index = 0
        for length in LENGTHS:
            while slice_index < len(kind) and not all(
                fill("longest", name, kind[slice_index], length)["fits"] for name in AS_IT_IS
            ):
                slice_index += 1  # longer responses fit no smaller slice


def pieces_table(rows: dict[str, dict]) -> list[str]:
    """Peak and temporary memory of each program."""
    on = [name for name in PIECES_ON if any(key.startswith(f"pieces:{name}:") for key in rows)]
    lines = ["| | " + " | ".join(f"{name}: peak | temporary" for name in on) + " |"]
    lines.append("|" + "---|" * (1 + 2 * len(on)))
    for name in PIECES:
        cells = []
        for topology in on:
            row = rows.get(f"pieces:{topology}:{RESPONSE}:{name}")
            cells += ["", ""] if row is None else _sizes(row)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _sizes(row: dict) -> list[str]:
    """[peak, temporary] in GiB."""
    excess = "" if row["fits"] else f" (of {row['limit'] / GIB:.1f})"
    peak, temporary = f"{row['peak'] / GIB:.1f}", f"{row['temporary'] / GIB:.2f}" if row["compiled"] else ""
    return [f"{peak}{excess}" if row["compiled"] else f"at least {peak}{excess}", temporary]


def longest_table(rows: dict[str, dict]) -> list[str]:
    """The longest response of each slice, and what keeps a longer one from fitting."""
    lines = ["| slice | longest response | update | generation | next length |", "|---|---|---|---|---|"]
    for topology in (topology for kind in KINDS for topology in kind):
        tried = {length: [rows.get(f"longest:{topology}:{length}:{name}") for name in AS_IT_IS] for length in LENGTHS}
        fitting = [length for length, both in tried.items() if all(row and row["fits"] for row in both)]
        failing = [(length, both) for length, both in tried.items() if any(row and not row["fits"] for row in both)]
        if not fitting and not failing:
            continue
        after = ""
        if failing:
            length, both = failing[0]
            index, row = next((i, row) for i, row in enumerate(both) if row and not row["fits"])
            after = f"{length:,}: {slices.PROGRAMS[index]} {_sizes(row)[0]}"
        sizes = [f"{row['peak'] / GIB:.1f}" for row in tried[fitting[-1]]] if fitting else ["", ""]
        longest = f"{fitting[-1]:,}" if fitting else f"less than {failing[0][0]:,}"
        lines.append(f"| {topology} | {longest} | {' | '.join(sizes)} | {after} |")
    return lines


TABLES = {"pieces": (fill_pieces, pieces_table), "longest": (fill_longest, longest_table)}


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES), help="which tables")
    parser.add_argument("--print", action="store_true", help="print the finished rows without compiling")
    options = parser.parse_args(argv)
    for name in options.tables:
        compile_missing, table = TABLES[name]
        if not options.print:
            compile_missing()
            slices.write_table(PAGE, f"long {name}", table(slices.read(PATH)))
        print("\n".join(table(slices.read(PATH))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

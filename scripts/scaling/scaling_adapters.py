"""The table of docs/lora.md: chips that PPO needs with and without LoRA, from programs compiled for TPU slices.

    pip install '.[tpu-aot]'
    python scripts/scaling/scaling_adapters.py            # compiles the missing rows up to buffer assignment
    python scripts/scaling/scaling_adapters.py --print

The update is that of scaling.py. Slices are tried from the smallest. A slice whose memory is too small for the models
alone is not compiled; the first on which all programs fit becomes the row.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import compiling
import scaling

from rlhf_jax.config import PPOConfig
from rlhf_jax.dry_run import memory
from rlhf_jax.parallel import sharding

ROWS = scaling.ROWS.with_name("lora")
SLICES = ("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16")
TENSOR = {"1b": 1, "6.9b": 4}
_LORA = {"use_peft": True, "lora_target_modules": ("all-linear",), "lora_dropout": 0.0}
WAYS = {
    "full": {},
    "LoRA, value in full": {**_LORA, "lora_value": "full"},
    "LoRA, value on the reward model": {**_LORA, "lora_value": "own"},
    "LoRA, value on the policy's base": {**_LORA, "lora_value": "shared"},
    "LoRA, value on the policy's base, in int8": {**_LORA, "lora_value": "shared", "load_in_8bit": True},
}


def config_of(path: str, mesh: tuple[int, int, int], options: dict) -> PPOConfig:
    """The config of a row, with small micro-batches, as where memory is scarce."""
    rows = max(16, mesh[1])
    base = scaling.config_of("ppo", path, mesh, rows, max(64, rows))
    return PPOConfig(**{**vars(base), **options})


def measure(program: str, size: str, way: str, topology: str) -> dict:
    """One slice: what each chip holds, and the peak of a program if that fits."""
    devices = memory.topology_devices(topology)
    tensor = min(TENSOR[size], len(devices))
    mesh = (1, len(devices) // tensor, tensor)
    limit = memory.capacity(devices[0])
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(scaling.checkpoint(size, folder), mesh, WAYS[way])
        stage = memory.abstract_stage(config, sharding.make_mesh(*mesh, devices=devices))
        parts = memory.resident_bytes(stage)
        row = {"size": size, "way": way, "topology": topology, "mesh": mesh, "limit": limit, "parts": parts}
        row["chips"], row["programs"] = len(devices), {}
        if sum(parts.values()) <= limit:
            (compiled,) = memory.programs(stage, only=(program,), compile_fn=compiling.assigned)
            row["programs"][program] = {"peak": compiled.peak, "refused": compiled.refused}
            print(f"  {program}: peak {compiled.peak / scaling.GIB:.1f} GiB {compiled.refused}", flush=True)
    return row


def table(folder: pathlib.Path) -> list[str]:
    """The finished rows as Markdown; sizes are totals over all chips."""
    lines = [
        "| model | trained | policy | value | moments | base | ref | reward | together | slice | chips | peak a chip |",
        "|" + "---|" * 12,
    ]
    for size in TENSOR:
        for way in WAYS:
            rows = [scaling.stored(folder, name_of(size, way, topology)) for topology in SLICES]
            rows = [row for row in rows if row]
            if not rows:
                continue
            row = next((row for row in rows if row["fits"]), rows[-1])
            peak = f"{row['peak'] / scaling.GIB:.1f} GiB"
            where = f"{row['topology']} | {row['chips']} | {peak}" if row["fits"] else "none tried fits | | "
            lines.append(f"{head_of(row)} {where} |")
    return lines


def head_of(row: dict) -> str:
    """The first cells of a row: GiB of each part, over all chips."""
    parts = {name: count * row["chips"] / scaling.GIB for name, count in row["parts"].items()}
    names = ("policy", "value", "optimizer", "base", "reference", "reward")
    cells = [f"{parts[name]:.1f}" if name in parts else "" for name in names]
    return f"| {row['size']} | {row['way']} | {' | '.join(cells)} | {sum(parts.values()):.1f} |"


def name_of(size: str, way: str, topology: str) -> str:
    """Name of a row's file."""
    return f"{size}:{''.join(c if c.isalnum() else '_' for c in way)}:{topology}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROWS, help="folder of the rows, one JSON file each")
    parser.add_argument("--print", action="store_true", help="print the finished rows without compiling")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for size in () if options.print else TENSOR:
        for way in WAYS:
            for topology in SLICES:
                name = name_of(size, way, topology)
                if scaling.fill(options.out, name, measure, size, way, topology)["fits"]:
                    break
    print("\n".join(table(options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

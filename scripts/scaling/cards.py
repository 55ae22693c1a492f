"""The largest models that one GPU of 24, 48 or 80 GB trains, from programs that XLA compiles for the nearest GPU that
it has a description of.

    pip install '.[gpu-aot]' '.[int8]'
    python scripts/scaling/cards.py                        # compiles what is missing, writes docs/scaling.md
    python scripts/scaling/cards.py --cards 24gb --only Pythia Qwen2.5
    python scripts/scaling/cards.py --print                # prints the table without compiling

Models of a family are tried from large to small until one fits. Where the models, the cache and the sampler's weights
alone are too large, nothing is compiled. Every model that was tried is kept in docs/scaling/cards.json; an interrupted
call resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import tempfile
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import scaling
import slices

from rlhf_jax.config import PPOConfig, RLOOConfig
from rlhf_jax.dry_run import memory, topologies
from rlhf_jax.parallel import sharding

GIB = 2**30
# (the GPU to compile for, bytes of memory): RTX 3090 and 4090, RTX A6000, A100 and H100.
CARDS = {
    "24gb": ("a6000:1", 24 * GIB),
    "48gb": ("a6000:1", topologies.GPUS["a6000"].memory),
    "80gb": ("a100:1", topologies.GPUS["a100"].memory),
}
FAMILIES = {
    "Pythia": ("12b", "6.9b", "2.8b", "1.4b", "1b", "410m", "160m", "70m"),
    "Qwen2.5": ("Qwen2.5-7B", "Qwen2.5-1.5B", "Qwen2.5-0.5B"),
    "Qwen3": ("Qwen3-4B", "Qwen3-0.6B"),
    "Llama 3": ("Llama-3.1-8B", "Llama-3.2-1B"),
    "Gemma 3": ("Gemma-3-1b", "Gemma-3-270m"),
    "SmolLM2": ("SmolLM2-135M",),
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("ppo", {}),
    "PPO, LoRA": ("ppo", {**slices.LORA, "lora_value": "shared"}),
    "PPO, LoRA, int8": ("ppo", {**slices.LORA, "lora_value": "shared", "load_in_8bit": True}),
    "PPO, LoRA, 4 bits": ("ppo", {**slices.LORA, "lora_value": "shared", "load_in_4bit": True}),
    "RLOO": ("rloo", {}),
    "RLOO, LoRA": ("rloo", slices.LORA),
    "RLOO, LoRA, 4 bits": ("rloo", {**slices.LORA, "load_in_4bit": True}),
}
PROGRAMS = ("update", "generate")
PATH = scaling.ROWS / "cards.json"


def config_of(way: str, path: str) -> PPOConfig | RLOOConfig:
    """PPO: 512 + 53 tokens and a reward model of the policy's size; RLOO: 512 + 1,024 tokens and reward functions."""
    algorithm, options = WAYS[way]
    mesh = (1, 1, 1)
    config = scaling.config_of("ppo", path, mesh, 4, 16) if algorithm == "ppo" else slices.rloo_config(path, 1, mesh)
    return dataclasses.replace(config, **options, **({"rollout_batch_size": 16} if algorithm == "rloo" else {}))


def measure(program: str, card: str, model: str, way: str) -> dict:
    """One model on one card: what it holds, and one of the programs unless it cannot fit."""
    topology, size = CARDS[card]
    devices = topologies.topology_devices(topology)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(way, slices.checkpoint(model, folder))
        stage = memory.abstract_stage(config, sharding.make_mesh(1, 1, 1, devices=devices))
        parts, cache = memory.resident_bytes(stage), memory.cache_bytes(stage)
        row = {"topology": topology, "limit": int(size * topologies.preallocated()), "parts": parts, "cache": cache}
        row |= {"least": sum(parts.values()) + cache + slices.sampler_bytes(stage), "programs": {}}
        if row["least"] <= row["limit"]:
            (compiled,) = memory.programs(stage, only=(program,))
            row["programs"][program] = {"peak": compiled.peak, "refused": compiled.refused}
            print(f"  {program}: {compiled.seconds:.0f} s, peak {compiled.peak / GIB:.1f} GiB")
    return row


def find(path: pathlib.Path, card: str, way: str, family: str) -> None:
    """Tries the models of a family until one fits."""
    for model in FAMILIES[family]:
        name = f"{way}:{model}:{card}"
        if name not in (rows := slices.read(path)) and (row := same_programs(rows, card, model, way)) is not None:
            slices.keep(path, name, row)
        if slices.fill(path, name, PROGRAMS, measure, card, model, way)["fits"]:
            return


def same_programs(rows: dict[str, dict], card: str, model: str, way: str) -> dict | None:
    """The row of a card from that of another whose programs are the same: they are compiled for one GPU."""
    topology, size = CARDS[card]
    for other, (compiled_for, _) in CARDS.items():
        row = rows.get(f"{way}:{model}:{other}")
        if row is not None and compiled_for == topology and row["programs"]:
            limit = int(size * topologies.preallocated())
            return {**row, "limit": limit, "fits": row["peak"] <= limit}
    return None


def table(rows: dict[str, dict]) -> list[str]:
    """The largest model of each family that fits, with its peak in GiB."""
    limits = [f"{size * 0.75 / GIB:.1f}" for _, size in CARDS.values()]
    heads = [f"{card.removesuffix('gb')} GB ({limit} GiB)" for card, limit in zip(CARDS, limits)]
    lines = [f"| | family | {' | '.join(heads)} |", "|" + "---|" * (2 + len(CARDS))]
    for way in WAYS:
        for family, models in FAMILIES.items():
            cells = [_cell([(model, rows.get(f"{way}:{model}:{card}")) for model in models]) for card in CARDS]
            if any(cells):
                lines.append(f"| {way} | {family} | {' | '.join(cells)} |")
    return lines


def _cell(tried: list[tuple[str, dict | None]]) -> str:
    complete = [(model, row) for model, row in tried if row and row["fits"] and set(row["programs"]) == set(PROGRAMS)]
    fits = [f"{model}: {row['peak'] / GIB:.1f}" for model, row in complete]
    return fits[0] if fits else "none" if all(row for _, row in tried) else ""


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=pathlib.Path, default=PATH, help="JSON file of the models that were tried")
    parser.add_argument("--cards", nargs="+", default=list(CARDS), choices=list(CARDS), help="cards to compile for")
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), help="families")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="ways to train")
    parser.add_argument("--print", action="store_true", help="print the table without compiling")
    options = parser.parse_args(argv)
    if not options.print:
        for way in options.ways:
            for card in options.cards:
                for family in options.only:
                    find(options.rows, card, way, family)
        slices.write_table(slices.DOCS / "scaling.md", "cards", table(slices.read(options.rows)))
    print("\n".join(table(slices.read(options.rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

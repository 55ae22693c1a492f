"""The peak of each program of the shipped configs on the GPUs that they are for, from programs that XLA compiles.

    pip install '.[gpu-aot]' '.[vision]'
    python scripts/scaling/shipped.py                               # compiles what is missing, writes docs/scaling.md
    python scripts/scaling/shipped.py --only tldr_sft.py:1b         # these
    python scripts/scaling/shipped.py --print                       # prints the table without compiling

A dry run prints the same peaks. Models are shapes, so nothing is downloaded: folders with the published config.json
and a built-in tokenizer. Every config that was compiled is kept in docs/scaling/shipped.json; an interrupted call
resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import cards
import scaling
import slices

from rlhf_jax import UserError
from rlhf_jax.config import Pipeline, StageConfig, files, stages_of
from rlhf_jax.dry_run import memory, topologies
from rlhf_jax.dry_run.compiling import Program
from rlhf_jax.parallel import sharding

GIB = 2**30
# Of each config: devices, or the memory of one GPU.
CONFIGS = {
    **{f"tldr_sft.py:{size}": "h100:8" for size in ("1b", "2.8b", "6.9b", "12b")},
    "tldr_sft.py:410m_24gb": "24gb",
    **{f"tldr_reward.py:{size}": "h100:8" for size in ("1b", "2.8b", "6.9b", "12b")},
    "tldr_reward.py:410m_24gb": "24gb",
    **{f"tldr_ppo.py:{size}": "h100:8" for size in ("1b", "2.8b", "6.9b")},
    "tldr_ppo.py:12b": "h100:8x2",
    "tldr_ppo.py:410m_24gb": "24gb",
    "tldr_ppo.py:1b_lora_24gb": "24gb",
    "tldr_ppo.py:2.8b_lora_4bit_24gb": "24gb",
    "tldr_ppo.py:2.8b_lora_48gb": "48gb",
    "tldr_ppo.py:6.9b_lora_4bit_48gb": "48gb",
    "tldr_ppo.py:6.9b_lora_80gb": "80gb",
    "tldr_ppo_nplus.py": "h100:8",
    **{f"tldr_smollm2.py:{variant}": "24gb" for variant in ("ppo", "rloo")},
    **{f"tldr_rloo.py:{variant}": "h100:8" for variant in ("docs", "current", "2.8b", "6.9b")},
    "tldr_rloo.py:12b": "h100:8x2",
    **{f"tldr_rloo_paper.py:{variant}": "h100:8" for variant in ("k4", "k2")},
    **{f"ppo_llama.py:{size}": "h100:8" for size in ("1b", "3b")},
    "rloo_deepmath.py:0.5b": "h100:1",
    **{f"rloo_deepmath.py:{size}": "h100:8" for size in ("1.5b", "7b")},
    "rloo_deepmath.py:lora": "h100:1",
    "rloo_deepmath.py:0.5b_24gb": "24gb",
    "rloo_deepmath.py:1.5b_lora_24gb": "24gb",
    "rloo_deepmath.py:1.5b_48gb": "48gb",
    "rloo_deepmath.py:7b_lora_48gb": "48gb",
    "grpo_deepmath.py:0.5b": "h100:1",
    **{f"grpo_deepmath.py:{size}": "h100:8" for size in ("1.5b", "7b")},
    "grpo_deepmath.py:lora": "h100:1",
    "rloo_qwen3.py": "24gb",
    **{f"rloo_smolvlm.py:{size}": "80gb" for size in ("256m", "500m", "2.2b")},
}
# Programs, in the order of an update; reward functions have no "score", supervised stages only an update.
PROGRAMS = {"generate": "generate", "score": "score", "experience": "log-probabilities and values", "update": "update"}
PATH = scaling.ROWS / "shipped.json"


def place(where: str) -> tuple[str, int | None]:
    """(devices to compile for, bytes of a card that XLA has no description of)"""
    return cards.CARDS.get(where, (where, None))


def shape_of(name: str) -> str:
    """The Pythia size, or the entry of models.json, that a shipped config's model has."""
    if pythia := re.search(r"(?:pythia-|tldr_(?:sft|reward)_)([\d.]+[bm])", name):
        return pythia[1]
    model = re.sub(r"^Skywork-Reward-V2-|-Instruct$", "", name.split("/")[-1]).replace("SmolVLM2", "SmolVLM")
    if model not in slices.SHAPES:
        raise UserError(f"{name}: models.json has no shape of it")
    return model


def config_of(name: str, folder: str) -> StageConfig:
    """The shipped config, of a pipeline its last stage, with folders of shapes in place of its models."""
    config, made, exported = files.load_config(f"{files.config_folder()}/{name}"), {}, None
    if isinstance(config, Pipeline):  # what earlier stages export has the shape of the model that SFT starts from
        exported, config = config.sft.model_name_or_path, [*stages_of(config).values()][-1]
    for field in ("model_name_or_path", "sft_model_path", "reward_model_path"):
        path = getattr(config, field, None)
        if path is not None:
            model = shape_of(exported or path)
            if model not in made:
                made[model] = slices.checkpoint(model, folder)
            config = dataclasses.replace(config, **{field: made[model]})
    return config


def stage_of(name: str, folder: str) -> Any:
    """The stage of a shipped config on its devices, with shapes in place of arrays."""
    config = config_of(name, folder)
    devices = topologies.topology_devices(place(CONFIGS[name])[0])
    mesh = sharding.make_mesh(config.mesh_data, config.mesh_fsdp, config.mesh_tensor, devices=devices)
    return memory.abstract_stage(config, mesh)


def measure(name: str, compiled: bool = True) -> dict:
    """One config: what a device holds between programs, and, if they are compiled, the peak of each."""
    topology, size = place(CONFIGS[name])
    with tempfile.TemporaryDirectory() as folder:
        stage = stage_of(name, folder)
        device = stage.mesh.devices.flat[0]
        limit = topologies.capacity(device) if size is None else int(size * topologies.preallocated())
        row = {"topology": topology, "limit": limit, "held": sum(memory.resident_bytes(stage).values()), "peaks": {}}

        def add(program: Program) -> None:
            row["peaks"][program.name] = program.peak
            print(f"  {program.name}: {program.seconds:.0f} s, peak {program.peak / GIB:.1f} GiB", flush=True)

        if compiled:
            memory.programs(stage, add)
    return row


def table(rows: dict[str, dict]) -> list[str]:
    """The finished rows as Markdown."""
    lines = [f"| config | GPUs | held | {' | '.join(PROGRAMS.values())} | of |", "|" + "---|" * (4 + len(PROGRAMS))]
    for name, where in CONFIGS.items():
        if (row := rows.get(name)) is not None:
            shown = where.replace("gb", " GB")
            peaks = [f"{row['peaks'][program] / GIB:.1f}" if program in row["peaks"] else "" for program in PROGRAMS]
            sizes = [f"{row['held'] / GIB:.1f}", *peaks, f"{row['limit'] / GIB:.1f}"]
            lines.append(f"| `{name}` | {shown} | {' | '.join(sizes)} |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=pathlib.Path, default=PATH, help="JSON file of the configs that were compiled")
    parser.add_argument("--only", nargs="+", default=list(CONFIGS), choices=list(CONFIGS), help="configs to compile")
    parser.add_argument("--print", action="store_true", help="print the table without compiling")
    options = parser.parse_args(argv)
    if not options.print:
        for name in options.only:
            if name not in slices.read(options.rows):
                print(name, flush=True)
                slices.keep(options.rows, name, scaling.in_process(measure, name))
        slices.write_table(slices.DOCS / "scaling.md", "shipped", table(slices.read(options.rows)))
    print("\n".join(table(slices.read(options.rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

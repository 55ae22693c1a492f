"""The smallest TPU slices, and the smallest numbers of GPUs, on which models can be trained, from programs that XLA
compiles for them.

    pip install '.[tpu-aot]' '.[gpu-aot]'
    python scripts/scaling/slices.py                                     # compiles what is missing, writes the pages
    python scripts/scaling/slices.py --tables gpus_ppo gpus_rloo         # these tables
    python scripts/scaling/slices.py --only Qwen2.5-0.5B Gemma-3-1b      # these models
    python scripts/scaling/slices.py --tables gpus_rloo --kinds h100     # for this kind of device
    python scripts/scaling/slices.py --print                             # prints the tables without compiling

TABLES lists the tables of docs/scaling.md and docs/lora.md. Models are shapes: config.json fields in models.json, or a
Pythia size. Slices are tried from small to large until all programs fit. One on which the models, the cache and the
sampler's weights alone are too large is not compiled. The updates of all models come first, half a minute each, then
generation, minutes each, because it has no loop over layers. Every slice that was tried is kept in
docs/scaling/slices.json, so that an interrupted call resumes; delete its line to compile it again. A compilation for
TPUs stops after buffer assignment (rlhf_jax/dry_run/compiling.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import scaling

from rlhf_jax import UserError, data, models
from rlhf_jax.algorithms import response_logprobs
from rlhf_jax.config import PPOConfig, RLOOConfig
from rlhf_jax.dry_run import hlo, memory, topologies
from rlhf_jax.parallel import sharding

GIB, MIB = 2**30, 2**20
HERE, DOCS = pathlib.Path(__file__).resolve().parent, scaling.ROWS.parent
SHAPES = json.loads((HERE / "models.json").read_text())
IMAGE_MODELS = tuple(name for name, shape in SHAPES.items() if "image_processor" in shape)
SHIPPED = ("Llama-3.2-3B", "SmolVLM-500M")  # only of shipped.py
TEXT_MODELS = tuple(name for name in SHAPES if name not in (*IMAGE_MODELS, *SHIPPED))
V5E = ("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16")
V5P = ("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4")
# Of each kind of GPU: one if it suffices, else the smallest number; the same of machines of eight.
CARDS = ("a100", "h100", "h200")
GPUS = tuple(
    tuple(f"{card}:{count}" for count in counts)
    for card in CARDS
    for counts in (("1", "2", "4"), ("8", "8x2", "8x4", "8x8"))
)
# Sampling gathers the policy's bfloat16 weights over `fsdp`: where they leave a v5e no room, `tensor` shards them.
TENSOR = {("v5e", "Qwen3-4B"): 4, ("v5e", "Qwen2.5-7B"): 4, ("v5e", "Llama-3.1-8B"): 4, ("v5e", "6.9b"): 4}
PROGRAMS = ("update", "generate")
LORA = {"use_peft": True, "lora_target_modules": ("all-linear",), "lora_dropout": 0.0}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page: models, ways to train each, and the kinds of slices to find the smallest of."""

    page: str
    models: tuple[str, ...]
    ways: dict[str, dict[str, Any]]
    """Options of each way."""
    kinds: tuple[tuple[str, ...], ...]
    """Slices of each kind, from small to large."""
    config: Callable[[str, int, tuple[int, int, int]], Any]
    """(checkpoint, shards of rows, mesh) -> config."""
    head: str
    line: Callable[[str, str, list[dict | None]], str]
    """(model, way, the row of each kind) -> Markdown."""


def checkpoint(model: str, folder: str) -> str:
    """A folder with the config.json of a model and the built-in tokenizer, which is all that a dry run reads."""
    if model not in SHAPES:
        return scaling.checkpoint(model, folder)
    path = pathlib.Path(folder, model)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPES[model]["config"]))
    processor = SHAPES[model].get("image_processor")
    if processor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    data.save_tokenizer(data.load_tokenizer("synthetic" if processor is None else "shapes"), str(path))
    return str(path)


def rloo_config(path: str, shards: int, mesh: tuple[int, int, int]) -> RLOOConfig:
    """512 + 1,024 tokens, 512 responses, 4 to a prompt, which are a micro-batch of each device; reward functions."""
    return RLOOConfig(
        sft_model_path=path,
        reward_model_path=None,
        query_length=512,
        length_buckets=(512,),
        response_length=1024,
        stop_token="eos",
        num_generations=4,
        batch_size=512,
        micro_batch_size=4 * shards,
        rollout_batch_size=max(32, 4 * shards),
        dtype="bfloat16",
        gradient_checkpointing=True,
        total_episodes=1_000_000,
        **dict(zip(("mesh_data", "mesh_fsdp", "mesh_tensor"), mesh)),
    )


def images_config(path: str, shards: int, mesh: tuple[int, int, int]) -> RLOOConfig:
    """An image of 17 tiles a prompt, 2,048 + 1,024 tokens, 64 responses, 2 to a prompt, as `rloo_smolvlm.py`."""
    return dataclasses.replace(
        rloo_config(path, shards, mesh),
        query_length=2048,
        length_buckets=(2048,),
        batch_size=64,
        num_generations=2,
        micro_batch_size=2 * shards,
        rollout_batch_size=max(16, 2 * shards),
    )


def ppo_config(path: str, shards: int, mesh: tuple[int, int, int]) -> PPOConfig:
    """The update of scaling.py, with small micro-batches, as where memory is scarce."""
    return scaling.config_of("ppo", path, mesh, max(16, shards), max(64, shards))


def gpu_ppo_config(path: str, shards: int, mesh: tuple[int, int, int]) -> PPOConfig:
    """The update of scaling.py; a GPU has 8 rows of a micro-batch and samples 32 at a time."""
    return scaling.config_of("ppo", path, mesh, min(8 * shards, 512), min(32 * shards, 512))


def measure(program: str, table: str, model: str, way: str, topology: str) -> dict:
    """One slice: what each chip holds, and one of the programs unless it cannot fit."""
    devices, spec = topologies.topology_devices(topology), TABLES[table]
    tensor = min(TENSOR.get((topology.split(":")[0], model), 1), len(devices))
    mesh = (1, len(devices) // tensor, tensor)
    with tempfile.TemporaryDirectory() as folder:
        config = spec.config(checkpoint(model, folder), mesh[1], mesh)
        config = dataclasses.replace(config, **spec.ways[way])
        stage = memory.abstract_stage(config, sharding.make_mesh(*mesh, devices=devices))
        parts, cache, limit = memory.resident_bytes(stage), memory.cache_bytes(stage), topologies.capacity(devices[0])
        row = {"topology": topology, "chips": len(devices), "mesh": mesh, "micro": config.micro_batch_size}
        row |= {"rollout": config.rollout_batch_size, "parts": parts, "cache": cache, "limit": limit, "programs": {}}
        row["logits"] = logits(stage.opened.policy, config.micro_batch_size, config.response_length)
        row["least"] = sum(parts.values()) + cache + sampler_bytes(stage)
        if row["least"] <= limit:
            (compiled,) = memory.programs(stage, only=(program,))
            row["programs"][program] = entry = {"peak": compiled.peak, "refused": compiled.refused}
            entry |= {"seconds": round(compiled.seconds), "largest": hlo.largest_array(compiled.text)}
            print(f"  {program}: {entry['seconds']} s, peak {compiled.peak / GIB:.1f} GiB {compiled.refused}")
    return row


def sampler_bytes(stage: Any) -> int:
    """Bytes a device of the sampler's own weights, in bfloat16 and gathered over `fsdp`; with adapters those of the
    layers, which are merged, since the others may be the base's."""
    base = stage.models.base
    params = stage.state.params["policy"] if base is None else base["policy"]["backbone"]["layers"]
    return 2 * sum(x.size for x in jax.tree.leaves(params)) // stage.mesh.shape["tensor"]


def logits(model: models.Model, rows: int, positions: int) -> dict[str, int]:
    """Bytes a device of the float32 logits of a micro-batch, and of the block that is computed at a time."""
    chunk, block = response_logprobs.logit_block(rows, positions, model)
    entry = 4 * model.config.vocab_size / model.layout.mesh.size
    return {"whole": int(rows * positions * entry), "block": int(chunk * block * entry)}


# --- rows on disk


def name_of(table: str, model: str, way: str, topology: str) -> str:
    """The key of a slice that was tried."""
    return ":".join((table, model, way, topology))


def read(path: pathlib.Path) -> dict[str, dict]:
    """The slices that were tried."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: pathlib.Path, name: str, row: dict) -> None:
    """Adds one, atomically; a line each, so that changes are easy to read."""
    rows = {**read(path), name: row}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
    part = path.with_suffix(".part")
    part.write_text(f"{{\n{lines}\n}}\n")
    part.rename(path)


def fill(path: pathlib.Path, name: str, programs: Sequence[str], make: Callable[..., dict], *args: Any) -> dict:
    """The row on disk, with those of `programs` that it lacks by `make(program, *args)`; up to the first that does not
    fit."""
    row = read(path).get(name)
    for program in programs:
        if row is not None and (program in row["programs"] or not row["fits"]):
            continue
        print(name, flush=True)
        made = scaling.in_process(make, program, *args)
        done = {**(row["programs"] if row else {}), **made["programs"]}
        peak = max([made["least"], *(entry["peak"] for entry in done.values())])
        fits = peak <= made["limit"] and not any(entry["refused"] for entry in done.values())
        keep(path, name, row := {**made, "programs": done, "peak": peak, "fits": fits})
    return row


# --- tables


def best(rows: dict[str, dict], table: str, model: str, way: str) -> list[dict | None]:
    """Of each kind of slice the smallest that fits, else the largest that was tried; None: none was."""
    found = []
    for slices in TABLES[table].kinds:
        tried = [rows[name] for topology in slices if (name := name_of(table, model, way, topology)) in rows]
        found.append(next((row for row in tried if row["fits"]), tried[-1] if tried else None))
    return found


def table_of(rows: dict[str, dict], table: str) -> list[str]:
    """The finished rows as Markdown."""
    spec = TABLES[table]
    lines = [spec.head, "|" + "---|" * (spec.head.count("|") - 1)]
    missing = []
    for model in spec.models:
        for way in spec.ways:
            found = best(rows, table, model, way)
            if any(found):
                lines.append(spec.line(model, way, found))
            else:
                missing.append(f"{model} ({way})")
    return [*lines, "", f"Not compiled: {', '.join(missing)}."] if missing else lines


def _peaks(row: dict) -> tuple[str, str]:
    """GiB of generation, or its lower bound where it was not compiled, and of the update."""
    update, generate = (row["programs"].get(program) for program in PROGRAMS)
    sampling = f"{generate['peak'] / GIB:.1f}" if generate else f"at least {row['least'] / GIB:.1f}"
    return sampling, f"{update['peak'] / GIB:.1f}"


def rloo_line(model: str, way: str, found: list[dict | None]) -> str:
    """A line for each kind of slice."""
    return "\n".join(_rloo_line(model, way, row) for row in found if row)


def _rloo_line(model: str, way: str, row: dict) -> str:
    held = [sum(row["parts"].values()), row["cache"]]
    head = f"| {model} | {SHAPES[model]['config']['vocab_size']:,} | {way} "
    if not row["fits"]:
        return f"{head}| larger than {row['topology']} |" + " |" * 10
    sizes = " | ".join([*(f"{size / GIB:.1f}" for size in held), *_peaks(row)])
    where = f"{row['topology']} | {'x'.join(map(str, row['mesh']))} | {row['micro']}"
    block = f"{row['logits']['whole'] / MIB:,.0f} | {row['logits']['block'] / MIB:.0f}"
    size, kind = row["programs"]["update"]["largest"]
    kind = re.sub(r"\{.*", "", kind.split()[-1])
    return f"{head}| {where} | {sizes} | {row['limit'] / GIB:.4g} | {block} | {size / MIB:,.0f}, `{kind}` |"


def adapters_line(model: str, way: str, found: list[dict | None]) -> str:
    """GiB of each part, over all chips, and the slice."""
    (row,) = found
    parts = {name: count * row["chips"] / GIB for name, count in row["parts"].items()}
    names = ("policy", "value", "optimizer", "base", "reference", "reward")
    cells = [f"{parts[name]:.1f}" if name in parts else "" for name in names]
    where = f"{row['topology']} | {row['chips']} | {row['peak'] / GIB:.1f} GiB"
    where = where if row["fits"] else "none tried fits | | "
    return f"| {model} | {way} | {' | '.join(cells)} | {sum(parts.values()):.1f} | {where} |"


def images_line(model: str, way: str, found: list[dict | None]) -> str:
    """A line for each kind of device."""
    return "\n".join(_images_line(model, way, row) for row in found if row)


def _images_line(model: str, way: str, row: dict) -> str:
    head = f"| {model} | {way} "
    if not row["fits"]:
        return f"{head}| larger than {row['topology']} |" + " |" * 7
    held = f"{sum(row['parts'].values()) / GIB:.1f} | {row['cache'] / GIB:.1f}"
    where = f"{row['topology']} | {'x'.join(map(str, row['mesh']))} | {row['micro']}"
    return f"{head}| {where} | {held} | {' | '.join(_peaks(row))} | {row['limit'] / GIB:.4g} |"


GPUS_HEAD = "| model | trained | GPUs | rows | models | cache | generation | update | of |"


def gpus_line(model: str, way: str, found: list[dict | None]) -> str:
    """A line for one GPU and one for eight of each kind."""
    lines = []
    for single, machine in zip(found[::2], found[1::2], strict=True):
        larger = machine if machine is not None and machine["fits"] else None
        if single is not None:
            lines.append(_gpus_line(model, way, single, 1, larger))
        if machine is not None:
            lines.append(_gpus_line(model, way, machine, 8, None))
    return "\n".join(lines)


def _gpus_line(model: str, way: str, row: dict, count: int, larger: dict | None) -> str:
    """Of the smallest number of GPUs that fits, from `count` on; else what `count` would need."""
    card = row["topology"].split(":")[0]
    head = f"| {model} | {way} | {card}:{count} "
    smallest = row if row["fits"] else larger
    if row["fits"] and row["chips"] == count:
        sizes = [sum(row["parts"].values()), row["cache"]]
        held = " | ".join(f"{size / GIB:.1f}" for size in sizes)
        return f"{head}| {row['micro']} | {held} | {' | '.join(_peaks(row))} | {row['limit'] / GIB:.1f} |"
    fits = f"fits {smallest['topology']}" if smallest is not None else "fits none that was tried"
    return f"{head}| | | | | **too much** | {row['limit'] / GIB:.1f}; {fits} |"


TABLES = {
    "rloo": Table(
        page="scaling.md",
        models=TEXT_MODELS,
        ways={"full": {}, "LoRA": LORA},
        kinds=(V5E, V5P),
        config=rloo_config,
        head="| model | vocabulary | trained | slice | mesh | rows | models | cache | generation | update | of "
        "| logits | block | largest array of the update |",
        line=rloo_line,
    ),
    "gpus_ppo": Table(
        page="scaling.md",
        models=("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b"),
        ways={"full": {}},
        kinds=GPUS,
        config=gpu_ppo_config,
        head=GPUS_HEAD,
        line=gpus_line,
    ),
    "gpus_rloo": Table(
        page="scaling.md",
        models=TEXT_MODELS,
        ways={"full": {}, "LoRA": LORA},
        kinds=GPUS,
        config=rloo_config,
        head=GPUS_HEAD,
        line=gpus_line,
    ),
    "images": Table(
        page="vision.md",
        models=tuple(name for name in IMAGE_MODELS if name not in SHIPPED),
        ways={"full": {}, "LoRA": {**LORA, "lora_target_modules": ("q_proj", "v_proj")}},
        kinds=(V5E, ("h100:1", "h100:2", "h100:4", "h100:8")),
        config=images_config,
        head="| model | trained | devices | mesh | rows | models | cache | generation | update | of |",
        line=images_line,
    ),
    "adapters": Table(
        page="lora.md",
        models=("1b", "6.9b"),
        ways={
            "full": {},
            "LoRA, value in full": {**LORA, "lora_value": "full"},
            "LoRA, value on the reward model": {**LORA, "lora_value": "own"},
            "LoRA, value on the policy's base": {**LORA, "lora_value": "shared"},
            "LoRA, value on the policy's base, in int8": {**LORA, "lora_value": "shared", "load_in_8bit": True},
            "LoRA, value on the policy's base, in 4 bits": {**LORA, "lora_value": "shared", "load_in_4bit": True},
        },
        kinds=(V5E,),
        config=ppo_config,
        head="| model | trained | policy | value | moments | base | ref | reward | together | slice | chips "
        "| peak a chip |",
        line=adapters_line,
    ),
}


def shown(page: str, table: str) -> list[str]:
    """What is before, between and after a table's markers on a page."""
    begin, end = f"<!-- slices: {table} -->\n", f"<!-- end of {table} -->"
    before, rest = page.split(begin, 1)
    between, after = rest.split(end, 1)
    return [before + begin, between, end + after]


def write_table(path: pathlib.Path, table: str, lines: Sequence[str]) -> None:
    """Puts a table between its markers on a page."""
    before, _, after = shown(path.read_text(), table)
    path.write_text(before + "\n".join(lines) + "\n" + after)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=pathlib.Path, default=scaling.ROWS / "slices.json", help="JSON file of the rows")
    parser.add_argument("--only", nargs="+", default=[], help="models to compile")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES), help="which tables")
    parser.add_argument("--kinds", nargs="+", default=[], help="kinds of devices to compile for: v5e, v5p, h100, ...")
    parser.add_argument("--print", action="store_true", help="print the finished rows without compiling")
    options = parser.parse_args(argv)
    try:
        known = [model for table in options.tables for model in TABLES[table].models]
        if unknown := [model for model in options.only if model not in known]:
            raise UserError(f"--only {unknown[0]}: no such model; models: {' '.join(known)}")
        kinds = sorted({_kind(slices) for table in options.tables for *_, slices in cases(table)})
        if unknown := [kind for kind in options.kinds if kind not in kinds]:
            raise UserError(f"--kinds {unknown[0]}: not in these tables; kinds: {' '.join(kinds)}")
        for last in () if options.print else range(1, len(PROGRAMS) + 1):
            for table in options.tables:
                for model, way, slices in cases(table):
                    if model in (options.only or known) and _kind(slices) in (options.kinds or kinds):
                        find(options.rows, table, model, way, slices, PROGRAMS[:last])
        for table in options.tables:
            if not options.print:
                write_table(DOCS / TABLES[table].page, table, table_of(read(options.rows), table))
            print("\n".join(table_of(read(options.rows), table)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def cases(table: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """(model, way, slices of a kind) of a table."""
    spec = TABLES[table]
    return [(model, way, slices) for model in spec.models for way in spec.ways for slices in spec.kinds]


def _kind(slices: tuple[str, ...]) -> str:
    """v5e of v5e:1x1, v5e:2x2 and so on."""
    return slices[0].split(":")[0]


def find(
    path: pathlib.Path, table: str, model: str, way: str, slices: tuple[str, ...], programs: Sequence[str]
) -> None:
    """Tries slices until these programs fit one."""
    for topology in slices:
        if fill(path, name_of(table, model, way, topology), programs, measure, table, model, way, topology)["fits"]:
            return


if __name__ == "__main__":
    sys.exit(main())

"""Tables of docs/scaling.md, docs/lora.md and docs/vision.md: what fits which TPU slices and GPUs, from programs that
XLA compiles for them.

    pip install '.[tpu-aot]' '.[gpu-aot]' '.[int8]' '.[vision]'
    python scripts/scaling/scaling.py                                   # compiles what is missing, writes the pages
    python scripts/scaling/scaling.py --tables gpus_ppo gpus_rloo       # these tables
    python scripts/scaling/scaling.py --only Qwen2.5-0.5B Gemma-3-1b    # these models, or shipped configs
    python scripts/scaling/scaling.py --tables gpus_rloo cards --kinds h100 24gb    # these kinds of devices
    python scripts/scaling/scaling.py --print                           # prints the tables without compiling

TABLES lists the tables. `cards` has the largest model of each family that one GPU trains, `shipped` the peak of each
program of the shipped configs on the GPUs that they are for, the others the smallest slice or number of GPUs for each
model. A dry run prints the same peaks. Models are shapes: config.json fields in models.json, or a Pythia size.

Where the models, the cache and the sampler's weights alone are too large, nothing is compiled. Updates come first, half
a minute each, then generation, minutes each, because it has no loop over layers. Everything that was tried is kept in
docs/scaling/TABLE.json (slices.json for several), so that an interrupted call resumes; delete a line to compile it
again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from rlhf_jax import UserError, data, models
from rlhf_jax.algorithms import response_logprobs
from rlhf_jax.config import Pipeline, PolicyConfig, PPOConfig, RLOOConfig, StageConfig, files, stages_of
from rlhf_jax.dry_run import hlo, in_processes, memory, topologies

GIB, MIB = 2**30, 2**20
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
SHAPES = json.loads(pathlib.Path(__file__).with_name("models.json").read_text())
IMAGE_MODELS = tuple(name for name, shape in SHAPES.items() if "image_processor" in shape)
ONLY_SHIPPED = ("Llama-3.2-3B", "SmolVLM-500M")  # in no other table
TEXT_MODELS = tuple(name for name in SHAPES if name not in (*IMAGE_MODELS, *ONLY_SHIPPED))
V5E = ("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16")
V5P = ("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4")
# Of each kind of GPU: one if it suffices, else the smallest number; the same of machines of eight.
GPUS = tuple(
    tuple(f"{card}:{count}" for count in counts)
    for card in ("a100", "h100", "h200")
    for counts in (("1", "2", "4"), ("8", "8x2", "8x4", "8x8"))
)
# (the GPU to compile for, bytes of memory) of one card: RTX 3090 and 4090, RTX A6000, A100 and H100.
CARDS = {
    "24gb": ("a6000:1", 24 * GIB),
    "48gb": ("a6000:1", topologies.GPUS["a6000"].memory),
    "80gb": ("a100:1", topologies.GPUS["a100"].memory),
}
# Sampling gathers the policy's bfloat16 weights over `fsdp`: where they leave a v5e no room, `tensor` shards them.
TENSOR = {("v5e", "Qwen3-4B"): 4, ("v5e", "Qwen2.5-7B"): 4, ("v5e", "Llama-3.1-8B"): 4, ("v5e", "6.9b"): 4}
PROGRAMS = ("update", "generate")  # log-probabilities and values need less memory than generation
LORA = {"use_peft": True, "lora_target_modules": ("all-linear",), "lora_dropout": 0.0}
SHARED_LORA = {**LORA, "lora_value": "shared"}

# --- configs


def checkpoint(model: str, folder: str) -> str:
    """A folder with the config.json of a model and the built-in tokenizer, which is all that a dry run reads."""
    shape = SHAPES.get(model) or {"config": models.pythia(model).to_hf_config("scalar")}
    path, processor = pathlib.Path(folder, model), shape.get("image_processor")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape["config"]))
    if processor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    data.save_tokenizer(data.load_tokenizer("synthetic" if processor is None else "shapes"), str(path))
    return str(path)


SAME = {
    "query_length": 512,
    "length_buckets": (512,),
    "stop_token": "eos",
    "batch_size": 512,
    "dtype": "bfloat16",
    "gradient_checkpointing": True,
    "total_episodes": 1_000_000,
}
"""Options of every row: 512 responses to prompts of 512 tokens, each layer computed again in the backward pass."""


def ppo_config(path: str, micro: int, rollout: int) -> PPOConfig:
    """Responses of 53 tokens and a reward model of the policy's size, 4 epochs."""
    return PPOConfig(
        sft_model_path=path,
        reward_model_path=path,
        reward_input="ids",
        response_length=53,
        temperature=0.7,
        micro_batch_size=micro,
        rollout_batch_size=rollout,
        num_mini_batches=1,
        num_ppo_epochs=4,
        **SAME,
    )


def slice_ppo_config(path: str, shards: int) -> PPOConfig:
    """Small micro-batches, as where memory is scarce."""
    return ppo_config(path, max(16, shards), max(64, shards))


def gpu_ppo_config(path: str, shards: int) -> PPOConfig:
    """A GPU has 8 rows of a micro-batch and samples 32 at a time."""
    return ppo_config(path, min(8 * shards, 512), min(32 * shards, 512))


def rloo_config(path: str, shards: int) -> RLOOConfig:
    """Responses of 1,024 tokens, 4 to a prompt, which are a micro-batch of each device; reward functions."""
    return RLOOConfig(
        sft_model_path=path,
        reward_model_path=None,
        response_length=1024,
        num_generations=4,
        micro_batch_size=4 * shards,
        rollout_batch_size=max(32, 4 * shards),
        **SAME,
    )


def images_config(path: str, shards: int) -> RLOOConfig:
    """An image of 17 tiles a prompt, 2,048 + 1,024 tokens, 64 responses, 2 to a prompt, as `rloo_smolvlm.py`."""
    return dataclasses.replace(
        rloo_config(path, shards),
        query_length=2048,
        length_buckets=(2048,),
        batch_size=64,
        num_generations=2,
        micro_batch_size=2 * shards,
        rollout_batch_size=max(16, 2 * shards),
    )


# --- rows on disk


def read(path: pathlib.Path) -> dict[str, dict]:
    """What was tried, by name."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: pathlib.Path, name: str, row: dict) -> None:
    """Adds a row, atomically; a line each, so that changes are easy to read."""
    rows = {**read(path), name: row}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
    part = path.with_suffix(".part")
    part.write_text(f"{{\n{lines}\n}}\n")
    part.rename(path)


def fill(
    path: pathlib.Path,
    name: str,
    programs: Sequence[str],
    make: Callable[[str], StageConfig],
    size: int | None = None,
) -> dict:
    """The row on disk, with those of `programs` that it lacks, compiled up to the first that does not fit.

    Args:
      path: of the rows.
      name: of the row.
      programs: to compile.
      make: folder for checkpoints -> the config, with a topology.
      size: bytes of a GPU's memory that the topology does not say.
    """
    row = read(path).get(name)
    if row is not None and (not row["fits"] or set(programs) <= set(row["programs"])):
        return row
    print(name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = make(folder)
        row = row or without_programs(config, size)
        for program in programs:
            if row["fits"] and program not in row["programs"]:
                add_program(row, config, program)
    keep(path, name, row)
    return row


def add_program(row: dict, config: StageConfig, name: str) -> None:
    """Compiles a program in a process of its own, and adds it to the row; None: the stage has none of the name."""
    row["programs"][name] = None
    if (program := in_processes.in_process(config, name)) is not None:
        row["programs"][name] = entry = {"peak": program.peak, "refused": program.refused}
        entry |= {"seconds": round(program.seconds)}
        if program.dumped_text:
            entry["largest"] = hlo.largest_array(program.dumped_text)
        row["peak"] = max(row["peak"], program.peak)
        row["fits"] = row["peak"] <= row["limit"] and not program.refused
        print(f"  {name}: {entry['seconds']} s, peak {program.peak / GIB:.1f} GiB {program.refused}", flush=True)


def without_programs(config: StageConfig, size: int | None = None) -> dict:
    """A row without programs: what each device holds, and the least that it needs."""
    stage = memory.abstract_stage(config, memory.stage_mesh(config))
    devices, parts = stage.mesh.devices, memory.resident_bytes(stage)
    limit = int(size * topologies.preallocated()) if size else topologies.capacity(devices.flat[0])
    row: dict[str, Any] = {"topology": config.topology, "chips": devices.size, "mesh": devices.shape, "limit": limit}
    row |= {"parts": parts, "held": sum(parts.values()), "programs": {}}
    row["peak"] = row["held"]
    if isinstance(config, PolicyConfig):
        row |= {"micro": config.micro_batch_size, "cache": memory.cache_bytes(stage)}
        row["logits"] = logits(stage.opened.policy, stage.config.micro_batch_size, config.response_length)
        row["peak"] = row["least"] = row["held"] + row["cache"] + sampler_bytes(stage)
    return row | {"fits": row["peak"] <= limit}


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


# --- the smallest slice of each model


@dataclasses.dataclass(frozen=True)
class Smallest:
    """A table of a page: models, ways to train each, and the kinds of slices to find the smallest of."""

    name: str
    page: str
    models: tuple[str, ...]
    ways: dict[str, dict[str, Any]]
    """Options of each way."""
    kinds: tuple[tuple[str, ...], ...]
    """Slices of each kind, from small to large."""
    config: Callable[[str, int], Any]
    """(checkpoint, shards of rows) -> config."""
    head: str
    line: Callable[[str, str, list[dict | None]], str]
    """(model, way, the row of each kind) -> Markdown."""
    file: str = "slices.json"

    def searches(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(model, kind of devices, names of the rows to try until one fits)"""
        for model, way, slices in itertools.product(self.models, self.ways, self.kinds):
            yield model, slices[0].split(":")[0], tuple(f"{self.name}:{model}:{way}:{topology}" for topology in slices)

    def try_one(self, path: pathlib.Path, name: str, programs: Sequence[str]) -> bool:
        """Whether the model fits the slice of a row."""
        model, way, topology = name.split(":", 3)[1:]
        chips = math.prod(map(int, topology.split(":")[1].split("x")))
        tensor = min(TENSOR.get((topology.split(":")[0], model), 1), chips)
        mesh = {"mesh_fsdp": chips // tensor, "mesh_tensor": tensor, "topology": topology}

        def make(folder: str) -> StageConfig:
            config = self.config(checkpoint(model, folder), chips // tensor)
            return dataclasses.replace(config, **mesh, **self.ways[way])

        return fill(path, name, programs, make)["fits"]

    def best(self, rows: dict[str, dict], model: str, way: str) -> list[dict | None]:
        """Of each kind of slice the smallest that fits, else the largest that was tried; None: none was."""
        smallest = []
        for slices in self.kinds:
            names = [f"{self.name}:{model}:{way}:{topology}" for topology in slices]
            tried = [rows[name] for name in names if name in rows]
            smallest.append(next((row for row in tried if row["fits"]), tried[-1] if tried else None))
        return smallest

    def lines(self, rows: dict[str, dict]) -> list[str]:
        """The finished rows as Markdown."""
        lines, missing = [self.head, "|" + "---|" * (self.head.count("|") - 1)], []
        for model, way in itertools.product(self.models, self.ways):
            if any(smallest := self.best(rows, model, way)):
                lines.append(self.line(model, way, smallest))
            else:
                missing.append(f"{model} ({way})")
        return [*lines, "", f"Not compiled: {', '.join(missing)}."] if missing else lines


def _peaks(row: dict) -> tuple[str, str]:
    """GiB of generation, or its lower bound where it was not compiled, and of the update."""
    update, generate = (row["programs"].get(program) for program in PROGRAMS)
    sampling = f"{generate['peak'] / GIB:.1f}" if generate else f"at least {row['least'] / GIB:.1f}"
    return sampling, f"{update['peak'] / GIB:.1f}"


def for_each_kind(line: Callable[[str, str, dict], str]) -> Callable[[str, str, list[dict | None]], str]:
    """A line for each kind of slice."""
    return lambda model, way, found: "\n".join(line(model, way, row) for row in found if row)


@for_each_kind
def rloo_line(model: str, way: str, row: dict) -> str:
    """With the logits and the largest array."""
    residents = [sum(row["parts"].values()), row["cache"]]
    head = f"| {model} | {SHAPES[model]['config']['vocab_size']:,} | {way} "
    if not row["fits"]:
        return f"{head}| larger than {row['topology']} |" + " |" * 10
    sizes = " | ".join([*(f"{size / GIB:.1f}" for size in residents), *_peaks(row)])
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


@for_each_kind
def images_line(model: str, way: str, row: dict) -> str:
    """With the peaks."""
    head = f"| {model} | {way} "
    if not row["fits"]:
        return f"{head}| larger than {row['topology']} |" + " |" * 7
    residents = f"{sum(row['parts'].values()) / GIB:.1f} | {row['cache'] / GIB:.1f}"
    where = f"{row['topology']} | {'x'.join(map(str, row['mesh']))} | {row['micro']}"
    return f"{head}| {where} | {residents} | {' | '.join(_peaks(row))} | {row['limit'] / GIB:.4g} |"


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
        residents = " | ".join(f"{size / GIB:.1f}" for size in sizes)
        return f"{head}| {row['micro']} | {residents} | {' | '.join(_peaks(row))} | {row['limit'] / GIB:.1f} |"
    fits = f"fits {smallest['topology']}" if smallest is not None else "fits none that was tried"
    return f"{head}| | | | | **too much** | {row['limit'] / GIB:.1f}; {fits} |"


# --- the largest model of a card


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest model of each family that one GPU trains, by way to train."""

    families: dict[str, tuple[str, ...]]
    """Models of each, from large to small."""
    ways: dict[str, tuple[Callable[[str], Any], dict[str, Any]]]
    """(checkpoint -> config, options) of each."""
    name: str = "cards"
    page: str = "scaling.md"
    file: str = "cards.json"

    def searches(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(family, card, names of the rows to try until one fits)"""
        for way, card, (family, names) in itertools.product(self.ways, CARDS, self.families.items()):
            yield family, card, tuple(f"{way}:{model}:{card}" for model in names)

    def try_one(self, path: pathlib.Path, name: str, programs: Sequence[str]) -> bool:
        """Whether the model fits the card of a row."""
        way, model, card = name.split(":")
        topology, size = CARDS[card]
        if name not in (rows := read(path)) and (row := self.same_programs(rows, name)) is not None:
            keep(path, name, row)
        config, options = self.ways[way]
        one = {**options, "topology": topology}
        make = lambda folder: dataclasses.replace(config(checkpoint(model, folder)), **one)  # noqa: E731
        return fill(path, name, programs, make, size)["fits"]

    def same_programs(self, rows: dict[str, dict], name: str) -> dict | None:
        """The row of a card from that of another whose programs are the same: they are compiled for one GPU."""
        model, card = name.rsplit(":", 1)
        topology, size = CARDS[card]
        for other, (compiled_for, _) in CARDS.items():
            row = rows.get(f"{model}:{other}")
            if row is not None and compiled_for == topology and row["programs"]:
                limit = int(size * topologies.preallocated())
                return {**row, "limit": limit, "fits": row["peak"] <= limit}
        return None

    def lines(self, rows: dict[str, dict]) -> list[str]:
        """The largest model of each family that fits, with its peak in GiB."""
        heads = [f"{card.removesuffix('gb')} GB ({size * 0.75 / GIB:.1f} GiB)" for card, (_, size) in CARDS.items()]
        lines = [f"| | family | {' | '.join(heads)} |", "|" + "---|" * (2 + len(CARDS))]
        for way, (family, names) in itertools.product(self.ways, self.families.items()):
            tried = [[(model, rows.get(f"{way}:{model}:{card}")) for model in names] for card in CARDS]
            if any(cells := [largest_cell(card) for card in tried]):
                lines.append(f"| {way} | {family} | {' | '.join(cells)} |")
        return lines


def largest_cell(tried: Sequence[tuple[str, dict | None]]) -> str:
    """The first model that fits and its peak; none: not the smallest either; empty: not all were tried."""
    complete = [(model, row) for model, row in tried if row and row["fits"] and set(row["programs"]) == set(PROGRAMS)]
    fits = [f"{model}: {row['peak'] / GIB:.1f}" for model, row in complete]
    return fits[0] if fits else "none" if all(row for _, row in tried) else ""


# --- shipped configs


@dataclasses.dataclass(frozen=True)
class Shipped:
    """The peak of each program of the shipped configs, of pipelines of their last stage."""

    configs: dict[str, str]
    """Of each config: devices, or the memory of one GPU."""
    name: str = "shipped"
    page: str = "scaling.md"
    file: str = "shipped.json"

    def searches(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(config, devices, its row)"""
        for name, where in self.configs.items():
            yield name, where.split(":")[0], (name,)

    def try_one(self, path: pathlib.Path, name: str, programs: Sequence[str]) -> bool:
        """Compiles all programs of a config."""
        size = CARDS.get(self.configs[name], ("", None))[1]
        return fill(path, name, in_processes.OF_ROLLOUTS, lambda folder: self.config(name, folder), size)["fits"]

    def config(self, name: str, folder: str) -> StageConfig:
        """A shipped config on its devices, with folders of shapes in place of its models."""
        config, exported = files.load_config(f"{files.config_folder()}/{name}"), None
        if isinstance(config, Pipeline):  # what earlier stages export has the shape of the model that SFT starts from
            exported, config = config.sft.model_name_or_path, [*stages_of(config).values()][-1]
        topology = CARDS.get(self.configs[name], (self.configs[name], None))[0]
        changed = {"topology": topology}
        for field in ("model_name_or_path", "sft_model_path", "reward_model_path"):
            if (path := getattr(config, field, None)) is not None:
                changed[field] = checkpoint(shape_of(exported or path), folder)
        return dataclasses.replace(config, **changed)

    def lines(self, rows: dict[str, dict]) -> list[str]:
        """The finished rows as Markdown."""
        heads = [{"experience": "log-probabilities and values"}.get(name, name) for name in in_processes.OF_ROLLOUTS]
        lines = [f"| config | GPUs | held | {' | '.join(heads)} | of |", "|" + "---|" * (4 + len(heads))]
        for name, where in self.configs.items():
            if (row := rows.get(name)) is not None:
                programs = [row["programs"].get(program) for program in in_processes.OF_ROLLOUTS]
                peaks = [f"{program['peak'] / GIB:.1f}" if program else "" for program in programs]
                sizes = [f"{row['held'] / GIB:.1f}", *peaks, f"{row['limit'] / GIB:.1f}"]
                lines.append(f"| `{name}` | {where.replace('gb', ' GB')} | {' | '.join(sizes)} |")
        return lines


def shape_of(name: str) -> str:
    """The Pythia size, or the entry of models.json, that a shipped config's model has."""
    if pythia := re.search(r"(?:pythia-|tldr_(?:sft|reward)_)([\d.]+[bm])", name):
        return pythia[1]
    model = re.sub(r"^Skywork-Reward-V2-|-Instruct$", "", name.split("/")[-1]).replace("SmolVLM2", "SmolVLM")
    if model not in SHAPES:
        raise UserError(f"{name}: models.json has no shape of it")
    return model


# --- tables

SMALLEST = (
    Smallest(
        name="rloo",
        page="scaling.md",
        models=TEXT_MODELS,
        ways={"full": {}, "LoRA": LORA},
        kinds=(V5E, V5P),
        config=rloo_config,
        head="| model | vocabulary | trained | slice | mesh | rows | models | cache | generation | update | of "
        "| logits | block | largest array of the update |",
        line=rloo_line,
    ),
    Smallest(
        name="gpus_ppo",
        page="scaling.md",
        models=("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b"),
        ways={"full": {}},
        kinds=GPUS,
        config=gpu_ppo_config,
        head=GPUS_HEAD,
        line=gpus_line,
    ),
    Smallest(
        name="gpus_rloo",
        page="scaling.md",
        models=TEXT_MODELS,
        ways={"full": {}, "LoRA": LORA},
        kinds=GPUS,
        config=rloo_config,
        head=GPUS_HEAD,
        line=gpus_line,
    ),
    Smallest(
        name="images",
        page="vision.md",
        models=tuple(name for name in IMAGE_MODELS if name not in ONLY_SHIPPED),
        ways={"full": {}, "LoRA": {**LORA, "lora_target_modules": ("q_proj", "v_proj")}},
        kinds=(V5E, ("h100:1", "h100:2", "h100:4", "h100:8")),
        config=images_config,
        head="| model | trained | devices | mesh | rows | models | cache | generation | update | of |",
        line=images_line,
    ),
    Smallest(
        name="adapters",
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
        config=slice_ppo_config,
        head="| model | trained | policy | value | moments | base | ref | reward | together | slice | chips "
        "| peak a chip |",
        line=adapters_line,
    ),
)

FAMILIES = {
    "Pythia": ("12b", "6.9b", "2.8b", "1.4b", "1b", "410m", "160m", "70m"),
    "Qwen2.5": ("Qwen2.5-7B", "Qwen2.5-1.5B", "Qwen2.5-0.5B"),
    "Qwen3": ("Qwen3-4B", "Qwen3-0.6B"),
    "Llama 3": ("Llama-3.1-8B", "Llama-3.2-1B"),
    "Gemma 3": ("Gemma-3-1b", "Gemma-3-270m"),
    "SmolLM2": ("SmolLM2-135M",),
}


def card_ppo(path: str) -> PPOConfig:
    """Micro-batches of 4 rows, 16 sampled at a time."""
    return ppo_config(path, 4, 16)


def card_rloo(path: str) -> RLOOConfig:
    """Micro-batches of 4 rows, 16 sampled at a time."""
    return dataclasses.replace(rloo_config(path, 1), rollout_batch_size=16)


WAYS: dict[str, tuple[Callable[[str], Any], dict[str, Any]]] = {
    "PPO": (card_ppo, {}),
    "PPO, LoRA": (card_ppo, SHARED_LORA),
    "PPO, LoRA, int8": (card_ppo, {**SHARED_LORA, "load_in_8bit": True}),
    "PPO, LoRA, 4 bits": (card_ppo, {**SHARED_LORA, "load_in_4bit": True}),
    "RLOO": (card_rloo, {}),
    "RLOO, LoRA": (card_rloo, LORA),
    "RLOO, LoRA, 4 bits": (card_rloo, {**LORA, "load_in_4bit": True}),
}

# Of each shipped config: devices, or the memory of one GPU.
SHIPPED_CONFIGS = {
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
TABLES = {table.name: table for table in (*SMALLEST, Largest(FAMILIES, WAYS), Shipped(SHIPPED_CONFIGS))}


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
    parser.add_argument("--rows", type=pathlib.Path, default=DOCS / "scaling", help="folder of the rows")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES), help="which tables")
    parser.add_argument("--only", nargs="+", default=[], help="models, families of cards or shipped configs to compile")
    parser.add_argument("--kinds", nargs="+", default=[], help="kinds of devices to compile for: v5e, h100, 24gb, ...")
    parser.add_argument("--print", action="store_true", help="print the finished rows without compiling")
    options = parser.parse_args(argv)
    tables = [TABLES[name] for name in options.tables]
    try:
        for option, index in (("only", 0), ("kinds", 1)):
            possible = sorted({search[index] for table in tables for search in table.searches()})
            if unknown := sorted(set(getattr(options, option)) - set(possible)):
                raise UserError(f"--{option} {unknown[0]}: not in these tables, which have {' '.join(possible)}")
        for last, table in () if options.print else itertools.product(range(1, len(PROGRAMS) + 1), tables):
            for model, kind, names in table.searches():
                if model in (options.only or [model]) and kind in (options.kinds or [kind]):
                    path = options.rows / table.file
                    any(table.try_one(path, name, PROGRAMS[:last]) for name in names)  # until one fits
        for table in tables:
            lines = table.lines(read(options.rows / table.file))
            if not options.print:
                write_table(DOCS / table.page, table.name, lines)
            print("\n".join(lines))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

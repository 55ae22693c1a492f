"""Images of recorded runs (`vlm_*`): what the processor makes of them, and what each row of a generation batch has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlhf_jax.data import Tokenizer, images, load_tokenizer
from rlhf_jax.data.files import from_list
from rlhf_jax.models import Model, vision
from rlhf_jax.types import Images
from tests.helpers.made_data import make_prompts
from tests.parity.report import Report

PROCESSING = "processing.npz"
OF_THE_RECORD = ("image_splitting", "image_token_id", "eos_token_id", "pad_token_id", "suppress_tokens")
# The recorded pixels are float32 of a division in float64, ours of one in float32.
PIXELS = 1e-6


def has_images(folder: Path) -> bool:
    """Whether a record is of a model that reads images."""
    return (folder / PROCESSING).is_file()


def tokenizer_folder(folder: Path) -> Path:
    """Where the tokenizer is: beside the policy where there are images."""
    return folder / ("policy" if has_images(folder) else "tokenizer")


def options_of(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a record; of one with images without those that are null, TRL's defaults, and without those of its
    processor and sampler, whose work is recorded."""
    if not has_images(folder):
        return options
    kept = {name: value for name, value in options.items() if value is not None and name not in OF_THE_RECORD}
    if kept.get("algorithm") == "rloo":  # which trainer this is has been decided
        del kept["algorithm"]
    return kept


def images_of(trace: Any, generation: int, group_size: int) -> Images | None:
    """The recorded pixels of a generation batch's prompts, as many tiles in each batch; None without images."""
    batches = [trace[name] for name in trace.files if name.startswith("pixel_values_")]
    if not batches:
        return None
    tiles, name = max(pixels.shape[1] for pixels in batches), f"pixel_values_{generation}"
    blank = np.zeros((len(trace[f"prompt_ids_{generation}"]), 0, *batches[0].shape[2:]), np.float32)
    pixels = (trace[name] if name in trace.files else blank)[::group_size]
    return Images(jnp.asarray(np.pad(pixels, ((0, 0), (0, tiles - pixels.shape[1]), (0, 0), (0, 0), (0, 0)))))


def compare_processing(report: Report, folder: Path, model: Model, trace: Any) -> None:
    """Ids and tiles of each row of the data set, and ids of each generation batch, by the functions of training."""
    tokenizer = load_tokenizer(str(folder / "policy"), vocab_size=model.config.vocab_size)
    data = prompts_of(folder, model, tokenizer)
    recorded = np.load(folder / PROCESSING)
    for row, ids in enumerate(data.tokens):
        where = f"row {row}"
        wanted = recorded[f"row{row}_input_ids"]
        report.add("processing: ids", float(not np.array_equal(ids, wanted)), 0.0, where)
        ours = np.asarray(vision.normalized(data.images.batch([row]), jnp.float32))[0]
        wanted = ours[:0]
        if f"row{row}_pixel_values" in recorded.files:
            wanted = recorded[f"row{row}_pixel_values"]
            wanted = wanted[np.any(wanted, axis=(1, 2, 3))]
        count = len(wanted)
        report.add("processing: tiles", float(np.abs(ours[:count] - wanted).max(initial=0.0)), PIXELS, where)
        # The rest only pads.
        blank = np.asarray(data.images.batch([row]).pixels)[0, count:]
        report.add("processing: number of tiles", float(blank.any()), 0.0, where)
    generation = 0
    while f"index_{generation}" in trace.files:
        ids, mask = trace[f"prompt_ids_{generation}"], trace[f"prompt_mask_{generation}"].astype(bool)
        for i, row in enumerate(trace[f"index_{generation}"]):
            same = np.array_equal(ids[i][mask[i]], data.tokens[row])
            report.add("processing: prompts of the rollout", float(not same), 0.0, f"generation {generation}, row {i}")
        generation += 1


def prompts_of(folder: Path, model: Model, tokenizer: Tokenizer):
    """The record's data set as `data.PromptData`."""
    config = model.config
    processor = images.load_processor(
        str(folder / "policy"),
        tokenizer,
        name=f"{folder.name}/policy",
        image_token_id=config.image_token_id,
        tokens=config.vision.tokens,
        size=config.vision.image_size,
    )
    rows = json.loads((folder / "prompts.json").read_text())
    for row in rows:
        for name in ("images", "image"):
            if isinstance(row.get(name), list):
                row[name] = [str(folder / "images" / file) for file in row[name]]
            elif row.get(name):
                row[name] = str(folder / "images" / row[name])
    return make_prompts(from_list(rows, "prompts.json"), tokenizer, query_length=100_000, processor=processor)

"""Records a run of TRL 1.12.0's RLOOTrainer or GRPOTrainer on a tiny SmolVLM with images (CPU, float32).

Beside what `groups` has: images/*.png and prompts.json, the data set; processing.npz, what the processor makes of each
row by itself; pixel_values_G [rows, tiles, 3, S, S], num_images_G, index_G (row of the data set), and the same behind
stepJ_. The processor's class is Idefics3's, which needs no torchvision; the image processor is SmolVLM's of PIL.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import numpy as np
import torch
from datasets import Dataset, List
from datasets import Image as ImageFeature
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.helpers import vision as tiny_vision
from tests.parity.recording import groups, peft, tiny

IMAGES = ("pixel_values", "num_images", "index")


class VisionRecording(groups.Recording):
    """A mixin of TRL's trainers, with what rows have of images."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        generation = self.generations - 1
        output["index"] = torch.tensor([row["index"] for row in inputs])
        for name in filter(output.__contains__, IMAGES):
            self.trace[f"{name}_{generation}"] = np.asarray(output[name]).copy()
        return output


class RLOORecorder(VisionRecording, RLOOTrainer):
    """TRL's trainer, recorded."""

    kept = (*groups.Recording.kept, "old_logps")


class GRPORecorder(VisionRecording, GRPOTrainer):
    """TRL's trainer, recorded."""

    kept = (*groups.Recording.kept, "num_items_in_batch", "old_per_token_logps", "ref_per_token_logps")


TRAINERS = {"rloo": (RLOORecorder, RLOOConfig), "grpo": (GRPORecorder, GRPOConfig)}


def data_set(setting: tiny.Setting, least: int, most: int) -> list[dict[str, Any]]:
    """Rows of `least` to `most` images, of several sizes and modes; written to the record.

    TRL 1.12.0 raises on a batch without images, its GRPO on a row without, and it gives rows the wrong pixels where a
    batch has as many images as rows and not one each.
    """
    rng, rows = np.random.default_rng(setting.seed), []
    (setting.folder / "images").mkdir()
    for number in range(setting.prompts):
        text = " ".join(f"w{i}" for i in rng.integers(1, 30, rng.integers(2, 6)))
        names, count = [], int(rng.integers(least, most + 1))
        for place in range(count):
            mode = ("RGB", "RGBA", "L")[rng.integers(3)]
            image = tiny_vision.picture(int(rng.integers(2**30)), *rng.integers(4, 40, 2).tolist(), mode)
            names.append(f"{number:02d}_{place}.png")
            image.save(setting.folder / "images" / names[-1])
        content: Any = text
        if most > 1:  # all of them, since a column of datasets.Dataset has one type
            words, image = text.split(), {"type": "image", "text": None}
            content = [image] * min(count, 1) + [{"type": "text", "text": words[0]}] + [image] * (count - 1)
            content.append({"type": "text", "text": " ".join(words[1:])})
        rows.append({"prompt": [{"role": "user", "content": content}], "images": names})
    (setting.folder / "prompts.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def processing_of(processor, prompt: list[dict[str, Any]], pictures: list[Any]) -> dict[str, np.ndarray]:
    """What TRL makes of a row: ids, and tiles where there are images."""
    from trl.data_utils import prepare_multimodal_messages

    messages = prepare_multimodal_messages(prompt, images=pictures)
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    out = processor(images=[pictures] if pictures else None, text=[text], return_tensors="np")
    found = {"input_ids": np.asarray(out["input_ids"][0])}
    return {**found, "pixel_values": np.asarray(out["pixel_values"][0])} if pictures else found


def record(setting: tiny.Setting) -> None:
    """Runs TRL and writes the record. Of setting.options `trainer` is rloo or grpo, `images` the least and the most
    images of a row, `image_splitting` whether they are split, and the others are TRL's."""
    given = {"trainer": "rloo", "images": [1, 1], "image_splitting": False, **setting.options}
    own = {name: given.pop(name) for name in ("trainer", "images", "image_splitting")}
    options = {"max_completion_length": 8, **tiny.LEARNING, "temperature": 0.9, **given}
    lora, own_options = peft.asked_for(options)
    torch.manual_seed(setting.seed)
    torch.set_num_threads(1)
    tiny.start(setting, ())
    policy = tiny_vision.reference(seed=setting.seed)
    policy_folder = setting.folder / "policy"
    tiny_vision.checkpoint(policy_folder, own["image_splitting"], policy)
    (setting.folder / "tokenizer").rename(setting.folder / "unused")
    for file in (setting.folder / "unused").iterdir():
        file.unlink()
    (setting.folder / "unused").rmdir()
    policy = type(policy).from_pretrained(policy_folder)
    tokenizer = AutoTokenizer.from_pretrained(policy_folder, padding_side="left")
    image_processor = SmolVLMImageProcessorPil.from_pretrained(policy_folder)
    processor = Idefics3Processor(
        image_processor, tokenizer, image_seq_len=tiny_vision.TOKENS, chat_template=tiny_vision.TEMPLATE
    )
    rows = data_set(setting, *own["images"])
    pictures = [[Image.open(setting.folder / "images" / name) for name in row["images"]] for row in rows]
    processing = {}
    for number, (row, images) in enumerate(zip(rows, pictures, strict=True)):
        found = processing_of(processor, row["prompt"], images)
        processing |= {f"row{number}_{name}": x for name, x in found.items()}
    np.savez_compressed(setting.folder / "processing.npz", **processing)

    columns = {"prompt": [row["prompt"] for row in rows], "images": pictures, "index": list(range(len(rows)))}
    dataset = Dataset.from_dict(columns).cast_column("images", List(ImageFeature()))
    tiny.reset_accelerate()
    trainer_type, config_type = TRAINERS[own["trainer"]]
    with tempfile.TemporaryDirectory() as scratch:
        config = config_type(
            **tiny.quiet(setting, scratch),
            logging_steps=1,
            gradient_checkpointing=False,
            max_steps=setting.updates,
            remove_unused_columns=False,
            generation_kwargs={"suppress_tokens": [tiny_vision.IMAGE]},
            **own_options,
        )
        trainer = trainer_type(
            setting,
            model=policy,
            args=config,
            reward_funcs=[groups.FUNCTIONS[name] for name in setting.functions],
            train_dataset=dataset,
            processing_class=processor,
            peft_config=lora,
        )
        if lora is not None:
            peft.fill(trainer.model)
            peft.keep(trainer.model, setting.folder / "adapter")
        trainer.train()
    final = setting.folder / "final_policy"
    if lora is not None:
        peft.keep(trainer.model, final)
    else:
        policy.save_pretrained(final)
    named = {"algorithm": own["trainer"], "image_splitting": own["image_splitting"]}
    tiny.finish(setting, config, {**named, **options}, trainer.logged, trainer.trace, None)

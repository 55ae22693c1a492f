"""What a user brings to a run: two checkpoints with the built-in tokenizer, and a data file for each stage."""

import dataclasses
import functools
import json
import pathlib

import jax

from rlhf_jax import data, models
from rlhf_jax.data import synthetic
from rlhf_jax.models.io import hf
from tests.helpers.made_data import write_jsonl

POSTS = 12


@dataclasses.dataclass(frozen=True)
class UserFiles:
    """Folders and files that are right; tests spoil copies of them."""

    sft: pathlib.Path
    reward: pathlib.Path
    posts: pathlib.Path
    pairs: pathlib.Path
    rows: int

    @functools.cached_property
    def right(self) -> dict[str, dict[str, object]]:
        """Options of each stage with which it runs."""
        small = {"query_length": 64, "batch_size": 4, "micro_batch_size": None, "report_to": "none", "dtype": "float32"}
        ppo = {"sft_model_path": self.sft, "reward_model_path": self.reward, "dataset_name": self.posts}
        ppo |= {"response_length": 4, "total_episodes": 4, "rollout_batch_size": None, "num_sample_generations": 0}
        supervised = {"model_name_or_path": self.sft, "max_length": 96, "max_steps": 1, "eval_steps": 0}
        return {
            "ppo": small | ppo,
            "sft": small | supervised | {"dataset_name": self.posts},
            "reward": small | supervised | {"dataset_name": self.pairs, "normalize_dataset_name": None},
        }


def make_user_files(folder: pathlib.Path) -> UserFiles:
    tokenizer = data.load_tokenizer("synthetic")
    model = models.custom_shape("1x16x2", vocab_size=tokenizer.vocab_size, max_positions=128)
    for name, kind, seed in (("sft", "causal", 0), ("reward", "scalar", 1)):
        hf.save(folder / name, model, jax.device_get(model.init(jax.random.key(seed), heads=(kind,))), kind=kind)
        data.save_tokenizer(tokenizer, str(folder / name))
    write_jsonl(folder / "posts.jsonl", synthetic.demonstrations(POSTS))
    write_jsonl(folder / "pairs.jsonl", synthetic.preference_pairs(POSTS))
    return UserFiles(
        folder / "sft", folder / "reward", folder / "posts.jsonl", folder / "pairs.jsonl", tokenizer.vocab_size
    )


def arguments(files: UserFiles, stage: str, run_dir: pathlib.Path, **options) -> list[str]:
    flags = {**files.right[stage], "run_dir": run_dir, **options}
    return [
        "--config",
        f"tldr_{stage}.py",
        *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
    ]


def mentions(message: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in message, f"{part!s} is not in: {message}"


def config_with(**changes):
    def spoil(folder: pathlib.Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return spoil


def model_of(folder: pathlib.Path, rows: int) -> pathlib.Path:
    model = models.custom_shape("1x16x2", vocab_size=rows, max_positions=128)
    hf.save(folder, model, jax.device_get(model.init(jax.random.key(0))), kind="causal")
    return folder

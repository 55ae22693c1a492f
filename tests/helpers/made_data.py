"""Rows in files, and data of rows with options by keyword."""

import json
import types

from rlhf_jax import data
from rlhf_jax.config import SFTConfig
from rlhf_jax.data.options import PairOptions, PromptOptions


def make_prompts(rows, tokenizer, processor=None, **options):
    return data.from_rows(data.PromptData, rows, PromptOptions(**options), tokenizer, processor)


def make_demonstrations(rows, tokenizer, processor=None, **options):
    return data.from_rows(data.DemoData, rows, SFTConfig(**options), tokenizer, processor)


def make_pairs(rows, tokenizer, **options):
    return data.from_rows(data.PairData, rows, PairOptions(**options), tokenizer)


def data_config(**options):
    """Options of a data set as a stage's config has them."""
    defaults = {
        "dataset_name": "synthetic",
        "dataset_config": None,
        "dataset_revision": None,
        "dataset_train_split": "train",
        "dataset_test_split": "validation",
        "eval_dataset_name": None,
        "max_train_samples": None,
        "max_eval_samples": 256,
        "prompt_column": "prompt",
        "completion_column": "completion",
        "chosen_column": "chosen",
        "rejected_column": "rejected",
        "margin_column": None,
        "on_bad_row": "raise",
        "query_length": 96,
        "query_overflow": "truncate",
        "length_buckets": None,
        "chat_template_kwargs": None,
        "datasets": None,
        "dataset_num_proc": None,
        "shuffle_dataset": True,
        "environment_factory": (),
        "assistant_only_loss": False,
        "completion_only_loss": False,
        "max_length": 128,
        "normalize_dataset_name": None,
        "normalize_samples": 4,
    }
    return types.SimpleNamespace(**{**defaults, **options})


def write_jsonl(path, rows) -> str:
    """Writes rows, and lines of text as they are. Returns the path."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)

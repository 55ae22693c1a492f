"""Data of rows, with options by keyword."""

from rlhf_jax import data
from rlhf_jax.config import SFTConfig
from rlhf_jax.data.options import PairOptions, PromptOptions


def make_prompts(rows, tokenizer, processor=None, **options):
    return data.from_rows(data.PromptData, rows, PromptOptions(**options), tokenizer, processor)


def make_demonstrations(rows, tokenizer, processor=None, **options):
    return data.from_rows(data.DemoData, rows, SFTConfig(**options), tokenizer, processor)


def make_pairs(rows, tokenizer, **options):
    return data.from_rows(data.PairData, rows, PairOptions(**options), tokenizer)

"""Prompts, demonstrations and preference pairs: from files, the hub, objects or the built-in synthetic task to numpy
batches that are pure functions of seed and step."""

from typing import TYPE_CHECKING

from rlhf_jax.utils.lazy import attributes

if TYPE_CHECKING:
    from rlhf_jax.data.batches import DataReport, bucket, default_buckets, fingerprint
    from rlhf_jax.data.demonstrations import (
        DemoBatch,
        DemoData,
        load_normalization_data,
    )
    from rlhf_jax.data.loading import Rows, eval_sets, load_rows, text_columns_of
    from rlhf_jax.data.mixture import TrainingRows, load_training_rows
    from rlhf_jax.data.packing import PackedDemoData, best_fit_decreasing, pack
    from rlhf_jax.data.pairs import PairBatch, PairData
    from rlhf_jax.data.pipeline import from_rows, load, load_eval
    from rlhf_jax.data.prompts import PromptData
    from rlhf_jax.data.reward_inputs import reward_tokens
    from rlhf_jax.data.tldr import format_post, parse_post
    from rlhf_jax.data.tokenizer import (
        Tokenizer,
        check_same_tokenizer,
        check_tokenizer_fits_model,
        load_tokenizer,
        own_pad_id,
        same_tokenizer,
        save_tokenizer,
    )

_HOMES = {
    "DataReport": "batches",
    "DemoBatch": "demonstrations",
    "DemoData": "demonstrations",
    "PackedDemoData": "packing",
    "PairBatch": "pairs",
    "PairData": "pairs",
    "PromptData": "prompts",
    "Rows": "loading",
    "Tokenizer": "tokenizer",
    "TrainingRows": "mixture",
    "best_fit_decreasing": "packing",
    "bucket": "batches",
    "check_same_tokenizer": "tokenizer",
    "check_tokenizer_fits_model": "tokenizer",
    "default_buckets": "batches",
    "eval_sets": "loading",
    "fingerprint": "batches",
    "format_post": "tldr",
    "from_rows": "pipeline",
    "load": "pipeline",
    "load_eval": "pipeline",
    "load_normalization_data": "demonstrations",
    "load_rows": "loading",
    "load_tokenizer": "tokenizer",
    "load_training_rows": "mixture",
    "own_pad_id": "tokenizer",
    "pack": "packing",
    "parse_post": "tldr",
    "reward_tokens": "reward_inputs",
    "same_tokenizer": "tokenizer",
    "save_tokenizer": "tokenizer",
    "text_columns_of": "loading",
}
__all__ = [*_HOMES]
__getattr__ = attributes(__name__, _HOMES)

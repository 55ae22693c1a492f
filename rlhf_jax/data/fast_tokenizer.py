"""The tokenizer class of transformers, imported without torch and without its warning that torch is missing, and the
tokenizers of the built-in tasks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

_NO_WARNINGS = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def fast_tokenizer() -> Any:
    """transformers' PreTrainedTokenizerFast."""
    previous = os.environ.get(_NO_WARNINGS)
    os.environ[_NO_WARNINGS] = "1"
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        if previous is None:
            del os.environ[_NO_WARNINGS]
        else:
            os.environ[_NO_WARNINGS] = previous
    return PreTrainedTokenizerFast


EOS, PAD, UNK = "<|endoftext|>", "[PAD]", "[UNK]"
"""Special tokens of the built-in tasks."""


def word_level_tokenizer(vocabulary: Sequence[str], pieces: str) -> Any:
    """A PreTrainedTokenizerFast with one token for each piece of a text; decoding joins the pieces.

    Args:
      vocabulary: all tokens in the order of their ids, EOS, PAD and UNK among them.
      pieces: regular expression of what a text is split into.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return fast_tokenizer()(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )

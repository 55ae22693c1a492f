"""The tokenizer class of transformers, imported without torch."""

from __future__ import annotations

import os
from typing import Any

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def fast_tokenizer() -> Any:
    """transformers' PreTrainedTokenizerFast, imported without its advice to install torch."""
    said = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        if said is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = said
    return PreTrainedTokenizerFast

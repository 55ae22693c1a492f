"""The tokenizer class of transformers, imported without torch and without its warning that torch is missing."""

from __future__ import annotations

import os
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

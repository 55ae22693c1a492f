"""ROUGE by Google's rouge-score package, which summarization papers report."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np

from rlhf_jax.errors import UserError

KINDS = ("rouge1", "rouge2", "rougeL")


def check() -> None:
    """UserError if the package is missing."""
    if importlib.util.find_spec("rouge_score") is None:
        raise UserError("--rouge needs the package rouge-score: pip install '.[rouge]'; or leave --rouge out")


def scores(references: Sequence[str], answers: Sequence[str]) -> dict[str, np.ndarray]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L with Porter stemming, as in transformers' summarization script.

    Args:
      references, answers: N texts each.

    Returns:
      {kind: [N] float64 in [0, 1]}
    """
    from rouge_score.rouge_scorer import RougeScorer  # takes a second to import

    scorer = RougeScorer(KINDS, use_stemmer=True)
    results = [scorer.score(reference, answer) for reference, answer in zip(references, answers, strict=True)]
    return {kind: np.asarray([result[kind].fmeasure for result in results]) for kind in KINDS}

"""Evaluation of policies and reward models: the command `rlhf-jax evaluate`, and its statistics."""

from rlhf_jax.evaluate.best_of_n import best_of_n, kl_bound
from rlhf_jax.evaluate.tables import (
    comparison_table,
    print_comparison,
    summarize,
    write_comparison,
)
from rlhf_jax.metrics.calibration import calibration, calibration_error, reliability
from rlhf_jax.metrics.statistics import (
    Z95,
    bootstrap,
    fit_length,
    length_controlled_win_rate,
    length_term,
    mean_and_standard_error,
    mean_interval,
    paired_difference,
    preferences,
    unigram_entropy,
    win_rate,
)
from rlhf_jax.utils.tables import side_by_side

__all__ = [
    "Z95",
    "best_of_n",
    "bootstrap",
    "calibration",
    "calibration_error",
    "comparison_table",
    "fit_length",
    "kl_bound",
    "length_controlled_win_rate",
    "length_term",
    "mean_and_standard_error",
    "mean_interval",
    "paired_difference",
    "preferences",
    "print_comparison",
    "reliability",
    "side_by_side",
    "summarize",
    "unigram_entropy",
    "win_rate",
    "write_comparison",
]

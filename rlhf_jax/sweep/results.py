"""What the runs of a sweep gave, as a file and as a table."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Mapping, Sequence

from rlhf_jax.config import PolicyConfig, stages_of
from rlhf_jax.metrics.statistics import t_interval
from rlhf_jax.sweep.plan import Sweep
from rlhf_jax.utils.tables import plain_table
from rlhf_jax.utils.text import short_number

POLICY_METRICS = (
    ("eval/scores", "objective/scores", "reward"),
    ("eval/kl", "objective/kl", "kl"),
    ("eval/response_length", "val/response_length", "completions/mean_length"),
)
"""Columns of the table: the first of each that a run has."""
SUPERVISED_METRICS = (("eval/loss", "loss"), ("eval/accuracy", "accuracy"))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      metrics: of the last stage, of a finished run.
      error: why it failed; None if it is finished.
    """

    metrics: Mapping[str, float]
    error: str | None = None


def csv_text(sweep: Sweep, outcomes: Sequence[Outcome | None]) -> str:
    """A row for each run that ended: its folder, options, 'finished' or 'failed', and the final metrics."""
    ended = [(run, outcome) for run, outcome in zip(sweep.runs, outcomes, strict=True) if outcome is not None]
    metrics = sorted({name for _, outcome in ended for name in outcome.metrics})
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["run", *sweep.options, "status", *metrics, "error"])
    for run, outcome in ended:
        status = "finished" if outcome.error is None else "failed"
        numbers = [outcome.metrics.get(name, "") for name in metrics]
        row = [os.path.basename(run.config.run_dir), *run.values.values(), status, *numbers, outcome.error or ""]
        writer.writerow(row)
    return stream.getvalue()


def table(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """A row for each combination without the seed: its options, how many seeds, and the metrics that matter."""
    stage = [*stages_of(sweep.runs[0].config).values()][-1]
    columns = POLICY_METRICS if isinstance(stage, PolicyConfig) else SUPERVISED_METRICS
    logged = {name for outcome in outcomes for name in outcome.metrics}
    metrics = [name for names in columns if (name := next((name for name in names if name in logged), None))]
    options = [name for name in sweep.options if name not in sweep.seeds]
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for run, outcome in zip(sweep.runs, outcomes, strict=True):
        groups.setdefault(tuple(run.values[name] for name in options), []).append(outcome)
    rows = [[*options, "seeds", *metrics]]
    for words, group in groups.items():
        finished = [outcome.metrics for outcome in group if outcome.error is None]
        failed = len(group) - len(finished)
        seeds = f"{len(finished)}, {failed} failed" if failed else f"{len(finished)}"
        rows.append([*words, seeds, *(_cell([each[name] for each in finished if name in each]) for name in metrics)])
    lines = [plain_table(rows)]
    if any("[" in cell for row in rows[1:] for cell in row[len(options) :]):
        lines.append("[ ]: 95 % interval of the mean over seeds (Student's t); few seeds give a wide one")
    for run, outcome in zip(sweep.runs, outcomes, strict=True):
        if outcome.error is not None:
            lines.append(f"failed: {run.title}: {outcome.error.partition(chr(10))[0]}")
    return "\n".join(lines)


def _cell(numbers: Sequence[float]) -> str:
    """'0.52', of several numbers '0.52 [0.47, 0.57]'; 'failed' of none."""
    if not numbers:
        return "failed"
    mean, half_width = t_interval(numbers)
    if len(numbers) == 1:
        return short_number(mean)
    return f"{short_number(mean)} [{short_number(mean - half_width)}, {short_number(mean + half_width)}]"

"""The command `rlhf-jax diff RUN_A RUN_B`: where two runs part, from their options to the first tensor."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlhf_jax import storage
from rlhf_jax.config import command_line
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import jax_settings, xla_flags
from rlhf_jax.rerun.recompute import OpenedBatch, OpenedUpdate, by_path, recomputing
from rlhf_jax.rerun.recorded import WHY_OTHERS, RecordedRun, same, stage_folders
from rlhf_jax.runtime import compile_cache
from rlhf_jax.runtime.config_diff import differences
from rlhf_jax.utils.output import guarded_output
from rlhf_jax.utils.tables import plain_table
from rlhf_jax.utils.text import printable

PROG = "rlhf-jax diff"
ROUNDING = 1e-5
"""Relative difference in norm up to which arrays differ by rounding: two programs of other shape or on other hardware
differ by a few 1e-6 in float32 and 1e-2 in bfloat16."""
_IGNORED_OPTIONS = ("run_dir", "resume", "override_resume")


@dataclasses.dataclass(frozen=True)
class DiffOptions:
    """Where two runs part: the options and data that differ, the first update whose metrics differ, and by
    recomputation from checkpoints the first row, token and tensor. Pipelines are compared stage by stage."""

    run_dirs: tuple[str, ...] = ()
    """The folders of the two runs; may be given without the flag."""
    no_recompute: bool = False
    """Compare what the folders have, and recompute no update."""


@guarded_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 0 if the runs are equal, 1 if they differ, 2 after a user error (one
    line on stderr)."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        options = command_line.parse_options(argv, DiffOptions, PROG, positional="run_dirs")
        if len(options.run_dirs) != 2:
            raise UserError(f"{PROG} needs the folders of two runs: {PROG} runs/a runs/b")
        equal = diff(*options.run_dirs, recompute=not options.no_recompute)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    return 0 if equal else 1


@storage.from_here()
@jax_settings.pinned()
def diff(first: str, second: str, *, recompute: bool = True, log: Callable[[str], None] = print) -> bool:
    """Compares two runs and prints where they part.

    Args:
      first, second: folders of runs of one stage, or of pipelines.
      recompute: whether the first update that differs is recomputed in both, to compare its tensors.
      log: called with each line.

    Returns:
      Whether nothing that was compared differs.

    Raises:
      UserError: a folder has no run, or the runs have no stage in common.
    """
    folders = stage_folders(first), stage_folders(second)
    stages = [stage for stage in folders[0] if stage in folders[1]]
    if not stages:
        names = " and ".join(", ".join(some) for some in folders)
        raise UserError(f"{first} and {second} have no stage in common: {names}")
    compared = {stage: [RecordedRun.open(some[stage]) for some in folders] for stage in stages}
    xla_flags.add_those_of_run(any(run.config.deterministic for runs in compared.values() for run in runs))
    compile_cache.enable()
    equal = True
    for stage, runs in compared.items():
        log(f"== {stage}: {runs[0].folder.path} | {runs[1].folder.path}")
        equal = _compare(runs[0], runs[1], recompute, log)
        if not equal:
            later = stages[stages.index(stage) + 1 :]
            if later:
                log(f"{', '.join(later)}: not compared, since {stage} comes before")
            break
    only = [stage for stage in {**folders[0], **folders[1]} if stage not in stages]
    if only:
        log(f"in one of the runs only: {', '.join(only)}")
    return equal and not only


def _compare(a: RecordedRun, b: RecordedRun, recompute: bool, log: Callable[[str], None]) -> bool:
    """Compares the runs of a stage."""
    options = differences(a.options(), b.options(), _IGNORED_OPTIONS, _same_inside(a, b))
    inputs = differences(a.inputs(), b.inputs(), (), _same_inside(a, b))
    surroundings = differences(*({"environment": _last(run)} for run in (a, b)), ())
    for what, lines in (("option", options), ("data and models", inputs), ("environment", surroundings)):
        for line in lines:
            log(f"{what}: {printable(line)}")
    step, names = first_difference(a.metrics, b.metrics)
    rows_step, row_lines = _first_rows(a, b)
    compared = min(a.updates, b.updates)
    if step is None and rows_step is None:
        damaged = _checkpoint_differences(a, b, log)
        if not damaged:
            parts = [f"metrics of {compared} updates"]
            parts += [f"rows, tokens and rewards of {len(a.rows)} updates"] if a.rows and b.rows else []
            parts += [f"checkpoints {', '.join(map(str, _common_steps(a, b)))}"] if _common_steps(a, b) else []
            log(f"equal bit by bit: {'; '.join(parts)}")
        if a.updates != b.updates:
            log(f"{a.updates} and {b.updates} updates: the shorter run is the beginning of the longer one")
        return not damaged and a.updates == b.updates
    first = min(number for number in (step, rows_step) if number is not None)
    log(f"updates: equal up to {first - 1}, update {first} differs" if first > 1 else f"updates: {first} differs")
    for line in row_lines if rows_step == first else ():
        log(f"update {first}: {line}")
    if step == first:
        _log_metrics(a, b, step, names, log)
    if recompute and first > 0:
        _compare_tensors(a, b, first, log)
    return False


def _last(run: RecordedRun) -> dict[str, str]:
    return next(iter(run.folder.environments()[-1:]), {})


def _same_inside(a: RecordedRun, b: RecordedRun) -> Callable[[Any, Any], bool]:
    """Whether two paths are the same, or at the same place within the folders of the runs."""
    roots = [run.folder.path.rpartition("/")[0] for run in (a, b)]

    def same_place(old: Any, new: Any) -> bool:
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            return all(map(same_place, old, new))
        if not (isinstance(old, str) and isinstance(new, str)):
            return old == new
        old, new = (storage.absolute(text).removeprefix(root) for text, root in zip((old, new), roots))
        return old == new

    return same_place


def first_difference(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> tuple[int | None, list[str]]:
    """(the first update that both have whose lines differ, names of what differs in it); (None, []) without one."""
    for step in sorted(a.keys() & b.keys()):
        names = [
            name
            for name in {**a[step], **b[step]}
            if name not in a[step] or name not in b[step] or not same(a[step][name], b[step][name])
        ]
        if names:
            return step, names
    return None, []


def _log_metrics(a: RecordedRun, b: RecordedRun, step: int, names: list[str], log: Callable[[str], None]) -> None:
    """Lines on the metrics of an update that differ, those that others follow from first."""
    common = [name for name in names if name in a.metrics[step] and name in b.metrics[step]]
    cells = [["metric", "first run", "second run"]]
    for name in sorted(common, key=_order_of_metric)[:8]:
        cells.append([name, *(f"{run.metrics[step][name]:.9g}" for run in (a, b))])
    if common:
        log(plain_table(cells))
    if len(common) > 8:
        log(f"and {len(common) - 8} more metrics")
    missing = [name for name in names if name not in common]
    if missing:
        log(f"in one of the runs only: {', '.join(missing[:8])}")


_METRICS_IN_ORDER = (
    *("learning_rate", "lr", "critic_lr", "num_tokens", "val/response_length", "completions/", "rewards/"),
    *("objective/scores", "reward", "objective/", "sampling/", "loss", "policy/", "val/", "grad_norm"),
)


def _order_of_metric(name: str) -> int:
    """The place of a metric in the order in which an update computes them; evaluations come last."""
    places = (place for place, prefix in enumerate(_METRICS_IN_ORDER) if name.startswith(prefix))
    return next(places, len(_METRICS_IN_ORDER)) + 100 * name.startswith("eval")


def _first_rows(a: RecordedRun, b: RecordedRun) -> tuple[int | None, list[str]]:
    """(the first update whose rows.jsonl differ, lines on its first rows); (None, []) without one."""
    for step in sorted(a.rows.keys() & b.rows.keys()):
        one, other, lines = a.rows[step], b.rows[step], []
        if [*one["rewards"]] != [*other["rewards"]]:
            lines.append(f"rewards {', '.join(one['rewards'])} and {', '.join(other['rewards'])}")
        for what, old, new in _columns(one, other):
            places = [i for i, pair in enumerate(zip(old, new)) if not same(*pair)]
            if len(old) != len(new):
                lines.append(f"{len(old)} and {len(new)} {what}")
            elif places:
                i = places[0]
                values = "" if what == "tokens" else f": {old[i]} | {new[i]}"
                row = f"row {i} of the batch (row {one['rows'][i]} of the data)"
                lines.append(f"{what} of {len(places)} of {len(old)} rows differ, first of {row}{values}")
        if lines:
            return step, lines
    return None, []


def _columns(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, list, list]]:
    yield "rows of the data", one["rows"], other["rows"]
    yield "tokens", one["tokens"], other["tokens"]
    for name in one["rewards"]:
        if name in other["rewards"]:
            yield f"rewards {name}", one["rewards"][name], other["rewards"][name]


# --- checkpoints


def _common_steps(a: RecordedRun, b: RecordedRun) -> list[int]:
    return sorted({*a.folder.saved_steps()} & {*b.folder.saved_steps()})


def _checkpoint_differences(a: RecordedRun, b: RecordedRun, log: Callable[[str], None]) -> bool:
    """Compares the checkpoints that both runs have; whether one is damaged or differs."""
    steps, differs = _common_steps(a, b), False
    if not steps:
        return False
    with recomputing(a, 0) as one, recomputing(b, 0) as other:
        for step in steps:
            tensors = []
            for run in (one, other):
                try:
                    run.restore(step)
                    tensors.append(by_path(run.state))
                except UserError as error:
                    log(str(error))
            lines = (describe(name, x, tensors[1].get(name)) for name, x in tensors[0].items()) if tensors[1:] else ()
            line = next((line for line in lines if line is not None), None)
            if line is not None:
                log(f"checkpoint {step}: {line}")
            differs |= line is not None or len(tensors) < 2
    return differs


# --- tensors


def _compare_tensors(a: RecordedRun, b: RecordedRun, step: int, log: Callable[[str], None]) -> None:
    """Recomputes an update of both runs, and prints its first tensor that differs, and how all differ."""
    updates = []
    for which, run in (("first", a), ("second", b)):
        start = run.checkpoint_before(step)
        log(f"recomputing update {step} of the {which} run from {f'checkpoint {start}' if start else 'the start'}")
        try:
            with recomputing(run, start) as recomputation:
                updates.append(recomputation.open(step))
                for note in recomputation.notes:
                    log(f"note: {note}")
        except UserError as error:
            log(f"the {which} run cannot be recomputed: {error}")
            return
        if names := run.differing(step, updates[-1].metrics):
            log(
                f"note: recomputing gives other numbers than the {which} run has ({', '.join(names[:3])}): {WHY_OTHERS}"
            )
    cells, verdict = [["tensor", "largest difference", "in norm"]], None
    for name, one, other in _tensors(*updates):
        line = describe(name, one, other)
        if line is None:
            continue
        if verdict is None:
            verdict = line
        largest, relative = _sizes(one, other)
        cells.append([name, f"{largest:.3g}", f"{relative:.3g}"])
    if verdict is None:
        log("no tensor of the update differs where it is recomputed here")
        return
    log(f"first difference: {verdict}")
    first = float(cells[1][2])
    if first <= ROUNDING:
        log(f"it is {first:.1g} in norm: the runs part by rounding, which grows from update to update")
    log(plain_table(cells[:13]))
    if len(cells) > 13:
        log(f"and {len(cells) - 13} more tensors")


_FIELDS = {  # in the order in which an update computes them
    "rows": "rows of the data",
    "prompt_tokens": "prompt tokens",
    "response": "response tokens",
    "sampler_logprobs": "sampler's log-probabilities",
    "rewards": "rewards",
    "scores": "scores",
    "logprobs": "log-probabilities",
    "ref_logprobs": "reference's log-probabilities",
    "kl": "KL to the reference",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "loss": "loss of each row",
    "gradient_norm": "gradient norm of each row",
}


def _tensors(a: OpenedUpdate, b: OpenedUpdate) -> Iterator[tuple[str, Any, Any]]:
    """(name, array of the first update, of the second) of all tensors of two updates, in the order of the update."""
    for name in {**a.before, **b.before}:
        yield f"params before the update: {name}", a.before.get(name), b.before.get(name)
    if a.batch is not None and b.batch is not None:
        for field, name in _FIELDS.items():
            yield name, *(_inside(batch, field) for batch in (a.batch, b.batch))
        for name in {**a.batch.gradients, **b.batch.gradients}:
            yield f"gradient: {name}", a.batch.gradients.get(name), b.batch.gradients.get(name)
    for name in {**a.after, **b.after}:
        yield f"params after the update: {name}", a.after.get(name), b.after.get(name)


def _inside(batch: OpenedBatch, field: str) -> Any:
    """A field of a batch, 0 in columns outside of prompt or response, whose content means nothing."""
    x = getattr(batch, field)
    if x is None or x.ndim < 2 or field == "rewards":
        return x
    columns = np.arange(x.shape[1])[None]
    if field == "prompt_tokens":
        return np.where(columns >= x.shape[1] - batch.prompt_lengths[:, None], x, 0)
    return np.where(columns < np.maximum(batch.lengths, 0)[:, None], x, 0)


def describe(name: str, a: Any, b: Any) -> str | None:
    """How two arrays differ, with the first place; None where they are equal bit by bit."""
    if a is None and b is None:
        return None
    if a is None or b is None:
        return f"{name}: in the {'second' if a is None else 'first'} run only"
    if a.shape != b.shape:
        return f"{name}: shapes {list(a.shape)} and {list(b.shape)}"
    different = ~((a == b) | ((a != a) & (b != b)))
    if not different.any():
        return None
    place = tuple(int(i) for i in np.argwhere(different)[0])
    where = "".join(f"[{i}]" for i in place)
    if a.ndim == 2 and name in _FIELDS.values() and name not in ("rewards",):
        where = f"row {place[0]}, token {place[1]}"
    elif a.ndim in (1, 2) and name in _FIELDS.values():
        where = f"row {place[0]}"
    elif "/layers/" in name:  # params of all layers are one array
        where = f"layer {place[0]}{where.removeprefix(f'[{place[0]}]')}"
    return f"{name}, {where}: {a[place]:.9g} | {b[place]:.9g}; {int(different.sum())} of {a.size} differ"


def _sizes(a: Any, b: Any) -> tuple[float, float]:
    """(largest difference, difference in norm over the norm) of two arrays; infinite where they cannot be compared."""
    if a is None or b is None or a.shape != b.shape:
        return float("inf"), float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    both = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf"), float("inf")
    gap = np.where(both, a - b, 0.0)
    norm = float(np.linalg.norm(np.where(both, a, 0.0)))
    return float(np.abs(gap).max(initial=0.0)), float(np.linalg.norm(gap)) / (norm or 1.0)


if __name__ == "__main__":
    sys.exit(main())

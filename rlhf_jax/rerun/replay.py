"""The command `rlhf-jax replay RUN --update N`: what happened in one update, row by row, and with another option."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rlhf_jax import storage
from rlhf_jax.config import PolicyConfig, command_line
from rlhf_jax.config.check import check
from rlhf_jax.errors import UserError
from rlhf_jax.option import field_types, nearest
from rlhf_jax.parallel import jax_settings, xla_flags
from rlhf_jax.rerun import page
from rlhf_jax.rerun.recompute import OpenedUpdate, recomputing
from rlhf_jax.rerun.recorded import WHY_OTHERS, RecordedRun, same, stage_folders
from rlhf_jax.runtime import compile_cache
from rlhf_jax.utils.output import guarded_output
from rlhf_jax.utils.tables import plain_table, short_cell
from rlhf_jax.utils.text import printable

PROG = "rlhf-jax replay"
_FIXED = (  # options of algorithms that decide what is sampled, or how many updates there are
    *("batch_size", "num_train_epochs", "total_episodes", "rollout_batch_size", "num_generations", "shared_prompts"),
    *("num_generations_eval", "disable_dropout", "sync_ref_model", "reward_clip_range"),
)


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """Recomputes an update of a run from the nearest checkpoint, and shows its rows: tokens, rewards, advantages,
    ratios, KL, clipping, values, and each row's share of loss and gradient."""

    run_dir: str | None = None
    """Folder of the run, or of a pipeline, whose last stage is taken; may be given without the flag."""
    update: int | None = None
    """Number of the update, from 1; default: the last."""
    set: tuple[str, ...] = ()
    """Options of a counterfactual, as kl_coef=0.1: the same update on the same samples with these. Options that change
    what is sampled are refused."""
    sort: Literal["loss", "gradient_norm", "kl", "advantage", "moved", "row"] = "gradient_norm"
    """What the rows are sorted by: the largest first, by size."""
    num_rows: int = 8
    """Rows to print."""
    out: str | None = None
    """Folder of UPDATE.parquet and UPDATE.html; default: RUN_DIR/replay."""


@guarded_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 0, or 2 after a user error (one line on stderr)."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        options = command_line.parse_options(argv, ReplayOptions, PROG, positional="run_dir")
        if options.run_dir is None:
            raise UserError(f"{PROG} needs the folder of a run: {PROG} runs/quickstart --update 3")
        replay(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    return 0


@storage.from_here()
@jax_settings.pinned()
def replay(
    options: ReplayOptions, *, objects: Mapping[str, Any] | None = None, log: Callable[[str], None] = print
) -> list[OpenedUpdate]:
    """Recomputes an update and prints, writes and returns what happened in it.

    Args:
      options: of the command.
      objects: arguments of `rlhf_jax.run` that the run had: train_dataset, ...
      log: called with each line.

    Returns:
      The update, and with `set` the counterfactual.

    Raises:
      UserError: the run has no such update or cannot be opened; an option of `set` is unknown or changes samples.
    """
    folders = stage_folders(options.run_dir)
    run = RecordedRun.open(list(folders.values())[-1])
    if not isinstance(run.config, PolicyConfig):
        raise UserError(f"{run.folder.path} is a run of {run.stage}, whose updates have no responses")
    step = run.updates if options.update is None else options.update
    if not 1 <= step <= run.updates:
        raise UserError(f"--update {step}: {run.folder.path} has the updates 1 to {run.updates}")
    changed = changed_config(run.config, options.set)
    xla_flags.add_those_of_run(run.config.deterministic)
    compile_cache.enable()
    start = run.checkpoint_before(step)
    log(f"recomputing update {step} of {run.folder.path} from {f'checkpoint {start}' if start else 'the start'}")
    updates = []
    with recomputing(run, start, objects=objects) as recomputation:
        if options.set:
            recomputation.advance(step - 1)
            with recomputing(dataclasses.replace(run, config=changed), 0, objects=objects) as other:
                other.continue_from(recomputation)
                updates.append(other.open(step))
        updates.insert(0, recomputation.open(step))
        for note in recomputation.notes:
            log(f"note: {note}")
    _report(run, step, updates, options, log)
    return updates


def changed_config(config: PolicyConfig, settings: Sequence[str]) -> PolicyConfig:
    """The config with the options of a counterfactual.

    Raises:
      UserError: an option is unknown, has a wrong value, or changes what is sampled.
    """
    hints, values = field_types(type(config)), {}
    for setting in settings:
        name, equals, word = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write OPTION=VALUE, as kl_coef=0.1")
        if name not in hints:
            raise UserError(f"--set {setting}: {type(config).__name__} has no option {name}.{nearest(name, hints)}")
        owner = [kind for kind in type(config).__mro__ if name in vars(kind).get("__annotations__", {})][-1]
        if not owner.__module__.startswith("rlhf_jax.algorithms.") or name in _FIXED:
            raise UserError(
                f"--set {setting}: a counterfactual learns from the same samples, and {name} may change them, or what "
                "the models are. Run it instead"
            )
        values[name] = command_line.value_from_words(f"--set {name}", hints[name], [word])
    changed = dataclasses.replace(config, **values)
    check(changed)
    return changed


# --- rows


def rows_of(update: OpenedUpdate, config: Any) -> list[dict[str, Any]]:
    """A dict for each response of an update, with the columns of docs/what_happened.md."""
    batch = update.batch
    assert batch is not None
    low, high = clip_range(config)
    table = []
    for i, length in enumerate(batch.lengths):
        if length < 0:  # it continues in the next update
            continue
        inside, trained = slice(0, int(length)), batch.trained[i, : int(length)]
        tokens = {name: _floats(getattr(batch, name), i, inside) for name in _TOKEN_FIELDS}
        ratio = clipped = moved = None
        old = tokens["logprobs"] if tokens["logprobs"] is not None else tokens["sampler_logprobs"]
        if tokens["new_logprobs"] is not None:
            change = np.asarray(tokens["new_logprobs"]) - np.asarray(old)
            ratio = np.exp(change)
            advantage = np.asarray(tokens["advantages"])
            clipped = np.where(advantage > 0, ratio > 1 + high, ratio < 1 - low) & trained
            moved = float(change[trained].mean()) if trained.any() else 0.0
        row = {
            "row": int(batch.rows[i]),
            "position": i,
            "prompt": batch.prompts[i],
            "completion": batch.completions[i],
            "length": int(length),
            "ended": bool(batch.ended[i]),
            "score": float(batch.scores[i]),
            **{f"reward/{name}": float(x) for name, x in zip(batch.reward_names, batch.rewards[i])},
            "kl": None if tokens["kl"] is None else float(np.sum(tokens["kl"])),
            "advantage": float(np.mean(np.asarray(tokens["advantages"])[trained])) if trained.any() else 0.0,
            "loss": None if batch.loss is None else float(batch.loss[i]),
            "gradient_norm": None if batch.gradient_norm is None else float(batch.gradient_norm[i]),
            "moved": moved,
            "clipped": None if clipped is None or not trained.any() else float(clipped[trained].mean()),
            "tokens": batch.texts[i],
            "trained": trained.tolist(),
            "token_ratio": None if ratio is None else ratio.tolist(),
            "token_clipped": None if clipped is None else clipped.tolist(),
            **{f"token_{name}": values for name, values in tokens.items()},
        }
        table.append(row)
    return table


_TOKEN_FIELDS = (
    *("sampler_logprobs", "logprobs", "ref_logprobs", "new_logprobs", "kl"),
    *("advantages", "values", "new_values", "returns"),
)


def _floats(x: Any, row: int, inside: slice) -> list[float] | None:
    return None if x is None else x[row, inside].astype(float).tolist()


def clip_range(config: Any) -> tuple[float, float]:
    """(lower, upper) range of the ratio that the loss clips to; infinite where the config has none."""
    low = getattr(config, "cliprange", getattr(config, "epsilon", None))
    high = getattr(config, "epsilon_high", None)
    low = np.inf if low is None else low
    return low, low if high is None else high


def sorted_rows(table: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """The rows with the largest |value| of a column first; those without a value last."""
    if by == "row":
        return sorted(table, key=lambda row: row["position"])
    return sorted(table, key=lambda row: -abs(row[by]) if row[by] is not None and row[by] == row[by] else 1.0)


def write_parquet(path: str, table: list[dict[str, Any]]) -> None:
    """Writes rows to a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: [row[name] for row in table] for name in table[0]}
    columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        pq.write_table(pa.table(columns), path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}). Set another --out") from error


# --- what is printed


def _report(
    run: RecordedRun,
    step: int,
    updates: list[OpenedUpdate],
    options: ReplayOptions,
    log: Callable[[str], None],
) -> None:
    """Prints, and writes the files of, an update and its counterfactual."""
    count = sum(name in run.metrics[step] for name in updates[0].metrics)
    if names := run.differing(step, updates[0].metrics):
        log(f"note: {len(names)} of {count} metrics are not those of the run ({', '.join(names[:4])}): {WHY_OTHERS}")
    else:
        log(f"all {count} metrics are those of the run, bit by bit")
    folder = options.out or os.path.join(run.folder.path, "replay")
    tables = []
    for name, update in zip((str(step), "_".join([str(step), *options.set])), updates):
        if update.batch is None:
            log("no response had a score: nothing was learned")
            return
        tables.append(sorted_rows(rows_of(update, run.config), options.sort))
        path = os.path.join(folder, name.replace("/", "-"))
        write_parquet(f"{path}.parquet", tables[-1])
        title = f"{run.stage}, update {step}" + (f", {' '.join(options.set)}" if len(tables) > 1 else "")
        page.write(f"{path}.html", title, update.metrics, tables[-1])
        log(f"written: {path}.parquet and {path}.html")
    log(f"the rows with the largest {options.sort}:" if options.sort != "row" else "rows:")
    log(_first_rows(tables[0][: options.num_rows]))
    if options.set:
        log(_side_by_side(updates, options.set))


def _first_rows(table: list[dict[str, Any]]) -> str:
    """The numbers of some rows, with the beginning of their responses."""
    names = [name for name in _PRINTED if any(row[name] is not None for row in table)]
    cells = [[*names, "completion"]]
    for row in table:
        numbers = ("" if row[name] is None else _number(row[name]) for name in names)
        cells.append([*numbers, short_cell(row["completion"])[:40]])
    return plain_table(cells)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


_PRINTED = ("row", "length", "score", "kl", "advantage", "loss", "gradient_norm", "moved", "clipped")


def _side_by_side(updates: list[OpenedUpdate], settings: Sequence[str]) -> str:
    """The metrics in which an update and its counterfactual differ."""
    cells = [["metric", "the run", printable(" ".join(settings))]]
    first, second = (update.metrics for update in updates)
    for name in first:
        if name in second and not same(first[name], second[name]):
            cells.append([name, f"{first[name]:.6g}", f"{second[name]:.6g}"])
    change = [_norm(update) for update in updates]
    cells.append(["norm of the change of params", *(f"{value:.6g}" for value in change)])
    return plain_table(cells)


def _norm(update: OpenedUpdate) -> float:
    squares = (np.sum((update.after[name] - x).astype(np.float64) ** 2) for name, x in update.before.items())
    return float(np.sqrt(sum(squares)))


if __name__ == "__main__":
    sys.exit(main())

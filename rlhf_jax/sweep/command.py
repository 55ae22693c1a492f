"""The command: runs what is not finished, one run after another, and prints the table."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from collections.abc import Sequence

import jax

from rlhf_jax import storage, train
from rlhf_jax.config import command_line
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import multihost
from rlhf_jax.runtime.stopping import RESUME_HINT, Stopped
from rlhf_jax.sweep.plan import ONE_PROCESS, Run, Sweep, parse, write_record
from rlhf_jax.sweep.results import Outcome, csv_text, table
from rlhf_jax.utils.output import guarded_output
from rlhf_jax.utils.text import printable


@guarded_output()
def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when all runs are finished, 2 if one failed or something the user gave is wrong, 75 when it was
    stopped from outside."""
    try:
        return 2 if run_all(parse(sys.argv[1:] if argv is None else argv)) else 0
    except SystemExit as end:  # after the help
        return int(end.code or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        multihost.close(str(error))
        return error.status
    except KeyboardInterrupt as stop:
        print(stop if isinstance(stop, Stopped) else f"interrupted; {RESUME_HINT}", file=sys.stderr, flush=True)
        return stop.status if isinstance(stop, Stopped) else 130


@storage.from_here()
def run_all(sweep: Sweep) -> bool:
    """Runs what is not finished, and prints the table. Returns whether a run failed.

    Raises:
      UserError: the folder contains something else; several processes.
      Stopped: a signal or max_minutes ended it; the same call continues.
    """
    began, first = time.monotonic(), sweep.runs[0].config
    train.start_process(first)
    if multihost.cluster() is not None and jax.process_count() > 1:
        raise UserError(ONE_PROCESS)
    if not first.dry_run:
        write_record(sweep)
    outcomes = [None if first.dry_run else _finished(run) for run in sweep.runs]
    for number, run in enumerate(sweep.runs):
        print(printable(f"run {number + 1} of {len(sweep.runs)}: {run.title} -> {run.config.run_dir}"), flush=True)
        if outcomes[number] is not None:
            print(printable(f"{run.config.run_dir} is finished; nothing to do"), flush=True)
            continue
        outcomes[number] = _run(run, sweep.recipe, began)
        gc.collect()  # its arrays and programs, before the next run's
        if not first.dry_run:
            _write_csv(sweep, outcomes)
    ended = [outcome for outcome in outcomes if outcome is not None]
    if not first.dry_run:
        _write_csv(sweep, outcomes)
        print(printable("\n" + table(sweep, ended)), flush=True)
        print(f"a row for each run: {sweep.folder}/sweep.csv", flush=True)
    return any(outcome.error is not None for outcome in ended)


def _write_csv(sweep: Sweep, outcomes: Sequence[Outcome | None]) -> None:
    storage.write_atomically(os.path.join(sweep.folder, "sweep.csv"), csv_text(sweep, outcomes))


def _finished(run: Run) -> Outcome | None:
    """The outcome of a run that an earlier command finished."""
    try:
        metrics = train.finished_metrics(run.config)
    except UserError:  # which the run will raise
        return None
    return None if metrics is None else Outcome(metrics)


def _run(run: Run, recipe: command_line.Recipe, began: float) -> Outcome:
    """Trains; an error of the user is the run's outcome."""
    config = run.config
    try:
        if config.max_minutes is not None:
            minutes = config.max_minutes - (time.monotonic() - began) / 60
            if minutes <= 0:
                raise Stopped(f"stopped by --max_minutes {config.max_minutes:g} before {run.title}; {RESUME_HINT}")
            config = dataclasses.replace(config, max_minutes=minutes)
        return Outcome(train.run(config, recipe=recipe).metrics)
    except UserError as error:
        print(f"error: {run.title}: {error}", file=sys.stderr, flush=True)
        return Outcome({}, str(error))


if __name__ == "__main__":
    sys.exit(main())

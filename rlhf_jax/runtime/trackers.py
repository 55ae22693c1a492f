"""`report_to`: metrics and completion tables in Weights & Biases and in trackio.

Names are those of transformers, `train/NAME` and `eval/NAME` over `train/global_step`, so that curves match TRL's. The
name or id of a run is stored in its folder (trackers.json), so that a resumed run continues there; updates that it
computes again have the same values at the same steps.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import multihost
from rlhf_jax.runtime.callbacks import Callback, Control
from rlhf_jax.storage import write_atomically
from rlhf_jax.utils.text import parse_json, printable, redact_queries

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Values of `report_to` and the package that each needs."""
PROJECT = "rlhf_jax"
_FILE = "trackers.json"
_STEP = "train/global_step"


def parse_report_to(report_to: Sequence[str]) -> tuple[str, ...]:
    """The names in `report_to`, with 'all' replaced by everything that is installed.

    Raises:
      UserError: a name is unknown, or its package is not installed.
    """
    names = []
    for name in report_to:
        if name == "all":
            names += [other for other, package in PACKAGES.items() if importlib.util.find_spec(package)]
        elif name in PACKAGES:
            if importlib.util.find_spec(PACKAGES[name]) is None:
                raise UserError(f"--report_to {name} needs `pip install {PACKAGES[name]}`; or remove it")
            names.append(name)
        elif name != "none":
            raise UserError(f"--report_to {name}: it must be {', '.join(PACKAGES)}, all or none")
    return tuple(dict.fromkeys(names))


def callbacks_of(report_to: Sequence[str]) -> tuple[Callback, ...]:
    """The callbacks of `report_to` (TensorBoard is a sink of MetricLogger). Every process must call it and gets equal
    ones, by the packages of process 0. Errors as `parse_report_to`."""
    kinds = {"wandb": WandbCallback, "trackio": TrackioCallback}
    return tuple(kinds[name]() for name in multihost.from_first(lambda: parse_report_to(report_to)) if name in kinds)


def tracker_names(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics by transformers' names: eval_X becomes eval/X, names without eval get train/."""

    def name(key: str) -> str:
        if key.startswith("eval_"):
            return f"eval/{key.removeprefix('eval_')}"
        return key if key.startswith("eval/") else f"train/{key}"

    return {name(key): value for key, value in metrics.items()}


class TrackerCallback(Callback):
    """Base class. Only process 0 reports. A failure after the start is a warning: the run continues without reports."""

    name = ""

    def __init__(self):
        self._run: Any = None
        self._stage = ""

    # --- subclasses define

    def start(self, folder: str, stored: dict[str, str], name: str, project: str, config: dict[str, Any]) -> dict:
        """Opens a run, or resumes the one of `stored`. Returns what to store for a resume."""
        raise NotImplementedError

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Logs values at a step."""
        raise NotImplementedError

    def table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        """A table, as a value for `log`."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends the run."""
        raise NotImplementedError

    # --- the callback

    def on_train_begin(self, stage: Any, control: Control) -> None:
        """Opens the run.

        Raises:
          UserError: it cannot be opened, for example without a login.
        """
        if not multihost.is_main():
            return
        config = stage.config
        self._stage = stage.name
        run_dir = storage.absolute(config.run_dir)
        path = os.path.join(run_dir, _FILE)
        stored = _read(path)
        project = config.project or os.environ.get("WANDB_PROJECT") or PROJECT
        plain = json.loads(json.dumps({"stage": stage.name, **dataclasses.asdict(config)}))
        options = {name: redact_queries(value) for name, value in plain.items()}
        if storage.is_remote(run_dir):  # the trackers' own files stay on this machine
            folder, shown = storage.cache_folder("trackers"), run_dir
            storage.make_dir(folder)
        else:
            folder, shown = run_dir, os.path.relpath(run_dir, storage.working_folder())
        name = config.run_name or shown
        try:
            entry = stored.get(self.name, {})
            stored[self.name] = self.start(folder, entry, name, project, options)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"--report_to {self.name}: could not start: {reason}") from error
        write_atomically(path, json.dumps(stored, indent=2) + "\n")

    def on_step_end(self, step: int, metrics: dict[str, float], control: Control) -> None:
        """Logs the metrics of an update and its evaluation."""
        self._try(lambda: self.log(step, tracker_names(metrics)))

    def on_completions(self, step: int, rows: Sequence[dict[str, Any]], what: str) -> None:
        """Logs the table as 'completions/samples' or 'completions/training', with a column for the step."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        values = [[step, *(row.get(name) for name in columns)] for row in rows]
        table = lambda: self.table(["step", *columns], values)  # noqa: E731
        self._try(lambda: self.log(step, {f"completions/{what}": table()}))

    def close(self) -> None:
        """Ends the run."""
        self._try(self.finish)
        self._run = None

    def _try(self, action) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            self._run = None
            warning = f"warning: {self._stage}: {self.name} failed ({error}); nothing more is reported to it"
            print(printable(warning), file=sys.stderr, flush=True)


class WandbCallback(TrackerCallback):
    """Weights & Biases; configured by its environment variables (WANDB_MODE, WANDB_ENTITY, ...)."""

    name = "wandb"

    def start(self, folder, stored, name, project, config):
        """As `TrackerCallback.start`; stores the run's id."""
        import wandb

        run_id = stored.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._run = wandb.init(
            project=project,
            id=run_id,
            name=name,
            dir=folder,
            config=config,
            resume="allow",
            reinit="finish_previous",
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP, step_sync=True)
        return {"id": run_id, "project": project}

    def log(self, step, values):
        """The step is a metric: W&B's own step may not go back, and a resumed run computes some updates again."""
        self._run.log({**values, _STEP: step})

    def table(self, columns, rows):
        """A wandb.Table."""
        import wandb

        return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)

    def finish(self):
        """Waits for pending uploads."""
        self._run.finish()


class TrackioCallback(TrackerCallback):
    """trackio; local unless its environment variables (TRACKIO_SPACE_ID, ...) configure it otherwise."""

    name = "trackio"

    def start(self, folder, stored, name, project, config):
        """As `TrackerCallback.start`; trackio identifies runs by name, so a unique name is stored."""
        import trackio

        unique_name = stored.get("name") or f"{name}-{secrets.token_hex(3)}"
        project = stored.get("project") or project
        self._run = trackio.init(project=project, name=unique_name, config=config, resume="allow", embed=False)
        return {"name": unique_name, "project": project}

    def log(self, step, values):
        """As `TrackerCallback.log`."""
        import trackio

        trackio.log(values, step=step)

    def table(self, columns, rows):
        """A trackio.Table."""
        import trackio

        return trackio.Table(columns=columns, data=rows)

    def finish(self):
        """Waits for pending uploads."""
        import trackio

        trackio.finish()


def _read(path: str) -> dict[str, dict[str, str]]:
    """What an earlier process stored.

    Raises:
      UserError: the file is damaged.
    """
    if not storage.exists(path):
        return {}
    try:
        stored = parse_json(storage.read_text(path))
        return {name: dict(value) for name, value in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}, which names the run's trackers, cannot be read ({error}). Remove it") from error

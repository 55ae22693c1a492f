"""Metrics and completion tables in Weights & Biases and in trackio, for `report_to`.

Names are those of transformers: `train/NAME`, `eval/NAME`, over `train/global_step`, so that curves lie beside TRL's.
What a run is called there is kept in its folder (trackers.json), so that a continued run goes on in the same place; the
updates that it computes again are the same numbers at the same steps.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from rlhf_jax.config import files as config_files
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import multihost
from rlhf_jax.runtime.callbacks import Callback, Control
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.utils.text import parse_json, printable, redact_queries

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""What may be reported to, and the package that it needs."""
PROJECT = "rlhf_jax"
_FILE = "trackers.json"
_STEP = "train/global_step"


def parse_report_to(report_to: Sequence[str]) -> tuple[str, ...]:
    """What is reported to: 'all' is everything that is installed.

    Raises:
      UserError: one is unknown, or its package is not installed.
    """
    found = []
    for name in report_to:
        if name == "all":
            found += [other for other, package in PACKAGES.items() if importlib.util.find_spec(package)]
        elif name in PACKAGES:
            if importlib.util.find_spec(PACKAGES[name]) is None:
                raise UserError(f"--report_to {name} needs `pip install {PACKAGES[name]}`; or leave it out")
            found.append(name)
        elif name != "none":
            raise UserError(f"--report_to {name}: there are {', '.join(PACKAGES)}, all and none")
    return tuple(dict.fromkeys(found))


def callbacks_of(report_to: Sequence[str]) -> tuple[Callback, ...]:
    """A callback for each of `report_to` that is one; TensorBoard is MetricLogger's. Every process must call it
    and has the same ones, by what the first one has installed. Errors as `parse_report_to`."""
    kinds = {"wandb": WandbCallback, "trackio": TrackioCallback}
    return tuple(kinds[name]() for name in multihost.from_first(lambda: parse_report_to(report_to)) if name in kinds)


def named(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics by transformers' names: eval_X is eval/X, what does not begin with eval is train/X."""

    def name(key: str) -> str:
        if key.startswith("eval_"):
            return f"eval/{key.removeprefix('eval_')}"
        return key if key.startswith("eval/") else f"train/{key}"

    return {name(key): value for key, value in metrics.items()}


class TrackerCallback(Callback):
    """What both have in common. Only the first process reports. What fails after the start costs a warning and the
    report, not the run."""

    name = ""

    def __init__(self):
        self._run: Any = None
        self._stage = ""

    # --- to be defined by each

    def start(self, folder: str, kept: dict[str, str], name: str, project: str, config: dict[str, Any]) -> dict:
        """Opens the run, or goes on with the one of `kept`; what to keep for the next time."""
        raise NotImplementedError

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Values at a step."""
        raise NotImplementedError

    def table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        """A table as a value."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends the run."""
        raise NotImplementedError

    # --- the callback

    def on_train_begin(self, stage: Any, control: Control) -> None:
        """Opens the run.

        Raises:
          UserError: it cannot be opened, for want of a login, say.
        """
        if not multihost.is_main():
            return
        config = stage.config
        self._stage = stage.name
        path = os.path.join(config.run_dir, _FILE)
        kept = _read(path)
        project = config.project or os.environ.get("WANDB_PROJECT") or PROJECT
        options = {name: redact_queries(value) for name, value in json.loads(config_files.to_json(config)).items()}
        name = config.run_name or os.path.relpath(config.run_dir)
        try:
            kept[self.name] = self.start(
                os.path.abspath(config.run_dir), kept.get(self.name, {}), name, project, options
            )
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"--report_to {self.name}: it could not be started: {reason}") from error
        write_atomically(path, json.dumps(kept, indent=2) + "\n")

    def on_step_end(self, step: int, metrics: dict[str, float], control: Control) -> None:
        """Metrics of an update, its evaluation's with them."""
        self._attempt(lambda: self.log(step, named(metrics)))

    def on_completions(self, step: int, rows: Sequence[dict[str, Any]], what: str) -> None:
        """The table as 'completions/samples' or 'completions/training', with a column for the step."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        values = [[step, *(row.get(name) for name in columns)] for row in rows]
        table = lambda: self.table(["step", *columns], values)  # noqa: E731
        self._attempt(lambda: self.log(step, {f"completions/{what}": table()}))

    def close(self) -> None:
        """Ends the run, whose report is then complete."""
        self._attempt(self.finish)
        self._run = None

    def _attempt(self, action) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            self._run = None
            told = printable(f"warning: {self._stage}: {self.name} failed ({error}); nothing more is reported to it")
            print(told, file=sys.stderr, flush=True)


class WandbCallback(TrackerCallback):
    """Weights & Biases; its own environment variables (WANDB_MODE, WANDB_ENTITY, ...) hold."""

    name = "wandb"

    def start(self, folder, kept, name, project, config):
        """As `TrackerCallback.start`; the run's id is kept."""
        import wandb

        number = kept.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._run = wandb.init(
            project=project,
            id=number,
            name=name,
            dir=folder,
            config=config,
            resume="allow",
            reinit="finish_previous",
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP, step_sync=True)
        return {"id": number, "project": project}

    def log(self, step, values):
        """Over a metric for the step: W&B's own step may not go back, and a continued run computes updates again."""
        self._run.log({**values, _STEP: step})

    def table(self, columns, rows):
        """A wandb.Table."""
        import wandb

        return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)

    def finish(self):
        """Waits for what is on its way."""
        self._run.finish()


class TrackioCallback(TrackerCallback):
    """trackio, on this machine unless its own environment variables (TRACKIO_SPACE_ID, ...) say otherwise."""

    name = "trackio"

    def start(self, folder, kept, name, project, config):
        """As `TrackerCallback.start`; trackio knows runs by their names, so a name of its own is kept."""
        import trackio

        own = kept.get("name") or f"{name}-{secrets.token_hex(3)}"
        project = kept.get("project") or project
        self._run = trackio.init(project=project, name=own, config=config, resume="allow", embed=False)
        return {"name": own, "project": project}

    def log(self, step, values):
        """At the step."""
        import trackio

        trackio.log(values, step=step)

    def table(self, columns, rows):
        """A trackio.Table."""
        import trackio

        return trackio.Table(columns=columns, data=rows)

    def finish(self):
        """Waits for what is on its way."""
        import trackio

        trackio.finish()


def _read(path: str) -> dict[str, dict[str, str]]:
    """What an earlier process kept; UserError where it is not that."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            kept = parse_json(file.read())
        return {name: dict(value) for name, value in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}, which says where the run is reported, cannot be read ({error}). Remove it") from error

"""A run's folder: what is in it, whose it is, and how far it got.

config.json  recipe.json  inputs.json  metrics.jsonl  timings.jsonl  tensorboard/  checkpoints/STEP/  finished.json
completions/STEP.jsonl, STEP.tokens.jsonl  calibration/STEP.jsonl  nonfinite/STEP.jsonl  .lock
policy/  value/  ...the final models
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from rlhf_jax.config.diff import MAY_DIFFER, differences
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import multihost
from rlhf_jax.parallel.multihost import is_main
from rlhf_jax.runtime.lock import Lock
from rlhf_jax.utils.strict_json import json_text, with_floats
from rlhf_jax.utils.text import parse_json

EXPORTS = ("policy", "value", "reward_model")
Rows = Sequence[dict[str, Any]]


def write_atomically(path: str, text: str) -> None:
    """Writes a whole file or nothing: who reads it, even after a kill, sees the old text or the new.

    Args:
      path: of the file; its folder exists.
      text: all of it.
    """
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of a run's folder. Made by `open`, which checks that the folder belongs to the run."""

    path: str
    lock: Lock = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "lock", Lock(self.path))

    def close(self) -> None:
        """Gives the folder back: another run may enter it."""
        self.lock.release()

    @property
    def config(self) -> str:
        """config.json, the resolved config."""
        return os.path.join(self.path, "config.json")

    @property
    def metrics(self) -> str:
        """metrics.jsonl, a JSON object an update, only what is deterministic."""
        return os.path.join(self.path, "metrics.jsonl")

    @property
    def timings(self) -> str:
        """timings.jsonl, clocks and memory."""
        return os.path.join(self.path, "timings.jsonl")

    @property
    def checkpoints(self) -> str:
        """checkpoints/, one folder a saved step."""
        return os.path.join(self.path, "checkpoints")

    @property
    def completions(self) -> str:
        """completions/, STEP.jsonl with sample completions, STEP.tokens.jsonl with their tokens."""
        return os.path.join(self.path, "completions")

    @property
    def inputs(self) -> str:
        """inputs.json, which data and starting checkpoints the run began with."""
        return os.path.join(self.path, "inputs.json")

    @property
    def nonfinite(self) -> str:
        """nonfinite/, STEP.jsonl with the rows of an update in which something was not finite."""
        return os.path.join(self.path, "nonfinite")

    @property
    def mark(self) -> str:
        """finished.json, there once the run has ended."""
        return os.path.join(self.path, "finished.json")

    @classmethod
    def open(
        cls,
        run_dir: str,
        config: dict[str, Any],
        resume: str = "auto",
        may_differ: Sequence[str] = MAY_DIFFER,
        override: bool = False,
        inputs: dict[str, str] | None = None,
    ) -> RunFolder:
        """Makes the folder of a new run, or enters that of the same run again, and locks it. Writes config.json.

        Args and errors as `check`, and a UserError where another process does not see the folder, or another run is in
        it. Only the main process looks and writes; the others get the paths.

        Args:
          inputs: what the run is made of beside its options (see `Stage.inputs`), compared as options are.

        Returns:
          The RunFolder; `close` gives the lock back.
        """
        folder = cls(os.path.abspath(os.path.expanduser(run_dir)))
        mark = error = None
        if is_main():
            try:
                check(run_dir, config, resume, may_differ, override)
                with _may_write(folder.path):
                    os.makedirs(folder.path, exist_ok=True)
                    folder.lock.take()
                    folder._check_inputs(inputs or {}, override)
                    write_atomically(folder.config, json_text(config, indent=2) + "\n")
                    write_atomically(folder.inputs, json_text(inputs or {}, indent=2) + "\n")
                    if os.path.exists(folder.mark):  # finished, and now it goes on with other options
                        os.remove(folder.mark)
                    mark = folder._mark_shared()
            except UserError as wrong:
                folder.lock.release()
                error = wrong
        mark = multihost.agree(mark, error)[0]
        if mark is not None:
            try:  # all have looked before the first process takes its mark away
                multihost.agree(error=folder._unseen(mark))
            finally:
                if is_main():
                    os.remove(os.path.join(folder.path, mark))
        return folder

    def _mark_shared(self) -> str | None:
        """A file that the other processes must see; its name. None: there are no others."""
        if jax.process_count() == 1:
            return None
        name = f".shared-{secrets.token_hex(8)}"
        write_atomically(os.path.join(self.path, name), "")
        return name

    def _unseen(self, mark: str) -> UserError | None:
        """What to say when this process does not see the first one's file."""
        for _ in range(50):
            # A listing, since a network file system may remember for long that a name was not there.
            if os.path.isdir(self.path) and mark in os.listdir(self.path):
                return None
            time.sleep(0.2)
        return UserError(
            f"--run_dir {self.path} is not the folder that process 0 writes to: checkpoints and models must lie on a "
            "file system that all processes share. Give a --run_dir there"
        )

    def _check_inputs(self, inputs: dict[str, str], override: bool) -> None:
        """Refuses data and starting checkpoints that are not those that the run began with."""
        if not self.has_progress() or not os.path.exists(self.inputs):
            return
        try:
            with open(self.inputs, encoding="utf-8") as file:
                old = dict(json.load(file))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{self.inputs} cannot be read ({error}). Remove it to go on without a check") from error
        lines = differences(old, inputs, ())
        if lines and not override:
            raise UserError(
                f"--run_dir {self.path} holds a run of other data or models: give another folder, or --override_resume "
                "to go on all the same\n  " + "\n  ".join(lines)
            )
        for line in lines:
            print(f"warning: --override_resume: {line}", file=sys.stderr, flush=True)

    def has_checkpoint(self) -> bool:
        """Whether checkpoints/ holds a saved step."""
        return os.path.isdir(self.checkpoints) and any(name.isdigit() for name in os.listdir(self.checkpoints))

    def has_progress(self) -> bool:
        """Whether there is anything to lose: a checkpoint, or the mark of a finished run."""
        return self.has_checkpoint() or os.path.exists(self.mark)

    def finished(self) -> dict[str, Any] | None:
        """What `finish` wrote, {"step", "metrics", "paths"}, or None. A finished run is not run again.

        Raises:
          UserError: finished.json is damaged.
        """
        if not os.path.exists(self.mark):
            return None
        try:
            with open(self.mark, encoding="utf-8") as file:
                found = parse_json(file.read())
            return {"step": found["step"], "metrics": with_floats(found["metrics"]), "paths": dict(found["paths"])}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.mark}, which marks a finished run, is damaged ({type(error).__name__}: {error}). Remove it: "
                "the same command then goes on from the newest checkpoint"
            ) from error

    def finish(self, step: int, metrics: dict[str, Any], paths: dict[str, str]) -> None:
        """Marks the run as finished, once everything else is on disk.

        Args:
          step: the last update.
          metrics: scalars, of the last update and the final evaluations.
          paths: exported models by name.
        """
        if is_main():
            text = json_text({"step": step, "metrics": metrics, "paths": paths}, indent=2) + "\n"
            write_atomically(self.mark, text)

    def cut(self, step: int, written: int | None = None) -> None:
        """Forgets what an earlier process did after update `step`, from which the run goes on.

        metrics.jsonl and timings.jsonl lose the later lines (and a torn last one) and keep the others byte for byte;
        folders of STEP.jsonl lose the later files. TensorBoard hides later events by itself (see MetricLogger).

        Args:
          step: the last update to keep; 0 keeps nothing.
          written: the last whose metrics to keep, where those of `step` are still to be written.
        """
        if not is_main():
            return
        written = step if written is None else written
        for path in (self.metrics, self.timings):
            if os.path.exists(path):
                with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
                    lines = file.readlines()
                kept = [line for line in lines if 0 <= _step_of(line) <= written and step > 0]
                if kept != lines:
                    write_atomically(path, "".join(kept))
        folders = [os.path.join(self.path, name) for name in ("completions", "calibration", "nonfinite")]
        for folder in filter(os.path.isdir, folders):
            for name in os.listdir(folder):
                match = re.fullmatch(r"(?:training_)?(\d+)(?:\.tokens)?\.jsonl(\.tmp)?", name)
                if match and int(match[1]) > step:
                    os.remove(os.path.join(folder, name))
        if written == 0:
            shutil.rmtree(os.path.join(self.path, "tensorboard"), ignore_errors=True)

    def write_recipe(self, name: str, options: dict[str, Any]) -> None:
        """Writes recipe.json, {"config": name, "options"}, where a run begins: what it is continued by is no news."""
        path = os.path.join(self.path, "recipe.json")
        if is_main() and not (os.path.exists(path) and self.has_progress()):
            write_atomically(path, json_text({"config": name, "options": options}, indent=2) + "\n")

    def write_completions(self, step: int, rows: Rows, what: str = "samples", tokens: Rows = ()) -> None:
        """Writes completions/STEP.jsonl, one JSON object a row; nothing for no rows.

        Args:
          step: the update that the completions belong to.
          rows: dicts of strings and numbers.
          what: 'samples', or 'training': completions/training_STEP.jsonl.
          tokens: of the first rows, for completions/STEP.tokens.jsonl.
        """
        name = f"{step}" if what == "samples" else f"{what}_{step}"
        for path, of in ((f"{name}.tokens.jsonl", tokens), (f"{name}.jsonl", rows)):
            if of:
                _write_rows(os.path.join(self.completions, path), of)

    def write_calibration(self, step: int, rows: Rows) -> None:
        """Writes calibration/STEP.jsonl, one JSON object a row; nothing for no rows."""
        if rows:
            _write_rows(os.path.join(self.path, "calibration", f"{step}.jsonl"), rows)

    def write_nonfinite(self, step: int, rows: Rows) -> str:
        """Writes nonfinite/STEP.jsonl, one JSON object a row, by the first process; its path."""
        return _write_rows(os.path.join(self.nonfinite, f"{step}.jsonl"), rows)


def _write_rows(path: str, rows: Rows) -> str:
    """JSON lines in a file of a folder of their own, by the first process; its path."""
    if is_main():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_atomically(path, "".join(json_text(row) + "\n" for row in rows))
    return path


@contextlib.contextmanager
def _may_write(path: str):
    """UserError where a folder cannot be made or written to."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--run_dir {path} cannot be written: {error}. Give another folder") from error


def changes(run_dir: str, config: dict[str, Any], may_differ: Sequence[str] = MAY_DIFFER) -> list[str]:
    """Options in which a config is not that of the run that has begun in a folder, a line each; see `differences`."""
    folder = RunFolder(os.path.abspath(os.path.expanduser(run_dir)))
    if not os.path.exists(folder.config) or not folder.has_progress():
        return []
    return differences(_config_of(folder, run_dir), config, may_differ)


def check(
    run_dir: str,
    config: dict[str, Any],
    resume: str = "auto",
    may_differ: Sequence[str] = MAY_DIFFER,
    override: bool = False,
) -> dict[str, Any] | None:
    """Whether a run may use a folder; touches nothing.

    Args:
      run_dir: the folder, there or not.
      config: the resolved config, of values that JSON has.
      resume: 'auto' continues a run that is there and else begins one; 'must' refuses to begin one; 'never' refuses a
        folder with a checkpoint or a finished run. A run that ended before its first checkpoint left nothing to
        continue from or to lose: its folder may be used again, with any config.
      may_differ: options that may differ from those in the folder's config.json.
      override: others may too; a finished run then goes on.

    Returns:
      What `RunFolder.finish` wrote when the run there is finished, else None.

    Raises:
      UserError: the folder holds something else, a run of another config (naming the options), or `resume` forbids.
    """
    folder = RunFolder(os.path.abspath(os.path.expanduser(run_dir)))
    _refuse_files(folder, run_dir)
    used = os.path.exists(folder.config)
    begun = used and folder.has_progress()
    if begun and resume == "never":
        raise UserError(f"--run_dir {run_dir} holds a run already and --resume is never: give another folder")
    if used:
        _config_of(folder, run_dir)
        folder.lock.check()
        lines = changes(run_dir, config, may_differ)
        if lines and not override:
            raise UserError(
                f"--run_dir {run_dir} holds a run of another config: give another folder, these options as they were, "
                "or --override_resume to go on with the new ones\n  " + "\n  ".join(lines)
            )
        if lines:
            return None
    else:
        _refuse_strangers(folder, run_dir)
    finished = folder.finished() if used else None
    if finished is None:
        _refuse_links(folder)
    if resume == "must" and finished is None and not (used and folder.has_checkpoint()):
        raise UserError(f"--resume is must, but --run_dir {run_dir} holds no checkpoint to continue from")
    return finished


def _refuse_files(folder: RunFolder, run_dir: str) -> None:
    """A name that no folder can have, a link to nowhere, a file in the place of the folder or of one above it."""
    if "\0" in run_dir:
        raise UserError(f"--run_dir {run_dir} holds a NUL character. Give a folder")
    if os.path.expanduser(run_dir).startswith("~"):
        raise UserError(f"--run_dir {run_dir}: there is no user of that name. Write ./{run_dir} for a folder called so")
    if os.path.islink(folder.path) and not os.path.exists(folder.path):
        raise UserError(f"--run_dir {run_dir} is a link to {os.readlink(folder.path)}, which is not there")
    nearest = folder.path
    while not os.path.exists(nearest) and nearest != os.path.dirname(nearest):
        nearest = os.path.dirname(nearest)
    if os.path.exists(nearest) and not os.path.isdir(nearest):
        what = "is a file" if nearest == folder.path else f"cannot be made: {nearest} is a file"
        raise UserError(f"--run_dir {run_dir} {what}. Give a folder")


def _refuse_links(folder: RunFolder) -> None:
    """A link in the place of a model, through which the final model would overwrite another."""
    for name in EXPORTS:
        if os.path.islink(path := os.path.join(folder.path, name)):
            raise UserError(
                f"{path} is a link to {os.readlink(path)}: the final model would be written over what is there. "
                "Remove the link, or give another --run_dir"
            )


def _refuse_strangers(folder: RunFolder, run_dir: str) -> None:
    """A folder with something in it, but no run."""
    names = os.listdir(folder.path) if os.path.isdir(folder.path) else []
    # Hidden files and a config.json that a kill left unfinished are no reason to refuse.
    names = sorted(name for name in names if not name.startswith(".") and name != "config.json.tmp")
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise UserError(f"--run_dir {run_dir} is not empty and no run's folder (it holds {some}): give another folder")


def _config_of(folder: RunFolder, run_dir: str) -> dict[str, Any]:
    """The config of the run whose folder this is; a model's folder, say, has a config.json too."""
    try:
        with open(folder.config, encoding="utf-8") as file:
            old = parse_json(file.read())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder.config} is no JSON ({error}): give another --run_dir") from error
    if not isinstance(old, dict) or "stage" not in old:
        raise UserError(f"--run_dir {run_dir} is no run's folder (its config.json names no stage): give another folder")
    return old


def _step_of(line: str) -> int:
    """The step of a complete line, -1 for a torn one."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else -1
    except (ValueError, KeyError, TypeError):
        return -1

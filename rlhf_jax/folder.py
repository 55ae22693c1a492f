"""A run's folder: what is in it, whose it is, and how far it got.

config.json  metrics.jsonl  timings.jsonl  tensorboard/  checkpoints/STEP/  completions/STEP.jsonl  finished.json
policy/  value/  ...the final models
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from rlhf_jax import distributed
from rlhf_jax.distributed import is_main
from rlhf_jax.metrics import json_text, with_floats
from rlhf_jax.types import UserError

# How processes find each other is no property of a run, and differs between its processes: config.json has none of it.
NOT_KEPT = (*distributed.OPTIONS, "topology")
# Options that change nothing that a run computes, so that it may be continued with others.
MAY_DIFFER = ("run_dir", "resume", "dry_run", "logging_steps", "report_to", "save_*")
# And what is to be done, or said, where a run goes wrong.
MAY_DIFFER += ("on_nonfinite", "max_nonfinite", "alarm_*", "early_stop")


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


def matches(name: str, patterns: Sequence[str] = MAY_DIFFER) -> bool:
    """Whether an option is one of `patterns`, in which `*` stands for anything."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as {'a.b': value}, values as JSON has them (tuples are lists)."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = json.loads(json.dumps(value))
    return flat


def differences(old: dict[str, Any], new: dict[str, Any], may_differ: Sequence[str] = MAY_DIFFER) -> list[str]:
    """What distinguishes two configs, one line an option: 'name: old -> new'.

    Args:
      old, new: configs as dicts, nested or not.
      may_differ: options to pass over; `*` stands for anything.

    Returns:
      Lines in the order of the new config, options that only the old one has last.
    """
    old, new = flatten(old), flatten(new)
    lines = []
    for name in dict.fromkeys([*new, *old]):
        if matches(name.split(".")[-1], may_differ):
            continue
        before, after = (json.dumps(c[name]) if name in c else "(no such option)" for c in (old, new))
        if before != after:
            lines.append(f"{name}: {before} -> {after}")
    return lines


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of a run's folder. Made by `open`, which checks that the folder belongs to the run."""

    path: str

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
        """completions/, STEP.jsonl with sample completions."""
        return os.path.join(self.path, "completions")

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
        cls, run_dir: str, config: dict[str, Any], resume: str = "auto", may_differ: Sequence[str] = MAY_DIFFER
    ) -> RunFolder:
        """Makes the folder of a new run, or enters that of the same run again. Writes config.json.

        Args and errors as `check`, and a UserError where another process does not see the folder. Only the main process
        looks and writes; the others get the paths.

        Returns:
          The RunFolder.
        """
        folder = cls(os.path.abspath(os.path.expanduser(run_dir)))
        mark = error = None
        if is_main():
            try:
                check(run_dir, config, resume, may_differ)
                os.makedirs(folder.path, exist_ok=True)
                write_atomically(folder.config, json_text(config, indent=2) + "\n")
                mark = folder._mark_shared()
            except UserError as wrong:
                error = wrong
        mark = distributed.agree(mark, error)[0]
        if mark is not None:
            try:  # all have looked before the first process takes its mark away
                distributed.agree(error=folder._unseen(mark))
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
                found = json.load(file)
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

    def cut(self, step: int) -> None:
        """Forgets what an earlier process did after update `step`, from which the run goes on.

        metrics.jsonl and timings.jsonl lose the later lines (and a torn last one) and keep the others byte for byte;
        completions/ and nonfinite/ lose the later files. TensorBoard hides later events by itself (see MetricLogger).

        Args:
          step: the last update to keep; 0 keeps nothing.
        """
        if not is_main():
            return
        for path in (self.metrics, self.timings):
            if os.path.exists(path):
                with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
                    lines = file.readlines()
                kept = [line for line in lines if 0 <= _step_of(line) <= step and step > 0]
                if kept != lines:
                    write_atomically(path, "".join(kept))
        for folder in filter(os.path.isdir, (self.completions, self.nonfinite)):
            for name in os.listdir(folder):
                match = re.fullmatch(r"(?:training_)?(\d+)\.jsonl(\.tmp)?", name)
                if match and int(match[1]) > step:
                    os.remove(os.path.join(folder, name))
        if step == 0:
            shutil.rmtree(os.path.join(self.path, "tensorboard"), ignore_errors=True)

    def write_completions(self, step: int, rows: Iterable[dict[str, Any]], what: str = "samples") -> None:
        """Writes completions/STEP.jsonl, one JSON object a row; nothing for no rows.

        Args:
          step: the update that the completions belong to.
          rows: dicts of strings and numbers.
          what: 'samples', or 'training': completions/training_STEP.jsonl.
        """
        text = "".join(json_text(row) + "\n" for row in rows)
        if text and is_main():
            os.makedirs(self.completions, exist_ok=True)
            name = f"{step}.jsonl" if what == "samples" else f"{what}_{step}.jsonl"
            write_atomically(os.path.join(self.completions, name), text)

    def write_nonfinite(self, step: int, rows: Iterable[dict[str, Any]]) -> str:
        """Writes nonfinite/STEP.jsonl, one JSON object a row, by the first process; its path."""
        path = os.path.join(self.nonfinite, f"{step}.jsonl")
        if is_main():
            os.makedirs(self.nonfinite, exist_ok=True)
            write_atomically(path, "".join(json_text(row) + "\n" for row in rows))
        return path


def check(
    run_dir: str, config: dict[str, Any], resume: str = "auto", may_differ: Sequence[str] = MAY_DIFFER
) -> dict[str, Any] | None:
    """Whether a run may use a folder; touches nothing.

    Args:
      run_dir: the folder, there or not.
      config: the resolved config, of values that JSON has.
      resume: 'auto' continues a run that is there and else begins one; 'must' refuses to begin one; 'never' refuses a
        folder with a checkpoint or a finished run. A run that ended before its first checkpoint left nothing to
        continue from or to lose: its folder may be used again, with any config.
      may_differ: options that may differ from those in the folder's config.json.

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
        old = _config_of(folder, run_dir)
        if begun:
            _refuse_other_config(old, run_dir, config, may_differ)
    else:
        _refuse_strangers(folder, run_dir)
    finished = folder.finished() if used else None
    if resume == "must" and finished is None and not (used and folder.has_checkpoint()):
        raise UserError(f"--resume is must, but --run_dir {run_dir} holds no checkpoint to continue from")
    return finished


def _refuse_files(folder: RunFolder, run_dir: str) -> None:
    """A file in the place of the folder or of one above it."""
    nearest = folder.path
    while not os.path.exists(nearest) and nearest != os.path.dirname(nearest):
        nearest = os.path.dirname(nearest)
    if os.path.exists(nearest) and not os.path.isdir(nearest):
        what = "is a file" if nearest == folder.path else f"cannot be made: {nearest} is a file"
        raise UserError(f"--run_dir {run_dir} {what}. Give a folder")


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
            old = json.load(file)
    except ValueError as error:
        raise UserError(f"{folder.config} is no JSON ({error}): give another --run_dir") from error
    if not isinstance(old, dict) or "stage" not in old:
        raise UserError(f"--run_dir {run_dir} is no run's folder (its config.json names no stage): give another folder")
    return old


def _refuse_other_config(old: dict[str, Any], run_dir: str, config: dict[str, Any], may_differ: Sequence[str]) -> None:
    lines = differences(old, config, may_differ)
    if lines:
        raise UserError(
            f"--run_dir {run_dir} holds a run of another config: give another folder, or these options as they were\n  "
            + "\n  ".join(lines)
        )


def _step_of(line: str) -> int:
    """The step of a complete line, -1 for a torn one."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else -1
    except (ValueError, KeyError, TypeError):
        return -1

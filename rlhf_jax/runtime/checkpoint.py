"""Checkpoints of the TrainState; the only module that uses orbax."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rlhf_jax.errors import UserError
from rlhf_jax.parallel import multihost
from rlhf_jax.parallel.sharding import path_names
from rlhf_jax.runtime.checksums import checksums
from rlhf_jax.utils.text import bytes_text

# Errors of orbax and tensorstore for missing or broken files.
_READ_ERRORS = (OSError, KeyError, TypeError, ValueError, AttributeError)
_METADATA_BYTES = 1 << 20  # upper bound beside the arrays: names, shapes, indices
SAVE_TIMEOUT = 1200
"""Seconds after which a save is abandoned."""
FORMAT = 2
"""Of what a checkpoint holds; another number is refused."""
DAMAGED_SUFFIX = ".damaged"
"""Ends the folder name of a checkpoint that cannot be used."""


class Damaged(UserError):
    """A checkpoint exists, but it is not what was saved."""


def _tensors(tree: Any) -> dict[str, list]:
    """{path: [shape, dtype]} of every leaf."""
    return {name: [list(np.shape(x)), str(x.dtype)] for name, x in zip(path_names(tree), jax.tree.leaves(tree))}


def _check_tensors(saved: dict[str, list], expected: dict[str, list], where: str) -> None:
    """Raises a UserError that names the first few tensors in which a checkpoint differs from the run's state."""
    problems = []
    for name in dict.fromkeys([*expected, *saved]):
        if name not in saved:
            problems.append(f"{name} is missing in the checkpoint")
        elif name not in expected:
            problems.append(f"{name} is in the checkpoint, but not in this run")
        elif saved[name] != expected[name]:
            (old_shape, old_dtype), (shape, dtype) = saved[name], expected[name]
            problems.append(f"{name} is {old_dtype}{old_shape} in the checkpoint, but {dtype}{shape} in this run")
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{where} does not fit this run:\n  " + "\n  ".join(problems[:5]) + more)


class Keep:
    """orbax's preservation policy: keeps the newest few checkpoints and the best one."""

    def __init__(self, newest: int | None, greater: bool):
        self.newest, self.greater = newest, greater
        self.scores: dict[int, float] = {}

    def best(self, steps: Sequence[int]) -> int | None:
        """The step with the best score, the first of equals; None if none has a score."""
        sign = 1 if self.greater else -1
        scored = [step for step in sorted(steps) if np.isfinite(self.scores.get(step, np.nan))]
        return max(scored, key=lambda step: (sign * self.scores[step], -step), default=None)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Called by orbax after a save; whether to keep each checkpoint, in order of steps."""
        del context
        preserved_steps = self.preserved([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step in preserved_steps for checkpoint in checkpoints]

    def preserved(self, steps: Sequence[int]) -> set[int]:
        """The steps to keep, from all steps in order."""
        newest = steps if self.newest is None else steps[-self.newest :]
        return {*newest, *([] if self.best(steps) is None else [self.best(steps)])}


class Checkpoints:
    """The checkpoints of a run, FOLDER/STEP/.

    A step's folder appears whole or not at all: it is written under another name and renamed when complete, and older
    ones are deleted only then. Saving continues in the background after the arrays have been copied, so the state may
    be donated at once. A full or missing disk costs a checkpoint and a warning, not the run. With several processes,
    all of them must make the same calls.
    """

    def __init__(
        self,
        folder: str,
        keep: int | None = None,
        *,
        greater_is_better: bool = False,
        warn: Callable[[str], None] | None = None,
        shown_as: str | None = None,
        saved: Callable[[], Sequence[int]] | None = None,
        read_only: bool = False,
    ):
        """Opens a folder for saving and restoring, and removes what an interrupted save left in it.

        Args:
          folder: a local path, created if missing.
          read_only: nothing is created or removed, and `save` must not be called: a run may be writing there.
          shown_as: the folder in a bucket that this one is the local part of. Each process then has a folder of its
            own, which gets the shards that it is the first to hold; a checkpoint is the files of all processes. Without
            it all processes see the same folder.
          saved: returns the steps in the bucket, for messages.
          keep: number of newest checkpoints to keep, beside the one with the best score; None: all.
          greater_is_better: whether the best score is the greatest.
          warn: called with warnings; default: prints to standard error.

        Raises:
          UserError: keep is below 1.
        """
        if keep is not None and keep < 1:
            raise UserError(f"--save_total_limit {keep}: keep at least 1 checkpoint, or None for all")
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        threading.excepthook, sys.unraisablehook = _ignore_orbax_threads, _ignore_late_reports
        logging.getLogger("asyncio").addFilter(_is_no_orbax_task)
        self.folder = os.path.abspath(folder)
        self._shown, self._shared, self._read_only = shown_as or self.folder, shown_as is None, read_only
        self._saved = saved or self._on_disk
        self.warn = warn or (lambda text: print(f"warning: {text}", file=sys.stderr, flush=True))
        self._keep = Keep(keep, greater_is_better)
        self._saving: int | None = None
        self._manager = self._open()
        for step in self.steps():
            self._keep.scores[step] = self._score(step)
        if not read_only:
            self._delete_excess()

    def _delete_excess(self) -> None:
        """Deletes checkpoints over the limit: a kill may have come before orbax did, or in between."""
        preserved_steps = self._keep.preserved(self.steps())
        excess = [step for step in self.steps() if step not in preserved_steps]
        if not excess:
            return
        if multihost.is_main():
            for step in excess:
                shutil.rmtree(os.path.join(self.folder, str(step)), ignore_errors=True)
        multihost.wait_for_all("old checkpoints")
        self._manager.reload()

    def _open(self) -> ocp.CheckpointManager:
        if self._read_only:
            options = ocp.CheckpointManagerOptions(read_only=True)
            return ocp.CheckpointManager(self.folder, options=options, item_names=("state", "extra"))
        options: dict[str, Any] = {
            "preservation_policy": self._keep,
            "create": True,
            "cleanup_tmp_directories": True,
            "enable_async_checkpointing": True,
            "async_options": ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT),
        }
        if self._shared:
            options = ocp.CheckpointManagerOptions(**options)
            return ocp.CheckpointManager(self.folder, options=options, item_names=("state", "extra"))
        os.makedirs(self.folder, exist_ok=True)
        alone = ocp.options.MultiprocessingOptions(primary_host=None)
        options = ocp.CheckpointManagerOptions(**options | {"create": False, "multiprocessing_options": alone})
        # Without OCDBT a shard is a file: the files of all processes together are the checkpoint.
        handlers = {
            "state": ocp.StandardCheckpointHandler(multiprocessing_options=alone, use_ocdbt=False),
            "extra": ocp.JsonCheckpointHandler(multiprocessing_options=alone),
        }
        return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    # --- saving

    def room(self, state: Any) -> tuple[int, int | None]:
        """(upper bound of the bytes of a checkpoint of `state`, free bytes on its disk or None if unknown)."""
        needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) + _METADATA_BYTES
        try:
            usage = shutil.disk_usage(self.folder)
        except OSError:
            return needed, None
        return needed, usage.free if usage.total else None

    def save(self, step: int, state: Any, extra: dict[str, Any] | None = None, score: float | None = None) -> bool:
        """Saves the state after `step` updates; older checkpoints over the limit are deleted afterwards.

        Args:
          step: updates done.
          state: pytree of jax.Arrays (no typed PRNG keys).
          extra: values that are not arrays, of JSON types.
          score: of this checkpoint, for `best`; None: it has none.

        Returns:
          False if the step exists already, or cannot be written (after a warning); True otherwise.
        """
        self._finish_save()
        if step in self.steps():
            return False
        problem = multihost.from_first(lambda: self._write_problem(state))
        if problem is not None:
            self._warn_failed(step, problem)
            return False
        notes = {"format": FORMAT, "tensors": _tensors(state), "extra": extra or {}, "score": score}
        notes["sums"] = np.asarray(checksums(state)).tolist()
        text = json.dumps(notes)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            extra=ocp.args.JsonSave({"notes": text, "crc": zlib.crc32(text.encode())}),
        )
        self._keep.scores[step] = np.nan if score is None else float(score)
        error = None
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as raised:
            error = raised
        if any(multihost.gather_objects(error is not None)):
            self._warn_failed(step, reason_of(error))
            self._reopen()
            return False
        self._saving = step
        return True

    def _write_problem(self, state: Any) -> str | None:
        """Why no checkpoint can be written here, tried with a file of a few bytes; None if it can."""
        probe = os.path.join(self.folder, ".writable")
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(probe, "wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            os.remove(probe)
        except OSError as error:
            return reason_of(error)
        needed, free = self.room(state)
        if free is not None and free < needed:
            return f"it needs up to {bytes_text(needed)}, but only {bytes_text(free)} are free"
        return None

    def _finish_save(self) -> None:
        """Waits for the save in progress; warns and cleans up if it failed on any process."""
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        error = None
        try:
            self._manager.wait_until_finished()
        except Exception as raised:
            error = raised
        if not any(multihost.gather_objects(error is not None)):
            return
        if os.path.isdir(os.path.join(self.folder, str(step))):
            self.warn(f"checkpoint {step} is saved, but an older one could not be deleted: {reason_of(error)}")
        else:
            self._warn_failed(step, reason_of(error))
        self._reopen()

    def _warn_failed(self, step: int, reason: str) -> None:
        newest = max((other for other in self._saved() if other != step), default=None)
        newest = "no checkpoint yet" if newest is None else f"the newest checkpoint is of update {newest}"
        where = os.path.join(self._shown, str(step))
        self.warn(f"checkpoint {where} could not be written: {reason}. The run continues; {newest}")

    def _on_disk(self) -> list[int]:
        with contextlib.suppress(OSError):
            return sorted(int(name) for name in os.listdir(self.folder) if name.isdigit())
        return []

    def _reopen(self) -> None:
        """Replaces the manager: after an error, orbax's list of checkpoints is unreliable."""
        with contextlib.suppress(Exception):
            self._manager.close()
        try:
            self._manager = self._open()
        except OSError as error:  # the folder is missing or not writable
            self.warn(f"checkpoints cannot be kept in {self._shown} now: {reason_of(error)}")

    def forget(self, step: int) -> None:
        """Deletes this process' local part of a checkpoint that is in a bucket."""
        shutil.rmtree(os.path.join(self.folder, str(step)), ignore_errors=True)
        self._manager.reload()

    def wait_for_files(self) -> None:
        """Returns when this process' files of the last save are written; other threads than the main one may call it.

        Raises:
          Exception: of orbax or tensorstore; they were not.
        """
        self._manager.wait_until_finished()

    def reload(self) -> None:
        """Notices checkpoints that were put into the folder."""
        self._manager.reload()

    # --- restoring

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """All complete steps, in order."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The existing step with the best score, or None."""
        return self._keep.best(self.steps())

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint, bit for bit, onto the devices of `like`, whatever mesh it was saved from.

        Args:
          step: one of `steps()`.
          like: the state's pytree of jax.Arrays or of ShapeDtypeStructs with shardings.

        Returns:
          (state, extra)

        Raises:
          UserError: no such step; or a tensor is missing, unexpected, or of another shape or dtype; names it.
          Damaged: it cannot be read, or an array differs from the saved one.
        """
        where = os.path.join(self._shown, str(step))
        if step not in self.steps():
            raise UserError(f"no checkpoint {where}; existing steps: {self.steps() or 'none'}")
        notes = self._notes(step)
        if notes.get("format") != FORMAT:
            raise UserError(
                f"checkpoint {where} was written by another version of rlhf_jax. Finish the run with that version, or "
                "start over with another --run_dir"
            )
        _check_tensors(notes["tensors"], _tensors(like), where)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        error = None
        try:
            state = self._manager.restore(step, args=items)["state"]
        except jax.errors.JaxRuntimeError:
            raise  # of the device, not of the disk
        except Exception as raised:  # errors of tensorstore and orbax have no common class
            error = raised
        if any(multihost.gather_objects(error is not None)):
            raise self._damaged(step, error or OSError("on another process")) from error
        sums = np.asarray(checksums(state)).tolist()
        for name, saved, restored in zip(path_names(like), notes["sums"], sums, strict=True):
            if saved != restored:
                raise self._damaged(step, ValueError(f"{name} is not what was saved: its checksum differs"))
        return state, notes["extra"]

    def restore_newest(self, like: Any) -> tuple[Any, dict[str, Any], int] | None:
        """Restores the newest checkpoint that is intact; damaged ones are reported and renamed.

        Args:
          like: as `restore`.

        Returns:
          (state, extra, step), or None if there is no checkpoint.

        Raises:
          UserError: as `restore`; or all checkpoints are damaged, since a run must not silently start over.
        """
        return restore_newest(self, like)

    def set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint, so that its step can be saved again and its files can be inspected."""
        if multihost.is_main():
            aside = os.path.join(self.folder, f"{step}{DAMAGED_SUFFIX}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(os.path.join(self.folder, str(step)), aside)
        multihost.wait_for_all("damaged checkpoint")
        self._keep.scores.pop(step, None)
        self._manager.reload()

    def _notes(self, step: int) -> dict[str, Any]:
        """The data saved beside the arrays.

        Raises:
          Damaged: it is not what was saved.
        """
        try:
            content = self._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))["extra"]
            text = content["notes"]
            if zlib.crc32(text.encode()) != content["crc"]:
                raise ValueError("its notes are not what was saved: their checksum differs")
            return json.loads(text)
        except _READ_ERRORS as error:
            raise self._damaged(step, error) from error

    def _score(self, step: int) -> float:
        with contextlib.suppress(Damaged):
            score = self._notes(step)["score"]
            return np.nan if score is None else score
        return np.nan

    def _damaged(self, step: int, error: Exception) -> Damaged:
        where = os.path.join(self._shown, str(step))
        return Damaged(f"checkpoint {where} is damaged ({type(error).__name__}: {reason_of(error)})")

    # --- the end

    def wait(self) -> None:
        """Returns when the last save is on disk or has failed with a warning."""
        self._finish_save()

    def close(self) -> None:
        """Waits for the last save and closes orbax's manager."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def restore_newest(checkpoints: Any, like: Any) -> tuple[Any, dict[str, Any], int] | None:
    """As `Checkpoints.restore_newest`, of a `Checkpoints` or a `BucketCheckpoints`."""
    damaged = []
    while (step := checkpoints.latest()) is not None:
        try:
            return *checkpoints.restore(step, like), step
        except Damaged as error:
            damaged.append(str(error))
            older = max((other for other in checkpoints.steps() if other < step), default=None)
            if older is None:
                break
            checkpoints.set_aside(step)
            checkpoints.warn(f"{error}. It was renamed to {step}{DAMAGED_SUFFIX}; resuming from update {older}")
    if damaged:
        raise UserError(f"{damaged[-1]}. No other checkpoint is left. Remove {checkpoints.folder} to start over")
    return None


def reason_of(error: Exception | None) -> str:
    """The first line of an error, its middle cut: tensorstore gives the cause at the end."""
    if error is None:
        return "it failed on another process"
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 300 else f"{text[:120]} ... {text[-170:]}"


# What a failed save or restore leaves behind: it ends at one array, and the tasks of the others then fail unheard, or
# report to an event loop that has ended, whenever Python collects them.


def _ignore_orbax_threads(args: Any) -> None:
    """A thread excepthook without orbax's threads, whose errors are raised in the thread that waits for the save."""
    if not type(args.thread).__module__.startswith("orbax."):
        _thread_hook(args)


def _ignore_late_reports(unraisable: Any) -> None:
    """An unraisablehook without reports to an event loop that has ended."""
    frames = traceback.extract_tb(unraisable.exc_traceback)
    if not (issubclass(unraisable.exc_type, RuntimeError) and frames and frames[0].name == "call_soon_threadsafe"):
        _unraisable_hook(unraisable)


def _is_no_orbax_task(record: logging.LogRecord) -> bool:
    """A filter of asyncio's log without failed tasks of orbax."""
    message = record.getMessage()
    return not ("never retrieved" in message and ("orbax" in message or "OCDBT" in message))


_thread_hook, _unraisable_hook = threading.excepthook, sys.unraisablehook

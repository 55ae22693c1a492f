"""Checkpoints of the TrainState. The only room that knows orbax."""

from __future__ import annotations

import logging
import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rlhf_jax.types import UserError

# What orbax and tensorstore raise for files that are missing or broken.
_DAMAGE = (OSError, KeyError, TypeError, ValueError)


def _tensors(tree: Any) -> dict[str, list]:
    """{path: [shape, dtype]} of every leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")  # noqa: E731
    return {name(path): [list(np.shape(x)), str(x.dtype)] for path, x in leaves}


def _check_tensors(saved: dict[str, list], wanted: dict[str, list], where: str) -> None:
    """Raises a UserError that names the first few tensors in which a checkpoint is not what the run needs."""
    problems = []
    for name in dict.fromkeys([*wanted, *saved]):
        if name not in saved:
            problems.append(f"{name} is missing in the checkpoint")
        elif name not in wanted:
            problems.append(f"{name} is in the checkpoint, but not in this run")
        elif saved[name] != wanted[name]:
            (old_shape, old_dtype), (shape, dtype) = saved[name], wanted[name]
            problems.append(f"{name} is {old_dtype}{old_shape} in the checkpoint, but {dtype}{shape} in this run")
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{where} does not fit this run:\n  " + "\n  ".join(problems[:5]) + more)


class Checkpoints:
    """The checkpoints of a run, FOLDER/STEP/.

    A step's folder appears whole or not at all: it is written under another name and renamed when complete. Saving
    goes on in the background after the arrays have been copied, so the state may be donated at once. With several
    processes every one of them makes the same calls.
    """

    def __init__(self, folder: str, keep: int | None = None):
        """Opens a folder for saving and restoring, and removes what an interrupted save left in it.

        Args:
          folder: made when missing; a local path or one that orbax knows (gs://...).
          keep: the newest so many are kept; None: all.

        Raises:
          UserError: keep is below 1.
        """
        if keep is not None and keep < 1:
            raise UserError(f"--save_total_limit {keep}: keep at least 1 checkpoint, or None for all")
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder = os.path.abspath(folder)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "extra"))

    def save(self, step: int, state: Any, extra: dict[str, Any] | None = None) -> bool:
        """Saves the state after `step` updates; older checkpoints over the limit are removed.

        Args:
          step: updates done.
          state: pytree of jax.Arrays (no typed PRNG keys).
          extra: what is no array, of values that JSON has.

        Returns:
          False when that step is there already, True otherwise.
        """
        if step in self._manager.all_steps():
            return False
        notes = {"tensors": _tensors(state), "extra": extra or {}}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(notes))
        return self._manager.save(step, args=items, force=True)

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All complete steps, in order."""
        return sorted(self._manager.all_steps())

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint, bit for bit, onto the devices that `like` names, whatever mesh it was saved from.

        Args:
          step: one of `steps()`.
          like: the state's pytree of jax.Arrays or of ShapeDtypeStructs with shardings.

        Returns:
          (state, extra)

        Raises:
          UserError: no such step; a damaged checkpoint; or a tensor that is missing, extra, or of another shape or
            dtype, by name.
        """
        where = os.path.join(self.folder, str(step))
        if step not in self._manager.all_steps():
            raise UserError(f"no checkpoint {where}; there are {self.steps() or 'none'}")
        try:
            notes = self._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))["extra"]
            saved, extra = notes["tensors"], notes["extra"]
        except _DAMAGE as error:
            raise self._damaged(step, error) from error
        _check_tensors(saved, _tensors(like), where)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        try:
            return self._manager.restore(step, args=items)["state"], extra
        except _DAMAGE as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> UserError:
        older = [other for other in self.steps() if other < step]
        then = f"continue after update {older[-1]}" if older else "start anew (there is no older checkpoint)"
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return UserError(
            f"checkpoint {os.path.join(self.folder, str(step))} is damaged ({type(error).__name__}: {reason}). "
            f"Remove that folder to {then}"
        )

    def wait(self) -> None:
        """Returns when everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and lets go of the folder."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_) -> None:
        self.close()

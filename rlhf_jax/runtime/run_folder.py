"""A run's folder: its files, the config it belongs to, and its progress.

config.json  recipe.json  inputs.json  metrics.jsonl  timings.jsonl  rows.jsonl  tensorboard/  checkpoints/STEP/
finished.json
completions/STEP.jsonl, STEP.tokens.jsonl  calibration/STEP.jsonl  nonfinite/STEP.jsonl  .lock
policy/  value/  reward_model/: the final models

It may be in a bucket (see `storage`), with .lock as a `Lease`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import io
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.metrics.logger import read_metrics
from rlhf_jax.parallel import multihost
from rlhf_jax.parallel.multihost import is_main
from rlhf_jax.runtime.config_diff import differences
from rlhf_jax.runtime.lease import Lease
from rlhf_jax.runtime.lock import Lock
from rlhf_jax.storage import relocation, write_atomically
from rlhf_jax.storage.mirror import Mirror
from rlhf_jax.storage.relocation import Relocation
from rlhf_jax.tools import records
from rlhf_jax.utils.strict_json import json_text, with_floats
from rlhf_jax.utils.text import parse_json, short_repr

EXPORTS = ("policy", "value", "reward_model")
TEMPLATE_DATE = "date in chat templates"
"""The entry of inputs.json with the date that a run's chat templates print."""
ENVIRONMENTS = "environments"
"""The entry of inputs.json with the environments of the run's processes, in order, each that differs from the last."""
MODEL = "model "
"""What the entries of inputs.json for checkpoints begin with, before their path."""
Rows = Sequence[dict[str, Any]]


class Line(NamedTuple):
    """What a run wrote of one update.

    Attributes:
      metrics, timings: of metrics.jsonl and timings.jsonl.
      completions: rows of the tables of that update, by 'training' and 'samples'.
    """

    metrics: dict[str, Any]
    timings: dict[str, Any]
    completions: dict[str, Rows]


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of a run's folder. Create it with `open`, which checks that the folder belongs to the run.

    Attributes:
      path: local, or in a bucket.
      lock: held from `open` to `close`.
      mirror: of the files that grow, after `open` of a folder in a bucket.
    """

    path: str
    lock: Lock | Lease = dataclasses.field(init=False, compare=False, repr=False)
    mirror: Mirror | None = dataclasses.field(init=False, compare=False, repr=False, default=None)
    _texts: dict[str, str] = dataclasses.field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "lock", Lease(self.path) if storage.is_remote(self.path) else Lock(self.path))

    def close(self) -> None:
        """Releases the lock: another run may use the folder."""
        self.lock.release()

    @property
    def config(self) -> str:
        """config.json: the resolved config."""
        return os.path.join(self.path, "config.json")

    @property
    def metrics(self) -> str:
        """metrics.jsonl: a JSON object per update, deterministic metrics only."""
        return os.path.join(self.path, "metrics.jsonl")

    @property
    def timings(self) -> str:
        """timings.jsonl: clocks and memory."""
        return os.path.join(self.path, "timings.jsonl")

    @property
    def rows(self) -> str:
        """rows.jsonl: the rows of each update of a stage that samples (see `RolloutStage.row_record`)."""
        return os.path.join(self.path, "rows.jsonl")

    @property
    def checkpoints(self) -> str:
        """checkpoints/: a folder per saved step."""
        return os.path.join(self.path, "checkpoints")

    @property
    def completions(self) -> str:
        """completions/: STEP.jsonl with sample completions, STEP.tokens.jsonl with their tokens."""
        return os.path.join(self.path, "completions")

    @property
    def inputs(self) -> str:
        """inputs.json: the data and initial checkpoints of the run, the date in its chat templates, environments."""
        return os.path.join(self.path, "inputs.json")

    @property
    def nonfinite(self) -> str:
        """nonfinite/: STEP.jsonl with the rows of a non-finite update."""
        return os.path.join(self.path, "nonfinite")

    @property
    def finished_file(self) -> str:
        """finished.json: exists once the run has ended."""
        return os.path.join(self.path, "finished.json")

    @classmethod
    def open(
        cls,
        run_dir: str,
        config: dict[str, Any],
        resume: str = "auto",
        may_differ: Collection[str] | None = None,
        override: bool = False,
        *,
        inputs: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> RunFolder:
        """Creates the folder of a new run, or opens that of an existing run, locks it and writes config.json.

        Args and errors as `check`; also a UserError if another process does not see the folder, or another run uses it.
        Only process 0 checks and writes; the others get the paths.

        Args:
          inputs: data and initial checkpoints of the run (see `Stage.inputs`), compared as options are.
          environment: of this process, which inputs.json keeps (see `environment.environment`).

        Returns:
          The RunFolder; `close` releases the lock.
        """
        folder = cls(storage.absolute(run_dir))
        probe = error = None
        if is_main():
            try:
                check(run_dir, config, resume, may_differ, override)
                with _write_errors(folder.path):
                    storage.make_dir(folder.path)
                    folder.lock.take()
                    folder._check_inputs(inputs or {}, config, override)
                    folder._drop_records_of_another_run(config)
                    environments = folder.environments()
                    if environment is not None and environment not in environments[-1:]:
                        environments.append(environment)
                    folder._write(folder.config, config)
                    folder._write(folder.inputs, {**(inputs or {}), ENVIRONMENTS: environments})
                    if storage.exists(folder.finished_file):  # a finished run continues with other options
                        storage.remove(folder.finished_file)
                    probe = folder._write_probe()
            except UserError as raised:
                folder.lock.release()
                error = raised
        probe = multihost.agree(probe, error)[0]
        if probe is not None:
            try:  # process 0 removes the probe after all have looked for it
                multihost.agree(error=folder._check_probe(probe))
            finally:
                if is_main():
                    storage.remove(os.path.join(folder.path, probe))
        if storage.is_remote(folder.path):
            mirror, error = Mirror(folder.path, jax.process_index()), None
            object.__setattr__(folder, "mirror", mirror)
            try:
                mirror.download(list(filter(records.NAMES.fullmatch, storage.list_names(folder.path))))
            except UserError as raised:
                error = raised
            multihost.agree(error=error)
        return folder

    @property
    def growing_files(self) -> str:
        """The local folder of the files that grow: tool records, lines of updates."""
        return self.path if self.mirror is None else self.mirror.local

    def _drop_records_of_another_run(self, config: dict[str, Any]) -> None:
        """Removes what tools returned (tools.jsonl) to a run with another config that left no checkpoint."""
        names = list(filter(records.NAMES.fullmatch, storage.list_names(self.path)))
        if names and not self.has_progress() and _config_of(self, self.path) != config:
            for name in names:
                storage.remove(os.path.join(self.path, name))

    def _write_probe(self) -> str | None:
        """Writes a file that the other processes must see. Returns its name; None with a single process."""
        if jax.process_count() == 1:
            return None
        name = f".shared-{secrets.token_hex(8)}"
        write_atomically(os.path.join(self.path, name), "")
        return name

    def _check_probe(self, name: str) -> UserError | None:
        """The error if this process does not see the file of process 0."""
        for _ in range(50):
            # A listing, since a network file system may cache that a name does not exist.
            if storage.is_dir(self.path) and name in storage.list_names(self.path):
                return None
            time.sleep(0.2)
        return UserError(
            f"--run_dir {self.path} is not the folder that process 0 writes to: checkpoints and models need a file "
            "system that all processes share. Choose a --run_dir there"
        )

    def _check_inputs(self, inputs: dict[str, str], config: dict[str, Any], override: bool) -> None:
        """Raises a UserError if data or initial checkpoints differ from those of the existing run."""
        if not self.has_progress() or not storage.exists(self.inputs):
            return
        try:
            old = dict(json.loads(storage.read_text(self.inputs)))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.inputs} cannot be read ({error}). Remove it to resume without this check"
            ) from error
        old.pop(ENVIRONMENTS, None)
        same_files = _same_files(self, _config_of(self, self.path), config)
        for name in [name for name in old if name.startswith(MODEL) and name not in inputs]:
            path = name.removeprefix(MODEL)
            candidates = (new for new in inputs if new.startswith(MODEL) and new not in old)
            new = next((new for new in candidates if same_files(path, new.removeprefix(MODEL))), name)
            old[new] = old.pop(name)
        lines = differences(old, inputs, ())
        if lines and not override:
            raise UserError(
                f"--run_dir {self.path} contains a run with other data or models: choose another folder, or pass "
                "--override_resume to resume anyway\n  " + "\n  ".join(lines)
            )
        for line in lines:
            print(f"warning: --override_resume: {line}", file=sys.stderr, flush=True)

    def environments(self) -> list[dict[str, str]]:
        """The environments of the run's processes, in order; none of a run without progress or with a damaged file."""
        if not self.has_progress():
            return []
        try:
            environments = json.loads(storage.read_text(self.inputs))[ENVIRONMENTS]
            return [dict(environment) for environment in environments]
        except storage.StorageError:
            raise
        except (OSError, ValueError, TypeError, KeyError):
            return []

    def saved_steps(self) -> list[int]:
        """The steps in checkpoints/."""
        if storage.is_remote(self.checkpoints):
            names = storage.complete_folders(self.checkpoints)
        else:
            names = os.listdir(self.checkpoints) if os.path.isdir(self.checkpoints) else []
        return sorted(int(name) for name in names if name.isdigit())

    def has_progress(self) -> bool:
        """Whether there is a checkpoint or the run is finished."""
        return bool(self.saved_steps()) or storage.exists(self.finished_file)

    def finished(self) -> dict[str, Any] | None:
        """The content of finished.json, {"step", "metrics", "paths", "objects"}; None if the run is not finished.

        Raises:
          UserError: finished.json is damaged.
        """
        if not storage.exists(self.finished_file):
            return None
        try:
            content = parse_json(storage.read_text(self.finished_file))
            metrics, paths = with_floats(content["metrics"]), dict(content["paths"])
            objects = list(content.get("objects", []))
            return {"step": content["step"], "metrics": metrics, "paths": paths, "objects": objects}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.finished_file}, which marks a finished run, is damaged ({type(error).__name__}: {error}). "
                "Remove it and rerun the command to resume from the newest checkpoint"
            ) from error

    def finish(self, step: int, metrics: dict[str, Any], paths: dict[str, str], objects: Sequence[str] = ()) -> None:
        """Writes finished.json; call it once everything else is on disk.

        Args:
          step: the last update.
          metrics: scalars, of the last update and the final evaluations.
          paths: exported models by name.
          objects: arguments of `rlhf_jax.run` that took the place of options.
        """
        if is_main():
            content = {"step": step, "metrics": metrics, "paths": paths, "objects": list(objects)}
            write_atomically(self.finished_file, json_text(content, indent=2) + "\n")

    def cut(self, step: int) -> None:
        """Removes what an earlier process wrote after update `step`, from which the run resumes; 0 keeps nothing.

        metrics.jsonl, timings.jsonl and rows.jsonl lose later lines (and an incomplete last one) and keep the others
        byte for byte; folders of STEP.jsonl lose later files. TensorBoard itself hides later events (see
        `tensorboard.TensorBoard`).
        """
        if not is_main():
            return
        for path in (self.metrics, self.timings, self.rows):
            _keep_lines(path, lambda number: 0 <= number <= step and step > 0)
        folders = [os.path.join(self.path, name) for name in ("completions", "calibration", "nonfinite")]
        for folder in filter(storage.is_dir, folders):
            for name in storage.list_names(folder):
                match = re.fullmatch(r"(?:training_)?(\d+)(?:\.tokens)?\.jsonl(\.tmp)?", name)
                if match and int(match[1]) > step:
                    storage.remove(os.path.join(folder, name))
        if step == 0:
            storage.remove_tree(os.path.join(self.path, "tensorboard"), ignore_errors=True)

    def take_line(self, step: int) -> Line:
        """Removes the line of update `step`, the last, from metrics.jsonl and timings.jsonl, and returns it."""
        lines = []
        for path in (self.metrics, self.timings):
            rows = [row for row in read_metrics(path) if row["step"] == step] if storage.exists(path) else []
            lines.append({key: value for row in rows for key, value in row.items() if key not in ("step", "wall_time")})
        completions = {}
        for what, name in (("training", f"training_{step}"), ("samples", f"{step}")):
            path = os.path.join(self.completions, f"{name}.jsonl")
            if storage.is_file(path):
                completions[what] = [json.loads(row) for row in io.StringIO(storage.read_text(path))]
        for path in (self.metrics, self.timings):
            _keep_lines(path, lambda number: 0 <= number < step)
        return Line(*lines, completions)

    def write_recipe(self, name: str, options: dict[str, Any]) -> None:
        """Writes recipe.json, {"config": name, "options"}, when a run begins; resumes do not overwrite it."""
        path = os.path.join(self.path, "recipe.json")
        if is_main() and not (storage.exists(path) and self.has_progress()):
            self._write(path, {"config": name, "options": options})

    def _write(self, path: str, content: dict[str, Any]) -> None:
        self._texts[path] = json_text(content, indent=2) + "\n"
        write_atomically(path, self._texts[path])

    def put_back(self) -> None:
        """Writes again what this process wrote at the start, where the folder was removed since: checkpoints alone are
        no run. Not for buckets."""
        if is_main():
            for path, text in self._texts.items():
                if not os.path.exists(path):
                    with contextlib.suppress(OSError):  # what follows cannot be written either, and says so
                        os.makedirs(self.path, exist_ok=True)
                        write_atomically(path, text)

    def recipe(self) -> str | None:
        """The config that recipe.json names; None without one."""
        path = os.path.join(self.path, "recipe.json")
        return json.loads(storage.read_text(path))["config"] if storage.exists(path) else None

    def publish(self, local: dict[str, str]) -> dict[str, str]:
        """Puts exported models, which lie whole in `local` folders, in place of those of an earlier export.

        Returns:
          Their paths in the run's folder, by name.
        """
        self.lock.ensure_held()
        paths = {model: os.path.join(self.path, os.path.basename(path)) for model, path in local.items()}
        for model, path in paths.items():
            storage.remove_tree(path, ignore_errors=True)
            if storage.is_remote(path):
                storage.upload_folder(local[model], path)
            else:
                os.rename(local[model], path)
        return paths

    def write_completions(self, step: int, rows: Rows, what: str = "samples", tokens: Rows = ()) -> str:
        """Writes completions/STEP.jsonl, one JSON object per row; nothing without rows.

        Args:
          step: the update that the completions belong to.
          rows: dicts of strings and numbers.
          what: 'samples', or 'training': completions/training_STEP.jsonl.
          tokens: of the first rows, for completions/STEP.tokens.jsonl.

        Returns:
          The file of the rows, from the run's folder.
        """
        name = f"{step}" if what == "samples" else f"{what}_{step}"
        for file, content in ((f"{name}.tokens.jsonl", tokens), (f"{name}.jsonl", rows)):
            if content:
                _write_rows(os.path.join(self.completions, file), content)
        return f"completions/{name}.jsonl"

    def write_calibration(self, step: int, rows: Rows) -> None:
        """Writes calibration/STEP.jsonl, one JSON object per row; nothing without rows."""
        if rows:
            _write_rows(os.path.join(self.path, "calibration", f"{step}.jsonl"), rows)

    def write_nonfinite(self, step: int, rows: Rows) -> str:
        """Writes nonfinite/STEP.jsonl on process 0, one JSON object per row. Returns its path."""
        return _write_rows(os.path.join(self.nonfinite, f"{step}.jsonl"), rows)


def _keep_lines(path: str, keeps: Callable[[int], bool]) -> None:
    """Removes the lines of a file of JSON lines whose step `keeps` refuses."""
    if not storage.exists(path):
        return
    lines = io.StringIO(storage.read_text(path, errors="replace", newline="\n"), newline="\n").readlines()
    remaining_lines = [line for line in lines if keeps(_step_of(line))]
    if remaining_lines != lines:
        write_atomically(path, "".join(remaining_lines))


def _write_rows(path: str, rows: Rows) -> str:
    """Writes JSON lines on process 0, creating the file's folder. A failure is a warning: the run does not read them.
    Returns the path."""
    if is_main():
        try:
            storage.make_dir(os.path.dirname(path))
            write_atomically(path, "".join(json_text(row, default=short_repr) + "\n" for row in rows))
        except OSError as error:
            print(f"warning: {path} cannot be written: {error}. The run continues", file=sys.stderr, flush=True)
    return path


@contextlib.contextmanager
def _write_errors(path: str):
    """Raises a UserError for errors of creating or writing a folder."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--run_dir {path} cannot be written: {error}. Choose another folder") from error


def changes(run_dir: str, config: dict[str, Any], may_differ: Collection[str] | None = None) -> list[str]:
    """Options in which a config differs from that of the run in a folder, a line each; see `differences`."""
    if (old := recorded_options(run_dir)) is None:
        return []
    folder = RunFolder(storage.absolute(run_dir))
    return differences(old, config, may_differ, _same_files(folder, old, config))


def recorded_options(run_dir: str) -> dict[str, Any] | None:
    """config.json of the run in a folder; None of a run without progress."""
    folder = RunFolder(storage.absolute(run_dir))
    if not storage.exists(folder.config) or not folder.has_progress():
        return None
    return _config_of(folder, run_dir)


def environment_changes(run_dir: str, environment: dict[str, str]) -> list[str]:
    """Entries in which an environment differs from that of the last process of the run in a folder, a line each."""
    last = RunFolder(storage.absolute(run_dir)).environments()[-1:]
    old = {name: value for entries in last for name, value in entries.items() if name in environment}
    return differences(old, {name: environment[name] for name in old}, ())


def _same_files(folder: RunFolder, old: dict[str, Any], new: dict[str, Any]) -> Callable[[Any, Any], bool]:
    """Whether a value of the folder's config and one of a new config name the same files."""
    places = (Relocation(str(config.get("run_dir") or folder.path), folder.path) for config in (old, new))
    return functools.partial(relocation.same_files, **dict(zip(("old_paths", "new_paths"), places)))


def template_date(run_dir: str) -> str:
    """The day that the chat templates of a run print in place of today's: that on which the run in the folder began, or
    today for a new one. A resume on another day sees the same prompts."""
    folder = RunFolder(storage.absolute(run_dir))
    try:
        return datetime.date.fromisoformat(json.loads(storage.read_text(folder.inputs))[TEMPLATE_DATE]).isoformat()
    except storage.StorageError:
        raise
    except (OSError, ValueError, TypeError, KeyError):  # a damaged file is reported when the folder is opened
        return datetime.date.today().isoformat()


def check(
    run_dir: str,
    config: dict[str, Any],
    resume: str = "auto",
    may_differ: Collection[str] | None = None,
    override: bool = False,
) -> dict[str, Any] | None:
    """Checks whether a run may use a folder; writes nothing.

    Args:
      run_dir: the folder, existing or not.
      config: the resolved config, of JSON types.
      resume: 'auto' resumes an existing run or else begins one; 'must' refuses to begin one; 'never' refuses a folder
        with a checkpoint or a finished run. The folder of a run that ended before its first checkpoint may be used
        again, with any config.
      may_differ: options that may differ from those in the folder's config.json.
      override: any option may differ; a finished run then continues.

    Returns:
      The content of finished.json if the run is finished, else None.

    Raises:
      UserError: the folder contains something else, or a run of another config (names the options), or `resume`
        forbids it.
    """
    folder = RunFolder(storage.absolute(run_dir))
    _check_path(folder, run_dir)
    used = storage.exists(folder.config)
    if used and folder.has_progress() and resume == "never":
        raise UserError(f"--run_dir {run_dir} already contains a run, and --resume is never: choose another folder")
    if used:
        _config_of(folder, run_dir)
        folder.lock.check()
        lines = changes(run_dir, config, may_differ)
        if lines and not override:
            raise UserError(
                f"--run_dir {run_dir} contains a run with another config: choose another folder, restore these "
                "options, or pass --override_resume to resume with the new ones\n  " + "\n  ".join(lines)
            )
        if lines:
            return None
    else:
        _check_foreign_files(folder, run_dir)
    finished = folder.finished() if used else None
    if finished is None:
        _check_links(folder)
    if resume == "must" and finished is None and not (used and folder.saved_steps()):
        raise UserError(f"--resume is must, but --run_dir {run_dir} contains no checkpoint to resume from")
    return finished


def _check_path(folder: RunFolder, run_dir: str) -> None:
    """Raises a UserError for an invalid name, a broken link, or a file in place of the folder or one of its parents."""
    if "\0" in run_dir:
        raise UserError(f"--run_dir {run_dir} contains a NUL character. Choose another folder")
    if os.path.expanduser(run_dir).startswith("~"):
        raise UserError(
            f"--run_dir {run_dir}: there is no user of that name. Use ./{run_dir} for a folder of that name"
        )
    if os.path.islink(folder.path) and not os.path.exists(folder.path):
        raise UserError(f"--run_dir {run_dir} is a link to {os.readlink(folder.path)}, which does not exist")
    if storage.is_remote(folder.path):
        if storage.is_file(folder.path):
            raise UserError(f"--run_dir {run_dir} is a file. Choose another folder")
        return
    nearest = folder.path
    while not os.path.exists(nearest) and nearest != os.path.dirname(nearest):
        nearest = os.path.dirname(nearest)
    if os.path.exists(nearest) and not os.path.isdir(nearest):
        what = "is a file" if nearest == folder.path else f"cannot be created: {nearest} is a file"
        raise UserError(f"--run_dir {run_dir} {what}. Choose another folder")


def _check_links(folder: RunFolder) -> None:
    """Raises a UserError for a link in place of an export, through which it would overwrite another model."""
    for name in EXPORTS:
        if os.path.islink(path := os.path.join(folder.path, name)):
            raise UserError(
                f"{path} is a link to {os.readlink(path)}, which the final model would overwrite. Remove the link, or "
                "choose another --run_dir"
            )


def _check_foreign_files(folder: RunFolder, run_dir: str) -> None:
    """Raises a UserError for a folder with files but no run."""
    names = storage.list_names(folder.path) if storage.is_dir(folder.path) else []
    # Hidden files and an incomplete config.json of a killed run are accepted.
    names = sorted(name for name in names if not name.startswith(".") and name != "config.json.tmp")
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise UserError(
            f"--run_dir {run_dir} is not empty and not a run's folder (it contains {some}): choose another folder"
        )


def _config_of(folder: RunFolder, run_dir: str) -> dict[str, Any]:
    """The config of the run in a folder; a model's folder, for example, has another kind of config.json."""
    try:
        old = parse_json(storage.read_text(folder.config))
    except storage.StorageError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{folder.config} is not JSON ({error}): choose another --run_dir") from error
    if not isinstance(old, dict) or "stage" not in old:
        raise UserError(
            f"--run_dir {run_dir} is not a run's folder (its config.json has no stage): choose another folder"
        )
    return old


def _step_of(line: str) -> int:
    """The step of a complete line; -1 for an incomplete one."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else -1
    except (ValueError, KeyError, TypeError):
        return -1

"""What the folder of a run says of its updates."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from rlhf_jax import storage
from rlhf_jax.config import StageConfig
from rlhf_jax.config import files as config_files
from rlhf_jax.errors import UserError
from rlhf_jax.report.read_run import read_json_lines
from rlhf_jax.runtime.run_folder import RunFolder
from rlhf_jax.utils.strict_json import with_floats


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A stage's run.

    Attributes:
      folder: local.
      stage: its name.
      config: as it is now, with paths of a moved run adapted.
      metrics: lines of metrics.jsonl by step.
      rows: lines of rows.jsonl by step.
    """

    folder: RunFolder
    stage: str
    config: StageConfig
    metrics: dict[int, dict[str, Any]]
    rows: dict[int, dict[str, Any]]

    @classmethod
    def open(cls, folder: str) -> RecordedRun:
        """Reads a stage's folder; writes nothing.

        Raises:
          UserError: it is not one.
        """
        stage, config = config_files.load_run(folder)
        if not isinstance(config, StageConfig):
            raise UserError(f"{folder}: its config.json is of a {stage}, not of one stage")
        run_folder = RunFolder(storage.absolute(folder))
        return cls(run_folder, stage, config, _by_step(run_folder.metrics), _by_step(run_folder.rows))

    @property
    def updates(self) -> int:
        """The last update with metrics."""
        return max(self.metrics, default=0)

    def inputs(self) -> dict[str, str]:
        """Fingerprints of data and starting models; empty where there is no record."""
        if not storage.exists(self.folder.inputs):
            return {}
        entries = json.loads(storage.read_text(self.folder.inputs))
        return {name: value for name, value in entries.items() if isinstance(value, str)}

    def checkpoint_before(self, step: int) -> int:
        """The newest saved update before `step`; 0: the start."""
        return max((saved for saved in self.folder.saved_steps() if saved < step), default=0)

    def differing(self, step: int, metrics: dict[str, Any]) -> list[str]:
        """Names of the metrics of an update that the run has with other values than `metrics`."""
        recorded = self.metrics.get(step, {})
        return [name for name, value in metrics.items() if name in recorded and not same(value, recorded[name])]

    def options(self) -> dict[str, Any]:
        """The options of config.json."""
        return json.loads(config_files.to_json(self.config))


WHY_OTHERS = "other code, versions or hardware, or an option that was changed later"
"""Why a recomputation may not give the numbers of the run."""


def _by_step(path: str) -> dict[int, dict[str, Any]]:
    """{step: all that the lines of that step say}, without a last line that is being written."""
    merged: dict[int, dict[str, Any]] = {}
    for line in read_json_lines(path):
        if line is None:
            raise UserError(f"{path} has a line that is no JSON object: remove it")
        step = line.pop("step")
        merged[step] = {**merged.get(step, {}), **with_floats(line)}
    return merged


def stage_folders(run_dir: str) -> dict[str, str]:
    """{stage: folder} of a run of one stage, or of the stages of a pipeline, in order.

    Raises:
      UserError: there is no run, or it is in a bucket.
    """
    if storage.is_remote(run_dir):
        raise UserError(f"{run_dir} is in a bucket: copy it to a local folder first")
    return {config_files.load_run(folder)[0]: folder for folder in config_files.stage_folders(run_dir)}


def same(a: Any, b: Any) -> bool:
    """Whether two values of JSON are the same number or text; NaN is the same as NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (np.isnan(a) and np.isnan(b))
    return type(a) is type(b) and a == b

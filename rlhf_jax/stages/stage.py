"""What the training loop reads of a stage."""

from __future__ import annotations

from typing import Any, Literal

from rlhf_jax.config import StageConfig
from rlhf_jax.parallel.compile_ahead import CompileAhead
from rlhf_jax.runtime.stopping import Tick, no_tick
from rlhf_jax.stages.evaluator import Completions
from rlhf_jax.stages.work import Work
from rlhf_jax.types import Array, TrainState

Rows = Literal["allowed", "longest", "first"]
"""What decides the lengths that programs are traced for: see `Stage.trace_programs`."""


class Stage:
    """One stage of training: its models, data and programs on a mesh. What a stage need not have has a body here.

    Attributes:
      name: 'sft', 'reward', 'ppo', ...
      config: its frozen config, with micro_batch_size set.
      weights: places params on the mesh.
      state: the TrainState to start from; the loop owns it afterwards.
      total_steps: updates of the whole run.
      progress: names of the metrics for the terminal, in order.
      early_stopping_metric: lower is better; None: the stage has none.
      messages: lines on what was opened.
      phase: what an update is doing: generate, score, experience or update.
      compiling: the first update's programs; None: each is compiled when it is called.
      records_rows: whether `row_record` returns the rows of an update.
    """

    name: str
    config: StageConfig
    weights: Any
    state: TrainState
    total_steps: int
    progress: tuple[str, ...]
    early_stopping_metric: str | None = None
    messages: list[str]
    phase: str
    compiling: CompileAhead | None = None
    records_rows: bool = False

    @property
    def rows(self) -> int:
        """Rows of the training data."""
        raise NotImplementedError

    @property
    def rows_per_update(self) -> int:
        """Rows of the data that an update takes."""
        raise NotImplementedError

    @property
    def base_model(self) -> str | None:
        """What training starts from; None: random weights."""
        raise NotImplementedError

    def train_step(
        self, state: TrainState, step: int, tick: Tick = no_tick
    ) -> tuple[TrainState, dict[str, Array], dict[str, float]]:
        """One update: (state, metrics still on the device, seconds by phase). `tick` is called between phases."""
        raise NotImplementedError

    def evaluate(self, state: TrainState, tick: Tick = no_tick) -> dict[str, float]:
        """Metrics of every evaluation set; empty without one."""
        raise NotImplementedError

    def samples(self, state: TrainState, tick: Tick = no_tick) -> Completions:
        """Sample completions for completions/STEP.jsonl; empty where the stage has none."""
        return [], []

    def training_completions(self) -> Completions:
        """The responses of the last update, once, if the config asks for them; else empty."""
        return [], []

    def row_record(self) -> dict[str, Any] | None:
        """What identifies the rows of the last update, on the device or the host, for rows.jsonl."""
        return None

    def calibration(self) -> list[dict[str, Any]]:
        """Calibration of the last evaluation, for calibration/STEP.jsonl; empty where the stage has none."""
        return []

    def work(self, step: int, tokens: int) -> dict[str, Work]:
        """The work of each phase of update `step` (1-based, one of the last two), which had `tokens` tokens; empty if
        it is not known."""
        return {}

    def nonfinite_rows(self, step: int) -> list[dict[str, Any]]:
        """The rows of update `step` (1-based, one of the last two), for nonfinite/STEP.jsonl; on every process."""
        raise NotImplementedError

    def record_calls(self, folder: str) -> None:
        """Records tool calls in a local folder from now on; calls that are recorded there are not repeated."""

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the TrainState, of JSON types. Every process must call it."""
        return {}

    def restore_host_state(self, saved: dict[str, Any]) -> list[str]:
        """Takes back what `host_state` returned, from a checkpoint. Returns a line for each thing that is lost."""
        return []

    def resumed(self, state: TrainState) -> TrainState:
        """A state from a checkpoint, with what the config has set since."""
        return state

    def inputs(self) -> dict[str, str]:
        """Fingerprints of every data set and starting checkpoint, by name."""
        raise NotImplementedError

    def frozen(self) -> dict[str, Any]:
        """Params of the models that are never trained, by name."""
        raise NotImplementedError

    def trace_programs(self, build: Any, *, rows: Rows = "allowed", micro_batch_size: int | None = None) -> None:
        """An update on shapes: each program goes, with its arguments, to `build` in place of
        `compile_ahead.run_program`, which returns the shapes of its results.

        Args:
          build: see `dry_run.memory` and `CompileAhead`.
          rows: as long as the options allow, as the longest of the training data, or as those of the first batch.
          micro_batch_size: in place of the config's.
        """
        raise NotImplementedError

    def export(self, state: TrainState, folder: str) -> dict[str, str]:
        """Writes the final models under `folder`: {name: path}."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends threads and connections that the stage started."""
        if self.compiling is not None:
            self.compiling.close()

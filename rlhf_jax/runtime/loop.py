"""The loop of a stage: update, evaluate, sample, save, in this order, to the last update or until it is stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.metrics import logger as metrics_logger
from rlhf_jax.parallel import multihost
from rlhf_jax.rewards.interface import RewardFailure
from rlhf_jax.runtime import compile_cache, host_memory, out_of_memory
from rlhf_jax.runtime.callbacks import Callback, Control, call
from rlhf_jax.runtime.monitor import Monitor, NonFinite
from rlhf_jax.runtime.run_folder import Line
from rlhf_jax.runtime.stopping import RESUME_HINT, Stopped, StopRequested, Stops, Tick
from rlhf_jax.utils import tables
from rlhf_jax.utils.text import printable


class Loop:
    """Updates, evaluations, samples and checkpoints of a stage, in this order, to the last update or until stopped.

    `train.update_to_the_end` calls its parts in order.

    Attributes:
      state: the TrainState; updates overwrite it.
      step: updates done.
      activity: what is done between updates; '' while an update runs.
      due: what is still due after the present update, in order: 'evaluate', 'samples', 'last', 'save'.
    """

    def __init__(
        self,
        stage,
        *,
        state,
        start: int,
        run_folder,
        checkpoints,
        logger,
        callbacks: Sequence[Callback],
        control: Control,
        stops: Stops,
        monitor: Monitor,
        patience: Patience,
        throughput: Any = None,
        due: Sequence[str] = (),
    ):
        """`throughput`: as `stages.throughput.Throughput`; None: no shares of the device's peak.
        `due`: what was still due after the checkpoint's update when the run was stopped."""
        self.stage, self.config, self.start, self.step, self.state = stage, stage.config, start, start, state
        self.control, self.folder, self.checkpoints, self.logger = control, run_folder, checkpoints, logger
        self.callbacks, self.stops, self.monitor, self.patience = callbacks, stops, monitor, patience
        self._throughput = throughput
        self.due = list(due)
        self.tick: Tick = stops.tick
        self.activity = ""
        self._saved, self._saved_at = start, time.monotonic()
        self._save_seconds = 0.0  # since the last update's metrics
        self._began = time.perf_counter()
        self._update_began = self._began
        host_memory.trim()  # of tokenising and of reading weights
        self._compile_clock = compile_cache.CompileTimer()
        self._eval_updates, self._save_updates = (
            updates_between(steps, stage.total_steps) for steps in (self.config.eval_steps, self.config.save_steps)
        )

    @property
    def doing(self) -> str:
        """What is done at this moment."""
        return self.activity or self.stage.phase

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Within it a stop request saves and raises Stopped, and an error saves what was done before it."""
        self.stops.set_in_loop(True)
        try:
            with out_of_memory.translate_errors(self.config, lambda: self.doing):
                try:
                    yield
                except StopRequested:
                    self.stop()
        except UserError as error:
            self.rescue(error)
            raise
        finally:
            self._compile_clock.close()

    def updates_remain(self) -> bool:
        """Whether there is another update."""
        return self.step < self.stage.total_steps and not self.monitor.over(self.step)

    def begin_update(self) -> None:
        """Stops here if the run was asked to and the update would not fit before its limit."""
        self._update_began = time.perf_counter()
        self.stops.tick(whole=True)

    def end_update(self, state, metrics: dict[str, Any], seconds: dict[str, float]) -> None:
        """Takes the state after an update and hands its metrics to the logger, which reads them one update late."""
        self.state = state
        self.step += 1
        if self.step == self.start + 1 and self._throughput is not None:
            jax.block_until_ready(metrics)  # the devices are idle while their peak is measured
            log(f"{self.stage.name}: {self._throughput.measure_peak()}")
        timings = {f"time/{phase}": value for phase, value in seconds.items()}
        timings["time/compile"] = self._compile_clock.since_last()
        timings["time/save"], self._save_seconds = self._save_seconds, 0.0
        timings["step_time"] = time.perf_counter() - self._update_began
        if self.step == self.start + 1:
            compiling = f"{timings['time/compile']:.1f} s of it compiling"
            if self.stage.compiling is not None and (took := self.stage.compiling.seconds):
                each = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items())
                log(f"{self.stage.name}: compiled in parallel: {each}")
            log(f"{self.stage.name}: the first update took {timings['step_time']:.1f} s, {compiling}")
        else:
            self.stops.record_seconds(update=timings["step_time"])
        # TRL's eps: episodes a second since the run (here: this process) began, everything included.
        episodes = (self.step - self.start) * self.config.batch_size
        timings["eps"] = episodes / (time.perf_counter() - self._began)
        self.logger.log(self.step, metrics, timings, self.stage.row_record())
        self.show(self.stage.training_completions(), "training")
        if self.callbacks:
            share_requests(self.control)
        self.due = self.due_after_update()

    def restore_line(self, line: Line) -> None:
        """Takes back the line of the checkpoint's update, to which what is still due adds, and its tables: TensorBoard
        drops everything of that step. A checkpoint may be resumed twice, so samples that are due may be there."""
        self.logger.restore(self.step, line.metrics, line.timings)
        for what, rows in line.completions.items():
            if what in self.due:
                continue
            rows = tables.without_thumbnails(rows[: self.config.num_completions_to_print])
            self.logger.text(self.step, f"completions/{what}", tables.markdown(rows))

    def is_last(self) -> bool:
        """Whether the present update is the last."""
        over = self.monitor.over(self.step)
        if over:
            log(f"{self.stage.name}: stopping; an alarm of early_stop was raised")
        return self.step == self.stage.total_steps or self.control.stop or over

    def due_after_update(self) -> list[str]:
        """What is due after the present update, as `due`."""
        config, step, total, last = self.config, self.step, self.stage.total_steps, self.is_last()
        due = ["evaluate"] if last or self.control.evaluate or every(self._eval_updates, step) else []
        due += ["samples"] if samples_due(config.num_sample_generations, step, total, last) else []
        return [*due, *(["last"] if last else []), "save"]

    def finish_update(self) -> bool:
        """Evaluates, samples and saves as due after an update; whether the run is over."""
        last = "last" in self.due
        if self.due != ["save"]:
            self.logger.wait()
        if "evaluate" in self.due:
            self.tick()
            self.control.evaluate = False
            metrics = self.evaluate()
            if self.patience.exhausted(metrics) and not last:
                limit, name = self.patience.limit, self.patience.name
                log(f"{self.stage.name}: stopping; {limit} evaluations without a better {name}")
                self.control.stop = last = True
                self.due = self.due_after_update()
            self.due.remove("evaluate")
        if "samples" in self.due:
            self.activity = "samples"
            printed = samples_printed(self.config.num_sample_generations, self.step, self.stage.total_steps, last)
            self.show(self.stage.samples(self.state, self.tick), "samples", printed)
            self.due.remove("samples")
        self.due = []
        if last or self.save_due():
            self.control.save, self.activity = False, "save"
            self.save(ended=last and self.step < self.stage.total_steps)
        self.activity = ""
        return last

    def save_due(self) -> bool:
        """Whether a checkpoint is due: by count, by the first process' clock, or because a callback asked for it."""
        if self.control.save or every(self._save_updates, self.step):
            return True
        minutes = self.config.save_minutes
        if minutes is None:
            return False
        return multihost.from_first(lambda: time.monotonic() - self._saved_at >= 60 * minutes)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the evaluation, logged."""
        self.activity = "evaluation"
        metrics = self.stage.evaluate(self.state, self.tick)
        self.activity = ""
        self.folder.write_calibration(self.step, self.stage.calibration())
        self.logger.log(self.step, metrics)
        call(self.callbacks, "on_evaluate", self.step, metrics, self.control)
        if self.callbacks:
            share_requests(self.control)
        return metrics

    def show(
        self, completions: tuple[list[dict[str, Any]], list[dict[str, Any]]], what: str, printed: bool = True
    ) -> None:
        """A table of completions: all rows into the run's folder and to callbacks, the first into TensorBoard and,
        where `printed`, the terminal."""
        rows, tokens = completions
        if not rows:
            return
        if self.config.log_unique_prompts:
            first = {id(row) for row in tables.unique_prompts(rows)}
            tokens = [token_row for row, token_row in zip(rows, tokens) if id(row) in first]
            rows = [row for row in rows if id(row) in first]
        file = self.folder.write_completions(self.step, rows, what, tokens)
        rows = tables.without_thumbnails(rows)
        call(self.callbacks, "on_completions", self.step, rows, what)
        if multihost.is_main():
            limit = self.config.num_completions_to_print
            try:
                if printed:
                    title = f"{self.stage.name}: {what} after update {self.step}; whole texts are in {file}"
                    tables.show(rows, title, limit)
                self.logger.text(self.step, f"completions/{what}", tables.markdown(rows[:limit]))
            except Exception as error:  # a value that a reward function logged may refuse to become text
                warn(f"the table of {what} after update {self.step} cannot be printed: {error!r}. The run continues")

    def save(self, due: Sequence[str] = (), ended: bool = False) -> None:
        """A checkpoint of the present update; its metrics are written first.

        Args:
          due: what is still due after it: a resume does that, and completes the line of metrics.jsonl.
          ended: the run ends here, before its last update: only the exports remain.
        """
        if not self._metrics_stored():
            return
        name, score, started = self.config.metric_for_best_model, None, time.monotonic()
        metrics = self.logger.last
        if name is not None and not due:
            score = metrics.get(name)
        tokens = self.logger.tokens
        extra = {"total_steps": self.stage.total_steps, "due": [*due], "ended": ended, "num_tokens": tokens}
        self.checkpoints.save(self.step, self.state, {**extra, **self.stage.host_state()}, score)
        self._saved, self._saved_at = self.step, time.monotonic()
        self._save_seconds += self._saved_at - started
        self.stops.record_seconds(saving=self._saved_at - started)
        evaluated = any(other.startswith("eval") for other in metrics)
        if name is not None and name not in metrics and not due and (evaluated or not name.startswith("eval")):
            problem = f"--metric_for_best_model {name}: update {self.step} has no such metric; it has "
            problem += ", ".join(sorted(metrics))
            if self.step < self.stage.total_steps:
                raise UserError(problem)
            warn(problem)

    def _metrics_stored(self) -> bool:
        """Writes the metrics of all updates so far. False where a bucket refuses them: a checkpoint of later updates
        would hide that they are missing."""
        self.logger.flush()
        if self.folder.mirror is None:
            self.folder.put_back()
            return True
        stored, error = False, None
        try:
            self.folder.lock.ensure_held()
            stored = self.logger.sync()
        except UserError as raised:
            error = raised
        if all(multihost.agree(stored, error)):
            return True
        warn(f"no checkpoint of update {self.step}, since its metrics could not be written. The run continues")
        return False

    def export(self, folder: str) -> dict[str, str]:
        """Writes the final models, of the best checkpoint by option, to a folder: their paths by name."""
        config, name = self.config, self.stage.name
        if config.load_best_model_at_end and (best := self.checkpoints.best()) not in (None, self.step):
            log(f"{name}: update {best} has the best {config.metric_for_best_model}: exporting that")
            self.state, _ = self.checkpoints.restore(best, self.state)
        log(f"{name}: writing the models to {config.run_dir}")
        self.activity = "export"
        self.checkpoints.wait()  # a rerun after a failed export begins there
        return self.stage.export(self.state, folder)

    def stop(self) -> None:
        """Saves what is done and raises Stopped; the next start does what is still due after the present update."""
        if self.due or self.step > self._saved:
            self.save(self.due)
        self.checkpoints.wait()
        after = f"after update {self.step}, which is saved" if self.step else "before the first update"
        why = self.stops.reason()
        raise Stopped(f"{self.stage.name}: stopped {why} {after}; {RESUME_HINT}", together=True)

    def rescue(self, error: UserError) -> None:
        """Saves what was done before an error, if the state is that of a finished update.

        After a RewardFailure nothing was trained yet, so the state is that of the update before. All processes get
        here then, as they do when something is not finite; after another error this one may be alone, and a save waits
        for all.
        """
        if isinstance(error, NonFinite):
            # Updates from that one on changed nothing. If some of its steps were taken, the state is of no update.
            self.state = self.monitor.resumed(self.state)
            self.step = error.update - 1 if error.whole else self._saved
        lost = isinstance(error, out_of_memory.OutOfMemory) and self.doing == "update"
        together = jax.process_count() == 1 or isinstance(error, (RewardFailure, NonFinite))
        if self.step > self._saved and together and not lost:
            self.save(() if isinstance(error, NonFinite) else self.due)
            log(f"{self.stage.name}: stopped by an error after update {self.step}, which is saved; {RESUME_HINT}")


class Patience:
    """Early stopping on the stage's watched metric; its memory is metrics.jsonl, so that a resume forgets nothing."""

    def __init__(self, stage, run_folder):
        """Reads the values so far of a run's folder, which is cut to the update that the run resumes from."""
        self.limit = stage.config.early_stopping_patience
        self.name = stage.early_stopping_metric
        self.values = multihost.from_first(lambda: self._so_far(run_folder.metrics)) if self.limit else []

    def _so_far(self, path: str) -> list[float]:
        lines = metrics_logger.read_metrics(path) if storage.exists(path) else []
        return [line[self.name] for line in lines if self.name in line]

    def exhausted(self, values: dict[str, float]) -> bool:
        """True when the last `limit` evaluations were no better than the best before them."""
        if not self.limit or self.name not in values:
            return False
        self.values.append(values[self.name])
        return len(self.values) > self.limit and min(self.values[-self.limit :]) >= min(self.values[: -self.limit])


def share_requests(control: Control) -> None:
    """Applies a callback's request on one process to all: they stop, save and evaluate together."""
    for requests in multihost.gather_objects(dataclasses.asdict(control)):
        for name, requested in requests.items():
            setattr(control, name, getattr(control, name) or requested)


def every(n: int, step: int) -> bool:
    """Whether update `step` is one of each `n`; 0: never."""
    return n > 0 and step % n == 0


def updates_between(steps: float, total_updates: int) -> int:
    """eval_steps or save_steps in updates: below 1 it is a fraction of the run, at least one update (transformers).

    Args:
      steps: the option.

    Returns:
      Updates between two evaluations or checkpoints; 0: only at the end.
    """
    if 0 < steps < 1:
        return max(1, math.ceil(steps * total_updates))
    return int(steps)


def samples_due(generations: int, step: int, total: int, last: bool) -> bool:
    """Whether sample completions are due: `generations` times in a run, evenly as TRL, and at its end."""
    return generations > 0 and (last or step % max(1, total // generations) == 0)


def samples_printed(generations: int, step: int, total: int, last: bool) -> bool:
    """Whether samples that are due are printed too: the first, the last, and those after a third and two thirds."""
    interval = max(1, total // generations)
    number, count = step // interval, max(1, total // interval)
    return last or number == 1 or 3 * (number - 1) // count < 3 * number // count < 3


def warn(text: str) -> None:
    """A warning for the terminal, from the first process only."""
    if multihost.is_main():
        print(f"warning: {printable(text)}", file=sys.stderr, flush=True)


def log(line: str) -> None:
    """A line for the terminal, from the first process only."""
    if multihost.is_main():
        print(printable(line), flush=True)

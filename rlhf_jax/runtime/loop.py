"""The loop of a stage: update, evaluate, sample, save, in this order, to the last update or until it is stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

import jax

from rlhf_jax.config import StageConfig, batch_sizes
from rlhf_jax.errors import UserError
from rlhf_jax.metrics import logger as metrics_logger
from rlhf_jax.parallel import multihost
from rlhf_jax.rewards.interface import RewardFailure
from rlhf_jax.runtime import compile_cache, completion_tables, out_of_memory
from rlhf_jax.runtime.callbacks import Control
from rlhf_jax.runtime.monitor import NonFinite
from rlhf_jax.runtime.stopping import CONTINUES, Asked, Stopped, Stops, no_tick
from rlhf_jax.utils.strict_json import json_text, with_floats
from rlhf_jax.utils.text import printable


class Loop:
    """Updates, evaluations, samples and checkpoints of a stage, in this order, to the last update or until stopped."""

    def __init__(
        self, stage, start: int, control: Control, run_folder, checkpoints, logger, callbacks, stops: Stops, watch
    ):
        self.stage, self.config, self.start, self.step = stage, stage.config, start, start
        self.control, self.folder, self.checkpoints, self.logger = control, run_folder, checkpoints, logger
        self.callbacks, self.stops, self.watch = callbacks, stops, watch
        self.patience = Patience(stage, self.config, run_folder)
        self.saved, self.saved_at = start, time.monotonic()
        self.saving = 0.0  # seconds, not in the metrics yet
        self.began = time.perf_counter()
        self.todo: list[str] | None = None  # what the present update still wants
        self.eval_updates, self.save_updates = (
            batch_sizes.updates_between(steps, stage.total_steps)
            for steps in (self.config.eval_steps, self.config.save_steps)
        )
        self.looking = False
        self.aside = ""  # what is done between updates, but evaluations
        stage.tick = stops.tick

    @property
    def doing(self) -> str:
        """What is being done at this moment."""
        return "evaluation" if self.looking else self.aside or self.stage.phase

    def train(self, state, due: dict[str, Any]) -> tuple[Any, int]:
        """From update start + 1 to the last: (final state, updates done). Metrics are read one update late.

        Args:
          state: after update `start`; the loop owns it.
          due: what update `start` still wants, when the run was stopped right after it; else empty.
        """
        self.state, stage, total = state, self.stage, self.stage.total_steps
        compiling = compile_cache.Clock()
        if self.step < total:
            say(f"{stage.name}: compiling; the first update takes longer than all others")
        self.stops.loop(True)
        try:
            with out_of_memory.explained(self.config, lambda: "evaluation" if self.looking else stage.phase):
                try:
                    if due:
                        for name, text in due["texts"].items():  # TensorBoard drops all of that step
                            self.logger.text(self.step, name, text)
                        self.logger.log(self.step, with_floats(due["metrics"]), due["timings"])
                        if self.finish(due["what"]):
                            return self.state, self.step
                    elif self.config.eval_on_start and self.step == 0:
                        self.evaluate()
                    while self.step < total and not self.watch.over(self.step):
                        self.update(compiling)
                        if self.finish(self.wanted()):
                            break
                except Asked:
                    self.stop()
        except UserError as error:
            self.rescue(error)
            raise
        finally:
            compiling.close()
        return self.state, self.step

    def rescue(self, error: UserError) -> None:
        """Saves what was done before an error, where the state is that of an update.

        A reward failed, before anything was learned from it: what the run has done so far is whole. Of several
        processes all are here then, as when something was not finite; with another error this one may be alone, and a
        save waits for all.
        """
        if isinstance(error, NonFinite):
            # The updates from that one on have changed nothing; with some of its steps taken the state is of no update.
            self.state = self.watch.resumed(self.state)
            self.step = error.update - 1 if error.whole else self.saved
        lost = isinstance(error, out_of_memory.OutOfMemory) and self.stage.phase == "update" and not self.looking
        together = jax.process_count() == 1 or isinstance(error, (RewardFailure, NonFinite))
        if self.step > self.saved and together and not lost:
            self.save(None if isinstance(error, NonFinite) else self.still_due())
            then = f"which is saved; {CONTINUES}"
            say(f"{self.stage.name}: stopped by an error after update {self.step}, {then}")

    def update(self, compiling) -> None:
        """One update, its metrics handed to the logger."""
        stage, started = self.stage, time.perf_counter()
        self.stops.tick(whole=True)
        self.state, found, seconds = stage.train_step(self.state, self.step)
        self.step += 1
        timings = {f"time/{phase}": value for phase, value in seconds.items()}
        timings["time/compile"] = compiling.since_last()
        timings["time/save"], self.saving = self.saving, 0.0
        timings["step_time"] = time.perf_counter() - started
        if self.step == self.start + 1:
            took = f"{timings['step_time']:.1f} s, {timings['time/compile']:.1f} s of them compiling"
            say(f"{stage.name}: the first update took {took}")
        else:
            self.stops.took(update=timings["step_time"])
        # TRL's eps: episodes a second since the run (here: this process) began, everything included.
        done = (self.step - self.start) * self.config.batch_size
        timings["eps"] = done / (time.perf_counter() - self.began)
        self.logger.log(self.step, found, timings)
        self.show(stage.training_completions(), "training")
        if self.callbacks:
            share_wishes(self.control)

    def wanted(self) -> list[str]:
        """What is due after the present update, in order."""
        config, step, total = self.config, self.step, self.stage.total_steps
        over = self.watch.over(step)
        if over:
            say(f"{self.stage.name}: stopping; an alarm of early_stop was raised")
        last = step == total or self.control.stop or over
        what = ["evaluate"] if last or self.control.evaluate or every(self.eval_updates, step) else []
        what += ["samples"] if sample_now(config, step, total, last) else []
        return what + (["last"] if last else [])

    def finish(self, what: list[str]) -> bool:
        """Does what is due after an update, and saves when that is; whether the run is over."""
        self.todo = what = list(what)
        last = "last" in what
        if "evaluate" in what:
            self.stage.tick()
            self.control.evaluate = False
            values = self.evaluate()
            what.remove("evaluate")
            if self.patience.exhausted(values) and not last:
                limit, name = self.patience.limit, self.patience.name
                say(f"{self.stage.name}: stopping; {limit} evaluations without a better {name}")
                self.control.stop = last = True
                what[:] = [item for item in self.wanted() if item != "evaluate"]
        if "samples" in what:
            self.aside = "samples"
            self.show(self.stage.samples(self.state), "samples")
            what.remove("samples")
        if last or self.save_due():
            self.control.save, self.aside = False, "save"
            self.save(ended=last and self.step < self.stage.total_steps)
        self.aside = ""
        self.todo = None
        return last

    def save_due(self) -> bool:
        """Whether a checkpoint is due now: by count, by the first process' clock, or because a callback wants it."""
        if self.control.save or every(self.save_updates, self.step):
            return True
        minutes = self.config.save_minutes
        if minutes is None:
            return False
        return multihost.from_first(lambda: time.monotonic() - self.saved_at >= 60 * minutes)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the evaluation, logged."""
        self.looking = True
        values = self.stage.evaluate(self.state)
        self.looking = False
        self.folder.write_calibration(self.step, self.stage.calibration())
        self.logger.log(self.step, values)
        for callback in self.callbacks:
            callback.on_evaluate(self.step, values, self.control)
        if self.callbacks:
            share_wishes(self.control)
        return values

    def show(self, found: tuple[list[dict[str, Any]], list[dict[str, Any]]], what: str) -> None:
        """A table of completions: all rows in the run's folder and to callbacks, the first in the terminal and in
        TensorBoard."""
        rows, tokens = found
        if not rows:
            return
        if self.config.log_unique_prompts:
            first = {id(row) for row in completion_tables.unique_prompts(rows)}
            tokens = [of_tokens for row, of_tokens in zip(rows, tokens) if id(row) in first]
            rows = [row for row in rows if id(row) in first]
        self.folder.write_completions(self.step, rows, what, tokens)
        for callback in self.callbacks:
            callback.on_completions(self.step, rows, what)
        if multihost.is_main():
            limit = self.config.num_completions_to_print
            completion_tables.show(rows, f"{self.stage.name}: {what} after update {self.step}", limit)
            self.logger.text(self.step, f"completions/{what}", completion_tables.markdown(rows[:limit]))

    def save(self, due: dict[str, Any] | None = None, ended: bool = False) -> None:
        """A checkpoint of the present update, its metrics on disk before it.

        Args:
          due: what it still wants.
          ended: the run ends here, before its last update: nothing but the exports is left to do.
        """
        self.logger.flush()
        name, score, started = self.config.metric_for_best_model, None, time.monotonic()
        known = self.logger.last
        if name is not None and not due:
            score = known.get(name)
        extra = {"total_steps": self.stage.total_steps, "due": due, "ended": ended}
        self.checkpoints.save(self.step, self.state, extra, score)
        self.saved, self.saved_at = self.step, time.monotonic()
        self.saving += self.saved_at - started
        self.stops.took(saving=self.saved_at - started)
        evaluated = any(other.startswith("eval") for other in known)
        if name is not None and name not in known and not due and (evaluated or not name.startswith("eval")):
            problem = f"--metric_for_best_model {name}: update {self.step} has no such metric; it has "
            problem += ", ".join(sorted(known))
            if self.step < self.stage.total_steps:
                raise UserError(problem)
            warn(problem)

    def still_due(self) -> dict[str, Any] | None:
        """What the present update still wants, with its metrics, which are then not written: for the next start.

        None where there is nothing, or what there is to say of a bad update can be said only now.
        """
        if not self.todo:
            return None
        found, timings = held = self.logger.take()
        if self.watch.bad(held):
            self.logger.log(self.step, *held)
            return None
        step, texts = self.logger.texts
        due = {"what": self.todo, "metrics": json.loads(json_text(found)), "timings": timings}
        return {**due, "texts": texts if step == self.step else {}}

    def stop(self) -> None:
        """Saves what is done and raises Stopped; what the present update still wants waits for the next start."""
        due = self.still_due()
        if self.todo and due is None:
            self.stage.tick = no_tick
            self.finish(self.todo)
        elif due or self.step > self.saved:
            self.save(due)
        self.checkpoints.wait()
        after = f"after update {self.step}, which is saved" if self.step else "before the first update"
        why = self.stops.asked()
        raise Stopped(f"{self.stage.name}: stopped {why} {after}; {CONTINUES}", together=True)


class Patience:
    """Early stopping on the stage's watched metric; its memory is metrics.jsonl, so that a resume forgets nothing."""

    def __init__(self, stage, config, run_folder):
        self.limit = getattr(config, "early_stopping_patience", 0)
        self.name = stage.watched
        self.values = multihost.from_first(lambda: self._so_far(run_folder.metrics)) if self.limit else []

    def _so_far(self, path: str) -> list[float]:
        lines = metrics_logger.read_metrics(path) if os.path.exists(path) else []
        return [line[self.name] for line in lines if self.name in line]

    def exhausted(self, values: dict[str, float]) -> bool:
        """True when the last `limit` evaluations were no better than the best before them."""
        if not self.limit or self.name not in values:
            return False
        self.values.append(values[self.name])
        return len(self.values) > self.limit and min(self.values[-self.limit :]) >= min(self.values[: -self.limit])


def share_wishes(control: Control) -> None:
    """What a callback asked for on one process holds on all: they stop, save and evaluate together."""
    for wishes in multihost.gather_objects(dataclasses.asdict(control)):
        for wish, asked in wishes.items():
            setattr(control, wish, getattr(control, wish) or asked)


def every(n: int, step: int) -> bool:
    """Whether update `step` is one of each `n`; 0: never."""
    return n > 0 and step % n == 0


def sample_now(config: StageConfig, step: int, total: int, last: bool) -> bool:
    """Whether sample completions are due: num_sample_generations times in a run, evenly as TRL, and at its end."""
    n = getattr(config, "num_sample_generations", 0)
    return n > 0 and (last or step % max(1, total // n) == 0)


def warn(text: str) -> None:
    """A warning for the terminal, from the first process only."""
    if multihost.is_main():
        print(f"warning: {printable(text)}", file=sys.stderr, flush=True)


def say(line: str) -> None:
    """A line for the terminal, from the first process only."""
    if multihost.is_main():
        print(printable(line), flush=True)

"""python -m rlhf_jax.train --config CONFIG: the command line and the loop, read top to bottom like a document.

A run is: check everything that needs no model; open the data and the models; continue from the newest checkpoint;
update, evaluate, sample and save until the end; export. `run` is the same with objects in place of paths.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from rlhf_jax import (
    arithmetic,
    command,
    compare,
    compile_cache,
    configfile,
    distributed,
    folder,
    footprint,
    metrics,
    model_card,
    plan,
    tables,
)
from rlhf_jax.callbacks import Callback, Control
from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.config import Config, Pipeline, PolicyConfig, StageConfig, resolve, stage_name, stages_of
from rlhf_jax.rewards import RewardFailure
from rlhf_jax.stages import STAGES
from rlhf_jax.types import UserError
from rlhf_jax.watch import NonFinite, Watch


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
      run_dir: its folder.
      metrics: of the last update and the last evaluation.
      paths: exported models, by name.
      stages: results of a pipeline's stages, by name.
    """

    run_dir: str
    metrics: dict[str, float]
    paths: dict[str, str]
    stages: dict[str, Result] = dataclasses.field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when done; 2 with one line of explanation when something the user gave is wrong, or 1 when other
    processes were not found."""
    try:
        config = command.parse(sys.argv[1:] if argv is None else argv)
        compile_cache.switch_on()
        distributed.initialize(config.distributed, config.num_processes, config.process_id)
        run(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        distributed.close(str(error))
        return error.status
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the newest checkpoint", file=sys.stderr, flush=True)
        distributed.close("interrupted")
        return 130
    except Exception as error:
        if distributed.lost():
            return 1  # the watch has said who is gone, which is all there is to say
        distributed.close(distributed.explained(error))
        raise
    distributed.close()
    return 0


def run(
    config: Config,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    reward_funcs: Callable | Iterable[Callable] | None = None,
    optimizer: Any = None,
    callbacks: Iterable[Callback] = (),
) -> Result:
    """Runs a stage, or those of a pipeline, with objects in place of paths where they are given.

    Args:
      config: a stage's config or a Pipeline.
      train_dataset, eval_dataset: a `datasets.Dataset` or a list of dicts, in place of dataset_name (one stage only);
        eval_dataset may be a dict of several by name.
      reward_funcs: functions of (prompts, completions, completion_ids, **columns) -> B numbers or None, plain or async,
        or of arrays (`rlhf_jax.jax_reward`), beside those of the config; for PPO and RLOO.
      optimizer: an optax transformation with its own learning rate, in place of AdamW.
      callbacks: see `Callback`.

    Returns:
      Result.

    Raises:
      UserError: an option, a file, a row or a tensor is wrong; says which and what to do.
    """
    config = configfile.checked_types(config)
    arithmetic.check(config)
    arithmetic.check_devices_of(config, devices(config))
    objects = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    if callable(reward_funcs):
        reward_funcs = [reward_funcs]
    if isinstance(config, Pipeline):
        given = [name for name, value in {**objects, "reward_funcs": reward_funcs}.items() if value is not None]
        if given:
            raise UserError(f"{', '.join(given)}: a pipeline has three stages; run one stage with objects")
        return run_pipeline(config, optimizer=optimizer, callbacks=callbacks)
    if reward_funcs is not None:
        if not isinstance(config, PolicyConfig):
            raise UserError(f"reward_funcs are for PPO and RLOO, not for {stage_name(config)}")
        objects["reward_funcs"] = reward_funcs
    return run_stage(resolve(config), objects, optimizer, tuple(callbacks))


def devices(config: Config) -> int:
    """How many devices the run has; with --topology, those of a slice that is not there.

    Raises:
      UserError: --topology without --dry_run, or it is not known.
    """
    if config.topology is None:
        return jax.device_count()
    if not config.dry_run:
        raise UserError(f"--topology {config.topology} is for --dry_run: those TPUs are not there to train on")
    return len(footprint.topology_devices(config.topology))


def run_pipeline(config: Pipeline, *, optimizer: Any = None, callbacks: Iterable[Callback] = ()) -> Result:
    """Its stages, each in its folder; a finished one is not run again. Ends with a comparison of the policies."""
    config = resolve(config)
    results = {}
    for name, stage in stages_of(config).items():
        if distributed.is_main():
            print(f"== {name} -> {stage.run_dir}", flush=True)
        results[name] = run_stage(stage, {}, optimizer, tuple(callbacks))
    if not config.dry_run:
        compare.after_pipeline(config)
    last = list(results.values())[-1]
    return Result(config.run_dir, last.metrics, last.paths, results)


def run_stage(config: StageConfig, objects: dict[str, Any], optimizer: Any, callbacks: tuple[Callback, ...]) -> Result:
    """One stage from start to end."""
    name = stage_name(config)
    options = json.loads(configfile.to_json(config))
    options = {option: value for option, value in options.items() if option not in folder.NOT_KEPT}
    if config.dry_run:
        plan.show(config, say)  # all of them: who only waits for the first gives up after a minute
        return Result(config.run_dir, {}, {})
    finished = distributed.from_first(lambda: folder.check(config.run_dir, options, config.resume))
    if finished is not None:
        say(f"{name}: {config.run_dir} is finished (update {finished['step']}); nothing to do")
        return Result(config.run_dir, finished["metrics"], finished["paths"])

    # --- data and models, then the folder: a run that cannot start leaves nothing behind
    stage = STAGES[name](config, **objects, optimizer=optimizer)
    warnings = arithmetic.check_rows(config, stage.rows)
    stage.train_data.batch(config.seed, 0, stage.rows_per_update)  # too few rows are refused here
    run_folder = folder.RunFolder.open(config.run_dir, options, config.resume)
    for line in (*stage.report, *arithmetic.batch_lines(stage.config, stage.rows), *warnings):
        say(f"{name}: {line}")
    checkpoints = Checkpoints(run_folder.checkpoints, config.save_total_limit)
    state, start = stage.state, distributed.gather_objects(checkpoints.latest() or 0)[0]
    if start:
        state, _ = checkpoints.restore(start, state)
        say(f"{name}: continuing after update {start} of {stage.total_steps}")
    run_folder.cut(start)
    watch = Watch(stage, run_folder)
    state = watch.resumed(state)
    control = Control()
    logger = metrics.MetricLogger(
        run_folder.path,
        config.report_to,
        config.logging_steps,
        stage.total_steps,
        stage.progress,
        start,
        stage=name,
        watch=watch,
        callback=lambda step, values: [callback.on_step_end(step, values, control) for callback in callbacks],
    )

    # --- the loop, and what remains
    for callback in callbacks:
        callback.on_train_begin(stage, control)
    try:
        state, end = train(stage, state, start, control, run_folder, checkpoints, logger, callbacks, watch)
        say(f"{name}: writing the models to {config.run_dir}")
        paths = stage.export(state, config.run_dir)
        found = stage.final_metrics(state)
    except BaseException as error:
        distributed.leave(error)
        raise
    finally:
        logger.close()
        checkpoints.close()
        stage.close()
    lines = distributed.from_first(lambda: metrics.read_metrics(run_folder.metrics))
    final = {**{k: v for line in lines for k, v in line.items() if k != "step"}, **found}
    if distributed.is_main():
        for path in paths.values():
            model_card.write_model_card(path, name, options, final, base_model=stage.base_model)
    run_folder.finish(end, metrics=final, paths=paths)
    distributed.agree()  # the next stage reads what the first process has written
    for callback in callbacks:
        callback.on_train_end(stage, paths)
    return Result(config.run_dir, final, paths)


def train(
    stage, state, start: int, control: Control, run_folder, checkpoints, logger, callbacks, watch
) -> tuple[Any, int]:
    """Updates start + 1 to the last: (final state, updates done). Metrics are read one update late."""
    config = stage.config
    patience = Patience(stage, config, run_folder)
    step, began = start, time.perf_counter()
    compiling = compile_cache.Clock()
    eval_updates = arithmetic.eval_updates(config, stage.total_steps)

    def evaluate():
        values = stage.evaluate(state)
        logger.log(step, values)
        for callback in callbacks:
            callback.on_evaluate(step, values, control)
        if callbacks:
            share_wishes(control)
        return values

    if step < stage.total_steps:
        say(f"{stage.name}: compiling; the first update takes longer than all others")
    if config.eval_on_start and step == 0:
        evaluate()
    saved = step
    try:
        while step < stage.total_steps and not watch.over(step):
            started = time.perf_counter()
            state, found, seconds = stage.train_step(state, step)
            step += 1
            timings = {f"time/{phase}": value for phase, value in seconds.items()}
            timings["time/compile"] = compiling.since_last()
            timings["step_time"] = time.perf_counter() - started
            if step == start + 1:
                took = f"{timings['step_time']:.1f} s, {timings['time/compile']:.1f} s of them compiling"
                say(f"{stage.name}: the first update took {took}")
            # TRL's eps: episodes a second since the run (here: this process) began, everything included.
            timings["eps"] = (step - start) * config.batch_size / (time.perf_counter() - began)
            logger.log(step, found, timings)
            show(stage, run_folder, logger, step, stage.training_completions(), "training")
            if callbacks:
                share_wishes(control)

            over = watch.over(step)
            last = step == stage.total_steps or control.stop or over
            if over:
                say(f"{stage.name}: stopping; an alarm of early_stop was raised")
            if last or control.evaluate or every(eval_updates, step):
                control.evaluate = False
                if patience.exhausted(evaluate()):
                    say(f"{stage.name}: stopping; {patience.limit} evaluations without a better {stage.watched}")
                    control.stop = last = True
            if sample_now(config, step, stage.total_steps, last):
                show(stage, run_folder, logger, step, stage.samples(state), "samples")
            if last or control.save or every(config.save_steps, step):
                control.save = False
                saved = save(stage, checkpoints, logger, step, state)
            # A stop asked for while this update's metrics were read waits for the next, which ends as the last does.
            if last:
                break
    except UserError as error:
        # A reward failed, before anything was learned from it: what the run has done so far is whole. Of several
        # processes all are here then; with another error this one may be alone, and a save waits for all.
        if isinstance(error, NonFinite):
            # The updates from that one on have changed nothing; with some of its steps taken the state is of no update.
            state, step = watch.resumed(state), error.update - 1 if error.whole else saved
        if step > saved and (jax.process_count() == 1 or isinstance(error, (RewardFailure, NonFinite))):
            save(stage, checkpoints, logger, step, state)
            say(f"{stage.name}: stopped by an error after update {step}, which is saved; the same command continues")
        raise
    finally:
        compiling.close()
    return state, step


def save(stage, checkpoints, logger, step: int, state) -> int:
    """A checkpoint of update `step`, its metrics on disk before it."""
    logger.flush()
    checkpoints.save(step, state, {"total_steps": stage.total_steps})
    return step


def show(stage, run_folder, logger, step: int, rows: list[dict[str, Any]], what: str) -> None:
    """A table of completions: all rows in the run's folder, the first in the terminal and in TensorBoard."""
    if not rows:
        return
    config = stage.config
    if config.log_unique_prompts:
        rows = tables.unique_prompts(rows)
    run_folder.write_completions(step, rows, what)
    if distributed.is_main():
        limit = config.num_completions_to_print
        tables.show(rows, f"{stage.name}: {what} after update {step}", limit)
        logger.text(step, f"completions/{what}", tables.markdown(rows[:limit]))


class Patience:
    """Early stopping on the stage's watched metric; its memory is metrics.jsonl, so that a resume forgets nothing."""

    def __init__(self, stage, config, run_folder):
        self.limit = getattr(config, "early_stopping_patience", 0)
        self.name = stage.watched
        self.values = distributed.from_first(lambda: self._so_far(run_folder.metrics)) if self.limit else []

    def _so_far(self, path: str) -> list[float]:
        lines = metrics.read_metrics(path) if os.path.exists(path) else []
        return [line[self.name] for line in lines if self.name in line]

    def exhausted(self, values: dict[str, float]) -> bool:
        """True when the last `limit` evaluations were no better than the best before them."""
        if not self.limit or self.name not in values:
            return False
        self.values.append(values[self.name])
        return len(self.values) > self.limit and min(self.values[-self.limit :]) >= min(self.values[: -self.limit])


def share_wishes(control: Control) -> None:
    """What a callback asked for on one process holds on all: they stop, save and evaluate together."""
    for wishes in distributed.gather_objects(dataclasses.asdict(control)):
        for wish, asked in wishes.items():
            setattr(control, wish, getattr(control, wish) or asked)


def every(n: int, step: int) -> bool:
    """Whether update `step` is one of each `n`; 0: never."""
    return n > 0 and step % n == 0


def sample_now(config: StageConfig, step: int, total: int, last: bool) -> bool:
    """Whether sample completions are due: num_sample_generations times in a run, evenly as TRL, and at its end."""
    n = getattr(config, "num_sample_generations", 0)
    return n > 0 and (last or step % max(1, total // n) == 0)


def say(line: str) -> None:
    """A line for the terminal, from the first process only."""
    if distributed.is_main():
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

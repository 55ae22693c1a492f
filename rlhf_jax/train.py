"""python -m rlhf_jax.train --config CONFIG: the command line and the loop, read top to bottom like a document.

A run is: check everything that needs no model; open the data and the models; continue from the newest checkpoint;
update, evaluate, sample and save until the end; export. `run` is the same with objects in place of paths.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from rlhf_jax.config import (
    Config,
    Pipeline,
    PolicyConfig,
    StageConfig,
    batch_sizes,
    command_line,
    diff,
    resolve,
    stage_name,
    stages_of,
)
from rlhf_jax.config import files as config_files
from rlhf_jax.dry_run import memory as dry_run_memory
from rlhf_jax.dry_run import report
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import compare
from rlhf_jax.metrics import logger as metrics_logger
from rlhf_jax.parallel import multihost
from rlhf_jax.runtime import compile_cache, determinism, hub_upload, model_card, out_of_memory, progress, trackers
from rlhf_jax.runtime import run_folder as run_folders
from rlhf_jax.runtime.callbacks import Callback, Control
from rlhf_jax.runtime.checkpoint import Checkpoints
from rlhf_jax.runtime.loop import Loop, say, warn
from rlhf_jax.runtime.monitor import Watch
from rlhf_jax.runtime.stopping import CONTINUES, Stopped, Stops
from rlhf_jax.stages import STAGES
from rlhf_jax.utils import text


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
    """The command: 0 when done; 75 when it was stopped from outside, saved; 2 with one line of explanation when
    something the user gave is wrong, or 1 when other processes were not found."""
    text.never_fail_to_print()
    began = time.monotonic()
    try:
        config, recipe = command_line.parse_recipe(sys.argv[1:] if argv is None else argv)
        compile_cache.switch_on()
        if config.deterministic:
            determinism.switch_on()
        multihost.initialize(config.distributed, config.num_processes, config.process_id)
        result = run(config, recipe=recipe)
        if not config.dry_run and multihost.is_main():
            print("\n".join(progress.summary(config, result, time.monotonic() - began)), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        multihost.close(str(error))
        return error.status
    except Stopped as stopped:
        print(stopped, file=sys.stderr, flush=True)
        # Asked together, they end together; asked alone, before there was anything to save, one tells the others.
        multihost.close(None if stopped.together else str(stopped))
        return stopped.status
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the newest checkpoint", file=sys.stderr, flush=True)
        multihost.close("interrupted")
        return 130
    except Exception as error:
        if multihost.lost():
            return 1  # the watch has said who is gone, which is all there is to say
        multihost.close(multihost.explained(error))
        raise
    multihost.close()
    return 0


def run(
    config: Config,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    reward_funcs: Callable | Iterable[Callable] | None = None,
    optimizer: Any = None,
    callbacks: Iterable[Callback] = (),
    recipe: command_line.Recipe | None = None,
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
      recipe: what the config was made from, for recipe.json, which a report tells the differences from.

    Returns:
      Result.

    Raises:
      UserError: an option, a file, a row or a tensor is wrong; says which and what to do.
      Stopped: a signal or max_minutes ended it; the same call continues. Signals are heard where the main thread calls.
    """
    began = time.monotonic()
    config = config_files.checked_types(config)
    batch_sizes.check(config)
    batch_sizes.check_devices_of(config, devices(config))
    for stage in stages_of(config).values():
        multihost.from_first(lambda to=stage.report_to: trackers.wanted(to))
    if not config.dry_run:
        for stage in stages_of(resolve(config)).values():
            multihost.from_first(lambda of=stage: hub_upload.repository(of))
    objects = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    if callable(reward_funcs):
        reward_funcs = [reward_funcs]
    if isinstance(config, Pipeline):
        given = [name for name, value in {**objects, "reward_funcs": reward_funcs}.items() if value is not None]
        if given:
            raise UserError(f"{', '.join(given)}: a pipeline has three stages; run one stage with objects")
        with Stops(config.max_minutes, began) as stops:
            return run_pipeline(config, stops, optimizer=optimizer, callbacks=callbacks, recipe=recipe)
    if reward_funcs is not None:
        if not isinstance(config, PolicyConfig):
            raise UserError(f"reward_funcs are for PPO and RLOO, not for {stage_name(config)}")
        objects["reward_funcs"] = reward_funcs
    with Stops(config.max_minutes, began) as stops:
        return run_stage(resolve(config), stops, objects, optimizer, tuple(callbacks), recipe)


def devices(config: Config) -> int:
    """How many devices the run has; with --topology, those of a slice that is not there.

    Raises:
      UserError: --topology without --dry_run, or it is not known.
    """
    if config.topology is None:
        return jax.device_count()
    if not config.dry_run:
        raise UserError(f"--topology {config.topology} is for --dry_run: those TPUs are not there to train on")
    return len(dry_run_memory.topology_devices(config.topology))


def run_pipeline(
    config: Pipeline,
    stops: Stops,
    *,
    optimizer: Any = None,
    callbacks: Iterable[Callback] = (),
    recipe: command_line.Recipe | None = None,
) -> Result:
    """Its stages, each in its folder; a finished one is not run again. Ends with a comparison of the policies."""
    config = resolve(config)
    results = {}
    for name, stage in stages_of(config).items():
        if multihost.is_main():
            print(f"== {name} -> {stage.run_dir}", flush=True)
        results[name] = run_stage(stage, stops, {}, optimizer, tuple(callbacks), recipe)
    if not config.dry_run:
        compare.after_pipeline(config)
    last = list(results.values())[-1]
    return Result(config.run_dir, last.metrics, last.paths, results)


def run_stage(
    config: StageConfig,
    stops: Stops,
    objects: dict[str, Any],
    optimizer: Any,
    callbacks: tuple[Callback, ...],
    recipe: command_line.Recipe | None,
) -> Result:
    """One stage from start to end."""
    name = stage_name(config)
    options = kept(config)
    if config.dry_run:
        report.show(config, say)  # all of them: who only waits for the first gives up after a minute
        return Result(config.run_dir, {}, {})
    # Micro-batches that show in the numbers may not change; those that do not, may.
    same = () if config.depends_on_micro_batching else diff.ROUNDING
    whose = (config.run_dir, options, config.resume, (*diff.MAY_DIFFER, *same), config.override_resume)
    finished = multihost.from_first(lambda: run_folders.check(*whose))
    if finished is not None:
        say(f"{name}: {config.run_dir} is finished (update {finished['step']}); nothing to do")
        return Result(config.run_dir, finished["metrics"], finished["paths"])
    for line in multihost.from_first(lambda: run_folders.changes(config.run_dir, options)):
        say(f"{name}: changed since the run began: {line}")

    # --- data and models, then the folder: a run that cannot start leaves nothing behind
    with out_of_memory.explained(config, lambda: "loading"):
        stage = STAGES[name](config, **objects, optimizer=optimizer)
    warnings = batch_sizes.check_rows(config, stage.rows)
    stage.train_data.batch(config.seed, 0, stage.rows_per_update)  # too few rows are refused here
    inputs = multihost.from_first(stage.inputs)
    run_folder = run_folders.RunFolder.open(*whose, inputs)
    callbacks = (*callbacks, *trackers.callbacks_of(config.report_to))
    try:
        if recipe is not None and name in (of_recipe := stages_of(recipe.config)):
            run_folder.write_recipe(recipe.name, kept(of_recipe[name]))
        for line in (*stage.report, *batch_sizes.batch_lines(stage.config, stage.rows), *warnings):
            say(f"{name}: {line}")
        return run_in(run_folder, stage, stops, options, callbacks)
    finally:
        for callback in callbacks:
            callback.close()
        stage.close()
        run_folder.close()


def kept(config: StageConfig) -> dict[str, Any]:
    """The options of a stage that its folder keeps."""
    options = json.loads(config_files.to_json(config))
    return {option: value for option, value in options.items() if option not in diff.NOT_KEPT}


def run_in(run_folder, stage, stops: Stops, options: dict[str, Any], callbacks: tuple[Callback, ...]) -> Result:
    """A stage whose folder is open: from its newest checkpoint to the exported models."""
    config, name = stage.config, stage.name
    checkpoints = Checkpoints(
        run_folder.checkpoints, config.save_total_limit, greater_is_better=config.greater_is_better, warn=warn
    )
    check_room(checkpoints, stage)
    state, extra, start = checkpoints.restore_newest(stage.state) or (stage.state, {}, 0)
    due = extra.get("due") or {}
    if start:
        say(f"{name}: continuing after update {start} of {stage.total_steps}")
    written = start - 1 if due else start
    run_folder.cut(start, written)
    watch = Watch(stage, run_folder)
    state = watch.resumed(state)
    control = Control()
    terminal = progress.TerminalLines(
        stage=name, total_steps=stage.total_steps, logging_steps=config.logging_steps, names=stage.progress
    )
    logger = metrics_logger.MetricLogger.open(
        run_folder.path,
        report_to=config.report_to,
        start_step=written,
        terminal=terminal,
        monitor=watch,
        callback=lambda step, values: [callback.on_step_end(step, values, control) for callback in callbacks],
    )

    # --- the loop, and what remains
    for callback in callbacks:
        callback.on_train_begin(stage, control)
    loop = Loop(stage, start, control, run_folder, checkpoints, logger, callbacks, stops, watch)
    try:
        with progress.Panel(stage, terminal, lambda: (loop.step, loop.doing)):
            end = start
            if not extra.get("ended") or extra["total_steps"] != stage.total_steps:
                state, end = loop.train(state, due)
            stops.loop(False)
            if (why := stops.asked()) is not None:
                done = f"{name}: stopped {why} after the last update, which is saved; {CONTINUES}"
                raise Stopped(done, together=True)
            if config.load_best_model_at_end and (best := checkpoints.best()) not in (None, end):
                say(f"{name}: update {best} has the best {config.metric_for_best_model}: exporting that")
                state, _ = checkpoints.restore(best, state)
            say(f"{name}: writing the models to {config.run_dir}")
            loop.aside = "export"
            paths = stage.export(state, config.run_dir)
            found = stage.final_metrics(state)
    except BaseException as error:
        if not (isinstance(error, Stopped) and error.together):
            multihost.leave(error)
        raise
    finally:
        stops.loop(False)
        try:
            logger.close()
        finally:
            checkpoints.close()
    lines = multihost.from_first(lambda: metrics_logger.read_metrics(run_folder.metrics))
    final = {**{k: v for line in lines for k, v in line.items() if k != "step"}, **found}
    if multihost.is_main():
        curves = {of: [line[of] for line in lines if of in line] for of in stage.progress}
        for path in paths.values():
            model_card.write_model_card(path, name, options, final, base_model=stage.base_model, curves=curves)
    run_folder.finish(end, metrics=final, paths=paths)
    if multihost.is_main() and config.push_to_hub:
        push(config, paths)
    multihost.agree()  # the next stage reads what the first process has written
    for callback in callbacks:
        callback.on_train_end(stage, paths)
    return Result(config.run_dir, final, paths)


def push(config: StageConfig, paths: dict[str, str]) -> None:
    """Uploads the model that the stage is about; of adapters the merged one where there is one."""
    try:
        name = hub_upload.repository(config)
    except UserError as error:  # what was known at the start may have changed since
        return warn(str(error))
    folder = next(paths[of] for of in ("policy", "reward_model") if of in paths)
    if url := hub_upload.push(config, name, folder, warn):
        say(f"{stage_name(config)}: uploaded {folder} to {url}")


def check_room(checkpoints: Checkpoints, stage) -> None:
    """Says before anything is computed that no checkpoint would fit."""

    def look():
        needed, free = checkpoints.room(stage.state)
        if free is not None and free < needed:
            raise UserError(
                f"--run_dir {stage.config.run_dir}: a checkpoint takes up to {needed / 2**20:,.0f} MiB, and "
                f"{free / 2**20:,.0f} MiB are free there. Free some space, or give another --run_dir"
            )

    multihost.from_first(look)


if __name__ == "__main__":
    sys.exit(main())

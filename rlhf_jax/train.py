"""python -m rlhf_jax.train --config CONFIG: the command and the training loop, from top to bottom.

`main` parses the command line, `run` checks the config, and `train_stage` opens data and models, restores the newest
checkpoint, updates, evaluates, samples and saves until the end, and exports. `run` is also the command with objects in
place of paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from rlhf_jax import storage
from rlhf_jax.config import (
    Config,
    Pipeline,
    PolicyConfig,
    StageConfig,
    batch_sizes,
    command_line,
    resolve,
    stage_name,
    stages_of,
)
from rlhf_jax.config import files as config_files
from rlhf_jax.config.check import check
from rlhf_jax.dry_run import micro_batches, report, topologies
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import compare
from rlhf_jax.metrics import logger as metrics_logger
from rlhf_jax.models.placement import AbstractWeights
from rlhf_jax.parallel import jax_settings, multihost, platforms, xla_flags
from rlhf_jax.runtime import (
    compile_cache,
    config_diff,
    environment,
    hub_upload,
    model_card,
    out_of_memory,
    progress,
    trackers,
)
from rlhf_jax.runtime import run_folder as run_folders
from rlhf_jax.runtime.bucket_checkpoints import BucketCheckpoints, open_checkpoints
from rlhf_jax.runtime.callbacks import Callback, Control, call
from rlhf_jax.runtime.checkpoint import Checkpoints, reason_of
from rlhf_jax.runtime.loop import Loop, Patience, log, updates_between, warn
from rlhf_jax.runtime.monitor import Monitor
from rlhf_jax.runtime.stopping import RESUME_HINT, Stopped, Stops
from rlhf_jax.stages import disk, open_stage
from rlhf_jax.stages.throughput import Throughput
from rlhf_jax.utils.output import guarded_output
from rlhf_jax.utils.text import bytes_text


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


@guarded_output()
def main(argv: Sequence[str] | None = None, parsed: tuple[Config, command_line.Recipe] | None = None) -> int:
    """The command: 0 when done; 75 when it was stopped from outside, saved; 2 with one line of explanation when
    something the user gave is wrong, or 1 when other processes were not found. `parsed`: what `parse_recipe` made of
    the words, where it is known."""
    began = time.monotonic()
    try:
        config, recipe = parsed or command_line.parse_recipe(sys.argv[1:] if argv is None else argv)
        start_process(config)
        result = run(config, recipe=recipe)
        if not config.dry_run and multihost.is_main():
            print("\n".join(progress.summary(result, time.monotonic() - began)), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        multihost.close(str(error))
        return error.status
    except Stopped as stopped:
        print(stopped, file=sys.stderr, flush=True)
        # Processes that stopped together need no message; one that stopped alone before the loop ends the others.
        multihost.close(None if stopped.together else str(stopped))
        return stopped.status
    except KeyboardInterrupt:
        print("interrupted; rerun the command to resume from the newest checkpoint", file=sys.stderr, flush=True)
        multihost.close("interrupted")
        return 130
    except Exception as error:
        if multihost.peer_died():
            return 1  # parallel.liveness has already reported which process died
        multihost.close(multihost.error_text(error))
        raise
    multihost.close()
    return 0


def start_process(config: Config) -> None:
    """What a config asks of the whole process, before the devices start: flags of XLA, the other processes."""
    xla_flags.add_those_of_run(config.deterministic)
    multihost.initialize(config.distributed, config.num_processes, config.process_id)


@storage.from_here()
@jax_settings.pinned()
def run(
    config: Config,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    reward_funcs: Callable | Iterable[Callable] | None = None,
    tools: Iterable[Callable] | None = None,
    environment_factory: Callable | Mapping[str, Callable] | None = None,
    optimizer: Any = None,
    callbacks: Iterable[Callback] = (),
    recipe: command_line.Recipe | None = None,
) -> Result:
    """Runs a stage, or those of a pipeline, with objects in place of paths where they are given.

    Args:
      config: a stage's config or a Pipeline.
      train_dataset: a `datasets.Dataset`, a pandas DataFrame, a list of dicts or a dict of lists, in place of
        dataset_name (one stage only).
      eval_dataset: the same for evaluation; a dict of several by name too. Without it and eval_dataset_name, a run on
        train_dataset is not evaluated.
      reward_funcs: functions of (prompts, completions, completion_ids, **columns) -> B numbers or None, plain or async,
        or of arrays (`rlhf_jax.jax_reward`), beside those of the config; for PPO, RLOO and GRPO.
      tools: functions that the policy may call, plain or async, beside those of the config (docs/tools.md).
      environment_factory: makes environments, in place of that of the config: a callable, or a dict of them by the
        name that the column 'environment' of the data has (docs/tools.md).
      optimizer: an optax transformation with its own learning rate, in place of AdamW.
      callbacks: see `Callback`.
      recipe: the config before the flags, for recipe.json; a report shows what differs from it.

    Returns:
      Result.

    Raises:
      UserError: an option, a file, a row or a tensor is wrong; says which and what to do.
      Stopped: a signal or max_minutes ended it; the same call continues. Signals are heard where the main thread calls.
    """
    began = time.monotonic()
    config = resolve(config)
    xla_flags.add_those_of_run()
    compile_cache.enable()
    check(config)
    platforms.check()  # which starts the devices, after all that needs none
    batch_sizes.check_devices_of(config, device_count(config))
    stages = stages_of(config)
    for name, stage in stages.items():
        multihost.from_first(lambda stage=stage: trackers.parse_report_to(stage.report_to))
        if not config.dry_run:
            multihost.from_first(lambda stage=stage, name=name: hub_upload.repository(stage, name))
    objects = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    # Lists, since a stage may be opened twice.
    objects["reward_funcs"] = [reward_funcs] if callable(reward_funcs) else reward_funcs and list(reward_funcs)
    objects |= {"tools": tools and list(tools), "environment_factory": environment_factory}
    objects = {name: value for name, value in objects.items() if value is not None}
    is_pipeline = isinstance(config, Pipeline)
    if is_pipeline and objects:
        raise UserError(f"{', '.join(objects)}: a pipeline has several stages; run one stage with objects")
    for name in ("reward_funcs", "tools", "environment_factory"):
        if name in objects and not isinstance(config, PolicyConfig):
            raise UserError(f"{name} are for PPO, RLOO and GRPO, not for {stage_name(config)}")

    results = {}
    with guarded_output(), one_error(), Stops(config.max_minutes, began) as stops:
        for name, stage in stages.items():
            if is_pipeline:
                log(f"== {name} -> {stage.run_dir}")
            results[name] = train_stage(
                stage,
                stops=stops,
                objects=objects,
                optimizer=optimizer,
                callbacks=callbacks,
                recipe=recipe,
                later=[*stages.values()][len(results) + 1 :],
            )
        if is_pipeline and not config.dry_run:
            compare.after_pipeline(stages)
    last = list(results.values())[-1]
    return Result(config.run_dir, last.metrics, last.paths, results) if is_pipeline else last


@contextlib.contextmanager
def one_error() -> Iterator[None]:
    """A UserError or Stopped leaves with its cause alone: its text says what is wrong, and what was handled when it was
    raised, as the end of an abandoned update, is no part of that. An earlier UserError is its cause."""
    try:
        yield
    except (UserError, Stopped) as error:
        earlier = error.__context__ if isinstance(error.__context__, UserError) else None
        raise error from error.__cause__ or earlier


def train_stage(
    config: StageConfig,
    *,
    stops: Stops,
    objects: dict[str, Any],
    optimizer: Any,
    callbacks: Iterable[Callback],
    recipe: command_line.Recipe | None,
    later: Sequence[StageConfig] = (),
) -> Result:
    """One stage from start to end: open, restore, update until the last step, export.

    Args:
      config: resolved.
      stops: what may end the run from outside.
      objects: train_dataset, eval_dataset, reward_funcs, tools and environment_factory, those that were
        given.
      optimizer, callbacks, recipe: as `run`.
      later: the stages of the pipeline after it.
    """
    name = stage_name(config)
    if config.dry_run:
        report.show(config, log)  # on every process: one that waited for the first would give up after a minute
        return Result(config.run_dir, {}, {})

    # --- a finished stage is not run again
    finished = multihost.from_first(lambda: run_folders.check(*folder_claim(config)))
    if finished is not None:
        log(f"{name}: {config.run_dir} is finished (update {finished['step']}); nothing to do")
        paths = finished["paths"].items()  # the folder may have been moved
        paths = {model: os.path.join(config.run_dir, os.path.basename(path)) for model, path in paths}
        return Result(config.run_dir, finished["metrics"], paths)

    # --- micro-batches as large as memory allows, or those that the run began with
    date = multihost.from_first(lambda: run_folders.template_date(config.run_dir))
    opened_with = {**objects, "optimizer": optimizer, "template_date": date}
    config, _ = micro_batches.settled(
        config,
        lambda config, mesh: open_stage(config, **opened_with, weights=AbstractWeights(mesh)),
        lambda line: log(f"{name}: {line}"),
    )
    claim, options = folder_claim(config), saved_options(config)
    for line in multihost.from_first(lambda: run_folders.changes(config.run_dir, options)):
        log(f"{name}: changed since the run began: {line}")
    surroundings = environment.environment()
    for line in multihost.from_first(lambda: run_folders.environment_changes(config.run_dir, surroundings)):
        log(f"{name}: changed since the run's last process, may change rounding: {line}")

    with contextlib.ExitStack() as stack:
        # --- open data and models, then the folder: a run that cannot start leaves nothing behind
        with out_of_memory.translate_errors(config, lambda: "loading"):
            ahead = jax.process_count() == 1  # processes that compile in another order could wait for each other
            stage = open_stage(config, **opened_with, compile_ahead=ahead)
        stack.callback(stage.close)
        warnings = batch_sizes.check_rows(config, stage.rows)
        stage.train_data.batch(config.seed, 0, stage.rows_per_update)  # refuses too few rows
        inputs = multihost.from_first(stage.inputs)
        run_folder = run_folders.RunFolder.open(*claim, inputs=inputs, environment=surroundings)
        stack.callback(run_folder.close)
        callbacks = (*callbacks, *trackers.callbacks_of(config.report_to))
        for callback in reversed(callbacks):
            stack.callback(callback.close)
        stage.record_calls(run_folder.growing_files)
        if recipe is not None and name in (recipe_stages := stages_of(recipe.config)):
            run_folder.write_recipe(recipe.name, saved_options(recipe_stages[name]))
        for line in (*stage.messages, *batch_sizes.batch_lines(stage.config, stage.rows), *warnings):
            log(f"{name}: {line}")

        # --- restore
        terminal = progress.TerminalLines(
            stage=name, total_steps=stage.total_steps, logging_steps=config.logging_steps, names=stage.progress
        )
        loop, extra = restored_loop(stage, run_folder, callbacks, stops, terminal, later)

        with closing(loop, stops), progress.Panel(stage, terminal, lambda: (loop.step, loop.doing)):
            # --- update, evaluate, sample, save
            if not extra.get("ended") or extra["total_steps"] != stage.total_steps:
                update_to_the_end(loop)

            # --- finish
            stops.set_in_loop(False)
            if (why := stops.reason()) is not None:
                message = f"{name}: stopped {why} after the last update, which is saved; {RESUME_HINT}"
                raise Stopped(message, together=True)
            end = loop.step
            with write_errors(loop):
                local = loop.export(stack.enter_context(export_folder(run_folder.path)))
        return finish(loop, callbacks, options, end=end, local=local, objects=objects)


def restored_loop(
    stage,
    run_folder,
    callbacks: Sequence[Callback],
    stops: Stops,
    terminal: progress.TerminalLines,
    later: Sequence[StageConfig],
) -> tuple[Loop, dict[str, Any]]:
    """The loop at the newest checkpoint, or at the start, and what the checkpoint keeps beside the state. `later`: the
    stages of the pipeline after this one."""
    config, name = stage.config, stage.name
    checkpoints = open_checkpoints(
        run_folder.checkpoints, config.save_total_limit, greater_is_better=config.greater_is_better, warn=warn
    )
    check_disk_space(checkpoints, stage, later)
    state, extra, start = checkpoints.restore_newest(stage.state) or (stage.state, {}, 0)
    if extra.get("pending"):
        raise UserError(
            f"{run_folder.checkpoints}/{start} is of an earlier version, which stopped within what follows an update: "
            "remove it to resume from the checkpoint before it"
        )
    if start:
        log(f"{name}: resuming after update {start} of {stage.total_steps}")
        for line in stage.restore_host_state(extra):
            log(f"{name}: {line}")
    run_folder.cut(start)
    monitor, patience, control = Monitor(stage, run_folder), Patience(stage, run_folder), Control()
    due, line = extra.get("due", ()), None
    if due:
        line = run_folders.Line(*multihost.from_first(lambda: run_folder.take_line(start)))
    throughput = Throughput(stage)
    logger = metrics_logger.MetricLogger.open(
        run_folder.path,
        report_to=config.report_to,
        start_step=start if line is None else start - 1,
        terminal=terminal,
        monitor=monitor,
        tokens=extra.get("num_tokens", 0),
        throughput=throughput,
        records_rows=stage.records_rows,
        mirror=run_folder.mirror,
        ensure_held=run_folder.lock.ensure_held,
        callback=lambda step, metrics: call(callbacks, "on_step_end", step, metrics, control),
    )
    call(callbacks, "on_train_begin", stage, control)
    loop = Loop(
        stage,
        state=monitor.resumed(stage.resumed(state)),
        start=start,
        run_folder=run_folder,
        checkpoints=checkpoints,
        logger=logger,
        callbacks=callbacks,
        control=control,
        stops=stops,
        throughput=throughput,
        monitor=monitor,
        patience=patience,
        due=due,
    )
    if line is not None:
        loop.restore_line(line)
    return loop, extra


def update_to_the_end(loop: Loop) -> None:
    """Updates, evaluates, samples and saves until the last update; first what is due after the checkpoint's."""
    stage = loop.stage
    with loop.guarded():
        if loop.start < stage.total_steps:
            log(f"{stage.name}: compiling; the first update takes longer than all others")
        if loop.start == 0 and loop.config.eval_on_start:
            loop.evaluate()
        while loop.due or loop.updates_remain():
            if not loop.due:
                loop.begin_update()
                state, metrics, seconds = stage.train_step(loop.state, loop.step, loop.stops.tick)
                loop.end_update(state, metrics, seconds)
            if loop.finish_update():
                break


@contextlib.contextmanager
def closing(loop: Loop, stops: Stops) -> Iterator[None]:
    """Closes the logger and the checkpoints at the end; an error of this process alone ends the others too."""
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, Stopped) and error.together):
            multihost.announce_error(error)
        raise
    finally:
        stops.set_in_loop(False)
        try:
            loop.logger.close()
        finally:
            loop.checkpoints.close()


@contextlib.contextmanager
def write_errors(loop: Loop) -> Iterator[None]:
    """Raises a UserError where models cannot be written: a full disk, a limit on the sizes of files."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # tokenizers raises no OSError
        if not (isinstance(error, OSError) or "os error" in str(error)):
            raise
        saved = loop.step in loop.folder.saved_steps()
        then = f"only exports: update {loop.step} is saved" if saved else "continues from the newest checkpoint"
        raise UserError(
            f"{loop.stage.name}: the models could not be written to {loop.config.run_dir}: {reason_of(error)}. Free "
            f"{bytes_text(disk.exported_bytes(loop.stage))} there, and rerun the command, which {then}"
        ) from error


def finish(
    loop: Loop,
    callbacks: Sequence[Callback],
    options: dict[str, Any],
    *,
    end: int,
    local,
    objects: dict[str, Any],
) -> Result:
    """Model cards, the models in their places, the mark of a finished run, and the upload to the hub, after the models
    were written to `local` paths."""
    stage, config, run_folder = loop.stage, loop.config, loop.folder
    paths = {model: os.path.join(config.run_dir, os.path.basename(path)) for model, path in local.items()}
    lines = multihost.from_first(lambda: metrics_logger.read_metrics(run_folder.metrics))
    metrics = {k: v for line in lines for k, v in line.items() if k != "step"}
    if multihost.is_main():
        curves = {metric: [line[metric] for line in lines if metric in line] for metric in stage.progress}
        more = {"base_model": stage.base_model, "curves": curves, "recipe": run_folder.recipe()}
        with write_errors(loop):
            for path in local.values():
                model_card.write_model_card(path, stage.name, options, metrics, **more, objects=tuple(objects))
    with write_errors(loop):
        published = multihost.from_first(lambda: run_folder.publish(local))
        run_folder.finish(end, metrics=metrics, paths=paths, objects=tuple(objects))
    if multihost.is_main() and config.push_to_hub:
        push(config, local if storage.is_remote(run_folder.path) else published, paths)
    multihost.agree()  # the next stage reads what the first process has written
    call(callbacks, "on_train_end", stage, paths)
    return Result(config.run_dir, metrics, paths)


@contextlib.contextmanager
def export_folder(run_folder: str) -> Iterator[str]:
    """The local folder that models are exported to before they are moved or uploaded to the run's, so that half an
    export has no name of a model."""
    if storage.is_remote(run_folder):
        with tempfile.TemporaryDirectory(prefix="rlhf_jax-export-") as folder:
            yield folder
        return
    folder = os.path.join(run_folder, ".export")
    if multihost.is_main():
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    try:
        yield folder
    finally:
        if multihost.is_main():
            shutil.rmtree(folder, ignore_errors=True)


def device_count(config: Config) -> int:
    """The number of devices: those of this run, or those that --topology names.

    Raises:
      UserError: --topology without --dry_run, or it is not known.
    """
    if config.topology is None:
        return jax.device_count()
    if not config.dry_run:
        raise UserError(f"--topology {config.topology} needs --dry_run: its devices are compiled for, not used")
    return len(topologies.topology_devices(config.topology))


def saved_options(config: StageConfig) -> dict[str, Any]:
    """The options of a stage that its folder keeps."""
    return config_diff.in_config_json(json.loads(config_files.to_json(config)))


def folder_claim(config: StageConfig) -> tuple[str, dict[str, Any], str, Collection[str], bool]:
    """What a stage asks of its folder: the arguments of `run_folder.check`."""
    may_change = config_diff.may_change(rounding=not config.depends_on_micro_batching)
    return config.run_dir, saved_options(config), config.resume, may_change, config.override_resume


def finished_metrics(config: Config) -> dict[str, float] | None:
    """The last stage's metrics of a finished run, a pipeline's with its comparison; None if something is left to do.
    Starts no device.

    Raises:
      UserError: as `run_folder.check`.
    """
    stages = stages_of(config)
    finished = [run_folders.check(*folder_claim(stage)) for stage in stages.values()]
    compared = not isinstance(config, Pipeline) or storage.exists(
        os.path.join([*stages.values()][-1].run_dir, "comparison.json")
    )
    return finished[-1]["metrics"] if compared and None not in finished else None


def push(config: StageConfig, local: dict[str, str], paths: dict[str, str]) -> None:
    """Uploads the model that the stage is about from its `local` folder; of adapters the merged one where there is one.
    `paths` are where the run keeps its models."""
    try:
        name = hub_upload.repository(config, stage_name(config))
    except UserError as error:  # what was known at the start may have changed since
        return warn(str(error))
    model = next(model for model in ("policy", "reward_model") if model in local)
    if url := hub_upload.push(config, name, local[model], paths[model], warn):
        log(f"{stage_name(config)}: uploaded {paths[model]} to {url}")


def check_disk_space(checkpoints: Checkpoints | BucketCheckpoints, stage, later: Sequence[StageConfig]) -> None:
    """Refuses a run before anything is computed if what it and the stages after it write would not fit on the disk."""

    def check():
        checkpoint, free = checkpoints.room(stage.state)
        parts = {"1 checkpoint": checkpoint}
        if isinstance(checkpoints, Checkpoints):  # else it is the disk of temporary files
            every = updates_between(stage.config.save_steps, stage.total_steps) or stage.total_steps
            saves = math.ceil(stage.total_steps / every)
            parts = disk.needs(stage, checkpoint, checkpoints.steps(), saves, later)
        if free is not None and free < (needed := sum(parts.values())):
            what = ", ".join(f"{name} {bytes_text(count)}" for name, count in parts.items())
            raise UserError(
                f"--run_dir {stage.config.run_dir}: the command writes up to {bytes_text(needed)} ({what}), and "
                f"{bytes_text(free)} are free there. Free some space, give another --run_dir, or keep fewer "
                "checkpoints (--save_total_limit, --save_steps)"
            )

    multihost.from_first(check)


if __name__ == "__main__":
    sys.exit(main())

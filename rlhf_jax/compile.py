"""`rlhf-jax compile`: compiles the programs of a run's first update into a folder that the run reads."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from rlhf_jax.config import StageConfig, batch_sizes, command_line, resolve, stages_of
from rlhf_jax.config.check import check
from rlhf_jax.dry_run import memory, micro_batches, report
from rlhf_jax.errors import UserError
from rlhf_jax.models.placement import AbstractWeights
from rlhf_jax.parallel import jax_settings, platforms, xla_flags
from rlhf_jax.parallel.compile_ahead import CompileAhead, can_foresee
from rlhf_jax.runtime import compile_cache
from rlhf_jax.stages import Stage, open_stage

USAGE = """usage: rlhf-jax compile --config CONFIG [--out DIR] [--OPTION VALUE ...]

Compiles the programs of the first update of each stage, on the devices that the run will have, and keeps them on disk:
in DIR, or where runs keep theirs. No weights are loaded. A run with the same config, options, versions and kind of
device reads them:

  JAX_COMPILATION_CACHE_DIR=DIR rlhf-jax train --config CONFIG

Where one of these differs, the run compiles. The options are those of rlhf-jax train. A stage whose models an earlier
stage has yet to train is left out."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when done; 2 with one line of explanation when something the user gave is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or {"-h", "--help"} & {*words}:
        print(USAGE)
        return 0 if words else 2
    try:
        flags = command_line.split_flags(words)
        folders = [values for name, values in flags if name == "out"]
        if any(len(values) != 1 for values in folders):
            raise UserError("--out takes one folder")
        if all(name != "config" for name, _ in flags):
            raise UserError("--config is missing: the config of the run, or its config.json")
        rest = [word for name, values in flags if name != "out" for word in (f"--{name}", *values)]
        compile_run(command_line.parse_recipe(rest)[0], folders[-1][0] if folders else None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    return 0


def open_abstract(config: StageConfig, mesh: Mesh) -> Stage:
    """The stage of a config with shapes in place of params."""
    return open_stage(config, weights=AbstractWeights(mesh))


@jax_settings.pinned()
def compile_run(config, out: str | None) -> None:
    """Compiles the stages of a config.

    Args:
      config: a stage's or a Pipeline.
      out: a folder; None: the one that runs use.

    Raises:
      UserError: the config is wrong, a model or a file cannot be read, or the folder cannot be used.
    """
    config = resolve(config)
    if config.topology is not None or config.dry_run:
        raise UserError("compile is for the devices of this machine: --topology and --dry_run are options of train")
    xla_flags.add_those_of_run(config.deterministic)
    check(config)
    platforms.check()
    folder = out or jax.config.jax_compilation_cache_dir or str(compile_cache.folder())
    if compile_cache.enable(folder) is None:
        raise UserError(f"programs cannot be kept in {folder}: give --out another folder")
    batch_sizes.check_devices_of(config, jax.device_count())
    for name, stage in stages_of(config).items():
        if (missing := report.missing_start(stage)) is not None:
            print(f"{name}: left out, since {missing} does not exist yet", flush=True)
            continue
        mesh = memory.stage_mesh(stage)
        if not can_foresee(mesh):
            print(f"{name}: left out, since a run compiles when it calls on a mesh of tensor alone", flush=True)
            continue
        stage, _ = micro_batches.settled(
            stage, open_abstract, lambda line, name=name: print(f"{name}: {line}", flush=True)
        )
        opened = open_abstract(stage, mesh)
        seconds = CompileAhead(functools.partial(opened.trace_programs, rows="first"), mesh).finish()
        opened.close()
        each = ", ".join(f"{program} {took:.1f} s" for program, took in seconds.items())
        print(f"{name}: compiled {each}", flush=True)
    print(f"kept in {os.path.abspath(folder)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

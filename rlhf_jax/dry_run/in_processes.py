"""The programs of an update, each compiled in a process that ends when its sizes are known.

The compiler for TPUs generates machine code after the sizes are known (`compiling`). In one process that would slow
down the compilation of the other programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path

from rlhf_jax.config import PolicyConfig, StageConfig
from rlhf_jax.config.files import from_json, to_json
from rlhf_jax.dry_run import memory
from rlhf_jax.dry_run.compiling import Program

OF_ROLLOUTS = ("generate", "score", "experience", "update")
LONGEST_FIRST = ("generate", "update", "experience", "score")


def can_compile(config: StageConfig) -> bool:
    """Whether another process knows the class of the config: one of a file is known where the file was read."""
    return type(config).__module__.startswith("rlhf_jax.")


def programs(
    config: StageConfig, on_compiled: Callable[[Program], None], compiled_before: Mapping[str, Program] = {}
) -> list[Program]:
    """As `memory.programs` of the stage of a config, without what was traced and compiled.

    Args:
      config: a stage's, with a topology.
      on_compiled: called with each program, in their order, as soon as it and those before it are compiled.
      compiled_before: programs that need not be compiled again, by name.

    Raises:
      RuntimeError: a process failed; with what it said.
    """
    names = OF_ROLLOUTS if isinstance(config, PolicyConfig) else ("update",)
    compiled = []
    with futures.ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
        to_compile = [name for name in LONGEST_FIRST if name in names and name not in compiled_before]
        begun = {name: pool.submit(in_process, config, name) for name in to_compile}
        for name in names:
            if (program := compiled_before.get(name) or begun[name].result()) is not None:
                compiled.append(program)
                on_compiled(program)
    return compiled


def in_process(config: StageConfig, name: str) -> Program | None:
    """One program; None where the stage has none of the name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program")
        run = subprocess.run(
            [sys.executable, "-m", "rlhf_jax.dry_run.in_processes", name, str(path)],
            input=to_json(config).encode(),
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
        )
        if not path.exists():
            stderr = run.stderr.decode(errors="replace").strip()
            raise RuntimeError(f"the process that compiled {name} exited with code {run.returncode}:\n{stderr[-4000:]}")
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Program(**fields) if fields else None


def main() -> None:
    """Compiles one program of the config.json on standard input; the arguments are its name and the file to write."""
    name, path = sys.argv[1], Path(sys.argv[2])
    config = from_json(sys.stdin.buffer.read().decode())
    assert isinstance(config, StageConfig)
    stage = memory.abstract_stage(config, memory.stage_mesh(config))
    program = next(iter(memory.programs(stage, only=(name,))), None)
    fields = {} if program is None else {**vars(program), "traced": None, "compiled": None}
    path.with_suffix(".part").write_text(json.dumps(fields), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    os._exit(0)


if __name__ == "__main__":
    main()

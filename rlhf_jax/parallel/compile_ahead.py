"""Programs compiled before their first call: in threads, beside each other and beside the loading of weights."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
from jax.sharding import Mesh

from rlhf_jax.parallel import jax_settings, sharding

WAITED = "/rlhf_jax/compile_ahead/wait_for_compiler_duration"
"""The event of JAX's monitoring for the seconds that a call waited for a program."""


def run_program(name: str, program: Any, *args: Any, resident: Any = (), **arguments: Any) -> Any:
    """The results of a jitted function; `name` and `resident` are for what takes this function's place."""
    return program(*args, **arguments)


class CompileAhead:
    """Traces programs in one thread and compiles them in others; a call of one waits until it is compiled.

    What it compiles goes where a call of the jitted function finds it, in JAX's caches. So it only saves time:
    arguments of other shapes than foreseen, or an error, leave everything to the call.

    Attributes:
      seconds: that lowering and XLA took, for each compiled program.
    """

    def __init__(self, trace: Callable[[Callable[..., Any]], None], mesh: Mesh):
        """Begins.

        Args:
          trace: called with a function in place of `run_program`, which takes shapes for arrays and returns shapes.
        """
        self.seconds: dict[str, float] = {}
        self._mesh, self._traced, self._changed = mesh, False, threading.Condition()
        self._compiling: dict[str, futures.Future] = {}
        self._waited_for: set[str] = set()
        self._error: Exception | None = None
        # Of the calls that will look for the programs.
        self._settings = jax_settings.pinned if jax_settings.is_pinned() else contextlib.nullcontext
        self._compilers = futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1), "compile")
        # No daemon: Python would end it at its exit, which aborts the process where C++ is on the thread's stack.
        threading.Thread(target=self._trace, args=(trace,), name="trace").start()

    def _trace(self, trace: Callable[[Callable[..., Any]], None]) -> None:
        try:
            with self._settings():
                trace(self._build)
        except Exception as error:
            self._error = error  # a run meets it again in a call
        finally:
            with self._changed:
                self._traced = True
                self._changed.notify_all()

    def _build(self, name: str, program: Any, *args: Any, resident: Any = (), **arguments: Any) -> Any:
        traced = program.trace(*args, **arguments)
        with self._changed:
            self._compiling[name] = self._compilers.submit(self._compile, name, traced)
            self._changed.notify_all()
        return result_shapes(traced.out_info, self._mesh)

    def _compile(self, name: str, traced: Any) -> None:
        began = time.perf_counter()
        traced.lower().compile()
        self.seconds[name] = time.perf_counter() - began

    @property
    def pending(self) -> list[str]:
        """The programs that are being compiled, or will be, as far as they are traced."""
        return [name for name, future in list(self._compiling.items()) if not future.done()]

    def run(self, name: str, program: Any, *args: Any, resident: Any = (), **arguments: Any) -> Any:
        """As `run_program`, when the program is compiled."""
        if name not in self._waited_for:
            began = time.perf_counter()
            with self._changed:
                self._changed.wait_for(lambda: name in self._compiling or self._traced)
            if name in self._compiling:
                futures.wait([self._compiling[name]])  # an error is raised again by the call
            self._waited_for.add(name)
            jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - began)
        return program(*args, **arguments)

    def finish(self) -> dict[str, float]:
        """`seconds`, when all programs are compiled. Raises what tracing or a compilation raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._traced)
        for future in self._compiling.values():
            future.result()
        if self._error is not None:
            raise self._error
        return self.seconds

    def close(self) -> None:
        """Begins no further compilation."""
        self._compilers.shutdown(wait=False, cancel_futures=True)


def can_foresee(mesh: Mesh) -> bool:
    """Whether `result_shapes` is right: on `tensor` alone the compiler chooses how results are sharded."""
    return mesh.size == 1 or sharding.row_shards(mesh) > 1


def same_structure(foreseen: Any, present: Any) -> bool:
    """Whether the shapes that programs were compiled for have the structure of the loaded arrays: a checkpoint may hold
    more than its config.json says."""
    structure: Any = jax.tree.structure(foreseen)
    return structure == jax.tree.structure(present)


def result_shapes(shapes: Any, mesh: Mesh) -> Any:
    """Shapes of results with the shardings of a batch: rows over `data` and `fsdp`, what has no rows replicated.

    On one device both are the same, and JAX says replicated of most results: another key of its cache on disk.
    """

    def place(x: Any) -> Any:
        rows = mesh.size > 1 and x.ndim and x.shape[0] % sharding.row_shards(mesh) == 0
        where = sharding.batch_sharding(mesh) if rows else sharding.replicated(mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(place, shapes)

"""The persistent compilation cache, so that a second start reads what took long to compile; and compile times."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import stat
import sys
import threading

import filelock
import jax

from rlhf_jax.parallel import compile_ahead
from rlhf_jax.runtime import environment, host_memory

MAX_SIZE = 4 * 2**30  # bytes; the least recently used programs are evicted
MIN_COMPILE_SECONDS = 0.3  # of a program that is cached


def folder(name: str = "rlhf_jax/compiled", *, flags: str = "") -> pathlib.Path:
    """~/.cache/NAME (or in XDG_CACHE_HOME), one folder for each jaxlib, processor and `flags` of XLA.

    A program for the CPU holds instructions of the CPU it was compiled on, and machines may share a home directory.
    """
    mark = hashlib.sha256((environment.cpu()[1] + flags).encode()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base, name, f"{importlib.metadata.version('jaxlib')}-{mark}")


class CompileTimer:
    """Seconds of the calling thread that JAX reports for lowering, XLA, and reading programs from disk, and those that
    it waits for other threads to compile.

    After a program that took long, the memory that its compilation freed is returned to the system before it runs.
    """

    # Without tracing, which is reported for inner functions too and would count twice; it is a small part.
    EVENTS = ("jaxpr_to_mlir_module_duration", "backend_compile_duration", compile_ahead.WAITED.rsplit("/", 1)[-1])

    def __init__(self):
        self.seconds, self._thread = 0.0, threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, seconds: float, **_: object) -> None:
        if event.rsplit("/", 1)[-1] in self.EVENTS:
            self.seconds += seconds if threading.get_ident() == self._thread else 0.0
            if event.endswith(self.EVENTS[1]) and seconds >= MIN_COMPILE_SECONDS:
                host_memory.trim()

    def since_last(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._record)


def enable(place: str | None = None) -> str | None:
    """Caches compiled programs, unless JAX_ENABLE_COMPILATION_CACHE=0.

    A folder that others may write is not used: what lies there would run as the user.

    Args:
      place: a folder; None: `folder`, unless JAX has a cache directory already.

    Returns:
      The folder, or None where it is not used or not writable.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if place is None and jax.config.jax_compilation_cache_dir is not None:
        return None
    path = folder() if place is None else pathlib.Path(place)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if path.stat().st_mode & stat.S_IWOTH:
            print(f"compiled programs are not kept: other users may write {path}", file=sys.stderr, flush=True)
            return None
    except OSError:
        return None
    if not os.access(path, os.W_OK):
        return None
    remove_incomplete(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_max_size", MAX_SIZE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    return str(path)


def remove_incomplete(cache: pathlib.Path) -> None:
    """Removes programs that a killed process wrote in part: their access-time file, which JAX writes last, is missing.

    JAX neither reads nor replaces such a program, and it fails to evict others while that file is missing.
    """
    try:
        with filelock.FileLock(cache / ".lockfile", timeout=10):  # JAX's own lock: no process writes now
            for path in cache.glob("*-cache"):
                if not path.with_name(path.name.removesuffix("-cache") + "-atime").exists():
                    path.unlink()
    except (OSError, filelock.Timeout):
        pass  # the next start tries again

"""Compiled programs kept on disk, so that the second start of a run compiles nothing; and the seconds that it costs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import platform

import filelock
import jax

LARGEST = 4 * 2**30  # bytes; the programs that were not used for longest go first
WORTH_KEEPING = 0.3  # seconds of compilation


def folder() -> pathlib.Path:
    """~/.cache/rlhf_jax/compiled (or in XDG_CACHE_HOME), one folder each jaxlib and processor.

    A program for the CPU holds instructions of the CPU that it was compiled on: a home directory that machines share
    must not give it to another.
    """
    try:
        processor = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        processor = "".join(
            sorted(line for line in set(processor.splitlines()) if line.startswith(("flags", "Features")))
        )
    except OSError:
        processor = platform.processor() + platform.platform()
    mark = hashlib.sha256((platform.machine() + processor).encode()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base, "rlhf_jax", "compiled", f"{importlib.metadata.version('jaxlib')}-{mark}")


class CompileTimer:
    """Seconds that JAX spends on making programs, as it reports them: tracing, lowering, XLA or reading from disk."""

    # Tracing is reported for inner functions as well and would count twice: lowering and XLA are nearly all of it.
    EVENTS = ("jaxpr_to_mlir_module_duration", "backend_compile_duration")

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, seconds: float, **_: object) -> None:
        if event.rsplit("/", 1)[-1] in self.EVENTS:
            self.seconds += seconds

    def since_last(self) -> float:
        """Seconds since this was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._hear)


def enable() -> str | None:
    """Keeps compiled programs in `folder`, unless JAX was told another place, or none (JAX_ENABLE_COMPILATION_CACHE=0).

    Returns:
      The folder, or None where it is JAX's own or cannot be written.
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return None
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(place, os.W_OK):
        return None
    remove_torn(place)
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
    return str(place)


def remove_torn(place: pathlib.Path) -> None:
    """Removes the programs that a killed process wrote in part: their time of use, which comes last, is missing.

    JAX would neither read nor replace such a program, and keep no other one while it looks for that time.

    Args:
      place: the cache's folder.
    """
    try:
        with filelock.FileLock(place / ".lockfile", timeout=10):  # JAX's own: nobody is writing now
            for path in place.glob("*-cache"):
                if not path.with_name(path.name.removesuffix("-cache") + "-atime").exists():
                    path.unlink()
    except (OSError, filelock.Timeout):
        pass  # a later start does it

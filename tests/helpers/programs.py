"""The programs that the tests compile, kept from one session of pytest to the next."""

import os
import pathlib

from rlhf_jax.runtime import compile_cache

NAME = "rlhf_jax_tests"
MAX_SIZE = 2 * 2**30  # bytes, of all folders


def folder() -> pathlib.Path:
    """~/.cache/rlhf_jax_tests (or in XDG_CACHE_HOME), one folder for each jaxlib, processor and XLA_FLAGS."""
    return compile_cache.folder(NAME, flags=os.environ.get("XLA_FLAGS", ""))


def remove_oldest(max_size: int = MAX_SIZE) -> None:
    """Removes the programs that were not read for longest, so that those of all folders take max_size bytes at most.

    Once a session: JAX's own bound (`jax_compilation_cache_max_size`) looks at every program of the folder, behind a
    lock, whenever one is written: a fifth of a second for 5,000 programs.
    """
    uses = []
    for path in folder().parent.glob("*/*-cache"):
        try:
            status = path.stat()
        except FileNotFoundError:  # another session removed it
            continue
        uses.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    size = sum(size for _, size, _ in uses)
    for _, bytes_of_program, path in sorted(uses):
        if size <= max_size:
            break
        path.unlink(missing_ok=True)
        size -= bytes_of_program

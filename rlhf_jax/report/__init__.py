"""A report of runs: one HTML page that needs no network, and pictures beside it.

    python -m rlhf_jax.report RUN_DIR [RUN_DIR ...]

Reads what is in the runs' folders and starts nothing there: it may be made while a run goes on, as often as one likes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlhf_jax.report import page, pictures, read_run, series
from rlhf_jax.report.read_run import Run
from rlhf_jax.report.series import Group


def read(run_dirs: Sequence[str]) -> tuple[list[Run], list[Group]]:
    """The runs in folders, and those of them that differ in their seed only as groups.

    Args:
      run_dirs: folders of a stage, or of several.

    Raises:
      UserError: a folder is not there, or holds no run.
    """
    paths = read_run.folders(run_dirs)
    runs = [read_run.read(path, name) for path, name in zip(paths, read_run.names(paths), strict=True)]
    return runs, series.groups(runs)


def write(run_dirs: Sequence[str], out: str | None = None, png: bool = True) -> list[str]:
    """Writes the page, and pictures where matplotlib is there.

    Args:
      run_dirs: as `read`.
      out: the page's file; None: report.html in the folder of one run, or in this folder for several.
      png: whether to draw pictures.

    Returns:
      The paths that were written, the page first.

    Raises:
      UserError: as `read`, or a path cannot be written.
    """
    _, groups = read(run_dirs)
    path = os.path.abspath(out or os.path.join(run_dirs[0] if len(run_dirs) == 1 else "", "report.html"))
    title = " and ".join(os.path.basename(os.path.abspath(folder)) for folder in run_dirs[:3])
    title += f" and {len(run_dirs) - 3} more" if len(run_dirs) > 3 else ""
    page.save(path, page.page(groups, title))
    return [path, *(pictures.draw(groups, os.path.splitext(path)[0]) if png else [])]

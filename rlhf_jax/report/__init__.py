"""Reports of runs: one HTML page that needs no network, and PNG pictures.

    rlhf-jax report RUN_DIR [RUN_DIR ...]

It only reads files of the runs' folders, so it also works during a run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from rlhf_jax import storage
from rlhf_jax.report import page, pictures, read_run, series
from rlhf_jax.report.read_run import Run
from rlhf_jax.report.series import Group


def read(run_dirs: Sequence[str]) -> tuple[list[Run], list[Group]]:
    """The runs in folders, and groups of those that differ only in their seed.

    Args:
      run_dirs: folders of one or several stages.

    Raises:
      UserError: a folder does not exist or holds no run.
    """
    paths = read_run.find_run_folders(run_dirs)
    runs = [read_run.read(path, name) for path, name in zip(paths, read_run.short_names(paths), strict=True)]
    return runs, series.group_by_config(runs)


def write(run_dirs: Sequence[str], out: str | None = None, png: bool = True) -> list[str]:
    """Writes the page and the pictures.

    Args:
      run_dirs: as `read`.
      out: file of the page; None: report.html in the folder of a single run, otherwise in the working directory.
      png: whether to write pictures, which needs matplotlib.

    Returns:
      Paths of the written files, the page first.

    Raises:
      UserError: as `read`, or a file cannot be written, or matplotlib is missing.
    """
    _, groups = read(run_dirs)
    path = storage.absolute(out or os.path.join(run_dirs[0] if len(run_dirs) == 1 else "", "report.html"))
    page.save(path, page.render_page(groups, page.title(run_dirs)))
    if not png:
        return [path]
    if not storage.is_remote(path):
        return [path, *pictures.draw(groups, os.path.splitext(path)[0])]
    with tempfile.TemporaryDirectory(prefix="rlhf_jax-report-") as folder:
        drawn = pictures.draw(groups, os.path.join(folder, os.path.splitext(os.path.basename(path))[0]))
        storage.upload_folder(folder, os.path.dirname(path))
    return [path, *(os.path.join(os.path.dirname(path), os.path.basename(file)) for file in drawn)]

"""Files that grow, of a folder in a bucket, where no object can be appended to: written to a local folder and uploaded
whole where they have changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from rlhf_jax.errors import UserError
from rlhf_jax.storage import bucket, copies


class Mirror:
    """A local folder whose files are uploaded.

    Attributes:
      folder: in the bucket.
      local: below the cache folder; emptied at the start.
    """

    def __init__(self, folder: str, process: int = 0):
        """`process`: of several that mirror files of the same folder, perhaps on one machine."""
        self.folder = folder
        self.local = copies.staging_folder(folder, f"files-{process}")
        self._uploaded: dict[str, tuple[str, int]] = {}

    def download(self, names: Sequence[str]) -> None:
        """Downloads the files of these names in the folder, where they exist.

        Raises:
          UserError: one is a folder, or the bucket cannot be read.
        """
        for name in names:
            kind = bucket.kind_of(path := f"{self.folder}/{name}")
            if kind == "folder":
                raise UserError(
                    f"{path} is a folder of parts, which an earlier version wrote: join them in their order to a file "
                    "of that name, or choose another folder"
                )
            if kind == "file":
                local = os.path.join(self.local, name)
                bucket.download({path: local})
                self._uploaded[local] = path, os.path.getsize(local)

    def _sizes(self) -> dict[str, tuple[str, int]]:
        """{local file: (path in the bucket, bytes)}"""
        pairs = copies.pairs_below(self.local, self.folder)
        return {file: (path, os.path.getsize(file)) for file, path in pairs}

    def _changed(self) -> dict[str, str]:
        """{local file: path in the bucket} of those that have another size there."""
        return {file: path for file, (path, size) in self._sizes().items() if self._uploaded.get(file) != (path, size)}

    def not_uploaded(self) -> list[str]:
        """The files, as paths in the bucket, whose last lines are on this machine alone."""
        return list(self._changed().values())

    def upload(self, attempts: int | None = None) -> None:
        """Uploads the files that have grown. Raises a StorageError where one cannot be written."""
        sizes, changed = self._sizes(), self._changed()
        bucket.upload(changed, attempts=attempts)
        self._uploaded |= {file: sizes[file] for file in changed}

    def close(self) -> None:
        """Deletes the local folder."""
        shutil.rmtree(self.local, ignore_errors=True)

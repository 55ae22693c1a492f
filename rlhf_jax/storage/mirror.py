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

    def __init__(self, folder: str, names: Sequence[str]):
        """Downloads the files `names` of a folder in a bucket, where they exist.

        Raises:
          UserError: one is a folder, or the bucket cannot be read.
        """
        self.folder = folder
        self.local = copies.staging_folder(folder, "files")
        for name in names:
            kind = bucket.kind_of(path := f"{folder}/{name}")
            if kind == "folder":
                raise UserError(
                    f"{path} is a folder of parts, which an earlier version wrote: join them in their order to a file "
                    "of that name, or choose another folder"
                )
            if kind == "file":
                with open(os.path.join(self.local, name), "wb") as file:
                    file.write(bucket.read(path))
        self._uploaded = self._sizes()

    def _sizes(self) -> dict[str, tuple[str, int]]:
        """{local file: (path in the bucket, bytes)}"""
        pairs = copies.pairs_below(self.local, self.folder)
        return {file: (path, os.path.getsize(file)) for file, path in pairs}

    def upload(self, attempts: int | None = None) -> None:
        """Uploads the files that have grown. Raises a StorageError where one cannot be written."""
        sizes = self._sizes()
        grown = {file: path for file, (path, size) in sizes.items() if self._uploaded.get(file) != (path, size)}
        bucket.upload(grown, attempts=attempts)
        self._uploaded = sizes

    def close(self) -> None:
        """Deletes the local folder."""
        shutil.rmtree(self.local, ignore_errors=True)

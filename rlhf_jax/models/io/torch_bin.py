"""Reads old `pytorch_model.bin` files without torch: tensors and nothing else.

A file of `torch.save` (1.6 and later) is a zip archive: ARCHIVE/data.pkl, a pickle whose tensors refer to raw
storages ARCHIVE/data/KEY. A pickle can call anything it can import, so this unpickler allows only the names that a
state dict needs (OrderedDict, torch._utils._rebuild_tensor_v2, the typed storages) and refuses all others. The objects
that it builds are immutable, because a pickle may also set attributes of objects that it has made, such as a tensor's
offset in the file after it was checked. Format: torch/serialization.py.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rlhf_jax.errors import UserError

_STORAGES = {
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "ByteStorage": np.dtype(np.uint8),
    "CharStorage": np.dtype(np.int8),
    "ShortStorage": np.dtype(np.int16),
    "IntStorage": np.dtype(np.int32),
    "LongStorage": np.dtype(np.int64),
    "BoolStorage": np.dtype(np.bool_),
}
# Magic number with which torch < 1.6 begins a file, as a pickle of protocol 2.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


_LARGEST_PICKLE = 256 << 20
"""Bytes. A pickle holds names and shapes, about 100 bytes a tensor."""


class _Storage(NamedTuple):
    archive: zipfile.ZipFile
    member: str
    dtype: np.dtype
    count: int


class BinTensor(NamedTuple):
    """A tensor in the file: shape and dtype are known, `read` reads the numbers."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    @property
    def dtype(self) -> np.dtype:
        """numpy's (or ml_dtypes') dtype of the elements."""
        return self.storage.dtype

    def read(self) -> np.ndarray:
        """The numbers, an array of `shape` and `dtype`."""
        raw = np.frombuffer(self.storage.archive.read(self.storage.member), self.dtype)
        strides = tuple(stride * self.dtype.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(raw[self.offset :], self.shape, strides, writeable=False).copy()


class _Unpickler(pickle.Unpickler):
    """Allows OrderedDict, _rebuild_tensor_v2 and the typed storages; refuses every other global by its name."""

    def __init__(self, data: bytes, path: Path, archive: zipfile.ZipFile, prefix: str):
        super().__init__(io.BytesIO(data))
        self.path, self.archive, self.prefix = path, archive, prefix

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._rebuild_tensor
        if module == "torch" and name in _STORAGES:
            return name
        raise UserError(
            f"{self.path}: the pickle in it asks for {module}.{name}. Only tensors are read from a .bin file, "
            "so it was refused and nothing was run; use a safetensors checkpoint from a source that you trust."
        )

    def persistent_load(self, pid: Any) -> _Storage:
        parts = pid if type(pid) is tuple else (pid,)
        flat = all(type(part) in (str, int) for part in parts)  # tuples of tuples can take forever to write
        if not flat or len(parts) != 5 or parts[0] != "storage" or parts[1] not in _STORAGES:
            raise UserError(f"{self.path}: storage {repr(pid)[:200] if flat else ''} is not a typed tensor storage.")
        _, name, key, _, count = parts
        dtype = _STORAGES[name]
        member = f"{self.prefix}data/{key}"
        try:
            size = self.archive.getinfo(member).file_size
        except KeyError:
            raise UserError(f"{self.path}: {member} is missing from the archive; the file is damaged.") from None
        if type(count) is not int or size != count * dtype.itemsize:
            raise UserError(f"{self.path}: {member} has {size} bytes, not {count} of {dtype}; the file is damaged.")
        return _Storage(self.archive, member, dtype, count)

    def _rebuild_tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> BinTensor:
        valid = type(shape) is tuple and type(strides) is tuple and len(shape) == len(strides) <= 64
        if not isinstance(storage, _Storage) or not valid:
            raise UserError(f"{self.path}: a tensor in it is not built from a storage; the file is damaged.")
        if not all(type(number) is int and 0 <= number < 2**63 for number in (offset, *shape, *strides)):
            raise UserError(f"{self.path}: a tensor in it has impossible sizes or strides; the file is damaged.")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and last >= storage.count:
            raise UserError(f"{self.path}: a tensor reaches beyond its storage {storage.member}; the file is damaged.")
        return BinTensor(storage, offset, tuple(shape), tuple(strides))


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # one that spans disks, say
        return True


def _checked_pickle(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """The bytes of the pickle. torch.save compresses nothing and numbers its memo without gaps; a small file built to
    fill the memory does not."""
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise UserError(f"{path}: {member.filename} is compressed or encrypted, which torch.save never does.")
    if archive.getinfo(name).file_size > _LARGEST_PICKLE:
        raise UserError(f"{path}: its {name} has over {_LARGEST_PICKLE >> 20} MiB, which no state dict needs.")
    data = archive.read(name)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= argument <= len(data):
            raise UserError(f"{path}: the pickle in it is damaged or not a state dict (memo {argument}).")
    return data


def read(path: str | Path) -> dict[str, BinTensor]:
    """The tensors of a `torch.save`d state dict by name, not yet read.

    A UserError names the file and the fault: a global that is not for tensors, the legacy format of torch before 1.6,
    an entry that is not a tensor, or damage.
    """
    path = Path(path)
    if not _is_zip(path):
        with path.open("rb") as file:
            legacy = file.read(len(_LEGACY)) == _LEGACY
        what = (
            "is in the legacy format of torch before 1.6" if legacy else "is not a file of torch.save (no zip archive)"
        )
        raise UserError(f"{path} {what}, which is not read; use safetensors, or save it again with a newer torch.")
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # of half a dozen kinds
        raise UserError(f"{path} is a damaged zip archive ({error}).") from error
    pickles = [name for name in archive.namelist() if name.endswith("data.pkl") and name.count("/") <= 1]
    if len(pickles) != 1:
        raise UserError(f"{path} is a zip archive but not one of torch.save: it has no data.pkl.")
    prefix = pickles[0].removesuffix("data.pkl")
    try:
        data = _checked_pickle(archive, pickles[0], path)
        if f"{prefix}byteorder" in archive.namelist() and archive.read(f"{prefix}byteorder") != b"little":
            raise UserError(f"{path} was written on a big-endian machine, which is not supported; use safetensors.")
        tensors = _Unpickler(data, path, archive, prefix).load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: the pickle in it is damaged or not a state dict ({error}).") from error
    if not isinstance(tensors, dict):
        raise UserError(f"{path} holds a {type(tensors).__name__}, not a state dict of tensors.")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, BinTensor):
            named = repr(name) if isinstance(name, str) else "whose name is no text"
            raise UserError(f"{path}: entry {named} is of type {type(tensor).__name__}, not a tensor.")
    return dict(tensors)

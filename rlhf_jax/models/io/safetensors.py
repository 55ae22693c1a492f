"""The weight files of a checkpoint folder: safetensors or .bin, single or sharded, as tensors by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from rlhf_jax.errors import UserError
from rlhf_jax.models.io import torch_bin
from rlhf_jax.utils.text import parse_json

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_READABLE = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """One tensor of a file, not yet read."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    _read: Callable[[Index], np.ndarray]

    def check(self, shape: tuple[int, ...], asks: str) -> None:
        """Raises a UserError that names the tensor when its shape is not the one that the file `asks` requires, or its
        dtype is not floating-point."""
        if self.shape != shape:
            raise UserError(
                f"{self.file}: tensor {self.name} has shape {list(self.shape)}; {asks} asks for {list(shape)}."
            )
        if self.dtype not in (*DTYPES, "float64"):
            raise UserError(
                f"{self.file}: tensor {self.name} has dtype {self.dtype}; weights must be float16, bfloat16 or float32."
            )

    def read(self, index: Index) -> np.ndarray:
        """tensor[index] as float32; a UserError names the tensor when it cannot be read.

        Args:
          index: a slice without a step for each axis. Only these bytes of a safetensors file are read; from a .bin file
            the full tensor is read and sliced.
        """
        try:
            return self._read(index).astype(np.float32, copy=False)
        except Exception as error:
            raise UserError(f"{self.file}: tensor {self.name} cannot be read ({error}).") from error


def folder_fingerprint(folder: Path) -> str:
    """Identifies the weights of a checkpoint folder: sha256 of the files' sizes and of a sample of their bytes.

    The sample is the first 64 KiB of each file (the header of a safetensors file) and 16 KiB at 64 places; of a small
    file, all of it. Training changes every weight, so a sample is enough.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            if size <= 1 << 20:
                digest.update(file.read())
                continue
            digest.update(file.read(1 << 16))
            for place in range(64):
                file.seek(place * (size - (1 << 14)) // 63)
                digest.update(file.read(1 << 14))
    return digest.hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a UserError names the file when it is missing or not a JSON object."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object.")
    return content


def open_weights(folder: Path) -> dict[str, Source]:
    """Every tensor of a checkpoint folder by its name. Safetensors are preferred; of a .bin file only tensors are read.

    A UserError names the file that is missing, damaged, or does not hold what its index says.
    """
    for single, index in ((SAFETENSORS, SAFETENSORS_INDEX), (BIN, BIN_INDEX)):
        if (folder / single).is_file():
            return open_file(folder / single)
        if (folder / index).is_file():
            return _open_shards(folder, folder / index)
    raise UserError(f"{folder} has no weights: none of {SAFETENSORS}, {SAFETENSORS_INDEX}, {BIN}, {BIN_INDEX}.")


def open_file(path: Path) -> dict[str, Source]:
    """Every tensor of a file by its name; a UserError names the file when it is damaged."""
    if path.suffix == ".bin":
        return {
            name: Source(name, path, tensor.shape, str(tensor.dtype), lambda index, tensor=tensor: tensor.read()[index])
            for name, tensor in torch_bin.read(path).items()
        }
    try:
        file = safetensors.safe_open(path, framework="numpy")
        sources = {}
        # safe_open has keys() but cannot be iterated.
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            dtype = part.get_dtype()
            read = part.__getitem__
            sources[name] = Source(name, path, tuple(part.get_shape()), _READABLE.get(dtype, dtype), read)
        return sources
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a valid safetensors file ({error}); it may be cut short.") from error


def _open_shards(folder: Path, index: Path) -> dict[str, Source]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{index} has no weight_map from tensors to files.")
    sources: dict[str, Source] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise UserError(f"{index}: weight_map names {shard!r}, which is not a file of that folder.")
        if not (folder / shard).is_file():
            raise UserError(f"{folder / shard} is missing, though {index.name} lists it.")
        tensors = open_file(folder / shard)
        listed = {name for name, file in weight_map.items() if file == shard}
        if absent := sorted(listed - set(tensors)):
            raise UserError(f"{folder / shard}: tensor {absent[0]} is missing, though {index.name} lists it there.")
        if extra := sorted(set(tensors) - listed):
            raise UserError(f"{folder / shard}: tensor {extra[0]} is not in {index.name}.")
        sources.update(tensors)
    return sources


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors as one safetensors file. OSError where it cannot be written."""
    path.touch()
    mode = path.stat().st_mode  # of any new file: safetensors makes files that only their owner can read
    # transformers requires the "format" of the saved arrays.
    try:
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # a full disk, a limit on sizes
        raise OSError(f"{path}: {error}") from error
    path.chmod(stat.S_IMODE(mode))


def write_weights(
    folder: Path,
    sizes: dict[str, int],
    read: Callable[[str], np.ndarray],
    max_shard_bytes: int,
    write: bool = True,
) -> None:
    """Writes safetensors as transformers does: one file, or shards of at most max_shard_bytes and an index.

    A tensor larger than max_shard_bytes gets a file of its own. Files of an earlier export are removed first.

    Args:
      folder: exists.
      sizes: bytes of each tensor, in the order of the files.
      read: a tensor by its name. Called for each once, in order; no more than one file's tensors are held.
      write: False calls `read`, which may need every process, and writes nothing.
    """
    shards = _shards(sizes, max_shard_bytes)
    names = [SAFETENSORS]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if write:
        for old in (*folder.glob("model-*-of-*.safetensors"), folder / SAFETENSORS, folder / SAFETENSORS_INDEX):
            old.unlink(missing_ok=True)
    for file, shard in zip(names, shards):
        tensors = {name: read(name) for name in shard}
        if write:
            write_file(folder / file, tensors)
        del tensors  # or the next file's would be read beside them
    if write and len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Names in order, a list for each file."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, count in sizes.items():
        if shards[-1] and size + count > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    return shards

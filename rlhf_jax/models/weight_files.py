"""The weight files of a checkpoint folder: safetensors or .bin, single or sharded, as tensors by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from rlhf_jax.models import torch_bin
from rlhf_jax.types import UserError

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_READABLE = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclasses.dataclass(frozen=True)
class Source:
    """One tensor of a file, its numbers not yet read."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    _read: Callable[[], np.ndarray]

    def read(self, name: str) -> np.ndarray:
        """The numbers as float32; UserError, naming the tensor, when they are not floating-point."""
        if self.dtype not in (*DTYPES, "float64"):
            raise UserError(
                f"{self.file}: tensor {name} has dtype {self.dtype}; weights must be float16, bfloat16 or float32."
            )
        try:
            return self._read().astype(np.float32)
        except Exception as error:
            raise UserError(f"{self.file}: tensor {name} cannot be read ({error}).") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; UserError, naming the file, when it is absent or not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object.")
    return content


def open_weights(folder: Path) -> dict[str, Source]:
    """Every tensor of a checkpoint folder by its name. Safetensors are preferred; a .bin admits tensors only.

    UserError names the file that is absent, damaged, or does not hold what its index says.
    """
    for single, index in ((SAFETENSORS, SAFETENSORS_INDEX), (BIN, BIN_INDEX)):
        if (folder / single).is_file():
            return _open_file(folder / single)
        if (folder / index).is_file():
            return _open_shards(folder, folder / index)
    raise UserError(f"{folder} has no weights: none of {SAFETENSORS}, {SAFETENSORS_INDEX}, {BIN}, {BIN_INDEX}.")


def _open_file(path: Path) -> dict[str, Source]:
    if path.suffix == ".bin":
        return {
            name: Source(path, tensor.shape, str(tensor.dtype), tensor.read)
            for name, tensor in torch_bin.read(path).items()
        }
    try:
        file = safetensors.safe_open(path, framework="numpy")
        sources = {}
        # safe_open has keys() but cannot be iterated.
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            dtype = part.get_dtype()
            sources[name] = Source(
                path,
                tuple(part.get_shape()),
                _READABLE.get(dtype, dtype),
                lambda name=name: file.get_tensor(name),
            )
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
        found = _open_file(folder / shard)
        listed = {name for name, file in weight_map.items() if file == shard}
        if absent := sorted(listed - set(found)):
            raise UserError(f"{folder / shard}: tensor {absent[0]} is missing, though {index.name} lists it there.")
        if extra := sorted(set(found) - listed):
            raise UserError(f"{folder / shard}: tensor {extra[0]} is not in {index.name}.")
        sources.update(found)
    return sources


def write_weights(folder: Path, tensors: dict[str, np.ndarray], max_shard_bytes: int) -> None:
    """Write safetensors as transformers does: one file, or shards of at most max_shard_bytes and an index.

    A tensor larger than max_shard_bytes gets a file of its own. Files of an earlier export are removed first.
    """
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / SAFETENSORS, folder / SAFETENSORS_INDEX):
        old.unlink(missing_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in tensors.items():
        if shards[-1] and size + array.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    # transformers asks for the "format" of the arrays that were saved.
    metadata = {"format": "pt"}
    if len(shards) == 1:
        safetensors.numpy.save_file(shards[0], folder / SAFETENSORS, metadata=metadata)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors.numpy.save_file(shard, folder / file, metadata=metadata)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

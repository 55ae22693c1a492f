"""Ids that end a response, of a checkpoint's generation_config.json: read, checked and written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.models.io.safetensors import read_json

FILE, WORD = "generation_config.json", "generation_config"


def resolve_stop_ids(
    stop_token_ids: Sequence[int] | str | None, *, path: str | Path | None, revision: str | None, rows: int
) -> tuple[int, ...] | None:
    """The ids that the option stop_token_ids stands for, each once.

    Args:
      stop_token_ids: ids, 'generation_config' or None.
      path: of the policy, a folder or hub name, or of an adapter on it; None: it has no checkpoint.
      revision: on the hub.

    Returns:
      At least one id; None where the option is not given.

    Raises:
      UserError: no id that a response could contain, or no list to take.
    """
    if stop_token_ids is None:
        return None
    ids = _listed(path, revision) if stop_token_ids == WORD else stop_token_ids
    source = f"--stop_token_ids {WORD}: eos_token_id of {path}" if stop_token_ids == WORD else "--stop_token_ids"
    valid = not isinstance(ids, str) and all(isinstance(token, int) and not isinstance(token, bool) for token in ids)
    if not valid or not ids:
        raise UserError(f"{source} is {ids!r}; it must be token ids, whole numbers, or {WORD!r}.")
    if beyond := [token for token in ids if not 0 <= token < rows]:
        raise UserError(
            f"{source}: {beyond[0]} is beyond the vocabulary of {path or 'the model'}: its ids are 0 to {rows - 1}. "
            "No response could end by it."
        )
    return tuple(dict.fromkeys(int(token) for token in ids))


def _listed(path: str | Path | None, revision: str | None) -> Sequence[int]:
    """eos_token_id of generation_config.json; an adapter without that file has its base's."""
    if path is None:
        raise UserError(f"--stop_token_ids {WORD}: there is no checkpoint to take {FILE} from. Give the ids.")
    file = _find(path, revision)
    if file is None:
        raise UserError(f"--stop_token_ids {WORD}: {path} has no {FILE}. Give the ids, or leave the option out.")
    ids = read_json(file).get("eos_token_id")
    if ids is None:
        raise UserError(f"--stop_token_ids {WORD}: {file} has no eos_token_id. Give the ids.")
    return ids if isinstance(ids, list) else [ids]


def _find(path: str | Path, revision: str | None) -> Path | None:
    checkpoint = hf.resolve(path, revision, weights=False)
    folders = (checkpoint, hf.resolve_base(checkpoint, weights=False)[0])
    return next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What an exported policy says of generation.

    Attributes:
      content: of generation_config.json.
      eos_token_id: of config.json.
    """

    content: dict[str, Any]
    eos_token_id: int | list[int]

    def write(self, folder: str | Path) -> None:
        """Writes generation_config.json."""
        (Path(folder) / FILE).write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")


def exported(
    base: str | Path | None,
    revision: str | None,
    *,
    eos_id: int,
    pad_id: int,
    stop_ids: Sequence[int] | None = None,
) -> Generation:
    """What a policy trained from `base` says of generation: what the base says, changed as transformers' Trainer does.

    Ids that end a response stay, and the tokenizer's eos joins them; the tokenizer's pad replaces the pad.
    stop_token_ids replace all ids that end a response. A base without generation_config.json has the ids of its
    config.json, as in transformers.

    Args:
      base: a folder or hub name, of a model or an adapter; None: random weights.
      revision: on the hub.
      stop_ids: of stop_token_ids; None: not given.

    Raises:
      UserError: a file of the base is not JSON.
    """
    content: dict[str, Any] = {}
    config_ids = None
    if base is not None:
        folder = hf.resolve_base(hf.resolve(base, revision, weights=False), weights=False)[0]
        config_ids = read_json(folder / hf.CONFIG).get("eos_token_id")
        file = _find(base, revision)
        content = {"eos_token_id": config_ids} if file is None else read_json(file)
    ids = _with_eos(content.get("eos_token_id"), eos_id)
    config_ids = _with_eos(config_ids, eos_id) if isinstance(config_ids, list) else eos_id
    if stop_ids is not None:
        ids = config_ids = list(stop_ids)
    return Generation({**content, "eos_token_id": ids, "pad_token_id": pad_id}, config_ids)


def _with_eos(ids: Any, eos_id: int) -> Any:
    """eos_token_id of a file, with the tokenizer's eos first where it is absent."""
    if ids is None:
        return eos_id
    several = ids if isinstance(ids, list) else [ids]
    return ids if eos_id in several else [eos_id, *several]

"""Ids that end a response, of a checkpoint's generation_config.json: read, checked and written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.models.io.safetensors import read_json

FILE, WORD = "generation_config.json", "generation_config"


def resolve_stop_ids(
    given: Sequence[int] | str | None, *, path: str | Path | None, revision: str | None, rows: int
) -> tuple[int, ...] | None:
    """The ids that the option stop_token_ids stands for, each once.

    Args:
      given: ids, 'generation_config' or None.
      path: of the policy, a folder or hub name, or of an adapter on it; None: it has no checkpoint.
      revision: on the hub.
      rows: of the policy's embedding.

    Returns:
      At least one id; None where the option is not given.

    Raises:
      UserError: no id that a response could contain, or no list to take.
    """
    if given is None:
        return None
    ids = _listed(path, revision) if given == WORD else given
    source = f"--stop_token_ids {WORD}: eos_token_id of {path}" if given == WORD else "--stop_token_ids"
    whole = not isinstance(ids, str) and all(isinstance(own, int) and not isinstance(own, bool) for own in ids)
    if not whole or not ids:
        raise UserError(f"{source} is {ids!r}; it must be token ids, whole numbers, or {WORD!r}.")
    if beyond := [own for own in ids if not 0 <= own < rows]:
        raise UserError(
            f"{source}: {beyond[0]} is beyond the vocabulary of {path or 'the model'}: its ids are 0 to {rows - 1}. "
            "No response could end by it."
        )
    return tuple(dict.fromkeys(int(own) for own in ids))


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
    own = hf.resolve(path, revision, weights=False)
    folders = (own, hf.resolve_base(own, weights=False)[0])
    return next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)


def copy(path: str | Path, revision: str | None, folder: str | Path) -> None:
    """Copies a checkpoint's generation_config.json, if it has one, to the folder of a model trained from it."""
    if (file := _find(path, revision)) is not None:
        shutil.copyfile(file, Path(folder) / FILE)


def write(folder: str | Path, stop_ids: Sequence[int], pad_id: int) -> None:
    """Writes generation_config.json, so that who samples from the checkpoint stops where training did."""
    content = {"eos_token_id": list(stop_ids), "pad_token_id": pad_id}
    (Path(folder) / FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""A finished model onto the Hugging Face hub: --push_to_hub."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any

import huggingface_hub.utils
from huggingface_hub import errors

from rlhf_jax.config import STAGES
from rlhf_jax.errors import UserError


def repository(config: Any) -> str | None:
    """Where a run's model goes, OWNER/NAME; None without push_to_hub. Asks the hub who the token's user is.

    Raises:
      UserError: there is no token that the hub knows, no hub, or hub_model_id is no name.
    """
    if not config.push_to_hub:
        return None
    login = "Log in (`hf auth login`, or HF_TOKEN in the environment), or leave push_to_hub out"
    try:
        user = huggingface_hub.HfApi().whoami()["name"]
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"--push_to_hub: there is no token of the hub. {login}") from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"--push_to_hub: the hub does not say who you are: {_first_line(error)}. {login}") from error
    *_, above, own = os.path.abspath(config.run_dir).split(os.sep)
    name = config.hub_model_id or (f"{above}-{own}" if own in STAGES else own)  # a pipeline's stages are called so
    name = name if "/" in name else f"{user}/{name}"
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except errors.HFValidationError as error:
        raise UserError(f"--hub_model_id {name}: {_first_line(error)}") from error
    return name


def push(config: Any, name: str, folder: str, warn: Callable[[str], None]) -> str | None:
    """Uploads a model's folder; a failure costs a warning with the command that does it later.

    Args:
      config: a stage's, with hub_private_repo.
      name: of `repository`; made where it is not there.
      folder: with the checkpoint, its tokenizer and model card.
      warn: takes the warning.

    Returns:
      The repository's address, or None.
    """
    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with rlhf_jax")
    except Exception as error:  # whatever it is, the run is whole, and this can be done again
        later = f"hf upload {name} {shlex.quote(folder)}"
        warn(f"{folder} was not uploaded to {name}: {_first_line(error)}. It is whole; `{later}` does it later")
        return None
    return str(url)


def _first_line(error: BaseException) -> str:
    said = getattr(error, "server_message", None)
    return (str(said or error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

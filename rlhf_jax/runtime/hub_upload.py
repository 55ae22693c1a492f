"""--push_to_hub: uploads a finished model to the Hugging Face hub."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable

import huggingface_hub.utils
from huggingface_hub import errors

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.runtime.options import RunOptions


def repository(config: RunOptions, stage: str) -> str | None:
    """The repository of a run's model, OWNER/NAME; None without push_to_hub. Asks the hub for the token's user.

    Args:
      config: of a stage, its run folder named.
      stage: its name.

    Raises:
      UserError: there is no valid token, the hub cannot be reached, or hub_model_id is not a valid name.
    """
    if not config.push_to_hub:
        return None
    login = "Log in (`hf auth login`, or HF_TOKEN in the environment), or remove --push_to_hub"
    try:
        user = huggingface_hub.HfApi().whoami()["name"]
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"--push_to_hub: no hub token was found. {login}") from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"--push_to_hub: the hub could not identify you: {_first_line(error)}. {login}") from error
    *_, parent, folder = storage.absolute(config.run_dir).split("/" if storage.is_remote(config.run_dir) else os.sep)
    # In a pipeline, the folder has the name of a stage.
    name = config.hub_model_id or (f"{parent}-{folder}" if folder == stage else folder)
    name = name if "/" in name else f"{user}/{name}"
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except errors.HFValidationError as error:
        raise UserError(f"--hub_model_id {name}: {_first_line(error)}") from error
    return name


def push(config: RunOptions, name: str, folder: str, location: str, warn: Callable[[str], None]) -> str | None:
    """Uploads a model's folder; if that fails, warns with the command that uploads it later.

    Args:
      config: of a stage, with hub_private_repo.
      name: from `repository`; the repository is created if missing.
      folder: with the checkpoint, its tokenizer and model card.
      location: where the run keeps it: `folder`, or a folder in a bucket.
      warn: prints the warning.

    Returns:
      The URL of the repository, or None.
    """
    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with rlhf_jax")
    except Exception as error:  # of any kind: the run is complete, and the upload can be repeated
        if storage.is_remote(location):
            how = f"copy it from the bucket into a FOLDER and upload that by `hf upload {name} FOLDER`"
        else:
            how = f"upload it by `hf upload {name} {shlex.quote(location)}`"
        warn(f"{location} was not uploaded to {name}: {_first_line(error)}. It is complete; {how}")
        return None
    return str(url)


def _first_line(error: BaseException) -> str:
    text = getattr(error, "server_message", None) or error
    return (str(text).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

"""Calls of object stores (s3://, gs://) by fsspec: retries with backoff, and errors of one line that name the bucket,
the operation and the reason."""

from __future__ import annotations

import functools
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf_jax.errors import UserError

_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}
"""Scheme of a path -> package with its file system, and the extra that installs it."""
SCHEMES = tuple(_PACKAGES)
"""Schemes of paths in a bucket."""
ATTEMPTS = 3
"""Tries of an operation before it is given up, each of one or several requests."""
REQUEST_ATTEMPTS = 5
"""Tries of a request by botocore, which waits up to 1, 2, 4 and 8 seconds between them; gcsfs always makes six."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 16.0
"""Seconds before the second try, doubled from try to try, and their upper bound."""
_WORKERS = 16  # transfers at a time
_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}  # seconds

# Names, since the packages are optional: of missing or refused credentials, and of the packages whose errors are those
# of a network or a server.
_CREDENTIAL_ERRORS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("UnauthorizedSSOTokenError", "SSOTokenLoadError", "ProfileNotFound", "DefaultCredentialsError", "RefreshError"),
}
_NETWORK_PACKAGES = ("botocore", "aiobotocore", "aiohttp", "requests", "urllib3", "gcsfs", "google", "asyncio")


class StorageError(UserError, OSError):
    """A bucket cannot be read or written. An OSError, so that it is treated like a full disk where one is expected."""

    def __init__(self, message: str):
        super().__init__(message)
        self.strerror = str(self)


def is_remote(path: Any) -> bool:
    """Whether a path is in a bucket: it begins with s3:// or gs://."""
    return isinstance(path, str) and path.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


@functools.cache
def filesystem(scheme: str) -> Any:
    """The fsspec file system of a scheme. Credentials, region and endpoint are those of the environment.

    Raises:
      UserError: its package is not installed; names the extra.
    """
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        # botocore's mode "standard" has a budget of retries, which a store that fails often uses up.
        options["config_kwargs"] = {
            "retries": {"mode": "legacy", "total_max_attempts": REQUEST_ATTEMPTS},
            **_TIMEOUTS,
        }
    elif os.environ.get("STORAGE_EMULATOR_HOST"):
        options["token"] = "anon"
    try:
        if scheme == "s3":
            from s3fs import S3FileSystem as FileSystem
        else:  # gcsfs's default class is experimental, and asks for the kind of each bucket by gRPC
            from gcsfs.core import GCSFileSystem as FileSystem
    except ImportError as error:
        package, extra = _PACKAGES[scheme]
        raise UserError(
            f"paths in {scheme}:// need the package {package}: pip install 'rlhf_jax[{extra}]' ({error})"
        ) from error
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints a traceback for each request that we try again
    opened = FileSystem(**options)
    opened.retries = 1  # s3fs's own, around botocore's
    return opened


def call(path: str, operation: str, function: Callable[[Any, str], Any], *, attempts: int | None = None) -> Any:
    """function(file system, path without its scheme), tried again after errors of the network or the server.

    Args:
      path: of the object or folder.
      operation: a verb for messages.
      function: may be called several times.
      attempts: tries; None: ATTEMPTS.

    Raises:
      FileNotFoundError, FileExistsError: as `function`.
      StorageError: access is refused, or the last try failed too.
    """
    scheme, _, key = path.partition("://")
    bucket, _, name = key.partition("/")
    opened = filesystem(scheme)
    count = ATTEMPTS if attempts is None else attempts
    what = f"{scheme}://{bucket}: cannot {operation} {name or 'the bucket'}"
    for attempt in range(count):
        try:
            opened.invalidate_cache()
            return function(opened, key)
        except (FileNotFoundError, FileExistsError, UserError):
            raise
        except Exception as error:
            if _is_refusal(error):
                raise StorageError(
                    f"{what}: access is refused ({_reason(error)}). Check the credentials and their permissions on the "
                    "bucket"
                ) from error
            if not isinstance(error, (OSError, TimeoutError)) and not type(error).__module__.startswith(
                _NETWORK_PACKAGES
            ):
                raise
            if attempt + 1 == count:
                times = "once" if count == 1 else f"{count} times"
                raise StorageError(f"{what}: it failed {times}, last with: {_reason(error)}") from error
        wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT)
        time.sleep(wait * random.uniform(0.5, 1))


def _is_refusal(error: Exception) -> bool:
    """Whether credentials are missing or have no permission, which no retry changes."""
    names = {kind.__name__ for kind in type(error).__mro__}
    code = str(getattr(error, "code", ""))
    return (
        isinstance(error, PermissionError)
        or bool(names & _CREDENTIAL_ERRORS)
        or str(error).startswith("Forbidden")
        or code in ("401", "403")
    )


def _reason(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    name = type(error).__name__
    text = text if len(text) <= 200 else f"{text[:197]}..."
    return f"{name}: {text}" if text else name


# --- objects


def kind_of(path: str) -> str | None:
    """'file', 'folder', or None where there is nothing."""
    try:
        info = call(path, "look for", lambda opened, key: opened.info(key))
    except FileNotFoundError:
        return None
    return "file" if info["type"] == "file" else "folder"


def read(path: str) -> bytes:
    """The content of an object."""
    return call(path, "read", lambda opened, key: opened.cat_file(key))


def write(path: str, data: bytes, *, attempts: int | None = None) -> None:
    """Creates or replaces an object, whole or not at all."""
    _write(path, lambda opened, key: opened.pipe_file(key, data), attempts)


def _write(path: str, function: Callable[[Any, str], Any], attempts: int | None = None) -> None:
    try:
        call(path, "write", function, attempts=attempts)
    except FileNotFoundError as error:
        scheme, _, key = path.partition("://")
        raise StorageError(
            f"{scheme}://{key.partition('/')[0]}: cannot write {key.partition('/')[2]}: there is no such bucket"
        ) from error


def create(path: str, data: bytes, *, attempts: int | None = None) -> bool:
    """Creates an object if there is none, by a conditional write. Returns whether it is this call's.

    A first try whose answer was lost is recognised by its content, which must be unique.
    """
    try:
        _write(path, lambda opened, key: opened.pipe_file(key, data, mode="create"), attempts)
    except FileExistsError:
        try:
            return read(path) == data
        except FileNotFoundError:
            return False
    return True


def names(folder: str) -> list[str]:
    """Names of the objects and folders directly in a folder, sorted; none where there is no folder."""
    try:
        entries = call(folder, "list", lambda opened, key: opened.ls(key, detail=True))
    except FileNotFoundError:
        return []
    below = {entry["name"].rstrip("/").rpartition("/")[2] for entry in entries}
    folder_name = folder.rstrip("/").rpartition("/")[2]
    # An object of the folder's own name is listed as its content.
    return sorted(below - ({folder_name} if len(entries) == 1 and entries[0]["type"] == "file" else set()) - {""})


def find(folder: str) -> dict[str, tuple[int, str]]:
    """{name below the folder: (bytes, version)} of all objects below a folder, or {'': ...} for an object."""
    try:
        entries = call(folder, "list", lambda opened, key: opened.find(key, detail=True))
    except FileNotFoundError:
        return {}
    root = folder.partition("://")[2].rstrip("/")
    return {
        key.removeprefix(root).lstrip("/"): (int(entry["size"]), _version(entry))
        for key, entry in sorted(entries.items())
        if not key.endswith("/") and entry["type"] == "file"
    }


def _version(entry: dict[str, Any]) -> str:
    return next((str(entry[name]) for name in ("ETag", "etag", "generation", "md5Hash") if entry.get(name)), "")


def remove(paths: Sequence[str]) -> None:
    """Deletes objects of one bucket; those that do not exist are no error."""

    def delete(opened: Any, key: str) -> None:
        try:
            opened.rm_file(key)
        except FileNotFoundError:
            pass

    _each(paths, lambda path: call(path, "delete", delete))


def copy(paths: dict[str, str]) -> None:
    """Copies objects within the store: {path: new path}."""
    target = lambda path: path.partition("://")[2]  # noqa: E731
    _each(
        list(paths.items()),
        lambda pair: call(pair[0], "copy", lambda opened, key: opened.cp_file(key, target(pair[1]))),
    )


def upload(files: dict[str, str], *, attempts: int | None = None) -> None:
    """Uploads local files: {local path: path in the bucket}."""
    _each(
        list(files.items()),
        lambda pair: _write(pair[1], lambda opened, key: opened.put_file(pair[0], key), attempts),
    )


def download(files: dict[str, str]) -> None:
    """Downloads objects: {path in the bucket: local path}, each under another name until it is whole."""

    def fetch(pair: tuple[str, str]) -> None:
        path, local = pair
        os.makedirs(os.path.dirname(local), exist_ok=True)
        temporary = f"{local}.{os.getpid()}.part"
        call(path, "read", lambda opened, key: opened.get_file(key, temporary))
        os.replace(temporary, local)

    _each(list(files.items()), fetch)


def _each(items: Sequence[Any], function: Callable[[Any], None]) -> None:
    """function of each item, several at a time; raises the first error after all have ended."""
    if len(items) <= 1:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(min(_WORKERS, len(items)), thread_name_prefix="bucket") as pool:
        for future in [pool.submit(function, item) for item in items]:
            future.result()

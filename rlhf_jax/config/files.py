"""Config files: a config.py, a name in configs/, a variant of one, a run's config.json."""

from __future__ import annotations

import ast
import dataclasses
import errno
import importlib.util
import inspect
import json
import os
import pathlib
import re
import sys
import traceback
from typing import Any

from rlhf_jax import storage
from rlhf_jax.config import trl_options
from rlhf_jax.config.stages import STAGES, Config, PolicyConfig, StageConfig, config_types, stage_name
from rlhf_jax.errors import UserError
from rlhf_jax.option import Options, checked_types, field_types, nearest, stage_type
from rlhf_jax.runtime import config_diff
from rlhf_jax.runtime.removed_options import REMOVED, is_removed
from rlhf_jax.storage.relocation import Relocation
from rlhf_jax.utils.text import parse_json, short_repr

# --- config.json


def to_json(config: Config) -> str:
    """The text of config.json: every field, and the stage's name under 'stage'. `from_json` is the inverse."""
    return json.dumps({"stage": stage_name(config), **_as_dict(config)}, indent=2) + "\n"


def _as_dict(config: Options) -> dict[str, Any]:
    """The fields in the order of `--help`: those of the class itself first."""
    names = [name for owner in type(config).__mro__ for name in inspect.get_annotations(owner)]
    values = {name: vars(config)[name] for name in (*names, *vars(config)) if name in vars(config)}
    return {name: _as_dict(value) if isinstance(value, Options) else value for name, value in values.items()}


def from_json(text: str, source: str = "config.json") -> Config:
    """The config that `to_json` wrote. Missing fields take their defaults; unknown ones raise UserError."""
    return _read_stage(text, source)[1]


def load_run(folder: str) -> tuple[str, Config]:
    """(stage, config) of a run's folder, local or in a bucket. An algorithm that is registered nowhere here (its config
    file is not read) is a PolicyConfig: its options that this class lacks are left out. A stage's run_dir is `folder`,
    and paths of a run that was moved, or that began elsewhere, are adapted.

    Raises:
      UserError: config.json is not one of a run.
    """
    path = f"{folder}/config.json"
    stage, config = _read_stage(_stored_text(path), path, PolicyConfig)
    if not isinstance(config, StageConfig):
        return stage, config
    paths = Relocation(config.run_dir or folder, folder)
    changed: dict[str, Any] = {"run_dir": folder}
    for name, value in vars(config).items():
        if isinstance(value, str) and config_diff.is_path(name) and not storage.exists(value):
            if storage.exists(place := paths.find(value)):
                changed[name] = place
    return stage, dataclasses.replace(config, **changed)


def stage_folders(run_dir: str, option: str = "") -> list[str]:
    """The folder of a run of one stage, or those of a pipeline's stages in order.

    Args:
      option: what messages begin with.

    Raises:
      UserError: there is no run.
    """
    if not storage.is_dir(run_dir):
        raise UserError(f"{option}{run_dir}: there is no such folder")
    folders = [run_dir, *(os.path.join(run_dir, name) for name in STAGES)]
    folders = [folder for folder in folders if storage.is_file(os.path.join(folder, "config.json"))]
    if not folders:
        stages = ", ".join(STAGES)
        raise UserError(f"{option}{run_dir} holds no run: there is no config.json in it, nor in a folder {stages}")
    return folders[:1] if folders[0] == run_dir else folders


def _stored_text(path: str, option: str = "") -> str:
    """The text of a file, local or in a bucket; a UserError that begins with `option` if it cannot be read."""
    try:
        return storage.read_text(path)
    except storage.StorageError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option}cannot read {path} ({error}).") from None


def _read_stage(text: str, source: str, unknown: type[Config] | None = None) -> tuple[str, Config]:
    """(stage, config) of config.json's text; a stage of another name is read as `unknown`, or else refused."""
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{source} is not JSON: {error}.") from None
    kinds = config_types()
    stage = data.pop("stage", None) if isinstance(data, dict) else type(data).__name__
    if not isinstance(data, dict) or (stage not in list(kinds) and not (unknown and isinstance(stage, str))):
        is_custom = isinstance(data, dict) and isinstance(stage, str)
        hint = " For an algorithm of your own set --config to the file that registers it." if is_custom else ""
        raise UserError(
            f"{source} is not a run's config.json: 'stage' must be one of {', '.join(kinds)}, not {short_repr(stage)}."
            + hint
        )
    kind = kinds.get(stage, unknown)
    assert kind is not None
    if stage not in kinds:
        data = {name: value for name, value in data.items() if name in field_types(kind)}
    try:
        return stage, checked_types(_from_dict(kind, data, ""))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _from_dict(config_type: type, data: dict[str, Any], prefix: str) -> Any:
    """The dataclass with these fields, nested ones too; values of any type."""
    hints, fields = field_types(config_type), {}
    for name, value in data.items():
        if name not in hints and is_removed(name, value):
            continue
        if name not in hints:
            raise UserError(f"unknown field {prefix}{name}.{_hint_for_unknown(name, config_type)}")
        stage = stage_type(hints[name])
        fields[name] = _from_dict(stage, value, f"{name}.") if stage and isinstance(value, dict) else value
    return config_type(**fields)


# --- config files


def config_folder() -> pathlib.Path:
    """configs/: inside the package when installed, beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent.parent
    folders = (package / "configs", package.parent / "configs")
    return next((folder for folder in folders if (folder / "quickstart.py").is_file()), folders[-1])


def shipped_configs() -> dict[str, str]:
    """File name -> first line of its docstring, for every config that comes with the package."""
    lines = {}
    for path in sorted(config_folder().glob("[!_]*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines[path.name] = doc.partition("\n")[0]
    return lines


def shipped_config(name: str) -> pathlib.Path:
    """The file of a shipped config, by its name with or without .py.

    Raises:
      UserError: there is none of that name.
    """
    return _shipped(pathlib.Path(name), name)


def load_shipped(name: str) -> Config:
    """The config of a shipped file, even if the working folder has a file of that name: for configs that change a part
    of it."""
    return load_config(str(shipped_config(name)))


def load_config(spec: str) -> Config:
    """The config that `--config` names.

    Args:
      spec: a .py file that defines get_config(variant=None) or the name of one in configs/ ('tldr_ppo.py', 'tldr_ppo'),
        either optionally followed by ':VARIANT'; or a run's config.json or run folder.

    Raises:
      UserError: with the path and, for an exception in a config file, its line.
    """
    if storage.is_remote(spec):  # a config that is code is read from local files alone
        where = storage.absolute(spec)
        file = where if where.endswith(".json") else f"{where}/config.json"
        return from_json(_stored_text(file, f"--config {spec}: "), file)
    path = pathlib.Path(storage.located(spec))
    variant: str | None = None
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: NUL, or half of a surrogate pair
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            raise UserError(f"--config {short_repr(spec, 200)}: no file can have that name.") from None
    if not path.exists() and ":" in path.name:
        name, _, variant = spec.rpartition(":")
        path = pathlib.Path(storage.located(name))
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise UserError(f"--config {spec}: the folder has no config.json.")
    if path.suffix == ".json":
        if variant is not None:
            raise UserError(f"--config {spec}: a config.json has no variants.")
        return from_json(_read(path, spec), str(path))
    if not path.is_file():
        path = _shipped(path, spec)
    config = _run_file(path, variant)
    try:
        return checked_types(config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: get_config returned a config that contains itself.") from None


def _read(path: pathlib.Path, spec: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {spec}: cannot read {path} ({error}).") from None


def _shipped(path: pathlib.Path, spec: str) -> pathlib.Path:
    """The file in configs/ with this name, with or without .py."""
    file_names = list(shipped_configs())
    name = path.name if path.name in file_names else f"{path.name}.py"
    if len(path.parts) == 1 and name in file_names:
        return config_folder() / name
    hint = nearest(path.name, [*file_names, *(k.removesuffix(".py") for k in file_names)], 1)
    if algorithm := next((word for word in re.split(r"[^a-z]+", path.stem.lower()) if word in STAGES), None):
        having = [name for name, line in shipped_configs().items() if algorithm in f"{name} {line}".lower()]
        hint = f" {algorithm} has {', '.join(having)}." if having else hint
    elif "dpo" in path.stem.lower():
        hint = f" DPO is not implemented; the stages are {', '.join(STAGES)}."
    raise UserError(f"--config {spec}: no such file, and no such config.{hint} Shipped: {', '.join(file_names)}.")


def _run_file(path: pathlib.Path, variant: str | None) -> Config:
    """Run a config file and return its get_config(variant); every failure becomes a UserError with file and line."""
    spec = importlib.util.spec_from_file_location(f"rlhf_jax_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config {path}: a config is a .py file or a run's config.json.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise UserError(f"{path} defines no get_config(variant=None) that returns a config.")
        variants = getattr(module, "VARIANTS", {})
        if not isinstance(variants, dict | list | tuple | set | frozenset):
            raise UserError(f"{path}: VARIANTS is of type {type(variants).__name__}; it must be a dict or a list.")
        if variant is not None and variant not in variants:
            choices = f"It has {', '.join(map(str, variants))}." if variants else "It has none (no VARIANTS)."
            raise UserError(f"{path.name} has no variant {variant!r}. {choices}")
        config = module.get_config() if variant is None else module.get_config(variant)
    except UserError:
        raise
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise UserError(f"{path}{where}: {error.msg}.") from None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # anything that user code raises, SystemExit included
        raise UserError(_explain(path, error)) from error
    if inspect.iscoroutine(config):
        config.close()  # avoids Python's warning about a coroutine that was never awaited
    if type(config) not in config_types().values():
        kinds = ", ".join(t.__name__ for t in config_types().values())
        raise UserError(f"{path}: get_config returned {type(config).__name__}; it must return one of {kinds}.")
    return config


def _explain(path: pathlib.Path, error: BaseException) -> str:
    """One line for an exception in a config file; for an unknown field, with the field that replaces TRL's name or the
    nearest fields."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f"{path}, line {frames[-1].lineno}" if frames else str(path)
    try:
        message = str(error)
    except Exception:  # an exception class of the user's
        message = "(no message: its __str__ raises)"
    text = f"{where}: {type(error).__name__}: {message}."
    unexpected = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '([^']*)'", message)
    types_by_name = {t.__name__: t for t in config_types().values()}
    if isinstance(error, TypeError) and unexpected and unexpected[1] in types_by_name:
        text += _hint_for_unknown(unexpected[2], types_by_name[unexpected[1]])
    return text


def _hint_for_unknown(field: str, config_type: type) -> str:
    """' It is num_generations here.' for one of TRL's names, else the nearest fields of the config."""
    if field in REMOVED:
        return f" {REMOVED[field].reason}"
    stage = next((name for name, stage_config in STAGES.items() if stage_config is config_type), None)
    answer = trl_options.answer(field, stage) if stage else None
    if answer is None:
        equivalent = trl_options.hint(field, field_types(config_type))
        return f" It is {equivalent} here." if equivalent else nearest(field, field_types(config_type))
    if answer.renamed:
        return f" It is {answer.renamed.to} here" + (f": {answer.text}." if answer.text else ".")
    return f" {answer.text}"

"""The command `rlhf-jax configs`: lists the shipped configs, shows one, copies one to edit."""

from __future__ import annotations

import ast
import os
import pathlib
import sys
from collections.abc import Sequence

from rlhf_jax import storage
from rlhf_jax.config.files import config_folder, load_config, shipped_config, shipped_configs, to_json
from rlhf_jax.errors import UserError
from rlhf_jax.option import nearest
from rlhf_jax.utils import output

USAGE = """usage: rlhf-jax configs list                      every shipped config and its variants
       rlhf-jax configs show NAME                 the file of a config, with a reason beside each option
       rlhf-jax configs show NAME:VARIANT         every option of a variant, as JSON
       rlhf-jax configs copy NAME [FILE]          copy a config to edit; default: NAME in this folder

Train with a copy by rlhf-jax train --config FILE."""
ACTIONS = ("list", "show", "copy")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 0, or 2 after a user error (one line on stderr)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        output.show(USAGE)
        return 0 if words else 2
    try:
        output.show(run(words))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    return 0


def run(words: Sequence[str]) -> str:
    """The output of the command.

    Raises:
      UserError: a word is not understood, there is no such config, or the copy would replace a file.
    """
    action, *names = words
    if action not in ACTIONS:
        raise UserError(f"unknown action {action!r}.{nearest(action, ACTIONS, 1)} It is one of {', '.join(ACTIONS)}.")
    if action == "list" and not names:
        return table()
    if action == "show" and len(names) == 1:
        return show(names[0])
    if action == "copy" and len(names) in (1, 2):
        return f"written: {copy(*names)}"
    raise UserError(f"configs {action} does not take {len(names)} names; see rlhf-jax configs --help.")


def table() -> str:
    """Every shipped config with what it is, and its variants."""
    rows = shipped_configs()
    width = max(map(len, rows))
    lines = []
    for name, meaning in rows.items():
        lines.append(f"{name:<{width}}  {meaning}")
        variant_names = variants(config_folder() / name)
        if variant_names != []:
            names = " ".join(f":{variant}" for variant in variant_names or ()) or f"see rlhf-jax configs show {name}"
            lines.append(f"{'':<{width}}  variants: {names}")
    return "\n".join(lines)


def variants(path: pathlib.Path) -> list[str] | None:
    """The names in a config file's VARIANTS, which is read, not run; None where they are not written out."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "VARIANTS":
            names = node.value.keys if isinstance(node.value, ast.Dict) else getattr(node.value, "elts", [])
            constants = [str(name.value) for name in names if isinstance(name, ast.Constant)]
            return constants if len(constants) == len(names) else None
    return []


def show(spec: str) -> str:
    """The text of a config file, or the resolved options of a variant as JSON."""
    if ":" in spec:
        return to_json(load_config(spec)).rstrip()
    return shipped_config(spec).read_text(encoding="utf-8").rstrip()


def copy(name: str, file: str | None = None) -> str:
    """Copies a config. Returns the path of the copy."""
    source = shipped_config(name)
    target = file or source.name
    if os.path.isdir(storage.located(target)):
        target = os.path.join(target, source.name)
    try:
        with open(storage.located(target), "x", encoding="utf-8") as out:
            out.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{target} exists; give another name: rlhf-jax configs copy {name} FILE.") from None
    except OSError as error:
        raise UserError(f"cannot write {target} ({error}).") from None
    return target

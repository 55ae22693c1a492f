"""The keys of config.json that transformers' config class of a model_type declares.

They are read from the source of the class: to import it imports torch where torch is installed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

NO_DEFAULT = object()
"""The default of a key whose default is no literal."""


@functools.cache
def declared_keys(model_type: str) -> dict[str, Any] | None:
    """{key: its default or NO_DEFAULT} of the class and of the base of all classes: fields, arguments, other names of
    fields (`attribute_map`) and older keys that the class still takes. None where transformers has no such class."""
    spec = importlib.util.find_spec("transformers")  # does not import it
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    folder = model_type.removesuffix("_text").removesuffix("_vision")
    path = root / "models" / folder / f"configuration_{folder}.py"
    classes = [node for node in _classes(path) if _assigned(node).get("model_type") == model_type]
    if not classes:
        return None
    base = [node for node in _classes(root / "configuration_utils.py") if node.name == "PreTrainedConfig"]
    keys = {key: default for node in (*base, *classes) for key, default in _fields(node).items()}
    return {**dict.fromkeys(_other_names(classes[0]), NO_DEFAULT), **keys}


def _classes(path: Path) -> list[ast.ClassDef]:
    if not path.is_file():
        return []
    return [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]


def _assigned(node: ast.ClassDef) -> dict[str, Any]:
    """Class attributes without annotations."""
    plain = [statement for statement in node.body if isinstance(statement, ast.Assign)]
    return {ast.unparse(statement.targets[0]): _literal(statement.value) for statement in plain}


def _other_names(node: ast.ClassDef) -> set[str]:
    """Names that the class takes besides its fields: those of attribute_map, and what it pops from its arguments."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and call.args]
    popped = [call.args[0] for call in calls if ast.unparse(call.func) in ("kwargs.pop", "kwargs.get")]
    return {*_assigned(node).get("attribute_map", ()), *map(_literal, popped)}


def _fields(node: ast.ClassDef) -> dict[str, Any]:
    """Of a dataclass; of a plain class the arguments of __init__."""
    fields = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
            fields[ast.unparse(statement.target)] = _literal(statement.value)
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = [argument.arg for argument in (*statement.args.args[1:], *statement.args.kwonlyargs)]
            defaults = [_literal(default) for default in (*statement.args.defaults, *statement.args.kw_defaults)]
            fields |= dict.fromkeys(arguments, NO_DEFAULT)
            fields |= dict(zip(reversed(arguments), reversed(defaults), strict=False))
    return fields


def _literal(node: ast.expr | None) -> Any:
    try:
        return NO_DEFAULT if node is None else ast.literal_eval(node)
    except ValueError:
        return NO_DEFAULT

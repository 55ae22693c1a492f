"""The site: every page is in its navigation, and the Python reference lists public names with docstrings that say all.

CI builds it with `mkdocs build --strict`, which finds broken links, anchors and names.
"""

import dataclasses
import importlib
import inspect
import re

import pytest

import rlhf_jax
from tests.helpers.paths import ROOT

REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def listed() -> dict[str, object]:
    """What `:::` names: objects, and the public functions and classes of modules, by their dotted names."""
    found = {}
    for name in re.findall(r"^::: ([\w.]+)$", REFERENCE, re.M):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            home, _, attribute = name.rpartition(".")
            found[name] = getattr(importlib.import_module(home), attribute)
            continue
        names = getattr(module, "__all__", None) or [
            own for own, value in vars(module).items() if getattr(value, "__module__", "") == name and own[0] != "_"
        ]
        found |= {f"{name}.{own}": getattr(module, own) for own in names}
    return found


LISTED = listed()


def test_every_page_is_in_the_navigation_once():
    nav = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1], re.M)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(nav) == sorted({*pages, "changelog.md"})


def test_the_reference_lists_the_public_names():
    public = {getattr(rlhf_jax, name) for name in rlhf_jax.__all__}
    options = {value for value in public if dataclasses.is_dataclass(value)}  # their fields are on options.md
    assert all(value.__name__ in REFERENCE for value in options)
    assert not {value.__name__ for value in public - options} - {value.__name__ for value in LISTED.values()}
    assert len(LISTED) > 60


@pytest.mark.parametrize("name", [name for name, value in LISTED.items() if inspect.isfunction(value)])
def test_a_docstring_of_the_reference_names_every_argument_what_is_returned_and_what_is_raised(name):
    function = LISTED[name]
    doc, signature = inspect.getdoc(function), inspect.signature(function)
    assert doc, name
    for argument in signature.parameters:
        assert re.search(rf"(?<!\w){argument}(?!\w)", doc), f"{name}: {argument}"
    source = inspect.getsource(function)
    if signature.return_annotation not in ("None", None):
        assert re.search(r"\breturn|\bA response to|-> |->", doc, re.I) or doc.split()[0] in ("The", "A", "An", "1"), (
            name
        )
    for error in set(re.findall(r"^\s+raise (\w+)\(", source, re.M)):
        assert error in doc, f"{name} raises {error}"


ARRAYS = [name for name in LISTED if name.startswith(("rlhf_jax.advantages.", "rlhf_jax.losses."))]


@pytest.mark.parametrize("name", ARRAYS)
def test_an_equations_docstring_has_shapes_and_dtypes(name):
    doc = inspect.getdoc(LISTED[name])
    assert re.search(r"\[[^\]]*\]|any shape|same shape|one shape", doc), name
    assert re.search(r"float|int|bool", doc), name

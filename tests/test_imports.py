"""The walls between the rooms: who may import what, and how long a room may be."""

import ast
import pathlib

import pytest

import rlhf_jax

PACKAGE = pathlib.Path(rlhf_jax.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
OUTSIDE = {
    *("os", "io", "sys", "pathlib", "shutil", "tempfile", "glob", "time", "datetime", "socket", "requests", "urllib"),
    *(
        "http",
        "httpx",
        "aiohttp",
        "rich",
        "tqdm",
        "logging",
        "subprocess",
        "orbax",
        "safetensors",
        "tensorboardX",
        "wandb",
        "trackio",
    ),
    *("huggingface_hub", "datasets", "tokenizers", "transformers", "matplotlib", "random", "tyro", "argparse"),
}
OWNERS = {  # an outside thing, and the files that may touch it
    "orbax": {"checkpoint.py"},
    "safetensors": {"models/weight_files.py"},
    "argparse": {"command.py", "train.py", "report/__main__.py"},
    "matplotlib": {"report/pictures.py"},
    "tyro": {"command.py", "train.py"},
    "jax.distributed": {"distributed.py"},
    "jax.experimental.multihost_utils": {"distributed.py"},
    "socket": {"peers.py", "rewards/remote.py"},
    "tensorboardX": {"metrics.py"},
    "wandb": {"trackers.py"},
    "trackio": {"trackers.py"},
    "rouge_score": {"evaluate/rouge.py"},
    "rich": {"tables.py", "terminal.py"},
    "urllib": {"rewards/remote.py"},
    "http": {"rewards/remote.py"},
    "jinja2": set(),
    "torch": set(),
    "tensorflow": set(),
    "flax.nnx": set(),
}


def package_of(file: str) -> list[str]:
    return ["rlhf_jax", *pathlib.PurePosixPath(file).parts[:-1]]


def imports(file: str) -> set[str]:
    """Dotted names that a file imports, everywhere in it: `from a.b import c` gives a.b and a.b.c."""
    found = set()
    for node in ast.walk(FILES[file]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package_of(file)[: -node.level + 1 or None] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def dotted(node: ast.AST) -> str:
    """'jax.sharding.Mesh' of the expression jax.sharding.Mesh, '' of others."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def uses(file: str) -> set[str]:
    """Dotted expressions in a file, and its imports."""
    return {dotted(node) for node in ast.walk(FILES[file]) if isinstance(node, ast.Attribute)} | imports(file)


def under(name: str, roots) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def ours(file: str) -> set[str]:
    """Modules of ours that a file imports, as 'types' or 'models.hf' (and names in them)."""
    return {name.removeprefix("rlhf_jax.") for name in imports(file) if name.startswith("rlhf_jax.")}


@pytest.mark.parametrize("file", ["advantages.py", "losses.py"])
def test_equations_import_nothing_of_ours_but_types(file):
    assert all(under(name, ["types"]) for name in ours(file)), ours(file)
    assert all(under(n, ["__future__", "jax", "chex", "typing", "collections", "rlhf_jax"]) for n in imports(file))


def test_models_never_import_trainers_stages_or_configs():
    forbidden = ["trainers", "stages", "train", "config", "configfile", "command", "arithmetic"]
    for file in FILES:
        if file.startswith("models/"):
            assert not [name for name in ours(file) if under(name, forbidden)], file


def test_trainers_touch_no_file_clock_network_or_printer():
    files = [file for file in FILES if file.startswith("trainers/")]
    assert files
    for file in files:
        assert not [name for name in imports(file) if under(name, OUTSIDE)], file
        called = {dotted(node.func) for node in ast.walk(FILES[file]) if isinstance(node, ast.Call)}
        assert not called & {"open", "print", "input"}, file
        assert not [name for name in ours(file) if under(name, ["train", "stages", "folder", "metrics", "checkpoint"])]


@pytest.mark.parametrize("outside", OWNERS)
def test_one_owner_for_each_outside_thing(outside):
    for file in FILES:
        if file not in OWNERS[outside]:
            assert not [name for name in uses(file) if under(name, [outside])], f"{file} touches {outside}"


def test_meshes_are_made_in_sharding_alone():
    for file, tree in FILES.items():
        if file == "sharding.py":
            continue
        called = {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not {name for name in called if name.split(".")[-1] in ("Mesh", "make_mesh")} - {"sharding.make_mesh"}, (
            file
        )


def test_nnx_and_pmap_are_nowhere():
    for file in FILES:
        words = {part for name in uses(file) for part in name.split(".")}
        assert not words & {"nnx", "pmap"}, file


def test_no_file_is_over_420_lines():
    long = {file: n for file in FILES if (n := len((PACKAGE / file).read_text().splitlines())) > 420}
    assert not long


def test_public_functions_and_classes_have_docstrings():
    bare = []
    for file, tree in FILES.items():
        if file != "__init__.py":
            assert ast.get_docstring(tree) is not None or file.endswith("__init__.py"), f"{file} says nothing of itself"
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and ast.get_docstring(node) is None:
                bare.append(f"{file}: {node.name}")
    assert not bare

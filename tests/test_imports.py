"""The walls between the rooms: who may import what."""

import ast
import functools
import importlib
import json
import pathlib
import types
from importlib import util

import pytest

from tests.helpers import durations
from tests.helpers.paths import PACKAGE, ROOT

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
    *("huggingface_hub", "datasets", "tokenizers", "transformers", "matplotlib", "random", "argparse"),
}
OWNERS = {  # an outside thing, and the files that may touch it
    "orbax": {"runtime/checkpoint.py"},
    "safetensors": {"models/io/safetensors.py"},
    "fsspec": set(),
    "s3fs": {"storage/bucket.py"},
    "gcsfs": {"storage/bucket.py"},
    "boto3": set(),
    "google.cloud": set(),
    "argparse": set(),
    "matplotlib": {"report/pictures.py"},
    "jax.distributed": {"parallel/multihost.py"},
    "jax.experimental.multihost_utils": {"parallel/multihost.py"},
    "socket": {"parallel/liveness.py"},
    "tensorboardX": {"metrics/tensorboard.py"},
    "wandb": {"runtime/trackers.py"},
    "trackio": {"runtime/trackers.py"},
    "rouge_score": {"evaluate/rouge.py"},
    "math_verify": {"rewards/math_worker.py"},
    "rich": {"utils/tables.py", "runtime/progress.py"},
    "urllib": {"rewards/server.py"},
    "http": {"report/serve.py"},
    "httpx2": {"rewards/server.py"},
    "jinja2": set(),
    "torch": set(),
    "tensorflow": set(),
    "flax.nnx": set(),
}
FLOORS = [  # a room imports from its own floor's rooms below it alone: lower floors first
    ("utils",),
    ("errors", "types"),
    ("option",),
    ("advantages", "losses", "generate", "parallel", "storage"),
    ("models", "data", "metrics"),
    ("algorithms",),
    ("rewards",),
    ("tools",),
    ("runtime",),
    ("config",),
    ("stages",),
    ("inference",),
    ("dry_run", "evaluate"),
    ("report",),
    ("rerun",),
    ("train", "chat", "compile"),
    ("sweep",),
    ("cli",),
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TESTS = ROOT / "tests"
OTHER_TESTS = {  # folders of tests that no folder of the package has
    "helpers": "what several test files share",
    "integration": "whole runs: the command, resume, processes, devices, the hub, docs, notebooks, packaging",
    "parity": "recorded runs of TRL, replayed; and what is held against other implementations",
    "robustness": "hostile input, accidents, kills, security",
    "scripts": "the scripts, by their names",
}
OF_SEVERAL_MODULES = {  # test files in a mirrored folder that no single module has
    "algorithms/test_invariance.py": "PPO, RLOO and the sampler: order, buckets, micro-batches",
    "generate/test_generate.py": "prompts in, a rollout out",
    "models/families/test_families.py": "every family beside transformers",
    "models/families/test_family_shapes.py": "every family at random shapes",
    "models/families/test_switches.py": "every switch of the decoder's config",
    "parallel/test_collectives.py": "what the compiled programs of an update send between devices",
    "parallel/test_devices_work.py": "how much of an update each device computes",
    "parallel/test_devices_tokens.py": "micro-batches of tokens on several devices",
    "report/test_report.py": "a report from its folders to its page",
    "test_imports.py": "the walls themselves",
}


def package_of(file: str) -> list[str]:
    return ["rlhf_jax", *pathlib.PurePosixPath(file).parts[:-1]]


@functools.cache
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


@functools.cache
def uses(file: str) -> set[str]:
    """Dotted expressions in a file, and its imports."""
    return {dotted(node) for node in ast.walk(FILES[file]) if isinstance(node, ast.Attribute)} | imports(file)


def under(name: str, roots) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def ours(file: str) -> set[str]:
    """Modules of ours that a file imports, as 'types' or 'models.io.hf' (and names in them)."""
    return {name.removeprefix("rlhf_jax.") for name in imports(file) if name.startswith("rlhf_jax.")}


@pytest.mark.parametrize("file", ["advantages.py", "losses.py"])
def test_equations_import_nothing_of_ours_but_types(file):
    assert all(under(name, ["types"]) for name in ours(file)), ours(file)
    assert all(under(n, ["__future__", "jax", "chex", "typing", "collections", "rlhf_jax"]) for n in imports(file))


def room_of(file: str) -> str:
    """'models' of 'models/io/hf.py', 'train' of 'train.py'."""
    return file.split("/")[0].removesuffix(".py")


def modules_imported(file: str) -> set[str]:
    """Files of ours that a file imports."""
    found, names = set(), ours(file)
    for name in names:
        if name.replace(".", "/") + "/__init__.py" in FILES and any(under(other, [name]) for other in names - {name}):
            continue  # `from rlhf_jax.data import batches` imports batches
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            path = "/".join(parts[:end])
            if (hit := next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in FILES), None)) is not None:
                found.add(hit)
                break
    return found - {file}


def test_every_room_has_its_floor():
    rooms = {room_of(file) for file in FILES} - {"__init__"}
    assert rooms == set(FLOOR)


def test_a_room_imports_from_lower_floors_alone():
    upward = []
    for file in FILES:
        for other in modules_imported(file) if file != "__init__.py" else ():
            here, there = room_of(file), room_of(other)
            if there not in (here, "__init__") and FLOOR[there] >= FLOOR[here]:
                upward.append(f"{file} imports {other}")
    assert not upward


def test_modules_import_in_no_circle():
    arrows = {file: modules_imported(file) for file in FILES}
    done: set[str] = set()

    def walk(file: str, above: tuple[str, ...]) -> None:
        assert file not in above, " -> ".join((*above[above.index(file) :], file))
        if file not in done:
            for other in sorted(arrows[file]):
                walk(other, (*above, file))
            done.add(file)

    for file in FILES:
        walk(file, ())


def test_models_never_import_algorithms_stages_or_configs():
    for file in FILES:
        if file.startswith("models/"):
            assert not [name for name in ours(file) if under(name, ["algorithms", "stages", "train", "config"])], file


def test_algorithms_touch_no_file_clock_network_or_printer():
    files = [file for file in FILES if file.startswith("algorithms/")]
    assert files
    for file in files:
        assert not [name for name in imports(file) if under(name, OUTSIDE)], file
        called = {dotted(node.func) for node in ast.walk(FILES[file]) if isinstance(node, ast.Call)}
        assert not called & {"open", "print", "input"}, file


@pytest.mark.parametrize("outside", OWNERS)
def test_one_owner_for_each_outside_thing(outside):
    for file in FILES:
        if file not in OWNERS[outside]:
            assert not [name for name in uses(file) if under(name, [outside])], f"{file} touches {outside}"


def test_meshes_are_made_in_sharding_alone():
    for file, tree in FILES.items():
        if file == "parallel/sharding.py":
            continue
        called = {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not {name for name in called if name.split(".")[-1] in ("Mesh", "make_mesh")} - {"sharding.make_mesh"}, (
            file
        )


def test_nnx_and_pmap_are_nowhere():
    for file in FILES:
        words = {part for name in uses(file) for part in name.split(".")}
        assert not words & {"nnx", "pmap"}, file


def test_a_config_has_the_type_of_the_options_that_are_read():
    """mypy checks algorithms, config, generate and stages by it."""
    untyped = []
    for file, tree in FILES.items():
        if room_of(file) in ("algorithms", "config", "data", "generate", "rewards", "stages"):
            functions = [node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            for arg in (arg for args in functions for arg in (*args.args, *args.kwonlyargs) if arg.arg == "config"):
                if arg.annotation is None or "Any" in ast.unparse(arg.annotation):
                    untyped.append(f"{file}:{arg.lineno}")
    assert not untyped


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


# --- the tests themselves

TEST_FILES = {path.relative_to(TESTS).as_posix(): path for path in sorted(TESTS.rglob("*.py"))}


def test_every_folder_of_the_package_has_its_folder_of_tests():
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")}
    tested = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert not folders - tested, f"no tests in {sorted(folders - tested)}"
    foreign = {folder for folder in tested - folders if folder.split("/")[0] not in OTHER_TESTS}
    assert not foreign, f"rlhf_jax has no {sorted(foreign)}"
    assert not OTHER_TESTS.keys() & {folder.split("/")[0] for folder in folders}


def test_a_test_file_is_named_after_the_module_that_it_tests():
    nameless = []
    for file, path in TEST_FILES.items():
        folder = PACKAGE / path.parent.relative_to(TESTS)
        if path.name.startswith("test_") and folder.is_dir() and file not in OF_SEVERAL_MODULES:
            modules = {module.stem for module in folder.glob("*.py")}
            name = path.stem.removeprefix("test_")
            if not any(name == module or name.startswith(f"{module}_") for module in modules):
                nameless.append(file)
    assert not nameless and OF_SEVERAL_MODULES.keys() <= TEST_FILES.keys()


def test_no_test_file_imports_another():
    crossing = []
    for file, path in TEST_FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}: import by the full name"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            crossing += [(file, name) for name in names if any(part.startswith("test_") for part in name.split("."))]
    assert not crossing


def test_every_folder_of_tests_is_a_package():
    """Two files of one name in two folders are two modules then."""
    folders = {path.parent for path in TESTS.rglob("*.py")} - {TESTS / "helpers" / "fake_trackers"}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_what_scripts_and_configs_import_of_the_package_exists():
    """Some import within a function that no test calls."""
    missing = []
    for path in (*(ROOT / "scripts").rglob("*.py"), *(ROOT / "configs").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rlhf_jax":
                module = importlib.import_module(node.module)
                names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                missing += [f"{path}: {name}" for name in names if not util.find_spec(f"{node.module}.{name}")]
    assert not missing


def test_the_files_that_took_longest_come_first_and_their_tests_in_order():
    names = ("a::1", "b::1", "new::1", "b::2", "a::2")
    items = [types.SimpleNamespace(nodeid=name, path=pathlib.Path(name[: name.index(":")])) for name in names]
    durations.slowest_files_first(items, {"a::1": 3.0, "a::2": 0.5, "b::1": 2.0, "b::2": 2.0, "a::gone": 9.0})
    assert [item.nodeid for item in items] == ["b::1", "b::2", "a::1", "a::2", "new::1"]


def test_a_session_records_the_seconds_of_its_tests_and_keeps_those_of_others(tmp_path):
    path = tmp_path / "cache" / "durations.json"
    assert durations.read(path) == {}
    durations.record(path, {"a::1": 1.0, "b::1": 2.0})
    durations.record(path, {"b::1": 3.004})
    assert durations.read(path) == {"a::1": 1.0, "b::1": 3.0}
    (tmp_path / "file").write_text("")
    durations.record(tmp_path / "file" / "durations.json", {"a::1": 1.0})  # no folder: no error
    path.write_text('{"a::1": 1')
    assert durations.read(path) == {}


def test_the_committed_durations_are_of_slow_tests_that_exist():
    seconds = json.loads(durations.COMMITTED.read_text(encoding="utf-8"))
    assert seconds and min(seconds.values()) >= durations.SLOW and durations.COMMITTED.stat().st_size < 20_000
    assert [test for test in seconds if not durations.exists(test)] == []

"""scripts/mutate.py: what it changes and leaves alone, what it remembers, and a toy package from end to end."""

import ast
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "mutate.py"
spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
mutate = sys.modules["mutate"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutate)

SOURCE = '''"""Docstring: 1 + 2, True."""
from __future__ import annotations
import chex

LIMIT = 3  # é: a character of two bytes


@dataclasses.dataclass(frozen=True)
class Options:
    """Holds 4 < 5."""

    size: Literal[1, 2] = 7


def é(x: Array[2], y: float = 0.5, *, flag: bool = True) -> Array[1]:
    """Returns x - 1."""
    chex.assert_rank(x, 2)
    assert x > 0, 1 + 1
    if y < 0:
        raise ValueError(f"not {y + 1}, " + "é" * 3)
    z = "é", x.shape[:1] + (x - y,)

    def inner(a):
        return -a if flag else jnp.where(
            a > y,
            "é" + a,
            a,
        )

    return inner(z)
'''
UNTOUCHED = ("Docstring", "import", "dataclass(", "Holds", "Returns", "chex.assert", "assert x", "raise")


def of(line: str) -> list[str]:
    """The mutants of one statement."""
    return [mutant.mutated for mutant in mutate.mutants_of("m.py", f"def f():\n    {line}\n")]


# ------------------------------------------------------------------------------------------------------------- mutants


def test_each_mutant_compiles_and_differs_from_the_source_where_it_says_and_nowhere_else():
    mutants = mutate.mutants_of("m.py", SOURCE)
    assert len(mutants) == 15
    for mutant in mutants:
        tree = ast.parse(mutant.source)
        assert ast.dump(tree) != ast.dump(ast.parse(SOURCE))
        lines, old = mutant.source.splitlines(), SOURCE.splitlines()
        assert len(lines) == len(old)
        changed = [number for number, (a, b) in enumerate(zip(old, lines), 1) if a != b]
        assert changed[0] >= mutant.line and len(changed) == (2 if mutant.operator == "where swapped" else 1)
        assert mutant.original in " ".join(SOURCE.split()) and mutant.mutated in " ".join(mutant.source.split())
    assert len({mutant.source for mutant in mutants}) == len({mutant.id for mutant in mutants}) == len(mutants)


def test_texts_annotations_assertions_errors_imports_and_decorators_are_left_alone():
    mutants = mutate.mutants_of("m.py", SOURCE)
    for mutant in mutants:
        assert not any(word in mutant.original for word in UNTOUCHED), mutant
        annotations = [ast.dump(node.annotation) for node in ast.walk(ast.parse(mutant.source)) if has_annotation(node)]
        assert annotations == [
            ast.dump(node.annotation) for node in ast.walk(ast.parse(SOURCE)) if has_annotation(node)
        ]
    defaults = {mutant.mutated for mutant in mutants if mutant.original.startswith(("def é", "size"))}
    assert defaults == {
        "size: Literal[1, 2] = 8",
        "size: Literal[1, 2] = 6",
        "def é(x: Array[2], y: float = 1.0, *, flag: bool = True) -> Array[1]:",
        "def é(x: Array[2], y: float = 0.5, *, flag: bool = False) -> Array[1]:",
    }


def has_annotation(node) -> bool:
    return getattr(node, "annotation", None) is not None


@pytest.mark.parametrize(
    "line, wanted",
    [
        ("a - (b) * c", ["a + (b) * c", "a - (b) / c"]),
        ("a // b", ["a * b"]),
        ("x.shape[1:] + (a,)", ["x.shape[2:] + (a,)", "x.shape[0:] + (a,)"]),
        ("a * 1", ["a * 2", "a * 0"]),
        ("a < b == c", ["a <= b == c", "a < b != c"]),
        ("a is not b", ["a is b"]),
        ("a not in b", ["a in b"]),
        ("a & ~b & c", ["(a & ~b | c)", "(a | ~b) & c", "a & b & c"]),
        ("a and not b or c", ["(a and not b and c)", "(a or not b) or c", "a and b or c"]),
        ("-(a + b)", ["(a + b)", "-(a - b)"]),
        ("f(-1, 2, 1.0, 0.0, 0.3, 1e-8)", 8),
        ("x[:, -t:b]", ["x[:, t:b]", "x[:, -t + 1:b]", "x[:, -t:b - 1]"]),
        ("x[:-1]", ["x[:1]", "x[:-2]"]),
        ("min(jnp.minimum(a, b), x.sum())", 3),
        ("jnp.where(m, a + b, 'é')", ["jnp.where(m, 'é', a + b)", "jnp.where(m, a - b, 'é')"]),
        ("jnp.where(m)", []),
        ("exp(lax.stop_gradient(a - b))", ["exp((a - b))", "exp(lax.stop_gradient(a + b))"]),
        ("jnp.exp(a)", ["jnp.expm1(a)"]),
        ("f(x, axis=-1, keepdims=True)", ["f(x, axis=0, keepdims=True)", "f(x, axis=-1, keepdims=False)"]),
        ("f(x, axis=(1, 2))", ["f(x, axis=(2, ))"]),
        ("a if flag else b", ["a if not flag else b"]),
        ("x['key'], f'{1 + 1}', None", []),
    ],
)
def test_the_operators_one_by_one(line, wanted):
    found = of(line)
    assert sorted(found) == sorted(wanted) if isinstance(wanted, list) else len(found) == wanted
    if line.startswith("f(-1"):
        values = [ast.literal_eval(text[1:]) for text in found]
        assert sorted(values)[:2] == [(-2, 2, 1.0, 0.0, 0.3, 1e-8), (-1, 1, 1.0, 0.0, 0.3, 1e-8)]
        assert {value[-1] for value in values} == {1e-8, 0.0} and (-1, 2, 1.0, 0.0, 0.6, 1e-8) in values


def test_ids_are_stable_and_keys_outlive_a_change_elsewhere_but_not_one_in_the_function():
    first, again = (mutate.mutants_of("m.py", SOURCE) for _ in range(2))
    assert [mutant.id for mutant in first] == [mutant.id for mutant in again]
    assert [m.id.rpartition(":")[0] for m in first[:2]] == ["m.py:5:8:constant - 1", "m.py:5:8:constant + 1"]
    below = mutate.mutants_of("m.py", SOURCE.replace("LIMIT = 3", "LIMIT = 3\nOTHER = None"))
    assert {m.key for m in below} & {m.key for m in first} == {m.key for m in first if m.function != "<module>"}
    inside = mutate.mutants_of("m.py", SOURCE.replace("inner(z)", "inner(zz)"))
    gone = {m.function for m in first if m.key not in {other.key for other in inside}}
    assert gone == {"é", "é.inner"}


def test_a_sample_is_a_function_of_the_seed_takes_of_every_file_and_grows_by_adding():
    mutants = mutate.mutants_of("a.py", SOURCE) + mutate.mutants_of("b.py", SOURCE)
    three, five = (mutate.sample(mutants, 1, number) for number in (3, 5))
    assert three == mutate.sample(mutants[::-1], 1, 3) != mutate.sample(mutants, 2, 3)
    assert [mutant.file for mutant in sorted(three, key=lambda m: m.file)] == ["a.py"] * 3 + ["b.py"] * 3
    assert set(three) < set(five)
    assert sorted(mutate.sample(mutants, 1, None), key=mutants.index) == mutants


def test_every_mutant_of_the_repository_has_an_id_of_its_own_and_the_tables_name_what_exists():
    project = mutate.Project(SCRIPT.parents[1], mutate.SUITE, [], mutate.EQUIVALENT)
    mutants = project.mutants()
    assert len({mutant.id for mutant in mutants}) == len({mutant.key for mutant in mutants}) == len(mutants)
    sources = {f"rlhf_jax/{name}.py" for name in ("advantages", "losses", "generate")}
    sources |= {f"rlhf_jax/algorithms/{path.name}" for path in (project.root / "rlhf_jax/algorithms").glob("[a-z]*.py")}
    assert {mutant.file for mutant in mutants} == set(mutate.SUITE) == sources
    tests = {entry.split()[0] for file in mutate.SUITE for entry in project.tests_of(file)}
    assert [name for name in tests if not (project.root / name).exists()] == []
    assert "no mutant" not in mutate.report(mutants, [], mutate.EQUIVALENT)
    with pytest.raises(SystemExit, match="nothing.py is none of rlhf_jax/advantages.py"):
        project.mutants(["nothing.py"])


# -------------------------------------------------------------------------------------------------------------- report


def test_the_report_counts_by_file_and_shows_survivors_and_equivalents():
    source = "def f(a, b):\n    return a - b, a < b, a == b, -a, a * b\n"
    mutants = mutate.mutants_of("x.py", source) + mutate.mutants_of("y.py", "def g(a):\n    return -a\n")
    statuses = ("killed", "timeout", "survived", "survived")
    lines = [{"key": m.key, "status": status, "seconds": 1.0} for m, status in zip(mutants, statuses)]
    lines += [{**lines[0], "status": "survived"}, lines[0]]  # the last one counts
    lines += [{"key": "x.py:f+9:1:+ to -:old", "status": "survived", "seconds": 1.0}]  # of a function that changed
    table = [("x.py", "f", "-a", "a", "why not"), ("x.py", "f", "a / b", "a", "gone"), ("x.py", "f", "-", "+", "wrong")]
    text = mutate.report(mutants, lines, table)
    assert text.splitlines()[:5] == [
        "| file | mutants | killed | timeout | survived | equivalent | not run | share |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| x.py | 5 | 1 | 1 | 1 | 1 | 1 | 66.7 % |",
        "| all | 6 | 1 | 1 | 1 | 1 | 2 | 66.7 % |",
        "| y.py | 1 | 0 | 0 | 0 | 0 | 1 | - |",
    ]
    survivor = "- x.py:2 `f`, == to !=\n  - `return a - b, a < b, a == b, -a, a * b`\n  - `return a - b, a < b, a != b,"
    assert f"## Survivors: 1\n\n{survivor}" in text
    assert "## Equivalent: 1\n\n- x.py:2 `f`, minus dropped: why not" in text
    assert "an entry that is no mutant: ('x.py', 'f', 'a / b', 'a')" in text
    assert "an entry that was killed: ('x.py', 'f', '-', '+')" in text


# ---------------------------------------------------------------------------------------------------------- end to end

TOY = """
def larger(a, b):
    return a if a > b else b


def count(n, step):
    total = 0
    while total < n:
        total = total + step
    return total


def scale(x):
    return x / 4


def unused(x):
    return -x
"""
STRONG = """
from toy import core


def test_zero():
    assert core.larger(0, 0) == 0 and core.scale(0) == 0


def test_count():
    assert core.count(4, 2) == 4


def test_larger():
    assert core.larger(1, 2) == core.larger(2, 1) == 2
"""
DRIVER = f"""
import pathlib, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import mutate
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests are a job in the background
table = [("toy/core.py", "larger", ">", ">=", "both are the larger one")]
suite = {{"toy/core.py": ["tests/test_first.py", "tests/test_last*.py"]}}
sys.exit(mutate.main(project=mutate.Project(pathlib.Path("project").resolve(), suite, [], table, 3.0)))
"""


@pytest.fixture
def toy(tmp_path) -> pathlib.Path:
    """A folder with a package and tests that see some of its mutants."""
    for name, text in {"toy/core.py": TOY, "toy/__init__.py": "", "tests/test_first.py": STRONG}.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    (tmp_path / "drive.py").write_text(DRIVER)
    return tmp_path


def start(toy, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, "drive.py", *arguments], cwd=toy, env=environment, **pipes)


def drive(toy, *arguments: str, status: int = 0) -> str:
    process = start(toy, *arguments)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == status, printed
    return printed


def records(toy) -> dict[str, dict]:
    lines = [json.loads(line) for line in (toy / "out.jsonl").read_text().splitlines()]
    return {f"{line['function']} {line['operator']}": line for line in lines}


def test_a_strong_test_kills_a_weak_one_does_not_and_a_second_run_does_only_what_is_left(toy):
    before = {path: path.read_bytes() for path in (toy / "project").rglob("*") if path.is_file()}
    printed = drive(toy, "--out", "out.jsonl", "--jobs", "2")
    assert printed.splitlines()[-1] == "7 of 7 mutants done, 0 left" and printed.count("baseline") == 1
    found = records(toy)
    assert {name: record["status"] for name, record in found.items()} == {
        "count constant + 1": "killed",
        "count < to <=": "killed",
        "count + to -": "timeout",
        "scale / to *": "survived",
        "scale constant + 1": "survived",
        "scale constant - 1": "survived",
        "unused minus dropped": "survived",
    }
    killed = found["count < to <="]
    assert killed["killed_by"] == "tests/test_first.py::test_count"
    assert found["count + to -"]["killed_by"] == "tests/test_first.py::test_count"
    assert (killed["file"], killed["line"]) == ("toy/core.py", 8)
    assert (killed["original"], killed["mutated"]) == ("while total < n:", "while total <= n:")
    assert {path: path.read_bytes() for path in (toy / "project").rglob("*") if path.is_file()} == before
    report = drive(toy, "--report", "out.jsonl")
    assert "| toy/core.py | 8 | 2 | 1 | 4 | 1 | 0 | 42.9 % |" in report
    assert "`unused`, minus dropped: no test calls it" in report and "both are the larger one" in report

    # What is recorded is not run again, but for a function that has changed; nor is the baseline measured again then.
    (toy / "out.jsonl").write_text((toy / "out.jsonl").read_text() + '{"key": "cut sho')
    assert "0 left" in (again := drive(toy, "--out", "out.jsonl")) and "survived" not in again
    core = toy / "project" / "toy" / "core.py"
    core.write_text("# one line more\n" + TOY.replace("x / 4", "x / 5"))
    again = drive(toy, "--out", "out.jsonl")
    assert again.count("survived") == 3 == again.count("toy/core.py:15:") and "killed" not in again
    # New tests: what survived is run again, until the first of them fails.
    (toy / "project" / "tests" / "test_last_of_all.py").write_text(
        "from toy import core\n\ndef test_scale():\n    assert core.scale(1) == 0.2\n"
    )
    again = drive(toy, "--out", "out.jsonl", "--again", "--files", "core.py")
    assert again.count("killed ") == 3 == again.count("tests/test_last_of_all.py::test_scale")
    assert "timeout" in again and "unused" not in [line.split()[0] for line in again.splitlines()]
    assert "| toy/core.py | 8 | 5 | 1 | 1 | 1 | 0 | 85.7 % |" in drive(toy, "--report", "out.jsonl")


def test_tests_that_fail_without_a_mutation_stop_the_run_and_are_named(toy):
    (toy / "project" / "tests" / "test_first.py").write_text("def test_wrong():\n    assert 1 == 2\n")
    printed = drive(toy, "--out", "out.jsonl", status=1)
    assert "tests/test_first.py does not pass without a mutation (tests/test_first.py::test_wrong)" in printed
    assert "assert 1 == 2" in printed and not (toy / "out.jsonl").exists()


def test_a_time_cap_and_an_interrupt_end_cleanly_with_what_was_done(toy):
    assert drive(toy, "--out", "out.jsonl", "--cap_minutes", "0").splitlines() == ["0 of 7 mutants done, 7 left"]
    slow = textwrap.dedent("""
        import time
        def test_slow():
            time.sleep(1)
    """)
    (toy / "project" / "tests" / "test_first.py").write_text(STRONG + slow)
    process = start(toy, "--out", "out.jsonl")
    for line in process.stdout:
        if "survived" in line and "unused" not in line:
            process.send_signal(signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=60)
    done = len(records(toy))
    assert process.returncode == 0 and rest.splitlines()[-2:] == [
        "interrupted",
        f"{done} of 7 mutants done, {7 - done} left",
    ]
    assert 0 < done < 7

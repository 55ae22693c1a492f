"""The docs say what is there: links lead somewhere, commands have options that exist, every option has its line."""

import ast
import pathlib
import re
import sys

import pytest

from rlhf_jax import chat, cli
from rlhf_jax.config import command_line
from rlhf_jax.config import files as config_files
from rlhf_jax.evaluate import options as evaluate_options
from rlhf_jax.report import __main__ as report
from rlhf_jax.sweep import plan
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import options_page  # noqa: E402

from tests.helpers.docs_commands import FENCE, PAGES, STANDS_FOR, commands, programs, text_of  # noqa: E402


def anchors(page: pathlib.Path) -> set[str]:
    """Those of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ +(.*)$", FENCE.sub("", text_of(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page)))
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


COMMANDS = commands()


def test_there_are_commands():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(COMMANDS)])
def test_documented_commands_are_understood(page, words):
    """Options and values by the command's own parser; of scripts, the options by their source."""
    words = ["tldr_ppo.py" if word in programs() else STANDS_FOR.get(word, word) for word in words]
    if "rlhf_jax.train" in words:
        given = [word for word in words[words.index("rlhf_jax.train") + 1 :] if word and word != "--help"]
        if "$@" not in given:
            command_line.parse(given)
    elif "rlhf_jax.report" in words:
        given = words[words.index("rlhf_jax.report") + 1 :]
        assert command_line.parse_options(given, report.ReportOptions, report.PROG, positional="run_dirs").run_dirs
    elif "rlhf_jax.evaluate" in words:
        evaluate_options.parse(words[words.index("rlhf_jax.evaluate") + 1 :])
    elif "rlhf_jax.chat" in words:
        given = words[words.index("rlhf_jax.chat") + 1 :]
        assert command_line.parse_options(given, chat.ChatOptions, chat.PROG, positional="model").model
    elif "rlhf_jax.cli" in words:
        given = words[words.index("rlhf_jax.cli") + 1 :]
        assert given[0] in cli.COMMANDS or given[0].startswith("--") or given[0] == "COMMAND"
        if given[0] == "sweep" and len(given) > 1 and given[1] != "--help":
            assert plan.parse(given[1:]).runs
        if given[:2] in (["configs", "copy"], ["configs", "show"]) and given[2] != "NAME":
            assert config_files.shipped_config(given[2].partition(":")[0]).is_file()
    else:
        script = next(word for word in words if "scripts/" in word)
        path = ROOT / script[script.index("scripts/") :]
        assert path.exists()
        if path.suffix == ".py":
            given = words[words.index(script) + 1 :]
            if "--" in given:
                command_line.parse(given[given.index("--") + 1 :])
                given = given[: given.index("--")]
            taken = options_in(path)
            assert not [word for word in given if word.startswith("--") and word.partition("=")[0] not in taken]


def options_in(script: pathlib.Path) -> set[str]:
    """Words that begin with -- in the calls of a script and of the modules beside it that it imports."""
    tree, found = ast.parse(text_of(script)), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")}
            if any(isinstance(a, ast.JoinedStr) and ast.unparse(a)[2:].startswith("--{") for a in node.args):
                found |= {f"--{c.value}" for c in ast.walk(tree) if isinstance(c, ast.Constant)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            beside = [script.with_name(f"{module}.py") for module in modules]
            found |= {option for path in beside if path.exists() for option in options_in(path)}
    return found


def test_the_page_of_options_is_the_dataclasses():
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == options_page.page(), (
        "python scripts/options_page.py > docs/options.md"
    )


def test_every_option_has_a_meaning():
    for owner in options_page.tables():
        for option in options_page.declared_options(owner):
            assert options_page.meaning(owner, option.name), f"{owner.__name__}: {option.name}"


def files_of_tests() -> dict[str, list[str]]:
    """{name of a test function: the files that have it}, both without test_."""
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        file = path.relative_to(ROOT / "tests").with_name(path.stem.removeprefix("test_")).as_posix()
        for node in ast.parse(text_of(path)).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name.removeprefix("test_"), []).append(file)
    return found


def test_tests_that_the_pages_name_are_there():
    """`FILE::TEST`: FILE is the end of one path under tests/, enough to tell it; `replay::CASE` is a recorded run."""
    files, named = files_of_tests(), 0
    for page in PAGES:
        for file, test in re.findall(r"`([\w/]+)::([\w]+)`", text_of(page)):
            if (file, test) == ("FILE", "TEST") or (file, test) == ("replay", "CASE"):
                continue
            recorded = file == "replay" and (ROOT / "tests" / "parity" / "cases" / test).is_dir()
            found = [path for path in files.get(test, ()) if f"/{path}".endswith(f"/{file}")]
            assert recorded or len(found) == 1, f"{page.name}: {file}::{test} is {found or files.get(test)}"
            named += 1
        for path in re.findall(r"tests/[\w/]+\.(?:py|json)", text_of(page)):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"
    assert named > 80

"""The docs say what is there: links lead somewhere, commands have options that exist, every option has its line."""

import ast
import pathlib
import re
import shlex
import sys

import pytest

from rlhf_jax import command
from rlhf_jax.evaluate import options as evaluate_options
from tests.children import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import options_page  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```[^\n]*\n.*?^```", re.M | re.S)
STANDS_FOR = {"$COMMON": "", "CONFIG": "quickstart.py", "my_ppo.py": "tldr_ppo.py"}
"""What a command leaves to the reader, and what may stand there."""


def text_of(page: pathlib.Path) -> str:
    return page.read_text(encoding="utf-8")


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


def words_of(text: str) -> list[list[str]]:
    """The words of each command in shell text; one that is inside quotes comes by itself, after the one around it."""
    found, line = [], ""
    for part in re.split(r"\n|&&", re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "))):
        line = f"{line} && {part}" if line else part
        try:
            words = shlex.split(line)
        except ValueError:  # within quotes, which end further on
            continue
        found += [words, *(inner for word in words if " " in word for inner in words_of(word))]
        line = ""
    return found


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every command of ours in a block of the docs."""
    found = []
    for page in PAGES:
        for block in FENCE.findall(text_of(page)):
            if not re.match(r"```(?!bash|sh|$)\w", block):
                found += [(page.name, words) for words in words_of(block.strip("`\n")) if is_ours(words)]
    return found


def is_ours(words: list[str]) -> bool:
    """Whether a command is of this package or of scripts/."""
    modules = {"rlhf_jax.train", "rlhf_jax.evaluate"}
    return bool(modules & {*words}) or any(re.match(r"(\S*/)?scripts/\w", word) for word in words)


COMMANDS = commands()


def test_there_are_commands():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(COMMANDS)])
def test_documented_commands_are_understood(page, words):
    """Options and values by the command's own parser; of scripts, the options by their source."""
    words = [STANDS_FOR.get(word, word) for word in words]
    if "rlhf_jax.train" in words:
        given = [word for word in words[words.index("rlhf_jax.train") + 1 :] if word]
        if "$@" not in given:
            command.parse(given)
    elif "rlhf_jax.evaluate" in words:
        evaluate_options.parse(words[words.index("rlhf_jax.evaluate") + 1 :])
    else:
        script = next(word for word in words if "scripts/" in word)
        path = ROOT / script[script.index("scripts/") :]
        assert path.exists()
        if path.suffix == ".py":
            given = words[words.index(script) + 1 :]
            if "--" in given:
                command.parse(given[given.index("--") + 1 :])
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
        elif isinstance(node, ast.Import):
            beside = [script.with_name(f"{name.name}.py") for name in node.names]
            found |= {option for path in beside if path.exists() for option in options_in(path)}
    return found


def test_the_page_of_options_is_the_dataclasses():
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == options_page.page(), (
        "python scripts/options_page.py > docs/options.md"
    )


def test_every_option_has_a_meaning():
    for config, title in options_page.PAGES:
        for option in options_page.options_of(config):
            assert option.meaning or options_page.inherited(config, option.name), f"{title}: {option.name}"

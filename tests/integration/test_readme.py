"""README: its length, its numbers beside the pages where they were measured, and its programs."""

import re

import pytest

from tests.helpers.checkpoints import write_policy
from tests.helpers.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = "\n".join(
    line for line in re.sub(r"^```.*?^```", "", README, flags=re.S | re.M).splitlines() if not line.startswith("|")
)
MEASURED = {  # a number in README, the page of its measurement, and the row or sentence that has it there
    "PPO, Pythia-14m, two CPU cores, float32 | 2.7": ("benchmarks.md", r"\| PPO 14m, batch 16.*\*\*2\.7, 2\.7\*\*"),
    "RLOO, Pythia-14m, two CPU cores, float32 | 2.1 to 2.2": (
        "benchmarks.md",
        r"\| RLOO 14m, batch 16.*\*\*2\.2, 2\.2, 2\.1\*\*",
    ),
    "PPO, Pythia-410m, one H100, bfloat16; TRL was measured on another day | 2.3 to 2.4": (
        "benchmarks.md",
        r"`cudnn` \(`auto` on Hopper\).*\*\*2\.3\*\*.*\n.*\*\*2\.4\*\*",
    ),
    "2 to 10 minutes on two CPU cores": ("results.md", r"2 to 10 minutes on the two-core machines"),
    "seed 42, jax 0.10, 30 November 2026": ("results.md", r"with the code of 30 November 2026"),
    "48 updates": ("results.md", r"48 updates of 128 responses"),
    "five seeds": ("results.md", r"\| PPO, rlhf_jax \| 5 \|"),
    "410M parameters": ("benchmarks.md", r"\| PPO 410m \| 16 both \|"),
}
ELSEWHERE = {  # numbers that are no measurement: versions, names, sizes of a call
    *("0.1.0", "0.10", "1.12.0", "3.11", "2026", "512", "53", "2.0"),
}


def numbers(text: str) -> list[str]:
    """Numbers that stand alone in the prose and tables of the page, outside links, code and names."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|(?:Qwen|Gemma|OLMo|Phi|GPT)[- ]\d(?: and \d)?", "]", text)
    return re.findall(r"(?<![\w.-])\d[\d.,]*\d|(?<![\w.-])\d(?![\w.])", text)


def test_readme_is_short():
    words = re.findall(r"[A-Za-z0-9][\w'.-]*", re.sub(r"\]\([^)]*\)", "]", PROSE))
    assert len(README.splitlines()) <= 130 and len(words) <= 600


@pytest.mark.parametrize("claim", MEASURED)
def test_a_number_of_readme_is_on_the_page_where_it_was_measured(claim):
    page, pattern = MEASURED[claim]
    assert claim in README
    assert re.search(pattern, (ROOT / "docs" / page).read_text(encoding="utf-8")), f"{claim}: not in docs/{page}"


def quickstart_table() -> list[list[str]]:
    """The cells of README's final table of the quickstart."""
    rows = re.search(r"^(\| \| SFT \| PPO \|.*?)\n\n", README, re.M | re.S).group(1).splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_the_quickstart_is_that_of_results():
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = quickstart_table()
    assert len(rows) >= 4
    for row in rows:
        assert f"| {' | '.join(row)} |" in results, row


def test_every_number_of_readme_is_measured_or_known():
    known = {number for claim in MEASURED for number in numbers(claim)} | ELSEWHERE
    known |= {number for row in quickstart_table() for cell in row for number in numbers(cell)}
    assert not [number for number in numbers(README) if number not in known]


@pytest.mark.runs
def test_the_program_of_readme_runs(tmp_path, monkeypatch, capsys):
    """As it is printed, after a tiny stand-in for the quickstart's SFT policy, for fewer episodes."""
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    write_policy(tmp_path / "runs" / "quickstart" / "sft" / "policy")
    episodes = '"total_episodes": 640'
    assert episodes in program
    exec(compile(program.replace(episodes, '"total_episodes": 128'), "README.md", "exec"), {})
    assert (tmp_path / "runs" / "brevity" / "policy" / "model.safetensors").is_file()
    assert re.search(r"^-?\d+\.\d+ \[.*\]$", capsys.readouterr().out, re.M)

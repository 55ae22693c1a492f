"""docs/numerics.md and reliability.md: every row of the register, every switch, no test or run that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
SWITCHES = (
    "preset score_position whiten_ddof adam_eps weight_decay eos_penalty_mode query_overflow pad_to old_logprobs "
    "kl_estimator loss_agg metrics_masked reward_text_eos baseline_excludes_truncated grad_clip"
)


def rows(first_cell: str) -> list[list[str]]:
    """The cells of the table rows whose first cell is like that."""
    lines = [line for line in PAGE.splitlines() if re.match(rf"\| {first_cell} \|", line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_row_of_the_register_is_told_once_in_every_column():
    found = rows(r"\d+")
    assert [int(row[0]) for row in found] == list(range(1, 31))
    assert all(len(row) == 6 and all(row) for row in found)


def test_every_switch_is_told():
    for switch in SWITCHES.split():
        (row,) = rows(switch)
        assert len(row) == 6 and all(row), switch


def test_the_tests_and_runs_that_the_page_names_are_there():
    faults = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_/.]+)::([a-z0-9_]+)`", PAGE + faults)
    assert len(named) > 80
    for file, test in named:
        if file == "replay":
            assert (ROOT / "tests" / "parity" / "cases" / test / "case.json").is_file(), test
            continue
        path = ROOT / "tests" / (file if file.endswith(".py") else f"test_{file}.py")
        assert f"def test_{test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"

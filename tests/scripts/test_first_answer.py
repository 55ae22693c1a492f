"""scripts/bench/first_answer.py."""

import sys

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "bench"))
import first_answer  # noqa: E402


def test_every_case_is_timed(golden_sft, monkeypatch):
    monkeypatch.setattr(first_answer, "TEXT", "i met anna.")
    cases = {
        name: {**options, "text": "i met anna.", "max_new_tokens": 4} for name, options in first_answer.CASES.items()
    }
    monkeypatch.setattr(first_answer, "CASES", cases)
    seconds = dict(first_answer.measured(golden_sft.run_dir))
    assert list(seconds) == ["import and load", *cases] and all(value > 0 for value in seconds.values())

"""The process that runs math_verify: time limits in every thread, restarts, and how it ends.

Most tests use a stand-in for math_verify that does what a test asks for.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.rewards import math_verification
from rlhf_jax.rewards.math_verification import Verdict, Verifier
from tests.helpers.children import is_running
from tests.helpers.paths import ROOT

STAND_IN = """
import collections, itertools, os, pathlib, signal

def parse(text, **_):
    print("what libraries print")
    if "stuck" in text:
        collections.deque(itertools.repeat(0), maxlen=0)  # never returns to Python, so no signal is handled
    once = pathlib.Path(__file__).with_name("once")
    if "killed" in text and ("always" in text or not once.exists()):
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [] if text == "nothing" else [Parsed(text)]

def verify(gold, answer, **_):
    if "slow pair" in gold[0]:
        collections.deque(itertools.repeat(0), maxlen=0)
    return gold == answer

class Parsed(str):
    def __str__(self):
        if "endless" in self:
            raise ValueError("Exceeds the limit for integer string conversion")
        return os.environ.get("HF_TOKEN", str.__str__(self))
    __repr__ = __str__

LatexExtractionConfig = dict
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The folder of modules that the child process finds first."""
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    (tmp_path / "latex2sympy2_extended.py").write_text("NormalizationConfig = dict\n")
    (tmp_path / "sympy" / "core").mkdir(parents=True)
    for module in ("__init__.py", "core/__init__.py"):
        (tmp_path / "sympy" / module).touch()
    (tmp_path / "sympy" / "core" / "random.py").write_text("def seed(number):\n    pass\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.fixture
def verifier(stand_in):
    verifier = Verifier(0, 0)  # the worker adds a second of grace
    yield verifier
    verifier.close()


def test_rows_are_right_wrong_or_without_a_solution(verifier):
    assert verifier.verify("a", "a") == Verdict(True, "[a]", "[a]")
    assert verifier.verify("a\nü\ud800", "b") == Verdict(False, "[a\nü\ud800]", "[b]")
    assert verifier.verify("a", "nothing") == Verdict(False, "[a]", "[unparseable]")
    assert verifier.verify("nothing", "a") == Verdict(None, "[unparseable]", "[unparseable]")
    assert verifier.verify("endless", "endless") == Verdict(True, "[unprintable]", "[unprintable]")
    assert verifier.verify("a" * 200_000, "a" * 200_000).correct


@pytest.mark.parametrize(
    ("solution", "completion", "correct"),
    [("stuck", "a", None), ("a", "stuck", False), ("slow pair", "slow pair", False)],
)
def test_an_operation_that_ignores_its_alarm_ends_and_the_next_row_has_a_new_process(
    verifier, solution, completion, correct
):
    results = []
    start = time.monotonic()
    thread = threading.Thread(target=lambda: results.append(verifier.verify(solution, completion)))
    thread.start()
    thread.join(20)
    assert results[0].correct is correct and time.monotonic() - start < 15
    assert verifier.verify("a", "a").correct


def test_a_process_that_is_killed_is_started_again_and_the_row_repeated_once(verifier, stand_in):
    verifier.verify("a", "a")
    os.kill(verifier._process.pid, signal.SIGKILL)
    assert verifier.verify("a", "a").correct
    assert verifier.verify("a", "killed once").correct is False and (stand_in / "once").exists()
    assert verifier.verify("killed once", "killed once").correct
    assert verifier.verify("killed always", "a") == Verdict(None)
    assert verifier.verify("a", "a").correct


def test_signals_of_the_process_group_do_not_end_it(verifier):
    verifier.verify("a", "a")
    process = verifier._process
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    assert verifier.verify("a", "a").correct and verifier._process is process


def test_an_interrupted_row_does_not_leave_its_replies_to_the_next_one(verifier, monkeypatch):
    verifier.verify("a", "a")
    process = verifier._process

    class Interrupted:
        close = process.stdout.close

        def readline(self):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(process, "stdout", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            verifier.verify("a", "a")
    assert not is_running(process.pid)
    assert not verifier.verify("a", "b").correct


def test_threads_share_the_process_and_each_gets_its_own_verdicts(verifier):
    wrong = []

    def work(number):
        for i in range(50):
            verdict = verifier.verify(f"{number} {i}", f"{number} {i % 2 * i}")
            if verdict != Verdict(i % 2 == 1 or i == 0, f"[{number} {i}]", f"[{number} {i % 2 * i}]"):
                wrong.append(verdict)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_process_gets_no_credentials(verifier, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert verifier.verify("a", "a").gold == "[a]"


def test_close_ends_the_process_and_a_later_row_starts_one(verifier):
    verifier.close()
    verifier.verify("a", "a")
    process = verifier._process
    verifier.close()
    verifier.close()
    with pytest.raises(ProcessLookupError):  # not even a zombie
        os.kill(process.pid, 0)
    assert verifier.verify("a", "a").correct


def test_the_process_ends_with_a_parent_that_is_killed(stand_in):
    code = (
        f"import os, sys; sys.path[:0] = [{str(stand_in)!r}, {str(ROOT)!r}]\n"
        "from rlhf_jax.rewards.math_verification import Verifier\n"
        "verifier = Verifier()\nverifier.verify('a', 'a')\n"
        "print(verifier._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    child, deadline = int(done.stdout), time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_a_missing_and_a_broken_math_verify_are_told_with_the_extra(stand_in, verifier, monkeypatch, capfd):
    (stand_in / "math_verify.py").write_text("raise ImportError('Unsupported antlr4 version')\n")
    with pytest.raises(UserError, match=r"math_verify cannot be imported.*'.\[math\]'"):
        verifier.verify("a", "a")
    assert "Unsupported antlr4 version" in capfd.readouterr().err
    monkeypatch.setattr(math_verification, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"accuracy_reward needs .*math-verify: pip install '.\[math\]'"):
        math_verification.check_installed("accuracy_reward")


def test_math_verify_itself_runs_without_jax_and_within_its_limits():
    pytest.importorskip("math_verify")
    verifier = Verifier(parse_seconds=1, verify_seconds=1)
    try:
        verdict = verifier.verify(r"$\frac{1}{2}$", r"\boxed{0.5}")
        assert verdict.correct and verdict.gold.startswith("[1/2, ") and verdict.answer.startswith("[0.5")
        process = verifier._process
        maps = pathlib.Path(f"/proc/{process.pid}/maps")
        assert not maps.exists() or "jaxlib" not in maps.read_text()
        verdicts, slow_to_parse = [], r"\boxed{" + r"\frac{1}{" * 400 + "x" + "}" * 401
        rows = [("2", slow_to_parse), (slow_to_parse, "2"), (r"$100000000!$", r"\boxed{1}")]
        thread = threading.Thread(target=lambda: verdicts.extend(verifier.verify(*row) for row in rows))
        thread.start()
        thread.join(20)
        assert [verdict.correct for verdict in verdicts] == [False, None, False]
        assert verdicts[0].answer == "[unparseable]" and verdicts[2].gold.startswith("[factorial(100000000)")
        assert verifier._process is process  # math_verify's own limits sufficed
    finally:
        verifier.close()

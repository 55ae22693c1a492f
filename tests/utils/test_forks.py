"""utils/forks.py: a forked child is not the run."""

import os
import sys
import threading

import pytest

from rlhf_jax.utils import forks


def ended(child):
    """The exit code of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_thread(function):
    """The result of a function that a thread calls."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("call", [lambda function: function(), in_thread], ids=["main thread", "another thread"])
@pytest.mark.parametrize(
    ("leave", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: 1 / 0, 1, "ZeroDivisionError"),
        (lambda: sys.exit(7), 7, ""),
        (lambda: sys.exit("text"), 1, ""),
        (lambda: sys.exit(), 0, ""),
    ],
    ids=["returns", "raises", "exit with a number", "exit with a text", "exit"],
)
def test_a_child_that_leaves_ends_there(call, leave, code, said, capfd):
    def fork():
        with forks.no_child_leaves():
            child = os.fork()
            if not child:
                leave()
        return child

    process = os.getpid()
    assert ended(call(fork)) == code
    assert os.getpid() == process
    printed = capfd.readouterr().err
    assert said in printed and bool(printed) == bool(said)


def test_what_the_run_raises_passes():
    with pytest.raises(ValueError, match="mine"), forks.no_child_leaves():
        raise ValueError("mine")


def test_children_undo_the_latest_first_and_the_parent_nothing():
    done = []
    with (
        forks.undone_in_children(lambda: done.append("first")),
        forks.undone_in_children(lambda: done.append("second")),
    ):
        with forks.undone_in_children(lambda: done.append("over")):
            pass
        child = os.fork()
        if not child:
            os._exit(0 if done == ["second", "first"] else 1)
        assert ended(child) == 0
    assert done == []
    child = os.fork()
    if not child:
        os._exit(len(done))
    assert ended(child) == 0


def test_what_is_printed_before_a_fork_is_printed_once(tmp_path):
    with open(tmp_path / "out", "w") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        print("before")
        with forks.no_child_leaves():
            child = os.fork()
            if not child:
                print("child")
        ended(child)
    assert (tmp_path / "out").read_text() == "before\nchild\n"

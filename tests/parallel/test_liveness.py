"""Who dies is named and ends the others; who says goodbye does not. Processes without jax, which start at once."""

import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from tests.helpers.paths import ROOT

PROCESS = """
    import json, os, pathlib, sys, time
    from rlhf_jax.parallel import liveness

    index, folder, does = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
    liveness.EXIT_DELAY, liveness.ERROR_DELAY, liveness.LINGER = 0.3, 1.5, 4.0

    def from_first(action):
        path = folder / "said"
        if index == 0:
            (folder / "draft").write_text(json.dumps(action()))
            (folder / "draft").rename(path)
        while not path.exists():
            time.sleep(0.01)
        return json.loads(path.read_text())

    watch = liveness.start(index, 3, from_first)
    (folder / f"ready-{index}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    if does == "goodbye":
        watch.close()
    elif does == "error":
        print("error: mine", file=sys.stderr)
        watch.close("no such file")
    elif does == "slow error":  # cleans up with the others, who are gone by then
        watch.leave("no such file")
        time.sleep(60)
    elif does == "collective":
        print("seen", watch.peer_died(10.0), flush=True)
        time.sleep(60)
    else:
        time.sleep(60)
"""


def run(folder, *does):
    """Three processes that do these things; 'killed' is killed. (exit statuses, what they printed, seconds, pids)."""
    command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(folder), what],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, what in enumerate(does)
    ]
    try:
        while not all((folder / f"ready-{i}").exists() for i in range(3)):
            assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
            time.sleep(0.01)
        (folder / "go").touch()
        began = time.monotonic()
        for process, what in zip(processes, does):
            if what == "killed":
                os.kill(process.pid, signal.SIGKILL)
        texts = [process.communicate(timeout=30)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [p.returncode for p in processes], texts, time.monotonic() - began, [p.pid for p in processes]


@pytest.mark.parametrize("dies", [0, 2])
def test_a_killed_process_is_named_and_ends_the_others(tmp_path, dies):
    codes, texts, seconds, pids = run(tmp_path, *("killed" if i == dies else "work" for i in range(3)))
    assert codes == [-signal.SIGKILL if i == dies else 1 for i in range(3)] and seconds < 10
    for index in {0, 1, 2} - {dies}:
        assert texts[index].splitlines() == [
            f"error: process {dies} of 3 (host {socket.gethostname()}, pid {pids[dies]}) is gone",
            f"error: process {index} ends too; rerun the command on every process to resume from the newest checkpoint",
        ]


def test_a_goodbye_ends_nobody(tmp_path):
    codes, texts, _, _ = run(tmp_path, "goodbye", "goodbye", "goodbye")
    assert codes == [0, 0, 0] and texts == ["", "", ""]


def test_an_error_that_all_have_is_told_by_each_and_not_again(tmp_path):
    codes, texts, seconds, _ = run(tmp_path, "error", "error", "error")
    assert codes == [0, 0, 0] and texts == ["error: mine\n"] * 3 and seconds < 3


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_of_one_process_alone_is_told_by_the_others(tmp_path, which):
    codes, texts, _, pids = run(tmp_path, *("error" if i == which else "work" for i in range(3)))
    assert texts[which] == "error: mine\n" and codes[which] in (0, 1)
    for index in {0, 1, 2} - {which}:
        assert codes[index] == 1
        said = (
            f"process {which} of 3 (host {socket.gethostname()}, pid {pids[which]}) ended with an error: no such file"
        )
        assert texts[index].startswith(f"error: {said}\n")


def test_who_waits_for_the_others_in_cleaning_up_ends_when_they_are_gone(tmp_path):
    codes, texts, seconds, _ = run(tmp_path, "work", "slow error", "work")
    assert codes == [1, 1, 1] and texts[1] == "error: no such file\n" and seconds < 10


def test_a_broken_collective_can_wait_for_the_verdict(tmp_path):
    codes, texts, _, _ = run(tmp_path, "work", "collective", "killed")
    assert codes[:2] == [1, 1] and "seen True" in texts[1] and "process 2 of 3" in texts[1]


def test_who_connects_after_a_process_died_is_told_which(monkeypatch):
    from rlhf_jax.parallel import liveness

    told = queue.Queue()
    monkeypatch.setattr(
        liveness.PeerMonitor,
        "_end_process",
        lambda monitor, member, reason: told.put((monitor.me["process"], member["process"], reason)),
    )
    first, second, third = (liveness.PeerMonitor(index, 3) for index in range(3))
    port = first.listen("secret")
    assert third.connect(["127.0.0.1"], port, "secret") is None
    for connection in third._connections:
        connection.shutdown(socket.SHUT_RDWR)
    # Process 0 and the cut one, which sees the same.
    assert {told.get(timeout=5) for _ in range(2)} == {(0, 2, None), (2, 0, None)}
    assert second.connect(["127.0.0.1"], port, "secret") is None
    assert told.get(timeout=5) == (1, 2, None)
    for monitor in (first, second, third):
        monitor.close()


def test_a_stranger_on_the_port_is_not_a_process(tmp_path):
    from rlhf_jax.parallel import liveness

    watch = liveness.PeerMonitor(0, 2)
    port = watch.listen("secret")
    for hello in (b"GET / HTTP/1.1\r\n\r\n", b'{"token": "guess", "process": 1}\n', b"[]\n", b""):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    assert not watch._present and not watch.peer_died(0.2)
    watch.close()


def test_who_cannot_reach_the_first_process_says_so_and_goes_on(capsys):
    from rlhf_jax.parallel import liveness

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        place = {"port": port, "token": "x", "addresses": ["127.0.0.1"], "host": "elsewhere"}
        watch = liveness.start(1, 2, lambda action: place)
    assert "warning: process 1 cannot connect to process 0 (127.0.0.1:" in capsys.readouterr().err
    watch.close()

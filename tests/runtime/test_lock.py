"""One run a folder: the second is refused by name, and what a dead one left is free."""

import gc
import os
import signal
import subprocess
import sys

import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.runtime import run_folder
from rlhf_jax.runtime.lock import Lock

HOLDER = """
import sys, time
from rlhf_jax.runtime.lock import Lock
lock = Lock(sys.argv[1])
lock.take()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()


def test_a_second_run_in_a_folder_is_refused_with_the_first_ones_name(tmp_path, holder):
    said = rf"--run_dir {tmp_path} is in use by process {holder.pid} on .*, since 20.*: choose another folder"
    with pytest.raises(UserError, match=said):
        Lock(str(tmp_path)).take()
    with pytest.raises(UserError, match=said):
        Lock(str(tmp_path)).check()
    (tmp_path / "config.json").write_text('{"stage": "sft"}')
    with pytest.raises(UserError, match=said):
        run_folder.check(str(tmp_path), {"stage": "sft"})  # before a model is loaded
    assert holder.poll() is None


def test_the_lock_of_a_killed_run_is_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".lock").read_text()  # it had no time to clean up
    lock = Lock(str(tmp_path))
    lock.check()
    lock.take()
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        Lock(str(tmp_path)).take()
    lock.release()
    Lock(str(tmp_path)).take()


def test_a_child_holds_no_lock_and_releases_none(tmp_path):
    forks = "import os\nif not os.fork():\n    print(os.getpid(), flush=True)\n    time.sleep(60)\n    os._exit(0)\n"
    program = HOLDER.replace('print("held", flush=True)\n', forks)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            os.kill(child, 0)  # it lives
            Lock(str(tmp_path)).take()
        finally:
            os.kill(child, signal.SIGKILL)
    lock = Lock(str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    lock.take()
    child = os.fork()
    if not child:
        del lock
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(UserError, match="in use"):
        Lock(str(tmp_path / "other")).take()


def test_a_lock_file_of_another_kind_stops_nobody(tmp_path):
    (tmp_path / ".lock").write_text("who knows")
    lock = Lock(str(tmp_path))
    lock.take()
    with pytest.raises(UserError, match="is in use by"):
        Lock(str(tmp_path)).take()

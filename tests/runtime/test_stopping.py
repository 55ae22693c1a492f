"""A run that is stopped from outside saves at a safe point, says so by its exit code, and continues byte for byte."""

import dataclasses
import functools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import datasets
import multiprocess
import pytest

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "chaos"))  # as for a script run from there

import chaos_compare  # noqa: E402

import rlhf_jax  # noqa: E402
from rlhf_jax import train  # noqa: E402
from rlhf_jax.config import RLOOConfig, SFTConfig  # noqa: E402
from rlhf_jax.errors import UserError  # noqa: E402
from rlhf_jax.runtime import stopping  # noqa: E402
from rlhf_jax.runtime.callbacks import Callback  # noqa: E402
from rlhf_jax.runtime.stopping import Stopped, StopRequested, Stops  # noqa: E402

pytestmark = pytest.mark.runs

SHARED = {
    "scratch_model": "1x16x2",
    "tokenizer_name_or_path": "synthetic",
    "dataset_name": "synthetic",
    "max_train_samples": 16,
    "max_eval_samples": 4,
    "query_length": 64,
    "batch_size": 4,
    "micro_batch_size": 4,
    "learning_rate": 1e-2,
    "eval_steps": 2,
    "save_steps": 3,
}
SAMPLING = {
    "reward_model_path": None,
    "num_generations": 2,
    "response_length": 4,
    "num_sample_generations": 2,
    "length_buckets": (64,),
}
RLOO = RLOOConfig(sft_model_path=None, total_episodes=20, log_completions=True, **SAMPLING, **SHARED)
SFT = SFTConfig(model_name_or_path=None, max_steps=5, max_length=96, **SHARED)


class Kills:
    """A reward function that sends this process a signal at chosen calls: (update, in an evaluation)."""

    def __init__(self, *when, number=signal.SIGTERM, first=lambda: None):
        self.when, self.number, self.first = list(when), number, first

    def __call__(self, completion_ids, trainer_state, **_):
        if (result := self.first()) is not None:
            return result
        now = trainer_state.global_step, trainer_state.is_eval
        if now in self.when:
            self.when.remove(now)
            os.kill(os.getpid(), self.number)
            time.sleep(0.2)  # the thread that hears it
        return [-0.1 * ids[0] if ids else 0.0 for ids in completion_ids]


def left(run_dir):
    """What a run leaves that must be the same, by path."""
    folder = pathlib.Path(run_dir)
    names = ["metrics.jsonl", "finished.json", *(f"{kind}/*" for kind in ("policy", "completions"))]
    files = [path for name in names for path in sorted(folder.glob(name))]
    found = {str(path.relative_to(folder)): path.read_bytes().replace(str(folder).encode(), b"RUN") for path in files}
    shown = chaos_compare.board_of(folder / "tensorboard")
    return found | {name: repr(events) for name, events in shown.items() if not chaos_compare.is_clock(name)}


class Jumps(Callback):
    """Sets the wall clock a day ahead after the second update, and two days back after the fourth."""

    def __init__(self):
        self.right, self.off = time.time, 0.0

    def __call__(self):
        return self.right() + self.off

    def on_step_end(self, step, metrics, control):
        self.off = {2: 86400.0, 4: -86400.0}.get(step, self.off)


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    config = dataclasses.replace(SFT, max_minutes=30.0, save_minutes=30.0, save_total_limit=None)
    run(config, tmp_path / "right")
    clock = Jumps()
    monkeypatch.setattr(time, "time", clock)
    run(config, tmp_path / "wrong", callbacks=[clock])
    assert clock.off == -86400.0
    assert left(tmp_path / "wrong") == left(tmp_path / "right")
    saved = [sorted(os.listdir(tmp_path / name / "checkpoints")) for name in ("right", "wrong")]
    assert saved[0] == saved[1] == ["3", "5"]


def run(config, folder, reward=None, callbacks=()):
    given = {"reward_funcs": reward} if reward is not None else {}
    return rlhf_jax.run(dataclasses.replace(config, run_dir=str(folder)), callbacks=callbacks, **given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run(RLOO, folder / "rloo", Kills())
    run(SFT, folder / "sft")
    return folder


@pytest.mark.parametrize(
    ("when", "update"),
    [
        ((0, False), "before the first update"),
        ((3, False), "after update 3, which is saved"),  # within update 4, which is given up
        ((2, True), "after update 2, which is saved"),  # within its evaluation, which is done after the resume
        ((5, True), "after update 5, which is saved"),  # within the last one
    ],
)
def test_a_stopped_run_continues_byte_for_byte(whole, tmp_path, when, update):
    with pytest.raises(Stopped, match=f"rloo: stopped by SIGTERM {update}; rerun the command to resume") as stopped:
        run(RLOO, tmp_path / "run", Kills(when))
    assert stopped.value.__suppress_context__ and stopped.value.__cause__ is None
    run(RLOO, tmp_path / "run", Kills())
    assert left(tmp_path / "run") == left(whole / "rloo")


def test_a_run_may_be_stopped_again_and_again(whole, tmp_path):
    kills = Kills((1, False), (2, False), (2, True), (4, True), (4, False), number=signal.SIGINT)
    stopped = 0
    while kills.when:
        with pytest.raises(Stopped):
            run(RLOO, tmp_path / "run", kills)
        stopped += 1
    run(RLOO, tmp_path / "run", kills)
    assert stopped == 5 and left(tmp_path / "run") == left(whole / "rloo")


class Fails(Kills):
    """The same reward, which fails in place of sending a signal."""

    def __call__(self, completion_ids, trainer_state, **_):
        if (trainer_state.global_step, trainer_state.is_eval) in self.when:
            raise RuntimeError("out of order")
        return super().__call__(completion_ids, trainer_state)


@pytest.mark.parametrize("when", [(2, True), (3, False)])
def test_a_run_whose_reward_failed_continues_byte_for_byte(whole, tmp_path, when):
    failing = Fails(when)
    failing.__name__ = "Kills"  # by which its metrics are called
    with pytest.raises(UserError, match="out of order"):
        run(RLOO, tmp_path / "run", failing)
    run(RLOO, tmp_path / "run", Kills())
    assert left(tmp_path / "run") == left(whole / "rloo")


class KillAfter(rlhf_jax.Callback):
    def __init__(self, update):
        self.update = update

    def on_step_end(self, step, metrics, control):
        if step == self.update:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)


def test_supervised_stages_stop_too(whole, tmp_path):
    with pytest.raises(Stopped, match="sft.*SIGTERM.*update 3"):
        run(SFT, tmp_path / "run", callbacks=[KillAfter(2)])  # read while update 3 runs
    run(SFT, tmp_path / "run")
    assert left(tmp_path / "run") == left(whole / "sft")


def test_max_minutes_stops_before_they_are_over(tmp_path):
    clock = Stops(1.0, began=time.monotonic() - 40)
    clock.tick(whole=True)
    clock.record_seconds(update=10.0)  # another, half as long again, ends after 55 s
    clock.tick(whole=True)
    clock.record_seconds(saving=4.0)
    clock.tick()  # within an update only the save is ahead
    with pytest.raises(StopRequested):
        clock.tick(whole=True)
    assert clock.reason() == "by --max_minutes 1"


def test_the_command_says_by_its_exit_code_that_it_may_be_started_again(tmp_path, capsys):
    config = tmp_path / "config.py"
    config.write_text(
        "from rlhf_jax.config import SFTConfig\n\n\ndef get_config(variant=None):\n"
        f"    return SFTConfig(model_name_or_path=None, max_steps=2, max_length=96, **{SHARED!r})\n"
    )
    command = ["--config", str(config), "--run_dir", str(tmp_path / "run")]
    assert train.main([*command, "--max_minutes", "0.00001"]) == stopping.RESUMABLE == 75
    assert "sft: stopped by --max_minutes 1e-05 before the first update" in capsys.readouterr().err
    assert train.main(command) == 0


def test_handlers_are_given_back(tmp_path):
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    with Stops():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
    with Stops(), pytest.raises(Stopped, match="stopped by SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)  # outside the loop there is nothing to save
        time.sleep(1)


def test_a_second_signal_ends_at_once_whatever_the_process_does():
    program = """
import sys, time
from rlhf_jax.runtime.stopping import Stops
with Stops() as stops:
    stops.set_in_loop(True)
    print("ready", flush=True)
    for _ in range(600):
        time.sleep(0.1)
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    assert "SIGTERM" in child.stderr.readline() + child.stderr.readline()
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == 130
    assert "SIGINT" in child.stderr.read()


def square(x):
    return x * x


def pool():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, [1, 2]) == [1, 4]


def pool_of_multiprocess():
    with multiprocess.get_context("fork").Pool(2) as pool:
        assert pool.map(square, [1, 2]) == [1, 4]


def map_of_datasets():
    rows = datasets.Dataset.from_list([{"x": 1}, {"x": 2}])
    assert rows.map(lambda row: {"x": row["x"] ** 2}, num_proc=2)["x"] == [1, 4]


def time_limit():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()  # at once, perhaps before it runs
    child.join()
    assert child.exitcode == -signal.SIGTERM


def interrupt():
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    child = context.Process(target=lambda: (begun.set(), time.sleep(60)))
    child.start()
    begun.wait()
    os.kill(child.pid, signal.SIGINT)
    child.join()
    assert child.exitcode == 1


def child_that_exits():
    child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)


def child_that_returns():
    child = os.fork()
    if not child:
        return [99.0]
    os.waitpid(child, 0)


HABITS = (pool, pool_of_multiprocess, map_of_datasets, time_limit, interrupt, child_that_exits, child_that_returns)


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("habit", HABITS)
def test_a_reward_function_may_have_children(habit, whole, tmp_path, request):
    # A shell ignores SIGINT for what it runs in the background.
    request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run(RLOO, tmp_path / "rloo", Kills(first=habit))
    assert left(tmp_path / "rloo") == left(whole / "rloo")


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("habit", ["pool", "time_limit"])
def test_a_run_whose_reward_function_has_children_may_be_killed(habit, whole, tmp_path):
    code = "import pathlib, signal, sys; from tests.runtime import test_stopping as here; here.run(here.RLOO, "
    code += f"pathlib.Path(sys.argv[1]), here.Kills((3, False), first=here.{habit}, number=signal.SIGKILL))"
    command = [sys.executable, "-c", code, str(tmp_path / "rloo")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode == -signal.SIGKILL
    assert not (tmp_path / "rloo" / "policy").exists()
    run(RLOO, tmp_path / "rloo", Kills(first=globals()[habit]))
    assert left(tmp_path / "rloo") == left(whole / "rloo")


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_signal_to_the_run_counts_while_a_child_lives(whole, tmp_path):
    children = []

    def have_a_child():
        children.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)))
        children[-1].start()

    try:
        with pytest.raises(Stopped, match="after update 3, which is saved"):
            run(RLOO, tmp_path / "rloo", Kills((3, False), first=have_a_child))
        assert all(child.is_alive() for child in children)
        run(RLOO, tmp_path / "rloo", Kills())
    finally:
        for child in children:
            child.kill()
    assert left(tmp_path / "rloo") == left(whole / "rloo")


@pytest.mark.parametrize("name", [name for name in stopping.FROM_OUTSIDE if hasattr(signal, name)])
def test_the_signals_of_terminals_and_schedulers_stop_a_run(name, whole, tmp_path):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # the suite may run under nohup
    try:
        with pytest.raises(Stopped, match=f"stopped by {name} after update 3, which is saved"):
            run(RLOO, tmp_path / "rloo", Kills((3, False), number=number))
    finally:
        signal.signal(number, before)
    run(RLOO, tmp_path / "rloo", Kills())
    assert left(tmp_path / "rloo") == left(whole / "rloo")


def test_a_signal_that_is_ignored_or_handled_by_the_caller_stays_so(monkeypatch):
    heard = []
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR1)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with Stops() as stops:
            stops.set_in_loop(True)
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)
            assert heard == [signal.SIGUSR1] and stops.reason() is None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("taken", ["descriptor", "handler", "both"])
def test_a_library_that_takes_the_signals_later_does_not_lose_them(taken):
    with Stops() as stops:
        stops.set_in_loop(True)
        if taken != "handler":
            signal.set_wakeup_fd(-1)
        if taken != "descriptor":
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        if taken == "both":
            assert stops.reason() is None  # a safe point takes them back
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert stops.reason() == "by SIGTERM"

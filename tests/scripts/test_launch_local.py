"""scripts/launch/launch_local.py: environment of each process, which death is reported, signals reach all of them."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.children import is_running
from tests.helpers.paths import ROOT, SCRIPTS

SCRIPT = SCRIPTS / "launch" / "launch_local.py"
spec = importlib.util.spec_from_file_location("launch_local", SCRIPT)
launch_local = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch_local)

TOLD = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES", "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS")
TELL = "import json, os, sys; sys.stdout.write(json.dumps([sys.argv[1:], dict(os.environ)]) + '\\n')"


@pytest.fixture
def plain(monkeypatch):
    """A machine without GPUs, and nothing said about devices."""
    for name in (*TOLD, "JAX_PLATFORMS", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch_local.shutil, "which", lambda name: None)
    return monkeypatch


def start(*codes: str, grace: float = 20, argv=("--", "--config", "x.py"), **options) -> subprocess.Popen:
    """The script with a Python program for each process in place of rlhf_jax.train, in a process of its own."""
    pick = f"import os; exec({json.dumps(codes)}[int(os.environ['JAX_PROCESS_ID'])])"
    run = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import launch_local; "
        f"sys.exit(launch_local.main({['--processes', str(len(codes)), '--grace', str(grace), *argv]!r}, "
        f"[sys.executable, '-S', '-c', {pick!r}]))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", run], env={**os.environ, "JAX_PLATFORMS": "cpu"}, **pipes, **options)


def lines_of(process: subprocess.Popen, count: int) -> list[str]:
    """The next lines of its output, sorted: processes write in any order."""
    return sorted(process.stdout.readline().strip() for _ in range(count))


# --- what each process is told


def test_each_process_gets_the_address_their_number_and_its_own(plain, capfd):
    status = launch_local.main(
        ["--processes", "2", "--", "--config", "x.py", "--seed", "-1"], [sys.executable, "-S", "-c", TELL]
    )
    assert status == 0
    texts = sorted(capfd.readouterr().out.splitlines(), reverse=True)
    assert texts[1].startswith("[1] ")  # the number before the lines of all but the first
    (first, env0), (second, env1) = json.loads(texts[0]), json.loads(texts[1][4:])
    address = first[5]
    assert first == f"--config x.py --seed -1 --distributed {address} --num_processes 2 --process_id 0".split()
    assert second == [*first[:-1], "1"]
    host, port = address.split(":")
    assert host == "127.0.0.1" and 0 < int(port) < 65536
    for i, env in enumerate((env0, env1)):
        assert (env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"], env["JAX_NUM_CPU_DEVICES"]) == ("2", str(i), "1")
        assert env["JAX_COORDINATOR_BIND_ADDRESS"] == address
        assert "CUDA_VISIBLE_DEVICES" not in env


def test_cpu_devices_are_counted_for_each_process(plain):
    first, second = launch_local.shares(2, 4, {})
    assert first == second == {"JAX_NUM_CPU_DEVICES": "4", "NPROC": "32"}
    assert launch_local.shares(1, 4, {"NPROC": "5"}) == [{"JAX_NUM_CPU_DEVICES": "4", "NPROC": "5"}]
    assert launch_local.shares(1, None, {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}) == [
        {"JAX_NUM_CPU_DEVICES": "1"}
    ]


@pytest.mark.parametrize(
    "visible, processes, devices, expected",
    [
        ("0,1,2,3", 2, None, ["0,1", "2,3"]),
        ("0,1,2,3", 4, None, ["0", "1", "2", "3"]),
        ("0,1,2", 2, None, ["0", "1"]),
        ("4,7,5", 2, 1, ["4", "7"]),
        ("GPU-a, GPU-b", 2, None, ["GPU-a", "GPU-b"]),
        ("0,1,-1,2", 2, None, ["0", "1"]),
    ],
)
def test_gpus_are_shared_out_in_order(plain, visible, processes, devices, expected):
    found = launch_local.shares(processes, devices, {"CUDA_VISIBLE_DEVICES": visible})
    assert [place["CUDA_VISIBLE_DEVICES"] for place in found] == expected
    ids = ",".join(str(i) for i in range(expected[0].count(",") + 1))
    assert {place["JAX_LOCAL_DEVICE_IDS"] for place in found} == {ids}


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_none(plain, hidden):
    assert launch_local.shares(2, None, {"CUDA_VISIBLE_DEVICES": hidden}) == [{"JAX_NUM_CPU_DEVICES": "1"}] * 2


def test_the_machines_gpus_are_those_that_nvidia_smi_lists(plain, tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: H100 (UUID: GPU-a)'\necho '  MIG 1g'\necho 'GPU 1: H100 (UUID: GPU-b)'\n")
    fake.chmod(0o755)
    plain.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plain.setattr(launch_local.shutil, "which", lambda name: str(fake))
    assert [p["CUDA_VISIBLE_DEVICES"] for p in launch_local.shares(2, None, {})] == ["0", "1"]


# --- what is refused


@pytest.mark.parametrize(
    "environment, argv, message",
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "--processes 3 -- --config x", "--processes 3 needs 3 GPUs and there are 2"),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            "--processes 2 --devices_per_process 2 -- --config x",
            "--processes 2 with --devices_per_process 2 needs 4 GPUs and there are 2 (0,1): ask for fewer",
        ),
        ({"JAX_PLATFORMS": "tpu"}, "--processes 2 -- --config x", "one process drives all chips"),
        ({}, "--processes 2 -- --config x --distributed a:1", "--distributed, --num_processes, --process_id are set"),
        ({}, "--processes 2 -- --config x --process_id=1", "--process_id are set by this script"),
    ],
)
def test_what_cannot_run_is_refused_with_what_to_do(plain, capsys, environment, argv, message):
    for name, value in environment.items():
        plain.setenv(name, value)
    assert launch_local.main(argv.split(), ["false"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        ("-- --config x", "required: --processes"),
        ("--processes 0 -- --config x", "--processes 0: give 1 or more"),
        ("--processes 2 --devices_per_process 0 -- --config x", "--devices_per_process 0: give 1 or more"),
        ("--processes 2 --grace -1 -- --config x", "--grace -1.0: give 0 or more seconds"),
        ("--processes 2 --grace nan -- --config x", "--grace nan: give 0 or more seconds"),
        ("--processes 2", "--config CONFIG after --"),
        ("--processes 2 --", "--config CONFIG after --"),
        ("--processes 2 --config x", "--config x: options of rlhf_jax.train must follow --"),
    ],
)
def test_a_wrong_option_is_named(plain, capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        launch_local.main(argv.split(), ["false"])
    assert stop.value.code == 2 and message in capsys.readouterr().err


# --- how it ends

# A signal between the last line of Python and a long sleep would be heard after the sleep only: short ones.
NAPS = "import time\nfor _ in range(600): time.sleep(0.1)"
FOREVER = "import sys; sys.stdout.write('up\\n'); sys.stdout.flush()\n" + NAPS


def test_all_ended_well_is_0():
    process = start("os.write(1, b'a\\n')", "os.write(1, b'b\\n')", "pass")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, sorted(out.split("\n")), err) == (0, ["", "[1] b", "a"], "")


def test_the_one_that_dies_is_named_its_code_returned_and_the_others_ended():
    began = time.monotonic()
    failing = "import sys; print('no such file', file=sys.stderr); sys.exit(3)"
    process = start(FOREVER, failing, FOREVER, grace=0.3)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 3 and time.monotonic() - began < 15
    assert err == "[1] no such file\nlaunch_local: process 1 ended with code 3; the other 2 end in 0.3 s\n"


def test_a_signal_that_killed_is_named_and_returned_as_a_shell_would():
    process = start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", FOREVER, grace=0.1)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGSEGV
    assert err == "launch_local: process 0 was ended by signal 11 (SIGSEGV); the other 1 end in 0.1 s\n"


def test_others_that_end_by_themselves_within_the_grace_are_let_to():
    slow = "import os, time; time.sleep(0.5); os.write(1, b'saved\\n')"
    process = start(slow, "import sys; sys.exit(2)", grace=20)
    out, err = process.communicate(timeout=15)
    assert (process.returncode, out) == (2, "saved\n") and "process 1 ended with code 2" in err


def test_one_that_does_not_hear_sigterm_is_killed():
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER
    process = start(deaf, "import sys, time; time.sleep(0.5); sys.exit(4)", grace=0.2)
    process.communicate(timeout=20)
    assert process.returncode == 4


HEARS = """
import signal, sys
def heard(number, frame):
    sys.stdout.write(f"heard {number}\\n")
    sys.exit(CODE)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, heard)
"""


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_a_signal_is_passed_on_to_all_once_and_their_status_returned(number, code):
    program = HEARS.replace("CODE", str(code)) + FOREVER
    process = start(program, program)
    assert lines_of(process, 2) == ["[1] up", "up"]
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert sorted(out.splitlines()) == [f"[1] heard {number:d}", f"heard {number:d}"]
    assert process.returncode == code


def test_a_second_interrupt_kills_those_that_did_not_hear_the_first():
    deaf = "import os, signal; signal.signal(signal.SIGINT, lambda *_: os.write(1, b'deaf\\n'))\n" + FOREVER
    process = start(deaf, deaf)
    assert lines_of(process, 2) == ["[1] up", "up"]
    process.send_signal(signal.SIGINT)
    assert lines_of(process, 2) == ["[1] deaf", "deaf"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends children with their parent")
def test_no_process_outlives_a_launcher_that_was_killed():
    tell = "import os; os.write(1, b'%d\\n' % os.getpid())\n" + NAPS
    process = start(tell, tell)
    pids = [int(line.split()[-1]) for line in lines_of(process, 2)]
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


# --- the page


def test_the_page_has_the_commands_that_the_scripts_of_one_machine_take_from_it():
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    for script, program in (("slurm", "sbatch"), ("openmpi", "mpirun")):
        (awk,) = re.findall(r"awk '(.*?)' ", (SCRIPT.parent / f"{script}_one_machine.sh").read_text(encoding="utf-8"))
        run = subprocess.run(["awk", awk], input=page, stdout=subprocess.PIPE, text=True, check=True)
        assert run.stdout.startswith(f"{program} ") and run.stdout.count("\n") == run.stdout.count("\\\n") + 1
        assert "--config quickstart.py" in run.stdout and "`" not in run.stdout


def test_the_files_that_the_page_names_are_there():
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<!tests/)scripts/[a-z_/]+\.[a-z]+", page))
    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).is_file()] == []

"""Runs rlhf_jax.train as one run of several processes on this machine.

    python scripts/launch/launch_local.py --processes 2 -- --config quickstart.py
    python scripts/launch/launch_local.py --processes 2 --devices_per_process 4 -- --config my_ppo.py --mesh_fsdp 8

Options after `--` go to every process. The GPUs of CUDA_VISIBLE_DEVICES, or all of the machine, are divided among the
processes in order. Without GPUs, or with JAX_PLATFORMS=cpu, each process gets --devices_per_process CPU devices. Output
of process 0 is unchanged; lines of the others start with their number. Ctrl-C and SIGTERM are forwarded to all, a
second Ctrl-C kills them. If a process dies, it is reported, the others are terminated after --grace seconds, and its
exit code is returned, or 128 + the signal.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

TRAIN = (sys.executable, "-m", "rlhf_jax.train")
OURS = ("--distributed", "--num_processes", "--process_id")


class LaunchError(Exception):
    """A wrong option of the user; says how to fix it."""


def main(argv: Sequence[str] | None = None, command: Sequence[str] = TRAIN) -> int:
    """The command; returns the exit code of the run, or 2 if an option is wrong."""
    options, train = parse(sys.argv[1:] if argv is None else argv)
    try:
        if any(word.split("=")[0] in OURS for word in train):
            raise LaunchError(f"{', '.join(OURS)} are set by this script; do not give them after --")
        places = shares(options.processes, options.devices_per_process, os.environ)
    except LaunchError as error:
        print(f"launch_local: {error}", file=sys.stderr)
        return 2
    address = f"127.0.0.1:{free_port()}"
    commands, environments = [], []
    for i, place in enumerate(places):
        joined = ["--distributed", address, "--num_processes", str(options.processes), "--process_id", str(i)]
        commands.append([*command, *train, *joined])
        environments.append(
            {
                **os.environ,
                "JAX_COORDINATOR_BIND_ADDRESS": address,  # jax's default is all interfaces
                "JAX_NUM_PROCESSES": str(options.processes),
                "JAX_PROCESS_ID": str(i),
                **place,
            }
        )
    return launch(commands, environments, options.grace)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this script, and those of rlhf_jax.train."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --processes N [--devices_per_process D] [--grace SECONDS] -- --config CONFIG [OPTION...]",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument(
        "--devices_per_process", type=int, metavar="D", help="default: an equal share of the GPUs, or one CPU device"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="for the others to exit after a death (default: 10)",
    )
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    options, unknown = parser.parse_known_args(argv[:cut])
    if unknown:
        parser.error(f"{' '.join(unknown)}: options of rlhf_jax.train must follow --")
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: give 1 or more")
    if options.devices_per_process is not None and options.devices_per_process < 1:
        parser.error(f"--devices_per_process {options.devices_per_process}: give 1 or more")
    if not options.grace >= 0:
        parser.error(f"--grace {options.grace}: give 0 or more seconds")
    if not argv[cut + 1 :]:
        parser.error("no options of rlhf_jax.train: give at least --config CONFIG after --")
    return options, argv[cut + 1 :]


# --- devices


def shares(processes: int, devices: int | None, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Environment variables that select each process's devices.

    Args:
      processes: number of processes.
      devices: per process; None: an equal share of the GPUs, or one CPU device.
      environment: source of JAX_PLATFORMS and CUDA_VISIBLE_DEVICES.

    Raises:
      LaunchError: too few GPUs, or JAX_PLATFORMS is tpu.
    """
    platforms = environment.get("JAX_PLATFORMS", "").split(",")
    if "tpu" in platforms:
        raise LaunchError("JAX_PLATFORMS=tpu: one process drives all chips of a machine; run rlhf_jax.train itself")
    gpus = [] if platforms[0] == "cpu" else visible_gpus(environment)
    if not gpus:
        place = {"JAX_NUM_CPU_DEVICES": str(devices or 1)}
        if (devices or 1) > 1:
            # XLA's thread pool has one thread per core, and a collective blocks one per device until all devices
            # arrive: on few cores it would deadlock. NPROC overrides the number of threads.
            place["NPROC"] = environment.get("NPROC", str(max(32, 4 * devices)))
        return [place] * processes
    each = devices or len(gpus) // processes
    if each * processes > len(gpus) or each == 0:
        wanted = f" with --devices_per_process {devices}" if devices else ""
        raise LaunchError(
            f"--processes {processes}{wanted} needs {processes * max(each, 1)} GPUs and there are {len(gpus)} "
            f"({','.join(gpus)}): ask for fewer, or set JAX_PLATFORMS=cpu to run on the CPU"
        )
    # JAX_LOCAL_DEVICE_IDS: a process uses all devices that it sees, whatever the environment says.
    ids = ",".join(map(str, range(each)))
    mine = [gpus[i * each : (i + 1) * each] for i in range(processes)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(own), "JAX_LOCAL_DEVICE_IDS": ids} for own in mine]


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """GPUs that CUDA would use, by their names in CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        valid = []
        for name in names:  # CUDA stops at the first invalid name: '' and '-1' hide all devices
            if not name or name.startswith("-"):
                break
            valid.append(name)
        return valid
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def free_port() -> int:
    """An unused TCP port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# --- processes


def launch(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], grace: float) -> int:
    """Runs the commands concurrently, and terminates all when one dies.

    Args:
      commands: one per process.
      environments: one per process, complete.
      grace: seconds for the others to exit after one has died, and again after SIGTERM.

    Returns:
      0 if all exited with 0, else the exit code of the first that did not.
    """
    processes, readers = [], []
    ended = queue.SimpleQueue()  # indices of processes, in order of exit

    def forward(number, frame):
        kill = number == signal.SIGINT and forward.interrupted
        forward.interrupted |= number == signal.SIGINT
        send(processes, signal.SIGKILL if kill else number)

    forward.interrupted = False
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        for i, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if i else {}
            # In a session of its own, so that Ctrl-C reaches it only once, through `forward`.
            options = {"start_new_session": True, "preexec_fn": end_with_parent, "stdin": subprocess.DEVNULL}
            processes.append(subprocess.Popen(command, env=dict(environment), **pipes, **options))
        for i, process in enumerate(processes):
            pairs = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)] if i else []
            readers.append([threading.Thread(target=copy, args=(i, *pair), daemon=True) for pair in pairs])
            for thread in readers[-1]:
                thread.start()
            threading.Thread(target=lambda i, p: (p.wait(), ended.put(i)), args=(i, process), daemon=True).start()
        return watch(processes, readers, ended, grace)
    finally:
        send(processes, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)


def watch(processes, readers, ended: queue.SimpleQueue, grace: float) -> int:
    """Waits for all, and terminates the others when one dies; returns the exit code of the first that died, or 0."""
    status, deadline, steps = 0, None, [signal.SIGTERM, signal.SIGKILL]
    left = len(processes)
    while left:
        try:
            # Python runs a signal's handler between calls of this thread: one that arrives just before a wait would
            # be handled at its end only, so no wait is long.
            i = ended.get(timeout=0.5 if deadline is None else min(max(deadline - time.monotonic(), 0), 0.5))
        except queue.Empty:
            if deadline is None or time.monotonic() < deadline:
                continue
            send(processes, steps[0])
            steps = steps[1:] or steps
            deadline = time.monotonic() + max(grace, 0.1)
            continue
        left -= 1
        for thread in readers[i]:  # its last output comes first
            thread.join(timeout=1)
        code = processes[i].returncode
        if code and not status:
            status = code if code > 0 else 128 - code
            deadline = time.monotonic() + grace
            others = f"; the other {left} end in {grace:g} s" if left else ""
            print(f"launch_local: process {i} {death(code)}{others}", file=sys.stderr, flush=True)
    return status


def death(code: int) -> str:
    """Description of a return code."""
    if code > 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "no name"
    return f"was ended by signal {-code} ({name})"


def send(processes: Sequence[subprocess.Popen], number: int) -> None:
    """Sends a signal to the running processes."""
    for process in processes:
        process.send_signal(number)  # does nothing after its end


def end_with_parent() -> None:
    """Runs between fork and exec: the kernel kills the process if this script is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


_writing = threading.Lock()


def copy(i: int, source: BinaryIO, sink) -> None:
    """Copies the lines of process i, prefixed with its number."""
    for line in source:
        text = f"[{i}] {line.decode(errors='replace').rstrip()}\n"
        with _writing:
            sink.write(text)
            sink.flush()


if __name__ == "__main__":
    sys.exit(main())

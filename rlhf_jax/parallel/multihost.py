"""One program, run once per process: how processes start, what they agree on, and how they end together."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlhf_jax.errors import UserError
from rlhf_jax.parallel import liveness

PATIENCE = 300.0  # seconds that a start waits for all processes
# The backstop where `peers` sees nothing: a frozen machine. jax's own are 100 and 300 seconds. Its wait at the start,
# which ends in an abort, is longer than ours.
LIMITS = {"heartbeat_timeout_seconds": 50, "shutdown_timeout_seconds": 60, "initialization_timeout": int(PATIENCE) + 60}
VERDICT = 5.0  # seconds from a broken collective to the broken connection that explains it
OPTIONS = ("distributed", "num_processes", "process_id")
"""Names of the options that only say how processes find each other."""

_watch: liveness.PeerMonitor | None = None


class JoinError(UserError):
    """The others were not found, which may go better the next time: a JobSet starts its pods again after code 1."""

    status = 1


def cluster() -> str | None:
    """The cluster that started this process beside others, as its environment shows: a name, or None for one process.

    In jax's order, so that it is the one that jax takes. SLURM counts inside `srun` only: the shell of an sbatch script
    is one process however many tasks it has.
    """
    env = os.environ
    if "OMPI_COMM_WORLD_SIZE" in env:
        return "OpenMPI" if int(env["OMPI_COMM_WORLD_SIZE"]) > 1 else None
    if "SLURM_STEP_NODELIST" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        return "SLURM"
    if int(env.get("PMI_SIZE", 1)) > 1:
        return "MPI"
    # `import jax` has set this where it found TPU chips on the PCI bus and a libtpu to drive them. Device files would
    # not do: they differ between TPUs, and /dev/vfio is no TPU's own.
    if env.get("TPU_ML_PLATFORM") == "JAX" and "tpu" in (env.get("JAX_PLATFORMS") or "tpu"):
        hosts = env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES"))
        if hosts is not None:  # GKE; elsewhere the metadata server knows them
            return "TPU" if "," in hosts or int(env.get("MEGASCALE_NUM_SLICES") or 1) > 1 else None
        if "TPU_SKIP_MDS_QUERY" not in env:
            return "TPU"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return "Kubernetes"
    return None


def initialize(mode: str = "auto", num_processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the other processes of the run and watches them. Call once, before anything asks for devices.

    Args:
      mode: 'auto' joins what `cluster` finds, which jax then configures by itself; 'off' never joins; 'HOST:PORT' is
        the address of process 0.
      num_processes, process_id: with HOST:PORT, how many processes there are and which this one is, from 0; None:
        JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment.

    Raises:
      UserError: another mode, a number that is missing, out of range or given without HOST:PORT, or an MPI that does
        not say where process 0 is.
      JoinError: the others were not found.
    """
    by_hand = mode not in ("auto", "off")
    for option, value in (("num_processes", num_processes), ("process_id", process_id)):
        if value is not None and not by_hand:
            raise UserError(f"--{option} {value} goes with --distributed HOST:PORT, but --distributed is {mode}")
    # jax would take SIGTERM for itself and only remember it: nobody asks, and the process would go on.
    jax.config.update("jax_enable_preemption_service", False)
    if by_hand or (mode == "auto" and cluster() is not None):
        _order_collectives()
    if by_hand:
        _join(mode, num_processes, process_id)
    elif mode == "auto" and not jax.distributed.is_initialized():
        _join_cluster(cluster())
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        _start_watch()


def _order_collectives() -> None:
    """CPU processes: every collective in one order on all of them, or their data would meet that of others.

    Of a sum over several arrays at once XLA sends the parts in no order (a crash where sizes differ, wrong numbers
    where they do not): it is not to make such sums. And a process with one device runs programs side by side that do
    not depend on each other.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    option = "--xla_disable_hlo_passes="
    flags = os.environ.get("XLA_FLAGS", "").split()
    passes = [flag.removeprefix(option) for flag in flags if flag.startswith(option)]
    rest = [flag for flag in flags if not flag.startswith(option)]
    os.environ["XLA_FLAGS"] = " ".join([*rest, option + ",".join([*passes, "cpu-all-reduce-combiner"])])


BY_HAND = "--distributed HOST:PORT --num_processes N --process_id I, with the address of process 0"


def _join_cluster(found: str | None) -> None:
    """jax's start-up as that cluster says; nothing with None."""
    if found is None:
        return
    if found == "Kubernetes" and importlib.util.find_spec("kubernetes") is None:
        raise UserError("an indexed Kubernetes job needs `pip install jax[k8s]`, or --distributed HOST:PORT or off")
    # Open MPI 4 alone says it. jax might take the tasks of SLURM that newer ones start for the processes of the run.
    if found == "MPI" or (found == "OpenMPI" and "OMPI_MCA_orte_hnp_uri" not in os.environ):
        numbers = "PMI" if found == "MPI" else "OMPI_COMM_WORLD"
        raise UserError(
            f"this mpirun does not say where process 0 is, as Open MPI 4 does. Give {BY_HAND}; N is ${numbers}_SIZE "
            f"and I ${numbers}_RANK (docs/scaling.md has the command). Or --distributed off: one process by itself"
        )
    try:
        with _patience(f"those that {found} started"):
            jax.distributed.initialize(**LIMITS)
    except Exception as error:  # jax's, of the metadata server, of Kubernetes: whatever the cluster's part may raise
        raise JoinError(
            f"{found} started this process as one of several, but it could not join the others ({_brief(error)}). "
            f"Start all of them, or give {BY_HAND}, or --distributed off: one process by itself"
        ) from error


@contextlib.contextmanager
def _patience(who: str) -> Iterator[None]:
    """Ends this process with a line that says so where the others have not come in time: what jax does then is an abort
    from within C++."""

    def give_up() -> None:
        waited = f"not all processes came within {PATIENCE:g} s: {who}"
        print(f"error: {waited}. Nothing was begun; start all of them again", file=sys.stderr, flush=True)
        os._exit(JoinError.status)

    timer = threading.Timer(PATIENCE, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _brief(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _join(address: str, num_processes: int | None, process_id: int | None) -> None:
    """jax's start-up with process 0 at HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--distributed {address}: give auto, off, or the HOST:PORT of process 0")
    given = {"num_processes": num_processes, "process_id": process_id}
    texts = {
        name: os.environ.get(f"JAX_{name.upper()}", "") if value is None else str(value)
        for name, value in given.items()
    }
    if not all(text.isdigit() for text in texts.values()):
        raise UserError(
            f"--distributed {address} needs --num_processes and --process_id (or JAX_NUM_PROCESSES and JAX_PROCESS_ID "
            f"in the environment); they are '{texts['num_processes']}' and '{texts['process_id']}'"
        )
    count, index = int(texts["num_processes"]), int(texts["process_id"])
    if index >= count:
        raise UserError(
            f"--process_id {index} of --num_processes {count}: processes are numbered from 0 to {count - 1}"
        )
    if jax.distributed.is_initialized():
        return
    try:
        # Just that: otherwise jax would also ask SLURM or Open MPI, and take one device a process.
        asked = {"num_processes": count, "process_id": index, "cluster_detection_method": "deactivate"}
        with _patience(f"the {count} of --distributed {address}, of which this is number {index}"):
            jax.distributed.initialize(address, **asked, **LIMITS)
    except RuntimeError as error:  # jaxlib's own kind is one
        raise JoinError(
            f"process {index} of {count} could not join --distributed {address} "
            f"({_brief(error)}). Start all {count} processes, number 0 on {host}"
        ) from error


def is_main() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has come here: what one of them has written is there for all.

    Args:
      what: the same on all of them; names the place when one does not come.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


# --- what processes tell each other


def gather_objects(value: Any) -> list[Any]:
    """What each process gives, in the order of processes. Every one must call it; with one it costs nothing.

    Args:
      value: what JSON holds, numpy numbers, NaN and the infinities too.

    Returns:
      A value each process; for one process the very object.
    """
    if jax.process_count() == 1:
        return [value]
    data = json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)).encode()
    # Shapes are equal on all processes, and few, since each is a program: what does not fit goes again in a larger one.
    size = 4096
    while True:
        row = np.zeros(size, np.uint8)
        row[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
        row[8 : 8 + len(data)] = np.frombuffer(data[: size - 8], np.uint8)
        rows = multihost_utils.process_allgather(row)
        lengths = [int.from_bytes(row[:8].tobytes(), "little") for row in rows]
        if max(lengths) + 8 <= size:
            return [json.loads(row[8 : 8 + length].tobytes()) for row, length in zip(rows, lengths)]
        size = 1 << (max(lengths) + 7).bit_length()


def agree(value: Any = None, error: UserError | None = None, kind: type[UserError] = UserError) -> list[Any]:
    """`gather_objects`, or on every process the same error where some process has one.

    Args:
      value: see `gather_objects`.
      error: what went wrong on this process; it does not raise it, so that the others do not wait for it for good.
      kind: of the error that all raise; for one process it is its own.

    Raises:
      UserError: the first process' error, which it names.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return [value]
    found = gather_objects([value, None if error is None else [platform.node(), str(error)]])
    for index, (_, problem) in enumerate(found):
        if problem is not None:
            host, text = problem
            raise kind(f"process {index} of {len(found)} ({host}): {text}") from error
    return [value for value, _ in found]


def from_first(action: Callable[[], Any]) -> Any:
    """What `action` returns on the first process, on all of them; it is called there alone.

    Raises:
      UserError: the one that it raised there, on all of them.
    """
    if jax.process_count() == 1:
        return action()
    value = error = None
    if is_main():
        try:
            value = action()
        except UserError as raised:
            error = raised
    value, text = gather_objects([value, None if error is None else str(error)])[0]
    if text is not None:
        raise UserError(text) from error
    return value


# --- ending together


def _start_watch() -> None:
    global _watch
    if _watch is None:
        _watch = liveness.start(jax.process_index(), jax.process_count(), from_first)
        atexit.register(_at_exit)


def peer_died() -> bool:
    """Whether another process is gone, which has been said by then: what is raised here is only the consequence.

    Waits a moment, since a broken collective may be seen before the broken connection.
    """
    return _watch is not None and _watch.lost(timeout=VERDICT)


def announce_error(error: BaseException) -> None:
    """Tells the other processes that this one ends with an error, before it cleans up, which may wait for them.

    Not where another process is gone, of which the error is only the consequence.
    """
    of_its_own = isinstance(error, UserError) or not isinstance(error, Exception)
    if _watch is not None and (of_its_own or not peer_died()):
        _watch.leave(error_text(error))


def error_text(error: BaseException) -> str:
    """An error as others are told of it."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def close(reason: str | None = None) -> None:
    """Says goodbye to the other processes; nothing with one process.

    Args:
      reason: why this process ends early; None: its work is done, and it waits until that of all is.
    """
    global _watch
    if _watch is None:
        return
    watch, _watch = _watch, None
    watch.close(reason)
    if reason is None:
        jax.distributed.shutdown()


def _at_exit() -> None:
    """A program that does not close: its end is the goodbye, an exception that nobody caught is the reason."""
    raised = getattr(sys, "last_value", None)
    if _watch is not None:
        _watch.close(None if raised is None else error_text(raised))

"""Several processes of one run: how they start, exchange host values and errors, and end together."""

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
from rlhf_jax.parallel import liveness, xla_flags

START_TIMEOUT = 300.0  # seconds that a start waits for all processes
# For failures that `liveness` does not see, such as a frozen machine; jax's defaults are 100 and 300 seconds. jax's
# timeout at the start, which aborts the process, must be longer than ours.
TIMEOUTS = {
    "heartbeat_timeout_seconds": 50,
    "shutdown_timeout_seconds": 60,
    "initialization_timeout": int(START_TIMEOUT) + 60,
}
DETECTION_DELAY = 5.0  # seconds that a broken connection may be detected later than the collective that it breaks

_monitor: liveness.PeerMonitor | None = None


class JoinError(UserError):
    """The other processes did not join. Exit code 1, after which a JobSet restarts its pods."""

    status = 1


def cluster() -> str | None:
    """The cluster that started this process as one of several, from its environment; None for a single process.

    Checked in jax's order, so that jax configures the same one. SLURM counts inside `srun` only: the shell of an sbatch
    script is one process, whatever its number of tasks.
    """
    env = os.environ
    if "OMPI_COMM_WORLD_SIZE" in env:
        return "OpenMPI" if int(env["OMPI_COMM_WORLD_SIZE"]) > 1 else None
    if "SLURM_STEP_NODELIST" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        return "SLURM"
    if int(env.get("PMI_SIZE", 1)) > 1:
        return "MPI"
    # `import jax` sets this if it finds TPU chips on the PCI bus and a libtpu. Device files are no sign: they differ
    # between TPUs, and /dev/vfio exists without one.
    if env.get("TPU_ML_PLATFORM") == "JAX" and "tpu" in (env.get("JAX_PLATFORMS") or "tpu"):
        hosts = env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES"))
        if hosts is not None:  # GKE; elsewhere they come from the metadata server
            return "TPU" if "," in hosts or int(env.get("MEGASCALE_NUM_SLICES") or 1) > 1 else None
        if "TPU_SKIP_MDS_QUERY" not in env:
            return "TPU"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return "Kubernetes"
    return None


def initialize(mode: str = "auto", num_processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the other processes of the run and monitors them. Call once, before JAX initializes its devices.

    Args:
      mode: 'auto' joins the cluster that `cluster` detects, which jax then configures; 'off' never joins; 'HOST:PORT'
        is the address of process 0.
      num_processes, process_id: with HOST:PORT, the number of processes and the index of this one, from 0; None:
        JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment.

    Raises:
      UserError: another mode; a number that is missing, out of range or set without HOST:PORT; or an MPI that does not
        provide the address of process 0.
      JoinError: the others did not join.
    """
    by_hand = mode not in ("auto", "off")
    for option, value in (("num_processes", num_processes), ("process_id", process_id)):
        if value is not None and not by_hand:
            raise UserError(f"--{option} {value} needs --distributed HOST:PORT, but --distributed is {mode}")
    # jax's service would take over SIGTERM and only record it, and the process would keep running.
    jax.config.update("jax_enable_preemption_service", False)
    if by_hand or (mode == "auto" and cluster() is not None):
        _order_collectives()
    if by_hand:
        _join(mode, num_processes, process_id)
    elif mode == "auto" and not jax.distributed.is_initialized():
        _join_cluster(cluster())
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        _start_monitor()


def _order_collectives() -> None:
    """On CPUs, makes all processes run collectives in the same order, since otherwise their data gets mixed up.

    XLA sends the parts of an all-reduce over several arrays in any order (a crash where sizes differ, wrong numbers
    where they are equal), so the pass that combines all-reduces is disabled. A process with one device would also run
    independent programs concurrently, so asynchronous dispatch is disabled.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    xla_flags.add({"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})


BY_HAND = "--distributed HOST:PORT --num_processes N --process_id I, with the address of process 0"


def _join_cluster(name: str | None) -> None:
    """jax's start-up as that cluster configures it; nothing with None."""
    if name is None:
        return
    if name == "Kubernetes" and importlib.util.find_spec("kubernetes") is None:
        raise UserError("an indexed Kubernetes job needs `pip install jax[k8s]`, or --distributed HOST:PORT or off")
    # Only Open MPI 4 provides it. jax might take SLURM tasks that newer ones start for the processes of the run.
    if name == "MPI" or (name == "OpenMPI" and "OMPI_MCA_orte_hnp_uri" not in os.environ):
        numbers = "PMI" if name == "MPI" else "OMPI_COMM_WORLD"
        raise UserError(
            f"this mpirun does not provide the address of process 0, as Open MPI 4 does. Use {BY_HAND}; N is "
            f"${numbers}_SIZE and I is ${numbers}_RANK (docs/scaling.md has the command). Or use --distributed off for "
            "a single process"
        )
    try:
        with _start_timeout(f"those that {name} started"):
            jax.distributed.initialize(**TIMEOUTS)
    except Exception as error:  # jax, the metadata server and Kubernetes raise errors of their own
        raise JoinError(
            f"{name} started this process as one of several, but it could not join the others ({_brief(error)}). "
            f"Start all of them, or use {BY_HAND}, or --distributed off for a single process"
        ) from error


@contextlib.contextmanager
def _start_timeout(who: str) -> Iterator[None]:
    """Ends this process with an error message if the others do not join in time; jax would abort it from C++."""

    def give_up() -> None:
        waited = f"not all processes joined within {START_TIMEOUT:g} s: {who}"
        print(f"error: {waited}. Nothing was started; start all of them again", file=sys.stderr, flush=True)
        os._exit(JoinError.status)

    timer = threading.Timer(START_TIMEOUT, give_up)
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
        raise UserError(f"--distributed {address}: use auto, off, or the HOST:PORT of process 0")
    options = {"num_processes": num_processes, "process_id": process_id}
    texts = {
        name: os.environ.get(f"JAX_{name.upper()}", "") if value is None else str(value)
        for name, value in options.items()
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
        # Without detection, which would also query SLURM or Open MPI and use one device per process.
        arguments = {"num_processes": count, "process_id": index, "cluster_detection_method": "deactivate"}
        with _start_timeout(f"{count} with --distributed {address}; this is number {index}"):
            jax.distributed.initialize(address, **arguments, **TIMEOUTS)
    except RuntimeError as error:  # jaxlib's error is a subclass
        raise JoinError(
            f"process {index} of {count} could not join --distributed {address} "
            f"({_brief(error)}). Start all {count} processes, number 0 on {host}"
        ) from error


def is_main() -> bool:
    """Whether this is process 0, which writes files and prints."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """A barrier: returns when every process has called it, so that files that one has written exist for all.

    Args:
      what: the same on all processes; names the barrier in jax's error.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


# --- exchange of host values


def gather_objects(value: Any) -> list[Any]:
    """The values of all processes, in order. Every process must call it; a single one pays nothing.

    Args:
      value: of JSON types, numpy numbers, NaN and the infinities.

    Returns:
      A list with a value per process; with one process, the same object.
    """
    if jax.process_count() == 1:
        return [value]
    data = json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)).encode()
    # The shape must be equal on all processes and each one is a program: what does not fit is sent again, larger.
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
    """As `gather_objects`, but raises the same error on every process if any of them has one.

    Args:
      error: of this process, passed here instead of raised, so that the others do not wait for this process forever.
      kind: class of the error that all raise; a single process raises `error` itself.

    Raises:
      UserError: the first error, with its process.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return [value]
    gathered = gather_objects([value, None if error is None else [platform.node(), str(error)]])
    for index, (_, problem) in enumerate(gathered):
        if problem is not None:
            host, text = problem
            raise kind(f"process {index} of {len(gathered)} ({host}): {text}") from error
    return [value for value, _ in gathered]


def from_first(action: Callable[[], Any]) -> Any:
    """Calls `action` on process 0 only and returns its result on all processes.

    Raises:
      UserError: on all processes, if `action` raised one.
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


def _start_monitor() -> None:
    global _monitor
    if _monitor is None:
        _monitor = liveness.start(jax.process_index(), jax.process_count(), from_first)
        atexit.register(_at_exit)


def peer_died() -> bool:
    """Whether a peer died; already reported, so an error raised here is only the consequence.

    Waits a moment, since a broken collective may be noticed before the broken connection.
    """
    return _monitor is not None and _monitor.peer_died(timeout=DETECTION_DELAY)


def announce_error(error: BaseException) -> None:
    """Informs the other processes that this one ends with an error, before it cleans up, which may wait for them.

    Does nothing if the error is only the consequence of a peer that died.
    """
    is_original = isinstance(error, UserError) or not isinstance(error, Exception)
    if _monitor is not None and (is_original or not peer_died()):
        _monitor.leave(error_text(error))


def error_text(error: BaseException) -> str:
    """The text of an error for the other processes."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def close(reason: str | None = None) -> None:
    """Ends the exchange with the other processes; nothing with one process.

    Args:
      reason: why this process ends early; None: its work is done, and it waits for all to finish.
    """
    global _monitor
    if _monitor is None:
        return
    monitor, _monitor = _monitor, None
    monitor.close(reason)
    if reason is None:
        jax.distributed.shutdown()


def _at_exit() -> None:
    """For programs that do not call `close`; an uncaught exception is the reason."""
    raised = getattr(sys, "last_value", None)
    if _monitor is not None:
        _monitor.close(None if raised is None else error_text(raised))

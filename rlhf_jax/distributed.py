"""Starting processes: one program, run once per process."""

from __future__ import annotations

import glob
import importlib.util
import os

import jax
from jax.experimental import multihost_utils

from rlhf_jax.types import UserError


def cluster() -> str | None:
    """The cluster that started this process beside others, as its environment shows: a name, or None for one process.

    SLURM counts inside `srun` only: the shell of an sbatch script is one process however many tasks it has.
    """
    env = os.environ
    if "SLURM_STEP_NODELIST" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        return "SLURM"
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return "OpenMPI"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return "Kubernetes"
    if glob.glob("/dev/accel*") and importlib.util.find_spec("libtpu") and "TPU_SKIP_MDS_QUERY" not in env:
        return "TPU"
    return None


def initialize(mode: str = "auto") -> None:
    """Joins the other processes of the run. Call once, before anything asks for devices.

    Args:
      mode: 'auto' joins what `cluster` finds, which jax then configures by itself; 'off' never joins; 'HOST:PORT' is
        the address of process 0, with JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment of each process.

    Raises:
      UserError: another mode, or one of the two variables is missing or no number.
    """
    if mode == "off" or jax.distributed.is_initialized():
        return
    if mode == "auto":
        found = cluster()
        if found == "Kubernetes" and importlib.util.find_spec("kubernetes") is None:
            raise UserError("an indexed Kubernetes job needs `pip install jax[k8s]`, or --distributed HOST:PORT or off")
        if found is not None:
            jax.distributed.initialize()
        return
    host, _, port = mode.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--distributed {mode}: give auto, off, or the HOST:PORT of process 0")
    numbers = [os.environ.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
    if not all(number.isdigit() for number in numbers):
        raise UserError(
            f"--distributed {mode} needs JAX_NUM_PROCESSES and JAX_PROCESS_ID as numbers in the environment; "
            f"they are '{numbers[0]}' and '{numbers[1]}'"
        )
    jax.distributed.initialize(mode, num_processes=int(numbers[0]), process_id=int(numbers[1]))


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

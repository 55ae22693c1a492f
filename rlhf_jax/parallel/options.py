"""Options of devices and processes."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from rlhf_jax.option import Options, PositiveInt, Range, option


@dataclasses.dataclass(frozen=True)
class MeshOptions(Options):
    """How devices share rows, params and layers."""

    # --- devices
    mesh_data: Annotated[
        int, Range("-1 (all devices that the other axes leave) or at least 1", lambda v: v == -1 or v >= 1)
    ] = option(-1, resume="rounding")
    """Devices on the data axis; -1: all that the other axes leave."""
    mesh_fsdp: PositiveInt = option(1, resume="rounding", lowers={"loading": 1, "generate": 3, "update": 6})
    """Devices that shard params and optimizer state."""
    mesh_tensor: PositiveInt = option(1, resume="rounding", lowers={"loading": 2, "generate": 4})
    """Devices that split attention heads and hidden units."""


@dataclasses.dataclass(frozen=True)
class ProcessOptions(Options):
    """How the processes of a run connect."""

    # --- processes
    distributed: str = option("auto", in_config_json=False)
    """How processes connect: auto (TPU pods, SLURM, Open MPI, Kubernetes), off, or the HOST:PORT of process 0."""
    num_processes: int | None = option(None, rare=True, in_config_json=False)
    """With HOST:PORT: number of processes; default: JAX_NUM_PROCESSES in the environment."""
    process_id: int | None = option(None, rare=True, in_config_json=False)
    """With HOST:PORT: index of this process, from 0; default: JAX_PROCESS_ID in the environment."""

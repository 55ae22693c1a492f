"""Starting processes, and the same arrays on two of them."""

import os
import re
import socket
import subprocess
import sys
import textwrap

import jax
import pytest

from rlhf_jax import train
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import multihost
from tests.helpers.paths import ROOT

CLUSTERS = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri", "PMI_SIZE")
CLUSTERS += ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "JAX_PLATFORMS", "TPU_ML_PLATFORM")
CLUSTERS += ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY", "MEGASCALE_NUM_SLICES")


@pytest.fixture
def started(monkeypatch):
    """A machine of no cluster; what would have been handed to jax."""
    calls = []
    for name in (*CLUSTERS, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: calls.append((args, options)))
    return calls


def test_a_laptop_starts_nothing(started):
    multihost.initialize("auto")
    multihost.initialize("off")
    assert started == [] and multihost.is_main()


OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
SRUN = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}
INDEXED_JOB = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
TPU = {"TPU_ML_PLATFORM": "JAX"}  # by jax, where there are chips: see the last test of this kind
GKE_TPU = {**TPU, **INDEXED_JOB, "TPU_SKIP_MDS_QUERY": "true", "TPU_WORKER_HOSTNAMES": "a,b"}


@pytest.mark.parametrize(
    "environment, cluster",
    [
        (SRUN, "SLURM"),
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "2"}, None),  # the shell of an sbatch script
        (OPEN_MPI, "OpenMPI"),
        ({**OPEN_MPI, **SRUN}, "OpenMPI"),  # mpirun, which starts its processes by srun
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod that is no indexed job
        (TPU, "TPU"),
        ({**TPU, "JAX_PLATFORMS": "tpu,cpu"}, "TPU"),
        ({**TPU, "JAX_PLATFORMS": "cpu"}, None),  # a small run on one host of a slice
        ({**TPU, "TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({**TPU, "TPU_PROCESS_ADDRESSES": "localhost", "MEGASCALE_NUM_SLICES": "2"}, "TPU"),
        ({**TPU, "TPU_SKIP_MDS_QUERY": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, None),  # chips that jax does not see
        (GKE_TPU, "TPU"),
    ],
)
def test_auto_joins_a_cluster_of_more_than_one_process(started, monkeypatch, environment, cluster):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert multihost.cluster() == cluster
    multihost.initialize("auto")
    assert started == ([((), multihost.TIMEOUTS)] if cluster else [])
    multihost.initialize("off")
    assert len(started) == bool(cluster)


def test_kubernetes_without_its_package_is_told_what_to_install_but_not_on_tpus(started, monkeypatch):
    monkeypatch.setattr(multihost.importlib.util, "find_spec", lambda name: None)
    for name, value in INDEXED_JOB.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"pip install jax\[k8s\]"):
        multihost.initialize("auto")
    for name, value in GKE_TPU.items():
        monkeypatch.setenv(name, value)
    multihost.initialize("auto")
    assert len(started) == 1


@pytest.mark.parametrize(
    "environment, numbers",
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD"),  # Open MPI 5
        ({"OMPI_COMM_WORLD_SIZE": "2", **SRUN}, "OMPI_COMM_WORLD"),
        ({"PMI_SIZE": "2"}, "PMI"),  # MPICH, Intel MPI
    ],
)
def test_an_mpi_that_does_not_name_process_0_is_refused_with_what_to_give(started, monkeypatch, environment, numbers):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        multihost.initialize("auto")
    for part in (
        "--distributed HOST:PORT",
        f"--num_processes N --process_id I, .* ${numbers}_SIZE",
        "--distributed off",
    ):
        assert re.search(part.replace("$", r"\$"), str(refused.value))
    multihost.initialize("host:1234", 2, 0)
    assert len(started) == 1


@pytest.mark.parametrize("error", [ValueError("coordinator_address should be defined."), KeyError("SLURM_PROCID")])
def test_a_cluster_that_cannot_be_joined_is_named_and_may_be_tried_again(started, monkeypatch, capsys, error):
    def fails(**options):
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert train.main(["--config", "quickstart.py"]) == 1  # 2 would end a JobSet for good
    said = capsys.readouterr().err
    assert said.startswith("error: SLURM started this process") and said.count("\n") == 1
    for part in (type(error).__name__, str(error.args[0]), "--distributed HOST:PORT", "--distributed off"):
        assert part in said


ON_A_MACHINE = """
    import glob, os, pathlib, sys

    folder, vendor, device = pathlib.Path(sys.argv[1]), *sys.argv[2:]
    (folder / "vendor").write_text(vendor + "\\n")
    (folder / "device").write_text(device + "\\n")
    pci = "/sys/bus/pci/devices/*/vendor"
    glob.glob = lambda pattern, **_: [str(folder / "vendor")] if pattern == pci else [pattern.replace("*", "0")]
    from rlhf_jax.parallel import multihost

    print(multihost.cluster())
"""


@pytest.mark.parametrize(
    "device, libtpu, cluster",
    [
        ("0x006f", True, "TPU"),  # v6e
        ("0x006f", False, None),
        ("0x0042", True, None),  # Google's network card, in a machine with libtpu but no TPU
    ],
)
def test_a_tpu_host_is_one_with_chips_and_libtpu_whatever_its_device_files(tmp_path, device, libtpu, cluster):
    (tmp_path / "libtpu.py").write_text(
        "def get_library_path(): return 'libtpu.so'" if libtpu else "raise ImportError('no libtpu')"
    )
    root = str(ROOT)
    drop = (*CLUSTERS, "TPU_LIBRARY_PATH", "JAX_FORCE_TPU_INIT")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), root])
    command = [sys.executable, "-c", textwrap.dedent(ON_A_MACHINE), str(tmp_path), "0x1ae0", device]
    run = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert run.stdout.split() == [str(cluster)]


# Within srun or mpirun too HOST:PORT says it all: jax asks no cluster, which would also give each process one device.
ALONE = {"cluster_detection_method": "deactivate", **multihost.TIMEOUTS}


def test_a_coordinator_needs_the_number_of_processes(started, monkeypatch):
    with pytest.raises(
        UserError, match="needs --num_processes and --process_id .or JAX_NUM_PROCESSES and JAX_PROCESS_ID"
    ):
        multihost.initialize("host:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    multihost.initialize("host:1234")
    assert started.pop() == (("host:1234",), {"num_processes": 2, "process_id": 1, **ALONE})
    multihost.initialize("host:1234", process_id=0)  # an option goes before the environment
    multihost.initialize("host:1234", 3, 2)
    assert [(found["num_processes"], found["process_id"]) for _, found in started] == [(2, 0), (3, 2)]


def test_numbers_are_refused_where_they_mean_nothing(started):
    with pytest.raises(UserError, match="--process_id 3.*--num_processes 3"):
        multihost.initialize("host:1234", 3, 3)
    for mode in ("auto", "off"):
        with pytest.raises(UserError, match=f"--num_processes 2 .*--distributed is {mode}"):
            multihost.initialize(mode, 2, 0)
    assert not started


@pytest.mark.parametrize("mode", ["yes", "host", "host:", ":12", "host:port"])
def test_another_mode_is_refused(started, mode):
    with pytest.raises(UserError, match="--distributed .*: use auto, off, or the HOST:PORT"):
        multihost.initialize(mode)


ON_TWO = """
    import sys, jax, numpy as np
    from jax.sharding import PartitionSpec as P
    from rlhf_jax.parallel import multihost, sharding
    from rlhf_jax.runtime.checkpoint import Checkpoints
    from rlhf_jax.runtime.progress import TerminalLines
    from rlhf_jax.runtime.run_folder import RunFolder
    from rlhf_jax.metrics.logger import MetricLogger

    multihost.initialize(sys.argv[1])
    assert jax.process_count() == 2 and jax.device_count() == 4
    mesh = sharding.make_mesh(-1, 2, 1)
    host = {"kernel": np.arange(32, dtype=np.float32).reshape(8, 4), "bias": np.ones(4, np.float32)}
    where = sharding.shardings(host, ((r"kernel$", P("fsdp")), (r"bias$", P())), mesh)
    params = sharding.place(host, where)
    batch = sharding.shard_batch({"x": np.eye(8, dtype=np.float32)}, mesh)
    step = jax.jit(lambda p, b: (b["x"] @ p["kernel"], {"sum": p["kernel"].sum()}))
    y, found = step(params, batch)
    assert not y.is_fully_addressable
    np.testing.assert_array_equal(sharding.fetch(y), host["kernel"])
    again = sharding.place(params, sharding.replicated(mesh))
    np.testing.assert_array_equal(sharding.fetch(again)["kernel"], host["kernel"])

    run = RunFolder.open(sys.argv[2], {"seed": 1})
    with MetricLogger.open(run.path, terminal=TerminalLines(stage="ppo", total_steps=1, names=("sum",))) as logger:
        logger.log(1, found)
    with Checkpoints(run.checkpoints, 1) as checkpoints:
        checkpoints.save(1, params, {"a": 1})
        checkpoints.wait()
        restored, extra = checkpoints.restore(1, params)
    assert extra == {"a": 1} and restored["kernel"].sharding == params["kernel"].sharding
    np.testing.assert_array_equal(sharding.fetch(restored)["kernel"], host["kernel"])
    print("done", multihost.is_main())
"""


def test_two_processes_share_one_mesh_and_one_writes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    root = str(ROOT)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_NUM_PROCESSES": "2", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", textwrap.dedent(ON_TWO), address, str(tmp_path / "run")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": root}
    processes = [subprocess.Popen(command, env={**env, "JAX_PROCESS_ID": str(i)}, **pipes) for i in range(2)]
    try:
        ends = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ends
    # Gloo's threads write to stdout too, a torn line at a time: only our own lines are read.
    first, second = (re.findall(r"(?m)^(?:ppo|done) .*", out) for out, _ in ends)
    assert first[0].startswith("ppo 1/1 | sum 496 | ") and first[1:] == ["done True"]
    assert second == ["done False"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1, "sum": 496.0}\n'


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_nobody_joins_gives_up_with_a_line_and_code_1(index):
    """In place of jax's abort, which comes later; whether it waits as number 0 or for number 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = "from rlhf_jax.parallel import multihost; multihost.START_TIMEOUT = 2.0; "
    code += f"multihost.initialize({address!r}, 2, {index})"
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    (error,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert "not all processes joined within 2 s" in error and address in error and f"number {index}" in error
    assert "Traceback" not in run.stderr and "Check failure" not in run.stderr
    assert multihost.TIMEOUTS["initialization_timeout"] > multihost.START_TIMEOUT

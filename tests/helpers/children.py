"""Processes that see several (forced host) devices, and what they are given."""

import json
import os
import pathlib
import subprocess
import sys

from tests.helpers.paths import ROOT

QUICK = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
"""Flags of XLA for programs that run once, as those of most tests: making them fast takes longer than all else.

The second saves a third of the time of tests that compile. It is an extra option because XLA ignores those that it does
not know, and aborts on a flag that it does not know."""


def child(module: str, *arguments, devices: int, optimized: bool = False, **env) -> subprocess.Popen:
    """Begins `python -m module arguments` in a process of so many devices; what it prints comes back by stdout."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    flags += "" if optimized else f" {QUICK}"
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        # XLA's pool has a thread a device, and collectives hold theirs until all devices have come: with two of them at
        # once it deadlocks on few cores. NPROC is the number of threads that it takes instead.
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": str(4 * max(devices, 8)), **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def is_running(pid: int) -> bool:
    """Whether a process is running; a zombie, which has ended, is not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def last_line(process: subprocess.Popen, timeout: float = 900):
    """The JSON object that a child prints last, when it is done."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output[-5000:]
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def reward_checkpoint(folder: pathlib.Path) -> None:
    """folder/reward: a reward model of random weights with the built-in tokenizer."""
    import jax

    from rlhf_jax import data, models
    from rlhf_jax.models.io import hf

    model = models.custom_shape("2x32x4", vocab_size=256, max_positions=128)
    params = jax.device_get(model.init(jax.random.key(1), heads=("scalar",), score_std=0.3))
    hf.save(folder / "reward", model, params, kind="scalar")
    data.save_tokenizer(data.load_tokenizer("synthetic"), str(folder / "reward"))


def policy_checkpoints(folder: pathlib.Path) -> None:
    """folder/policy, folder/sft and folder/reward: two policies and a reward model of random weights."""
    import jax

    from rlhf_jax import data, models
    from rlhf_jax.models.io import hf

    tokenizer = data.load_tokenizer("synthetic")
    model = models.custom_shape("1x16x2", vocab_size=tokenizer.vocab_size, max_positions=96)
    for name, kind, seed in (("policy", "causal", 0), ("sft", "causal", 1), ("reward", "scalar", 2)):
        params = jax.tree.map(lambda x: 4 * x, model.init(jax.random.key(seed), heads=(kind,)))
        hf.save(folder / name, model, jax.device_get(params), kind=kind)
        data.save_tokenizer(tokenizer, str(folder / name))

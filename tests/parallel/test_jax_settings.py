"""parallel/jax_settings.py: a seed means one run, whatever jax's settings are outside."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

import rlhf_jax
from rlhf_jax.config import RLOOConfig
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import jax_settings
from tests.helpers.paths import ROOT
from tests.helpers.tiny_rloo import CONFIG, first_token


class SwitchesX64:
    """A reward function that turns double precision on, as code of others does."""

    __name__ = "first_token"

    def __call__(self, completion_ids, **_):
        jax.config.update("jax_enable_x64", True)
        return first_token(completion_ids)


def left(folder):
    files = [
        folder / "metrics.jsonl",
        *sorted((folder / "policy").iterdir()),
        *sorted((folder / "completions").iterdir()),
    ]
    return {path.name: path.read_bytes().replace(str(folder).encode(), b"RUN") for path in files}


def run(folder, reward=first_token):
    rlhf_jax.run(RLOOConfig(**CONFIG, run_dir=str(folder)), reward_funcs=reward)
    return left(folder)


PROGRAM = """
import pathlib, sys
from tests.parallel import test_jax_settings
test_jax_settings.run(pathlib.Path(sys.argv[1]))
"""


def run_in(folder, setting):
    """A run, or the rest of one, in a process that has a variable NAME=VALUE in its environment."""
    name, _, value = setting.partition("=")
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    environment = {**os.environ, name: value}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"))


@pytest.mark.runs
@pytest.mark.parametrize(
    "setting",
    [
        "JAX_DEFAULT_PRNG_IMPL=rbg",
        "JAX_THREEFRY_PARTITIONABLE=0",
        "JAX_ENABLE_X64=1",
        "JAX_NUMPY_DTYPE_PROMOTION=strict",
        "JAX_NUMPY_RANK_PROMOTION=raise",
    ],
)
def test_a_setting_of_the_environment_changes_no_byte(setting, plain, tmp_path):
    child = run_in(tmp_path, setting)
    assert child.returncode == 0, child.stderr[-3000:]
    assert left(tmp_path) == plain


@pytest.mark.runs
def test_a_resume_where_rounding_may_differ_says_so_and_goes_on(tmp_path):
    run(tmp_path)
    (tmp_path / "finished.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    flags = os.environ.get("XLA_FLAGS", "")
    child = run_in(tmp_path, f"XLA_FLAGS={flags} --xla_cpu_max_isa=AVX2")
    assert child.returncode == 0, child.stderr[-3000:]
    (line,) = [line for line in child.stdout.splitlines() if "may change rounding" in line]
    assert line.startswith("rloo: changed since the run's last process, may change rounding: XLA_FLAGS: ")
    assert line.endswith('--xla_cpu_max_isa=AVX2"')
    first, second = json.loads((tmp_path / "inputs.json").read_bytes())["environments"]
    assert {name for name in first if first[name] != second[name]} == {"XLA_FLAGS"}
    assert first["jax"] == jax.__version__ and first["devices"] == "1 x cpu"


@pytest.mark.runs
def test_a_reward_function_that_switches_x64_on_changes_no_byte(plain, tmp_path):
    before = jax.config.jax_enable_x64
    try:
        assert run(tmp_path, SwitchesX64()) == plain
        assert jax.config.jax_enable_x64  # the setting is the caller's
    finally:
        jax.config.update("jax_enable_x64", before)


def test_the_callers_settings_stay(monkeypatch):
    with jax.default_prng_impl("rbg"):
        with jax_settings.pinned():
            assert str(jax.random.key(0).dtype) == "key<fry>"
        assert str(jax.random.key(0).dtype) == "key<rbg>"


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("jax_random_seed_offset", 5, "0"),
        ("jax_high_dynamic_range_gumbel", True, "False"),
        ("jax_disable_jit", True, "False"),
        ("jax_no_tracing", True, "False"),
        ("jax_scan3", True, "False"),
        ("jax_transfer_guard", "disallow", "None"),
    ],
)
def test_a_setting_that_no_run_works_with_is_refused(name, value, needed, tmp_path):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        with pytest.raises(UserError, match=f"{name.upper()}={value}: a run needs {needed}, jax's default. Unset it"):
            rlhf_jax.run(RLOOConfig(**CONFIG, run_dir=str(tmp_path / "run")), reward_funcs=first_token)
    finally:
        jax.config.update(name, before)
    assert not pathlib.Path(tmp_path / "run").exists()

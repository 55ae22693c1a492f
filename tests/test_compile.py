import os
import pathlib
import re
import subprocess
import sys

import pytest

from rlhf_jax import compile as command
from rlhf_jax.dry_run import micro_batches
from tests.helpers.children import QUICK
from tests.helpers.paths import ROOT

CONFIG = """
from rlhf_jax import PPOConfig
from tests.helpers import runs


def get_config(variant=None):
    return runs.ppo_config({run!r}, {sft!r}, total_episodes=8, reward_funcs=("rlhf_jax.data.synthetic:gold_reward",),
        dataset_test_split=None, num_sample_generations=0)
"""


def run(module, *words, **env):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK, **env}
    done = subprocess.run([sys.executable, "-m", module, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_run_reads_what_the_command_has_compiled(golden_sft, tmp_path):
    config, out = tmp_path / "ppo.py", tmp_path / "programs"
    config.write_text(CONFIG.format(run=str(tmp_path / "run"), sft=golden_sft.run_dir))
    printed = run("rlhf_jax.compile", "--config", str(config), "--out", str(out))
    # Programs compile side by side and are listed as they end.
    kinds = re.search(r"ppo: compiled (.+)\n", printed)[1]
    assert {part.split()[0] for part in kinds.split(", ")} == {"experience", "generate", "update"}
    assert printed.endswith(f"kept in {out}\n")

    def cached_programs():
        names = ("jit__generate-", "jit__experience-", "jit__update-")
        return sorted(file.name for file in out.glob("*-cache") if file.name.startswith(names))

    compiled = cached_programs()
    assert len(compiled) == 3 and not (tmp_path / "run").exists()
    cache = {"JAX_COMPILATION_CACHE_DIR": str(out), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    run("rlhf_jax.train", "--config", str(config), **cache)
    assert cached_programs() == compiled


@pytest.mark.parametrize(
    "words, status, said",
    [
        ([], 2, "usage: rlhf-jax compile"),
        (["--help"], 0, "JAX_COMPILATION_CACHE_DIR=DIR rlhf-jax train"),
        (["--config", "quickstart.py", "--out"], 2, "--out takes one folder"),
        (["--config", "quickstart.py", "--topology", "v5e:2x2"], 2, "compile is for the devices of this machine"),
        (["--out", "x"], 2, "--config is missing"),
    ],
)
def test_what_cannot_be_compiled_is_said(capsys, words, status, said):
    assert command.main(words) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_stages_whose_models_do_not_exist_are_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command.compile_cache, "enable", lambda place: place)  # the tests have a cache of their own
    words = ["--config", "quickstart.py", "--run_dir", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(command, "open_stage", lambda *a, **k: pytest.skip("opened"))
    with pytest.raises(pytest.skip.Exception):  # SFT starts from random weights
        command.main(words)
    monkeypatch.setattr(command.report, "missing_start", lambda stage: str(pathlib.Path(stage.run_dir, "gone")))
    assert command.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["sft", "reward", "ppo"]
    assert all("does not exist yet" in line for line in lines[:3])


def test_the_flags_are_those_of_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(command.compile_cache, "enable", lambda place: place)
    monkeypatch.setattr(command.report, "missing_start", lambda stage: "x")
    for deterministic in ("false", "true"):
        words = ["--config", "tldr_sft.py", "--deterministic", deterministic, "--out", str(tmp_path)]
        assert command.main(words) == 0
        assert ("xla_gpu_autotune_level=0" in os.environ["XLA_FLAGS"]) == (deterministic == "true")


def test_micro_batches_are_those_of_the_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command.compile_cache, "enable", lambda place: place)
    monkeypatch.setattr(micro_batches, "PLATFORMS", ("cpu",))
    config = tmp_path / "sft.py"
    config.write_text(
        "from tests.helpers import runs\n\n\n"
        f"def get_config(variant=None):\n    return runs.sft_config({str(tmp_path / 'run')!r})\n"
    )
    for capacity, said in (
        (2**40, "8: the whole minibatch fits cpu (921.6 GiB"),
        (2**10, "1: the smallest, and it does NOT"),
    ):
        monkeypatch.setattr(micro_batches.topologies, "capacity", lambda device, capacity=capacity: capacity)
        assert command.main(["--config", str(config), "--out", str(tmp_path / "out")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"sft: micro_batch_size {said}") and lines[1].startswith("sft: compiled update ")

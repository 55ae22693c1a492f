"""parallel/platforms.py: devices that are asked for and not there are named, with the extra that installs them."""

import json
import os
import subprocess
import sys
import types

import pytest

from rlhf_jax.parallel import platforms

PROGRAM = """
import json, sys
from rlhf_jax import cli
print(json.dumps([cli.main(words) for words in json.loads(sys.argv[1])]))
"""


@pytest.mark.parametrize(
    ("asked", "extra"), [("cuda", "pip install '.[cuda]'"), ("tpu", "pip install '.[tpu]'"), ("cdua", None)]
)
def test_every_command_names_devices_that_are_not_there(asked, extra, tmp_path):
    if asked in platforms.PLUGINS and platforms._has_plugin(asked):
        pytest.skip(f"jax's plugin for {asked} is installed")
    commands = [
        ["train", "--config", "quickstart.py", "--run_dir", str(tmp_path / "run")],
        ["compile", "--config", "quickstart.py", "--out", str(tmp_path / "programs")],
        ["evaluate", "--model", str(tmp_path), "--data", "synthetic"],
        ["chat", str(tmp_path)],
    ]
    commands = commands if asked == "cuda" else commands[:1]
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env={**os.environ, "JAX_PLATFORMS": asked},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0 and json.loads(found.stdout) == [2] * len(commands), found.stderr
    said = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == len(commands) and "Traceback" not in found.stderr
    for line in said:
        assert f"JAX_PLATFORMS={asked}: jax has no such devices: " in line
        assert "This machine has " in line and "JAX_PLATFORMS=cpu uses the CPU" in line
        assert extra is None or extra in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("asked", "platform", "said"), [("", "cpu", True), ("cpu", "cpu", False), ("", "gpu", False)])
def test_a_run_on_the_cpu_of_a_machine_with_gpus_is_said(asked, platform, said, monkeypatch, tmp_path, capsys):
    found = [types.SimpleNamespace(platform=platform)]
    config = types.SimpleNamespace(jax_platforms=asked)
    monkeypatch.setattr(platforms, "jax", types.SimpleNamespace(config=config, devices=lambda: found))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(platforms, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    platforms.check()
    line = (
        "jax uses the CPU, though this machine has 2 NVIDIA GPUs: pip install '.[cuda]' installs jax's plugin for it\n"
    )
    assert capsys.readouterr().err == (line if said else "")

"""stages/disk.py and the end of a run on a full disk: what is written is known before, and half an export is none."""

import hashlib
import os
import pathlib
import subprocess
import sys
import types

import pytest

import rlhf_jax
from rlhf_jax.config import SFT_EXPORT, Pipeline, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.errors import UserError
from rlhf_jax.runtime.loop import Loop
from rlhf_jax.stages import disk
from tests.helpers.paths import ROOT
from tests.helpers.tiny_rloo import CONFIG, first_token

SMALL = {**CONFIG, "scratch_model": "1x64x2"}


@pytest.mark.parametrize(
    ("saves", "limit", "present", "checkpoints"),
    [
        (1, 2, [], 1),
        (2, 2, [], 2),
        (9, 2, [], 3),
        (9, 2, [1, 2, 3], 1),
        (9, None, [], 9),
        (9, None, [1, 2, 3, 4], 5),
        (9, 2, [8, 9], 0),
    ],
)
def test_checkpoints_that_are_kept_and_exports_and_later_stages_are_counted(saves, limit, present, checkpoints):
    counts = [("policy", 1000, True), ("reference", 1000, False)]
    stage = types.SimpleNamespace(config=types.SimpleNamespace(save_total_limit=limit, export_merged=True))
    stage.total_steps = 9
    later = [RewardConfig(), PPOConfig(use_peft=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "parameters", lambda _: counts)
        needs = disk.needs(stage, 12_000, present, saves, later)
    name = f"{checkpoints} checkpoint{'s' if checkpoints > 1 else ''}"
    own = {name: checkpoints * 12_000} if checkpoints else {}
    assert needs == {**own, "models": 4_000, "reward": 16_000, "ppo": 8_000}


def test_merged_models_of_adapters_are_counted():
    counts = [("policy", 10, True), ("base", 1000, False)]
    for merged in (True, False):
        stage = types.SimpleNamespace(config=types.SimpleNamespace(export_merged=merged))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "parameters", lambda _: counts)
            assert disk.exported_bytes(stage) == 4 * (1010 if merged else 10)


class DiskGetsFull:
    """In place of `Loop.export`: others fill the disk after the last checkpoint."""

    def __init__(self, ballast):
        self.ballast, self.export = ballast, Loop.export

    def __call__(self, loop, folder):
        loop.checkpoints.wait()
        with open(self.ballast, "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
        return self.export(loop, folder)


def files(folder):
    """Digests of the exported policy."""
    paths = sorted((pathlib.Path(folder) / "policy").iterdir())
    contents = {path.name: path.read_bytes().replace(str(folder).encode(), b"RUN") for path in paths}
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def in_a_small_disk(place):
    """Run by the child: a run into a file system of 5 MiB that is full when it exports, and again with room."""
    config = RLOOConfig(**SMALL, run_dir=f"{place}/run")
    ballast = f"{place}/ballast"
    with pytest.MonkeyPatch.context() as patch:
        full = DiskGetsFull(ballast)
        patch.setattr(Loop, "export", lambda loop, folder: full(loop, folder))
        with pytest.raises(UserError) as error:
            rlhf_jax.run(config, reward_funcs=first_token)
    text = str(error.value)
    assert text.startswith(f"rloo: the models could not be written to {place}/run: ") and "\n" not in text, text
    assert "o space left" in text and text.endswith("rerun the command, which only exports: update 2 is saved"), text
    assert not {"policy", ".export"} & set(os.listdir(f"{place}/run")), os.listdir(f"{place}/run")
    os.remove(ballast)
    metrics = pathlib.Path(f"{place}/run/metrics.jsonl").read_bytes()
    rlhf_jax.run(config, reward_funcs=first_token)
    assert metrics == pathlib.Path(f"{place}/run/metrics.jsonl").read_bytes()
    return files(f"{place}/run")


PROGRAM = """
import hashlib, sys
from tests.stages import test_disk
print("left", hashlib.sha256(repr(sorted(test_disk.in_a_small_disk(sys.argv[1]).items())).encode()).hexdigest())
"""


def too_small(place):
    """Run by the child, in 12 MiB: a stage with room for one of its checkpoints, and a pipeline with room for its
    first stage."""
    wide = {**CONFIG, "scratch_model": "2x128x2"}
    said = r"up to 13\.5 MiB \(2 checkpoints 11\.8 MiB, models 1\.6 MiB\), and 1[12]\.\d MiB are free"
    with pytest.raises(UserError, match=said):
        rlhf_jax.run(RLOOConfig(**wide, run_dir=f"{place}/one"), reward_funcs=first_token)
    shared = {
        name: CONFIG[name] for name in ("tokenizer_name_or_path", "dataset_name", "max_train_samples", "report_to")
    }
    sft = SFTConfig(**shared, scratch_model="2x128x2", batch_size=4, max_steps=1)
    reward_funcs = ("rlhf_jax.rewards:think_format_reward",)
    ppo = PPOConfig(
        **shared, sft_model_path=SFT_EXPORT, reward_model_path=None, reward_funcs=reward_funcs, batch_size=4
    )
    said = r"\(1 checkpoint 5\.9 MiB, models 1\.6 MiB, ppo 13\.1 MiB\), and 1[12]\.\d MiB are free"
    with pytest.raises(UserError, match=said):
        rlhf_jax.run(Pipeline(run_dir=f"{place}/pipeline", sft=sft, reward=None, ppo=ppo))


PROGRAM = """
import sys
from tests.stages import test_disk
print("returned", getattr(test_disk, sys.argv[1])(sys.argv[2]))
"""


def in_a_file_system_of(mebibytes, action, place):
    """What a function of this file prints that it returned in a process with a file system of its own at `place`."""
    mount = f"mount -t tmpfs -o size={mebibytes}m tmpfs {place}"
    if subprocess.run(["unshare", "--mount", "bash", "-c", mount], capture_output=True).returncode:
        pytest.skip("a file system of its own needs root and namespaces")
    command = ["unshare", "--mount", "bash", "-c", f'{mount} && exec "$@"', "bash", sys.executable, "-c", PROGRAM]
    child = subprocess.run([*command, action, str(place)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stdout[-1000:] + child.stderr[-3000:]
    return child.stdout.splitlines()[-1].removeprefix("returned ")


@pytest.mark.runs
def test_an_export_that_finds_a_full_disk_is_one_line_and_made_up_for_by_a_rerun(tmp_path):
    left = in_a_file_system_of(5, "in_a_small_disk", tmp_path)
    rlhf_jax.run(RLOOConfig(**SMALL, run_dir=str(tmp_path / "run")), reward_funcs=first_token)
    assert left == str(files(tmp_path / "run"))


@pytest.mark.runs
def test_a_disk_without_room_for_the_whole_command_is_named_before_the_first_update(tmp_path):
    in_a_file_system_of(12, "too_small", tmp_path)

"""PPO and RLOO on eight (forced host) devices: the samples and metrics of one, with params that are really sharded."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
UPDATES, BATCH, EVALUATED = 2, 16, 10
ONE, DATA, MIXED = "1x1x1", "8x1x1", "2x2x2"
QKV = "policy/backbone/layers/attention/query_key_value/kernel"  # [L, D, 3D], D = 32
VALUE = QKV.replace("policy", "value")


# --- what runs in a process with so many devices: python -m tests.test_devices FOLDER MESH


def train_on(folder: pathlib.Path, mesh: str) -> dict:
    """A short run of each algorithm on one mesh: what was sampled, and where PPO's trained params lay."""
    import jax

    import rlhf_jax

    found = {"samples": [], "rloo": [], "shapes": {}, "shards": {}, "devices": len(jax.devices())}

    def brevity(prompts, completion_ids, **_):
        found["samples"].append([prompts, completion_ids])
        return [-0.1 * len(ids) for ids in completion_ids]

    class Look(rlhf_jax.Callback):
        def on_train_begin(self, stage, control):
            for tree in ("params", "opt_state"):
                for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(stage.state, tree)):
                    name = f"{tree}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
                    found["shapes"][name] = leaf.shape
                    found["shards"][name] = sorted({shard.data.shape for shard in leaf.addressable_shards})

    data, fsdp, tensor = map(int, mesh.split("x"))
    shared = {
        "report_to": (),
        "scratch_model": "2x32x4",
        "sft_model_path": None,
        "tokenizer_name_or_path": "synthetic",
        "reward_model_path": str(folder / "reward"),
        "dataset_name": "synthetic",
        "max_train_samples": 64,
        "max_eval_samples": EVALUATED,
        "query_length": 64,
        "length_buckets": (64,),
        "response_length": 6,
        "num_mini_batches": 1,
        "missing_eos_penalty": 1.0,
        "learning_rate": 1e-3,
        "num_sample_generations": 0,
        "mesh_data": data,
        "mesh_fsdp": fsdp,
        "mesh_tensor": tensor,
    }
    config = rlhf_jax.PPOConfig(
        **shared,
        run_dir=str(folder / mesh),
        batch_size=BATCH,
        micro_batch_size=8,
        rollout_batch_size=8,
        num_ppo_epochs=2,
        total_episodes=UPDATES * BATCH,
    )
    rlhf_jax.run(config, reward_funcs=brevity, callbacks=[Look()])
    found["ppo"], found["samples"] = found["samples"], found["rloo"]
    if mesh == DATA:  # the mixed mesh has its axes too
        return found
    config = rlhf_jax.RLOOConfig(
        **shared,
        run_dir=str(folder / f"rloo-{mesh}"),
        num_generations=2,
        num_iterations=2,
        batch_size=2 * BATCH,
        micro_batch_size=16,
        rollout_batch_size=16,
        total_episodes=UPDATES * 2 * BATCH,
    )
    rlhf_jax.run(config, reward_funcs=brevity)
    found["rloo"] = found.pop("samples")
    return found


def main(folder: str, mesh: str) -> None:
    """Writes MESH.json."""
    pathlib.Path(folder, f"{mesh}.json").write_text(json.dumps(train_on(pathlib.Path(folder), mesh)))


# --- what must hold


def start(folder: pathlib.Path, devices: int, mesh: str) -> subprocess.Popen:
    """Begins `main` in a process that sees so many devices."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.test_devices", str(folder), mesh],
        # XLA's pool has a thread a device, and collectives hold theirs until all devices have come: with two of them at
        # once it deadlocks on few cores. NPROC is the number of threads that it takes instead.
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": "32"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run folders of all meshes, and what `train_on` found on each."""
    import jax

    from rlhf_jax import data, models
    from rlhf_jax.models import hf

    folder = tmp_path_factory.mktemp("devices")
    model = models.custom_shape("2x32x4", vocab_size=256, max_positions=128)
    params = jax.device_get(model.init(jax.random.key(1), heads=("scalar",), score_std=0.3))
    hf.save(folder / "reward", model, params, kind="scalar")
    data.save_tokenizer(data.load_tokenizer("synthetic"), str(folder / "reward"))
    runs = [start(folder, devices, mesh) for devices, mesh in ((1, ONE), (8, DATA), (8, MIXED))]
    for run in runs:
        output, _ = run.communicate(timeout=600)
        assert run.returncode == 0, output[-5000:]
    return folder


def found_on(folder, mesh: str) -> dict:
    return json.loads((folder / f"{mesh}.json").read_text())


def metrics_on(folder, mesh: str, prefix: str = "") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{prefix}{mesh}" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("mesh", "algorithm"), [(DATA, "ppo"), (MIXED, "ppo"), (MIXED, "rloo")])
def test_samples_do_not_depend_on_the_devices(folder, mesh, algorithm):
    one, many = found_on(folder, ONE), found_on(folder, mesh)
    assert (one["devices"], many["devices"]) == (1, 8)
    ours, theirs = many[algorithm], one[algorithm]
    assert len(theirs) >= UPDATES and len({str(ids) for _, rows in theirs for ids in rows}) > BATCH
    assert ours[:UPDATES] == theirs[:UPDATES]


@pytest.mark.parametrize(("mesh", "algorithm"), [(DATA, "ppo"), (MIXED, "ppo"), (MIXED, "rloo")])
def test_metrics_do_not_depend_on_the_devices(folder, mesh, algorithm):
    prefix = {"ppo": "", "rloo": "rloo-"}[algorithm]
    one, many = metrics_on(folder, ONE, prefix), metrics_on(folder, mesh, prefix)
    assert [line["step"] for line in one] == [line["step"] for line in many] == [1, 2]
    assert "objective/kl" in one[0] and "eval/scores" in one[-1]
    for expected, line in zip(one, many, strict=True):
        assert set(line) == set(expected)
        # RLOO's loss is a mean of advantages of either sign that cancel: its rounding is theirs.
        cancelling = {name for name in expected if algorithm == "rloo" and "loss" in name}
        # They measure rounding, which is another one on another mesh.
        cancelling |= {"val/first_ratio_error", "policy/first_approxkl"}
        far = {
            name: (line[name], value)
            for name, value in expected.items()
            if abs(line[name] - value) > (1e-5 if name in cancelling else 1e-4 * max(abs(value), 0.01))
        }
        assert not far


def test_the_second_update_starts_from_other_params(folder):
    first, second = metrics_on(folder, ONE)
    assert first["objective/kl"] == 0 and second["objective/kl"] != 0


def test_params_and_optimizer_state_are_shared_out(folder):
    one, data, mixed = (found_on(folder, mesh) for mesh in (ONE, DATA, MIXED))
    assert one["shapes"] == data["shapes"] == mixed["shapes"]
    for tree in (f"params/{QKV}", f"params/{VALUE}"):
        assert one["shapes"][tree] == [2, 32, 96]
        assert one["shards"][tree] == data["shards"][tree] == [[2, 32, 96]]  # data parallel: whole on every device
        assert mixed["shards"][tree] == [[2, 16, 48]]  # input over fsdp, output over tensor
    moments = [name for name in mixed["shapes"] if name.startswith("opt_state/") and name.endswith(QKV)]
    assert len(moments) == 2  # Adam's two
    assert all(mixed["shards"][name] == [[2, 16, 48]] for name in moments)


def test_every_mesh_leaves_the_same_models(folder):
    import numpy as np

    from rlhf_jax.models import hf

    for name, kind in (("policy", "causal"), ("value", "scalar")):
        expected = hf.load(folder / ONE / name, kind=kind)[1]
        for mesh in (DATA, MIXED):
            params = hf.load(folder / mesh / name, kind=kind)[1]
            kernels = [tree["backbone"]["layers"]["mlp"]["dense_h_to_4h"]["kernel"] for tree in (params, expected)]
            assert np.linalg.norm(kernels[0] - kernels[1]) <= 1e-4 * np.linalg.norm(kernels[1])


if __name__ == "__main__":
    main(*sys.argv[1:])

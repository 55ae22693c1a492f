"""Fewer heads of keys and values than devices that share them: eight (forced host) devices sample the tokens and train
the models of one, and each holds a cache of the heads that its queries read."""

import json
import math
import pathlib
import sys

import pytest

from tests.helpers.children import child, reward_checkpoint

pytestmark = pytest.mark.processes
ONE, MANY = "1x1x1", "1x2x4"
UPDATES, BATCH = 3, 16
# Shape, and how the cache's keys [16, KV, K, 6] lie on 2 x 4 devices. Where the heads of queries do not divide either,
# the axis `tensor` shards rows.
MODELS = {
    "qwen2:2x64x8x2": ([16, 4, 8, 6], [8, 1, 8, 6]),
    "gemma2:2x64x4x1": ([16, 4, 16, 6], [8, 1, 16, 6]),
    "phi3:2x96x12x6": ([16, 12, 8, 6], [8, 3, 8, 6]),
    "qwen2:2x112x14x2": ([16, 2, 8, 6], [2, 2, 8, 6]),
    "llama:2x72x9x3": ([16, 3, 8, 6], [2, 3, 8, 6]),
}
WITH_PPO = "qwen2:2x64x8x2"


# --- what runs in a process with so many devices: python -m tests.integration.test_devices_families FOLDER MESH


def train_on(folder: pathlib.Path, mesh: str) -> dict:
    """A short run of each model on one mesh: what was sampled, and how its cache lay."""
    import jax

    import rlhf_jax
    from rlhf_jax.dry_run import memory

    found = {}

    class Look(rlhf_jax.Callback):
        def on_train_begin(self, stage, control):
            cache = jax.jit(lambda: stage.opened.policy.empty_cache(BATCH, 6))()[0][0]["k"]
            self.cache = [cache.shape, cache.addressable_shards[0].data.shape]
            self.planned = memory.cache_bytes(stage)

    data, fsdp, tensor = map(int, mesh.split("x"))
    shared = {
        "report_to": (),
        "sft_model_path": None,
        "reward_model_path": str(folder / "reward"),
        "tokenizer_name_or_path": "synthetic",
        "dataset_name": "synthetic",
        "max_train_samples": 64,
        "max_eval_samples": 8,
        "query_length": 32,
        "length_buckets": (32,),
        "response_length": 6,
        "num_mini_batches": 1,
        "missing_eos_penalty": 1.0,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-5,
        "num_sample_generations": 0,
        "batch_size": BATCH,
        "micro_batch_size": 8,
        "rollout_batch_size": 16,
        "total_episodes": UPDATES * BATCH,
        "mesh_data": data,
        "mesh_fsdp": fsdp,
        "mesh_tensor": tensor,
    }
    for number, shape in enumerate(MODELS):
        samples, look = [], Look()

        def brevity(prompts, completion_ids, samples=samples, **_):
            samples.append([prompts, completion_ids])
            return [-0.1 * len(ids) for ids in completion_ids]

        options = {**shared, "scratch_model": shape, "run_dir": str(folder / f"{mesh}-{number}")}
        if shape == WITH_PPO:
            config = rlhf_jax.PPOConfig(**options, num_ppo_epochs=2)
        else:
            config = rlhf_jax.RLOOConfig(**options, num_generations=2)
        rlhf_jax.run(config, reward_funcs=brevity, callbacks=[look])
        found[shape] = {"samples": samples[:UPDATES], "cache": look.cache, "planned": look.planned}
    return found


def main(folder: str, mesh: str) -> None:
    """Writes MESH.json."""
    pathlib.Path(folder, f"{mesh}.json").write_text(json.dumps(train_on(pathlib.Path(folder), mesh)))


# --- what must hold


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, what `train_on` found on each mesh)"""
    folder = tmp_path_factory.mktemp("families")
    reward_checkpoint(folder)
    module = "tests.integration.test_devices_families"
    children = [child(module, folder, mesh, devices=count) for mesh, count in ((ONE, 1), (MANY, 8))]
    for run in children:
        output, _ = run.communicate(timeout=900)
        assert run.returncode == 0, output[-5000:]
    return folder, {mesh: json.loads((folder / f"{mesh}.json").read_text()) for mesh in (ONE, MANY)}


@pytest.mark.parametrize("shape", MODELS)
def test_samples_do_not_depend_on_the_devices(runs, shape):
    one, many = (runs[1][mesh][shape]["samples"] for mesh in (ONE, MANY))
    assert len(one) == UPDATES and one == many


@pytest.mark.parametrize("shape", MODELS)
def test_every_mesh_leaves_the_same_models(runs, shape):
    from rlhf_jax.models.io import hf
    from tests.helpers.arrays import distance

    number = list(MODELS).index(shape)
    for name, kind in (("policy", "causal"), *((("value", "scalar"),) if shape == WITH_PPO else ())):
        one, many = (hf.load(runs[0] / f"{mesh}-{number}" / name, kind=kind)[1] for mesh in (ONE, MANY))
        assert distance(many, one) <= 1e-4


@pytest.mark.parametrize("shape", MODELS)
def test_a_device_holds_the_keys_and_values_that_its_queries_read(runs, shape):
    assert runs[1][MANY][shape]["cache"] == list(map(list, MODELS[shape]))


@pytest.mark.parametrize("shape", [shape for shape, (whole, held) in MODELS.items() if held[1] < whole[1]])
def test_a_dry_run_counts_the_cache_that_a_device_holds(runs, shape):
    one, many = (runs[1][mesh][shape] for mesh in (ONE, MANY))
    held_by_one, held = (math.prod(run["cache"][1]) for run in (one, many))
    assert many["planned"] * held_by_one == one["planned"] * held


if __name__ == "__main__":
    main(*sys.argv[1:])

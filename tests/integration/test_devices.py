"""PPO, RLOO and GRPO on eight (forced host) devices, laid out in every way: the samples, metrics and models of one
device, with params, moments and caches that are really split."""

import collections
import dataclasses
import json
import math
import pathlib
import sys

import pytest

from tests.helpers.children import child, reward_checkpoint

pytestmark = pytest.mark.processes
UPDATES, BATCH, EVALUATED = 3, 16, 10
ONE, DATA, FSDP, TENSOR, MIXED = "1x1x1", "8x1x1", "1x8x1", "1x1x8", "2x2x2"
MANY = (DATA, FSDP, TENSOR, MIXED)
ADAPTED = (ONE, MIXED)  # where PPO trains adapters too
BASES = {"lora": {}, "int8": {"load_in_8bit": True}, "nf4": {"load_in_4bit": True}}
QKV = "policy/backbone/layers/attention/query_key_value/kernel"  # [L, D, 3D], D = 64, 8 heads
VALUE = QKV.replace("policy", "value")  # D = 32, 4 heads: over 8 devices on `tensor` it is folded into `fsdp`


# --- what runs in a process with so many devices: python -m tests.integration.test_devices FOLDER MESH


def train_on(folder: pathlib.Path, mesh: str) -> dict:
    """A short run of each algorithm on one mesh: what was sampled, and where PPO's trained params lay."""
    import jax

    import rlhf_jax

    found = {"samples": [], "rloo": [], "shapes": {}, "shards": {}, "devices": len(jax.devices()), "programs": {}}

    def brevity(prompts, completion_ids, **_):
        found["samples"].append([prompts, completion_ids])
        return [-0.1 * len(ids) for ids in completion_ids]

    class Look(rlhf_jax.Callback):
        def on_train_begin(self, stage, control):
            cache = jax.jit(lambda: stage.opened.policy.empty_cache(BATCH, 6))()[0][0]["k"]
            found["cache"] = [cache.shape, cache.addressable_shards[0].data.shape]
            trees = {"params": stage.state.params, "opt_state": stage.state.opt_state, "base": stage.models.base}
            for tree, params in trees.items():
                for path, leaf in jax.tree_util.tree_leaves_with_path(params):
                    name = f"{tree}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
                    found["shapes"][name] = leaf.shape
                    found["shards"][name] = sorted({shard.data.shape for shard in leaf.addressable_shards})

        def on_train_end(self, stage, paths):
            counted = ("generate", "experience", "update")
            assert all(getattr(stage.programs.jitted, name)._cache_size() == 1 for name in counted)
            found["programs"][stage.name] = {name: compiled.pop(f"jit(_{name})") for name in counted}

    compiled = collections.Counter()

    def listen(event, seconds, fun_name=None, **_):
        compiled[fun_name] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listen)

    data, fsdp, tensor = map(int, mesh.split("x"))
    shared = {
        "report_to": (),
        "scratch_model": "2x64x8",
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
        "adam_epsilon": 1e-5,
        "num_sample_generations": 0,
        "mesh_data": data,
        "mesh_fsdp": fsdp,
        "mesh_tensor": tensor,
    }
    ppo = rlhf_jax.PPOConfig(
        **shared,
        run_dir=str(folder / mesh),
        batch_size=BATCH,
        micro_batch_size=8,
        rollout_batch_size=8,
        num_ppo_epochs=2,
        total_episodes=UPDATES * BATCH,
    )
    rlhf_jax.run(ppo, reward_funcs=brevity, callbacks=[Look()])
    found["ppo"], found["samples"] = found["samples"], found["rloo"]
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
    rlhf_jax.run(config, reward_funcs=brevity, callbacks=[Look()])
    found["rloo"] = found.pop("samples")
    before = {key: found[key] for key in ("shapes", "shards", "programs")}
    for kind, narrow in BASES.items() if mesh in ADAPTED else ():
        found |= {"samples": [], "shapes": {}, "shards": {}, "programs": {}}
        adapters = {"use_peft": True, "lora_r": 4, "lora_target_modules": ("all-linear",), "lora_value": "own"}
        adapters |= narrow
        config = dataclasses.replace(ppo, run_dir=str(folder / f"{kind}-{mesh}"), **adapters)
        rlhf_jax.run(config, reward_funcs=brevity, callbacks=[Look()])
        found[kind] = {key: found[key] for key in ("samples", *before)}
        del found["samples"]
    if mesh in ADAPTED:
        found |= {"samples": [], "shapes": {}, "shards": {}, "programs": {}}
        grpo = rlhf_jax.GRPOConfig(
            **shared,
            run_dir=str(folder / f"grpo-{mesh}"),
            num_generations=2,
            num_iterations=2,
            batch_size=2 * BATCH,
            micro_batch_size=16,
            rollout_batch_size=16,
            total_episodes=UPDATES * 2 * BATCH,
            beta=0.05,
            sync_ref_model=True,
            ref_model_sync_steps=3,
            top_entropy_quantile=0.5,
            use_adaptive_entropy=True,
            entropy_target=20.0,
        )
        rlhf_jax.run(grpo, reward_funcs=brevity, callbacks=[Look()])
        found["grpo"] = {key: found[key] for key in ("samples", *before)}
        del found["samples"]
    return found | before


def main(folder: str, mesh: str) -> None:
    """Writes MESH.json."""
    pathlib.Path(folder, f"{mesh}.json").write_text(json.dumps(train_on(pathlib.Path(folder), mesh)))


# --- what must hold


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run folders of all meshes, and what `train_on` found on each."""
    folder = tmp_path_factory.mktemp("devices")
    reward_checkpoint(folder)
    # Two at a time: more would only wait for each other.
    todo, runs = [(1, ONE), *((8, mesh) for mesh in MANY)], []
    while todo or runs:
        while todo and len(runs) < 2:
            devices, mesh = todo.pop(0)
            runs.append(child("tests.integration.test_devices", folder, mesh, devices=devices))
        run = runs.pop(0)
        output, _ = run.communicate(timeout=600)
        assert run.returncode == 0, output[-5000:]
    return folder


def found_on(folder, mesh: str) -> dict:
    return json.loads((folder / f"{mesh}.json").read_text())


def metrics_on(folder, mesh: str, prefix: str = "") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{prefix}{mesh}" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
@pytest.mark.parametrize("mesh", MANY)
def test_samples_do_not_depend_on_the_devices(folder, mesh, algorithm):
    one, many = found_on(folder, ONE), found_on(folder, mesh)
    assert (one["devices"], many["devices"]) == (1, 8)
    ours, theirs = many[algorithm], one[algorithm]
    assert len(theirs) >= UPDATES and len({str(ids) for _, rows in theirs for ids in rows}) > BATCH
    assert ours[:UPDATES] == theirs[:UPDATES]


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
@pytest.mark.parametrize("mesh", MANY)
def test_metrics_do_not_depend_on_the_devices(folder, mesh, algorithm):
    prefix = {"ppo": "", "rloo": "rloo-"}[algorithm]
    one, many = metrics_on(folder, ONE, prefix), metrics_on(folder, mesh, prefix)
    assert [line["step"] for line in one] == [line["step"] for line in many] == [1, 2, 3]
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
    first, second, _ = metrics_on(folder, ONE)
    assert first["objective/kl"] == 0 and second["objective/kl"] != 0


# What a device holds of QKV, the policy's [2, 64, 192] and the value model's [2, 32, 96], and of a cache's keys
# [16, 8, 8, 6].
HELD = {
    DATA: ([2, 64, 192], [2, 32, 96], [2, 8, 8, 6]),
    FSDP: ([2, 8, 192], [2, 4, 96], [2, 8, 8, 6]),
    TENSOR: ([2, 64, 24], [2, 4, 96], [16, 1, 8, 6]),
    MIXED: ([2, 32, 96], [2, 16, 48], [4, 4, 8, 6]),
}


@pytest.mark.parametrize("mesh", MANY)
def test_each_device_holds_its_share_of_matrices_moments_and_cache(folder, mesh):
    one, many = found_on(folder, ONE), found_on(folder, mesh)
    assert one["shapes"] == many["shapes"]
    policy, value, cache = HELD[mesh]
    # The param and Adam's two moments in PPO; the policy's two moments in RLOO, where clipping comes before them.
    for name, whole, held, count in ((QKV, [2, 64, 192], policy, 5), (VALUE, [2, 32, 96], value, 3)):
        copies = [x for x in many["shapes"] if x.endswith(name)]
        assert len(copies) == count
        assert all(one["shards"][x] == [whole] and many["shards"][x] == [held] for x in copies)
    assert many["cache"] == [[16, 8, 8, 6], cache]
    if mesh == DATA:
        return
    # Six matrices of the policy, five of the value model, all split over all the devices that share params.
    large = [x for x in many["shapes"] if x.endswith(("kernel", "embedding")) and "score" not in x]
    assert len(large) == 5 * 6 + 3 * 5
    shares = 4 if mesh == MIXED else 8
    assert all(math.prod(many["shapes"][x]) == shares * math.prod(many["shards"][x][0]) for x in large)


@pytest.mark.parametrize("mesh", (ONE, *MANY))
def test_each_program_compiles_once(folder, mesh):
    for algorithm, programs in found_on(folder, mesh)["programs"].items():
        assert programs == {"generate": 1, "experience": 1, "update": 1}, algorithm


@pytest.mark.parametrize("mesh", MANY)
def test_every_mesh_leaves_the_same_models(folder, mesh):
    import numpy as np

    from rlhf_jax.models.io import hf

    for prefix, name, kind in (("", "policy", "causal"), ("", "value", "scalar"), ("rloo-", "policy", "causal")):
        ours, expected = (flat(hf.load(folder / f"{prefix}{m}" / name, kind=kind)[1]) for m in (mesh, ONE))
        assert np.linalg.norm(ours - expected) <= 1e-4 * np.linalg.norm(expected)


def test_grpo_with_a_moving_reference_and_entropy_control_does_not_depend_on_the_devices(folder):
    import numpy as np

    from rlhf_jax.models.io import hf

    one, many = (found_on(folder, mesh)["grpo"] for mesh in ADAPTED)
    assert many["samples"][:UPDATES] == one["samples"][:UPDATES]
    assert many["programs"] == one["programs"] == {"grpo": {"generate": 1, "experience": 1, "update": 1}}
    lines = [metrics_on(folder, mesh, "grpo-") for mesh in ADAPTED]
    assert lines[0][-1]["entropy_coef"] > lines[0][0]["entropy_coef"] > 0
    for expected, line in zip(*lines, strict=True):
        for name in ("entropy", "entropy_coef", "kl", "reward", "grad_norm"):
            assert abs(line[name] - expected[name]) <= 1e-4 * max(abs(expected[name]), 0.01), name
    ours, expected = (flat(hf.load(folder / f"grpo-{mesh}" / "policy", kind="causal")[1]) for mesh in ADAPTED)
    assert np.linalg.norm(ours - expected) <= 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", BASES)
def test_adapters_on_a_shared_base_do_not_depend_on_the_devices_and_are_split_as_their_kernels(folder, kind):
    import numpy as np

    from rlhf_jax.models.io import hf

    one, many = (found_on(folder, mesh)[kind] for mesh in ADAPTED)
    assert many["samples"][:UPDATES] == one["samples"][:UPDATES]
    assert many["programs"] == one["programs"] == {"ppo": {"generate": 1, "experience": 1, "update": 1}}
    for first, second in zip(*(metrics_on(folder, mesh, f"{kind}-") for mesh in ADAPTED), strict=True):
        assert abs(first["objective/kl"] - second["objective/kl"]) <= 1e-4 * max(abs(first["objective/kl"]), 0.01)
    # [L, D, r] by fsdp, [L, r, 3D] by tensor; each and its two moments.
    for name, whole, held in (("lora_a", [2, 64, 4], [2, 32, 4]), ("lora_b", [2, 4, 192], [2, 4, 96])):
        copies = [x for x in many["shapes"] if x.endswith(QKV.replace("kernel", name))]
        assert len(copies) == 3 and all(many["shards"][x] == [held] and many["shapes"][x] == whole for x in copies)
    base = f"base/{QKV}/qvalue" if BASES[kind] else f"base/{QKV}"
    rows = 32 if kind == "nf4" else 64  # two in a byte
    assert (many["shapes"][base], many["shards"][base]) == ([2, rows, 192], [[2, rows // 2, 96]])
    for name, head in (("policy_adapter", "causal"), ("value", "scalar")):
        ours, expected = (flat(hf.load(folder / f"{kind}-{mesh}" / name, kind=head)[1]) for mesh in (MIXED, ONE))
        assert np.linalg.norm(ours - expected) <= 1e-4 * np.linalg.norm(expected)


def flat(tree):
    """All numbers of a pytree, in a row."""
    import jax
    import numpy as np

    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


if __name__ == "__main__":
    main(*sys.argv[1:])

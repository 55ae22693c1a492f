"""Params straight into their shards: what is read, where it lies, what leaves again; the same planned on shapes."""

import json
import pathlib
import socket
import sys
import tracemalloc

import jax
import numpy as np
import pytest

from rlhf_jax import data, models
from rlhf_jax.config import PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.models.io import hf, safetensors, shards
from rlhf_jax.models.placement import AbstractWeights, Weights
from rlhf_jax.parallel import multihost, sharding
from rlhf_jax.stages import open_stage
from tests.helpers.children import child
from tests.helpers.models_common import assert_trees_equal, random_params
from tests.helpers.optional import optional

torch = optional("torch")
pytestmark = pytest.mark.processes
MODEL = models.custom_shape("2x32x4", vocab_size=256, max_positions=128)
FORMS = {"single": 10**9, "sharded": 20_000}
KINDS = {"single": "causal", "sharded": "causal", "bin": "causal", "reward": "scalar", "scalar_model": "scalar"}
STAGED = {
    "sft": {},
    "reward": {},
    "ppo": {},
    "ppo with a shared backbone": {"value_model": "shared_backbone", "dtype": "bfloat16"},
    "ppo from scratch": {
        "sft_model_path": None,
        "scratch_model": "2x32x4",
        "reward_model_path": None,
        "reward_funcs": ("rlhf_jax.data.synthetic:gold_reward",),
    },
    "rloo": {"sync_ref_model": True, "dtype": "bfloat16"},
    "rloo with a reference": {"ref_model_path": "single", "dtype": "bfloat16", "offload_frozen": "pinned_host"},
}


def described(tree) -> list:
    """[path, shape, dtype, sharding] of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [[jax.tree_util.keystr(path), list(x.shape), str(x.dtype), str(x.sharding)] for path, x in leaves]


def nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def counted(monkeypatch) -> list[tuple[str, int]]:
    """(tensor, bytes as float32) of every read from now on."""
    reads, read = [], safetensors.Source.read

    def noted(self, index):
        found = read(self, index)
        reads.append((self.name, found.nbytes))
        return found

    monkeypatch.setattr(safetensors.Source, "read", noted)
    return reads


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(pathlib.Path(folder).iterdir())}


def small_stage(name: str, folder: pathlib.Path, weights):
    """A stage on tiny checkpoints."""
    algorithm, options = name.split()[0], dict(STAGED[name])
    shared = {
        "run_dir": str(folder / "run"),
        "tokenizer_name_or_path": "synthetic",
        "dataset_name": "synthetic",
        "max_train_samples": 16,
        "max_eval_samples": 8,
        "report_to": (),
        "mesh_data": 2,
        "mesh_fsdp": 2,
        "mesh_tensor": 2,
    }
    if algorithm in ("sft", "reward"):
        config = {"sft": SFTConfig, "reward": RewardConfig}[algorithm]
        return open_stage(
            config(**shared, model_name_or_path=str(folder / "single"), max_length=64, batch_size=8), weights=weights
        )
    if "ref_model_path" in options:
        options["ref_model_path"] = str(folder / options["ref_model_path"])
    options = {
        "sft_model_path": str(folder / "single"),
        "reward_model_path": str(folder / "reward"),
        "query_length": 64,
        "response_length": 6,
        "batch_size": 16,
        "num_mini_batches": 1,
        "total_episodes": 16,
        **options,
    }
    config = {"ppo": PPOConfig, "rloo": RLOOConfig}[algorithm]
    return open_stage(config(**shared, **options), weights=weights)


def of_stage(stage) -> list:
    readers = [reader.params for reader in stage.scorer.models] if hasattr(stage, "scorer") else []
    reference = getattr(getattr(stage, "models", None), "reference", None)
    return described([stage.state, None if reference is None else reference.params, readers])


# --- what runs on eight devices: python -m tests.models.test_placement eight FOLDER


def on_eight(folder: pathlib.Path) -> dict:
    """What the tests below look at."""
    patch = pytest.MonkeyPatch()
    mesh = sharding.make_mesh(2, 2, 2)
    weights, planned = Weights(mesh), AbstractWeights(mesh)
    found = {"loads": {}, "stages": {}}
    for form, kind in KINDS.items():
        model, whole = hf.load(folder / form, kind=kind)
        with patch.context() as watched:
            reads = counted(watched)
            placed = weights.load(model, str(folder / form), kind, None)
        assert_trees_equal(jax.tree.map(np.asarray, placed), whole)
        found["loads"][form] = {
            "reads": len(reads),
            "bytes": sum(size for _, size in reads),
            "whole": nbytes(whole),
            "placed": described(placed),
            "planned": described(planned.load(model, str(folder / form), kind, None)),
            "split": placed["backbone"]["embed_in"]["embedding"].addressable_shards[0].data.nbytes,
        }

    for name in STAGED:
        real = of_stage(small_stage(name, folder, weights))
        with patch.context() as watched:
            reads = counted(watched)
            found["stages"][name] = [real, of_stage(small_stage(name, folder, planned))]
        assert not reads  # a plan reads the names of tensors, none of their values

    key = jax.random.key(5)
    drawn = weights.init(MODEL, key, ("causal", "scalar"))
    assert_trees_equal(
        jax.tree.map(np.asarray, drawn), jax.tree.map(np.asarray, MODEL.init(key, heads=("causal", "scalar")))
    )
    found["drawn"] = described(drawn)
    found["planned draw"] = described(planned.init(MODEL, key, ("causal", "scalar")))
    total = lambda params: {"sum": params["backbone"]["layers"]["mlp"]["dense_4h_to_h"]["kernel"].sum(0)}  # noqa: E731
    found["as it falls"] = [described(weights.run(total, drawn)), described(planned.run(total, drawn))]

    copy = weights.copy(MODEL, drawn)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)
    before = jax.tree.map(np.array, drawn)
    double(drawn)
    assert_trees_equal(jax.tree.map(np.asarray, copy), before)

    model, params = hf.load(folder / "single")
    placed = weights.load(model, str(folder / "single"), "causal", None)
    held, peaks = [0], []
    write, gather = safetensors.safetensors.numpy.save_file, shards.gather_to_host

    def noted_gather(leaf, layer=None):
        array = gather(leaf, layer)
        held[0] += array.nbytes
        return array

    def noted_write(tensors, *args, **options):
        peaks.append([held[0], len(tensors)])
        held[0] = 0
        write(tensors, *args, **options)

    patch.setattr(hf, "gather_to_host", noted_gather)
    patch.setattr(safetensors.safetensors.numpy, "save_file", noted_write)
    for form, size in FORMS.items():
        hf.save(folder / f"out-{form}", model, placed, kind="causal", max_shard_bytes=size)
    found["held"] = peaks
    found["programs"] = shards._gather(None, True)._cache_size()
    patch.undo()
    head = {**placed, "score": sharding.place(params_of("scalar_model")["score"], sharding.replicated(mesh))}
    hf.save(folder / "out-folded", model, head, kind="scalar", dtype="bfloat16")

    big = models.custom_shape("8x256x4", vocab_size=4096)
    hf.save(folder / "big", big, weights.init(big, key, ("causal",)), kind="causal")
    tracemalloc.start()
    placed = weights.load(big, str(folder / "big"), "causal", None)
    found["peak"] = [tracemalloc.get_traced_memory()[1], nbytes(placed)]
    tracemalloc.stop()
    return found


# --- and in each of two processes: python -m tests.models.test_placement two FOLDER ADDRESS


def on_two(folder: pathlib.Path, address: str) -> dict:
    """Two devices each, fsdp x tensor = 2 x 2: a process holds half of what is split."""
    multihost.initialize(address)
    mesh = sharding.make_mesh(1, 2, 2)
    weights, patch = Weights(mesh), pytest.MonkeyPatch()
    reads = counted(patch)
    model, params = hf.load_model(folder / "sharded"), params_of("sharded")
    placed = weights.load(model, str(folder / "sharded"), "causal", None)
    parts = [{str(part.index): part.data.nbytes for part in x.addressable_shards} for x in jax.tree.leaves(placed)]
    mine = sum(sum(sizes.values()) for sizes in parts)
    whole = sum(x.nbytes for x in jax.tree.leaves(placed) if x.is_fully_replicated)
    for x, y in zip(jax.tree.leaves(placed), jax.tree.leaves(params), strict=True):
        for part in x.addressable_shards:
            np.testing.assert_array_equal(part.data, y[part.index])
    drawn = weights.init(MODEL, jax.random.key(5), ("causal",))
    for x, y in zip(jax.tree.leaves(drawn), jax.tree.leaves(MODEL.init(jax.random.key(5))), strict=True):
        for part in x.addressable_shards:
            np.testing.assert_array_equal(part.data, np.asarray(y)[part.index])
    hf.save(folder / "out-two" / str(jax.process_index()), model, placed, kind="causal", max_shard_bytes=20_000)
    programs = shards._gather(sharding.replicated(mesh), True)._cache_size()
    multihost.wait_for_all("the end")
    return {"read": sum(size for _, size in reads), "mine": mine, "replicated": whole, "programs": programs}


def params_of(form: str):
    """The params of a checkpoint below, from a seed."""
    params = random_params(MODEL, ("causal", "scalar"), seed=len(form))
    if form == "scalar_model":
        params["score"]["bias"] = np.array([0.75], np.float32)
    else:
        del params["score" if KINDS[form] == "causal" else "embed_out"]
    return params


# --- what must hold


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of every form."""
    folder = tmp_path_factory.mktemp("weights")
    for form, size in FORMS.items():
        hf.save(folder / form, MODEL, params_of(form), kind="causal", max_shard_bytes=size)
    hf.save(folder / "reward", MODEL, params_of("reward"), kind="scalar")
    data.save_tokenizer(data.load_tokenizer("synthetic"), str(folder / "reward"))
    hf.save(folder / "bin", MODEL, params_of("bin"), kind="causal")
    tensors = safetensors.safetensors.numpy.load_file(folder / "bin" / "model.safetensors")
    torch.save({name: torch.tensor(x) for name, x in tensors.items()}, folder / "bin" / "pytorch_model.bin")
    (folder / "bin" / "model.safetensors").unlink()
    tensors = {f"lm_backbone.{k.removeprefix('gpt_neox.')}": v for k, v in tensors.items() if k != "embed_out.weight"}
    tensors |= {"scalar_head.weight": np.ones((1, 32), np.float32), "scalar_head.bias": np.ones(1, np.float32)}
    (folder / "scalar_model").mkdir()
    safetensors.safetensors.numpy.save_file(tensors, folder / "scalar_model" / "model.safetensors")
    config = {"architectures": ["ScalarModel"], "bias": 0.5, "base_config": MODEL.to_hf_config("causal")}
    (folder / "scalar_model" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def eight(folder):
    """What `on_eight` found."""
    run = child("tests.models.test_placement", "eight", folder, devices=8)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output[-5000:]
    return json.loads((folder / "eight.json").read_text())


@pytest.mark.parametrize("form", KINDS)
def test_a_checkpoint_loads_into_its_shards_as_it_loads_whole(eight, form):
    found = eight["loads"][form]  # the numbers were compared bit for bit over there
    assert found["split"] == 256 * 32 * 4 // 4
    assert found["planned"] == found["placed"]


@pytest.mark.parametrize("form", KINDS)
def test_every_number_is_read_once_though_two_devices_hold_it(eight, form):
    assert eight["loads"][form]["bytes"] == eight["loads"][form]["whole"]


def test_no_host_holds_a_whole_model_while_loading(eight):
    peak, whole = eight["peak"]
    # A few shards, 1/16 of the model each: jax lets go of what it has copied a little later.
    assert peak < whole / 2, (peak, whole)


def test_random_params_are_the_same_on_a_mesh_and_lie_in_their_shards(eight):
    assert eight["drawn"] == eight["planned draw"]
    assert eight["as it falls"][0] == eight["as it falls"][1]


@pytest.mark.parametrize("name", STAGED)
def test_a_planned_stage_has_the_shapes_dtypes_and_shardings_of_a_real_one(eight, name):
    real, planned = eight["stages"][name]
    assert len(real) > 20 and planned == real


@pytest.mark.parametrize("form", FORMS)
def test_sharded_params_are_exported_byte_for_byte_as_whole_ones(eight, folder, tmp_path, form):
    hf.save(tmp_path, MODEL, params_of("single"), kind="causal", max_shard_bytes=FORMS[form])
    assert content(folder / f"out-{form}") == content(tmp_path)
    if form == "single":
        assert content(tmp_path) == content(folder / "single")


def test_a_bias_is_folded_from_shards_as_from_whole_params(eight, folder, tmp_path):
    params = {**params_of("single"), "score": params_of("scalar_model")["score"]}
    hf.save(tmp_path, MODEL, params, kind="scalar", dtype="bfloat16")
    assert content(folder / "out-folded") == content(tmp_path)


def test_an_export_holds_one_file_and_compiles_one_program_a_param(eight):
    single, *files = eight["held"]
    assert len(files) > 3 and single[0] == sum(size for size, _ in files)
    assert all(size <= FORMS["sharded"] or count == 1 for size, count in files)
    assert eight["programs"] <= 12  # as many as params with layers, whatever the layers


def test_a_process_reads_only_its_own_shards_and_the_first_writes_for_all(folder, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {"devices": 2, "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "2"}
    runs = [
        child("tests.models.test_placement", "two", folder, address, **shared, JAX_PROCESS_ID=str(i)) for i in range(2)
    ]
    try:
        outputs = [run.communicate(timeout=180)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], outputs
    whole = nbytes(params_of("sharded"))
    for number in range(2):
        found = json.loads((folder / f"two-{number}.json").read_text())
        assert found["read"] == found["mine"] < 0.55 * whole + found["replicated"]
        assert found["programs"] <= 12
    assert sorted(path.name for path in (folder / "out-two").iterdir()) == ["0"]
    assert content(folder / "out-two" / "0") == content(folder / "sharded")


if __name__ == "__main__":
    what, place, *rest = sys.argv[1:]
    result = {"eight": on_eight, "two": on_two}[what](pathlib.Path(place), *rest)
    name = what if what == "eight" else f"two-{jax.process_index()}"
    pathlib.Path(place, f"{name}.json").write_text(json.dumps(result))

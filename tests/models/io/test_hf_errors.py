"""A checkpoint that is not what it should be is refused by the name of the file, the key or the tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import errors as hub_errors

from rlhf_jax.errors import UserError
from rlhf_jax.models import HEADS, Model, custom_shape
from rlhf_jax.models.io import hf
from tests.helpers.models_common import SHAPE, VOCAB, random_params

CONFIG = {"model_type": "gpt_neox", "vocab_size": VOCAB, **SHAPE}


@pytest.fixture
def folder(tmp_path):
    """A good causal checkpoint."""
    model = custom_shape("2x32x4", VOCAB)
    hf.save(tmp_path / "ckpt", model, random_params(model, ("causal",)), kind="causal")
    return tmp_path / "ckpt"


def change_config(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def change_tensors(folder, remove=(), **add):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    for name in remove:
        del tensors[name]
    safetensors.numpy.save_file(tensors | add, folder / "model.safetensors")


def fails(folder, *parts, **options):
    with pytest.raises(UserError) as error:
        hf.load(folder, **options)
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in: {error.value}"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "opt"}, "model_type 'opt'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling of type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters of type 'dynamic'"),
        ({"rope_parameters": 3}, "rope_parameters 3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 30}, "hidden_size 30"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"rotary_pct": 0.2}, "rotary_pct (partial_rotary_factor) 0.2"),
        ({"rotary_pct": 1.5}, "rotary_pct (partial_rotary_factor) 1.5"),
        ({"hidden_dropout": 1.0}, "hidden_dropout is 1.0"),
        *(
            ({key: value}, f"{key} is {value!r}; it must be")
            for key, value in {
                "rotary_pct": "a quarter",
                "partial_rotary_factor": [0.25],
                "layer_norm_eps": "x",
                "tie_word_embeddings": "no",
                "use_parallel_residual": 1,
                "hidden_size": "64",
                "hidden_dropout": "0.1",
                "initializer_range": True,
            }.items()
        ),
    ],
)
def test_an_unsupported_config_is_refused_by_key_value_and_file(keys, message):
    with pytest.raises(UserError, match=re.escape(f"some/config.json: {message}")):
        Model.from_hf_config(CONFIG | keys, "some/config.json")


def test_an_unknown_architecture_or_head_or_kind_is_refused_by_name(folder):
    fails(folder, "kind='token' is not supported", "causal, scalar", kind="token")
    fails(folder, "has no scalar head", "score.weight", "not a reward model", kind="scalar")
    change_config(folder, architectures=["GPTNeoXForTokenClassification"])
    fails(folder, "config.json", "architectures 'GPTNeoXForTokenClassification' is not supported")
    change_config(folder, architectures={"class": "GPTNeoXForCausalLM"})
    fails(folder, "config.json: architectures is {'class': 'GPTNeoXForCausalLM'}; it must be")
    with pytest.raises(UserError, match="kind='backbone'"):
        custom_shape("2x32x4", VOCAB).to_hf_config("backbone")


def test_a_reward_model_given_as_policy_is_refused(tmp_path):
    model = custom_shape("2x32x4", VOCAB)
    hf.save(tmp_path, model, random_params(model, HEADS), kind="scalar")
    fails(tmp_path, str(tmp_path), "has no causal head (tensor embed_out.weight)")


@pytest.mark.parametrize("labels", [{"num_labels": 3}, {"id2label": {"0": "a", "1": "b", "2": "c"}}])
def test_more_than_one_label_is_refused(tmp_path, labels):
    model = custom_shape("2x32x4", VOCAB)
    hf.save(tmp_path, model, random_params(model, HEADS), kind="scalar")
    change_config(tmp_path, **labels)
    fails(tmp_path, "config.json: num_labels is 3", kind="scalar")


def test_missing_extra_and_misshapen_tensors_are_named_with_their_file(folder):
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    good = safetensors.numpy.load_file(folder / "model.safetensors")[name]
    change_tensors(folder, remove=[name])
    fails(folder, f"model.safetensors: tensor {name} is missing", "[128, 32]")
    change_tensors(folder, **{name: good[:, :-1].copy()})
    fails(folder, f"model.safetensors: tensor {name} has shape [128, 31]", "asks for [128, 32]")
    change_tensors(folder, **{name: good, "gpt_neox.layers.2.mlp.dense_h_to_4h.weight": good})
    fails(folder, "model.safetensors: tensor gpt_neox.layers.2.mlp.dense_h_to_4h.weight is not one")
    change_tensors(folder, remove=["gpt_neox.layers.2.mlp.dense_h_to_4h.weight"], lora_a=np.ones(3, np.float32))
    fails(folder, "tensor lora_a is not one")
    change_tensors(folder, remove=["lora_a"], **{name: good.astype(np.int32)})
    fails(folder, f"tensor {name} has dtype I32", "float16, bfloat16 or float32")
    change_tensors(folder, remove=["embed_out.weight"], **{name: good})
    fails(folder, "has no causal head (tensor embed_out.weight)")
    hf.load(folder, kind="backbone")


def test_a_head_of_another_vocabulary_is_named(folder):
    change_tensors(folder, **{"embed_out.weight": np.ones((VOCAB + 3, 32), np.float32)})
    fails(folder, f"tensor embed_out.weight has shape [{VOCAB + 3}, 32]")


def test_a_scalar_model_without_its_parts_is_refused(folder):
    change_tensors(folder, **{"scalar_head.weight": np.ones((1, 32), np.float32)})
    fails(folder, "tensor scalar_head.bias is missing", kind="scalar")
    (folder / "config.json").write_text(json.dumps({"architectures": ["ScalarModel"], "hidden_size": 32}))
    fails(folder, "config.json: base_config", "is missing", kind="scalar")
    (folder / "config.json").write_text(json.dumps({"base_config": CONFIG, "bias": "high"}))
    fails(folder, "config.json: bias is 'high'", kind="scalar")


def test_missing_and_damaged_files_are_named(folder):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    fails(folder, str(weights), "not a valid safetensors file", "cut short")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n")
    fails(folder, str(weights), "not a valid safetensors file")
    weights.unlink()
    fails(folder, str(folder), "has no weights", "model.safetensors", "pytorch_model.bin")
    (folder / "config.json").write_text("{")
    fails(folder, "config.json is not valid JSON")
    (folder / "config.json").write_text("[]")
    fails(folder, "config.json is not a JSON object")
    (folder / "config.json").unlink()
    fails(folder, str(folder), "has no config.json")


def test_shards_that_do_not_fit_their_index_are_named(tmp_path):
    model = custom_shape("2x32x4", VOCAB)
    hf.save(tmp_path, model, random_params(model, ("causal",)), kind="causal", max_shard_bytes=40_000)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    last = max(good["weight_map"].values())
    name = next(name for name, file in good["weight_map"].items() if file == last)

    def broken(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))

    broken(good["weight_map"] | {"ghost": last})
    fails(tmp_path, f"{last}: tensor ghost is missing", "index.json lists it")
    broken({key: file for key, file in good["weight_map"].items() if key != name})
    fails(tmp_path, f"tensor {name} is not in model.safetensors.index.json")
    broken(good["weight_map"] | {name: "../secret.safetensors"})
    fails(tmp_path, "'../secret.safetensors'")
    broken(3)
    fails(tmp_path, "index.json has no weight_map")
    index.write_text(json.dumps(good))
    (tmp_path / last).unlink()
    fails(tmp_path, f"{last} is missing, though model.safetensors.index.json lists it")


def test_what_is_neither_folder_nor_hub_name_says_both(tmp_path, folder):
    fails(tmp_path / "nowhere", "neither a local folder nor a model on the hub", "no such folder here")
    fails(folder / "config.json", "is a file; give the folder")
    fails(folder, "has no folder 'epoch_1'", subfolder="epoch_1")


class HubAnswer:
    """Stands for the hub's response in huggingface_hub's errors."""

    headers: dict = {}
    request = None
    status_code = 404


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.RepositoryNotFoundError, "no such folder here, no such public repository there"),
        (hub_errors.RevisionNotFoundError, "'v2'"),
        (hub_errors.GatedRepoError, "accept its terms"),
        (hub_errors.LocalEntryNotFoundError, "no such folder here, and the hub gave: no answer"),
        (hub_errors.OfflineModeIsEnabled, "no such folder here, and the hub gave: no answer"),
        (ConnectionError, "no such folder here, and the hub gave: no answer"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(monkeypatch, error, message):
    def snapshot_download(*args, **kwargs):
        try:
            raise error("no answer", response=HubAnswer())
        except TypeError:
            raise error("no answer") from None

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        hf.load("some/model", revision="v2")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("files", [["model.safetensors", "pytorch_model.bin"], ["pytorch_model.bin"]])
def test_bin_files_are_downloaded_only_where_there_are_no_safetensors(monkeypatch, tmp_path, files):
    asked = []

    def snapshot_download(name, *, revision, allow_patterns, ignore_patterns):
        assert (name, revision) == ("some/model", "v2")
        asked.extend(allow_patterns)
        for file in files:
            if any(Path(file).match(pattern) for pattern in allow_patterns):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hf.resolve("some/model", "v2") == tmp_path
    assert any("bin" in pattern for pattern in asked) == (len(files) == 1)
    assert [file.name for file in tmp_path.iterdir()] == files[:1]

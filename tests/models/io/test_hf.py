"""Checkpoints in and out: every published form is read, and what we write loads in transformers."""

from __future__ import annotations

import json
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import transformers

from rlhf_jax.models import HEADS, Model, custom_shape
from rlhf_jax.models.io import hf
from tests.helpers.arrays import distance
from tests.helpers.models_common import (
    SHAPE,
    VOCAB,
    assert_trees_equal,
    padded_rows,
    random_params,
    reference,
    reference_inputs,
)
from tests.helpers.optional import Absent, optional

torch = optional("torch")
needs_torch = pytest.mark.skipif(isinstance(torch, Absent), reason="needs torch")
TOKENS, MASK = padded_rows([9, 5], [0, 2], 9)
TOKEN_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 60}


def our_logits(model, params):
    return jax.jit(lambda p: model.logits(p, model.hidden(p, TOKENS, MASK)))(params)


def our_scores(model, params):
    return jax.jit(lambda p: model.scalars(p, model.hidden(p, TOKENS, MASK)))(params)


@pytest.mark.parametrize("kind", ["causal", "scalar"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_export_and_import_are_bit_identical(tmp_path, kind, max_shard_bytes):
    model = custom_shape("3x32x4", VOCAB, max_positions=128, use_parallel_residual=False, rotary_pct=0.5)
    params = random_params(model, heads=(kind,))
    hf.save(tmp_path, model, params, kind=kind, max_shard_bytes=max_shard_bytes)
    sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert sharded == (max_shard_bytes == 20_000) != (tmp_path / "model.safetensors").exists()
    loaded, again = hf.load(tmp_path, kind=kind)
    assert loaded == model
    assert_trees_equal(again, params)


@needs_torch
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("fields", [{}, {"attention_bias": False, "rotary_pct": 1.0}, {"tie_word_embeddings": True}])
def test_exported_policy_loads_in_transformers_with_equal_logits(tmp_path, fields, max_shard_bytes, caplog):
    model = custom_shape("2x32x4", VOCAB, rotary_emb_base=500.0, **fields)
    params = random_params(model, heads=("causal",))
    hf.save(tmp_path, model, params, kind="causal", extra_config=TOKEN_IDS, max_shard_bytes=max_shard_bytes)
    with caplog.at_level(logging.WARNING):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.dtype == torch.float32 and theirs.config.eos_token_id == 0
    with torch.no_grad():
        expected = theirs(**reference_inputs(TOKENS, MASK)).logits.numpy()
    assert distance(np.asarray(our_logits(model, params))[MASK], expected[MASK]) < 1e-5


@needs_torch
@pytest.mark.parametrize("bias", [None, -1.75])
def test_exported_reward_model_loads_in_transformers_with_equal_scores(tmp_path, bias):
    model = custom_shape("2x32x4", VOCAB)
    params = random_params(model, HEADS)
    if bias is not None:
        params["score"]["bias"] = np.array([bias], np.float32)
    hf.save(tmp_path, model, params, kind="scalar", extra_config=TOKEN_IDS)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert theirs.config.num_labels == 1
    with torch.no_grad():
        expected = theirs(**reference_inputs(TOKENS, MASK)).logits[:, 0].numpy()
    scores = np.asarray(our_scores(model, params))[[0, 1], [8, 6]]
    assert distance(scores, expected) < 1e-5
    _, again = hf.load(tmp_path, kind="scalar")
    assert distance(np.asarray(our_scores(model, again))[[0, 1], [8, 6]], scores) < 1e-5


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_weights_have_the_mode_of_any_new_file(tmp_path, umask, mode):
    model = custom_shape("1x16x2", VOCAB)
    before = os.umask(umask)
    try:
        for _ in range(2):  # the second export replaces the files of the first
            hf.save(tmp_path, model, random_params(model, heads=("causal",)), kind="causal")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert set(modes.values()) == {mode} and "model.safetensors" in modes


def test_a_shorter_export_leaves_no_shards_of_the_longer_one(tmp_path):
    model = custom_shape("2x32x4", VOCAB)
    for seed, size in ((0, 20_000), (1, 10**9), (2, 30_000)):
        params = random_params(model, ("causal",), seed)
        hf.save(tmp_path, model, params, kind="causal", max_shard_bytes=size)
        assert_trees_equal(hf.load(tmp_path)[1], params)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_checkpoints_are_read_and_written(tmp_path, dtype):
    theirs = reference("causal").to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = hf.load(tmp_path / "theirs")
    kernel = params["backbone"]["layers"]["mlp"]["dense_h_to_4h"]["kernel"]
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel[1].T, theirs.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.detach().float())
    hf.save(tmp_path / "ours", model, params, kind="causal", dtype=dtype)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype == getattr(torch, dtype)
    assert_trees_equal(hf.load(tmp_path / "ours")[1], params)


def test_jax_params_are_saved_as_numpy_ones(tmp_path):
    model = custom_shape("2x32x4", VOCAB)
    params = random_params(model, ("causal",))
    hf.save(tmp_path, model, jax.tree.map(jnp.asarray, params), kind="causal")
    assert_trees_equal(hf.load(tmp_path)[1], params)
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert "embed_out.weight" in file.keys() and "gpt_neox.embed_in.weight" in file.keys()  # noqa: SIM118


CONFIG = {"model_type": "gpt_neox", "vocab_size": VOCAB, **SHAPE}


@pytest.mark.parametrize(
    "keys",
    [
        {"rotary_pct": 0.5, "rotary_emb_base": 500},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5, "rope_theta": 500.0, "rope_scaling": None},
        {"rotary_pct": 0.5, "rotary_emb_base": 500, "rope_scaling": {"type": "default"}},
        {
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "rotary_pct": 1.0,
            "rotary_emb_base": 9,
        },
    ],
)
def test_config_keys_of_transformers_4_and_5_are_read(keys):
    config = Model.from_hf_config({**CONFIG, **keys}).config
    assert (config.rotary_pct, config.rotary_emb_base) == (0.5, 500.0)


def test_absent_config_keys_mean_what_transformers_takes_them_for():
    ours, theirs = Model.from_hf_config(CONFIG).config, transformers.GPTNeoXConfig(**CONFIG)
    for key in ("max_position_embeddings", "layer_norm_eps", "use_parallel_residual", "attention_bias"):
        assert getattr(ours, key) == getattr(theirs, key)
    assert ours.rotary_pct == theirs.rope_parameters["partial_rotary_factor"]
    assert ours.rotary_emb_base == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


def test_exported_config_has_the_rotary_keys_of_both_transformers():
    config = custom_shape("2x32x4", VOCAB, rotary_pct=0.5).to_hf_config("causal", pad_token_id=60)
    assert config["rotary_pct"] == config["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert config["rotary_emb_base"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["pad_token_id"] == 60 and config["architectures"] == ["GPTNeoXForCausalLM"]
    theirs = transformers.GPTNeoXConfig(**config)
    assert theirs.rope_parameters["partial_rotary_factor"] == 0.5


def test_buffers_of_old_pythia_files_are_ignored(tmp_path):
    model = custom_shape("2x32x4", VOCAB)
    params = random_params(model, ("causal",))
    hf.save(tmp_path, model, params, kind="causal")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        name = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{name}.bias"] = np.ones((1, 1, 8, 8), np.uint8)
        tensors[f"{name}.masked_bias"] = np.array(-1e4, np.float16)
        tensors[f"{name}.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert_trees_equal(hf.load(tmp_path)[1], params)


def write_scalar_model(folder, base_config, **outer):
    """A checkpoint of N+'s ScalarModel: backbone under lm_backbone, a head with a bias, an offset in the config."""
    theirs = reference("causal")
    tensors = {f"lm_backbone.{name}": tensor for name, tensor in theirs.gpt_neox.state_dict().items()}
    tensors["scalar_head.weight"] = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    tensors["scalar_head.bias"] = torch.tensor([0.75])
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    config = {"hidden_size": 32, "bias": 2.5, "base_model": "EleutherAI/pythia-160m", **outer}
    if base_config is not None:
        config["base_config"] = base_config
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        hidden = theirs(**reference_inputs(TOKENS, MASK), output_hidden_states=True).hidden_states[-1]
        return (hidden @ tensors["scalar_head.weight"][0] + tensors["scalar_head.bias"] - 2.5).numpy()


@pytest.mark.parametrize("form", ["nested", "difference", "flat"])
def test_scalar_model_form_is_read_with_its_bias_and_offset(tmp_path, form):
    if form == "nested":
        base, outer = reference("causal").config.to_dict(), {"architectures": ["ScalarModel"], "model_type": ""}
    elif form == "difference":  # only what differs from transformers' defaults was written
        base, outer = {**CONFIG, "num_attention_heads": 4}, {"architectures": ["ScalarModel"]}
    else:
        base, outer = None, {"model_type": "scalar_model", "vocab_size": VOCAB, **SHAPE}
    expected = write_scalar_model(tmp_path / "rm", base, **outer)
    model, params = hf.load(tmp_path / "rm", kind="scalar")
    assert params["score"]["bias"] == np.float32(0.75 - 2.5)
    scores = np.asarray(our_scores(model, params))
    assert distance(scores[MASK], expected[MASK]) < 1e-5
    hf.save(tmp_path / "hf", model, params, kind="scalar")
    again = np.asarray(our_scores(*hf.load(tmp_path / "hf", kind="scalar")))
    assert distance(again[MASK], expected[MASK]) < 1e-5


def test_the_bare_backbone_is_read_and_a_reward_models_backbone_too(tmp_path):
    theirs = reference("scalar")
    theirs.gpt_neox.save_pretrained(tmp_path / "bare")
    theirs.save_pretrained(tmp_path / "reward")
    _, bare = hf.load(tmp_path / "bare", kind="backbone")
    _, reward = hf.load(tmp_path / "reward", kind="backbone")
    assert_trees_equal(bare, reward)

"""Checkpoints of other families than GPT-NeoX in the forms that lie on the hub, and how many params they have."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import FAMILIES, Model
from rlhf_jax.models.io import hf
from rlhf_jax.models.io.safetensors import open_weights, write_file
from tests.helpers import families
from tests.helpers.arrays import same_bits
from tests.helpers.optional import optional

torch = optional("torch")
TIED = ("qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2")


def tensors_of(folder) -> dict[str, np.ndarray]:
    return {name: source.read((slice(None),) * len(source.shape)) for name, source in open_weights(folder).items()}


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_single_and_sharded_files_and_old_ones_of_torch_are_read_alike(family, tmp_path):
    theirs = families.reference(family)
    theirs.save_pretrained(tmp_path / "single")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_bytes((tmp_path / "single" / "config.json").read_bytes())
    torch.save(theirs.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    (model, single), *others = (hf.load(tmp_path / form) for form in ("single", "sharded", "old"))
    for again, params in others:
        assert again == model and same_bits(params, single)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_layers_read_from_files_are_those_that_the_stacked_params_are_sliced_into(family, dtype, tmp_path):
    families.reference(family).save_pretrained(tmp_path)
    model, params = hf.load(tmp_path)
    wanted = model.unstack(jax.tree.map(jnp.asarray, params), dtype)
    read = model.read_unstacked(hf.open_params(tmp_path)[1], jnp.asarray, dtype)
    assert jax.tree.structure(read) == jax.tree.structure(wanted) and same_bits(read, wanted)
    assert same_bits(model.stack(read), model.cast_params(jax.tree.map(jnp.asarray, params), dtype))


@pytest.mark.parametrize("family", TIED)
def test_a_tied_model_has_no_lm_head_in_its_file_and_one_that_is_there_is_ignored(family, tmp_path):
    theirs = families.reference(family)
    theirs.save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    model, params = hf.load(tmp_path)
    assert "lm_head.weight" not in tensors and "embed_out" not in params
    write_file(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": np.zeros((61, 2), np.float32)})
    assert same_bits(hf.load(tmp_path)[1], params)
    hf.save(tmp_path / "ours", model, params, kind="causal")
    assert tensors_of(tmp_path / "ours").keys() == tensors.keys()
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["tie_word_embeddings"] is True


def test_gpt2_is_read_with_and_without_its_prefix_and_with_the_masks_of_old_files(tmp_path):
    theirs = families.reference("gpt2")
    theirs.save_pretrained(tmp_path)
    expected, tensors = hf.load(tmp_path)[1], tensors_of(tmp_path)
    masks = {
        "h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32),
        "h.1.attn.masked_bias": np.zeros((1,), np.float32),
    }
    for prefix in ("transformer.", ""):
        renamed = {prefix + name.removeprefix("transformer."): x for name, x in {**tensors, **masks}.items()}
        write_file(tmp_path / "model.safetensors", renamed)
        assert same_bits(hf.load(tmp_path)[1], expected)
    families.reference("gpt2").transformer.save_pretrained(tmp_path / "backbone")  # as the file on the hub
    assert not any(name.startswith("transformer.") for name in tensors_of(tmp_path / "backbone"))
    assert same_bits(hf.load(tmp_path / "backbone")[1], expected)


def llama(layers, width, heads, own, units, vocab, tied, **fields) -> dict:
    """Keys of a Llama-like config.json."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = dict(zip(names, (layers, width, heads, own, units), strict=True))
    return {**sizes, "vocab_size": vocab, "tie_word_embeddings": tied, **fields}


QWEN, GEMMA, LLAMA = 151_936, 262_144, 128_256
# The parameters of the published files.
COUNTS = {
    "SmolLM2-135M": ("llama", llama(30, 576, 9, 3, 1536, 49_152, True), 134_515_008),
    "SmolLM2-360M": ("llama", llama(32, 960, 15, 5, 2560, 49_152, True), 361_821_120),
    "SmolLM2-1.7B": ("llama", llama(24, 2048, 32, 32, 8192, 49_152, True), 1_711_376_384),
    "SmolLM3-3B": ("smollm3", llama(36, 2048, 16, 4, 11_008, LLAMA, True), 3_075_098_624),
    "GPT-2": ("gpt2", {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257}, 124_439_808),
    "Gemma-3-270m": ("gemma3_text", llama(18, 640, 4, 1, 2048, GEMMA, True, head_dim=256), 268_098_176),
    "Gemma-3-1b": ("gemma3_text", llama(26, 1152, 4, 1, 6912, GEMMA, True, head_dim=256), 999_885_952),
    "Gemma-2-2b": ("gemma2", llama(26, 2304, 8, 4, 9216, 256_000, True, head_dim=256), 2_614_341_888),
    "Qwen2.5-0.5B": ("qwen2", llama(24, 896, 14, 2, 4864, QWEN, True), 494_032_768),
    "Qwen2.5-1.5B": ("qwen2", llama(28, 1536, 12, 2, 8960, QWEN, True), 1_543_714_304),
    "Qwen2.5-3B": ("qwen2", llama(36, 2048, 16, 2, 11_008, QWEN, True), 3_085_938_688),
    "Qwen2.5-7B": ("qwen2", llama(28, 3584, 28, 4, 18_944, 152_064, False), 7_615_616_512),
    "Qwen3-0.6B": ("qwen3", llama(28, 1024, 16, 8, 3072, QWEN, True, head_dim=128), 596_049_920),
    "Qwen3-1.7B": ("qwen3", llama(28, 2048, 16, 8, 6144, QWEN, True, head_dim=128), 1_720_574_976),
    "Qwen3-4B": ("qwen3", llama(36, 2560, 32, 8, 9728, QWEN, True, head_dim=128), 4_022_468_096),
    "Qwen3-8B": ("qwen3", llama(36, 4096, 32, 8, 12_288, QWEN, False, head_dim=128), 8_190_735_360),
    "Llama-3.2-1B": ("llama", llama(16, 2048, 32, 8, 8192, LLAMA, True), 1_235_814_400),
    "Llama-3.2-3B": ("llama", llama(28, 3072, 24, 8, 8192, LLAMA, True), 3_212_749_824),
    "Llama-3.1-8B": ("llama", llama(32, 4096, 32, 8, 14_336, LLAMA, False), 8_030_261_248),
    "OLMo-2-1B": ("olmo2", llama(16, 2048, 16, 16, 8192, 100_352, False), 1_484_916_736),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_published_config_has_the_parameters_of_its_file(name):
    model_type, config, count = COUNTS[name]
    model = Model.from_hf_config({"model_type": model_type, **config})
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == count
    backbone = sum(math.prod(tensor.shape) for tensor in FAMILIES[model_type].tensors(model.config))
    head = 0 if model.config.tie_word_embeddings else config["vocab_size"] * config["hidden_size"]
    assert backbone + head == count

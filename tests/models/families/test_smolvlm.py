"""Checkpoints of SmolVLM and Idefics3 with their images: both ways, sizes, configs that are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_jax.errors import UserError
from rlhf_jax.models import Model, lora
from rlhf_jax.models.io import hf
from rlhf_jax.models.io import peft as peft_files
from rlhf_jax.types import Images
from tests.helpers import vision as tiny
from tests.helpers.arrays import distance, same_bits
from tests.helpers.models_common import reference_inputs
from tests.helpers.optional import optional

torch, peft = optional("torch"), optional("peft")
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 49_280, "tie_word_embeddings": False}
SIGLIP = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16, "image_size": 512}
# (text_config, vision_config, scale_factor), and the parameters of transformers' model.
PUBLISHED = {
    "256M": (
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
        SIGLIP,
        4,
    ),
    "500M": (
        {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15},
        SIGLIP,
        4,
    ),
    "2.2B": (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 384,
        },
        3,
    ),
}
KEY_VALUE_HEADS = {"256M": 3, "500M": 5, "2.2B": 32}


def config_of(name: str) -> dict:
    text, vision, scale = PUBLISHED[name]
    text = {**LLAMA, **text, "num_key_value_heads": KEY_VALUE_HEADS[name]}
    return {
        "model_type": "smolvlm",
        "text_config": text,
        "vision_config": vision,
        "scale_factor": scale,
        "image_token_id": 49_190,
    }


@pytest.fixture(scope="module", params=["smolvlm", "idefics3"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny.shared(request.param).save_pretrained(path)
    return path


def test_a_checkpoint_goes_in_and_out_bit_for_bit(folder, tmp_path):
    model, params = hf.load(folder, images=True)
    hf.save(tmp_path, model, params, kind="causal")
    first, last = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert first.keys() == last.keys() and all(same_bits(first[name], last[name]) for name in first)
    again, theirs = hf.load(tmp_path, images=True)
    assert same_bits(theirs, params) and again.config.vision == model.config.vision
    by_layer = model.unstack(jax.tree.map(jnp.asarray, params))
    assert same_bits(model.read_unstacked(hf.open_params(folder, images=True)[1], jnp.asarray), by_layer)
    assert same_bits(model.stack(by_layer), params)


def test_what_is_exported_loads_in_transformers(folder, tmp_path):
    import transformers

    model, params = hf.load(folder, images=True)
    hf.save(tmp_path, model, params, kind="causal")
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    wanted = tiny.shared(model.family.name).state_dict()
    assert type(theirs) is type(tiny.shared(model.family.name))
    assert all(torch.equal(x, wanted[name]) for name, x in theirs.state_dict().items())


def test_without_images_the_text_model_alone_is_loaded(folder):
    with pytest.warns(UserWarning, match="text model"):
        model, params = hf.load(folder)
    assert not model.reads_images and "vision" not in params["backbone"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_parameters_of_transformers(name):
    import transformers

    config = config_of(name)
    model = Model.from_hf_config(config, images=True)
    ours = jax.eval_shape(lambda key: model.init(key), jax.random.key(0))
    with torch.device("meta"):
        theirs = transformers.SmolVLMForConditionalGeneration(transformers.SmolVLMConfig(**config))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(ours))
    assert count == sum(p.numel() for p in theirs.parameters())
    shapes = {model.family.prefix + spec.name: spec.shape for spec in model.family.tensors(model.config)}
    own = {name: tuple(p.shape) for name, p in theirs.named_parameters() if name != "lm_head.weight"}
    assert shapes == own and model.config.vision.tokens == {"256M": 64, "500M": 64, "2.2B": 81}[name]


def test_random_params_have_the_shapes_of_the_checkpoint(folder):
    model, params = hf.load(folder, images=True)
    shapes = jax.eval_shape(lambda key: model.init(key), jax.random.key(0))
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, params)
    drawn = model.init(jax.random.key(0))["backbone"]["vision"]
    assert 0.015 < float(np.std(drawn["patch_embedding"]["kernel"])) < 0.025


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "llava"}, ("llava", "smolvlm")),
        ({"image_token_id": 60}, ("image_token_id", "60")),
        ({"image_token_id": True}, ("image_token_id",)),
        ({"scale_factor": 3}, ("image_size", "scale_factor 3")),
        ({"vision_config": 3}, ("vision_config",)),
        ({"vision_config": {**tiny.VISION, "num_channels": 1}}, ("num_channels",)),
        ({"vision_config": {**tiny.VISION, "attention_dropout": 0.1}}, ("attention_dropout",)),
        ({"vision_config": {**tiny.VISION, "num_attention_heads": 5}}, ("hidden_size", "5")),
        ({"vision_config": {**tiny.VISION, "hidden_act": "relu"}}, ("hidden_act", "relu")),
        ({"vision_config": {**tiny.VISION, "sliding_window": 4}}, ("vision_config", "sliding_window")),
        ({"text_config": {**tiny.TEXT, "model_type": "qwen2"}}, ("text_config", "qwen2")),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, names, tmp_path):
    config = json.loads(tiny.shared().config.to_json_string())
    with pytest.raises(UserError) as error:
        Model.from_hf_config({**config, **change}, "config.json", images=True)
    assert all(name in str(error.value) for name in names)


def test_a_scalar_head_is_refused(folder, tmp_path):
    model, params = hf.load(folder, images=True)
    with pytest.raises(UserError, match="causal"):
        hf.save(tmp_path, model, params, kind="scalar")


def test_lora_targets_are_those_that_peft_finds(folder):
    model, _ = hf.load(folder, images=True)

    def found(*names):
        return set(lora.resolve_targets(model, names, "lora_target_modules"))

    assert found("q_proj") == {"text_model.q_proj", "vision_model.q_proj"}
    assert found("out_proj", "proj") == {"vision_model.out_proj", "connector.proj"}
    assert found(r".*\.text_model\..*\.(q|v)_proj") == {"text_model.q_proj", "text_model.v_proj"}
    assert found(r"model\.vision_model\.encoder\.layers\.\d+\.mlp\.fc1") == {"vision_model.fc1"}
    assert found("text_model.q_proj") == {"text_model.q_proj"}
    assert found("all-linear") == set(model.family.linears)
    with pytest.raises(UserError, match="patch_embedding"):
        found(r"model\.vision_model\..*")
    with pytest.raises(UserError, match=r"1 of 2 layers"):
        found(r"model\.text_model\.layers\.0\.self_attn\.q_proj")
    with pytest.raises(UserError, match="no default"):
        lora.resolve_targets(model, None, "lora_target_modules")


@pytest.mark.parametrize("targets", [("q_proj",), (r".*text_model.*\.v_proj",), ("all-linear",)])
def test_an_adapter_goes_to_peft_and_back(folder, tmp_path, targets):
    """Its regular expression names the same layers to PEFT, and no others."""
    model, params = hf.load(folder, images=True)
    form = lora.Lora(r=2, alpha=8, dropout=0.0, target_modules=lora.resolve_targets(model, targets, "targets"))
    adapted = dataclasses.replace(model, lora=form)
    adapters = lora.init(adapted, jax.random.key(0), params)
    adapters = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), adapters)
    peft_files.save(tmp_path, adapted, adapters, kind="causal", base=str(folder))
    again, read = hf.load_adapter(tmp_path, model)
    assert again == form and same_bits(read, jax.tree.map(np.asarray, adapters))
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(tiny.shared(model.family.name)), tmp_path).eval()
    adapted_modules = {name.partition(".lora_A")[0] for name, _ in theirs.named_parameters() if "lora_A" in name}
    assert len(adapted_modules) == sum(x.shape[0] for x in jax.tree.leaves(adapters)) / 2
    tokens, mask, pixels = tiny.prompt_rows(np.random.default_rng(0), [1, 2], 2, 20)
    inputs = {**reference_inputs(tokens, mask), "pixel_values": torch.tensor(pixels)}
    inputs["input_ids"] = torch.tensor(np.where(mask, tokens, tiny.PAD), dtype=torch.long)
    with torch.no_grad():
        wanted = theirs(**inputs).logits.numpy()[mask]
    hidden = adapted.hidden(adapted.with_lora(params, adapters), tokens, mask, images=Images(jnp.asarray(pixels)))
    assert distance(np.asarray(model.logits(params, hidden))[mask], wanted) < 1e-5
    merged = hf.load(tmp_path, images=True)[1]
    hidden = model.hidden(merged, tokens, mask, images=Images(jnp.asarray(pixels)))
    assert distance(np.asarray(model.logits(merged, hidden))[mask], wanted) < 1e-5
    plain, leaves = hf.open_params(tmp_path, images=True)
    by_layer = plain.unstack(jax.tree.map(jnp.asarray, merged))
    assert same_bits(plain.read_unstacked(leaves, jnp.asarray), by_layer)

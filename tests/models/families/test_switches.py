"""Each switch of the decoder, set otherwise, moves what the tests of the families compare: none is idle in them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import Model
from rlhf_jax.models.decoder_context import Context, DecoderConfig
from rlhf_jax.models.layers import norm
from rlhf_jax.models.rope import Rope
from tests.helpers import families
from tests.helpers.arrays import distance
from tests.helpers.optional import optional

torch = optional("torch")
# They follow from the shapes of the tensors, or are of training and of files.
NO_SWITCHES = {
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "initializer_range",
    "hidden_dropout",
    "attention_dropout",
    "source",
}
# (field, family whose tests it would break, the value of a mistake)
FLIPS = (
    ("layer_rope", "smollm3", (1, 1, 1, 1)),
    ("layer_rope", "gemma3_text", (1, 0)),
    ("layer_window", "mistral", ()),
    ("layer_window", "mistral", (9, 9)),
    ("layer_window", "qwen2", (8, None)),
    ("layer_window", "gemma2", (None, 8)),
    ("residual", "llama", "parallel"),
    ("residual", "olmo2", "sandwich"),
    ("residual", "gemma2", "sequential"),
    ("norm", "llama", "layer_norm"),
    ("norm", "gpt2", "rms_norm"),
    ("norm_eps", "llama", 1e-6),
    ("norm_eps", "gpt2", 1e-5),
    ("norm_offset", "gemma2", False),
    ("activation", "llama", "gelu"),
    ("activation", "gpt2", "gelu"),
    ("activation", "gemma2", "gelu"),
    ("gated_mlp", "llama", False),
    ("fused_gate", "phi3", False),
    ("qkv", "gpt2", "interleaved"),
    ("qkv", "phi3", "separate"),
    ("qkv", "llama", "blocks"),
    ("query_key_value_bias", "llama", False),
    ("query_key_value_bias", "qwen2", False),
    ("attention_out_bias", "llama", False),
    ("mlp_bias", "llama", False),
    ("qk_norm", "qwen3", None),
    ("qk_norm", "olmo2", None),
    ("attention_scale", "gemma2", None),
    ("attention_softcap", "gemma2", None),
    ("logit_softcap", "gemma2", None),
    ("embedding_scale", "gemma2", None),
    ("tie_word_embeddings", "qwen2", False),
)
ROPE_FLIPS = (
    ("ndims", "phi3", 16),
    ("theta", "llama", 1e4),
    ("rope_type", "llama", "default"),
    ("rope_type", "qwen3", "linear"),
    ("factor", "llama", 4.0),
    ("low_freq_factor", "llama", 2.0),
    ("high_freq_factor", "llama", 8.0),
    ("original_max_position_embeddings", "llama", 128),
    ("beta_fast", "qwen3", 32.0),
    ("beta_slow", "qwen3", 1.0),
    ("truncate", "qwen3", False),
    ("attention_factor", "qwen3", 1.0),
)
ROWS = families.text(families.SIZES["vocab_size"], families.SIZES["pad_token_id"], 30, 90)
SEEN = 1e-4  # ten times the tolerance of the families' tests; the two forms of GELU part by 1.4e-4
runs = pytest.mark.runs


def test_every_field_of_the_config_is_a_switch_of_this_list_or_none():
    flipped = {name for name, _, _ in FLIPS} | {"ropes", "norm_in_float32", "padding_idx"}  # tested below
    assert not flipped & NO_SWITCHES
    assert flipped | NO_SWITCHES == {field.name for field in dataclasses.fields(DecoderConfig)}
    assert {name for name, _, _ in ROPE_FLIPS} == {field.name for field in dataclasses.fields(Rope)}


@pytest.fixture(scope="module")
def models():
    """(model, random params) of a family, the config that of its tests."""

    @functools.cache
    def of(family):
        theirs = families.reference(family)
        model = Model.from_hf_config({**theirs.config.to_dict(), "architectures": None})
        return model, filled(model, {})

    return of


def filled(model, params):
    """`params`, with random ones where the model has others."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    rng = np.random.default_rng(0)

    def leaf(path, shape):
        known = functools.reduce(lambda tree, key: tree.get(key.key, {}) if tree else {}, path, params)
        is_scale = path[-1].key == "scale" and not model.config.norm_offset
        drawn = (0.2 * rng.standard_normal(shape.shape) + is_scale).astype(np.float32)
        return known if getattr(known, "shape", None) == shape.shape else drawn

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params):
    hidden = model.hidden(params, ROWS.tokens, ROWS.mask)
    return model.logits(params, hidden)[ROWS.mask]


def moved(model, params, **fields) -> float:
    """How far the logits move with other fields."""
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, **fields))
    assert other != model
    return distance(logits_of(other, filled(other, params)), logits_of(model, params))


@runs
@pytest.mark.parametrize("field, family, value", FLIPS)
def test_a_switch_set_otherwise_moves_the_logits(models, field, family, value):
    assert moved(*models(family), **{field: value}) > SEEN


@runs
@pytest.mark.parametrize("field, family, value", ROPE_FLIPS)
def test_a_switch_of_a_rotary_embedding_set_otherwise_moves_the_logits(models, field, family, value):
    model, params = models(family)
    ropes = tuple(dataclasses.replace(rope, **{field: value}) for rope in model.config.ropes)
    assert moved(model, params, ropes=ropes) > SEEN


@runs
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_padding_idx_set_otherwise_moves_the_gradient(models, family):
    model, params = models(family)
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, padding_idx=None))
    one, two = (families.ours(m, params, ROWS).gradients["backbone"]["embed_in"]["embedding"] for m in (model, other))
    assert distance(one, two) > SEEN


@pytest.mark.parametrize("family", [name for name in sorted(families.FAMILIES) if name != "gpt2"])
def test_a_norm_in_bfloat16_is_cast_where_transformers_casts_it(models, family):
    """In float32 it does not show. Another rounding of the root shows in a few entries of a thousand."""
    theirs = families.reference(family).model.norm.to(torch.bfloat16)
    x = np.random.default_rng(0).standard_normal((50, models(family)[0].config.hidden_size)).astype(np.float32)
    with torch.no_grad():
        want = theirs(torch.tensor(x).to(torch.bfloat16)).float().numpy()
    params = {"scale": jnp.asarray(theirs.weight.detach().float().numpy())}

    def differing(config):
        out = norm(Context(config, jnp.bfloat16)).apply({"params": params}, jnp.asarray(x, jnp.bfloat16))
        return np.mean(np.asarray(out.astype(jnp.float32)) != want)

    config = models(family)[0].config
    assert differing(config) < 0.01
    assert differing(dataclasses.replace(config, norm_in_float32=not config.norm_in_float32)) > 0.1

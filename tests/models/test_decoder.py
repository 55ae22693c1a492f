"""What a forward pass promises: padding and company change nothing, decoding equals it, dropout is keyed per row."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.errors import UserError
from rlhf_jax.models import HEADS, attention, custom_shape, decoder, lora, pythia
from rlhf_jax.models.decoder_context import Context, Dropout, token_dropout
from rlhf_jax.models.families.gpt_neox import PYTHIA_SHAPES, decoder_config
from rlhf_jax.models.rope import rotary_angles
from tests.helpers.arrays import distance
from tests.helpers.models_common import padded_rows, random_params

MODEL = custom_shape("2x32x4", 61)
PARAMS = random_params(MODEL, HEADS)


@functools.partial(jax.jit, static_argnames=("model", "dtype"))
def _hidden(params, tokens, mask, model, dtype, key):
    return model.hidden(params, tokens, mask, dtype=dtype, dropout_key=key)


def run_hidden(tokens, mask, model=MODEL, dtype=jnp.float32, key=None):
    return np.asarray(_hidden(PARAMS, tokens, mask, model, dtype, key))


@jax.jit
def _logprobs(params, tokens, mask):
    logits = jax.nn.log_softmax(MODEL.logits(params, MODEL.hidden(params, tokens, mask)), axis=-1)
    return jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


def logprobs(tokens, mask):
    """[B, S - 1] log-probability of each next token."""
    return np.asarray(_logprobs(PARAMS, tokens, mask))


@given(left=st.integers(0, 9), right=st.integers(0, 9), row=st.integers(0, 2), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_padding_and_batch_composition_do_not_change_logprobs(left, right, row, seed):
    tokens, mask = padded_rows([8, 8, 8], [0, 0, 0], 8, seed)
    expected = logprobs(tokens[row : row + 1], mask[row : row + 1])[0]
    junk, _ = padded_rows([1] * 3, [0] * 3, 26, seed + 1)
    junk[:, left : left + 8] = tokens
    inside = np.zeros(junk.shape, bool)
    inside[:, left : left + 8] = True
    inside[(row + 1) % 3, left + 3 :] = False
    padded = logprobs(junk, inside)[row, left : left + 7]
    assert np.abs(padded - expected).max() < 1e-5


@pytest.mark.parametrize("parallel", [True, False])
def test_prefill_and_decode_equal_the_full_forward(parallel):
    model = custom_shape("2x32x4", 61, use_parallel_residual=parallel, rotary_pct=0.5)
    context, total = 6, 11
    tokens, mask = padded_rows([11, 8, 6], [0, 3, 5], total)
    full = run_hidden(tokens, mask, model)
    unstacked = model.unstack(PARAMS)
    context_mask = jnp.asarray(mask[:, :context])
    hidden, prefix = jax.jit(model.prefill)(unstacked, tokens[:, :context], context_mask)
    assert distance(hidden, full[:, context - 1]) < 1e-6
    cache = model.empty_cache(3, total - context)
    decode = jax.jit(model.decode)
    for slot in range(context, total):
        positions = jnp.asarray(mask[:, :slot].sum(axis=1))[:, None]
        index = jnp.int32(slot - context)
        hidden, cache = decode(unstacked, prefix, cache, tokens[:, slot, None], positions, index)
        assert distance(hidden[:, 0], full[:, slot]) < 1e-6


def grouped(seed=0, group=3, context=7, length=5):
    """Two prompts of different lengths, three responses to each, of different lengths: (apart, side by side)."""
    prompts, prompt_mask = padded_rows([context, 3], [0, context - 3], context, seed)
    responses, mask = padded_rows([5, 2, 4, 0, 1, 5], [0] * 6, length, seed + 1)
    whole = np.concatenate([np.repeat(prompts, group, axis=0), responses], axis=1)
    whole_mask = np.concatenate([np.repeat(prompt_mask, group, axis=0), mask], axis=1)
    return (prompts, jnp.asarray(prompt_mask), responses, jnp.asarray(mask)), (whole, jnp.asarray(whole_mask))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_responses_after_shared_prompts_equal_the_full_forward_in_value_and_gradient(parallel, remat):
    model = custom_shape("2x32x4", 61, use_parallel_residual=parallel, rotary_pct=0.5)
    apart, whole = grouped()
    c, group = apart[0].shape[1], 3

    def shared(params):
        last, hidden = model.hidden_after_prompts(params, *apart, remat=remat)
        return jnp.concatenate([jnp.repeat(last, group, axis=0)[:, None], hidden], axis=1)

    def plain(params):
        return model.hidden(params, *whole, remat=remat)[:, c - 1 :]

    seen = np.concatenate([np.ones((6, 1), bool), apart[3]], axis=1)
    ours, theirs = jax.jit(shared)(PARAMS), jax.jit(plain)(PARAMS)
    assert distance(ours[seen], theirs[seen]) < 1e-6
    weight = jax.random.normal(jax.random.key(1), ours.shape) * seen[:, :, None]
    grads = [jax.jit(jax.grad(lambda p, f=f: (f(p) * weight).sum()))(PARAMS) for f in (shared, plain)]
    for a, b in zip(*map(jax.tree.leaves, grads)):
        # The key part of the QKV bias has gradient 0 but for rounding: measured against the whole tensor.
        assert distance(a, b) < 1e-5 if np.linalg.norm(b) else not np.any(a)


def test_decoding_after_a_shared_prefix_equals_decoding_after_a_copy_of_it():
    apart, _ = grouped()
    prompts, prompt_mask, responses, _ = apart
    unstacked = MODEL.unstack(PARAMS)
    hidden, prefix = MODEL.prefill(unstacked, prompts, prompt_mask)
    copied = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), prefix)
    positions = jnp.repeat(prompt_mask.sum(axis=1), 3)[:, None]
    ours, theirs = MODEL.empty_cache(6, 5), MODEL.empty_cache(6, 5)
    for t in range(5):
        tokens = responses[:, t, None]
        a, ours = MODEL.decode(unstacked, prefix, ours, tokens, positions + t, jnp.int32(t))
        b, theirs = MODEL.decode(unstacked, copied, theirs, tokens, positions + t, jnp.int32(t))
        assert distance(a, b) < 1e-6


def test_scan_over_stacked_params_equals_a_loop_over_layers():
    tokens, mask = padded_rows([9, 4], [0, 3], 9)
    backbone = MODEL.unstack(PARAMS)["backbone"]
    ids, positions = decoder.mask_tokens(tokens, jnp.asarray(mask))
    config = decoder_config(MODEL.config)
    rope, score = rotary_angles(positions, *config.ropes), config.score_function
    x = backbone["embed_in"]["embedding"][ids]

    def attend(query, key, value):
        return attention.causal_attention(query, attention.Keys(key, value, mask), score), None

    for layer in backbone["layers"]:
        x, _ = decoder.Block(Context(config)).apply({"params": layer}, x, rope, attend)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + MODEL.config.layer_norm_eps)
    norm = backbone["final_layer_norm"]
    expected = x * norm["scale"][None, None] + norm["bias"][None, None]
    assert distance(run_hidden(tokens, mask), expected) < 1e-6


def test_a_row_that_is_all_padding_is_finite_and_has_a_finite_gradient():
    tokens, mask = padded_rows([5, 0], [0, 0], 5)
    grads = jax.jit(jax.grad(lambda params: (MODEL.hidden(params, tokens, mask) * mask[:, :, None]).sum()))(PARAMS)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert np.isfinite(run_hidden(tokens, mask)).all()


def test_bfloat16_compute_stays_close_and_heads_are_float32():
    tokens, mask = padded_rows([9, 4], [0, 3], 9)
    exact = run_hidden(tokens, mask)
    rough = run_hidden(tokens, mask, dtype=jnp.bfloat16)
    assert rough.dtype == jnp.bfloat16
    assert distance(rough[mask], exact[mask]) < 0.03
    assert MODEL.logits(PARAMS, rough).dtype == MODEL.scalars(PARAMS, rough).dtype == jnp.float32
    unstacked = MODEL.unstack(PARAMS, jnp.bfloat16)
    assert unstacked["backbone"]["layers"][0]["mlp"]["dense_h_to_4h"]["kernel"].kernel_FxD.dtype == jnp.bfloat16
    assert unstacked["backbone"]["final_layer_norm"]["scale"].dtype == jnp.float32
    hidden, prefix = jax.jit(MODEL.prefill, static_argnums=3)(unstacked, tokens, jnp.asarray(mask), jnp.bfloat16)
    assert distance(hidden[0], rough[0, -1]) < 0.02
    assert prefix.layers[0]["k"].dtype == jnp.bfloat16 and prefix.layers[0]["v"].shape == (2, 4, 9, 8)
    (segment,) = MODEL.empty_cache(2, 12, jnp.bfloat16)[0]
    assert segment["k"].shape == (2, 4, 8, 12) and segment["v"].shape == (2, 4, 12, 8)


@pytest.mark.parametrize("rates", [{"hidden_dropout": 0.2}, {"attention_dropout": 0.2}])
def test_dropout_is_keyed_per_row_and_deterministic(rates):
    model = custom_shape("2x32x4", 61, **rates)
    tokens, mask = padded_rows([7, 7, 7], [0, 0, 0], 7)
    tokens = np.repeat(tokens[:1], 3, axis=0)
    keys = jax.random.split(jax.random.key(5), 3)
    first = run_hidden(tokens, mask, model, key=keys)
    np.testing.assert_array_equal(first, run_hidden(tokens, mask, model, key=keys))
    assert distance(first[0], first[1]) > 0.01 < distance(first[1], first[2])
    assert distance(first, run_hidden(tokens, mask)) > 0.01
    # In another order every row keeps its mask.
    np.testing.assert_array_equal(run_hidden(tokens, mask, model, key=keys[::-1]), first[::-1])


def test_one_dropout_key_becomes_a_key_a_row_and_gradients_flow():
    model = custom_shape("2x32x4", 61, hidden_dropout=0.2)
    tokens, mask = padded_rows([7, 7, 7], [0, 0, 0], 7)
    key = jax.random.key(5)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(3))
    one = run_hidden(tokens, mask, model, key=key)
    np.testing.assert_array_equal(one, run_hidden(tokens, mask, model, key=keys))

    def loss(params):
        return model.hidden(params, tokens, mask, dropout_key=key, remat="full")[..., 0].sum()

    grads = jax.jit(jax.grad(loss))(PARAMS)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads["backbone"]["layers"]["mlp"]))


def test_dropout_keeps_the_mean_and_the_rate():
    keys = jax.random.split(jax.random.key(0), 4)
    positions = jnp.tile(jnp.arange(50), (4, 1))
    weights = Dropout(keys, 0.25, 0.25, 0.0, positions).weights(jnp.ones((4, 3, 40, 50)), 3)
    for dropped in (token_dropout(jnp.ones((4, 50, 100)), 0.25, keys, positions), weights):
        assert abs(float((dropped == 0).mean()) - 0.25) < 0.02
        assert abs(float(dropped.mean()) - 1.0) < 0.03
        for axis in range(dropped.ndim):  # no two rows, positions, heads or features have one mask
            masks = np.moveaxis(np.asarray(dropped == 0), axis, 0)
            assert len(np.unique(masks.reshape(len(masks), -1), axis=0)) == len(masks)


@pytest.mark.parametrize("rates", [{"hidden_dropout": 0.2}, {"attention_dropout": 0.2}, {"lora": 0.2}], ids=str)
def test_a_dropout_mask_belongs_to_a_position_whatever_the_padding(rates):
    model, params = custom_shape("2x32x4", 61, **{k: v for k, v in rates.items() if k != "lora"}), PARAMS
    if "lora" in rates:
        form = lora.Lora(
            r=3, dropout=0.2, target_modules=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
        )
        model = dataclasses.replace(model, lora=form)
        # Larger adapters multiply the rounding of products of other shapes: 0.3 gives 2e-5 without any dropout.
        adapters = jax.tree.map(lambda x: x + 0.05, lora.init(model, jax.random.key(1), PARAMS))
        params = model.with_lora(PARAMS, adapters)
    tokens, mask = padded_rows([7, 4, 6], [0, 3, 1], 7)
    keys = jax.random.split(jax.random.key(5), 3)
    whole = model.hidden(params, tokens, mask, dropout_key=keys)
    assert distance(whole[:, -3:], model.hidden(params, tokens, mask)[:, -3:]) > 0.01
    pad = ((0, 0), (3, 2))
    wide = model.hidden(params, np.pad(tokens, pad), np.pad(mask, pad), dropout_key=keys)[:, 3:-2]
    assert distance(np.asarray(wide)[mask], np.asarray(whole)[mask]) < 1e-6
    assert distance(model.hidden(params, tokens, mask, dropout_key=keys, last=3), whole[:, -3:]) < 1e-5


# Parameters in all, as published with the models (Biderman et al. 2023, arXiv:2304.01373).
PUBLISHED = {
    "14m": 14_067_712,
    "31m": 30_494_720,
    "70m": 70_426_624,
    "160m": 162_322_944,
    "410m": 405_334_016,
    "1b": 1_011_781_632,
    "1.4b": 1_414_647_808,
    "2.8b": 2_775_208_960,
    "6.9b": 6_857_302_016,
    "12b": 11_846_072_320,
}


@pytest.mark.parametrize("shape", PYTHIA_SHAPES)
def test_every_pythia_shape_has_the_published_number_of_parameters(shape):
    params = jax.eval_shape(pythia(shape).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PUBLISHED[shape]


def test_every_param_has_exactly_one_sharding_rule():
    for path, leaf in jax.tree_util.tree_leaves_with_path(PARAMS):
        name = "/".join(entry.key for entry in path)
        for full in (name, f"policy/{name}"):
            matches = [spec for pattern, spec in MODEL.param_rules if re.search(pattern, full)]
            assert len(matches) == 1, full
            assert len(matches[0]) <= leaf.ndim


def test_a_model_is_static_under_jit():
    assert hash(custom_shape("2x32x4", 61)) == hash(MODEL) and custom_shape("2x32x4", 61) == MODEL
    assert custom_shape("2x32x4", 62) != MODEL
    tokens, mask = padded_rows([3], [0], 3)
    run = jax.jit(lambda model, params: model.hidden(params, tokens, mask), static_argnums=0)
    assert run(MODEL, PARAMS).shape == (1, 3, 32)


def test_initialisation_is_that_of_transformers():
    init = functools.partial(pythia("14m", vocab_size=512).init, heads=HEADS, score_std=0.5)
    params = jax.tree.map(np.asarray, jax.jit(init)(jax.random.key(1)))
    dense = params["backbone"]["layers"]["mlp"]["dense_h_to_4h"]
    assert abs(float(dense["kernel"].std()) - 0.02) < 1e-3 and not np.any(dense["bias"])
    assert abs(float(params["embed_out"]["kernel"].std()) - 0.02) < 1e-3
    assert np.abs(dense["kernel"][0] - dense["kernel"][1]).max() > 0.01
    assert 0.3 < float(params["score"]["kernel"].std()) < 0.7 and "bias" not in params["score"]
    assert set(jax.eval_shape(lambda key: MODEL.init(key, heads=("scalar",)), jax.random.key(0))) == {
        "backbone",
        "score",
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pythia("15m"), "no size '15m'; sizes: 14m"),
        (lambda: custom_shape("4x128", 61), "'4x128' is not [FAMILY:]LAYERSxWIDTHxHEADS[xKV]"),
        (lambda: custom_shape("4x130x4", 61), "width 130 divisible by 4"),
        (lambda: custom_shape("0x128x4", 61), "must be positive"),
        (lambda: custom_shape("2x24x4", 61), "rotates 1 of 6 dimensions"),
        (lambda: custom_shape("2x32x4", 0), "vocab_size is 0"),
        (lambda: MODEL.init(jax.random.key(0), heads=("vision",)), "head 'vision' is not supported"),
    ],
)
def test_shapes_that_cannot_be_are_refused(make, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make()

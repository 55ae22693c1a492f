"""Layers are scanned: the last one computes only what is asked of it, and no stack of params is copied."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import attention, custom_shape, lora, scan_layers
from rlhf_jax.models.decoder_context import ScoreFunction
from tests.helpers.arrays import distance, normal, value_and_vjp
from tests.helpers.attention import plain_causal
from tests.helpers.matrix_products import count
from tests.helpers.models_common import padded_rows, random_params

FORM = lora.Lora(r=3, dropout=0.0, target_modules=("query_key_value", "dense_4h_to_h"))


def model_and_params(depth, adapters=False, **fields):
    """A model, what of it is trained, and a function from that to its params."""
    model = custom_shape(f"{depth}x32x4", 61, rotary_pct=0.5, **fields)
    base = random_params(model, ("causal",))
    if not adapters:
        return model, base, lambda params: params
    model = dataclasses.replace(model, lora=FORM)
    trained = jax.tree.map(lambda x: x + 0.1 * normal(x.size, *x.shape), lora.init(model, jax.random.key(0), base))
    return model, trained, lambda trained: model.with_lora(base, trained)


@pytest.mark.parametrize(
    ("depth", "remat", "last", "parallel", "adapters"),
    [
        *itertools.product([3], ["none"], [9], [True, False], [False, True]),
        *itertools.product([3], ["dots", "full"], [4], [True], [False, True]),
        (1, "none", 4, True, False),
        (2, "none", 1, False, True),
        (3, "full", 4, False, False),
    ],
)
def test_the_last_columns_alone_are_those_of_all_in_value_and_gradient(depth, remat, last, parallel, adapters):
    model, trained, whole = model_and_params(depth, adapters, use_parallel_residual=parallel)
    tokens, mask = padded_rows([9, 5, 7], [0, 4, 2], 9)
    upstream = normal(1, 3, last, 32) * mask[:, -last:, None]

    def alone(params):
        return model.hidden(whole(params), tokens, mask, remat=remat, last=last)

    def of_all(params):
        return model.hidden(whole(params), tokens, mask)[:, -last:]

    found, expected = (jax.jit(lambda p, f=f: (f(p), jax.vjp(f, p)[1](upstream)[0]))(trained) for f in (alone, of_all))
    assert found[0].shape == (3, last, 32)
    there = mask[:, -last:]
    assert distance(found[0][there], expected[0][there]) < 1e-6
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree[1])]) for tree in (found, expected)]
    assert distance(*flat) < 2e-6
    if depth == 3 and remat == "none":  # all columns are the last of them
        assert distance(found[0], expected[0]) < 1e-6


@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (3, 128), (140, 300), (53, 565)])
def test_attention_of_the_last_queries_is_that_of_all_in_value_and_gradient(queries, keys):
    shape = (2, keys, 2, 8)
    arguments = [normal(i, *shape) for i in range(3)]
    mask = jnp.arange(keys)[None, :] >= jnp.array([0, min(keys - queries, 100)])[:, None]
    upstream = normal(9, 2, queries, 2, 8)

    def alone(query, key, value):
        return attention.causal_attention(query[:, -queries:], attention.Keys(key, value, mask), ScoreFunction(8**-0.5))

    def of_all(query, key, value):
        return plain_causal(query, key, value, mask)[:, -queries:]

    found, expected = (value_and_vjp(f, arguments, upstream) for f in (alone, of_all))
    assert distance(found[0], expected[0]) < 1e-6
    for ours, wanted in zip(found[1], expected[1]):
        assert distance(ours, wanted) < 2e-6


def test_jax_has_the_primitives_that_the_scan_over_layer_numbers_names():
    assert scan_layers.SLICING is not None, "jax renamed one: without them all layers run in a plain scan"


def test_without_these_primitives_all_layers_run_in_a_plain_scan(monkeypatch):
    model, trained, whole = model_and_params(3, adapters=True)
    tokens, mask = padded_rows([9, 5, 7], [0, 4, 2], 9)

    def run(trained):
        return jax.value_and_grad(lambda trained: (model.hidden(whole(trained), tokens, mask, last=4) ** 2).sum())(
            trained
        )

    expected = run(trained)
    monkeypatch.setattr(scan_layers, "SLICING", None)
    for a, b in zip(jax.tree.leaves(run(trained)), jax.tree.leaves(expected), strict=True):
        assert distance(a, b) < 1e-6


def products(function, *args):
    """FLOPs of the products of a traced program."""
    return count(jax.make_jaxpr(function)(*args).jaxpr, (), 0).flops


@pytest.mark.parametrize("depth", [1, 3])
def test_the_last_layer_makes_no_products_of_columns_that_are_not_asked_for(depth):
    rows, columns, last, width = 2, 60, 7, 32
    model, params, _ = model_and_params(depth)
    tokens, mask = padded_rows([columns] * rows, [0] * rows, columns)

    def run(params, last=None):
        return model.hidden(params, tokens, mask, last=last)

    def loss(params, last=None):
        return run(params, last)[:, -7:].sum()

    whole, part = (products(functools.partial(run, last=asked), params) for asked in (None, last))
    unseen = rows * (columns - last)
    # After QKV: the projection and the MLP; scores and weighted values of one block of queries.
    forward = 2 * unseen * (width**2 + 2 * width * 4 * width) + 4 * unseen * columns * width
    assert whole - part == forward
    whole, part = (products(jax.grad(functools.partial(loss, last=asked)), params) for asked in (None, last))
    # Backward twice the products, and the attention's scores once more.
    assert whole - part == 3 * forward + 2 * unseen * columns * width


def test_with_adapters_the_first_layer_passes_no_gradient_on_to_what_is_frozen():
    model, trained, whole = model_and_params(3, adapters=True)
    form = dataclasses.replace(FORM, target_modules=("query_key_value",))
    model = dataclasses.replace(model, lora=form)
    trained = {"backbone": {"layers": {"attention": trained["backbone"]["layers"]["attention"]}}}
    tokens, mask = padded_rows([40, 40], [0, 0], 40)

    def backward(model, params, trained):
        def loss(trained):
            return model.hidden(model.with_lora(params, trained), tokens, mask).sum()

        return products(jax.grad(loss), trained) - products(loss, trained)

    base = random_params(model, ("causal",))
    three = backward(model, base, trained)
    two = dataclasses.replace(model, config=dataclasses.replace(model.config, num_hidden_layers=2))
    cut = jax.tree.map(lambda x: x[:2], (base["backbone"]["layers"], trained["backbone"]["layers"]))
    two = backward(two, base | {"backbone": base["backbone"] | {"layers": cut[0]}}, {"backbone": {"layers": cut[1]}})
    one_more, first = three - two, two - (three - two)
    # The first spares the gradients of the MLP's input and of QKV's; that of A's is traced, and dropped by XLA.
    width, all_tokens = 32, 2 * 40
    assert one_more - first == 2 * all_tokens * (2 * width * 4 * width + 3 * width**2)


def test_dots_recomputes_no_matrix_product():
    model = custom_shape("3x32x4", 61)
    params = model.init(jax.random.key(0))
    prompts, prompt_mask = padded_rows([7, 3], [0, 4], 7)
    rows, mask = padded_rows([5, 2, 4, 5], [0] * 4, 5)

    def whole(params, remat):
        return model.hidden(params, rows, mask, remat=remat).sum()

    def after_prompts(params, remat):
        return model.hidden_after_prompts(params, prompts, prompt_mask, rows, mask, remat=remat)[1].sum()

    for loss in (whole, after_prompts):
        flops = {
            remat: products(jax.grad(functools.partial(loss, remat=remat)), params)
            for remat in ("none", "dots", "full")
        }
        assert flops["dots"] == flops["none"] < flops["full"]


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(
    ("adapters", "last"), [(False, 2), (True, 2), (False, None)], ids=["full", "adapters", "plain scan"]
)
def test_no_pass_copies_the_stacked_params(adapters, last, remat):
    depth, width = 16, 128
    model = custom_shape(f"{depth}x{width}x4", 61)
    base = trained = model.init(jax.random.key(0))
    if adapters:
        model = dataclasses.replace(model, lora=FORM)
        trained = lora.init(model, jax.random.key(0), base)
    tokens, mask = padded_rows([6], [0], 6)

    def loss(trained, base):
        return model.hidden(model.with_lora(base, trained), tokens, mask, remat=remat, last=last).sum()

    layer = 4 * 12 * width**2
    for function in (loss, jax.grad(loss)):
        used = jax.jit(function).lower(trained, base).compile().memory_analysis().temp_size_in_bytes
        # Activations of 6 tokens are small; the first and the last layer, cut out forward and again backward, and one
        # of the loop may be held at once.
        assert used < 6 * layer < depth * layer / 2

"""What is done for speed and memory alone: the same numbers as the plain way, by less work."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import data, losses
from rlhf_jax.algorithms import actor_critic, microbatch
from rlhf_jax.config import PPOConfig, RewardConfig, RLOOConfig, SFTConfig, batch_sizes
from rlhf_jax.data import synthetic
from rlhf_jax.models import attention, layers, linear


def distance(a, b):
    a, b = (jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)]).astype(jnp.float32) for tree in (a, b))
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


# --- products


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_its_gradients_are_those_of_the_plain_formula(bias):
    x, kernel, up = normal(0, 3, 5, 4), normal(1, 4, 6), normal(2, 3, 5, 6)
    given = (x, kernel, normal(3, 6) if bias else None)

    def plain(x, kernel, bias):
        out = jnp.einsum("abd,df->abf", x, kernel)
        return (out if bias is None else out + bias[None, None]) * up

    def ours(x, kernel, bias):
        return linear.product(None, (None, None), jnp.dtype(jnp.float32), x, kernel, bias) * up

    for function in (lambda f: f(*given), lambda f: jax.grad(lambda *a: f(*a).sum(), argnums=(0, 1, 2))(*given)):
        for found, expected in zip(jax.tree.leaves(function(ours)), jax.tree.leaves(function(plain)), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_kernel_and_bias_are_summed_in_float32_when_layers_are_bfloat16():
    # 257 rows of ones: bfloat16 has 256 and 258.
    x = jnp.ones((257, 1), jnp.bfloat16)

    def loss(kernel, bias):
        return linear.product(None, (None, None), jnp.dtype(jnp.bfloat16), x, kernel, bias).sum()

    kernel, bias = jax.grad(loss, argnums=(0, 1))(jnp.ones((1, 1)), jnp.zeros(1))
    assert (kernel.dtype, bias.dtype) == (jnp.float32, jnp.float32)
    assert kernel[0, 0] == 257 and bias[0] == 257


# --- attention


def plain_attention(query, key, value, keep):
    """[B, H, Q, K], [B, H, S, K], keep [B, 1, Q, S]: the formula, differentiated by JAX."""
    scores = jnp.einsum("bhqk,bhsk->bhqs", query, key) / math.sqrt(query.shape[-1])
    return jnp.einsum("bhqs,bhsk->bhqk", jax.nn.softmax(jnp.where(keep, scores, -1e9), axis=-1), value)


def plain_causal(query, key, value, mask):
    length = mask.shape[1]
    keep = mask[:, None, None, :] & (jnp.arange(length)[:, None] >= jnp.arange(length)[None, :])[None, None]
    return plain_attention(*(x.swapaxes(1, 2) for x in (query, key, value)), keep).swapaxes(1, 2)


def with_gradients(function, arguments, upstream):
    return jax.jit(lambda *args: (function(*args), jax.vjp(function, *args)[1](upstream)))(*arguments)


@pytest.mark.parametrize("length", [1, 5, 128, 300])
def test_causal_attention_is_the_formula_in_value_and_gradient(length):
    shape = (3, length, 2, 8)
    arguments = [normal(i, *shape) for i in range(3)]
    # A full row, a left-padded and a right-padded one; nothing comes from rows of padding.
    columns = jnp.arange(length)[None, :]
    mask = (columns >= jnp.array([0, length // 3, 0])[:, None]) & (
        columns < jnp.array([length, length, -(-length * 2 // 3)])[:, None]
    )
    upstream = jnp.where(mask[:, :, None, None], normal(9, *shape), 0)
    ours = with_gradients(lambda *args: attention.causal_attention(*args, mask), arguments, upstream)
    wanted = with_gradients(lambda *args: plain_causal(*args, mask), arguments, upstream)
    keep = mask[:, :, None, None]
    assert distance(jnp.where(keep, ours[0], 0), jnp.where(keep, wanted[0], 0)) < 1e-6
    for found, gradient in zip(ours[1], wanted[1]):
        # A single key has weight 1 whatever it is: the gradient of query and key is 0 there.
        assert jnp.abs(found - gradient).max() < 1e-6 if length == 1 else distance(found, gradient) < 2e-6


def test_causal_attention_keeps_no_weights_for_the_backward_pass():
    length, mask = 300, jnp.ones((2, 300), bool)

    def kept(attend):
        arguments = [jnp.zeros((2, length, 2, 8))] * 3
        residuals = jax.eval_shape(lambda *args: jax.vjp(attend, *args)[1], *arguments)
        return max(math.prod(x.shape) for x in jax.tree.leaves(residuals))

    assert kept(lambda *args: attention.causal_attention(*args, mask)) == 2 * length * 2 * 8
    assert kept(lambda *args: plain_causal(*args, mask)) == 2 * 2 * length * length


def test_attention_in_bfloat16_stays_close_to_float32():
    arguments, mask = [normal(i, 2, 140, 2, 16) for i in range(3)], jnp.ones((2, 140), bool)
    upstream = normal(4, 2, 140, 2, 16)
    half = [x.astype(jnp.bfloat16) for x in arguments]
    ours = with_gradients(lambda *args: attention.causal_attention(*args, mask), half, upstream.astype(jnp.bfloat16))
    wanted = with_gradients(lambda *args: attention.causal_attention(*args, mask), arguments, upstream)
    assert {x.dtype for x in jax.tree.leaves(ours)} == {jnp.dtype(jnp.bfloat16)}
    for found, exact in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted)):
        assert distance(found, exact) < 1e-2  # 8 bits of mantissa: 4e-3 a rounding


@pytest.mark.parametrize("group", [1, 3])
def test_attention_after_a_shared_prefix_is_the_formula_in_value_and_gradient(group):
    prefixes, heads, before, own, size = 2, 2, 7, 5, 8
    rows = prefixes * group
    query, key, value = (normal(i, rows, heads, own, size) for i in range(3))
    prefix_key, prefix_value = (normal(i, prefixes, heads, before, size) for i in (3, 4))
    prefix_keep = jnp.arange(before)[None, :] >= jnp.array([0, 4])[:, None]
    keep = (jnp.arange(own)[:, None] >= jnp.arange(own)[None, :])[None, None]

    def ours(query, key, value, prefix_key, prefix_value):
        return attention.attend_after_prefix(query, key, value, keep, prefix_key, prefix_value, prefix_keep)

    def plain(query, key, value, prefix_key, prefix_value):
        keys, values = (
            jnp.concatenate([jnp.repeat(x, group, axis=0), y], axis=2)
            for x, y in ((prefix_key, key), (prefix_value, value))
        )
        seen = jnp.repeat(prefix_keep, group, axis=0)[:, None, None, :]
        seen = jnp.broadcast_to(seen, (rows, 1, own, before))
        return plain_attention(
            query, keys, values, jnp.concatenate([seen, jnp.broadcast_to(keep, (rows, 1, own, own))], axis=3)
        )

    arguments, upstream = (query, key, value, prefix_key, prefix_value), normal(8, rows, heads, own, size)
    found, wanted = with_gradients(ours, arguments, upstream), with_gradients(plain, arguments, upstream)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert distance(one, other) < 2e-6


def test_the_slope_of_gelu_is_the_formulas_and_all_that_is_kept():
    x = jnp.linspace(-9, 9, 1001)
    exact = jax.vmap(jax.grad(lambda x: 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))))(x)
    np.testing.assert_allclose(jax.vmap(jax.grad(layers.gelu))(x), exact, atol=1e-6)
    residuals = jax.eval_shape(lambda x: jax.vjp(layers.gelu, x)[1], x)
    assert [leaf.shape for leaf in jax.tree.leaves(residuals) if leaf.shape] == [x.shape]


# --- logits


class Head:
    """A causal head alone."""

    layout = None

    @staticmethod
    def logits(params, hidden):
        return hidden.astype(jnp.float32) @ params


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logits_in_chunks_give_the_same_numbers_and_gradients(monkeypatch, temperature):
    hidden, kernel = normal(0, 6, 5, 4), normal(1, 4, 11)
    tokens = jax.random.randint(jax.random.key(2), (6, 5), 0, 11)

    def loss(kernel, hidden):
        logprobs, entropy = actor_critic.response_logprobs(Head, kernel, hidden, tokens, temperature)
        return jnp.sum(jnp.sin(logprobs)) + jnp.sum(entropy), (logprobs, entropy)

    def run():
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(kernel, hidden)

    def widest():
        jaxpr = jax.make_jaxpr(jax.grad(lambda *args: loss(*args)[0], argnums=(0, 1)))(kernel, hidden)
        shapes = [v.aval.shape for e in all_equations(jaxpr.jaxpr) for v in e.outvars if hasattr(v.aval, "shape")]
        return max(math.prod(shape) for shape in shapes if shape[-1:] == (11,))

    whole, largest = run(), widest()
    logits = np.asarray(hidden @ kernel, np.float64) / (temperature + 1e-7)
    exact = np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), np.array(tokens)[..., None], -1)
    assert distance(whole[0][1][0], exact[..., 0]) < 1e-6
    monkeypatch.setattr(actor_critic, "LOGIT_POSITIONS", 12)
    for found, wanted in zip(jax.tree.leaves(run()), jax.tree.leaves(whole)):
        assert distance(found, wanted) < 1e-6
    assert (largest, widest()) == (6 * 5 * 11, 2 * 5 * 11)


def all_equations(jaxpr):
    """Of a jaxpr and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from all_equations(inner)


def test_a_log_probability_has_forward_and_second_derivatives():
    logits, tokens = normal(0, 2, 5), jnp.array([1, 4])

    def chosen(logits):
        return losses.logprobs_from_logits(logits, tokens).sum()

    def formula(logits):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1).sum()

    np.testing.assert_allclose(jax.jacfwd(chosen)(logits), jax.grad(formula)(logits), atol=1e-6)
    np.testing.assert_allclose(jax.hessian(chosen)(logits), jax.hessian(formula)(logits), atol=1e-6)


# --- micro-batches of prompts of like length


def test_widths_are_those_of_the_config_or_half_three_quarters_and_all():
    assert microbatch.prompt_widths(PPOConfig(), 512) == (256, 384, 512)
    assert microbatch.prompt_widths(PPOConfig(), 300) == (152, 232, 300)
    assert microbatch.prompt_widths(PPOConfig(), 255) == (255,)
    assert microbatch.prompt_widths(PPOConfig(length_buckets=(8, 16, 64)), 20) == (8, 16, 20)
    chosen = microbatch.narrowest(jnp.array([[1, 8], [9, 3], [16, 17], [20, 20]]), (8, 16, 20))
    np.testing.assert_array_equal(chosen, [0, 1, 2, 2])


def test_rows_are_sorted_unless_it_matters_which_share_a_micro_batch():
    lengths = jnp.array([5, 2, 9, 2])
    np.testing.assert_array_equal(microbatch.together_by_length(lengths, PPOConfig()), [1, 3, 0, 2])
    for options in ({"metrics": "trl"}, {"loss_aggregation": "token_mean_micro"}):
        np.testing.assert_array_equal(microbatch.together_by_length(lengths, PPOConfig(**options)), np.arange(4))
    np.testing.assert_array_equal(microbatch.together_by_length(lengths, RLOOConfig()), [1, 3, 0, 2])


def test_rows_that_go_by_prompt_length_come_back_in_their_order_and_no_wider_than_needed():
    lengths = jnp.array([7, 1, 3, 8, 2, 5])
    columns = jnp.arange(8)[None, :]
    batch = jnp.where(columns >= 8 - lengths[:, None], 10 * jnp.arange(6)[:, None] + columns, 0)
    seen = []

    def function(part):
        seen.append(part.shape)
        return part.sum(axis=1), jnp.full(len(part), part.shape[1])

    def cut(part, width):
        return part[:, -width:]

    run = jax.jit(
        lambda rows: microbatch.by_prompt_length(function, batch, lengths, rows, cut, (4, 8)), static_argnums=0
    )
    sums, widths = run(2)
    np.testing.assert_array_equal(sums, batch.sum(axis=1))
    np.testing.assert_array_equal(widths, [8, 4, 8, 8, 4, 8])  # 1 and 2, 3 and 5, 7 and 8 went together
    assert set(seen) == {(2, 4), (2, 8)}
    np.testing.assert_array_equal(run(None)[0], sums)


def test_the_gradient_of_cut_micro_batches_is_that_of_whole_ones():
    lengths = jnp.array([[1, 3], [8, 2], [4, 4]])
    micros = jnp.where(jnp.arange(8)[None, None] >= 8 - lengths[:, :, None], normal(0, 3, 2, 8), 0)
    seen = []

    def loss(params, micro, index):
        seen.append(micro.shape)
        return jnp.sum((params * micro.sum(axis=1)) ** 2) * (index + 1), {"columns": jnp.int32(micro.shape[1])}

    cuts = microbatch.Cuts(tuple(lambda x, w=w: x[:, -w:] for w in (4, 8)), microbatch.narrowest(lengths, (4, 8)))
    found, metrics = jax.jit(lambda p: microbatch.accumulate(loss, p, micros, cuts))(jnp.float32(2.0))
    wanted, _ = microbatch.accumulate(loss, jnp.float32(2.0), micros)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert metrics["columns"] == 4 + 8 + 4 and (2, 4) in seen
    alone, metrics = microbatch.accumulate(
        loss, jnp.float32(2.0), micros[:1], microbatch.Cuts(cuts.functions, cuts.choice[:1])
    )
    assert metrics["columns"] == 4


def test_all_batches_of_prompts_have_one_shape():
    tokenizer = data.load_tokenizer("synthetic")
    made = data.make_prompts(data.load_rows(synthetic.prompts(40)), tokenizer)
    shapes = {made.batch(0, step, 2).tokens.shape for step in range(20)}
    assert shapes == {(2, data.bucket(made.report.longest, made.buckets))}


# --- the automatic micro-batch


def micro(config, devices=1, platform="cpu"):
    return batch_sizes.with_micro_batch(config, devices, platform).micro_batch_size


def test_a_micro_batch_has_as_many_rows_as_its_tokens_allow():
    ppo = PPOConfig(batch_size=64, query_length=512, response_length=53)
    assert micro(ppo) == 2  # 2,048 / 565 = 3 rows at most, and 3 does not divide 64
    assert micro(ppo, platform="gpu") == 16  # 16,384 / 565 = 28
    assert micro(ppo, devices=4) == 8  # 2 a device
    assert micro(dataclasses.replace(ppo, num_mini_batches=64)) == 1
    assert micro(dataclasses.replace(ppo, query_length=4096)) == 1  # a row at least
    assert micro(dataclasses.replace(ppo, query_length=4096), devices=4) == 4  # a row a device at least
    assert micro(dataclasses.replace(ppo, micro_batch_size=32)) == 32
    for options in ({"loss_aggregation": "token_mean_micro"}, {"metrics": "trl"}):
        assert micro(dataclasses.replace(ppo, **options)) is None


def test_a_micro_batch_of_rloo_has_whole_groups_and_one_of_pairs_counts_both():
    assert micro(RLOOConfig(batch_size=64, num_generations=4, query_length=512, response_length=53)) == 4
    assert micro(RLOOConfig(batch_size=64, num_generations=4, query_length=100, response_length=28)) == 16
    assert micro(SFTConfig(batch_size=64, max_length=256)) == 8
    assert micro(RewardConfig(batch_size=64, max_length=256)) == 4
    assert micro(SFTConfig(batch_size=7, max_length=256)) == 7

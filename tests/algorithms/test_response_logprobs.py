"""Log-probabilities of responses: logits in blocks give the same numbers and gradients, in less memory."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms import response_logprobs, sft
from tests.helpers.arrays import distance, normal, same_bits
from tests.helpers.children import child, last_line


class Head:
    """A causal head alone."""

    layout, linear_logits = None, True

    def __init__(self, vocabulary):
        self.config = types.SimpleNamespace(vocab_size=vocabulary)

    @staticmethod
    def hidden(params, tokens, mask, **_):
        return params["embedding"][tokens]

    @staticmethod
    def head_by_data(params, rows):
        return params

    @staticmethod
    def logits(params, hidden):
        kernel = params["kernel"] if isinstance(params, dict) else params
        return hidden.astype(jnp.float32) @ kernel


# LOGIT_POSITIONS and LOGIT_ENTRIES, and the (rows, positions) of a block of [6, 5, 11] logits.
BLOCKS = [(12, 10**6, (2, 5)), (12, 55, (1, 5)), (12, 54, (1, 3)), (10**6, 22, (1, 2)), (10**6, 1, (1, 1))]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("positions, entries, block", BLOCKS)
def test_logits_in_blocks_give_the_same_numbers_and_gradients(monkeypatch, temperature, positions, entries, block):
    hidden, kernel = normal(0, 6, 5, 4), normal(1, 4, 11)
    tokens = jax.random.randint(jax.random.key(2), (6, 5), 0, 11)

    def loss(kernel, hidden):
        logprobs, entropy = response_logprobs.logprobs_from_hidden(Head(11), kernel, hidden, tokens, temperature)
        return jnp.sum(jnp.sin(logprobs)) + jnp.sum(entropy), (logprobs, entropy)

    def run():
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(kernel, hidden)

    def widest():
        jaxpr = jax.make_jaxpr(jax.grad(lambda *args: loss(*args)[0], argnums=(0, 1)))(kernel, hidden)
        shapes = [v.aval.shape for e in all_equations(jaxpr.jaxpr) for v in e.outvars if hasattr(v.aval, "shape")]
        return max(math.prod(shape) for shape in shapes if len(shape) == 3 and shape[-1] == 11)

    whole, largest = run(), widest()
    logits = np.asarray(hidden @ kernel, np.float64) / (temperature + 1e-7)
    exact = np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), np.array(tokens)[..., None], -1)
    assert distance(whole[0][1][0], exact[..., 0]) < 1e-6
    monkeypatch.setattr(response_logprobs, "LOGIT_POSITIONS", positions)
    monkeypatch.setattr(response_logprobs, "LOGIT_ENTRIES", entries)
    for found, wanted in zip(jax.tree.leaves(run()), jax.tree.leaves(whole)):
        assert distance(found, wanted) < 1e-6
    assert response_logprobs.logit_block(6, 5, Head(11)) == block
    assert (largest, widest()) == (6 * 5 * 11, math.prod(block) * 11)


@pytest.mark.parametrize("rows, positions, block", [(1, 1024, (1, 1024)), (8, 53, (8, 53)), (64, 53, (16, 53))])
def test_small_vocabularies_are_computed_in_whole_rows_of_up_to_1024_positions(rows, positions, block):
    for vocabulary in (260, 50_304, 51_200):
        assert response_logprobs.logit_block(rows, positions, Head(vocabulary)) == block


@pytest.mark.parametrize("vocabulary", [128_256, 151_936, 262_144])
@pytest.mark.parametrize("rows, positions", [(1, 1023), (64, 53), (16, 2048), (3, 7)])
def test_a_block_of_a_large_vocabulary_fits_the_budget_and_is_nearly_as_large(vocabulary, rows, positions):
    chunk, block = response_logprobs.logit_block(rows, positions, Head(vocabulary))
    assert rows % chunk == 0 and chunk * block * vocabulary <= response_logprobs.LOGIT_ENTRIES
    assert (chunk, block) == (rows, positions) or chunk * block * vocabulary > response_logprobs.LOGIT_ENTRIES / 2.1


def test_the_loss_of_demonstrations_is_computed_in_blocks_too(monkeypatch):
    params = {"embedding": normal(0, 11, 4), "kernel": normal(1, 4, 11)}
    tokens, lengths = jax.random.randint(jax.random.key(2), (3, 8), 0, 11), jnp.array([8, 5, 3])

    def run():
        loss = lambda params: jnp.sum(  # noqa: E731
            jnp.cos(sft.token_losses(Head(11), params, tokens, lengths, dtype=jnp.float32))
        )
        return jax.jit(jax.value_and_grad(loss))(params)

    whole = run()
    monkeypatch.setattr(response_logprobs, "LOGIT_ENTRIES", 3 * 11)
    assert distance(run(), whole) < 1e-6 and not same_bits(run(), whole)


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_falls_with_the_block(monkeypatch, gradient):
    """[4, 512, 50257] logits: the compiled program's own memory is that of a few blocks, whatever the block."""
    rows, positions, vocabulary, width = 4, 512, 50_257, 8
    hidden, kernel = normal(0, rows, positions, width), normal(1, width, vocabulary)
    tokens = jnp.zeros((rows, positions), jnp.int32)

    def loss(kernel, hidden):
        logprobs, entropy = response_logprobs.logprobs_from_hidden(Head(vocabulary), kernel, hidden, tokens, 1.0)
        return logprobs.sum() + entropy.sum()

    def temporary(entries):
        monkeypatch.setattr(response_logprobs, "LOGIT_POSITIONS", 10**9)
        monkeypatch.setattr(response_logprobs, "LOGIT_ENTRIES", entries)
        function = jax.jit(jax.grad(loss, argnums=(0, 1)) if gradient else lambda *args: loss(*args))
        return function.lower(kernel, hidden).compile().memory_analysis().temp_size_in_bytes

    everything = rows * positions * vocabulary
    whole, quarter, least = temporary(everything), temporary(everything // 4), temporary(everything // 32)
    fixed = 4 * 4 * (kernel.size + hidden.size)  # gradients and copies of what is no logits
    assert whole > 4 * everything
    assert quarter < whole / 4 + fixed and least < whole / 32 + fixed


MESHES = ((1, 4, 1), (1, 2, 2), (2, 1, 2))


def on_a_mesh(mesh, entries):
    """Log-probabilities, entropies, and gradients of params of a small Qwen2 with tied embeddings; the collectives of
    its compiled program."""
    from rlhf_jax import models
    from rlhf_jax.dry_run import hlo
    from rlhf_jax.parallel import sharding

    config = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 640, "tie_word_embeddings": True}
    model = models.Model.from_hf_config(config).on(sharding.make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)]))
    params = model.init(jax.random.key(0))
    where = model.layout.mesh
    params = sharding.place(params, sharding.shardings(params, model.param_rules, where))
    tokens = jax.random.randint(jax.random.key(2), (8, 20), 0, 640)
    rows = sharding.shard_batch((normal(1, 8, 20, 32), tokens), where)

    def loss(params, hidden, tokens):
        logprobs, entropy = response_logprobs.logprobs_from_hidden(model, params, hidden, tokens, 0.7)
        return jnp.sum(jnp.sin(logprobs)), (logprobs, entropy)

    response_logprobs.LOGIT_ENTRIES = entries
    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, *rows).compile()
    text = compiled.as_text()
    (_, outputs), grads = compiled(params, *rows)
    numbers = {"outputs": outputs, "grads": grads["backbone"]["embed_in"]["embedding"]}
    numbers = {name: [x.tolist() for x in jax.tree.leaves(sharding.fetch(value))] for name, value in numbers.items()}
    sent = sum(c.sent * c.times for c in hlo.collectives(text, 1))
    return {**numbers, "block": response_logprobs.logit_block(8, 20, model), "sent": sent}


def all_equations(jaxpr):
    """Of a jaxpr and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from all_equations(inner)


@pytest.mark.processes
def test_blocks_on_a_mesh_give_the_numbers_of_one_call():
    found = last_line(child("tests.algorithms.test_response_logprobs", devices=4, optimized=True))
    for mesh in MESHES:
        whole, blocks = (found[f"{mesh} {entries}"] for entries in (10**9, 640 * 8))
        assert whole["block"] == [8, 20] and blocks["block"] != whole["block"]
        for part in ("outputs", "grads"):
            assert distance(blocks[part], whole[part]) < 1e-6
        assert blocks["sent"] < 1.5 * whole["sent"]  # the head's gradient is summed once, not block by block


if __name__ == "__main__":
    print(
        json.dumps({f"{mesh} {entries}": on_a_mesh(mesh, entries) for mesh in MESHES for entries in (10**9, 640 * 8)})
    )

"""Our forward passes equal those of torch and transformers in float32."""

from __future__ import annotations

import tempfile

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.models.io import hf
from tests.helpers.arrays import distance
from tests.helpers.models_common import padded_rows, reference, reference_inputs
from tests.helpers.optional import optional

torch = optional("torch")
SETTINGS = settings(max_examples=10, deadline=None, derandomize=True)


@st.composite
def shapes(draw):
    heads, head_size = draw(st.sampled_from([(1, 8), (2, 6), (4, 8), (3, 10)]))
    rotary = draw(st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0]).filter(lambda share: int(head_size * share) % 2 == 0))
    return {
        "hidden_size": heads * head_size,
        "num_attention_heads": heads,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "intermediate_size": draw(st.sampled_from([20, 64])),
        "rotary_pct": rotary,
        "rotary_emb_base": draw(st.sampled_from([10000.0, 500.0])),
        "use_parallel_residual": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "layer_norm_eps": draw(st.sampled_from([1e-5, 1e-3])),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def batches(draw):
    """Rows padded on the left, on the right, on both sides or not at all."""
    width = draw(st.integers(1, 14))
    rows = draw(st.integers(1, 3))
    lengths = [draw(st.integers(1, width)) for _ in range(rows)]
    left = [draw(st.integers(0, width - length)) for length in lengths]
    return padded_rows(lengths, left, width, seed=draw(st.integers(0, 99)))


def load_reference(torch_model, kind):
    with tempfile.TemporaryDirectory() as folder:
        torch_model.save_pretrained(folder)
        return hf.load(folder, kind=kind)


def forward(model, head):
    """Hidden states and a head's output, compiled as one program."""

    def run(params, tokens, mask):
        hidden = model.hidden(params, tokens, mask)
        return hidden, head(params, hidden)

    return jax.jit(run)


@given(shape=shapes(), batch=batches(), seed=st.integers(0, 99))
@SETTINGS
def test_hidden_states_and_logits_equal_transformers(shape, batch, seed):
    tokens, mask = batch
    torch_model = reference("causal", seed, **shape)
    model, params = load_reference(torch_model, "causal")
    with torch.no_grad():
        expected = torch_model(**reference_inputs(tokens, mask), output_hidden_states=True)
    hidden, logits = forward(model, model.logits)(params, tokens, mask)
    assert hidden.dtype == logits.dtype == np.float32
    assert distance(np.asarray(hidden)[mask], expected.hidden_states[-1].numpy()[mask]) < 1e-5
    assert distance(np.asarray(logits)[mask], expected.logits.numpy()[mask]) < 1e-5
    assert np.isfinite(np.asarray(hidden)).all(), "padding rows must not be NaN: 0 * NaN is NaN in a masked sum"


@given(shape=shapes(), batch=batches(), seed=st.integers(0, 99))
@SETTINGS
def test_scalar_scores_equal_transformers_classifier(shape, batch, seed):
    tokens, mask = batch
    torch_model = reference("scalar", seed, **shape)
    model, params = load_reference(torch_model, "scalar")
    with torch.no_grad():
        expected = torch_model(**reference_inputs(tokens, mask)).logits[:, 0].numpy()
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    scores = forward(model, model.scalars)(params, tokens, mask)[1][np.arange(len(tokens)), last]
    assert np.linalg.norm(scores - expected) < 1e-5 * max(np.linalg.norm(expected), 1.0)


@pytest.mark.parametrize("width", [129, 300])
def test_rows_longer_than_a_query_block_equal_transformers(width):
    tokens, mask = padded_rows([width, width - 40], [0, 30], width)
    torch_model = reference("causal", rotary_pct=0.5)
    model, params = load_reference(torch_model, "causal")
    with torch.no_grad():
        expected = torch_model(**reference_inputs(tokens, mask)).logits.numpy()
    _, logits = forward(model, model.logits)(params, tokens, mask)
    assert distance(np.asarray(logits)[mask], expected[mask]) < 1e-5


@pytest.mark.parametrize("parallel", [True, False])
def test_gradients_equal_torch(parallel):
    tokens, mask = padded_rows([9, 5], [0, 2], 9)
    torch_model = reference("causal", use_parallel_residual=parallel)
    model, params = load_reference(torch_model, "causal")
    weight = np.random.default_rng(0).standard_normal((2, 9, 61)).astype(np.float32) * mask[:, :, None]
    torch_model.zero_grad()
    (torch_model(**reference_inputs(tokens, mask)).logits * torch.tensor(weight)).sum().backward()

    def loss(params, remat):
        return (model.logits(params, model.hidden(params, tokens, mask, remat=remat)) * weight).sum()

    # With recomputation for one of the two forms of residual; it may not change anything.
    grads = jax.tree.map(np.asarray, jax.jit(jax.grad(loss), static_argnums=1)(params, "full" if parallel else "none"))
    layers = grads["backbone"]["layers"]
    for index, layer in enumerate(torch_model.gpt_neox.layers):
        ours = layers["attention"]["query_key_value"]["kernel"][index].T
        assert distance(ours, layer.attention.query_key_value.weight.grad) < 1e-5
        assert distance(layers["mlp"]["dense_4h_to_h"]["bias"][index], layer.mlp.dense_4h_to_h.bias.grad) < 1e-5
    # transformers embeds PAD where we embed 0; neither may have a gradient from there.
    ours = grads["backbone"]["embed_in"]["embedding"]
    assert distance(ours, torch_model.gpt_neox.embed_in.weight.grad) < 1e-5

"""Which tokens SFT trains on, and that packing them into rows changes no loss."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import data
from rlhf_jax.algorithms import sft
from rlhf_jax.data.demonstrations import DemoData
from rlhf_jax.models import custom_shape
from tests.helpers.arrays import distance
from tests.helpers.attention import use_kernels_on_cpu


@pytest.mark.parametrize("completion_only", [False, True])
def test_labels_lie_within_the_row_the_completion_and_the_mask(completion_only):
    lengths, prompt_lengths, s = jnp.array([6, 3, 0]), jnp.array([2, 1, 0]), 6
    loss_mask = jnp.array([[1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], bool)
    found = np.asarray(sft.label_mask(lengths, prompt_lengths, s, completion_only, loss_mask))
    plain = np.asarray(sft.label_mask(lengths, prompt_lengths, s, completion_only))
    for row in range(3):
        for label in range(1, s):
            expected = label < lengths[row] and not (completion_only and label < prompt_lengths[row])
            assert plain[row, label - 1] == expected
            assert found[row, label - 1] == (expected and bool(loss_mask[row, label]))


SHAPES = {
    "rotary": ("2x32x4", {}),
    "learned positions": ("gpt2:2x32x4", {}),
    "windows": ("gemma3_text:2x32x4x2", {"sliding_window": 5}),
}


def demonstrations(lengths, seed):
    """Random sequences with prompts of random length."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 60, size).astype(np.int32) for size in lengths]
    prompts = np.asarray([random.integers(0, size) for size in lengths], np.int32)
    report = data.DataReport("rows", len(lengths), len(lengths), longest=max(lengths), tokens=sum(lengths))
    return DemoData(tokens, prompts, 0, (24,), report)


@functools.partial(jax.jit, static_argnames=("model", "completion_only"))
def mean_loss(model, params, batch, completion_only):
    """The loss of an update and its gradient."""
    config = types.SimpleNamespace(completion_only_loss=completion_only, dtype="float32")

    def loss(params):
        total, count = sft.evaluate(model, params, batch, config)
        return total / count

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("implementation", ["blocked", "splash"])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(2, 24), min_size=2, max_size=6), st.booleans(), st.integers(0, 9))
def test_loss_and_gradient_of_packed_rows_are_those_of_unpacked_ones(
    shape, implementation, lengths, completion_only, seed
):
    if implementation == "splash" and shape != "rotary":
        pytest.skip("one case in Pallas' interpreter")
    spec, more = SHAPES[shape]
    model = custom_shape(spec, 61, 64, **more)
    params = model.init(jax.random.key(0))  # rounding is a few 1e-7
    rows = demonstrations(lengths, seed)
    packed = data.pack(rows, 24, completion_only)
    wanted = mean_loss(model, params, rows.in_order(0, 6), completion_only)
    with pytest.MonkeyPatch.context() as patch:
        use_kernels_on_cpu(patch.setattr)
        found = mean_loss(
            dataclasses.replace(model, attn_implementation=implementation),
            params,
            packed.in_order(0, 6),
            completion_only,
        )
    assert abs(found[0] - wanted[0]) <= 1e-6 * abs(wanted[0])
    assert distance(found[1], wanted[1]) < 1e-6

"""Frozen kernels in int8: which numbers they hold, what a model with adapters on them computes, what refuses them."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_jax.config import RLOOConfig, SFTConfig, validation
from rlhf_jax.errors import UserError
from rlhf_jax.models import custom_shape, lora, quantization
from rlhf_jax.models.io import hf
from rlhf_jax.models.placement import AbstractWeights, Weights
from rlhf_jax.parallel import sharding
from rlhf_jax.stages.context import StageContext
from tests.helpers.arrays import distance
from tests.helpers.models_common import padded_rows
from tests.helpers.optional import optional

torch = optional("torch")
LINEARS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
FORM = lora.Lora(r=3, alpha=6, dropout=0.0, target_modules=LINEARS[::2])


def narrow(kernel):
    layer = {"kernel": jnp.asarray(kernel), "bias": np.ones(2, np.float32)}
    return quantization.quantize_int8({"layer": layer}, [("layer",)])["layer"]


def test_a_kernel_is_rounded_to_127_steps_of_each_columns_largest_number():
    found = narrow(np.array([[[1.27, -2.54], [-0.014, 0.522], [0.016, 1.0]]], np.float32))
    np.testing.assert_allclose(found["kernel"].scale, [[[0.01, 0.02]]], rtol=1e-6)
    np.testing.assert_array_equal(found["kernel"].qvalue, [[[127, -127], [-1, 26], [2, 50]]])
    assert found["kernel"].qvalue.dtype == jnp.int8 and found["bias"].dtype == jnp.float32
    wide = quantization.dequantize(found["kernel"], jnp.float32)
    np.testing.assert_allclose(wide, [[[1.27, -2.54], [-0.01, 0.52], [0.02, 1.0]]], rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
        elements=st.floats(-4, 4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3),
    )
)
def test_any_kernel_is_off_by_half_a_step_at_most_and_is_torchs_rounding(kernel):
    found = narrow(kernel)["kernel"]
    wide, largest = quantization.dequantize(found, jnp.float32), np.abs(kernel).max(axis=1, keepdims=True)
    assert np.all(np.abs(wide - kernel) <= largest / 127 * 0.5 * (1 + 1e-4))
    again = narrow(wide)["kernel"]
    np.testing.assert_array_equal(again.qvalue, found.qvalue)
    np.testing.assert_allclose(again.scale, found.scale, rtol=1e-6)
    steps = torch.tensor(kernel) / torch.tensor(np.array(found.scale))
    # A number between two steps may go either way: the scale's last bit decides.
    clear = ((steps - steps.floor() - 0.5).abs() > 1e-3).numpy()
    np.testing.assert_array_equal(np.array(found.qvalue)[clear], steps.round().to(torch.int8).numpy()[clear])


@pytest.fixture(scope="module")
def parts():
    """(model, base with int8 kernels, the same base widened, adapters)"""
    model = dataclasses.replace(custom_shape("2x32x2", 64), lora=FORM)
    params = model.init(jax.random.key(0))
    base = model.quantize_int8(params, jnp.float32)
    made = lora.init(model, jax.random.key(1), base)
    made = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), made)
    return model, base, lora.merge_lora(base), made


def test_only_the_kernels_of_layers_are_narrow_and_they_take_a_quarter(parts):
    _, base, wide, _ = parts
    leaves = jax.tree_util.tree_leaves_with_path(base, is_leaf=quantization.is_int8)
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if quantization.is_int8(leaf)
    }
    assert names == {
        f"backbone/layers/{where}/{name}/kernel" for name, where in zip(LINEARS, 2 * ["attention"] + 2 * ["mlp"])
    }
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    kernels = [
        [leaf["kernel"] for name, leaf in lora.get_path(tree, ("backbone", "layers", "mlp")).items()]
        for tree in (base, wide)
    ]
    assert 0.25 <= size(kernels[0]) / size(kernels[1]) < 0.29
    assert all(not quantization.is_int8(leaf) for leaf in jax.tree.leaves(wide, is_leaf=quantization.is_int8))


def test_a_model_on_int8_kernels_and_its_gradients_are_those_of_the_rounded_floats(parts):
    model, base, wide, made = parts
    tokens, mask = padded_rows([5, 8], [3, 0], 8)

    def loss(made, beneath):
        joined = model.with_lora(beneath, made)
        logits = model.logits(joined, model.hidden(joined, tokens, mask))
        return jnp.square(jnp.where(mask[..., None], logits, 0.0)).sum()

    for beneath in (base, wide):
        assert np.isfinite(loss(made, beneath))
    found, wanted = (jax.jit(jax.value_and_grad(loss))(made, beneath) for beneath in (base, wide))
    assert abs(found[0] / wanted[0] - 1) < 1e-6
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        assert distance(a, b) < 1e-5


def test_merged_and_unstacked_int8_kernels_are_plain_and_hold_the_adapter(parts):
    model, base, wide, made = parts
    found, wanted = (lora.merge_lora(model.with_lora(beneath, made)) for beneath in (base, wide))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, wanted)
    for dtype in (jnp.float32, jnp.bfloat16):
        unstacked = model.unstack(model.with_lora(base, made), dtype)
        kernels = [layer["mlp"][name]["kernel"] for layer in unstacked["backbone"]["layers"] for name in LINEARS[2:]]
        assert {kernel.dtype for kernel in kernels} == {jnp.dtype(dtype)}
        assert (
            model.cast_params(base, dtype)["backbone"]["layers"]["mlp"]["dense_4h_to_h"]["kernel"].qvalue.dtype
            == jnp.int8
        )


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_checkpoint_that_is_kept_narrow_is_never_held_in_float32(monkeypatch, tmp_path, kind):
    model = custom_shape("4x64x4", 256).on(sharding.make_mesh(devices=jax.devices()[:1]))
    params = model.init(jax.random.key(0))
    hf.save(tmp_path, model, params, kind="causal")
    turn = {
        "bfloat16": lambda tree: model.cast_params(tree, jnp.bfloat16),
        "int8": lambda tree: model.quantize_int8(tree, jnp.bfloat16),
    }
    wanted, read, held = jax.jit(turn[kind])(params), hf.read_shards, []
    floats = lambda: sum(x.nbytes for x in jax.live_arrays() if x.dtype == jnp.float32)  # noqa: E731
    before = floats()

    def watched(leaf, where):
        held.append(floats() - before)
        return read(leaf, where)

    monkeypatch.setattr(hf, "read_shards", watched)
    weights = Weights(model.layout.mesh)
    found = weights.load(model, str(tmp_path), "causal", None, turn[kind])
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    sizes = [x.nbytes for x in jax.tree.leaves(params)]
    assert len(held) == len(sizes) and max(held) <= 1.1 * max(sizes) < 0.5 * sum(sizes)
    planned = AbstractWeights(model.layout.mesh).load(model, str(tmp_path), "causal", None, turn[kind])
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)  # noqa: E731
    assert describe(planned) == describe(found)


def test_without_adapters_or_without_qwix_int8_is_refused_by_name(monkeypatch):
    with pytest.raises(UserError, match="load_in_8bit.*use_peft"):
        validation.check(SFTConfig(load_in_8bit=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"load_in_8bit.*qwix.*\[int8\]"):
        StageContext.open(RLOOConfig(use_peft=True, load_in_8bit=True))

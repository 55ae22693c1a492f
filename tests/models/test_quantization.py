"""Frozen kernels in int8 and NF4: their values, the outputs of models with adapters on them, and refused options."""

import dataclasses
import importlib.util
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_jax.config import RLOOConfig, SFTConfig
from rlhf_jax.config.check import check
from rlhf_jax.errors import UserError
from rlhf_jax.models import custom_shape, lora, quantization
from rlhf_jax.models.io import hf
from rlhf_jax.models.linear import frozen_product
from rlhf_jax.models.placement import AbstractWeights, Weights
from rlhf_jax.parallel import sharding
from rlhf_jax.stages.stage_context import StageContext
from tests.helpers.arrays import distance
from tests.helpers.models_common import padded_rows
from tests.helpers.optional import optional

torch = optional("torch")
LINEARS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
FORM = lora.Lora(r=3, alpha=6, dropout=0.0, target_modules=LINEARS[::2])


KINDS = ("int8", "nf4")


def narrow(kernel, kind="int8"):
    layer = {"kernel": jnp.asarray(kernel), "bias": np.ones(2, np.float32)}
    return quantization.quantize({"layer": layer}, [("layer",)], kind)["layer"]


def codes_of(kernel):
    """An NF4Kernel's codes [L, D, F]."""
    *_, blocks, columns = kernel.scale.shape
    packed = np.asarray(kernel.qvalue).reshape(-1, blocks, kernel.qvalue.shape[1] // blocks, columns)
    return np.concatenate([packed & 15, packed >> 4], axis=2).reshape(kernel.shape)


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


def test_the_16_values_are_the_quantiles_of_qlora():
    """Appendix E: 7 negative quantiles of N(0, 1), 0 and 8 positive ones, in even steps of probability on each side,
    divided by the largest."""
    normal, tail = statistics.NormalDist(), 0.9677083
    negative = [-normal.inv_cdf(p) for p in np.linspace(tail, 0.5, 8)]
    positive = [normal.inv_cdf(p) for p in np.linspace(tail, 0.5, 9)][:-1]
    wanted = sorted([*negative, *positive])
    np.testing.assert_allclose(quantization.NF4_VALUES, np.array(wanted) / max(wanted), atol=1e-6)


def test_a_block_is_rounded_to_the_nearest_of_16_multiples_of_its_largest_number():
    exact = 2.0 * np.array(quantization.NF4_VALUES, np.float32)
    # Half of the gap from 0 to 0.0795803 is 0.0397902; of that from -1 to -0.6961928, 0.8480964.
    near = np.zeros(16, np.float32)
    near[:6] = 0.5 * np.array([-1.0, -0.849, -0.847, 0.0397, 0.0399, 0.999])
    found = narrow(np.stack([exact, near, np.zeros(16, np.float32)], 1)[None], "nf4")
    kernel = found["kernel"]
    assert kernel.qvalue.dtype == jnp.uint8 and kernel.qvalue.shape == (1, 8, 3) and kernel.shape == (1, 16, 3)
    np.testing.assert_array_equal(kernel.scale, [[[2.0, 0.5, 1.0]]])
    np.testing.assert_array_equal(kernel.qvalue[0, :, 0], [row | (row + 8) << 4 for row in range(8)])
    np.testing.assert_array_equal(codes_of(kernel)[0, :, 1], [0, 0, 1, 7, 8, 15, *[7] * 10])
    wide = np.asarray(quantization.dequantize(kernel, jnp.float32))[0]
    np.testing.assert_array_equal(wide[:, 0], exact)
    np.testing.assert_allclose(wide[:6, 1], [-0.5, -0.5, -0.3480964, 0, 0.0397902, 0.5], rtol=1e-5)
    assert not wide[:, 2].any() and found["bias"].dtype == jnp.float32


@pytest.mark.parametrize(("rows", "size"), [(2, 2), (6, 2), (48, 16), (64, 64), (96, 32), (768, 64), (2304, 64)])
def test_blocks_have_64_rows_or_the_largest_power_of_two_that_divides(rows, size):
    kernel = np.random.default_rng(0).standard_normal((2, rows, 3), np.float32)
    found = narrow(kernel, "nf4")["kernel"]
    assert quantization.block_size(rows) == size and found.scale.shape == (2, rows // size, 3)
    blocks = kernel.reshape(2, rows // size, size, 3)
    np.testing.assert_array_equal(found.scale, np.abs(blocks).max(axis=2))
    if rows % 64 == 0:  # bitsandbytes: 64 consecutive weights of torch's flattened [F, D]
        flat = kernel.transpose(0, 2, 1).reshape(2, -1, 64)
        np.testing.assert_array_equal(found.scale.transpose(0, 2, 1).reshape(2, -1), np.abs(flat).max(axis=-1))


@settings(deadline=None, max_examples=30)
@given(
    hnp.arrays(
        np.float32,
        st.sampled_from(((1, 2, 1), (2, 6, 3), (1, 128, 2))),
        elements=st.floats(-4, 4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3),
    )
)
def test_any_block_is_off_by_half_a_gap_at_most_and_has_qwixs_codes(kernel):
    found, size = narrow(kernel, "nf4")["kernel"], quantization.block_size(kernel.shape[1])
    wide = quantization.dequantize(found, jnp.float32)
    largest = np.repeat(np.asarray(found.scale), size, axis=1)
    assert np.all(np.abs(wide - kernel) <= 0.152 * largest)
    again = narrow(wide, "nf4")["kernel"]
    np.testing.assert_array_equal(quantization.dequantize(again, jnp.float32), wide)
    qwix = pytest.importorskip("qwix")
    wanted = qwix.quantize(jnp.asarray(kernel), "nf4", channelwise_axes=(0, 2), tiled_axes={1: size})
    np.testing.assert_array_equal(found.scale, wanted.scale)
    middles = np.convolve(quantization.NF4_VALUES, (0.5, 0.5), "valid")
    unit = kernel / largest
    clear = np.abs(unit[..., None] - middles).min(axis=-1) > 1e-6
    np.testing.assert_array_equal(codes_of(found)[clear], np.asarray(wanted.qvalue, np.uint8)[clear])
    np.testing.assert_allclose(wide[clear], qwix.dequantize(wanted)[clear], rtol=1e-7)


@pytest.fixture(scope="module", params=KINDS)
def parts(request):
    """(model, base with quantized kernels, the same base widened, adapters)"""
    model = dataclasses.replace(custom_shape("2x32x2", 64), lora=FORM)
    params = model.init(jax.random.key(0))
    base = model.quantize(params, jnp.float32, request.param)
    made = lora.init(model, jax.random.key(1), base)
    made = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), made)
    return model, base, lora.merge_lora(base), made


def test_only_the_kernels_of_layers_are_narrow_and_they_take_a_quarter_or_less(parts):
    _, base, wide, _ = parts
    leaves = jax.tree_util.tree_leaves_with_path(base, is_leaf=quantization.is_quantized)
    narrow_paths = [path for path, leaf in leaves if quantization.is_quantized(leaf)]
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path in narrow_paths}
    assert names == {
        f"backbone/layers/{where}/{name}/kernel" for name, where in zip(LINEARS, 2 * ["attention"] + 2 * ["mlp"])
    }
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    kernels = [
        [leaf["kernel"] for name, leaf in lora.get_path(tree, ("backbone", "layers", "mlp")).items()]
        for tree in (base, wide)
    ]
    # One byte a weight and a scale a column; or half a byte and a scale for each 32 rows, all of this narrow model.
    bounds = {True: (0.14, 0.165), False: (0.25, 0.29)}[isinstance(kernels[0][0], quantization.NF4Kernel)]
    assert bounds[0] <= size(kernels[0]) / size(kernels[1]) < bounds[1]
    assert all(not quantization.is_quantized(leaf) for leaf in jax.tree.leaves(wide, is_leaf=quantization.is_quantized))


def test_a_model_on_quantized_kernels_and_its_gradients_are_those_of_the_rounded_floats(parts):
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


def test_the_gradient_of_a_scan_makes_no_array_of_a_kernels_size_outside_the_loop():
    """Such as constants, which it would hold in float32."""
    kernels = quantization.quantize_nf4(jnp.ones((3, 64, 256)))

    def loss(x):
        layer = lambda x, kernel: (frozen_product(None, (None, None), jnp.float32, x, kernel, None)[:, :64], None)  # noqa: E731
        return jax.lax.scan(layer, x, kernels)[0].sum()

    outside = jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 64))).eqns
    assert [eqn.primitive.name for eqn in outside].count("scan") == 2
    sizes = [var.aval.size for eqn in outside for var in eqn.outvars if eqn.primitive.name != "scan"]
    assert max(sizes) < 32 * 256


def test_merged_and_unstacked_kernels_are_plain_and_hold_the_adapter(parts):
    model, base, wide, made = parts
    found, wanted = (lora.merge_lora(model.with_lora(beneath, made)) for beneath in (base, wide))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, wanted)
    sampled, wanted = (model.unstack(model.with_lora(beneath, made)) for beneath in (base, wide))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), sampled, wanted)
    for dtype in (jnp.float32, jnp.bfloat16):
        unstacked = model.unstack(model.with_lora(base, made), dtype)
        kernels = [layer["mlp"][name]["kernel"] for layer in unstacked["backbone"]["layers"] for name in LINEARS[2:]]
        assert {kernel.kernel_FxD.dtype for kernel in kernels} == {jnp.dtype(dtype)}
        kept = model.cast_params(base, dtype)["backbone"]["layers"]["mlp"]["dense_4h_to_h"]["kernel"]
        assert kept.qvalue.dtype.itemsize == 1 and kept.scale.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["bfloat16", *KINDS])
def test_a_checkpoint_that_is_kept_narrow_is_never_held_in_float32(monkeypatch, tmp_path, kind):
    model = custom_shape("4x64x4", 256).on(sharding.make_mesh(devices=jax.devices()[:1]))
    params = model.init(jax.random.key(0))
    hf.save(tmp_path, model, params, kind="causal")
    turn = {
        "bfloat16": lambda tree: model.cast_params(tree, jnp.bfloat16),
        **{name: lambda tree, name=name: model.quantize(tree, jnp.bfloat16, name) for name in KINDS},
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


def test_what_cannot_be_quantized_is_refused_by_name(monkeypatch):
    for option in ("load_in_8bit", "load_in_4bit"):
        with pytest.raises(UserError, match=f"{option}.*use_peft"):
            check(SFTConfig(**{option: True}))
    with pytest.raises(UserError, match="load_in_8bit and load_in_4bit"):
        check(SFTConfig(use_peft=True, load_in_8bit=True, load_in_4bit=True))
    with pytest.raises(UserError, match="load_in_4bit.*33 rows"):
        narrow(np.ones((1, 33, 2), np.float32), "nf4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"load_in_8bit.*qwix.*\[int8\]"):
        StageContext.open(RLOOConfig(use_peft=True, load_in_8bit=True))

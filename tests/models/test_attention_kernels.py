"""Attention by kernels: the values and gradients of blocked attention, and refusals of what a kernel does not support.

They run on CPUs here, see `tests.helpers.attention`.
"""

import dataclasses
import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.dry_run import topologies
from rlhf_jax.errors import UserError
from rlhf_jax.models import attention, attention_kernels, custom_shape
from rlhf_jax.models.decoder_context import Context, ScoreFunction
from rlhf_jax.parallel import sharding, xla_flags
from tests.helpers.arrays import distance, normal, value_and_vjp
from tests.helpers.attention import cudnn, splash, use_kernels_on_cpu
from tests.helpers.children import child, last_line
from tests.helpers.models_common import padded_rows, random_params


def assert_equal_to_blocked(kernel, queries, keys, heads, own, size, *, window=None, softcap=None, segments=False):
    """Of a left-padded and a right-padded row of two; nothing comes from padding, whose output is finite."""
    shapes = ((2, queries, heads, size), (2, keys, own, size), (2, keys, own, size))
    arguments = [normal(i, *shape) for i, shape in enumerate(shapes)]
    columns = jnp.arange(keys)[None, :]
    mask = (columns >= jnp.array([keys // 3, 0])[:, None]) & (columns < jnp.array([keys, keys - 3])[:, None])
    ids = jnp.broadcast_to((columns >= keys // 2).astype(jnp.int32), mask.shape) if segments else None
    keep = mask[:, -queries:, None, None]
    upstream = jnp.where(keep, normal(9, *shapes[0]), 0)
    score = ScoreFunction(size**-0.5, softcap)

    def outputs(attend):
        return value_and_vjp(
            lambda *qkv: attend(*qkv, mask, score, window=window, segment_ids=ids), arguments, upstream
        )

    ours, wanted = outputs(kernel), outputs(attention.causal_attention)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(ours))
    assert distance(jnp.where(keep, ours[0], 0), jnp.where(keep, wanted[0], 0)) < 1e-5
    for found, gradient in zip(ours[1], wanted[1], strict=True):
        assert distance(found, gradient) < 1e-5


@pytest.mark.parametrize(
    "shape, options",
    [
        ((40, 40, 4, 2, 64), {}),
        ((150, 150, 2, 1, 128), {"window": 33, "softcap": 5.0}),
        ((21, 165, 2, 2, 64), {"window": 50, "segments": True}),
    ],
    ids=str,
)
def test_splash_is_blocked_attention_in_value_and_gradient(shape, options):
    assert_equal_to_blocked(splash, *shape, **options)


@pytest.mark.parametrize(
    "shape, options",
    [
        ((37, 37, 4, 2, 64), {}),
        ((150, 150, 2, 1, 16), {"window": 33}),
        ((21, 165, 2, 2, 64), {"window": 50, "segments": True}),
    ],
    ids=str,
)
def test_arguments_of_cudnn_are_blocked_attention_in_value_and_gradient(shape, options):
    assert_equal_to_blocked(cudnn, *shape, **options)


def decoder_config(shape="2x64x1", **fields):
    model = custom_shape(shape, 64)
    return dataclasses.replace(model.family.decoder_config(model.config), **fields)


@pytest.mark.parametrize(
    "implementation, platform, dtype, fields, reason",
    [
        ("cudnn", "cpu", "bfloat16", {}, "devices of the platform gpu, and the mesh has devices of the platform cpu"),
        ("cudnn", "tpu", "bfloat16", {}, "platform gpu"),
        ("splash", "gpu", "bfloat16", {}, "platform tpu"),
        ("cudnn", "gpu", "float32", {}, "bfloat16, and --dtype is float32"),
        ("cudnn", "gpu", "bfloat16", {"attention_softcap": 50.0}, "attention_softcap is 50"),
        ("cudnn", "gpu", "bfloat16", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("splash", "tpu", "float32", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("splash", "tpu", "float32", {"layer_window": (None, 8)}, "one window for all layers"),
        ("splash", "tpu", "float32", {"layer_window": (8, 8), "attention_softcap": 50.0}, None),
        ("blocked", "cpu", "float32", {"layer_window": (None, 8), "attention_dropout": 0.1}, None),
    ],
)
def test_what_a_kernel_does_not_support_has_a_reason(implementation, platform, dtype, fields, reason):
    arguments = (implementation, decoder_config(**fields), dtype, platform)
    found = attention_kernels.unsupported(*arguments, dropout=True)
    assert found is None if reason is None else reason in found


def test_without_cudnn_or_with_a_head_size_that_it_does_not_take_jax_gives_the_reason():
    reason = attention_kernels.unsupported("cudnn", decoder_config("llama:1x20x1"), "bfloat16", "gpu")
    assert reason.startswith("jax refuses it: ")


def test_models_are_built_with_blocked_attention():
    assert custom_shape("1x8x1", 64).attn_implementation == Context(decoder_config()).attn_implementation == "blocked"


# --- whole models


@pytest.fixture
def on_cpu(monkeypatch):
    use_kernels_on_cpu(monkeypatch.setattr)


def forward(model, params, tokens, mask, dtype=jnp.float32, dropout_key=None):
    """Everything that attends whole rows, and the gradient of the params."""
    width = tokens.shape[1]

    def loss(params):
        hidden = model.hidden(params, tokens, mask, dtype=dtype, dropout_key=dropout_key)
        last = model.hidden(params, tokens, mask, dtype=dtype, dropout_key=dropout_key, last=5)
        prompts = model.hidden_after_prompts(params, *rows, dtype=dtype)
        return sum(jnp.square(jnp.where(m[..., None], x, 0)).sum() for m, x in parts(hidden, last, prompts))

    def parts(hidden, last, prompts):
        return (mask, hidden), (mask[:, -5:], last), (mask[:, -8:], prompts[1])

    rows = (tokens[:, : width - 8], mask[:, : width - 8], tokens[:, -8:], mask[:, -8:])
    prefilled = model.prefill(model.unstack(params, dtype), *rows[:2], dtype)[0]
    return jax.value_and_grad(loss)(params), prefilled


TWO_KINDS = ["sliding_attention", "full_attention"]
MODELS = {
    "splash": ("splash", "llama:1x64x4x2", {}),
    "cudnn": ("cudnn", "llama:2x64x4x2", {}),
    "cudnn, learned positions": ("cudnn", "gpt2:2x64x4", {}),
    "cudnn, one window": ("cudnn", "mistral:2x64x4x2", {"sliding_window": 7}),
    "cudnn, two windows": ("cudnn", "gemma3_text:2x64x4x2", {"sliding_window": 7, "layer_types": TWO_KINDS}),
    "cudnn, dropout": ("cudnn", "3x64x4", {"hidden_dropout": 0.5}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_with_a_kernel(name, on_cpu):
    kernel, shape, fields = MODELS[name]
    model = custom_shape(shape, 61, **fields)
    params, (tokens, mask) = random_params(model), padded_rows([20, 22], [4, 0], 24)
    key = jax.random.key(1) if "dropout" in name else None
    run = jax.jit(forward, static_argnums=0)
    expected = run(model, params, tokens, mask, dropout_key=key)
    with_kernel = dataclasses.replace(model, attn_implementation=kernel)
    assert distance(run(with_kernel, params, tokens, mask, dropout_key=key), expected) < 1e-5


def test_cudnn_gets_a_mask_only_for_segments_windows_that_differ_and_the_last_columns(on_cpu, monkeypatch):
    masks = []

    def record(*arguments, **options):
        masks.append(arguments[3] is not None)
        return cudnn(*arguments, **options)

    monkeypatch.setattr(attention_kernels, "cudnn_attention", record)
    tokens, mask = padded_rows([20, 22], [4, 0], 24)

    def calls(shape, fields=None, **options):
        model = dataclasses.replace(custom_shape(shape, 61, **(fields or {})), attn_implementation="cudnn")
        params = jax.eval_shape(model.init, jax.random.key(0))
        masks.clear()
        jax.eval_shape(lambda params: model.hidden(params, tokens, mask, **options), params)
        return set(masks)

    assert calls("llama:2x64x4x2") == {False}
    assert calls("llama:2x64x4x2", last=5) == {False, True}
    assert calls("llama:2x64x4x2", segment_ids=jnp.zeros_like(tokens)) == {True}
    assert calls("gemma3_text:2x64x4x2", {"layer_types": TWO_KINDS}) == {True}


SHAPES = {"llama:2x64x4x2": (2, 2, 2), "2x64x2": (1, 1, 8)}  # copied heads; heads that do not divide: folded


def on_mesh(shape, sizes, rows, kernel):
    """How far a model with a kernel on a mesh is from one with blocked attention on one device."""
    model, mesh = custom_shape(shape, 64), sharding.make_mesh(*sizes)
    params, (tokens, mask) = random_params(model), padded_rows([20] * rows, [4] * rows, 24)
    wanted = jax.jit(forward, static_argnums=0)(model, params, tokens, mask)
    with_kernel = dataclasses.replace(model.on(mesh), attn_implementation=kernel)
    placed = sharding.place(params, sharding.shardings(params, with_kernel.param_rules, mesh))
    placed_rows = sharding.place((tokens, mask), sharding.replicated(mesh))
    return distance(sharding.fetch(jax.jit(forward, static_argnums=0)(with_kernel, placed, *placed_rows)), wanted)


@pytest.mark.processes
def test_devices_compute_their_rows_and_heads():
    assert all(gap < 1e-5 for gap in last_line(child(__name__, devices=8)).values())


# --- compiled for accelerators


def gradients(kernel, model, rows, length, dtype=jnp.bfloat16, **options):
    """The program of attention and its gradient, and the shapes of its arguments."""
    config = model.family.decoder_config(model.config)
    context = Context(config, dtype, model.layout, attn_implementation=kernel)

    def program(query, key, value, mask):
        attend = functools.partial(attention_kernels.row_attention, context, mask=mask, **options)
        out, pull = jax.vjp(lambda *qkv: attend(*qkv), query, key, value)
        return out, pull(out)

    heads = (config.num_attention_heads, context.held_heads, context.held_heads)
    shapes = [jax.ShapeDtypeStruct((rows, length, h, config.head_dim), dtype) for h in heads]
    return jax.jit(program), (*shapes, jax.ShapeDtypeStruct((rows, length), jnp.bool_))


@pytest.mark.parametrize("size", [64, 80, 128])
def test_splash_has_a_lowering_for_tpus(size):
    program, shapes = gradients("splash", custom_shape(f"llama:1x{4 * size}x4x2", 64), 2, 165)
    text = program.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    for kernel in ("splash_mha_fwd_segmented_residuals", "splash_mha_dq_segmented", "splash_mha_dkv_segmented"):
        assert kernel in text


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "sizes, options, kernel",
    [
        ((1, 1, 1), {}, "ScaleBiasSoftmax"),
        ((2, 2, 2), {}, "ScaleBiasSoftmax"),
        ((1, 1, 1), {"start_at_0": True}, "Softmax"),
        ((1, 1, 1), {"start_at_0": True, "dtype": jnp.float16}, "Softmax"),
        ((2, 2, 2), {"start_at_0": True, "window": 33}, "Softmax"),
    ],
    ids=str,
)
def test_cudnn_compiles_for_gpus_with_odd_lengths_and_on_meshes(sizes, options, kernel):
    pytest.importorskip("jax_cuda13_plugin")
    try:
        devices = topologies.topology_devices(f"h100:{sizes[0] ** 3}")
    except UserError as error:
        pytest.skip(str(error))
    mesh = sharding.make_mesh(*sizes, devices=devices)
    model = custom_shape("llama:1x256x4x2", 64).on(mesh)
    reason = attention_kernels.unsupported("cudnn", model.config, "bfloat16", devices[0].platform)
    if importlib.util.find_spec("nvidia.cudnn") is None:
        pytest.skip(f"pip install nvidia-cudnn-cu13: {reason}")
    assert reason is None
    program, shapes = gradients("cudnn", model, 8, 165, **options)
    split = sharding.batch_sharding(mesh)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in shapes]
    compiled = program.trace(*shapes).lower().compile(compiler_options=topologies.compiler_options(devices[0]))
    assert f'"__cudnn$fmha{kernel}"' in compiled.as_text()
    assert f'"__cudnn$fmha{kernel}Backward"' in compiled.as_text()


if __name__ == "__main__":
    use_kernels_on_cpu()
    cases = [(shape, rows, "splash") for shape in SHAPES for rows in (8, 3)] + [("llama:2x64x4x2", 8, "cudnn")]
    print(json.dumps({str(case): on_mesh(case[0], SHAPES[case[0]], *case[1:]) for case in cases}))


class Device:
    """Stands for a device of another platform."""

    def __init__(self, platform, compute_capability=None):
        self.platform, self.compute_capability = platform, compute_capability


@pytest.mark.parametrize(
    "device, options, used",
    [
        (Device("gpu", "9.0"), {}, "cudnn"),
        (Device("gpu", "8.0"), {}, "blocked"),
        (Device("gpu", "10.0"), {}, "blocked"),
        (Device("cpu"), {}, "blocked"),
        (Device("tpu"), {}, "blocked"),
        (Device("gpu", "9.0"), {"dtype": "float16"}, "cudnn"),
        (Device("gpu", "9.0"), {"dtype": "float32"}, "blocked"),
        (Device("gpu", "9.0"), {"attention_softcap": 50.0}, "blocked"),
        (Device("gpu", "9.0"), {"attention_dropout": 0.1, "dropout": True}, "blocked"),
    ],
)
def test_auto_is_cudnn_on_hopper_where_it_computes_the_models_attention(monkeypatch, device, options, used):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(attention_kernels, "_refused_by_jax", lambda config: None)  # which asks for cuDNN here
    options = {"dtype": "bfloat16", "dropout": False, **options}
    dtype, dropout = options.pop("dtype"), options.pop("dropout")
    config = dataclasses.replace(decoder_config(), **options)
    assert attention_kernels.resolved("auto", config, dtype, device, dropout=dropout) == used
    assert attention_kernels.resolved("splash", config, dtype, device, dropout=dropout) == "splash"


def test_deterministic_kernels_are_not_cudnns(monkeypatch):
    monkeypatch.setattr(attention_kernels, "_refused_by_jax", lambda config: None)
    monkeypatch.setenv("XLA_FLAGS", "")
    xla_flags.add(xla_flags.DETERMINISTIC)
    config, hopper = decoder_config(), Device("gpu", "9.0")
    assert attention_kernels.resolved("auto", config, "bfloat16", hopper, dropout=False) == "blocked"
    assert "--deterministic" in attention_kernels.unsupported("cudnn", config, "bfloat16", "gpu")

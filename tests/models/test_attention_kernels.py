"""Attention by kernels: the values and gradients of blocked attention, and refusals of what a kernel does not support.

They run on CPUs here, see `tests.helpers.attention`.
"""

import dataclasses
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.dry_run import topologies
from rlhf_jax.errors import UserError
from rlhf_jax.models import attention, attention_kernels, cudnn, custom_shape
from rlhf_jax.models.attention import Keys
from rlhf_jax.models.decoder_context import ALL_KEYS, Context, ScoreFunction
from rlhf_jax.parallel import sharding, xla_flags
from tests.helpers.arrays import distance, normal, value_and_vjp
from tests.helpers.attention import splash, tokamax, use_kernels_on_cpu
from tests.helpers.children import child, last_line
from tests.helpers.models_common import padded_rows, random_params


class Device:
    """Stands for a device of another platform."""

    def __init__(self, platform, compute_capability=None):
        self.platform, self.compute_capability = platform, compute_capability


@pytest.fixture
def on_cpu(monkeypatch):
    use_kernels_on_cpu(monkeypatch.setattr)


def assert_equal_to_blocked(
    kernel,
    queries,
    keys,
    heads,
    key_heads,
    size,
    *,
    window=None,
    softcap=None,
    segments=False,
    group=0,
    start_at_0=False,
):
    """Of rows that are padded on the left and on the right, after a prefix of `group` rows each if that is not 0;
    nothing comes from padding, whose output is finite."""
    rows = 2 * max(group, 1)

    def padded(columns, count):
        """Rows with padding at both ends, or after their tokens."""
        firsts, lasts = jnp.linspace(columns // 3, 0, count), jnp.linspace(columns, columns - 3, count)
        places = jnp.arange(columns)[None, :]
        return (places >= (0 if start_at_0 else firsts[:, None].astype(int))) & (places < lasts[:, None].astype(int))

    mask, prefix_mask = padded(keys, rows), padded(20, 2) if start_at_0 else padded(20, 2).at[:, -3:].set(True)
    shapes = [(rows, queries, heads, size), *[(rows, keys, key_heads, size)] * 2, *[(2, 20, key_heads, size)] * 2]
    arguments = [normal(i, *shape) for i, shape in enumerate(shapes if group else shapes[:3])]
    ids = jnp.broadcast_to((jnp.arange(keys)[None, :] >= keys // 2).astype(jnp.int32), mask.shape) if segments else None
    keep = mask[:, -queries:, None, None]
    upstream = jnp.where(keep, normal(9, *shapes[0]), 0)
    score = ScoreFunction(size**-0.5, softcap)

    def outputs(attend, prefix_mask):
        def attended(query, key, value, *prefix):
            prefix = Keys(*prefix, prefix_mask) if prefix else None
            return attend(query, Keys(key, value, mask), prefix, window, ids, score)

        return value_and_vjp(attended, arguments, upstream)

    def blocked(query, keys, prefix, window, ids, score):
        if prefix is not None and start_at_0:  # columns are as far apart as tokens where padding comes first
            prefix = attention_kernels.padding_first(prefix)
        return attention.causal_attention(query, keys, score, prefix=prefix, window=window, segment_ids=ids)

    ours, wanted = outputs(kernel, prefix_mask), outputs(blocked, prefix_mask)
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
    def kernel(query, keys, prefix, window, ids, score):
        return splash(score, query, keys, prefix, ids, window)

    assert_equal_to_blocked(kernel, *shape, **options)


@pytest.mark.parametrize(
    "shape, options, traced",
    [
        ((37, 37, 4, 2, 64), {}, False),
        ((150, 150, 2, 1, 16), {"window": 33}, False),
        ((21, 165, 2, 2, 64), {"window": 50, "segments": True}, True),
        ((37, 37, 4, 2, 64), {"start_at_0": True}, False),
        ((150, 150, 2, 1, 16), {"start_at_0": True, "window": 33}, False),
        ((150, 150, 2, 1, 16), {"start_at_0": True, "window": 33}, True),
        ((37, 37, 4, 2, 64), {"group": 3, "start_at_0": True}, False),
        ((37, 37, 4, 2, 64), {"group": 3, "start_at_0": True, "window": 30}, True),
        ((21, 21, 2, 2, 16), {"group": 3}, False),
        ((21, 21, 2, 1, 16), {"group": 1, "window": 9}, False),
    ],
    ids=str,
)
def test_cudnns_calls_are_blocked_attention_in_value_and_gradient(shape, options, traced, on_cpu):
    def kernel(query, keys, prefix, window, ids, score):
        window = jnp.asarray(window) if traced else window
        more = {"sizes": (9, 30, 33, 50, ALL_KEYS), "start_at_0": options.get("start_at_0", False)}
        return attention_kernels.cudnn_attention(score, query, keys, prefix, ids, window, **more)

    assert_equal_to_blocked(kernel, *shape, **options)


def decoder_config(shape="2x64x1", **fields):
    model = custom_shape(shape, 64)
    return dataclasses.replace(model.family.decoder_config(model.config), **fields)


@pytest.mark.parametrize(
    "implementation, platform, dtype, fields, reason",
    [
        ("cudnn", "cpu", "bfloat16", {}, "devices of the platform gpu, and the mesh has devices of the platform cpu"),
        ("cudnn", "tpu", "bfloat16", {}, "platform gpu"),
        ("splash", "gpu", "bfloat16", {}, "platform tpu"),
        ("cudnn", "gpu", "float32", {}, "bfloat16 and float16, and --dtype is float32"),
        ("cudnn", "gpu", "bfloat16", {"attention_softcap": 50.0}, "attention_softcap is 50"),
        ("cudnn", "gpu", "bfloat16", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("splash", "tpu", "float32", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("splash", "tpu", "float32", {"layer_window": (None, 8)}, "one window for all layers"),
        ("splash", "tpu", "float32", {"layer_window": (8, 8), "attention_softcap": 50.0}, None),
        ("blocked", "cpu", "float32", {"layer_window": (None, 8), "attention_dropout": 0.1}, None),
    ],
)
def test_what_a_kernel_does_not_support_has_a_reason(implementation, platform, dtype, fields, reason):
    config = decoder_config(**fields)
    found = attention_kernels.unsupported(implementation, config, dtype, Device(platform, "9.0"), dropout=True)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    "width, capability, reason",
    [
        (20, "9.0", "heads must be multiples of 8 of at most 256 on this device, and the model's are 20"),
        (256, "8.0", "of at most 128 on this device, and the model's are 256"),
        (64, "7.5", "compute capability 8.0"),
    ],
)
def test_a_head_size_and_a_gpu_that_cudnn_does_not_take_have_a_reason(width, capability, reason):
    device = Device("gpu", capability)
    assert reason in attention_kernels.unsupported("cudnn", decoder_config(f"llama:1x{width}x1"), "bfloat16", device)


def test_a_missing_cudnn_has_a_reason(monkeypatch):
    monkeypatch.setattr(cudnn.kernels, "cuda_versions", None)
    device = Device("gpu", "9.0")
    assert "pip install nvidia-cudnn" in attention_kernels.unsupported("cudnn", decoder_config(), "bfloat16", device)


def test_models_are_built_with_blocked_attention():
    assert custom_shape("1x8x1", 64).attn_implementation == Context(decoder_config()).attn_implementation == "blocked"


# --- whole models


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
    assert_the_same_with(*MODELS[name], key=jax.random.key(1) if "dropout" in name else None)


def assert_the_same_with(kernel, shape, fields, key=None):
    """As with blocked attention, in all that attends whole rows."""
    model = custom_shape(shape, 61, **fields)
    params, (tokens, mask) = random_params(model), padded_rows([20, 22], [4, 0], 24)
    run = jax.jit(forward, static_argnums=0)
    expected = run(model, params, tokens, mask, dropout_key=key)
    with_kernel = dataclasses.replace(model, attn_implementation=kernel)
    assert distance(run(with_kernel, params, tokens, mask, dropout_key=key), expected) < 1e-5


def test_cudnn_gets_a_mask_only_for_segments_the_last_columns_and_windows_after_a_prefix(on_cpu, monkeypatch):
    masks, forward = [], cudnn.forward

    def record(form, query, part):
        assert (part.keep is None) != (part.lengths is None)
        masks.append(part.keep is not None)
        return forward(form, query, part)

    monkeypatch.setattr(cudnn, "forward", record)
    tokens, mask = padded_rows([20, 22], [4, 0], 24)

    def masked(shape, *rows, fields=None, **options):
        model = dataclasses.replace(custom_shape(shape, 61, **(fields or {})), attn_implementation="cudnn")
        params = jax.eval_shape(model.init, jax.random.key(0))
        masks.clear()
        run = model.hidden_after_prompts if rows else model.hidden
        jax.eval_shape(lambda params: run(params, tokens, mask, *rows, **options), params)
        return set(masks)

    assert masked("llama:2x64x4x2") == {False}
    assert masked("gemma3_text:2x64x4x2", fields={"layer_types": TWO_KINDS}) == {False}
    assert masked("llama:2x64x4x2", last=5) == {False, True}
    assert masked("llama:2x64x4x2", segment_ids=jnp.zeros_like(tokens)) == {True}
    responses = (jnp.ones((4, 8), jnp.int32), jnp.ones((4, 8), bool))
    assert masked("llama:2x64x4x2", *responses) == {False, True}  # the last layer reads the last column of prompts


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


def gradients(kernel, model, rows, length, group=0, dtype=jnp.bfloat16, **options):
    """The program of attention and its gradient, and the shapes of its arguments; after a prefix of `group`
    rows each if that is not 0."""
    config = model.family.decoder_config(model.config)
    context = Context(config, dtype, model.layout, attn_implementation=kernel)

    def program(arrays, masks):
        def attend(query, *pairs):
            keys, *prefix = (Keys(*pair, mask) for pair, mask in zip(pairs, masks, strict=True))
            return attention_kernels.row_attention(context, query, keys, prefix=(prefix or [None])[0], **options)

        out, pull = jax.vjp(attend, *arrays)
        return out, pull(out)

    def shape(rows, columns, heads):
        return jax.ShapeDtypeStruct((rows, columns, heads, config.head_dim), dtype)

    sets = [(rows, length), *([(rows // group, 96)] if group else [])]
    pairs = [(shape(*size, context.held_heads),) * 2 for size in sets]
    masks = [jax.ShapeDtypeStruct(size, jnp.bool_) for size in sets]
    return jax.jit(program), ([shape(rows, length, config.num_attention_heads), *pairs], masks)


@pytest.mark.parametrize("size", [64, 80, 128])
def test_splash_has_a_lowering_for_tpus(size):
    program, shapes = gradients("splash", custom_shape(f"llama:1x{4 * size}x4x2", 64), 2, 165)
    text = program.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    for kernel in ("splash_mha_fwd_segmented_residuals", "splash_mha_dq_segmented", "splash_mha_dkv_segmented"):
        assert kernel in text


def described_gpus(name):
    """Devices, where the machine can compile for them."""
    pytest.importorskip("jax_cuda13_plugin")
    if importlib.util.find_spec("nvidia.cudnn") is None:
        pytest.skip("pip install nvidia-cudnn-cu13")
    try:
        return topologies.topology_devices(name)
    except UserError as error:
        pytest.skip(str(error))


def compiled_text(kernel, sizes, shape, **options):
    """The program of `gradients`, compiled for the H100s of a mesh."""
    devices = described_gpus(f"h100:{sizes[0] ** 3}")
    model = custom_shape(shape, 64).on(sharding.make_mesh(*sizes, devices=devices))
    config = model.family.decoder_config(model.config)
    assert attention_kernels.unsupported(kernel, config, "bfloat16", devices[0]) is None
    program, arguments = gradients(kernel, model, 16, 165, **options)
    split = sharding.batch_sharding(model.layout.mesh)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), arguments)
    return program.trace(*arguments).lower().compile(compiler_options=topologies.compiler_options(devices[0])).as_text()


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "sizes, shape, options, kernels",
    [
        ((1, 1, 1), "llama:1x256x4x2", {}, ["ScaleBiasSoftmax"]),
        ((2, 2, 2), "llama:1x256x4x2", {}, ["ScaleBiasSoftmax"]),
        ((1, 1, 1), "llama:1x256x4x2", {"start_at_0": True, "dtype": jnp.float16}, ["Softmax"]),
        ((1, 1, 1), "1x512x2", {"start_at_0": True}, ["Softmax"]),  # heads of 256
        ((2, 2, 2), "llama:1x256x4x2", {"start_at_0": True, "window": 33}, ["Softmax"]),
        ((2, 2, 2), "llama:1x256x4x2", {"start_at_0": True, "group": 2}, ["Softmax", "Softmax"]),
        ((1, 1, 1), "llama:1x256x4x2", {"group": 4, "window": 33}, ["ScaleBiasSoftmax", "ScaleBiasSoftmax"]),
    ],
    ids=str,
)
def test_cudnn_compiles_for_gpus_with_odd_lengths_and_on_meshes(sizes, shape, options, kernels):
    text = compiled_text("cudnn", sizes, shape, **options)
    calls = re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text)
    assert sorted(calls) == sorted([*kernels, *(f"{kernel}Backward" for kernel in kernels)])


@pytest.fixture
def with_tokamax():
    """The library relies on NumPy's promotion of ranks, which these tests forbid elsewhere."""
    pytest.importorskip("tokamax")
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "shape, options, traced",
    [
        ((37, 37, 4, 2, 64), {"softcap": 5.0}, False),
        ((21, 165, 2, 2, 64), {"window": 50, "segments": True}, False),
        ((150, 150, 2, 1, 16), {"start_at_0": True, "window": 33, "softcap": 5.0}, True),
    ],
    ids=str,
)
def test_arguments_of_tokamax_are_blocked_attention_in_value_and_gradient(shape, options, traced, with_tokamax):
    def kernel(query, keys, prefix, window, ids, score):
        window = jnp.asarray(window) if traced else window
        return tokamax(score, query, keys, prefix, ids, window, start_at_0=options.get("start_at_0", False))

    assert_equal_to_blocked(kernel, *shape, **options)


@pytest.mark.gpu_aot
def test_a_model_with_soft_caps_and_two_windows_is_the_same_with_tokamax(on_cpu, with_tokamax):
    assert_the_same_with("tokamax", "gemma2:2x64x4x2", {"sliding_window": 7, "layer_types": TWO_KINDS})


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "sizes, shape, options",
    [
        ((1, 1, 1), "gemma2:1x256x4x2", {"start_at_0": True, "window": 33}),
        ((2, 2, 2), "llama:1x512x4x2", {}),
        ((1, 1, 1), "1x512x2", {"start_at_0": True}),  # heads of 256
    ],
    ids=str,
)
def test_tokamaxs_kernel_and_its_gradient_compile_for_hopper(sizes, shape, options, with_tokamax):
    text = compiled_text("tokamax", sizes, shape, **options)
    assert len(re.findall(r'custom_call_target="mosaic_gpu\w*"', text)) == 3  # forward, of queries, of keys and values


@pytest.mark.gpu_aot
def test_tokamaxs_kernel_is_for_hopper(with_tokamax):
    reason = attention_kernels.unsupported("tokamax", decoder_config(), "bfloat16", Device("gpu", "8.0"))
    assert "compute capability 9" in reason


@pytest.mark.gpu_aot
@pytest.mark.parametrize("masked", [False, True])
def test_cudnns_calls_are_those_of_jaxs_function(masked):
    described_gpus("h100:1")
    rows, columns = 2, 64
    query, key = (jax.ShapeDtypeStruct((rows, columns, heads, 64), jnp.bfloat16) for heads in (4, 2))
    keep, count = jnp.ones((rows, 1, columns, columns), bool), jnp.full(rows, 9, jnp.int32)
    form = cudnn.Form(0.25, causal=True, window=None if masked else 16)

    def ours(query, key, value):
        lengths = None if masked else cudnn.Lengths(count, count)
        part = cudnn.Part(key, value, keep if masked else None, lengths)
        return cudnn.backward(form, query, part, *cudnn.forward(form, query, part), query)

    def of_jax(query, key, value):
        options = {"query_seq_lengths": count, "key_value_seq_lengths": count, "local_window_size": (15, 0)}
        options = {"mask": keep} if masked else options
        out, pull = jax.vjp(
            lambda *qkv: jax.nn.dot_product_attention(
                *qkv, scale=0.25, is_causal=True, implementation="cudnn", **options
            ),
            *(query, key, value),
        )
        return pull(query)

    def configs(function):
        text = jax.jit(function).trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r"@__cudnn\$fmha\w+.*backend_config = (\S.*?)\}\}", text)

    assert len(configs(ours)) == 2 and configs(ours) == configs(of_jax)


if __name__ == "__main__":
    use_kernels_on_cpu()
    cases = [(shape, rows, "splash") for shape in SHAPES for rows in (8, 3)] + [("llama:2x64x4x2", 8, "cudnn")]
    print(json.dumps({str(case): on_mesh(case[0], SHAPES[case[0]], *case[1:]) for case in cases}))


@pytest.mark.parametrize(
    "device, options, used",
    [
        (Device("gpu", "9.0"), {}, "cudnn"),
        (Device("gpu", "8.0"), {}, "cudnn"),
        (Device("gpu", "8.6"), {}, "blocked"),
        (Device("gpu", "10.0"), {}, "blocked"),
        (Device("cpu"), {}, "blocked"),
        (Device("tpu"), {}, "blocked"),
        (Device("gpu", "9.0"), {"dtype": "float16"}, "cudnn"),
        (Device("gpu", "9.0"), {"dtype": "float32"}, "blocked"),
        (Device("gpu", "9.0"), {"attention_softcap": 50.0}, "blocked"),
        (Device("gpu", "9.0"), {"attention_dropout": 0.1, "dropout": True}, "blocked"),
    ],
)
def test_auto_is_cudnn_on_an_a100_and_hopper_where_it_computes_the_models_attention(monkeypatch, device, options, used):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(cudnn.kernels, "check_cudnn_version", lambda: None)
    options = {"dtype": "bfloat16", "dropout": False, **options}
    dtype, dropout = options.pop("dtype"), options.pop("dropout")
    config = dataclasses.replace(decoder_config(), **options)
    assert attention_kernels.resolved("auto", config, dtype, device, dropout=dropout) == used
    assert attention_kernels.resolved("splash", config, dtype, device, dropout=dropout) == "splash"


def test_deterministic_kernels_are_not_cudnns(monkeypatch):
    monkeypatch.setattr(cudnn.kernels, "check_cudnn_version", lambda: None)
    monkeypatch.setenv("XLA_FLAGS", "")
    xla_flags.add(xla_flags.DETERMINISTIC)
    config, hopper = decoder_config(), Device("gpu", "9.0")
    assert attention_kernels.resolved("auto", config, "bfloat16", hopper, dropout=False) == "blocked"
    assert "--deterministic" in attention_kernels.unsupported("cudnn", config, "bfloat16", hopper)

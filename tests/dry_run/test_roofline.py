"""dry_run/roofline.py: seconds by hand, and where none are predicted."""

import types

import jax
import pytest

from rlhf_jax.config import PPOConfig
from rlhf_jax.dry_run import report, roofline, topologies
from rlhf_jax.dry_run.compiling import Program
from rlhf_jax.parallel import peaks

CONFIG = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'


def call(name, m, k, n, op):
    """A product [m, k] x [k, n] by cuBLAS, as XLA writes it."""
    return [
        f"  %x{name} = bf16[{m},{k}]{{1,0}} parameter(0)",
        f"  %y{name} = bf16[{k},{n}]{{1,0}} parameter(1)",
        f'  %{name} = bf16[{m},{n}]{{1,0}} custom-call(%x{name}, %y{name}), custom_call_target="__cublas$gemm", '
        f'backend_config={CONFIG}, metadata={{op_name="{op}"}}',
    ]


TEXT = "\n".join(
    [
        "HloModule jit_f",
        "",
        "ENTRY %main () -> bf16[8,16] {",
        *call("large", 4096, 4096, 4096, "jit(f)/Block/mlp/dot_general"),
        *call("thin", 8, 4096, 4096, "jit(f)/Block/attention/dot_general"),
        *call("tiny", 8, 8, 8, "jit(f)/dot_general"),
        "}",
    ]
)
RATES = roofline.Rates(100e12, 10e12, ((1.0, 1e12),), roofline.LAUNCH)


def test_an_instruction_takes_its_products_or_its_bytes_or_a_launch():
    found = roofline.predict(TEXT, RATES, 1)
    large, thin, tiny = 2 * 4096**3, 2 * 8 * 4096**2, 2 * 8**3
    assert found.flops == large + thin + tiny
    assert found.parts["mlp"] == pytest.approx(large / 100e12)
    assert found.parts["attention"] == pytest.approx(2 * (4096**2 + 2 * 8 * 4096) / 1e12)  # bound by memory
    assert found.parts["other"] == roofline.LAUNCH and not {"norms", "logits"} & {*found.parts}
    assert found.seconds == pytest.approx(sum(found.parts.values()))


@pytest.mark.parametrize(
    ("op_name", "part"),
    [
        ("jit(update)/while/body/checkpoint/Block/post_attention_layernorm/reduce_sum", "norms"),
        ("jit(update)/while/body/Block/mlp/dense_h_to_4h/convert_element_type", "casts"),
        ("jit(update)/while/body/Block/attention/query_key_value/...d,df->...f/dot_general", "attention"),
        ("jit(update)/while/body/logits/...d,df->...f/dot_general", "logits"),
        ("jit(update)/while/body/optimizer/sub", "optimizer"),
        ("jit(update)/while/body/transpose(jvp(jit(_take)))/scatter-add", "gathers"),
        ("jit(update)/while/body/jvp()/while/body/dynamic_update_slice", "copies"),
        ("", "copies"),
        ("jit(update)/while/body/reduce_sum", "other"),
    ],
)
def test_parts_are_told_by_the_name_of_the_operation(op_name, part):
    assert roofline.group(op_name) == part


def test_cudnns_attention_has_a_rate_of_its_own():
    config = '"intermediate_tensor_shape": {"dimensions": ["1", "1", "4096", "4096"]}, "mask_type": "CAUSAL"'
    text = "\n".join(
        [
            "HloModule jit_f",
            "",
            "ENTRY %main () -> bf16[1,1,4096,64] {",
            "  %q = bf16[1,4096,1,64]{3,2,1,0} parameter(0)",
            '  ROOT %out = bf16[1,1,4096,64]{3,1,2,0} custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax", '
            f"backend_config={{{config}}}",
            "}",
        ]
    )
    found = roofline.predict(text, RATES, 1)
    assert found.flops == 2 * 4096**2 * 64  # half of the pairs, two products
    assert found.seconds == pytest.approx(found.flops / 10e12)


def described(kind="NVIDIA H100 80GB HBM3", platform="gpu"):
    return types.SimpleNamespace(device_kind=kind, platform=platform)


def test_rates_are_the_shares_that_an_h100_reached():
    found = roofline.rates(described(), "bfloat16")
    assert (found.flops, found.attention, found.launch) == pytest.approx((879e12, 72e12, roofline.LAUNCH))
    assert found.moving(2.9e12) == pytest.approx(1.0) and found.moving(2.9) == pytest.approx(1e-12)
    assert all(roofline.rates(described(gpu.kind), "float32") for gpu in topologies.GPUS.values())


def test_tpus_are_taken_to_reach_the_same_shares_without_launches():
    tpu = described("TPU v5 lite", "tpu")
    tpu.client = types.SimpleNamespace(runtime_type="compile_only_runtime")
    found = roofline.rates(tpu, "bfloat16")
    assert (found.flops, 1e12 / found.moving(1e12)) == pytest.approx((197e12 * 879 / 989, 0.819e12 * 2.9 / 3.35))
    assert found.launch == 0
    tpu.device_kind = "TPU v4"  # whose rates are not in the table
    assert roofline.rates(tpu, "bfloat16") is None


def test_a_cpu_is_predicted_with_what_was_measured_on_it():
    found, device = roofline.rates(jax.devices()[0], "float32"), jax.devices()[0]
    assert found.flops == found.attention == peaks.peak(device, "float32").flops and found.launch == 0
    assert found.bandwidth == peaks.rates_by_size(device)
    assert all(1e7 < rate < 1e13 for _, rate in found.bandwidth)


def test_a_gpu_without_published_rates_and_a_tpu_of_this_machine_are_not_predicted():
    assert roofline.rates(described("a GPU that no table has"), "bfloat16") is None
    tpu = described("TPU v5 lite", "tpu")
    tpu.client = types.SimpleNamespace(runtime_type="tpu")
    assert roofline.rates(tpu, "bfloat16") is None


def test_small_copies_go_at_the_rate_of_caches():
    rates = roofline.Rates(1e12, 1e12, ((2.0**20, 40e9), (2.0**22, 20e9)), 0.0)
    assert rates.moving(2.0**10) == pytest.approx(2.0**10 / 40e9)
    assert rates.moving(2.0**21) == pytest.approx(2.0**21 / 30e9)  # halfway in the logarithm
    assert rates.moving(2.0**30) == pytest.approx(2.0**30 / 20e9)


def on_one(device):
    return types.SimpleNamespace(devices=types.SimpleNamespace(flat=[device]), size=1)


def program(name, text=TEXT, refused=""):
    return Program(name, 1.0, 0, 0, 0, 0, 0, refused, dumped_text=text)


def test_a_dry_run_prints_seconds_shares_and_parts():
    config = PPOConfig(dtype="bfloat16")
    programs = [program("generate"), program("update")]
    head, _, line, total, most = report.time_lines(programs, on_one(described()), config)
    assert "shares are of 989 TFLOP/s" in head and "communication" not in head
    assert line.split(";")[1] == " mlp 91%, attention 7%, other 2%"
    seconds = roofline.predict(TEXT, roofline.rates(described(), "bfloat16"), 1).seconds
    assert f" {seconds:.3g} s, " in line and f" {2 * seconds:.3g} s an update, " in total
    assert most == "  most time: generate, bound by products 91%, memory 7%, launches 2%"
    refused = [program("generate", refused="no"), program("update")]
    assert len(report.time_lines(refused, on_one(described()), config)) == 3  # no sum without a part of it


THIN = "\n".join(
    ["HloModule jit_f", "", "ENTRY %main () -> bf16[8,16] {", *call("thin", 8, 4096, 4096, "attention/dot"), "}"]
)
TINY = "\n".join(["HloModule jit_f", "", "ENTRY %main () -> bf16[8,16] {", *call("tiny", 8, 8, 8, "dot"), "}"])


@pytest.mark.parametrize(
    ("name", "text", "options", "given"),
    [
        ("update", TEXT, {}, None),
        ("update", THIN, {}, "gradient_checkpointing with gradient_checkpointing_policy dots"),
        ("update", THIN, {"gradient_checkpointing": True}, None),
        (
            "update",
            THIN,
            {"gradient_checkpointing": True, "attn_implementation": "blocked"},
            "attn_implementation cudnn, where cuDNN supports the model",
        ),
        ("update", TINY, {}, "a larger micro_batch_size"),
        ("generate", THIN, {"batch_size": 64, "rollout_batch_size": 64}, "kv_cache_dtype int8"),
        (
            "generate",
            THIN,
            {"batch_size": 64, "rollout_batch_size": 32, "kv_cache_dtype": "int8"},
            "a larger rollout_batch_size",
        ),
    ],
)
def test_a_dry_run_names_the_options_that_change_what_takes_most_time(name, text, options, given):
    config = PPOConfig(dtype="bfloat16", **options)
    *_, line = report.time_lines([program(name, text)], on_one(described()), config)
    assert line.partition("options that change it: ")[2] == (given or "")

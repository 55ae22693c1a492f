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
RATES = peaks.Peak(100e12, 1e12, "published")


def test_an_instruction_takes_its_products_or_its_bytes_or_a_launch():
    found = roofline.predict(TEXT, RATES, 1)
    large, thin, tiny = 2 * 4096**3, 2 * 8 * 4096**2, 2 * 8**3
    assert found.flops == large + thin + tiny
    assert found.parts["mlp"] == pytest.approx(large / 100e12)
    assert found.parts["attention"] == pytest.approx(2 * (4096**2 + 2 * 8 * 4096) / 1e12)  # bound by memory
    assert found.parts["other"] == roofline.LAUNCH and found.parts["norms"] == 0
    assert found.seconds == pytest.approx(sum(found.parts.values()))


def described(kind="NVIDIA H100 80GB HBM3", platform="gpu"):
    return types.SimpleNamespace(device_kind=kind, platform=platform, addressable_memories=list)


def test_rates_are_the_shares_that_an_h100_reached():
    found = roofline.rates(described(), "bfloat16")
    assert found.flops == pytest.approx(879e12) and found.bandwidth == pytest.approx(2.9e12)
    assert all(roofline.rates(described(gpu.kind), "float32") for gpu in topologies.GPUS.values())


@pytest.mark.parametrize("device", [jax.devices()[0], described("TPU v5 lite", "tpu")], ids=["cpu", "tpu"])
def test_other_devices_are_not_predicted(device):
    assert roofline.rates(device, "bfloat16") is None


def test_a_dry_run_prints_seconds_shares_and_parts():
    mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[described()]), size=1)
    programs = [Program("update", 1.0, 0, 0, 0, 0, 0, dumped_text=TEXT), Program("generate", 1.0, 0, 0, 0, 0, 0, "no")]
    head, line = report.time_lines(programs, mesh, PPOConfig(dtype="bfloat16"))
    assert "shares are of 989 TFLOP/s" in head and "communication" not in head
    assert line.split(";")[1] == " mlp 91%, attention 7%, other 2%, norms 0%"
    seconds = roofline.predict(TEXT, roofline.rates(described(), "bfloat16"), 1).seconds
    assert f" {seconds:.3g} s, " in line

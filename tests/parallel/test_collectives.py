"""What the update and the decode step send between eight devices, read from the compiled programs, against what each
layout needs. Nothing is run."""

import json

import pytest

from tests.helpers.children import child, last_line
from tests.helpers.collectives import (
    COLUMNS,
    LAYERS,
    MESHES,
    MICRO,
    ROWS,
    WIDTH,
    T,
    compiled,
    decode_needs,
    name_of,
    update_needs,
)

pytestmark = pytest.mark.processes

ADAPTERS = {"use_peft": True, "lora_target_modules": ("all-linear",), "lora_value": "shared"}


@pytest.fixture(scope="module")
def found():
    return last_line(child("tests.parallel.test_collectives", devices=8, optimized=True))


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_an_update_sends_what_its_layout_needs(found, mesh):
    sent = found[name_of(mesh)]["update"]["sent"]
    assert 0.98 < sent / update_needs(*mesh) < 1.02


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_a_decode_step_sends_activations_and_never_weights(found, mesh):
    program, needs = found[name_of(mesh)]["generate"], decode_needs(*mesh)
    assert program["gathers"] == 0
    # A flag, whether all rows have ended, and the drawn tokens come on top.
    assert needs <= program["step"] < 1.2 * needs + 4 * ROWS + 16


def test_under_fsdp_training_makes_no_array_larger_than_a_layer_or_the_activations_of_its_own_rows(found):
    rows = MICRO // 8
    kept = 4 * LAYERS * rows * (COLUMNS + T) * 4 * WIDTH  # the hidden units of all layers, which no remat makes again
    gathered_kernel = 4 * 4 * WIDTH**2
    assert found["1x8x1"]["update"]["largest"] == max(kept, gathered_kernel)
    whole = 4 * LAYERS * 4 * WIDTH**2  # the stacked kernel that a mistake would gather
    assert found["1x8x1"]["update"]["largest"] < whole


@pytest.mark.parametrize(("kind", "dtype", "packed"), [("int8", "s8", 1), ("nf4", "u8", 2)])
def test_kernels_of_a_quantized_base_are_sent_as_they_are_stored(found, kind, dtype, packed):
    shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    kernels = {f"{rows // packed},{columns}" for rows, columns in shapes}
    every = kernels | {f"{rows},{columns}" for rows, columns in shapes}
    for program, of_scan in (("update", "1,"), ("generate", "")):  # a turn of the scan over layers has one
        sent = found[kind][program]["gathered"]
        assert {f"{dtype}[{of_scan}{kernel}]" for kernel in kernels} <= set(sent)
        wide = [shape for shape in sent if any(shape.endswith(f",{kernel}]") for kernel in every)]
        assert not [shape for shape in wide if not shape.startswith(dtype)]


if __name__ == "__main__":
    everywhere = {name_of(mesh): compiled(mesh) for mesh in MESHES}
    for kind, option in (("int8", "load_in_8bit"), ("nf4", "load_in_4bit")):
        everywhere[kind] = compiled((1, 8, 1), **ADAPTERS, **{option: True})
    print(json.dumps(everywhere))

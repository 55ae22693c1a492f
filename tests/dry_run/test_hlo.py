"""Reading XLA's text of a compiled program: collectives, loops, bytes."""

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.dry_run import hlo

LOOP = """HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[64]{0}}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %all-reduce.1 = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%sum
  ROOT %out = (s32[], f32[8]) tuple(%i, %all-reduce.1)
}

%condition (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: f32[8]) -> f32[64] {
  %x.1 = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]) tuple(%zero, %x.1)
  %while.1 = (s32[], f32[8]) while(%start), condition=%condition, body=%body
  %last = f32[8]{0} get-tuple-element(%while.1), index=1
  ROOT %all-gather.1 = f32[64]{0} all-gather(%last), channel_id=2, GROUPS, dimensions={0}, metadata={op_name="gather"}
}
"""
MESH = "replica_groups=mesh['a'=2,'b'=4] {'a','b'}"
PERMUTED = "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}"


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2,3,4,5,6,7}}", 8),
        ("replica_groups=[1,8]<=[8]", 8),
        (MESH, 8),
        (PERMUTED, 4),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", 2),
    ],
)
def test_groups_are_read_however_they_are_written(groups, size):
    gather = hlo.collectives(LOOP.replace("GROUPS", groups))[-1]
    assert (gather.kind, gather.group, gather.op) == ("all-gather", size, "gather")
    assert gather.sent == 64 * 4 * (size - 1) / size


def test_a_loop_counts_as_often_as_it_turns():
    reduce, gather = hlo.collectives(LOOP.replace("GROUPS", MESH))
    assert (reduce.times, gather.times) == (5, 1)
    # A ring sends (n - 1) / n of the array twice.
    assert reduce.sent == 2 * 8 * 4 * 3 / 4
    assert gather.sent == 224.0


def test_a_loop_without_a_known_end_counts_as_often_as_one_says():
    endless = LOOP.replace("GROUPS", MESH).replace("direction=LT", "direction=NE")
    assert [c.times for c in hlo.collectives(endless, unknown_trips=7)] == [7, 1]


def test_a_collective_that_runs_through_several_fusions_counts_once():
    text = LOOP.replace("GROUPS", MESH)
    twice = text.replace(
        "  ROOT %all-gather.1",
        "  %all-gather.0 = f32[64]{0} all-gather(%last), channel_id=2, " + MESH + "\n  ROOT %all-gather.1",
    )
    assert len(hlo.collectives(twice)) == len(hlo.collectives(text)) == 2


def test_a_sum_of_which_a_fusion_keeps_a_share_is_a_reduce_scatter():
    text = """HloModule jit_update

%all-reduce-scatter.1 (input: f32[2048,64]) -> f32[256,64] {
  %input = f32[2048,64] parameter(0)
  %all-reduce.1 = f32[2048,64] all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %dynamic-slice.1 = f32[256,64] dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={256,64}
}

ENTRY %main (x: f32[2048,64]) -> f32[256,64] {
  %x = f32[2048,64] parameter(0)
  ROOT %fusion.1 = f32[256,64] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    (found,) = hlo.collectives(text)
    assert found.kind == "reduce-scatter" and found.sent == 7 / 8 * 4 * 2048 * 64


def test_bytes_of_tuples_are_summed_and_fast_memory_left_out():
    shape = "(f32[4,8]{1,0:T(8,128)}, bf16[16]{0:T(128)S(1)}, pred[])"
    assert hlo.shape_bytes(shape) == 4 * 8 * 4 + 16 * 2 + 1
    assert hlo.shape_bytes(shape, in_memory=True) == 4 * 8 * 4 + 1


def test_a_compiled_product_moves_its_operands_and_its_result():
    x, y = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (32, 16)))
    text = jax.jit(lambda x, y: x @ y).lower(x, y).compile().as_text()
    moved = 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert moved <= hlo.traffic(text) <= 2 * moved
    assert hlo.largest_array(text)[0] <= 4 * 64 * 32


def test_a_loop_that_cuts_a_stack_moves_its_slices_not_the_stack_each_time():
    stack = jax.ShapeDtypeStruct((16, 64, 64), jnp.float32)
    text = jax.jit(lambda x: jax.lax.scan(lambda c, w: (jnp.sin(c @ w), None), jnp.ones((64, 64)), x)[0])
    text = text.lower(stack).compile().as_text()
    assert hlo.traffic(text) < 16 * 64 * 64 * 4 * 12


def test_costs_of_a_loop_are_its_products_as_often_as_it_turns():
    stack = jax.ShapeDtypeStruct((16, 64, 32), jnp.float32)
    text = jax.jit(lambda x: jax.lax.scan(lambda c, w: (c @ w @ w.T, None), jnp.ones((8, 64)), x)[0])
    costs = hlo.costs(text.lower(stack).compile().as_text())
    assert sum(cost.times * cost.flops for cost in costs) == 16 * 2 * (2 * 8 * 64 * 32)
    assert hlo.traffic(text.lower(stack).compile().as_text()) == sum(cost.times * cost.bytes for cost in costs)
    assert any("dot_general" in cost.op for cost in costs if cost.flops)


def test_costs_of_a_switch_are_those_of_the_branch_that_computes_most():
    def one_of(index, x):
        return jax.lax.switch(index, [lambda x: x[:2] @ x, lambda x: (x @ x)[:2], lambda x: x[:2]], x)

    shapes = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    text = jax.jit(one_of).lower(*shapes).compile().as_text()
    assert "conditional" in text
    assert sum(cost.flops for cost in hlo.costs(text)) == 2 * 16**3


def test_products_of_cublas_are_counted_by_their_configuration():
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    call = f'custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", backend_config={config}'
    lines = [
        "HloModule jit_f",
        "",
        "ENTRY %main (x: bf16[8,32], y: bf16[32,16]) -> bf16[8,16] {",
        "  %x = bf16[8,32]{1,0} parameter(0)",
        "  %y = bf16[32,16]{1,0} parameter(1)",
        "  %out = (bf16[8,16]{1,0}, s8[4096]{0}) " + call + ', metadata={op_name="jit(f)/dot_general"}',
        "  ROOT %get = bf16[8,16]{1,0} get-tuple-element(%out), index=0",
        "}",
    ]
    [cost] = hlo.costs("\n".join(lines))
    assert (cost.op, cost.times, cost.flops) == ("jit(f)/dot_general", 1, 2 * 8 * 32 * 16)
    assert cost.bytes == 2 * (8 * 32 + 32 * 16 + 8 * 16) + 4096


@pytest.mark.parametrize(
    ("target", "queries", "mask", "products"),
    [("", 16, "CAUSAL", 2 / 2), ("", 8, "NO_MASK", 2), ("Backward", 16, "CAUSAL", 5 / 2)],
)
def test_products_of_cudnns_attention_are_counted_by_its_scores(target, queries, mask, products):
    scores = f'"intermediate_tensor_shape": {{"element_type": "BF16", "dimensions": ["2", "4", "{queries}", "16"]}}'
    config = f'{{"cudnn_fmha_backend_config": {{{scores}, "mask_type": "{mask}"}}}}'
    call = f'custom-call(%q, %k), custom_call_target="__cudnn$fmhaSoftmax{target}", backend_config={config}'
    lines = [
        "HloModule jit_f",
        "",
        "ENTRY %main () -> bf16[2,4,8,32] {",
        f"  %q = bf16[2,{queries},4,32]{{3,2,1,0}} parameter(0)",
        "  %k = bf16[2,16,4,32]{3,2,1,0} parameter(1)",
        f"  ROOT %out = bf16[2,4,{queries},32]{{3,1,2,0}} {call}",
        "}",
    ]
    [cost] = hlo.costs("\n".join(lines))
    assert cost.cudnn_attention
    assert cost.flops == products * 2 * (2 * 4 * queries * 16 * 32)


@pytest.mark.parametrize(
    ("left", "right", "result", "window", "labels", "products"),
    [
        ("bf16[64,8]", "bf16[64,16]", "f32[8,16]", "", "fb_io->bf", 64 * 8 * 16),
        ("bf16[4,256,32]", "bf16[32,24,1]", "bf16[4,256,24]", "size=1", "0bf_io0->0bf", 4 * 256 * 32 * 24),
        # A batch of products, as a dilated convolution: of the window's entries one meets an entry each.
        (
            "bf16[4,2,32,16]",
            "bf16[4,2,32,64]",
            "f32[4,2,16,64]",
            "size=4x2 stride=3x1 lhs_dilate=4x2",
            "01fb_01io->01bf",
            8 * 32 * 16 * 64,
        ),
        (
            "bf16[4,16,32]",
            "bf16[4,8,32]",
            "f32[4,16,8]",
            "size=4 stride=4 pad=3_3 lhs_dilate=3 rhs_reversal=1",
            "0bf_0oi->0bf",
            4 * 16 * 32 * 8,
        ),
        # A sum over the window, and one that is padded.
        ("bf16[2,3,8]", "bf16[3,8,5]", "bf16[2,1,5]", "size=3", "b0f_0io->b0f", 2 * 3 * 8 * 5),
        ("bf16[2,3,8]", "bf16[3,8,5]", "bf16[2,3,5]", "size=3 pad=1_1", "b0f_0io->b0f", 2 * 7 * 8 * 5),
    ],
)
def test_products_of_tpus_are_counted_by_their_convolution(left, right, result, window, labels, products):
    lines = [
        "HloModule jit_f",
        "",
        f"ENTRY %main () -> {result} {{",
        f"  %x = {left} parameter(0)",
        f"  %y = {right} parameter(1)",
        f"  ROOT %out = {result} convolution(%x, %y), window={{{window}}}, dim_labels={labels}",
        "}",
    ]
    [cost] = hlo.costs("\n".join(lines))
    assert cost.flops == 2 * products

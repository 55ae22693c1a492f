"""The compiled decode loop updates its cache in place: no step copies a segment of it, on CPUs, TPUs and GPUs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.dry_run import topologies
from rlhf_jax.generate import Decoding, Sampling, generate
from rlhf_jax.generate.guided import Automaton, Guide
from rlhf_jax.models import custom_shape, decoder
from rlhf_jax.parallel import sharding
from rlhf_jax.types import PartialResponses, PromptBatch
from tests.helpers.cache_copies import made_in_loops

PROMPTS, GROUP, CONTEXT, TOKENS = 4, 4, 24, 4000
ROWS = PROMPTS * GROUP
OPTIONS = {
    "plain": Decoding(),
    "slots": Decoding(slots=ROWS // 2, shrink=True),
    "drafts": Decoding(draft="ngram", draft_tokens=3),
    "guided": Decoding(slots=ROWS // 2, shrink=True),
    "begun": Decoding(slots=ROWS // 2, shrink=True),  # turns after the first
}


def options_of(name, prompts):
    """Of OPTIONS, with slots for half of the rows."""
    decoding = OPTIONS[name]
    return dataclasses.replace(decoding, slots=decoding.slots and prompts * GROUP // 2)


def tables(rows):
    """Of 64 states and 32 classes, and where each row starts."""
    sizes = (64, 32), (96,), (64,)
    return Automaton(*(jnp.zeros(size, jnp.int32) for size in sizes)), jnp.zeros(rows, jnp.int32)


def begun(rows):
    """What rows have already."""
    tokens, row = (rows, TOKENS), (rows,)
    return PartialResponses(*(np.zeros(*of) for of in ((tokens, np.int32), (tokens,), (row, np.int32), (row, bool))))


def compiled(spec, decoding, dtype=jnp.float32, devices=None, prompts=PROMPTS, options=None, name="plain"):
    """(HLO text, temporary bytes, most that they may be, numbers of elements of the cache's arrays) of a rollout."""
    mesh = sharding.make_mesh(devices=devices)
    more = {"sliding_window": 750} if spec.startswith("gemma2") else {}
    model = custom_shape(spec, 96, 2 * TOKENS, **more).on(mesh)
    shapes = (
        jax.eval_shape(model.init, jax.random.key(0)),
        PromptBatch(*(np.zeros(shape, np.int32) for shape in ((prompts, CONTEXT), prompts, prompts))),
        jax.eval_shape(lambda: jax.random.key(0)),
        Guide(*jax.eval_shape(lambda: tables(prompts * GROUP))) if name == "guided" else None,
        begun(prompts * GROUP) if name == "begun" else None,
    )
    where = sharding.replicated(mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
    sampling = Sampling(TOKENS, 1.0, stop_ids=(5,))

    def rollout(params, prompts, key, guide, begun):
        options = {"group": GROUP, "decoding": decoding, "dtype": dtype, "guide": guide, "begun": begun}
        return generate(model, params, prompts, key, sampling, **options)

    platform = mesh.devices.flat[0].platform
    lowered = jax.jit(rollout).trace(*shapes).lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))
    program = lowered.compile(options)
    rows = decoding.slots or prompts * GROUP
    sizes, caches = set(), []
    for count in (rows, rows // 2):  # shrinking makes one of half the rows
        more = {"queries": decoding.queries, "block": decoding.block}
        cache = jax.eval_shape(lambda count=count, more=more: model.empty_cache(count, TOKENS, dtype, **more))
        sizes |= {x.size for x in jax.tree.leaves(cache)}
        caches.append([x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)])
    # What is not written in place takes room of its own. Live rows that move have both places for a while.
    most = sum(caches[0]) + max(caches[0]) + (sum(caches[1]) if decoding.shrink else 0)
    return program.as_text(), program.memory_analysis().temp_size_in_bytes, most, sizes


def assert_in_place(name, text, temporary, most, sizes):
    made = made_in_loops(text, sizes)
    if name == "begun":  # keys and values of tokens so far are computed again: arrays as large as a segment, and scores
        made = [line for line in made if re.search(r" copy(-start)?\(", line)]
    assert not made, "\n".join(made)
    assert temporary < most or name == "begun"


# Heads of 48 or 96: no array of scores has as many numbers as a segment.
@pytest.mark.parametrize("spec", ["2x192x4", "gemma2:2x192x4x2"])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_step_copies_a_segment_on_cpus(name, spec):
    assert_in_place(name, *compiled(spec, OPTIONS[name], devices=jax.devices()[:1], name=name))


# On TPUs heads of 128, as smaller ones are padded to it; scores are in fast memory.
@pytest.mark.parametrize(
    "name, spec",
    [("plain", "2x1024x8"), ("slots", "qwen2:2x1024x8x2")]
    + [(name, "2x1024x8") for name in ("drafts", "guided", "begun")],
)
def test_no_step_copies_a_segment_on_v5e(name, spec, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # libtpu refuses those of the CPU
    devices = topologies.topology_devices("v5e:2x2")[:1]
    assert_in_place(name, *compiled(spec, options_of(name, 16), jnp.bfloat16, devices, prompts=16, name=name))


@pytest.mark.gpu_aot
@pytest.mark.parametrize("spec", ["2x768x8", "qwen2:2x768x8x2"])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_step_copies_a_segment_on_h100(name, spec):
    pytest.importorskip("jax_cuda13_plugin")
    (device,) = topologies.topology_devices("h100:1")
    how = {"devices": [device], "prompts": 64, "options": topologies.compiler_options(device)}
    assert_in_place(name, *compiled(spec, options_of(name, 64), jnp.bfloat16, **how, name=name))


# --- the reading itself


def loop_of(step, cache):
    """The text of a compiled loop whose step makes (cache, sum) of (cache, sum, turn)."""

    def loop(cache, count):
        def body(state):
            turn, cache, total = state
            return turn + 1, *step(cache, total, turn)

        return jax.lax.while_loop(lambda state: state[0] < count, body, (jnp.int32(0), cache, jnp.float32(0)))

    return jax.jit(loop, donate_argnums=0).lower(cache, 3).compile().as_text()


def write_then_read(cache, total, turn):
    new = jax.lax.dynamic_update_slice(cache, jnp.full((8, 1, 48), total), (0, turn, 0))
    return new, total + (new * new).sum()


def read_what_was_overwritten(cache, total, turn):
    new, total = write_then_read(cache, total, turn)
    return new, total + jnp.einsum("asd,atd->st", cache, new).sum()


def transpose_each_step(cache, total, turn):
    new, total = write_then_read(cache, total, turn)
    return new, total + jax.lax.optimization_barrier(new.transpose(2, 0, 1)).sum()


def add_to_all(cache, total, turn):
    return cache + 1, total


def test_copies_are_found_and_writes_in_place_are_none():
    cache = jnp.zeros((8, 500, 48))
    assert not made_in_loops(loop_of(write_then_read, cache), {cache.size})
    for step in (read_what_was_overwritten, transpose_each_step, add_to_all):
        made = made_in_loops(loop_of(step, cache), {cache.size})
        assert made and not made_in_loops(loop_of(step, cache), {cache.size + 1}), step.__name__
    assert any("copy" in line for line in made_in_loops(loop_of(read_what_was_overwritten, cache), {cache.size}))


def test_a_rollout_that_reads_a_segment_after_it_was_overwritten_is_found(monkeypatch):
    def read_old_too(query, prefix, own, score):
        query = attend_cached(query, prefix, own, score)
        own = [segment._replace(layer=old) for segment, old in zip(own, overwritten, strict=True)]
        return attend_cached(query, prefix, own, score)

    def remember(segments, *tokens, **options):
        overwritten[:] = segments
        return write(segments, *tokens, **options)

    overwritten = []
    write, attend_cached = decoder.write, decoder.attend_cached
    monkeypatch.setattr(decoder, "write", remember)
    monkeypatch.setattr(decoder, "attend_cached", read_old_too)
    text, _, _, sizes = compiled("2x192x4", Decoding(block=TOKENS), devices=jax.devices()[:1])
    made = made_in_loops(text, sizes)
    assert len([line for line in made if "copy" in line]) >= 4  # keys and values of two layers


def test_arrays_in_the_fast_memory_of_a_tpu_are_not_copies():
    def text(operation):
        return f"""HloModule m

%body (p: (f32[8,500,48])) -> (f32[8,500,48]) {{
  %p = (f32[8,500,48]) parameter(0)
  %x = f32[8,500,48] get-tuple-element(%p), index=0
  {operation}
  ROOT %t = (f32[8,500,48]) tuple(%x)
}}

ENTRY %main (a: (f32[8,500,48])) -> (f32[8,500,48]) {{
  %a = (f32[8,500,48]) parameter(0)
  ROOT %w = (f32[8,500,48]) while(%a), condition=%body, body=%body
}}
"""

    size, kind = {8 * 500 * 48}, "f32[8,500,48]{2,1,0:T(8,128)}"
    fast = kind.replace("}", "S(1)}")
    for operation in (
        f"%y = {fast} copy(%x)",
        f"%y = ({fast}, {kind}, u32[]{{:S(2)}}) copy-start(%x)",
        f"%y = ({kind}, {fast}, u32[]{{:S(2)}}) copy-start(%x)",
    ):
        assert not made_in_loops(text(operation), size)
    for operation in (f"%y = {kind} copy(%x)", f"%y = ({kind}, {kind}, u32[]{{:S(2)}}) copy-start(%x)"):
        assert len(made_in_loops(text(operation), size)) == 1

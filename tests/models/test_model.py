"""How a model decodes on eight devices, read from the compiled program and from its results."""

import json

import jax
import pytest

from rlhf_jax.models import custom_shape
from rlhf_jax.parallel import sharding
from tests.helpers.arrays import distance
from tests.helpers.children import child, last_line
from tests.helpers.models_common import padded_rows, random_params

WIDTH, VOCABULARY, ROWS = 64, 184, 8
MESHES = ((2, 2, 2), (1, 1, 8))
MODEL = custom_shape(f"1x{WIDTH}x8", VOCABULARY)


def next_logits(model, params, hidden):
    return model.next_logits(model.unstack(params), hidden)


def on_mesh(sizes: tuple[int, int, int]) -> dict:
    """Which kernels are in the program of a token's logits, and how far these are from those of one device."""
    mesh = sharding.make_mesh(*sizes)
    model, params = MODEL.on(mesh), random_params(MODEL)
    hidden = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
    placed = sharding.place(params, sharding.shardings(params, model.param_rules, mesh))
    program = jax.jit(next_logits, static_argnums=0).lower(model, placed, sharding.shard_batch(hidden, mesh)).compile()
    logits = sharding.fetch(program(placed, sharding.shard_batch(hidden, mesh)))
    full, split = (
        any(f"f32[{shape}]" in program.as_text() for shape in (f"{WIDTH},{size}", f"{size},{WIDTH}"))
        for size in (VOCABULARY, VOCABULARY // sizes[2])
    )
    return {"full": full, "split": split, "distance": distance(logits, next_logits(MODEL, params, hidden))}


def odd_vocabulary(sizes: tuple[int, int, int]) -> dict:
    """The shard of an embedding whose rows do not divide, and how far its model's logits are from one device's."""
    mesh, model = sharding.make_mesh(*sizes), custom_shape(f"gpt2:1x{WIDTH}x8", VOCABULARY + 1, 16)
    params, (tokens, mask) = random_params(model), padded_rows([16] * ROWS, [0] * ROWS, 16)

    @jax.jit
    def logits(params, tokens, mask):
        return model.on(mesh).logits(params, model.on(mesh).hidden(params, tokens, mask))

    placed = sharding.place(params, sharding.shardings(params, model.on(mesh).param_rules, mesh))
    got = sharding.fetch(logits(placed, *sharding.shard_batch((tokens, mask), mesh)))
    shard = placed["backbone"]["embed_in"]["embedding"].addressable_shards[0].data.shape
    return {"shard": shard, "distance": distance(got, model.logits(params, model.hidden(params, tokens, mask)))}


@pytest.fixture(scope="module")
def found():
    return last_line(child(__name__, devices=8))


@pytest.mark.processes
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_decoding_keeps_the_vocabulary_split_over_tensor(found, sizes):
    outputs = found[str(sizes)]
    assert outputs["split"] and not outputs["full"]
    assert outputs["distance"] < 1e-6


@pytest.mark.processes
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_rows_of_an_embedding_that_do_not_divide_are_not_split(found, sizes):
    outputs = found[str(sizes)]["odd"]
    assert outputs["shard"] == [VOCABULARY + 1, WIDTH // sizes[1]]
    assert outputs["distance"] < 1e-6


if __name__ == "__main__":
    print(json.dumps({str(sizes): {**on_mesh(sizes), "odd": odd_vocabulary(sizes)} for sizes in MESHES}))

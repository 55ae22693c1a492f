"""Decoding on eight (forced host) devices, laid out in every way: the tokens of one device."""

import json

import jax
import numpy as np
import pytest

from tests.helpers import decoding as dec
from tests.helpers.children import child, last_line

MESHES = {"8x1x1": False, "2x2x2": False, "1x1x8": True}
"""And whether the four heads do not divide by `tensor`, which is folded into `fsdp`."""
LIMITS = np.minimum(np.random.default_rng(0).geometric(0.08, dec.ROWS), dec.TOKENS)


def guide_of(expressions):
    """Row i may have texts of expression i modulo their number, of single letters."""
    from rlhf_jax.generate.guided import Guide, token_automaton

    spelled = [None] * 10 + [bytes([97 + i % 26]) for i in range(dec.VOCABULARY - 10)]
    automaton, starts = token_automaton(expressions, spelled, stop_ids=dec.STOPS, most_tokens=1)
    return jax.tree.map(np.asarray, Guide(automaton, starts[np.arange(dec.ROWS) % len(starts)]))


def decoded(mesh: str | None) -> dict:
    """A rollout in refilled slots that shrink, with drafts; one with neither; and one of guided responses."""
    from rlhf_jax.generate import Decoding
    from rlhf_jax.parallel import sharding

    model, params = dec.model_of("gpt_neox")
    prompts, found = dec.prompts_of(0), {}
    if mesh is not None:
        made = sharding.make_mesh(*map(int, mesh.split("x")))
        model = model.on(made)
        assert model.layout.folded == MESHES[mesh]
        prompts = sharding.shard_batch(prompts, made)
    slots = Decoding(block=8, slots=dec.ROWS // 2, shrink=True, draft="ngram", draft_tokens=3)
    for name, decoding in {"plain": Decoding(block=8), "slots": slots, "guided": slots}.items():
        guide = guide_of(["(ab|c){1,9}", None]) if name == "guided" else None
        out, steps = dec.decode(model, params, prompts, decoding, limits=LIMITS, expected=LIMITS, guide=guide)
        kept = {field: getattr(out, field).tolist() for field in ("response", "lengths", "ended", "logprobs")}
        found[name] = {**kept, "steps": steps.steps.tolist()}
    return found


@pytest.fixture(scope="module")
def one():
    return decoded(None)


@pytest.fixture(scope="module")
def many():
    return last_line(child("tests.generate.test_slots_devices", devices=8))


@pytest.mark.parametrize("name", ["plain", "slots", "guided"])
@pytest.mark.parametrize("mesh", MESHES)
def test_rows_do_not_depend_on_the_devices(one, many, mesh, name):
    found, wanted = many[mesh][name], one[name]
    for field in ("response", "lengths", "ended"):
        assert found[field] == wanted[field], field
    dec.assert_close(np.array(found["logprobs"]), np.array(wanted["logprobs"]), 1e-6)


def test_each_shard_of_the_rows_takes_the_steps_of_its_own(one, many):
    lengths = np.array(one["plain"]["lengths"])
    for mesh, shards in {"8x1x1": 8, "2x2x2": 4, "1x1x8": 8}.items():
        longest = lengths.reshape(shards, -1).max(axis=1)
        assert many[mesh]["plain"]["steps"] == (longest - 1).tolist(), mesh
    assert one["plain"]["steps"] == [max(lengths) - 1]


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    print(json.dumps({mesh: decoded(mesh) for mesh in MESHES}))

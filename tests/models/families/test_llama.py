"""Every family's forward pass, gradients, decoding and files equal those of transformers in float32."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.generate import Sampling, generate
from rlhf_jax.models import FAMILIES, Model
from rlhf_jax.models.io import hf
from rlhf_jax.types import PromptBatch
from tests.helpers import families
from tests.helpers.arrays import distance, same_bits
from tests.helpers.models_common import padded_rows, reference_inputs
from tests.helpers.optional import optional

torch = optional("torch")
NAMES = sorted(families.FAMILIES)
LENGTH = 90  # more than a window, and than the original context of scaled rotary embeddings


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(transformers' model, our model, params) of a family, made once."""

    @functools.cache
    def of(family, kind="causal"):
        theirs = families.reference(family, kind)
        folder = tmp_path_factory.mktemp(f"{family}-{kind}")
        theirs.save_pretrained(folder)
        return theirs, *hf.load(folder, kind=kind), folder

    return of


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(model, params, tokens, mask):
    return model.hidden(params, tokens, mask)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens, mask):
    return model.logits(params, model.hidden(params, tokens, mask))


def rows(seed=0):
    return padded_rows([LENGTH, 30, LENGTH - 7], [0, LENGTH - 30, 3], LENGTH, seed)


@pytest.mark.parametrize("family", NAMES)
def test_logits_and_hidden_states_equal_those_of_transformers(family, checkpoints):
    theirs, model, params, _ = checkpoints(family)
    tokens, mask = rows()
    with torch.no_grad():
        out = theirs(**reference_inputs(tokens, mask), output_hidden_states=True)
    assert (
        distance(np.asarray(hidden_of(model, params, tokens, mask))[mask], out.hidden_states[-1].numpy()[mask]) < 1e-5
    )
    assert distance(np.asarray(logits_of(model, params, tokens, mask))[mask], out.logits.numpy()[mask]) < 1e-5


@pytest.mark.parametrize("family", NAMES)
def test_scores_equal_those_of_transformers(family, checkpoints):
    theirs, model, params, _ = checkpoints(family, "scalar")
    tokens, mask = padded_rows([LENGTH, 30], [0, 0], LENGTH)
    with torch.no_grad():
        inputs = reference_inputs(tokens, mask)
        expected = theirs(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].numpy()
    scores = np.asarray(model.scalars(params, hidden_of(model, params, tokens, mask)))
    assert distance(scores[np.arange(2), mask.sum(1) - 1], expected) < 1e-5


@pytest.mark.parametrize("family", NAMES)
def test_gradients_equal_those_of_torch(family, checkpoints, tmp_path):
    theirs, model, params, _ = checkpoints(family)
    tokens, mask = rows(1)
    tokens[0, 5] = families.SIZES["pad_token_id"]  # as an input the row of padding_idx has no gradient
    weights = np.random.default_rng(0).standard_normal((*mask.shape, model.config.vocab_size)).astype(np.float32)
    weights = weights * mask[..., None] / 100
    theirs.zero_grad()
    (theirs(**reference_inputs(tokens, mask)).logits * torch.tensor(weights)).sum().backward()
    gradients = families.reference(family)
    with torch.no_grad():
        by_name = dict(theirs.named_parameters())
        for name, parameter in gradients.named_parameters():
            parameter.copy_(by_name[name].grad)
    gradients.save_pretrained(tmp_path)
    _, expected = hf.load(tmp_path)

    @jax.jit
    def gradient(params):
        return jax.grad(lambda params: jnp.sum(logits_of(model, params, tokens, mask) * weights))(params)

    ours = gradient(params)
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), got in zip(paths, jax.tree.leaves(ours), strict=True):
        assert distance(got, want) < 1e-4, jax.tree_util.keystr(path)


@pytest.mark.parametrize("family", NAMES)
def test_decoding_equals_the_full_forward_at_every_position(family, checkpoints):
    _, model, params, _ = checkpoints(family)
    context, total = 12, 34
    tokens, mask = padded_rows([34, 27], [0, 7], total)
    full = np.asarray(hidden_of(model, params, tokens, mask))
    unstacked = jax.jit(model.unstack)(params)
    hidden, prefix = jax.jit(model.prefill)(unstacked, tokens[:, :context], jnp.asarray(mask[:, :context]))
    assert distance(hidden, full[:, context - 1]) < 1e-5
    cache, decode = model.empty_cache(2, total - context), jax.jit(model.decode)
    for slot in range(context, total):
        positions = jnp.asarray(mask[:, :slot].sum(axis=1))
        index = jnp.int32(slot - context)
        hidden, cache = decode(unstacked, prefix, cache, tokens[:, slot], positions, index)
        assert distance(hidden, full[:, slot]) < 1e-5, slot


@pytest.mark.parametrize("family", NAMES)
def test_prompts_computed_once_for_their_responses_change_nothing(family, checkpoints):
    _, model, params, _ = checkpoints(family)
    tokens, mask = padded_rows([25, 20], [0, 5], 25)
    responses, kept = padded_rows([14, 9, 14, 3], [0, 0, 0, 0], 14, seed=4)
    apart = hidden_of(model, params, np.c_[np.repeat(tokens, 2, 0), responses], np.c_[np.repeat(mask, 2, 0), kept])
    last, together = jax.jit(model.hidden_after_prompts)(params, tokens, mask, responses, kept)
    assert distance(np.asarray(together)[kept], np.asarray(apart)[:, 25:][kept]) < 1e-5
    assert distance(last, np.asarray(apart)[::2, 24]) < 1e-5


@pytest.mark.parametrize("family", NAMES)
def test_padding_on_either_side_changes_nothing(family, checkpoints):
    _, model, params, _ = checkpoints(family)
    tokens, mask = padded_rows([40, 40], [0, 0], 40)
    expected = np.asarray(hidden_of(model, params, tokens, mask))
    for left in (0, 13):
        wide, inside = np.full((2, 53), 7, np.int32), np.zeros((2, 53), bool)
        wide[:, left : left + 40], inside[:, left : left + 40] = tokens, True
        assert distance(np.asarray(hidden_of(model, params, wide, inside))[inside], expected[mask]) < 1e-5


@pytest.mark.parametrize("family", NAMES)
def test_greedy_equals_that_of_transformers(family, checkpoints):
    theirs, model, params, _ = checkpoints(family)
    tokens, mask = padded_rows([20, 14], [0, 6], 20)
    inputs = reference_inputs(tokens, mask)
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    expected = theirs.generate(**given, do_sample=False, min_new_tokens=24, max_new_tokens=24)[:, 20:].numpy()
    prompts = PromptBatch(tokens=tokens, lengths=mask.sum(1).astype(np.int32), rows=np.arange(2))
    sampling = Sampling(max_new_tokens=24, temperature=0.0)
    ours = jax.jit(generate, static_argnums=(0, 4))(model, params, prompts, jax.random.key(0), sampling)
    ended = np.asarray(ours.response) == families.SIZES["eos_token_id"]  # transformers suppresses it until the minimum
    stop = np.where(ended.any(1), ended.argmax(1), 24)
    assert all((ours.response[i, :end] == expected[i, :end]).all() for i, end in enumerate(stop)) and stop.max() > 8


@pytest.mark.parametrize("kind", ["causal", "scalar"])
@pytest.mark.parametrize("family", NAMES)
def test_export_has_the_same_bits_and_loads_in_transformers(family, kind, checkpoints, tmp_path):
    theirs, model, params, folder = checkpoints(family, kind)
    hf.save(tmp_path / "ours", model, params, kind=kind, max_shard_bytes=20_000)
    again, loaded = hf.load(tmp_path / "ours", kind=kind)
    assert same_bits(params, loaded) and again.family is model.family
    assert FAMILIES[family].decoder_config(again.config).ropes == FAMILIES[family].decoder_config(model.config).ropes
    back = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    expected, got = theirs.state_dict(), back.state_dict()
    assert expected.keys() == got.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    tokens, mask = rows()
    with torch.no_grad():
        inputs = reference_inputs(tokens, mask)
        assert torch.equal(back(**inputs).logits, theirs(**inputs).logits)


@pytest.mark.parametrize("family", NAMES)
def test_parameter_count_of_the_config_is_that_of_the_file(family, checkpoints):
    theirs, model, params, _ = checkpoints(family)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    count = sum(np.prod(x.shape) for x in jax.tree.leaves(shapes))
    assert count == sum(p.numel() for p in theirs.parameters()) == sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize("family", NAMES)
def test_config_key_that_is_not_understood_is_refused_by_name(family, checkpoints):
    config = json.loads((checkpoints(family)[3] / "config.json").read_text())
    with pytest.raises(UserError, match="new_attention"):
        Model.from_hf_config({**config, "new_attention": "square"})
    Model.from_hf_config({**config, "new_attention": None})

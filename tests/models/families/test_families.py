"""Every family's forward pass, gradients, decoding and files equal those of transformers in float32."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

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
ROWS = families.text(families.SIZES["vocab_size"], families.SIZES["pad_token_id"], 30, LENGTH)


class Checkpoint(NamedTuple):
    """A model of transformers, and the same read from its files."""

    theirs: Any
    model: Model
    params: Any
    folder: Path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The `Checkpoint` of a family, made once."""

    @functools.cache
    def of(family, kind="causal"):
        theirs = families.reference(family) if kind == "causal" else families.scalar_of(family, of(family).theirs)
        folder = tmp_path_factory.mktemp(f"{family}-{kind}")
        theirs.save_pretrained(folder)
        return Checkpoint(theirs, *hf.load(folder, kind=kind), folder)

    return of


@pytest.fixture(scope="module")
def outputs(checkpoints):
    """Our `Outputs` of a family, computed once."""

    @functools.cache
    def of(family):
        _, model, params, _ = checkpoints(family)
        return families.ours(model, params, ROWS)

    return of


@pytest.mark.parametrize("family", NAMES)
def test_hidden_states_logits_scores_and_gradients_equal_those_of_transformers(family, checkpoints, outputs, tmp_path):
    got, want = outputs(family), families.theirs(checkpoints(family).theirs, ROWS, tmp_path)
    assert distance(got.hidden[ROWS.mask], want.hidden[ROWS.mask]) < 1e-5
    assert distance(got.logits[ROWS.mask], want.logits[ROWS.mask]) < 1e-5
    paths = jax.tree_util.tree_leaves_with_path(want.gradients)
    for (path, gradient), ours in zip(paths, jax.tree.leaves(got.gradients), strict=True):
        assert distance(ours, gradient) < 1e-4, jax.tree_util.keystr(path)
    scalar = checkpoints(family, "scalar")
    scores = families.at_last_token(scalar.model.scalars(scalar.params, got.hidden), ROWS.mask)
    assert distance(scores, families.their_scores(scalar.theirs, ROWS)) < 1e-5


@pytest.mark.runs
@pytest.mark.parametrize("family", NAMES)
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(family, checkpoints, outputs):
    # Norms, residuals and rotary embeddings are cast where the reference casts them.
    exact, (theirs, model, params, folder) = outputs(family), checkpoints(family)
    rough = type(theirs).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        want = rough(**reference_inputs(ROWS.tokens, ROWS.mask), output_hidden_states=True)
    hidden = model.hidden(model.cast_params(params, jnp.bfloat16), ROWS.tokens, ROWS.mask, dtype=jnp.bfloat16)
    got = hidden.astype(jnp.float32), model.logits(params, hidden)
    for ours, other, reference in zip(got, (want.hidden_states[-1], want.logits), exact[:2], strict=True):
        ours, other, reference = (x[ROWS.mask] for x in (np.asarray(ours), other.float().numpy(), reference))
        assert 1e-3 < distance(ours, reference) < 1.05 * distance(other, reference)


@pytest.mark.parametrize("family", NAMES)
def test_decoding_equals_the_full_forward_at_every_position(family, checkpoints, outputs):
    _, model, params, _ = checkpoints(family)
    columns = slice(ROWS.context - 1, None)
    full, kept = outputs(family).hidden[:4, columns], ROWS.mask[:4, columns]
    decoded = families.decoded(model, params, ROWS)
    for column in range(full.shape[1]):
        now = kept[:, column]
        assert distance(decoded[now, column], full[now, column]) < 1e-5, column


@pytest.mark.parametrize("family", NAMES)
def test_prompts_computed_once_for_their_responses_change_nothing(family, checkpoints, outputs):
    _, model, params, _ = checkpoints(family)
    columns = slice(ROWS.context - 1, None)
    full, kept = outputs(family).hidden[:4, columns], ROWS.mask[:4, columns]
    assert distance(families.after_prompts(model, params, ROWS)[kept], full[kept]) < 1e-5


@pytest.mark.parametrize("family", NAMES)
def test_padding_on_either_side_changes_nothing(family, outputs):
    hidden = outputs(family).hidden
    for row in (4, 5, 6):
        assert distance(hidden[row][ROWS.mask[row]], hidden[0, : ROWS.short]) < 1e-5


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
    theirs, model, params, _ = checkpoints(family, kind)
    shard_bytes = {"causal": 20_000, "scalar": 10**9}[kind]
    hf.save(tmp_path / "ours", model, params, kind=kind, max_shard_bytes=shard_bytes)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists() == (kind == "causal")
    again, loaded = hf.load(tmp_path / "ours", kind=kind)
    assert same_bits(params, loaded) and again.family is model.family
    assert switches(again) == switches(model)
    back = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    expected, got = theirs.state_dict(), back.state_dict()
    assert expected.keys() == got.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    tokens, mask = padded_rows([40, 30], [0, 7], 40)
    with torch.no_grad():
        inputs = reference_inputs(tokens, mask)
        assert torch.equal(back(**inputs).logits, theirs(**inputs).logits)


SIZE_KEYS = ("intermediate_size", "vocab_size", "n_embd", "n_head", "n_layer", "num_key_value_heads")


def switches(model):
    """The model's switches, without the text they were read from."""
    return dataclasses.replace(FAMILIES[model.family.name].decoder_config(model.config), source="")


@pytest.mark.parametrize("family", NAMES)
def test_parameter_count_of_the_config_is_that_of_the_file(family, checkpoints):
    theirs, model, params, _ = checkpoints(family)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    count = sum(np.prod(x.shape) for x in jax.tree.leaves(shapes))
    assert count == sum(p.numel() for p in theirs.parameters()) == sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize("family", NAMES)
def test_config_key_that_transformers_reads_from_any_config_is_refused_and_an_unknown_one_is_named(family, checkpoints):
    config = json.loads((checkpoints(family)[3] / "config.json").read_text())
    with pytest.raises(UserError, match="is_causal"):
        Model.from_hf_config({**config, "is_causal": False})
    with pytest.warns(UserWarning, match="has no new_attention: ignored"):
        Model.from_hf_config({**config, "new_attention": "square"})
    Model.from_hf_config({**config, "new_attention": None})


@pytest.mark.parametrize("family", NAMES)
def test_absent_config_keys_mean_what_transformers_takes_them_for(family):
    name, tiny = families.FAMILIES[family]
    config_class = getattr(transformers, families.CONFIG_CLASSES.get(family, f"{name}Config"))
    given = {**tiny, "num_key_value_heads": 4} if "num_key_value_heads" in tiny else tiny
    # What the class derives from other keys is not in a file of transformers 4.
    derived = {"layer_types", "no_rope_layers"} - given.keys()

    def written(keys):
        hf = config_class(**copy.deepcopy(keys)).to_dict()
        return {key: value for key, value in hf.items() if key not in derived}

    compared = 0
    for key in written(given).keys() - {"model_type"}:
        hf = {other: value for other, value in written(given).items() if other != key}
        try:
            theirs = Model.from_hf_config(written({other: value for other, value in given.items() if other != key}))
            ours = Model.from_hf_config(hf)
        except (UserError, StrictDataclassError):
            # A size that does not go with those of the class, or that has to be there.
            assert key in ("head_dim", "hidden_size", "num_attention_heads", "num_hidden_layers", *SIZE_KEYS), key
            continue
        assert switches(ours) == switches(theirs), key
        compared += 1
    assert compared > 10

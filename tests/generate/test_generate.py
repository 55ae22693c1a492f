"""Sampling: when it stops, and what its samples do not depend on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import GenerationConfig, GPTNeoXConfig, GPTNeoXForCausalLM

from rlhf_jax import generate as gen
from rlhf_jax.models import custom_shape
from rlhf_jax.models.io.hf import load
from rlhf_jax.types import PromptBatch
from tests.helpers.optional import optional

torch = optional("torch")
V = 97


@pytest.fixture(scope="module")
def model():
    return custom_shape("2x32x4", V, 64)


@pytest.fixture(scope="module")
def params(model):
    # Wider weights than at init: a peaked distribution, so that ties and near-ties are rare.
    return jax.tree.map(lambda x: 4.0 * x, model.init(jax.random.key(0), heads=("causal",)))


def prompts(b=6, c=10, seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.array([c, 1, 4, 7, 2, 9][:b] + [c] * max(0, b - 6), np.int32)
    return PromptBatch(rng.integers(1, V, (b, c)).astype(np.int32), lengths, np.arange(b, dtype=np.int32))


run = jax.jit(gen.generate, static_argnames=("model", "sampling"))


def test_samples_do_not_depend_on_the_other_rows_nor_on_chunks(model, params):
    sampling = gen.Sampling(8, 1.0, stop_ids=(5,), fill_id=5)
    batch = prompts(6)
    whole = run(model, params, batch, jax.random.key(3), sampling)

    def part(x):
        return run(model, params, x[0], jax.random.key(3), sampling, rows=x[1])

    chunked = jax.jit(lambda x: gen.map_in_chunks(part, x, 2))((batch, jnp.arange(6)))
    np.testing.assert_array_equal(whole.response, chunked.response)
    one = jax.tree.map(lambda x: x[4:5], batch)
    alone = run(model, params, one, jax.random.key(3), sampling, rows=jnp.array([4]))
    np.testing.assert_array_equal(alone.response[0], whole.response[4])
    other = run(model, params, batch, jax.random.key(4), sampling)
    assert (np.asarray(other.response) != np.asarray(whole.response)).any(axis=1).all()


def test_sampler_logprobs_equal_a_forward_pass(model, params):
    batch = prompts(6)
    sampling = gen.Sampling(8, 0.7, stop_ids=(5,), fill_id=5)
    out = run(model, params, batch, jax.random.key(5), sampling)
    c = batch.tokens.shape[1]
    mask = np.concatenate([np.arange(c)[None] >= (c - batch.lengths)[:, None], np.ones((6, 8), bool)], 1)
    tokens = jnp.concatenate([batch.tokens, out.response], 1)
    hidden = model.hidden(params, tokens, mask)[:, c - 1 : -1]
    logits = model.logits(params, hidden) / (0.7 + 1e-7)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), out.response[..., None], -1)[..., 0]
    inside = np.arange(8)[None] < np.asarray(out.lengths)[:, None]
    np.testing.assert_allclose(np.where(inside, logprobs, 0), out.logprobs, atol=2e-5)


def test_a_row_stops_at_the_stop_token_which_belongs_to_it(model, params):
    out = run(model, params, prompts(6), jax.random.key(0), gen.Sampling(12, 5.0, stop_ids=(5,), fill_id=9))
    free = run(model, params, prompts(6), jax.random.key(0), gen.Sampling(12, 5.0, stop_ids=(), fill_id=9))
    assert (np.asarray(free.lengths) == 12).all() and not np.asarray(free.ended).any()
    for row, n, ended, whole in zip(*map(np.asarray, (out.response, out.lengths, out.ended, free.response))):
        where = np.flatnonzero(whole == 5)
        assert n == (where[0] + 1 if len(where) else 12) and ended == bool(len(where))
        assert (row[n:] == 9).all() and (row[:n] == whole[:n]).all()


def test_a_row_stops_at_the_first_of_several_stop_tokens(model, params):
    free = run(model, params, prompts(6), jax.random.key(0), gen.Sampling(12, 5.0, fill_id=9))
    stops = (5, int(free.response[1, 2]), int(free.response[3, 4]))
    out = run(model, params, prompts(6), jax.random.key(0), gen.Sampling(12, 5.0, stop_ids=stops, fill_id=9))
    found = set()
    for row, n, ended, whole in zip(*map(np.asarray, (out.response, out.lengths, out.ended, free.response))):
        where = np.flatnonzero(np.isin(whole, stops))
        assert n == (where[0] + 1 if len(where) else 12) and ended == bool(len(where))
        assert (row[n:] == 9).all() and (row[:n] == whole[:n]).all()
        found |= {int(row[n - 1])} if ended else set()
    assert len(found) > 1, "only one of the stop tokens was sampled"


def test_responses_to_a_shared_prompt_are_those_to_copies_of_it(model, params):
    sampling = gen.Sampling(12, 1.0, repetition_penalty=1.3, stop_ids=(5,), fill_id=9)
    batch = prompts(4)
    copies = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), 3, axis=0), batch)
    shared = gen.generate(model, params, batch, jax.random.key(3), sampling, group=3)
    apart = gen.generate(model, params, copies, jax.random.key(3), sampling)
    for name in ("response", "lengths", "ended", "prompt_tokens", "prompt_lengths"):
        assert (np.asarray(getattr(shared, name)) == np.asarray(getattr(apart, name))).all(), name
    assert np.abs(np.asarray(shared.logprobs - apart.logprobs)).max() < 1e-5
    assert len({tuple(row) for row in np.asarray(shared.response)[:3]}) > 1, "a group of one and the same response"


def test_the_loop_ends_when_every_row_has_ended(model, params):
    # With a bias that makes token 5 certain, one decode would already be too many.
    certain = {**params, "embed_out": {"kernel": params["embed_out"]["kernel"] * 0}}

    class Certain(type(model)):
        def next_logits(self, params, hidden):
            return super().next_logits(params, hidden) + jnp.where(jnp.arange(V) == 5, 50.0, 0.0)[None]

        def decode(self, *args, **options):
            jax.debug.callback(lambda: calls.append(1))
            return super().decode(*args, **options)

    calls = []
    certain_model = Certain(model.family, model.config)
    out = gen.generate(certain_model, certain, prompts(3), jax.random.key(0), gen.Sampling(12, 1.0, stop_ids=(5,)))
    jax.block_until_ready(out)
    assert (np.asarray(out.lengths) == 1).all() and not calls


def hf_model(tmp_path_factory):
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=V,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=5,
        pad_token_id=96,
    )
    theirs = GPTNeoXForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(path)
    return theirs, *load(str(path), kind="causal")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return hf_model(tmp_path_factory)


def test_greedy_equals_transformers_generate(pair):
    theirs, model, params = pair
    batch = prompts(6)
    c = batch.tokens.shape[1]
    mask = torch.tensor((np.arange(c)[None] >= (c - batch.lengths)[:, None]).astype(np.int64))
    ids = torch.tensor(batch.tokens.astype(np.int64))
    out = theirs.generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=GenerationConfig(
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=5,
            pad_token_id=96,
            output_scores=True,
            return_dict_in_generate=True,
        ),
    )
    ours = run(model, params, batch, jax.random.key(0), gen.Sampling(12, 0.0, stop_ids=(5,), fill_id=96))
    scores = torch.stack(out.scores, 1)
    best = scores.topk(2, dim=-1).values
    compared = 0
    for row in range(6):
        for t in range(int(ours.lengths[row])):
            if best[row, t, 0] - best[row, t, 1] < 1e-4:
                break
            assert int(ours.response[row, t]) == int(out.sequences[row, c + t])
            compared += 1
    assert compared >= 40


def test_the_repetition_penalty_ignores_padding(model, params):
    sampling = gen.Sampling(6, 0.0, repetition_penalty=5.0)
    batch = prompts(6)
    other = dataclasses.replace(
        batch, tokens=np.where(np.arange(10)[None] >= (10 - batch.lengths)[:, None], batch.tokens, 33)
    )
    first = run(model, params, batch, jax.random.key(0), sampling)
    second = run(model, params, other, jax.random.key(0), sampling)
    np.testing.assert_array_equal(first.response, second.response)


def test_the_repetition_penalty_counts_what_was_generated_as_transformers_does(pair):
    theirs, model, params = pair
    batch = prompts(6)
    c = batch.tokens.shape[1]
    batch = dataclasses.replace(batch, lengths=np.full_like(batch.lengths, c))  # transformers counts padding as well
    out = theirs.generate(
        input_ids=torch.tensor(batch.tokens.astype(np.int64)),
        attention_mask=torch.ones(6, c, dtype=torch.long),
        generation_config=GenerationConfig(
            max_new_tokens=12, do_sample=False, repetition_penalty=1.7, eos_token_id=None, pad_token_id=96
        ),
    )
    ours = run(model, params, batch, jax.random.key(0), gen.Sampling(12, 0.0, fill_id=96, repetition_penalty=1.7))
    plain = run(model, params, batch, jax.random.key(0), gen.Sampling(12, 0.0, fill_id=96))
    assert (np.asarray(ours.response) != np.asarray(plain.response)).any()
    np.testing.assert_array_equal(np.asarray(ours.response), out[:, c:].numpy())


def test_generation_compiles_once_per_shape(model, params):
    fresh = jax.jit(lambda *args: gen.generate(*args), static_argnums=(0, 4))
    for seed in range(3):
        fresh(model, params, prompts(4, seed=seed), jax.random.key(seed), gen.Sampling(4, 1.0, stop_ids=(5,)))
    assert fresh._cache_size() == 1

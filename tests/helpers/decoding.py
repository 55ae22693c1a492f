"""Tiny models that decode, and what may differ between two ways of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import generate as gen
from rlhf_jax.generate.sampling import process_logits
from rlhf_jax.models import custom_shape
from rlhf_jax.types import PromptBatch

VOCABULARY, COLUMNS, PROMPTS, GROUP, TOKENS = 96, 12, 8, 4, 40
ROWS = PROMPTS * GROUP
STOPS = (5, 7)
SAMPLING = gen.Sampling(TOKENS, 1.0, stop_ids=STOPS, fill_id=9)
SPECS = {
    "gpt_neox": ("2x32x4", {}),
    "gemma2": ("gemma2:2x32x4x2", {"sliding_window": 14}),  # a window in every other layer
    "mistral": ("mistral:2x32x4x2", {"sliding_window": 11}),  # and in all
}
EDGE = 1e-5
"""How near to a boundary of the inverse CDF a draw may give either token."""


@functools.cache
def model_of(name: str):
    """(model, params), the params twice as wide as at init: less flat, and not chaotic."""
    spec, more = SPECS[name]
    model = custom_shape(spec, VOCABULARY, 128, **more)
    return model, jax.jit(lambda key: jax.tree.map(lambda x: 2 * x, model.init(key)))(jax.random.key(0))


def prompts_of(seed: int, lengths=None, prompts: int = PROMPTS) -> PromptBatch:
    """Random prompts, of random lengths from 1 on unless they are given."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, COLUMNS + 1, prompts) if lengths is None else lengths
    tokens = rng.integers(10, VOCABULARY, (prompts, COLUMNS)).astype(np.int32)
    return PromptBatch(tokens, np.asarray(lengths, np.int32), np.arange(prompts, dtype=np.int32))


@functools.partial(jax.jit, static_argnames=("model", "sampling", "group", "decoding", "chunk"))
def _run(model, params, prompts, key, limits, expected, rows, guide, sampling, group, decoding, chunk):
    def part(batch):
        prompts, (limits, expected, rows, start) = batch[0], jax.tree.map(lambda x: x.reshape(-1), batch[1:])
        options = {"limits": limits, "expected": expected, "rows": rows, "decoding": decoding, "return_steps": True}
        options["guide"] = None if guide is None else guide._replace(start=start)
        out, steps = gen.generate(model, params, prompts, key, sampling, group=group, **options)
        by_prompt = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), out)
        return by_prompt, jax.tree.map(lambda x: x[None], steps)

    start = None if guide is None else guide.start
    batch = (prompts, *jax.tree.map(lambda x: x.reshape(-1, group), (limits, expected, rows, start)))
    if chunk is not None:
        tokens = gen.map_in_chunks(lambda batch: part(batch)[0], batch, chunk)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tokens), None
    out, steps = part(batch)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out), jax.tree.map(lambda x: x[0], steps)


def decode(
    model,
    params,
    prompts,
    decoding=None,
    *,
    limits=None,
    expected=None,
    rows=None,
    seed=3,
    chunk=None,
    group=GROUP,
    sampling=SAMPLING,
    guide=None,
):
    """(Rollout, Steps) of numpy arrays; compiles once for each of the options. `chunk`: prompts at a time."""
    count = len(prompts.lengths) * group
    limits = np.full(count, sampling.max_new_tokens) if limits is None else limits
    expected = np.zeros(count) if expected is None else expected
    rows = np.arange(count) if rows is None else rows
    data = (np.asarray(limits, np.int32), np.asarray(expected, np.float32), np.asarray(rows, np.int32), guide)
    out = _run(model, params, prompts, jax.random.key(seed), *data, sampling, group, decoding or gen.Decoding(), chunk)
    return jax.tree.map(np.asarray, out)


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def _teacher(model, params, prompts, lengths, response, guide, limits, sampling):
    columns = prompts.shape[1]
    mask = jnp.arange(columns)[None] >= columns - lengths[:, None]
    mask = jnp.concatenate([mask, jnp.ones(response.shape, bool)], axis=1)
    tokens = jnp.concatenate([prompts, response], axis=1)
    hidden = model.hidden(params, tokens, mask)[:, columns - 1 : -1]
    logits = model.logits(params, hidden)
    seen = None
    if sampling.repetition_penalty != 1.0:
        known = jnp.where(mask, tokens, VOCABULARY)
        ends = columns + jnp.arange(response.shape[1])[None, :, None]
        known = jnp.where(jnp.arange(tokens.shape[1])[None, None] < ends, known[:, None], VOCABULARY)
        rows = jnp.arange(len(tokens))[:, None, None]
        seen = jnp.zeros(logits.shape, bool).at[rows, jnp.arange(response.shape[1])[None, :, None], known].set(True)
        seen = seen.reshape(-1, VOCABULARY)
    flat = logits.reshape(-1, VOCABULARY)
    if guide is not None:
        states = guide.automaton.states(guide.start, response)[:, :-1]
        left = limits[:, None] - jnp.arange(response.shape[1])[None] - 1
        flat = guide.automaton.mask(flat, states.reshape(-1), left.reshape(-1))
    flat = process_logits(flat, seen, sampling)
    return jax.nn.log_softmax(flat.reshape(logits.shape), axis=-1)


def forward_logprobs(model, params, out, sampling=SAMPLING, guide=None, limits=None):
    """[B, T, V] of a forward pass without a cache over the tokens of a rollout."""
    if limits is not None:
        limits = np.minimum(limits, sampling.max_new_tokens).astype(np.int32)
    data = (out.prompt_tokens, out.prompt_lengths, out.response, guide, limits)
    return np.asarray(_teacher(model, params, *data, sampling))


def on_an_edge(logprobs, first: int, second: int, uniform: float) -> bool:
    """Whether rounding may turn a draw `uniform` from logprobs [V] into either of two tokens: all boundaries of the
    inverse CDF between them lie within EDGE of it."""
    cdf = np.cumsum(np.exp(np.asarray(logprobs, np.float64)))
    low, high = sorted((first, second))
    return bool(np.all(np.abs(cdf[low:high] / cdf[-1] - uniform) <= EDGE))


@jax.jit
def _uniforms(key, rows, places):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    return jax.vmap(lambda key: jax.vmap(lambda t: jax.random.uniform(jax.random.fold_in(key, t)))(places))(keys)


def assert_edges(logprobs, found, wanted, places, *, seed, rows, sampling):
    """`found` and `wanted` [B, T] differ at `places` [B, T] bool only by rounding: their draws lie on an edge of the
    inverse CDF of logprobs [B, T, V]; of temperature 0: their log-probabilities are equal but for that."""
    uniforms = np.asarray(_uniforms(jax.random.key(seed), rows, jnp.arange(found.shape[1])))
    for row, t in np.argwhere(places & (found != wanted)):
        first, second, here = int(found[row, t]), int(wanted[row, t]), logprobs[row, t]
        near = abs(here[first] - here[second]) <= EDGE
        rounding = near if sampling.temperature == 0 else on_an_edge(here, first, second, uniforms[row, t])
        assert rounding, f"token {t} of row {row} is {first} and not {second}"


def assert_follows(model, params, out, limits, *, seed=3, rows=None, sampling=SAMPLING, guide=None, tolerance=1e-6):
    """A rollout is what a forward pass without a cache gives, row by row: each token is the draw from its logits by the
    token's own key, up to the first stop token or the row's limit, with its log-probability.

    As a token follows from those before it, two rollouts of which this holds are equal, but for draws on an edge.
    """
    rows = np.arange(len(out.lengths)) if rows is None else rows
    logprobs = forward_logprobs(model, params, out, sampling, guide, limits)
    if sampling.temperature > 0:
        # Their own draws by the definition in float64, without the blocks of `sampling.draw`.
        cdf = np.cumsum(np.exp(logprobs.astype(np.float64)), axis=-1)
        uniforms = np.asarray(_uniforms(jax.random.key(seed), rows, jnp.arange(out.response.shape[1])))
        wanted = (cdf <= (uniforms * cdf[..., -1])[..., None]).sum(axis=-1)
    else:
        wanted = logprobs.argmax(axis=-1)
    inside = np.arange(out.response.shape[1])[None] < out.lengths[:, None]
    assert_edges(logprobs, out.response, wanted, inside, seed=seed, rows=rows, sampling=sampling)
    assert (out.response[~inside] == sampling.fill_id).all()
    stops = np.isin(out.response, sampling.stop_ids) & inside
    last = np.arange(out.response.shape[1])[None] == out.lengths[:, None] - 1
    assert not (stops & ~last).any(), "a row goes on after a stop token"
    np.testing.assert_array_equal(out.ended, (stops & last).any(axis=1))
    limits = np.broadcast_to(np.minimum(limits, sampling.max_new_tokens), out.lengths.shape)
    assert (out.lengths <= limits).all() and (out.lengths[~out.ended] == limits[~out.ended]).all()
    chosen = np.take_along_axis(logprobs, out.response[..., None], axis=-1)[..., 0]
    assert_close(np.where(inside, out.logprobs, 0.0), np.where(inside, chosen, 0.0), tolerance)


def assert_same(model, params, out, wanted, *, seed=3, rows=None, sampling=SAMPLING, tolerance=1e-6):
    """Two rollouts have the same tokens and log-probabilities; a row may differ from a token on whose draw lies on an
    edge."""
    rows = np.arange(len(out.lengths)) if rows is None else rows
    equal = out.response == wanted.response
    whole = equal.all(axis=1)
    until = np.where(whole, equal.shape[1], equal.argmin(axis=1))[:, None]
    columns = np.arange(equal.shape[1])[None]
    if not whole.all():
        logprobs = forward_logprobs(model, params, wanted, sampling)
        options = {"seed": seed, "rows": rows, "sampling": sampling}
        assert_edges(logprobs, out.response, wanted.response, columns == until, **options)
        assert whole.mean() > 0.9
    for name in ("lengths", "ended"):
        np.testing.assert_array_equal(getattr(out, name)[whole], getattr(wanted, name)[whole], name)
    compared = columns < until
    assert_close(np.where(compared, out.logprobs, 0.0), np.where(compared, wanted.logprobs, 0.0), tolerance)


def assert_close(found, wanted, tolerance: float):
    """Log-probabilities are equal to `tolerance`; relative to those below -1, as float32 is."""
    difference = np.abs(found - wanted) / np.maximum(np.abs(wanted), 1.0)
    assert difference.max() <= tolerance, difference.max()

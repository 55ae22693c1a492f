"""The jitted programs of a stage that samples: generate, experience, update and those of evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import actor_critic, microbatch, nonfinite, rollout_metrics
from rlhf_jax.algorithms.actor_critic import Models
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.config import sampling_options
from rlhf_jax.generate import Decoding, Sampling, generate_unstacked, map_in_chunks
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import rollouts
from rlhf_jax.stages.algorithms import Algorithm
from rlhf_jax.stages.context import StageContext, progress_metrics, state_shardings, update_key
from rlhf_jax.types import Params, PromptBatch, ScoredRollout, TrainState


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted, pure functions of params and arrays.

    Attributes:
      generate: (policy params, base, PromptBatch, seed, step, temperature, group_size, RolloutState or None) ->
        (Rollout, RolloutState or None); temperature and group_size are static. With a RolloutState rows whose group is
        not finished have length -1.
      experience: (trained params, base, reference params, ScoredRollout, kl_coef) -> (experience, metrics).
      update: (TrainState, base, experience, metrics of `experience`) -> (TrainState, metrics); donates the state.
      skip: (TrainState, Rollout) -> (TrainState, metrics) of an update without any score; donates the state.
      eval_metrics: (trained params, base, experience) -> metrics.
      token_kl: (trained params, base, reference params, Rollout, Images of its rows or None) -> [B, T].
    """

    generate: Callable
    experience: Callable
    update: Callable
    skip: Callable
    eval_metrics: Callable
    token_kl: Callable


def sampling_of(
    config, eos_ids: tuple[int, ...], temperature: float | None = None, suppress_ids: tuple[int, ...] = ()
) -> Sampling:
    """How responses are sampled.

    Args:
      config: sampling options, response_length, stop_token, stop_token_id, stop_token_ids.
      eos_ids: `Tokenizer.eos_ids`; the first fills the columns after a response.
      temperature: overrides that of the config and of generation_kwargs.
      suppress_ids: of `Sampling`.
    """
    options = sampling_options(config)
    if temperature is not None:
        options["temperature"] = temperature
    stop = () if config.stop_token_id is None else (config.stop_token_id,)
    stop = eos_ids if config.stop_token == "eos" or config.stop_token_ids is not None else stop
    options |= {"stop_ids": stop, "fill_id": eos_ids[0], "suppress_ids": suppress_ids}
    return Sampling(max_new_tokens=config.response_length, **options)


def decoding_of(config, mesh) -> Decoding:
    """How responses are decoded on a mesh."""
    shrink = config.decode_shrink
    if shrink is None:
        # Where a step takes as long for half of the rows, the smaller loops would only take time to compile.
        shrink = mesh.devices.flat[0].platform == "cpu" and config.response_length >= 128
    return Decoding(
        shrink=shrink,
        slots=config.decode_slots,
        draft=config.draft,
        draft_tokens=config.draft_tokens,
        cache_dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
    )


def build_programs(
    context: StageContext,
    algorithm: Algorithm,
    models: Models,
    state: TrainState,
    *,
    optimizer: Optimizer,
    eos_ids: tuple[int, ...],
    episodes_per_epoch: int,
) -> Programs:
    """The programs of a run.

    Args:
      context: of the stage.
      algorithm: of the run.
      models: their static forms are compiled in; params are arguments of each program.
      state: whose shardings every update returns.
      optimizer: of the run.
      eos_ids: `Tokenizer.eos_ids`.
      episodes_per_epoch: responses in one pass over the prompts.
    """
    config, mesh = context.config, context.mesh
    dtype = jnp.dtype(config.dtype)
    forms = models.replace(
        reference=None if models.reference is None else models.reference.replace(params=None), base=None
    )
    shares_prompts = algorithm.shares_prompts(forms, config)
    steps_per_update = algorithm.steps_per_update(config)

    def whole(trained: Params, base: Params | None, ref_params: Params | None = None) -> Models:
        reference = forms.reference
        if reference is not None:
            reference = reference.replace(params=ref_params)
        return forms.replace(base=base, reference=reference).with_trained(trained)

    def generate(policy, base, batch: PromptBatch, seed, step, temperature, group_size, kept=None):
        policy = whole({"policy": policy}, base).policy
        key = jax.random.fold_in(update_key(seed, step), 0)
        sampling = sampling_of(config, eos_ids, temperature, policy.model.suppress_ids)
        rows = jnp.arange(batch.lengths.shape[0] * group_size)
        rows_per_prompt = group_size if shares_prompts else 1
        layers = policy.model.unstack(policy.params, dtype)
        prompt_rows = batch.rows
        if rows_per_prompt < group_size:
            batch = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), batch)

        decoding = decoding_of(config, mesh)
        expected = unfinished = keys = None
        if kept is not None and kept.response_lengths is not None:
            expected = rollouts.expected_lengths(kept.response_lengths, batch.rows, config.response_length)
            expected = jnp.repeat(expected, rows.shape[0] // len(expected))
        if kept is not None and kept.unfinished is not None:
            decoding = dataclasses.replace(decoding, max_steps=config.rollout_max_steps)
            unfinished = kept.unfinished
            keys = rollouts.row_keys(key, rows, unfinished)
            if rows_per_prompt < group_size:
                unfinished = unfinished.replace(held=jnp.repeat(unfinished.held, group_size))

        def generate_chunk(chunk):
            prompts, rows, expected = chunk
            options = {"group": rows_per_prompt, "rows": rows.reshape(-1), "dtype": dtype, "decoding": decoding}
            options |= {"keys": keys, "unfinished": unfinished}
            options["expected"] = None if expected is None else expected.reshape(-1)
            rollout = generate_unstacked(policy.model, layers, prompts, key, sampling, **options)
            return jax.tree.map(lambda x: rollout_metrics.group_rows(x, rows_per_prompt), rollout)

        prompts = rows.shape[0] // rows_per_prompt
        at_once = config.rollout_batch_size if decoding.slots is None else None
        chunk = microbatch.groups_per_chunk(at_once, rows_per_prompt, prompts)
        rows, expected = jax.tree.map(lambda x: rollout_metrics.group_rows(x, rows_per_prompt), (rows, expected))
        rollout = map_in_chunks(generate_chunk, (batch, rows, expected), chunk)
        rollout = sharding.spread_rows(jax.tree.map(lambda x: x.reshape((-1,) + x.shape[2:]), rollout), mesh)
        if kept is None:
            return rollout, None
        return rollouts.keep(kept, rollout, prompt_rows, keys, group_size, mesh)

    def experience(trained, base, ref_params, scored: ScoredRollout, kl_coef):
        models = whole(trained, base, ref_params)
        made, metrics = algorithm.make_experience(models, scored, config=config, kl_coef=kl_coef)
        # Of the scores as the rewards returned them: clipping may hide an infinity.
        causes = nonfinite.causes_of(score=jnp.where(scored.scorable, scored.scores, 0.0))
        lengths = rollout_metrics.length_metrics(scored.rollout)
        return made, {**lengths, "nonfinite/causes": causes, **metrics}

    def finish(before: TrainState, state: TrainState, metrics, update_metrics):
        metrics = dict(metrics)
        state = nonfinite.add_counts(state, config, tokens=metrics.pop("rollout/tokens"))
        rate = None
        if optimizer.learning_rate is not None:
            rate = optimizer.learning_rate(before.step * steps_per_update)
        progress = progress_metrics(state, rate, algorithm.learning_rate_metrics, episodes_per_epoch)
        if optimizer.value_learning_rate is not None:
            progress["critic_lr"] = optimizer.value_learning_rate(before.step * steps_per_update)
        counts = {"num_tokens": state.tokens, "nonfinite/in_a_row": state.nonfinite}
        return state, {**metrics, **update_metrics, **progress, **counts}

    def update(state, base, experience, metrics):
        key = jax.random.fold_in(update_key(state.seed, state.step), 1)
        after, update_metrics = algorithm.update(
            forms.replace(base=base),
            state,
            experience,
            config=config,
            optimizer=optimizer,
            key=key,
            causes=metrics["nonfinite/causes"],
        )
        if algorithm.adapt_kl_coef is not None:
            after = algorithm.adapt_kl_coef(after, metrics, config)
        return finish(state, after, metrics, update_metrics)

    def skip(state, rollout):
        after = nonfinite.add_counts(state, config, step=1, episodes=config.batch_size)
        return finish(state, after, rollout_metrics.length_metrics(rollout), {})

    def eval_metrics(trained, base, experience):
        if algorithm.eval_metrics is None:
            return {}
        return algorithm.eval_metrics(whole(trained, base), experience, config=config)

    def token_kl(trained, base, ref_params, rollout, images=None):
        models = whole(trained, base, ref_params)
        return map_in_chunks(
            lambda chunk: actor_critic.token_kl(models, chunk[0], config, chunk[1]),
            (rollout, images),
            config.rollout_batch_size,
        )

    out_shardings = (state_shardings(state), None)
    return Programs(
        generate=jax.jit(generate, static_argnums=(5, 6)),
        experience=jax.jit(experience),
        update=jax.jit(update, donate_argnums=0, out_shardings=out_shardings),
        skip=jax.jit(skip, donate_argnums=0, out_shardings=out_shardings),
        eval_metrics=jax.jit(eval_metrics),
        token_kl=jax.jit(token_kl),
    )


def prompt_width(config) -> int:
    """Columns of the longest prompts that there may be."""
    return max(config.length_buckets or (8 * math.ceil(config.query_length / 8),))

"""The jitted programs of a stage that samples: generate, experience, update and those of evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.algorithms import microbatch, nonfinite, response_logprobs
from rlhf_jax.algorithms.groups import group_rows
from rlhf_jax.algorithms.metrics import length_metrics
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.algorithms.response_logprobs import Models
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
    tokenizer: Any,
    suppress_ids: tuple[int, ...],
    episodes_per_epoch: int,
) -> Programs:
    """The programs of a run.

    Args:
      context: of the stage.
      algorithm: of the run.
      models: their static forms are compiled in; params are arguments of each program.
      state: whose shardings every update returns.
      optimizer: of the run.
      tokenizer: the policy's.
      suppress_ids: ids that are never sampled, beside the policy's own.
      episodes_per_epoch: responses in one pass over the prompts.
    """
    reference = None if models.reference is None else models.reference.replace(params=None)
    functions = _Functions(
        config=context.config,
        mesh=context.mesh,
        algorithm=algorithm,
        forms=models.replace(reference=reference, base=None),
        optimizer=optimizer,
        eos_ids=tokenizer.eos_ids,
        suppress_ids=(*models.policy.model.suppress_ids, *suppress_ids),
        unused_ids=tokenizer.unused_ids(models.policy.model.config.vocab_size),
        episodes_per_epoch=episodes_per_epoch,
    )
    out_shardings = (state_shardings(state), None)
    return Programs(
        generate=jax.jit(functions.generate, static_argnums=(5, 6)),
        experience=jax.jit(functions.experience),
        update=jax.jit(functions.update, donate_argnums=0, out_shardings=out_shardings),
        skip=jax.jit(functions.skip, donate_argnums=0, out_shardings=out_shardings),
        eval_metrics=jax.jit(functions.eval_metrics),
        token_kl=jax.jit(functions.token_kl),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Functions:
    """What `Programs` compiles: pure functions of params and arrays, with what a run fixes in the fields.

    Attributes:
      forms: the models without params.
    """

    config: Any
    mesh: Mesh
    algorithm: Algorithm
    forms: Models
    optimizer: Optimizer
    eos_ids: tuple[int, ...]
    suppress_ids: tuple[int, ...]
    unused_ids: tuple[int, ...]
    episodes_per_epoch: int

    def models(self, trained: Params, base: Params | None, ref_params: Params | None = None) -> Models:
        """The models with these params."""
        reference = self.forms.reference
        if reference is not None:
            reference = reference.replace(params=ref_params)
        return self.forms.replace(base=base, reference=reference).with_trained(trained)

    def generate(self, policy, base, batch: PromptBatch, seed, step, temperature, group_size, kept=None):
        """As `Programs.generate`."""
        config, prompt_rows = self.config, batch.rows
        policy = self.models({"policy": policy}, base).policy
        key = jax.random.fold_in(update_key(seed, step), 0)
        rows = jnp.arange(batch.lengths.shape[0] * group_size)
        rows_per_prompt = group_size if self.algorithm.shares_prompts(self.forms, config) else 1
        dtype = jnp.dtype(config.dtype)
        layers = policy.model.unstack(policy.params, dtype)
        if rows_per_prompt < group_size:
            batch = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), batch)

        options = {"group": rows_per_prompt, "dtype": dtype, "decoding": decoding_of(config, self.mesh)}
        keys = expected = None
        if kept is not None and kept.response_lengths is not None:
            expected = rollouts.expected_lengths(kept.response_lengths, prompt_rows, config.response_length)
            expected = jnp.repeat(expected, group_size)
        if kept is not None and kept.unfinished is not None:
            unfinished = kept.unfinished
            keys = rollouts.row_keys(key, rows, unfinished)
            if rows_per_prompt < group_size:
                unfinished = unfinished.replace(held=jnp.repeat(unfinished.held, group_size))
            decoding = dataclasses.replace(options["decoding"], max_steps=config.rollout_max_steps)
            options |= {"decoding": decoding, "keys": keys, "unfinished": unfinished}
        sampling = sampling_of(config, self.eos_ids, temperature, self.suppress_ids)

        def generate_chunk(chunk):
            prompts, *by_row = chunk
            rows, expected = jax.tree.map(lambda x: x.reshape(-1), by_row)
            rollout = generate_unstacked(
                policy.model, layers, prompts, key, sampling, rows=rows, expected=expected, **options
            )
            return jax.tree.map(lambda x: group_rows(x, rows_per_prompt), rollout)

        prompts = rows.shape[0] // rows_per_prompt
        at_once = config.rollout_batch_size if config.decode_slots is None else None
        chunk = microbatch.groups_per_chunk(at_once, rows_per_prompt, prompts)
        rows, expected = jax.tree.map(lambda x: group_rows(x, rows_per_prompt), (rows, expected))
        rollout = map_in_chunks(generate_chunk, (batch, rows, expected), chunk)
        rollout = sharding.spread_rows(jax.tree.map(lambda x: x.reshape((-1,) + x.shape[2:]), rollout), self.mesh)
        if kept is None:
            return rollout, None
        return rollouts.keep(kept, rollout, prompt_rows, keys, group_size, self.mesh)

    def experience(self, trained, base, ref_params, scored: ScoredRollout, kl_coef):
        """As `Programs.experience`."""
        models = self.models(trained, base, ref_params)
        made, metrics = self.algorithm.make_experience(models, scored, config=self.config, kl_coef=kl_coef)
        # Of the scores as the rewards returned them: clipping may hide an infinity.
        causes = nonfinite.causes_of(score=jnp.where(scored.scorable, scored.scores, 0.0))
        lengths = length_metrics(scored.rollout, self.unused_ids)
        return made, {**lengths, "nonfinite/causes": causes, **metrics}

    def update(self, state, base, experience, metrics):
        """As `Programs.update`."""
        algorithm, config = self.algorithm, self.config
        key = jax.random.fold_in(update_key(state.seed, state.step), 1)
        after, update_metrics = algorithm.update(
            self.forms.replace(base=base),
            state,
            experience,
            config=config,
            optimizer=self.optimizer,
            key=key,
            causes=metrics["nonfinite/causes"],
        )
        if algorithm.adapt_kl_coef is not None:
            after = algorithm.adapt_kl_coef(after, metrics, config)
        return self._finish(state, after, metrics, update_metrics)

    def skip(self, state, rollout):
        """As `Programs.skip`."""
        after = nonfinite.add_counts(state, self.config, step=1, episodes=self.config.batch_size)
        return self._finish(state, after, length_metrics(rollout, self.unused_ids), {})

    def _finish(self, before: TrainState, state: TrainState, metrics, update_metrics):
        """Counts the tokens of a rollout; adds the metrics of progress, with the learning rates of the step before."""
        metrics, algorithm, optimizer = dict(metrics), self.algorithm, self.optimizer
        state = nonfinite.add_counts(state, self.config, tokens=metrics.pop("rollout/tokens"))
        steps_per_update = algorithm.steps_per_update(self.config)
        rate = None
        if optimizer.learning_rate is not None:
            rate = optimizer.learning_rate(before.step * steps_per_update)
        progress = progress_metrics(state, rate, algorithm.learning_rate_metrics, self.episodes_per_epoch)
        if optimizer.value_learning_rate is not None:
            progress["critic_lr"] = optimizer.value_learning_rate(before.step * steps_per_update)
        counts = {"num_tokens": state.tokens, "nonfinite/in_a_row": state.nonfinite}
        return state, {**metrics, **update_metrics, **progress, **counts}

    def eval_metrics(self, trained, base, experience):
        """As `Programs.eval_metrics`."""
        if self.algorithm.eval_metrics is None:
            return {}
        return self.algorithm.eval_metrics(self.models(trained, base), experience, config=self.config)

    def token_kl(self, trained, base, ref_params, rollout, images=None):
        """As `Programs.token_kl`."""
        models = self.models(trained, base, ref_params)
        return map_in_chunks(
            lambda chunk: response_logprobs.token_kl(models, chunk[0], self.config, chunk[1]),
            (rollout, images),
            self.config.rollout_batch_size,
        )


def prompt_width(config) -> int:
    """Columns of the longest prompts that there may be."""
    return max(config.length_buckets or (8 * math.ceil(config.query_length / 8),))

"""The compiled programs of a stage that samples: generate, experience, update and those of evaluation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms import microbatch, nonfinite, policy_gradient, response_logprobs
from rlhf_jax.algorithms.groups import group_rows
from rlhf_jax.algorithms.metrics import length_metrics
from rlhf_jax.algorithms.networks import Models
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.config import PolicyConfig
from rlhf_jax.data.options import LengthOptions
from rlhf_jax.generate import Decoding, Sampling, generate_unstacked, map_in_chunks
from rlhf_jax.generate.guided import Automaton, Guide
from rlhf_jax.generate.options import SamplingOptions
from rlhf_jax.parallel import multihost, sharding
from rlhf_jax.parallel.compile_ahead import run_program
from rlhf_jax.rewards.interface import TrainerState
from rlhf_jax.rewards.scorer import Scored
from rlhf_jax.stages import partial_rollouts
from rlhf_jax.stages.algorithm_registry import RolloutAlgorithm
from rlhf_jax.stages.stage_context import StageContext, progress_metrics, update_key
from rlhf_jax.types import (
    Array,
    Experience,
    Images,
    Metrics,
    Params,
    PartialResponses,
    PromptBatch,
    Rollout,
    RolloutState,
    ScoredRollout,
    TrainState,
)


def sampling_of(
    config: SamplingOptions,
    eos_ids: tuple[int, ...],
    temperature: float | Array | None = None,
    suppress_ids: tuple[int, ...] = (),
) -> Sampling:
    """How responses are sampled.

    Args:
      config: sampling options, response_length, stop_token, stop_token_id, stop_token_ids.
      eos_ids: `Tokenizer.eos_ids`; the first fills the columns after a response.
      temperature: overrides that of the config and of generation_kwargs.
    """
    options = config.sampling()
    if temperature is not None:
        options["temperature"] = temperature
    stop: tuple[int, ...] = () if config.stop_token_id is None else (config.stop_token_id,)
    stop = eos_ids if config.stop_token == "eos" or config.stop_token_ids is not None else stop
    options |= {"stop_ids": stop, "fill_id": eos_ids[0], "suppress_ids": suppress_ids}
    return Sampling(max_new_tokens=config.response_length, **options)


def decoding_of(config: PolicyConfig, mesh) -> Decoding:
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


class Jitted(NamedTuple):
    """Pure functions of params and arrays under jit, called with keyword arguments."""

    generate: Any
    experience: Any
    update: Any  # donates the state
    skip: Any  # donates the state
    eval_metrics: Any
    token_kl: Any
    row_record: Any
    row_measures: Any
    current_logprobs: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """What a stage that samples computes on its devices; training and evaluation share it.

    Attributes:
      context: config, mesh and weights.
      algorithm, optimizer: of the run.
      models: with frozen params, which are arguments of the programs.
      state_shardings: of the TrainState, pinned as the output of every update, so that it compiles once.
      eos_ids: `Tokenizer.eos_ids`.
      suppress_ids: ids that are never sampled, beside the policy's own.
      unused_ids: ids that no token has.
      automaton: of the texts that responses may have; None: any.
      total_steps: updates of the run.
      episodes_per_epoch: responses in one pass over the prompts.
      run: as `run_program`; a dry run compiles in its place. `resident`: arrays of the run among the arguments.
    """

    context: StageContext[PolicyConfig]
    algorithm: RolloutAlgorithm
    optimizer: Optimizer
    models: Models
    state_shardings: Any
    eos_ids: tuple[int, ...]
    suppress_ids: tuple[int, ...]
    unused_ids: tuple[int, ...]
    automaton: Automaton | None
    total_steps: int
    episodes_per_epoch: int
    run: Callable[..., Any] = run_program

    def replace(self, **changes: Any) -> Programs:
        """The same programs, compiled or not, with other models of the same form or called by another `run`."""
        other = dataclasses.replace(self, **changes)
        vars(other)["jitted"] = self.jitted
        return other

    @functools.cached_property
    def jitted(self) -> Jitted:
        """The programs."""
        state: dict[str, Any] = {"donate_argnames": "state", "out_shardings": (self.state_shardings, None)}
        return Jitted(
            generate=jax.jit(self._generate, static_argnames=("greedy", "group_size")),
            experience=jax.jit(self._experience),
            update=jax.jit(self._update, **state),
            skip=jax.jit(self._skip, **state),
            eval_metrics=jax.jit(self._eval_metrics),
            token_kl=jax.jit(self._token_kl),
            row_record=jax.jit(_row_record, out_shardings=sharding.replicated(self.context.mesh)),
            row_measures=jax.jit(self._row_measures),
            current_logprobs=jax.jit(self._current_logprobs),
        )

    @property
    def config(self) -> PolicyConfig:
        """The stage's."""
        return self.context.config

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference policy."""
        return self.models.reference is not None

    def reference_params(self, state: TrainState | None = None) -> Params | None:
        """The reference's params on the device: the state's if updates move the reference, else the initial ones."""
        if state is not None and state.ref_params is not None:
            return state.ref_params
        return None if self.models.reference is None else sharding.resident(self.models.reference.params)

    # --- calls

    def place(self, prompts: PromptBatch) -> PromptBatch:
        """A batch of prompts from the host onto the mesh: all row numbers, and this process' share of the rest."""
        count, images = len(prompts.rows), prompts.images
        rows = prompts.rows[self.context.local_rows(count)]
        share = PromptBatch(prompts.tokens, prompts.lengths, rows, start=prompts.start)
        placed = self.context.place_share(share, count)
        return placed if images is None else placed.replace(images=self.context.place_share(images, count))

    def generate(
        self,
        policy: Params,
        prompts: PromptBatch,
        *,
        seed: Array,
        step: Array,
        temperature: float | None = None,
        group_size: int = 1,
        rollout_state: RolloutState | None = None,
        begun: PartialResponses | None = None,
    ) -> tuple[Rollout, RolloutState | None]:
        """Responses of a policy.

        Args:
          policy: params as in TrainState.
          prompts: P, of `place`.
          seed, step: [] uint32 and int32; together with a row's number they determine its response.
          temperature: None: the config's.
          group_size: responses to a prompt.
          rollout_state: of the rollout before, in training.
          begun: what the P * group_size responses begin with; None: what `rollout_state.unfinished` has, or nothing.

        Returns:
          (Rollout of P * group_size rows, RolloutState for the next rollout). With `rollout_state.unfinished` rows of a
          group that is not finished have length -1.
        """
        base = self.models.base
        if temperature is None:
            temperature = self.config.sampling()["temperature"]
        return self.run(
            "generate",
            self.jitted.generate,
            resident=(policy, None if base is None else base["policy"]),
            policy=policy,
            base=base,
            prompts=prompts,
            seed=seed,
            step=step,
            rollout_state=rollout_state,
            begun=begun,
            automaton=self.automaton,
            temperature=temperature,
            greedy=temperature == 0,
            group_size=group_size,
        )

    def sampler(
        self, policy: Params, **options: Any
    ) -> Callable[[PromptBatch, PartialResponses | None, int], tuple[Rollout, RolloutState | None]]:
        """`generate` with these options, as `turns.respond` takes it."""
        return lambda prompts, begun, group_size: self.generate(
            policy, prompts, begun=begun, group_size=group_size, **options
        )

    def make_experience(
        self, state: TrainState, rollout: Rollout, scored: Scored, group_size: int, images: Images | None = None
    ) -> tuple[Experience, Metrics]:
        """(experience, metrics) of a scored rollout; `images`: of its prompts, on the mesh."""
        reference = None if self.models.reference is None else self.models.reference.params
        return self.run(
            "experience",
            self.jitted.experience,
            resident=(state.params, self.models.base, reference if state.ref_params is None else state.ref_params),
            trained=state.params,
            base=self.models.base,
            ref_params=self.reference_params(state),
            automaton=self._learner_automaton,
            scored=ScoredRollout(
                rollout,
                scored.scores,
                scored.scorable,
                scored.token_rewards,
                eos_ids=self.eos_ids,
                each_reward=scored.each_reward,
                reward_weights=scored.weights,
                group_size=group_size,
                images=images,
            ),
            kl_coef=state.kl_coef,
        )

    def update(self, state: TrainState, experience: Experience, metrics: Metrics) -> tuple[TrainState, Metrics]:
        """(state, metrics of the update) of an experience and its metrics; the state is donated."""
        base = self.models.base
        return self.run(
            "update",
            self.jitted.update,
            resident=(state, base),
            state=state,
            base=base,
            experience=experience,
            metrics=metrics,
            peaks=self.optimizer.peaks,
            automaton=self._learner_automaton,
        )

    def skip(self, state: TrainState, rollout: Rollout) -> tuple[TrainState, Metrics]:
        """(state, metrics) of an update without any score; the state is donated."""
        return self.run("skip", self.jitted.skip, state=state, rollout=rollout, peaks=self.optimizer.peaks)

    def eval_metrics(self, state: TrainState, experience: Experience) -> Metrics:
        """Metrics of the loss without an update."""
        return self.run(
            "eval_metrics",
            self.jitted.eval_metrics,
            trained=state.params,
            base=self.models.base,
            experience=experience,
            automaton=self._learner_automaton,
        )

    def token_kl(
        self, policy: Params, rollout: Rollout, state: TrainState | None = None, images: Images | None = None
    ) -> Array:
        """KL of each response token to the reference: [B, T]; `images`: of the rows' prompts, one a row."""
        return self.run(
            "token_kl",
            self.jitted.token_kl,
            trained={"policy": policy},
            base=self.models.base,
            ref_params=self.reference_params(state),
            automaton=self._learner_automaton,
            rollout=rollout,
            images=images,
        )

    def row_record(self, rollout: Rollout, each_reward: Array) -> dict[str, Any]:
        """{"tokens": [B] uint32, a hash of the tokens of each row; "rewards": [F] of [B] float32}, on every process."""
        return self.jitted.row_record(rollout, each_reward)

    def row_measures(self, trained: Params, experience: Experience) -> dict[str, Any]:
        """As `policy_gradient.row_measures`; empty where the algorithm has none."""
        return self.jitted.row_measures(trained, self.models.base, experience, self._learner_automaton)

    def current_logprobs(self, trained: Params, experience: Experience) -> tuple[Array, Array | None]:
        """(log-probabilities, values or None) [B, T] of the responses by params as in TrainState."""
        return self.jitted.current_logprobs(trained, self.models.base, experience, self._learner_automaton)

    def trainer_state(self, step: int, is_eval: bool = False) -> TrainerState:
        """The progress that reward functions may read, before update `step` (0-based)."""
        episodes = step * self.config.batch_size
        return TrainerState(
            global_step=step,
            max_steps=self.total_steps,
            epoch=episodes / self.episodes_per_epoch,
            num_train_epochs=self.config.num_train_epochs,
            episode=episodes,
            is_eval=is_eval,
            is_world_process_zero=multihost.is_main(),
        )

    # --- pure functions

    @property
    def _models(self) -> Models:
        """The models without params."""
        reference = None if self.models.reference is None else self.models.reference.replace(params=None)
        return self.models.replace(reference=reference).with_base(None)

    @property
    def _learner_automaton(self) -> Automaton | None:
        """Of the tokens that log-probabilities are of; None: of all."""
        return self.automaton if self.config.structured_outputs_logprobs == "constrained" else None

    def _with_params(self, trained: Params, base: Params | None, ref_params: Params | None = None) -> Models:
        """The models with these params."""
        reference = self._models.reference
        if reference is not None:
            reference = reference.replace(params=ref_params)
        return self._models.replace(reference=reference).with_base(base).with_trained(trained)

    def _generate(
        self,
        *,
        policy,
        base,
        prompts: PromptBatch,
        seed,
        step,
        rollout_state,
        begun,
        automaton,
        temperature,
        greedy,
        group_size,
    ):
        config, batch, prompt_rows = self.config, prompts, prompts.rows
        policy = self._with_params({"policy": policy}, base).policy
        key, mesh = jax.random.fold_in(update_key(seed, step), 0), self.context.mesh
        rows = jnp.arange(batch.lengths.shape[0] * group_size)
        rows_per_prompt = group_size if self.algorithm.shares_prompts(self._models, config) else 1
        dtype = jnp.dtype(config.dtype)
        layers = policy.model.unstack(policy.params, dtype)
        if rows_per_prompt < group_size:
            batch = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), batch)

        decoding = decoding_of(config, mesh)
        options: dict[str, Any] = {"group": rows_per_prompt, "dtype": dtype}
        keys = expected = None
        if rollout_state is not None and rollout_state.response_lengths is not None:
            expected = partial_rollouts.expected_lengths(
                rollout_state.response_lengths, prompt_rows, config.response_length
            )
            expected = jnp.repeat(expected, group_size)
        if rollout_state is not None and rollout_state.unfinished is not None:
            keys = partial_rollouts.row_keys(key, rows, rollout_state.unfinished)
            begun = partial_rollouts.begun(rollout_state.unfinished) if begun is None else begun
            decoding = dataclasses.replace(decoding, max_steps=config.rollout_max_steps)
            options |= {"keys": keys}
        temperature = 0.0 if greedy else temperature
        sampling = sampling_of(config, self.eos_ids, temperature, self.suppress_ids)

        def generate_chunk(chunk):
            prompts, *by_row = chunk
            rows, expected, begun = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), by_row)
            guide = None
            if automaton is not None:
                guide = Guide(automaton, jnp.repeat(prompts.start, rows_per_prompt))
            by_row = {"rows": rows, "expected": expected, "guide": guide, "begun": begun}
            rollout = generate_unstacked(
                policy.model, layers, prompts, key, sampling, decoding=decoding, **by_row, **options
            )
            return jax.tree.map(lambda x: group_rows(x, rows_per_prompt), rollout)

        count = rows.shape[0] // rows_per_prompt
        at_once = config.rollout_batch_size if config.decode_slots is None else None
        chunk = microbatch.groups_per_chunk(at_once, rows_per_prompt, count)
        by_row = jax.tree.map(lambda x: group_rows(x, rows_per_prompt), (rows, expected, begun))
        rollout = map_in_chunks(generate_chunk, (batch, *by_row), chunk)
        rollout = sharding.spread_rows(jax.tree.map(lambda x: x.reshape((-1,) + x.shape[2:]), rollout), mesh)
        if rollout_state is None:
            return rollout, None
        return partial_rollouts.keep(rollout_state, rollout, prompt_rows, keys, step, mesh)

    def _experience(self, trained, base, ref_params, automaton, scored: ScoredRollout, kl_coef):
        models = self._with_params(trained, base, ref_params).with_automaton(automaton)
        experience, metrics = self.algorithm.make_experience(models, scored, config=self.config, kl_coef=kl_coef)
        # Of the scores as the rewards returned them: clipping may hide an infinity.
        causes = nonfinite.find_causes(score=jnp.where(scored.scorable, scored.scores, 0.0))
        lengths = length_metrics(scored.rollout, self.unused_ids)
        return experience, {**lengths, "nonfinite/causes": causes, **metrics}

    def _update(self, state: TrainState, base, experience, metrics, peaks, automaton):
        algorithm, config, optimizer = self.algorithm, self.config, self.optimizer.with_peaks(peaks)
        key = jax.random.fold_in(update_key(state.seed, state.step), 1)
        after, update_metrics = algorithm.update(
            self._models.with_base(base).with_automaton(automaton),
            state,
            experience,
            config=config,
            optimizer=optimizer,
            key=key,
            causes=metrics["nonfinite/causes"],
        )
        if algorithm.adapt_kl_coef is not None:
            after = algorithm.adapt_kl_coef(after, metrics, config)
        return self._finish(state, after, metrics, update_metrics, optimizer)

    def _skip(self, state: TrainState, rollout: Rollout, peaks):
        after = nonfinite.add_counts(state, self.config, step=1, episodes=self.config.batch_size)
        optimizer = self.optimizer.with_peaks(peaks)
        return self._finish(state, after, length_metrics(rollout, self.unused_ids), {}, optimizer)

    def _finish(self, before: TrainState, state: TrainState, metrics, update_metrics, optimizer: Optimizer):
        """Counts the tokens of a rollout; adds the metrics of progress, with the learning rates of the step before."""
        metrics, algorithm = dict(metrics), self.algorithm
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

    def _eval_metrics(self, trained, base, experience, automaton):
        if self.algorithm.eval_metrics is None:
            return {}
        models = self._with_params(trained, base).with_automaton(automaton)
        return self.algorithm.eval_metrics(models, experience, config=self.config)

    def _row_measures(self, trained, base, experience, automaton):
        if self.algorithm.row_measures is None:
            return {}
        models = self._models.with_base(base).with_automaton(automaton)
        return self.algorithm.row_measures(models, trained, experience, config=self.config)

    def _current_logprobs(self, trained, base, experience, automaton):
        models = self._with_params(trained, base).with_automaton(automaton)
        return policy_gradient.current_logprobs(models, experience, config=self.config)

    def _token_kl(self, trained, base, ref_params, automaton, rollout, images):
        models = self._with_params(trained, base, ref_params).with_automaton(automaton)
        return map_in_chunks(
            lambda chunk: response_logprobs.token_kl(models, chunk[0], self.config, chunk[1]),
            (rollout, images),
            self.config.rollout_batch_size,
        )


def prompt_width(config: LengthOptions) -> int:
    """Maximum prompt width in columns."""
    return max(config.length_buckets or (8 * math.ceil(config.query_length / 8),))


def _row_record(rollout: Rollout, each_reward: Array) -> dict[str, Any]:
    """As `Programs.row_record`. A row's hash is a polynomial in its tokens, modulo 2^32; padding does not change it. It
    is 0 for a row that is absent."""
    tokens = jnp.concatenate([rollout.prompt_tokens, rollout.response], axis=1).astype(jnp.uint32) + 1
    c, columns = rollout.prompt_tokens.shape[1], jnp.arange(tokens.shape[1])[None]
    used = (columns >= c - rollout.prompt_lengths[:, None]) & (columns < c + rollout.lengths[:, None])
    used &= (rollout.lengths >= 0)[:, None]
    # Powers count from the last token of the prompt, so that they do not depend on the prompts' width.
    before, after = (_powers(base, n) for base, n in ((_BASE_BEFORE, c), (_BASE_AFTER, tokens.shape[1] - c)))
    powers = np.concatenate([before[::-1], after])[None]
    hashes = jnp.sum(jnp.where(used, tokens * powers, 0), axis=1, dtype=jnp.uint32)
    return {"tokens": hashes, "rewards": list(each_reward.T)}


_BASE_BEFORE, _BASE_AFTER = 2654435761, 2246822519  # odd, so that no power is 0


def _powers(base: int, count: int) -> np.ndarray:
    """The first `count` powers of a number, modulo 2^32, [count] uint32."""
    return np.cumprod(np.full(count, base, np.uint32), dtype=np.uint32)

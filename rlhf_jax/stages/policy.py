"""What the stages that sample from a policy share: its models, its rewards, the rollout, an update's course.

An algorithm adds its networks, `experience`, `learn` and `look`; nothing here knows which one it is.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.algorithms import actor_critic, microbatch, nonfinite, rollout_metrics
from rlhf_jax.config.batch_sizes import batch_arithmetic, sampling_options
from rlhf_jax.errors import UserError
from rlhf_jax.generate import Sampling, generate_unstacked, map_in_chunks
from rlhf_jax.models.io import hf
from rlhf_jax.parallel import multihost, sharding
from rlhf_jax.rewards import scorer as scoring
from rlhf_jax.rewards.interface import TrainerState
from rlhf_jax.stages import adapters, base
from rlhf_jax.stages.evaluator import Batch, LookingStage
from rlhf_jax.types import PromptBatch
from rlhf_jax.utils.clock import Clock


class PolicyStage(LookingStage):
    """Sampling, scoring and looking; the algorithm comes from a subclass."""

    group = 1
    """Responses to a prompt in training."""
    eval_group = 1
    """And in evaluation."""
    shared_prompts = False
    trains_on = False
    """Whether an adapter at sft_model_path is trained on with unless told; else it is merged."""

    def __init__(
        self, config, *, train_dataset=None, eval_dataset=None, reward_funcs=None, optimizer=None, weights=None
    ):
        super().__init__(config, optimizer=optimizer, weights=weights)
        self._open_policy()
        self.train_data = data.load_prompts(config, self.tokenizer, train_dataset)
        self.eval_sets = data.load_eval_prompts(config, self.tokenizer, eval_dataset)
        self.report.append(str(self.train_data.report))
        reward_models = scoring.open_models(config, self.tokenizer, self.train_data.conversational)
        for model in reward_models:
            model.model = self.lay(model.model, "scalar")
            if model.tokenizer is None:
                self._check_context(model.model, f"reward model {model.path}")
            else:
                self.report.append(f"reward model {model.path} reads text, by its own tokenizer")
        self.scorer = scoring.Scorer(config, self.tokenizer, reward_models, list(reward_funcs or ()), self.mesh)
        for source in (self.train_data, *self.eval_sets.values()):
            self.scorer.check_columns(tuple(source.columns([0])))
        self._open_networks()
        self.total_steps = batch_arithmetic(config, self.rows).updates
        # Evaluation draws from a seed of its own, the same every time, so that two evaluations differ by the policy.
        # On the mesh like the state's seed and step: elsewhere they would compile the rollout a second time.
        self._eval_seed = self.weights.place(np.uint32(config.seed ^ 0x5EED), sharding.replicated(self.mesh))
        self.scorer.load_weights(self.weights, self.as_frozen, first_whole="reward" in self.copied())
        self._load_weights()
        self._settle_frozen()
        self._compile()
        self._ahead: dict[int, Any] = {}
        self.evidence: dict[int, Any] = {}  # batches and experiences of the last two updates, for `offenders`
        self.shown: Any = None  # a batch, its advantages and KL, which `training_completions` shows once

    @property
    def base_model(self):
        """The SFT model; None: random weights."""
        return None if self.config.scratch_model else self.config.sft_model_path

    @property
    def rows_per_update(self):
        """Prompts of an update."""
        return self.config.batch_size // self.group

    @property
    def episodes_per_pass(self):
        """Responses in a pass over the prompts."""
        return self.rows * self.group

    # --- to be defined by each algorithm

    def _open_networks(self) -> None:
        """Sets `nets`, without weights."""
        raise NotImplementedError

    def _load_weights(self) -> None:
        """Sets `state` and `ref_params`."""
        raise NotImplementedError

    def copied(self) -> set[str]:
        """Of 'policy' and 'reward', the models whose float32 params something that is trained starts from a copy of,
        beside the policy itself; the others are rounded as they are read where they are frozen."""
        form = self.policy.lora
        return {"policy"} if form is not None and form.modules_to_save and self.adapter is None else set()

    def experience(self, params, ref, rollout, scores, scorable, token_rewards, kl_coef, group):
        """(Experience, metrics) of a rollout; pure."""
        raise NotImplementedError

    def learn(self, state, base, experience, found):
        """(state, metrics) after one batch, adapters on `base`; pure."""
        raise NotImplementedError

    def look(self, params, experience):
        """The loss' metrics at `params`, nothing learned; pure."""
        raise NotImplementedError

    # --- models

    def _open_policy(self):
        """Configs and tokenizers only: everything that can be refused is, before a weight is read."""
        c = self.config
        if c.scratch_model:
            self.tokenizer = base.open_tokenizer(c, None, None)
            model = base.scratch_model(c, self.tokenizer.vocab_size, c.query_length + c.response_length)
        else:
            model = hf.load_model(c.sft_model_path, revision=c.model_revision)
            self.tokenizer = base.open_tokenizer(c, c.sft_model_path, model.config.vocab_size)
        self.policy = self.lay(model, "causal")
        if c.use_peft:
            adapters.open_policy(self)
        elif not c.scratch_model and hf.is_adapter(c.sft_model_path, c.model_revision):
            self.report.append(f"{c.sft_model_path} is an adapter: merged into its base, and all of it is trained")
        rows = self.policy.config.vocab_size
        if c.stop_token_id is not None and c.stop_token_id >= rows:
            raise UserError(
                f"--stop_token_id {c.stop_token_id} is beyond the vocabulary of {c.sft_model_path or c.scratch_model}: "
                f"its ids are 0 to {rows - 1}. No response could end by it"
            )
        self.ref = self.policy
        if c.use_peft and self.ref_adapter is not None:
            self.ref = dataclasses.replace(self.policy, lora=self.ref_adapter[0])
        if c.ref_model_path is not None:
            self.ref = self.lay(hf.load_model(c.ref_model_path, revision=c.ref_model_revision), "causal")
        self._check_context(self.policy, c.sft_model_path or c.scratch_model)
        self._check_same_ids(self.ref, "ref_model_path")

    def _check_context(self, model, path):
        needed = self.config.query_length + self.config.response_length
        base.check_context(model, needed, "--query_length + --response_length", path)

    def _check_same_ids(self, model, option):
        """A model that reads the policy's ids has rows for them, and room for its sequences."""
        c = self.config
        path = getattr(c, option) or c.sft_model_path or c.scratch_model
        self._check_context(model, path)
        most = max(self.tokenizer.pad_id, self.tokenizer.eos_id)
        if model.config.vocab_size <= most:
            raise UserError(
                f"--{option} {path} has {model.config.vocab_size} embedding rows, but the policy's tokenizer uses "
                f"id {most}: they were not made for one tokenizer"
            )

    def load_policy(self):
        """The params that the policy starts from; with adapters those of their base, as it is kept."""
        c = self.config
        if c.scratch_model:
            return self.weights.init(self.policy, jax.random.key(c.seed), ("causal",))
        path, revision = (self.start.path, self.start.revision) if c.use_peft else (c.sft_model_path, c.model_revision)
        as_read = adapters.as_base(self, self.policy) if c.use_peft and "policy" not in self.copied() else None
        return self.weights.load(self.policy, path, "causal", revision, as_read)

    def adapt(self, policy):
        """Sets `base` to the policy's params and gives those that are trained: the params themselves without adapters,
        which are new or an earlier one."""
        if not self.config.use_peft:
            return policy
        self.base = {"policy": adapters.beneath(self, self.policy, policy)}
        if self.adapter is None:
            return adapters.fresh(self, self.policy, policy, 0)
        return self.place_params(self.policy, self.adapter[1])

    def load_reference(self, policy, dtype):
        """The reference's params in `dtype`: its own, or a copy of those that the policy starts from.

        A copy, for an update gives the policy's buffers away."""
        c = self.config
        if c.ref_model_path is not None:
            as_read = None if dtype == jnp.float32 else self.as_frozen(self.ref)
            return self.weights.load(self.ref, c.ref_model_path, "causal", c.ref_model_revision, as_read)
        if c.use_peft:  # on the policy's own base, so that it costs nothing
            return {} if self.ref_adapter is None else self.place_params(self.ref, self.ref_adapter[1])
        return self.weights.copy(self.ref, policy, dtype)

    def _settle_frozen(self):
        """Reward models in the compute dtype, as the reference is, and where all of them wait."""
        where = self.config.offload_frozen

        def settled(params):
            return params if where == "none" else sharding.to_host_memory(params, f"offload_frozen {where}")

        if self.ref_params is not None:
            self.ref_params = settled(self.ref_params)
        for reader in self.scorer.models:
            reader.params = settled(self.rounded(reader.model, reader.params))

    def reference(self, state):
        """The reference's params, on the device: the state's own where training moves them."""
        return sharding.resident(self.ref_params) if state.ref_params is None else state.ref_params

    # --- programs

    def sampling(self, temperature: float | None) -> Sampling:
        """`sampling_of` the stage."""
        return sampling_of(self.config, self.tokenizer.eos_id, temperature)

    def _compile(self):
        c = self.config
        dtype = jnp.dtype(c.dtype)

        def rollout(policy, base, batch, seed, step, temperature, group):
            policy = self.nets.whole(base, {"policy": policy})["policy"]
            key = jax.random.fold_in(self.key(seed, step), 0)
            sampling = self.sampling(temperature)
            rows = jnp.arange(batch.lengths.shape[0] * group)
            together = group if self.shared_prompts else 1
            layers = self.policy.unstack(policy, dtype)
            if together < group:
                batch = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), batch)

            def some(part):
                prompts, rows = part
                options = {"group": together, "rows": rows.reshape(-1), "dtype": dtype}
                found = generate_unstacked(self.policy, layers, prompts, key, sampling, **options)
                return jax.tree.map(lambda x: rollout_metrics.grouped(x, together), found)

            at_once = microbatch.groups_at_once(c.rollout_batch_size, together, rows.shape[0] // together)
            found = map_in_chunks(some, (batch, rollout_metrics.grouped(rows, together)), at_once)
            found = jax.tree.map(lambda x: x.reshape((-1,) + x.shape[2:]), found)
            return sharding.spread_rows(found, self.mesh)

        def experience(params, base, ref, rollout, scores, scorable, token_rewards, kl_coef, group):
            params, ref = self.nets.whole(base, params), self.nets.reference(base, ref)
            made, found = self.experience(params, ref, rollout, scores, scorable, token_rewards, kl_coef, group)
            # As the rewards gave them: what is made of them may hide it, a clip an infinity.
            causes = nonfinite.causes(score=jnp.where(scorable, scores, 0.0))
            return made, {**rollout_metrics.length_metrics(rollout), "nonfinite/causes": causes, **found}

        def ended(before, state, found, metrics):
            found = dict(found)
            state = nonfinite.tick(state, c, tokens=found.pop("rollout/tokens"))
            clock = self.clock_metrics(state, self.shown_rate(before.step))
            counts = {"num_tokens": state.tokens, "nonfinite/in_a_row": state.nonfinite}
            return state, {**found, **metrics, **clock, **counts}

        def update(state, base, experience, found):
            after, metrics = self.learn(state, base, experience, found)
            return ended(state, after, found, metrics)

        def skip(state, rollout):
            after = nonfinite.tick(state, c, step=1, episodes=c.batch_size)
            return ended(state, after, rollout_metrics.length_metrics(rollout), {})

        def kl_of(params, base, ref, rollout):
            params, ref = self.nets.whole(base, params), self.nets.reference(base, ref)
            return map_in_chunks(
                lambda part: actor_critic.token_kl(self.nets, params, ref, part, c), rollout, c.rollout_batch_size
            )

        where = (self.state_shardings(), None)
        self._rollout = jax.jit(rollout, static_argnums=(5, 6))
        self._kl = jax.jit(kl_of)
        self._experience = jax.jit(experience, static_argnums=8)
        self._look = jax.jit(lambda params, base, found: self.look(self.nets.whole(base, params), found))
        self._update = jax.jit(update, donate_argnums=0, out_shardings=where)
        self._skip = jax.jit(skip, donate_argnums=0, out_shardings=where)

    def frozen(self) -> dict[str, Any]:
        """Params of the models that are never trained, by what they are."""
        found = {"base": self.base["policy"]} if self.base else {}
        value = self.base.get("value") if self.base else None
        if value is not None and all(value is not reader.params for reader in self.scorer.models):
            found["base of value"] = value
        if self.ref_params:
            found["reference"] = self.ref_params
        if self.state.ref_params is not None:
            found["reference that moves"] = self.state.ref_params
        for number, reader in enumerate(self.scorer.models, 1):
            found["reward" if number == 1 else f"reward {number}"] = reader.params
        return found

    def programs(self, build) -> None:
        """Hands each program of an update with the shapes of its arguments to `build(name, jitted, *arguments,
        resident=those that are held between programs)`, which gives the shapes of what it returns."""
        c, state, ref = self.config, self.state, self.reference(self.state)
        width = max(c.length_buckets or (8 * math.ceil(c.query_length / 8),))

        def rows(count, *shape, dtype=jnp.int32):
            return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=self.batch_sharding)

        p, b, policy = self.rows_per_update, c.batch_size, state.params["policy"]
        prompts = PromptBatch(rows(p, width), rows(p), rows(p))
        beneath = self.base["policy"] if self.base else None
        given = (policy, self.base, prompts, state.seed, state.step, None, self.group)
        rollout = build("generate", self._rollout, *given, resident=(policy, beneath))
        self.scorer.programs(build, rollout, self.group)
        scores, scorable = rows(b, dtype=jnp.float32), rows(b, dtype=bool)
        given = (state.params, self.base, ref, rollout, scores, scorable, None, state.kl_coef, self.group)
        held = self.ref_params if state.ref_params is None else state.ref_params
        made, found = build("experience", self._experience, *given, resident=(state.params, self.base, held))
        build("update", self._update, state, self.base, made, found, resident=(state, self.base))

    # --- an update

    def train_step(self, state, step):
        """Prompts, rollout, scores, experience, update; seconds of each."""
        c, clock = self.config, Clock()
        self.phase = "generate"
        prompts = self._prompts(step)
        rollout = self.roll(state.params["policy"], prompts, state.seed, state.step, None, self.group)
        rollout = clock.wait("generate", rollout)
        self._next("score")
        rows = np.repeat(prompts.rows, self.group)
        scored = self.scorer.score(rollout, self.train_data, rows, self.group, self.trainer_state(step))
        clock.wait("score", scored.scores)
        seconds = {f"reward/{name}": value for name, value in scored.seconds.items()}
        self._next("experience")
        if scored.nothing:
            warnings.warn(f"update {step + 1}: no response has a score; nothing is learned from it", stacklevel=2)
            state, metrics = self._skip(state, rollout)
            return state, {**metrics, **scored.metrics}, {**clock.seconds, **seconds}
        experience, found = clock.wait("experience", self.judge(state, rollout, scored, self.group))
        self._next("update")
        self.shown = None
        if c.log_completions and (step + 1) % c.logging_steps == 0:
            # Copies: the update may give these buffers away.
            advantages = jnp.array(experience.advantages)
            self.shown = Batch(rollout, scored, self.train_data, rows), advantages, self.kl_of_few(state, rollout)
        self.evidence = {n: kept for n, kept in self.evidence.items() if n == step}  # of the update before this one
        self.evidence[step + 1] = Batch(rollout, scored, self.train_data, rows), experience
        learned = self._update(state, self.base, experience, found)
        self._ahead = {step + 1: self._prompts(step + 1)}  # while the device works
        state, metrics = clock.wait("update", learned)
        return state, {**metrics, **scored.metrics}, {**clock.seconds, **seconds}

    def _next(self, phase: str) -> None:
        """A safe point between two phases of an update."""
        self.tick()
        self.phase = phase

    def _prompts(self, step: int):
        """The host's batch of an update: the one prepared during the last, or a new one."""
        if step not in self._ahead:
            size = self.rows_per_update
            return self.train_data.batch(self.config.seed, step, size, self.here(size))
        return self._ahead[step]

    def roll(self, policy, prompts, seed, step, temperature, group):
        """Responses of a policy to a batch of prompts from the host, of which this process has its share."""
        size = len(prompts.rows)
        share = PromptBatch(prompts.tokens, prompts.lengths, prompts.rows[self.here(size)])
        placed = self.place_share(share, size)
        if temperature == sampling_options(self.config)["temperature"]:
            temperature = None  # the same program as in training
        return self._rollout(policy, self.base, placed, seed, step, temperature, group)

    def judge(self, state, rollout, scored, group):
        """(Experience, metrics) of a scored rollout."""
        return self._experience(
            state.params,
            self.base,
            self.reference(state),
            rollout,
            scored.scores,
            scored.scorable,
            scored.token_rewards,
            state.kl_coef,
            group,
        )

    def trainer_state(self, step: int, is_eval: bool = False) -> TrainerState:
        """What reward functions may know of the run's progress before update `step` (0-based)."""
        episodes = step * self.config.batch_size
        return TrainerState(
            global_step=step,
            max_steps=self.total_steps,
            epoch=episodes / self.episodes_per_pass,
            num_train_epochs=self.config.num_train_epochs,
            episode=episodes,
            is_eval=is_eval,
            is_world_process_zero=multihost.is_main(),
        )

    def export_policy(self, state, folder) -> dict[str, str]:
        """policy/ as a Hugging Face checkpoint with the tokenizer, by the first process; see `adapters.write`."""
        params = state.params["policy"]
        if self.base is not None:
            return adapters.write_policy(self, folder, params)
        path = os.path.join(folder, "policy")
        self.save(path, self.policy, params, "causal")
        return {"policy": path}

    def close(self):
        """Ends the threads of reward functions."""
        self.scorer.close()


def sampling_of(config, eos_id: int, temperature: float | None = None) -> Sampling:
    """How responses are drawn.

    Args:
      config: sampling options, response_length, stop_token, stop_token_id.
      eos_id: the tokenizer's.
      temperature: in place of that of the config and of generation_kwargs.
    """
    options = sampling_options(config)
    if temperature is not None:
        options["temperature"] = temperature
    stop = eos_id if config.stop_token == "eos" else config.stop_token_id
    return Sampling(max_new_tokens=config.response_length, stop_id=stop, fill_id=eos_id, **options)

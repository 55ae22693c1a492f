"""A stage that trains a policy on its own responses: generate, score, make experience, update.

The algorithm comes as a record (see `algorithms.RolloutAlgorithm`); nothing here depends on which one it is.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.algorithms import optimizer as optimizers
from rlhf_jax.algorithms.optimizer_options import OptimizerOptions
from rlhf_jax.config import PolicyConfig
from rlhf_jax.config.batch_sizes import batch_arithmetic
from rlhf_jax.errors import UserError
from rlhf_jax.models.placement import AbstractWeights
from rlhf_jax.parallel import sharding
from rlhf_jax.parallel.compile_ahead import CompileAhead, can_foresee, result_shapes, same_structure
from rlhf_jax.rewards.scorer import Scored, Scorer
from rlhf_jax.runtime.stopping import Tick, no_tick
from rlhf_jax.stages import partial_rollouts, rollout_models
from rlhf_jax.stages.algorithm_registry import RolloutAlgorithm
from rlhf_jax.stages.evaluator import Completions, RolloutEvaluator, ScoredBatch
from rlhf_jax.stages.export import export_model, exported_generation
from rlhf_jax.stages.guide import open_guide
from rlhf_jax.stages.open_models import Source
from rlhf_jax.stages.open_tools import open_tools
from rlhf_jax.stages.programs import Programs, prompt_width, sampling_of
from rlhf_jax.stages.stage import Rows, Stage
from rlhf_jax.stages.stage_context import StageContext, input_fingerprints, state_shardings
from rlhf_jax.stages.turns import respond, update_label
from rlhf_jax.stages.work import Shape, Work, rollout_work
from rlhf_jax.types import Experience, Images, Params, PartialResponses, PromptBatch, Rollout, TrainState, Unfinished
from rlhf_jax.utils.clock import Clock

PHASES = ("generate", "score", "experience", "update")


class RolloutStage(Stage):
    """The stage of PPO, RLOO, GRPO and registered algorithms.

    Attributes beside those of `Stage`:
      algorithm: the record.
      context: config, mesh and weights.
      opened: models without params, with the tokenizer.
      models: the same with frozen params.
      programs: what it computes on the devices.
      generation: what the exported policy says of generation.
      evaluator: a RolloutEvaluator.
      scorer: the rewards.
      turns: of responses that call tools; None: there are no tools.
      train_data, eval_sets: prompts.
      group_size: responses to a prompt.
      shares_prompts: whether generation computes each prompt once for its group.
    """

    config: PolicyConfig
    context: StageContext[PolicyConfig]
    records_rows = True

    def __init__(
        self,
        config: PolicyConfig,
        algorithm: RolloutAlgorithm,
        *,
        train_dataset=None,
        eval_dataset=None,
        reward_funcs=None,
        tools=None,
        environment_factory=None,
        optimizer=None,
        weights=None,
        template_date=None,
        compile_ahead=False,
    ):
        self.algorithm, self.name, self.progress = algorithm, algorithm.name, algorithm.progress
        self._tools = open_tools(config, list(tools or ()), environment_factory)
        self.context = StageContext.open(self._tools.config, weights)
        self.config, self.weights, self.mesh = self.context.config, self.context.weights, self.context.mesh
        if optimizer is not None:
            refuse_options_of_adamw(self.config)
        self.group_size = algorithm.group_size(self.config)
        self._open(train_dataset, eval_dataset, list(reward_funcs or ()), template_date)
        self.total_steps = batch_arithmetic(self.config, self.rows).updates
        if optimizer is None:
            steps_per_update = algorithm.steps_per_update(self.config)
            optimizer = optimizers.make_optimizer(self.config, self.total_steps, steps_per_update)
        else:
            optimizer = optimizers.user_optimizer(optimizer)
        self._next_prompts: dict[int, PromptBatch] = {}  # of one update, prepared during the update before
        ahead = compile_ahead and can_foresee(self.mesh)
        programs = self._begin_to_compile(optimizer) if ahead else None
        try:
            loaded = self._load(self.context, optimizer)
        except BaseException:
            self.close()
            raise
        self.models, self.state = loaded.models, loaded.state
        self.scorer.set_params(loaded.reward_params)
        self.shares_prompts = self.algorithm.shares_prompts(self.models, self.config)
        if self.group_size > 1 and self.config.shared_prompts and not self.shares_prompts:
            self.messages.append(
                "the policy has dropout (lora_dropout counts), so updates compute each prompt once a response"
            )
        if programs is not None and same_structure(programs.state_shardings, state_shardings(self.state)):
            self._build(programs.replace(models=self.models))
        else:
            self._build(self._make_programs(loaded, optimizer))
        # What changes from update to update:
        self.phase = "update"
        self._prompt_lengths: dict[int, np.ndarray] = {}  # of the last two updates
        self._recent_batches: dict[int, tuple[ScoredBatch, Any]] = {}  # of the last two updates, with experience
        self._completions: tuple[ScoredBatch, Any, Any] | None = None  # of the last update, with advantages and KL
        self._row_record: dict[str, Any] | None = None  # of the last update

    def _open(self, train_dataset, eval_dataset, reward_funcs: list, template_date) -> None:
        """Tokenizer, data, models without params and rewards: all that can be refused, before a weight is read."""
        config, context, tools = self.config, self.context, self._tools
        train_rows = data.load_training_rows(tools.prompt_config, "demonstrations", train_dataset)
        opened = rollout_models.open_policy(context, self.algorithm, train_rows)
        self.tokenizer = dataclasses.replace(opened.tokenizer, template_date=template_date)
        self.generation = exported_generation(rollout_models.policy_source(config), self.tokenizer)
        prompts = data.PromptData, tools.prompt_config, self.tokenizer
        self.train_data = data.load(*prompts, train_rows, opened.processor)
        self.eval_sets = data.load_eval(*prompts, eval_dataset, opened.processor)
        sources = (self.train_data, *self.eval_sets.values())
        positions = opened.policy.config.max_position_embeddings
        self.turns = tools.turns(sources, self.tokenizer, positions=positions, mesh=self.mesh)
        reward_funcs += tools.reward_functions
        reward_models = rollout_models.open_reward_models(context, self.tokenizer, self.train_data.conversational)
        self.scorer = Scorer(config, self.tokenizer, reward_models, reward_funcs, self.mesh)
        for source in sources:
            self.scorer.check_columns((*source.columns([0]), *tools.reward_columns))
        if self.algorithm.has_value_model:
            opened = rollout_models.open_value_model(context, opened, reward_models)
        self.opened = opened
        self.suppress_ids, suppressions = rollout_models.suppressed_ids(
            config, self.tokenizer, opened.policy, reward_models, reference=opened.reference, value=opened.value
        )
        automaton, (self.train_data, *eval_sets) = open_guide(
            config,
            [self.train_data, *self.eval_sets.values()],
            self.tokenizer,
            rows=opened.policy.config.vocab_size,
            stop_ids=sampling_of(config, self.tokenizer.eos_ids).stop_ids,
            excluded_ids=self._excluded_ids,
        )
        self.automaton = self.weights.place(automaton, sharding.replicated(self.mesh))
        self.eval_sets = dict(zip(self.eval_sets, eval_sets))
        self.messages = [*opened.messages, str(self.train_data.report)]
        self.messages += [
            f"reward model {reader.path} reads text, by its own tokenizer"
            for reader in reward_models
            if reader.tokenizer
        ]
        self.messages += dict.fromkeys(note for source in sources for note in self.scorer.type_notes(source.some_raw()))
        self.messages += suppressions
        self.messages += tools.messages

    def _load(self, context: StageContext[PolicyConfig], optimizer) -> rollout_models.LoadedModels:
        """Params of all models, and the train state."""
        loaded = rollout_models.load_models(context, self.algorithm, self.opened, self.scorer.models, optimizer)
        prompts, width = len(self.train_data), self.rows_per_update
        rollout_state = partial_rollouts.initial(self.config, prompts, width, tools=self.turns is not None)
        if rollout_state is None:
            return loaded
        rollout_state = context.weights.place(rollout_state, partial_rollouts.layout(rollout_state, self.mesh))
        return loaded._replace(state=loaded.state.replace(rollout=rollout_state))

    @property
    def _excluded_ids(self) -> tuple[int, ...]:
        """Ids that are never sampled."""
        return (*self.opened.policy.suppress_ids, *self.suppress_ids)

    def _make_programs(self, loaded: rollout_models.LoadedModels, optimizer) -> Programs:
        """The programs for these models; only the shapes of params, not their values, are compiled in."""
        policy = self.opened.policy
        return Programs(
            context=self.context,
            algorithm=self.algorithm,
            optimizer=optimizer,
            models=loaded.models,
            state_shardings=state_shardings(loaded.state),
            eos_ids=self.tokenizer.eos_ids,
            suppress_ids=self._excluded_ids,
            unused_ids=self.tokenizer.unused_ids(policy.config.vocab_size),
            automaton=self.automaton,
            total_steps=self.total_steps,
            episodes_per_epoch=self.rows * self.group_size,
        )

    def _begin_to_compile(self, optimizer) -> Programs:
        """Begins to compile the first update's programs, for params that are not loaded yet."""
        prompts = self._prompts(0)
        self._next_prompts = {0: prompts}
        context = dataclasses.replace(self.context, weights=AbstractWeights(self.mesh))
        loaded = self._load(context, optimizer)
        programs = self._make_programs(loaded, optimizer)
        self.compiling = CompileAhead(
            lambda build: self._trace(
                programs.replace(run=build), loaded.state, loaded.reward_params, prompts.tokens.shape[1], prompts.images
            ),
            self.mesh,
        )
        self.scorer.run = self.compiling.run
        return programs.replace(run=self.compiling.run)

    def _build(self, programs: Programs) -> None:
        """What calls the programs."""
        self.programs = programs
        # On the mesh, like the state's seed: elsewhere it would compile the rollout a second time.
        eval_seed = self.weights.place(np.uint32(self.config.seed ^ 0x5EED), sharding.replicated(self.mesh))
        self.evaluator = RolloutEvaluator(
            programs=self.programs,
            scorer=self.scorer,
            turns=self.turns,
            tokenizer=self.tokenizer,
            train_data=self.train_data,
            eval_sets=self.eval_sets,
            group_size=self.algorithm.eval_group_size(self.config),
            token_advantages=self.algorithm.token_advantages,
            seed=eval_seed,
        )

    @property
    def rows(self) -> int:
        """Prompts of the training data."""
        return len(self.train_data)

    @property
    def rows_per_update(self) -> int:
        """Prompts of an update."""
        return self.config.batch_size // self.group_size

    @property
    def base_model(self) -> str | None:
        """The SFT model; None: random weights."""
        return None if self.config.scratch_model else self.config.sft_model_path

    # --- an update

    def train_step(
        self,
        state: TrainState,
        step: int,
        tick: Tick = no_tick,
        *,
        observe: Callable[[TrainState, ScoredBatch, Experience], None] = lambda *_: None,
    ):
        """As `Stage.train_step`: prompts, rollout, scores, experience, update. `observe` is called before the update,
        which overwrites the state."""
        config, programs, clock = self.config, self.programs, Clock()
        self.phase = "generate"
        group_size, unfinished = self.group_size, None
        if config.rollout_max_steps is not None:
            prompts, state, unfinished = self._prompts_that_go_on(state)
        else:
            prompts = self._prompts(step)
            recent = {n: lengths for n, lengths in self._prompt_lengths.items() if n == step}
            self._prompt_lengths = {**recent, step + 1: np.asarray(prompts.lengths)}
        policy = state.params["policy"]
        responses = respond(
            programs.sampler(policy, seed=state.seed, step=state.step, rollout_state=state.rollout),
            programs.place,
            self.turns,
            prompts,
            self.train_data,
            group_size=group_size,
            at=update_label(step),
            tick=tick,
            unfinished=unfinished,
        )
        rollout_state, conversations = responses.rollout_state, responses.conversations
        images = responses.prompts.images
        state, rollout = state.replace(rollout=rollout_state), clock.wait("generate", responses.rollout)

        tick()
        self.phase = "score"
        present = responses.present
        scored = self.scorer.score(
            rollout,
            responses.source,
            responses.rows,
            group=group_size,
            state=programs.trainer_state(step),
            present=present,
            conversations=conversations,
        )
        clock.wait("score", scored.scores)
        self._row_record = self._record_rows(rollout, responses.rows, scored)
        of_host = {f"reward/{name}": value for name, value in scored.seconds.items()}
        host_metrics = scored.metrics
        if conversations is not None:
            of_host["tools"], host_metrics = conversations.seconds, {**conversations.metrics, **scored.metrics}

        tick()
        self.phase = "experience"
        if scored.none_scorable:
            why = "no response has a score" if present is None or present.any() else "no response is finished"
            warnings.warn(f"update {step + 1}: {why}; nothing is learned from it", stacklevel=2)
            state, metrics = programs.skip(state, rollout)
            if present is not None and not present.any():  # lengths of no response, which alarms would take for 0
                lengths = ("completions/", "val/response_length")
                metrics = {name: value for name, value in metrics.items() if not name.startswith(lengths)}
            return state, {**metrics, **host_metrics}, {**clock.seconds, **of_host}
        result = programs.make_experience(state, rollout, scored, group_size, images)
        experience, metrics = clock.wait("experience", result)

        tick()
        self.phase = "update"
        batch = ScoredBatch(rollout, scored, responses.source, responses.rows, images)
        self._completions = None
        if config.log_completions and (step + 1) % config.logging_steps == 0:
            self._completions = batch, experience.advantages, self._token_kl(state, batch)
        self._recent_batches = {n: recent for n, recent in self._recent_batches.items() if n == step}
        self._recent_batches[step + 1] = batch, experience
        observe(state, batch, experience)
        updated = programs.update(state, experience, metrics)
        if config.rollout_max_steps is None:
            self._next_prompts = {step + 1: self._prompts(step + 1)}  # while the device computes
        state, metrics = clock.wait("update", updated)
        return state, {**metrics, **host_metrics}, {**clock.seconds, **of_host}

    def work(self, step: int, tokens: int) -> dict[str, Work]:
        """As `Stage.work`; responses count with their mean length. Empty where responses go on over several updates."""
        config, prompts = self.config, self._prompt_lengths.get(step)
        if prompts is None:
            return {}
        all_prompts = int(prompts.sum()) * self.rows_per_update / len(prompts)  # of all processes
        response = max(tokens / config.batch_size - all_prompts / self.rows_per_update, 1.0)
        networks = {"policy": self.models.policy, "value": self.models.value, "reference": self.models.reference}
        shapes = {role: Shape.of(network.model) for role, network in networks.items() if network is not None}
        shapes |= {f"reward {number}": Shape.of(reader.model) for number, reader in enumerate(self.scorer.models)}
        phases = rollout_work(
            shapes,
            prompts.tolist(),
            self.group_size,
            response,
            config.epochs_per_update,
            frozen=[role for role, network in networks.items() if network is not None and network.model.lora],
            itemsize=jnp.dtype(config.dtype).itemsize,
            recomputes=self.algorithm.recomputes(config),
        )
        scale = self.rows_per_update / len(prompts)
        phases = {name: Work(*(scale * number for number in phases[name])) for name in PHASES}
        return {name: work for name, work in phases.items() if work.flops}

    def _record_rows(self, rollout: Rollout, rows: np.ndarray, scored: Scored) -> dict[str, Any]:
        """What identifies the rows of an update, [B] each, and stands in for reward functions when it is recomputed:
        {"rows": in the data set, "tokens": a hash of prompt and response, 0 for a response that is not finished,
        "rewards": each by name, NaN where it does not apply}, and where there are any {"dropped": positions of rows
        whose rewards failed, "metrics": that functions logged}."""
        record = self.programs.row_record(rollout, scored.each_reward)
        record["rewards"] = dict(zip(self.scorer.names, record["rewards"]))
        if scored.failed.any():
            record["dropped"] = np.flatnonzero(scored.failed)
        if scored.function_metrics:
            record["metrics"] = scored.function_metrics
        return {"rows": rows, **record}

    def row_record(self) -> dict[str, Any] | None:
        """As `Stage.row_record`."""
        return self._row_record

    def _token_kl(self, state: TrainState, batch: ScoredBatch):
        return self.evaluator.first_token_kl(state, batch.rollout, batch.images, self.group_size)

    def _prompts(self, step: int) -> PromptBatch:
        """The host's batch of an update."""
        if step not in self._next_prompts:
            count = self.rows_per_update
            return self.train_data.batch(self.config.seed, step, count, self.context.local_rows(count))
        return self._next_prompts[step]

    def _prompts_that_go_on(self, state: TrainState) -> tuple[PromptBatch, TrainState, Unfinished]:
        """(the host's batch of an update whose places may hold unfinished responses, the state with its rows, the
        unfinished responses with numpy arrays of the places)"""
        places = {name: getattr(state.rollout.unfinished, name) for name in ("rows", "held", "taken", "began")}
        unfinished = state.rollout.unfinished.replace(**sharding.fetch(places))
        rows = partial_rollouts.rows_of_update(self.train_data, self.config.seed, unfinished)
        on_mesh = self.weights.place(rows, sharding.replicated(self.mesh))
        rollout = state.rollout.replace(unfinished=state.rollout.unfinished.replace(rows=on_mesh))
        prompts = self.train_data.batch_from_rows(rows, self.context.local_rows(len(rows)))
        return prompts, state.replace(rollout=rollout), unfinished

    # --- between updates

    def evaluate(self, state: TrainState, tick: Tick = no_tick) -> dict[str, float]:
        """As `RolloutEvaluator.evaluate`."""
        return self.evaluator.evaluate(state, tick)

    def samples(self, state: TrainState, tick: Tick = no_tick) -> Completions:
        """As `RolloutEvaluator.samples`."""
        return self.evaluator.samples(state, tick)

    def training_completions(self) -> Completions:
        """TRL's completions table of the last training batch, where log_completions asks for it; else empty."""
        if self._completions is None:
            return [], []
        completions, self._completions = self._completions, None
        return self.evaluator.training_table(*completions)

    def nonfinite_rows(self, step: int) -> list[dict[str, Any]]:
        """As `RolloutEvaluator.nonfinite_rows`, of one of the last two updates; empty for an earlier one."""
        if step not in self._recent_batches:
            return []
        return self.evaluator.nonfinite_rows(*self._recent_batches[step])

    # --- what the run is made of

    def inputs(self) -> dict[str, str]:
        """As `Stage.inputs`."""
        date = self.scorer.template_date if self.train_data.conversational else None
        return input_fingerprints(self.context, self.train_data, self.eval_sets, date, self.tokenizer.stop_ids)

    def frozen(self) -> dict[str, Params]:
        """As `Stage.frozen`."""
        models, reward_models = self.models, self.scorer.models
        frozen = {} if models.base is None else {"base": models.base["policy"]}
        value_base = None if models.base is None else models.base.get("value")
        if value_base is not None and all(value_base is not reader.params for reader in reward_models):
            frozen["base of value"] = value_base
        if models.reference is not None and models.reference.params:
            frozen["reference"] = models.reference.params
        if self.state.ref_params is not None:
            frozen["reference that moves"] = self.state.ref_params
        for number, reader in enumerate(reward_models, 1):
            frozen["reward" if number == 1 else f"reward {number}"] = reader.params
        return frozen

    def trace_programs(self, build, *, rows: Rows = "allowed", micro_batch_size: int | None = None) -> None:
        """As `Stage.trace_programs`."""
        programs = self.programs.replace(run=build)
        if micro_batch_size is not None:
            config = dataclasses.replace(self.config, micro_batch_size=micro_batch_size)
            # By dataclasses, without the jitted functions of the other config.
            programs = dataclasses.replace(programs, context=dataclasses.replace(self.context, config=config))
        width = prompt_width(self.config) if rows == "allowed" else self.train_data.widest
        images = None if self.train_data.images is None else self.train_data.images.batch([0])
        reward_params = [reader.params for reader in self.scorer.models]
        self._trace(programs, self.state, reward_params, width, images)

    def _trace(
        self, programs: Programs, state: TrainState, reward_params: list[Params], width: int, images: Images | None
    ) -> None:
        """As `trace_programs`, of prompts of `width` columns with images of the shapes of `images`."""
        p, b, rows = self.rows_per_update, self.config.batch_size, self.context.row_shape
        images = jax.tree.map(lambda x: rows(p, *x.shape[1:], dtype=x.dtype), images)
        start = None if self.automaton is None else rows(p)
        group_size = self.group_size
        if self._tools.environments is not None:  # each response has a prompt of its own, of the widest prompts' width
            p, group_size, width = b, 1, prompt_width(self.config)
        prompts = PromptBatch(rows(p, width), rows(p), rows(p), images, start)
        begun = None
        if self.turns is not None:
            tokens = rows(b, self.config.response_length)
            logprobs = rows(b, self.config.response_length, dtype=jnp.float32)
            begun = PartialResponses(tokens, logprobs, lengths=rows(b), ended=rows(b, dtype=bool))
        rollout, _ = programs.generate(
            state.params["policy"],
            prompts,
            seed=state.seed,
            step=state.step,
            group_size=group_size,
            rollout_state=state.rollout,
            begun=begun,
        )
        if self.turns is not None:
            rollout = rollout.replace(sampled=rows(b, self.config.response_length, dtype=bool))
        token_rewards = self.scorer.programs(programs.run, reward_params, rollout, self.group_size)
        scores = rows(b, dtype=jnp.float32), rows(b, dtype=bool), rows(b, len(self.scorer.names), dtype=jnp.float32)
        scores, scorable, each_reward = result_shapes(scores, self.mesh)
        scored = Scored(
            scores=scores,
            scorable=scorable,
            token_rewards=token_rewards,
            each_reward=each_reward,
            weights=self.scorer.weights,
            metrics={},
            seconds={},
            extra={},
            failed=np.zeros(b, bool),
            function_metrics={},
            none_scorable=False,
        )
        experience, metrics = programs.make_experience(state, rollout, scored, self.group_size, images)
        programs.update(state, experience, metrics)

    def record_calls(self, folder: str) -> None:
        """As `Stage.record_calls`."""
        if self.turns is not None:
            self.turns.record(folder)

    def host_state(self) -> dict[str, Any]:
        """As `Stage.host_state`: what environments keep across responses."""
        return {} if self.turns is None else self.turns.host_state()

    def restore_host_state(self, saved: dict[str, Any]) -> list[str]:
        """As `Stage.restore_host_state`."""
        return [] if self.turns is None else self.turns.restore_host_state(saved)

    def resumed(self, state: TrainState) -> TrainState:
        """As `Stage.resumed`: a KL coefficient that no controller adapts is the config's."""
        if self.algorithm.adapt_kl_coef is not None and getattr(self.config, "kl_target", 0) is not None:
            return state
        return state.replace(kl_coef=self.weights.place(np.float32(self.config.kl_coef), state.kl_coef.sharding))

    def export(self, state: TrainState, folder: str) -> dict[str, str]:
        """policy/, and value/ where there is a critic, as Hugging Face checkpoints with the tokenizer."""
        opened, models = self.opened, self.models
        policy_base = None
        if opened.adapters is not None:
            start = opened.adapters.start
            policy_base = Source(start.path, start.revision, self.config.scratch_model)
        paths = export_model(
            self.context,
            folder,
            "policy",
            models.policy,
            state.params["policy"],
            self.tokenizer,
            base=policy_base,
            source=rollout_models.policy_source(self.config),
            generation=self.generation,
        )
        if self.algorithm.has_value_model:
            critic = "policy" if models.value is None else "value"
            source = rollout_models.value_source(self.config, models, policy_base)
            trained = state.params[critic]
            paths |= export_model(self.context, folder, "value", models.critic, trained, self.tokenizer, source=source)
        return paths

    def close(self) -> None:
        """Ends the threads of reward functions, of tools and of the compiler."""
        self.scorer.close()
        if self.turns is not None:
            self.turns.close()
        super().close()


def refuse_options_of_adamw(config: OptimizerOptions) -> None:
    """Refuses options for the critic's part of the optimizer if the user gives an optimizer, which is used as it is.

    Raises:
      UserError: names the option.
    """
    for name, default in (("value_learning_rate", None), ("critic_warmup_steps", 0)):
        value = vars(config).get(name, default)
        if value != default:
            raise UserError(
                f"{name} {value:g} is an option of the built-in AdamW, but run(optimizer=) gives another one: remove "
                "it. optax.partition gives the critic a transformation of its own."
            )

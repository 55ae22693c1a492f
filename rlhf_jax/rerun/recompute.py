"""Recomputes updates of a run from its checkpoints, and opens one: all arrays that it computed, on the host."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from rlhf_jax.config import PolicyConfig
from rlhf_jax.errors import UserError
from rlhf_jax.metrics.logger import MetricLogger
from rlhf_jax.metrics.sinks import Entry
from rlhf_jax.parallel import sharding
from rlhf_jax.rerun.recorded import RecordedRun
from rlhf_jax.rewards.interface import function_name, is_jax_reward
from rlhf_jax.rewards.python_functions import resolve
from rlhf_jax.runtime.checkpoint import Checkpoints
from rlhf_jax.runtime.run_folder import template_date
from rlhf_jax.stages import RolloutStage, Stage, open_stage
from rlhf_jax.stages.evaluator import ScoredBatch
from rlhf_jax.types import Experience, TrainState


@dataclasses.dataclass
class OpenedUpdate:
    """One update, recomputed. Arrays are on the host.

    Attributes:
      step: 1-based.
      metrics: as metrics.jsonl has them, without those of evaluations and alarms.
      before, after: trained params, by path.
      batch: what the update trained on; None: the stage does not sample.
    """

    step: int
    metrics: dict[str, Any]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    batch: OpenedBatch | None


@dataclasses.dataclass
class OpenedBatch:
    """The responses of an update: B rows, C columns of prompts, T columns of responses.

    Attributes:
      rows: [B] in the data set; prompts, completions: texts.
      prompt_tokens: [B, C]; prompt_lengths: [B]; response: [B, T]; lengths: [B], -1: the response is not finished.
      ended: [B] bool; trained: [B, T] bool, tokens that are trained on.
      sampler_logprobs: [B, T].
      rewards: [B, F]; scores: [B]; reward_names: [F].
      logprobs, ref_logprobs, advantages, values, returns: [B, T] or None.
      kl: [B, T] to the reference before the update, or None.
      new_logprobs, new_values: [B, T] after the update, or None.
      loss, gradient_norm: [B], of each row, or None; gradients: of the batch, by path.
      texts: [B] lists of the response's tokens as text.
    """

    rows: np.ndarray
    prompts: list[str]
    completions: list[str]
    texts: list[list[str]]
    reward_names: tuple[str, ...]
    prompt_tokens: np.ndarray
    prompt_lengths: np.ndarray
    response: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray
    trained: np.ndarray
    sampler_logprobs: np.ndarray
    rewards: np.ndarray
    scores: np.ndarray
    logprobs: np.ndarray | None
    ref_logprobs: np.ndarray | None
    advantages: np.ndarray
    values: np.ndarray | None
    returns: np.ndarray | None
    kl: np.ndarray | None
    new_logprobs: np.ndarray | None
    new_values: np.ndarray | None
    loss: np.ndarray | None
    gradient_norm: np.ndarray | None
    gradients: dict[str, np.ndarray]


class Recomputation:
    """The updates of a run after one of its checkpoints, one after another. Nothing is written to its folder.

    Attributes:
      stage: opened from config.json.
      step: updates done.
      notes: what a user should know of how it is computed.
    """

    def __init__(self, run: RecordedRun, start: int, *, objects: Mapping[str, Any] | None = None):
        """Opens the stage at a checkpoint.

        Args:
          run: its folder.
          start: a saved update, or 0.
          objects: arguments of `rlhf_jax.run` that the run had: train_dataset, reward_funcs, ...

        Raises:
          UserError: the run cannot be opened again, or its checkpoint is damaged.
        """
        self.run, self.step, self.notes = run, start, []
        config, objects = run.config, dict(objects or {})
        if isinstance(config, PolicyConfig):
            config = self._with_recorded_rewards(config, objects)
        date = template_date(run.folder.path)
        self.stage: Stage = open_stage(config, **objects, template_date=date)
        self.state: TrainState = self.stage.state
        self._entries: list[Entry] = []
        self._logger = MetricLogger([self])
        self._calls = None
        if isinstance(config, PolicyConfig) and (config.tools or config.environment_factory):
            self._calls = tempfile.TemporaryDirectory()  # the run's own records are read by tools_replay
            self.stage.record_calls(self._calls.name)
        if start:
            self.restore(start)

    def restore(self, step: int) -> None:
        """Goes to a saved update.

        Raises:
          UserError: its checkpoint is damaged, or of another state.
        """
        checkpoints = Checkpoints(self.run.folder.checkpoints, read_only=True)
        try:
            self.state, extra = checkpoints.restore(step, self.state)
        finally:
            checkpoints.close()
        self.state, self.step = self.stage.resumed(self.state), step
        self.notes += self.stage.restore_host_state(extra)
        self._logger = MetricLogger([self], tokens=extra.get("num_tokens", 0))

    def _with_recorded_rewards(self, config: PolicyConfig, objects: dict[str, Any]) -> PolicyConfig:
        """The config with functions that return recorded rewards in place of those on the host, in `objects`."""
        if config.tools or config.environment_factory:
            config = dataclasses.replace(config, tools_replay=self.run.folder.path)
        functions = [*map(resolve, config.reward_funcs), *objects.get("reward_funcs", ())]
        if not self.run.rows:
            if functions or config.reward_server:
                self.notes.append("rows.jsonl is missing: reward functions are called")
            return config
        names = list(next(iter(self.run.rows.values()))["rewards"])
        models = 0 if config.reward_model_path is None else 1 + len(config.more_reward_models)
        names = names[1 if models > 1 and config.reward_ensemble != "sum" else models :]
        functions += [None] * (len(names) - len(functions))  # a server, and objects that the run had
        functions = [
            function if function is not None and is_jax_reward(function) else self._recorded_reward(name, number == 0)
            for number, (name, function) in enumerate(zip(names, functions))
        ]
        if functions:
            objects["reward_funcs"] = functions
        return dataclasses.replace(config, reward_funcs=(), reward_server=None)

    def _recorded_reward(self, name: str, first: bool) -> Callable:
        """A reward function that returns the recorded rewards; `first`: it also logs the recorded metrics."""

        def function(prompts, completions, trainer_state, log_metric, **columns):
            line = self.run.rows.get(trainer_state.global_step + 1)
            if line is None:
                raise UserError(f"{self.run.folder.rows} has no update {trainer_state.global_step + 1}")
            if first:
                for metric, value in line.get("metrics", {}).items():
                    log_metric(metric, value)
            dropped = set(line.get("dropped", ()))
            values = [
                float("inf") if position in dropped else value
                for position, (value, tokens) in enumerate(zip(line["rewards"][name], line["tokens"]))
                if tokens
            ]
            if len(values) != len(prompts):
                raise UserError(
                    f"update {trainer_state.global_step + 1} has {len(prompts)} finished responses, but "
                    f"{self.run.folder.rows} has {len(values)}: the run cannot be recomputed here as it was"
                )
            return [None if np.isnan(value) else value for value in values]

        function.__name__ = name
        assert function_name(function) == name
        return function

    def continue_from(self, other: Recomputation) -> None:
        """Goes to where the recomputation of the same run with other options is.

        Raises:
          UserError: with these options the train state has another structure.
        """
        if jax.tree.structure(self.state) != jax.tree.structure(other.state):
            raise UserError("these options change what the run trains: no update of the run can go on with them")
        copied = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), other.state)
        self.state, self.step = self.stage.resumed(copied), other.step
        self._logger = MetricLogger([self], tokens=other.tokens)

    @property
    def tokens(self) -> int:
        """Of prompts and responses so far."""
        return self._logger.tokens

    # --- as a sink of metrics

    def write(self, entry: Entry) -> None:
        """Takes the metrics of an update."""
        self._entries.append(entry)

    def close(self) -> None:
        """Closes the stage."""
        self.stage.close()
        if self._calls is not None:
            self._calls.cleanup()

    # --- updates

    def advance(self, step: int) -> None:
        """Recomputes the updates up to and including `step`."""
        while self.step < step:
            self._update()

    def _update(self, **options: Any) -> dict[str, Any]:
        """Recomputes the next update. Returns its metrics."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rewards, told when the run was
            self.state, metrics, _ = self.stage.train_step(self.state, self.step, **options)
        self.step += 1
        self._logger.log(self.step, metrics)
        self._logger.flush()
        metrics = self._entries.pop().metrics
        return {name: value for name, value in metrics.items() if not name.startswith("nonfinite/")}

    def open(self, step: int) -> OpenedUpdate:
        """Recomputes the updates up to `step`, and opens that one."""
        self.advance(step - 1)
        before, batches = by_path(self.state.params), []
        options: dict[str, Any] = {}
        if isinstance(self.stage, RolloutStage):
            stage = self.stage

            def observe(state: TrainState, batch: ScoredBatch, experience: Experience) -> None:
                batches.append((_Observed(stage, state, batch, experience), experience))

            options["observe"] = observe
        metrics = self._update(**options)
        batch = None
        if batches:
            observed, experience = batches[0]
            batch = observed.opened(self.state, experience)
        return OpenedUpdate(step, metrics, before, by_path(self.state.params), batch)


class _Observed:
    """What an update trains on, taken to the host before the update."""

    def __init__(self, stage: RolloutStage, state: TrainState, batch: ScoredBatch, experience: Experience):
        programs, self._stage, self._batch = stage.programs, stage, batch
        kl = None
        if programs.has_reference:
            images = batch.images
            if images is not None:
                images = jax.tree.map(lambda x: np.repeat(x, stage.group_size, axis=0), images)
            kl = programs.token_kl(state.params["policy"], batch.rollout, state, images)
        measures = programs.row_measures(state.params, experience)
        rollout = batch.rollout
        fields = {
            name: getattr(rollout, name) for name in ("prompt_tokens", "prompt_lengths", "response", "lengths", "ended")
        }
        fields |= {"sampler_logprobs": rollout.logprobs, "rewards": batch.scored.each_reward, "kl": kl}
        scored = batch.scored
        fields["scores"] = jax.numpy.where(scored.scorable, scored.total_scores, np.nan)
        fields |= {"trained": experience.trained_mask, "advantages": experience.advantages}
        fields |= {name: getattr(experience, name) for name in ("logprobs", "ref_logprobs", "values", "returns")}
        fields |= {name: measures.get(name) for name in ("loss", "gradient_norm")}
        self._fields = sharding.fetch(fields)
        self._gradients = by_path(measures.get("gradients", {}))

    def opened(self, state: TrainState, experience: Experience) -> OpenedBatch:
        """With what the params after the update say of the same responses."""
        stage, rows = self._stage, self._batch.rows
        new_logprobs, new_values = sharding.fetch(stage.programs.current_logprobs(state.params, experience))
        fields, (count, t) = dict(self._fields), self._fields["response"].shape
        for name in ("logprobs", "ref_logprobs", "advantages", "values", "returns", "trained"):
            if fields[name] is not None:
                x = fields[name].reshape(count, -1)
                fields[name] = np.broadcast_to(x, (count, t)) if x.shape[1] == 1 else x
        ids = [row[: max(length, 0)].tolist() for row, length in zip(fields["response"], fields["lengths"])]
        return OpenedBatch(
            rows=rows,
            prompts=self._batch.source.display_texts(rows),
            completions=[stage.tokenizer.decode(row, skip_special_tokens=True) for row in ids],
            texts=[stage.tokenizer.token_texts(row) for row in ids],
            reward_names=stage.scorer.names,
            new_logprobs=new_logprobs,
            new_values=new_values,
            gradients=self._gradients,
            **fields,
        )


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a pytree on the host, by path."""
    return dict(zip(sharding.path_names(tree), sharding.fetch(jax.tree.leaves(tree)), strict=True))


@contextmanager
def recomputing(run: RecordedRun, start: int, **options: Any) -> Iterator[Recomputation]:
    """A `Recomputation`, closed at the end."""
    recomputation = Recomputation(run, start, **options)
    try:
        yield recomputation
    finally:
        recomputation.close()

"""Replays recorded GRPO runs of TRL 1.12.0. See `tests.parity.replay`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlhf_jax import advantages as adv
from rlhf_jax.algorithms import grpo
from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms.groups import split_groups
from rlhf_jax.algorithms.metrics import length_metrics
from tests.helpers.algorithms import scored, with_params
from tests.parity import options as opt
from tests.parity import tool_turns, trl_steps
from tests.parity.options import Refused
from tests.parity.report import absolute, compare_log, distance
from tests.parity.rloo import ARRAYS, CLOCKS, Current, Generation


class GRPO(Current):
    """TRL's GRPOTrainer: RLOO's stream of micro-batches, with advantages and a loss of its own."""

    objective = trl_steps.with_zero_std(grpo.OBJECTIVE)
    fingerprinted = ("prompt_ids", "completion_ids", "advantages")

    def config_of(self, steps: int, rows: int):
        """See `options.grpo_config`."""
        return opt.grpo_config(self.options, steps, rows, self.accum, self.folder.name)

    def begin(self) -> None:
        """As `RLOOReplay.begin`, with the adaptive coefficient of the entropy bonus."""
        super().begin()
        self.turns = None
        if tool_turns.has_tools(self.folder):
            self.turns = tool_turns.RecordedTurns(self.folder, self.options, self.trace)
        control = grpo.initial_entropy_control(self.config)
        self.state = self.state.replace(entropy_control=None if control is None else jnp.asarray(control))

    def recorded_share(self) -> float:
        """TRL's GRPO divides the loss of a micro-batch by `accum` itself."""
        return 1.0 / self.accum

    def batch_tokens(self, step: int) -> np.ndarray:
        """The tokens of each micro-batch's generation batch over its micro-batches, as TRL recorded them; micro-batches
        of one step may be of two generations."""
        micros = range(step * self.accum, (step + 1) * self.accum)
        items = [max(int(self.trace[f"step{micro}_num_items_in_batch"]), 1) for micro in micros]
        return np.array(items, np.float32) / (self.config.batch_size // self.micro)

    def _experience(self, params, base, ref, rollout, scores, scorable, each, images=None):
        models = with_params(self.models.with_base(base), params, ref)
        batch = scored(rollout, scores, scorable, eos_id=self.eos, group_size=self.config.num_generations)
        batch = batch.replace(each_reward=each, reward_weights=self.weights(each), images=images)
        experience, metrics = pg.make_experience(models, batch, config=self.config, objective=self.objective)
        if self.config.off_policy_mask_threshold is not None:
            # What TRL compares with where it does not sample by vLLM (grpo_trainer.py:3162).
            sampler = experience.logprobs
            if sampler is None:
                sampler = pg.compute_logprobs(models, experience, self.config, pg.Needs())[0]
            experience = experience.replace(sampler_logprobs=sampler.reshape(experience.sampler_logprobs.shape))
        return experience, metrics

    def weights(self, each) -> tuple[float, ...]:
        """The weight of each reward function."""
        weights = tuple(self.options.get("reward_weights") or [1.0] * each.shape[1])
        if self.turns is not None:  # those of environments are 1
            weights += (1.0,) * (each.shape[1] - len(weights))
        if len(weights) != each.shape[1]:
            raise Refused(f"{self.folder.name}: option reward_weights: {len(weights)} for {each.shape[1]} functions")
        return weights

    def generate(self, generation: int) -> tuple[Generation, dict[str, float]]:
        """Experience of a generation batch with the params as they are, compared, and its metrics."""
        where = f"generation {generation}"
        rollout, of_tools = self.rollout(generation), {}
        if self.turns is not None:
            rollout, of_tools = self.turns.rollout(generation, self.report, rollout)
        each = jnp.asarray(self.trace[f"rewards_per_func_{generation}"])
        weights = self.weights(each)
        scores, scorable = adv.combine_rewards(each, jnp.asarray(weights, jnp.float32))
        params, ref = self.state.params, self.reference()
        given = params, self.base, ref, rollout, scores, scorable, each, self.images(generation)
        experience, found = self.program("_experience")(*given)
        mask = np.asarray(experience.trained_mask).reshape(rollout.response.shape)
        for name, ours in (("old", experience.logprobs), ("ref", experience.ref_logprobs)):
            recorded = f"{name}_per_token_logps_{generation}"
            if recorded in self.trace.files:
                if ours is None:
                    raise Refused(f"{self.folder.name}: {recorded} is recorded, but no loss here reads it")
                theirs = self.trace[recorded]
                theirs = np.pad(theirs, ((0, 0), (0, mask.shape[1] - theirs.shape[1])))
                ours = np.asarray(ours).reshape(mask.shape)
                self.report.add(f"{name} log-probabilities", distance(ours[mask], theirs[mask]), ARRAYS, where)
        theirs = self.trace[f"completion_mask_{generation}"]
        if self.turns is not None:
            theirs = theirs * self.trace[f"tool_mask_{generation}"]
        theirs = np.pad(theirs, ((0, 0), (0, mask.shape[1] - theirs.shape[1])))
        self.report.add("tokens that are trained on", float((mask != theirs).sum()), 0.0, where)
        ours, theirs = np.asarray(experience.advantages).reshape(-1), self.trace[f"advantages_{generation}"]
        self.report.add("advantages", absolute(ours, theirs) / (float(np.linalg.norm(theirs)) or 1.0), ARRAYS, where)
        found = {**length_metrics(rollout), **found, **self.reward_metrics(each), **of_tools}
        metrics = {name: float(x) for name, x in found.items()}
        size = float(np.mean(np.abs(theirs)))
        return Generation(split_groups(experience), self.order(generation), size), metrics

    def compare_metrics(self, where: str, ours: dict[str, Any], theirs: dict[str, float], size: float) -> None:
        """Every metric that TRL logged; `size`: mean |advantage|, the size of the loss's terms."""
        unknown = f"{self.folder.name}: not one of GRPO's metrics"
        compare_log(self.report, ours, theirs, where, CLOCKS, unknown, {"loss": size, "policy_loss": size})


def replay_of(folder: Path, options: dict[str, Any]):
    """The replay for a case of GRPO; None for another."""
    return functools.partial(GRPO, folder) if options.get("algorithm") == "grpo" else None

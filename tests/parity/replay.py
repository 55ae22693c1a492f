"""Replays recorded TRL runs through the functions that training itself calls.

    python -m tests.parity.replay CASE_DIR...

TRL's samples and orders are read from the record; log-probabilities, values, scores, rewards, advantages, losses,
optimizer steps and metrics are ours. Prints quantity, difference, tolerance and verdict. Exit status: 0, all within
tolerance; 1, one is out; 2, a record is refused, with the option or file that is in the way.

Arrays differ by ||a - b|| / ||b||, metrics by |a - b| / max(|b|, 0.01).
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms import ppo, reward_model
from rlhf_jax.algorithms.groups import group_rollout
from rlhf_jax.algorithms.optimizer import learning_rate, scale_by_adamw
from rlhf_jax.algorithms.response_logprobs import response_logprobs
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.types import Rollout, TrainState
from tests.helpers.algorithms import at_rates, models_of, scored
from tests.parity import adapters, grpo, rloo, trl_steps
from tests.parity import options as opt
from tests.parity.options import Refused
from tests.parity.report import (
    Report,
    accumulating,
    as_accelerate_stepped,
    compare_log,
    distance,
    pass_ends,
    terms_of_kl,
)
from tests.parity.samples import credited, rollout_of
from tests.parity.weights import compare_weights, sum_of_rates

ARRAYS = 1e-5
CLOCKS = ("eps", "epoch")  # wall-clock and data set size: not of the algorithm


def full_sequence(rollout: Rollout):
    """Prompt and response in one sequence: (tokens [B, C + T], mask [B, C + T])."""
    c = rollout.prompt_tokens.shape[1]
    prompt_mask = jnp.arange(c)[None, :] >= (c - rollout.prompt_lengths)[:, None]
    tokens = jnp.concatenate([rollout.prompt_tokens, rollout.response], axis=1)
    return tokens, jnp.concatenate([prompt_mask, rollout.response_mask], axis=1)


class Replay:
    """One recorded PPO run and the models it started from."""

    def __init__(self, folder: Path) -> None:
        opt.check_folder(folder)
        case = json.loads((folder / "case.json").read_text())
        self.folder, self.options, self.logs = folder, case["options"], case["logs"]
        self.config = opt.ppo_config(self.options, len(self.logs), folder.name)
        self.cut = opt.stepping(self.options, folder.name)
        opt.check_ppo_folder(folder)
        self.trace = np.load(folder / "trace.npz")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        self.pad, self.eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.stop = self.eos if self.config.stop_token == "eos" else self.config.stop_token_id
        self.start = adapters.start_of(folder, self.options)
        value, value_params = hf.load(folder / "value", kind="scalar")
        self.reward_model, self.reward_params = hf.load(folder / "reward", kind="scalar")
        self.models = models_of(self.start.policy, self.start.ref, value)
        self.base, self.ref_params = self.start.base, self.start.ref_params
        self.optimizer = scale_by_adamw(self.config)
        self.start_params = {"policy": self.start.params, "value": value_params}
        self.widest = max(int(self.trace[f"context_length_{update}"]) for update in range(len(self.logs)))
        self.programs = {}

    def begin(self) -> None:
        """The state before the first update, and an empty report."""
        params = jax.tree.map(jnp.asarray, self.start_params)
        self.state = TrainState(
            params=params,
            opt_state=accumulating(self.optimizer, 1).init(params),
            step=jnp.int32(0),
            episodes=jnp.int32(0),
            seed=jnp.uint32(0),
            kl_coef=jnp.float32(self.config.kl_coef),
            tokens=jnp.uint32(0),
        )
        self.report = Report()
        self.report.notes += self.start.notes

    def program(self, name: str, *statics):
        """The compiled function of that name, compiled once for all updates."""
        key = (name, *statics)
        if key not in self.programs:
            self.programs[key] = jax.jit(functools.partial(getattr(self, name), *statics))
        return self.programs[key]

    def _score(self, params, rollout):
        return reward_model.score_rollout(self.reward_model, params, rollout, dtype=jnp.float32)

    def _whole(self, params, base, ref):
        reference = self.models.reference.replace(params=ref)
        return self.models.replace(reference=reference).with_base(base).with_trained(params)

    def _experience(self, state, base, ref, rollout, scores):
        models, batch = self._whole(state.params, base, ref), scored(rollout, scores, eos_id=self.eos)
        return ppo.make_experience(models, batch, config=self.config, kl_coef=state.kl_coef)

    def _learn(self, steps, accum, state, base, experience, orders, rate):
        optimizer, models = at_rates(accumulating(self.optimizer, accum), rate), self.models.with_base(base)
        options = {"steps": steps, "config": self.config, "objective": ppo.OBJECTIVE, "optimizer": optimizer}
        return trl_steps.update(models, state, experience, orders, **options)

    def _value_output(self, params, rollout):
        """The value at the token before the first pad of the untruncated row: what get_reward returns."""
        tokens, mask = full_sequence(rollout)
        model = self.models.value.model
        values = model.scalars(params, model.hidden(params, tokens, mask))
        last = rollout.prompt_tokens.shape[1] - 1 + adv.first_true(rollout.response == self.pad)
        return values[jnp.arange(values.shape[0]), last]

    def _ref_logprobs(self, params, base, ref, rollout):
        reference = self._whole(params, base, ref).reference
        return response_logprobs(reference, group_rollout(rollout), self.config)[0][:, 0]

    # ------------------------------------------------------------------------------------------------ what was sampled

    def rollout(self, update: int) -> Rollout:
        """TRL's samples, see `samples.rollout_of`."""
        ids = self.trace[f"query_responses_{update}"]
        context = int(self.trace[f"context_length_{update}"])
        # Left padding changes nothing, and with one width for all updates there is less to compile.
        prompts = np.pad(ids[:, :context], ((0, 0), (self.widest - context, 0)), constant_values=self.pad)
        return rollout_of(prompts, ids[:, context:], self.stop, self.pad)

    def credited(self, scores: jax.Array, rollout: Rollout) -> jax.Array:
        """Scores that come out as TRL's once the trainer has taken off its missing-eos penalty."""
        return credited(scores, rollout, self.config.missing_eos_penalty, self.stop, self.eos, self.pad)

    def recorded_scores(self, update: int) -> tuple[np.ndarray, np.ndarray]:
        """What get_reward gave for the value model and for the reward model, chunks of an update joined."""
        chunk = self.options.get("local_rollout_forward_batch_size", opt.FORWARD_BATCH)
        chunks = math.ceil(self.config.batch_size / chunk)
        calls = [self.trace[f"get_reward_{i}"] for i in range(2 * chunks * update, 2 * chunks * (update + 1))]
        return np.concatenate(calls[0::2]), np.concatenate(calls[1::2])

    # ------------------------------------------------------------------------------------------------------ one update

    def run(self) -> Report:
        """All updates, then the weights they ended with."""
        return as_accelerate_stepped(self.run_stepping, self.cut, len(self.logs))

    def run_stepping(self, period: int | None) -> Report:
        """As `run`, with passes over the data of that many updates."""
        self.begin()
        for update, log in enumerate(self.logs):
            rollout = self.rollout(update)
            scores = self.program("_score")(self.reward_params, rollout)
            experience, found = self.program("_experience")(
                self.state, self.base, self.ref_params, rollout, self.credited(scores, rollout)
            )
            self.compare_experience(update, rollout, scores, experience)
            self.learn(update, log, experience, found, pass_ends(update, period))
        steps = self.config.num_ppo_epochs * self.cut.micros
        rates = steps * sum_of_rates(self.config, len(self.logs))
        policy, theirs = adapters.ended(self.start, self.state.params["policy"])
        _, value = hf.load(self.folder / "final_value", kind="scalar")
        for role, ours, recorded in (("policy", policy, theirs), ("value", self.state.params["value"], value)):
            model = getattr(self.models, role).model
            compare_weights(self.report, role, ours, recorded, model, self.config.adam_epsilon, rates)
        return self.report

    def compare_experience(self, update: int, rollout: Rollout, scores, experience) -> None:
        """Log-probabilities, values, scores and both sides of every whitening, against the record."""
        where = f"update {update}"
        inside = np.asarray(adv.response_mask(rollout.lengths, rollout.response.shape[1]))
        sampled = losses.logprobs_from_logits(self.trace[f"gen_logits_{update}"], rollout.response)
        old = experience.logprobs[:, 0]
        self.report.add("old log-probabilities", distance(old[inside], sampled[inside]), ARRAYS, where)
        value_call, reward_call = self.recorded_scores(update)
        values = self.program("_value_output")(self.state.params["value"], rollout)
        self.report.add("reward-model scores", distance(scores, reward_call), ARRAYS, where)
        self.report.add("value-model outputs", distance(values, value_call), ARRAYS, where)
        before = (experience.returns - experience.values)[:, 0]
        gaps = {"advantages": (before, experience.advantages[:, 0], inside)}
        if self.config.whiten_rewards:
            gaps = {"rewards": self.rewards(rollout, scores, experience), **gaps}
        for offset, (name, (before, after, mask)) in enumerate(gaps.items()):
            call = len(gaps) * update + offset
            mask = np.asarray(mask)
            self.report.add(f"{name}: mask", float((mask != self.trace[f"whiten_mask_{call}"]).sum()), 0.0, where)
            self.report.add(
                f"{name} before whitening", distance(before, self.trace[f"whiten_in_{call}"]), ARRAYS, where
            )
            self.report.add(
                f"{name} after whitening",
                distance(np.asarray(after)[mask], self.trace[f"whiten_out_{call}"][mask]),
                ARRAYS,
                where,
            )

    def rewards(self, rollout: Rollout, scores, experience):
        """Rewards before and after whitening, from the equations themselves: Experience does not keep them."""
        t = rollout.response.shape[1]
        ref = self.program("_ref_logprobs")(self.state.params, self.base, self.ref_params, rollout)
        inside, valued = adv.response_mask(rollout.lengths, t), adv.value_mask(rollout.lengths, t)
        logprobs = experience.logprobs[:, 0]
        ref = jnp.where(inside, ref, logprobs)
        penalty = -self.config.kl_coef * adv.kl_penalty(logprobs, ref, self.config.kl_estimator)
        final = pg.penalize_missing_eos(self.credited(scores, rollout), rollout, (self.eos,), self.config)
        rewards = adv.place_scores(penalty, final, rollout.lengths)
        return rewards, adv.masked_whiten(rewards, valued, shift_mean=False), valued

    def learn(self, update: int, log: dict[str, float], experience, found, every: bool) -> None:
        """The update, with the orders that TRL drew, and its metrics; `every`: a step after every micro-batch."""
        epochs = self.config.num_ppo_epochs
        orders = np.stack([self.trace[f"permutation_{update * epochs + i}"] for i in range(epochs)]).astype(np.int32)
        rate = learning_rate(self.config, jnp.int32(update), len(self.logs))
        learn = self.program("_learn", *self.cut.stepped(every))
        self.state, metrics = learn(self.state, self.base, experience, jnp.asarray(orders), rate)
        found = {**found, "val/num_eos_tokens": trl_steps.eos_count(self.rollout(update), self.eos)}
        metrics |= {**found, "lr": rate, "episode": (update + 1) * self.config.batch_size}
        unknown = f"{self.folder.name}: not one of PPO's metrics"
        terms = terms_of_kl(metrics, self.config.kl_coef)
        compare_log(self.report, metrics, log, f"update {update}", CLOCKS, unknown, terms)


def open_case(folder: Path):
    """The replay of a folder, by the trainer whose options it has."""
    opt.check_folder(folder)
    options = json.loads((folder / "case.json").read_text())["options"]
    known = ("ppo", "rloo", "grpo")
    if options.get("algorithm", "ppo") not in known:
        raise Refused(f"{folder}: option algorithm={options['algorithm']!r}; known: {', '.join(known)}")
    replay = grpo.replay_of(folder, options) or rloo.replay_of(folder, options)
    return replay() if replay is not None else Replay(folder)


def main(folders: list[str]) -> int:
    """Replays each folder and prints its table; returns the exit status."""
    if not folders:
        print(__doc__.strip().splitlines()[2].strip(), file=sys.stderr)
        return 2
    refused = out = False
    for folder in folders:
        try:
            report = open_case(Path(folder)).run()
        except (Refused, UserError) as error:
            print(f"refused: {error}", file=sys.stderr)
            refused = True
            continue
        verdict = "replays" if report.passed else "DOES NOT REPLAY"
        print(f"{folder}\n{report.table()}\n{Path(folder).name} {verdict}\n")
        out |= not report.passed
    return 1 if out else 2 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

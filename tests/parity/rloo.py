"""Replays recorded RLOO runs: TRL's present trainer, and its trainer before 0.22. See `tests.parity.replay`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.config import RLOOConfig
from rlhf_jax.models import hf
from rlhf_jax.trainers import common, forward, reward, rloo, rollouts
from rlhf_jax.types import Rollout, TrainState
from tests.parity import options as opt
from tests.parity.options import Refused
from tests.parity.report import Report, distance, metric_distance
from tests.parity.weights import compare_weights

ARRAYS, METRICS = 1e-5, 1e-4
CLOCKS = ("eps", "epoch", "step_time", "step", "total_flos")


class RLOOReplay:
    """What both trainers' replays share: the models, the state, the report."""

    parts = ("trace.npz", "policy", "reward", "tokenizer", "final_policy")

    def __init__(self, folder: Path) -> None:
        opt.check_folder(folder)
        opt.check_parts(folder, self.parts)
        case = json.loads((folder / "case.json").read_text())
        self.folder, self.options = folder, case["options"]
        self.logs = [log for log in case["logs"] if "train_runtime" not in log]
        self.trace = np.load(folder / "trace.npz")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        self.pad, self.eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.config: RLOOConfig = self.read_options()
        policy, params = hf.load(folder / "policy", kind="causal")
        if self.options.get("parallel", True) != policy.config.use_parallel_residual:
            raise Refused(f"{folder.name}: option parallel disagrees with policy/config.json's use_parallel_residual")
        ref, ref_params = policy, params
        if (folder / "ref").exists():
            ref, ref_params = hf.load(folder / "ref", kind="causal")
        self.ref_params = ref_params if self.config.beta else None
        self.nets = forward.Networks(policy, ref, None)
        self.optimizer = common.make_optimizer(self.config)
        params = jax.tree.map(jnp.asarray, {"policy": params})
        self.state = TrainState(
            params=params,
            opt_state=self.optimizer.init(params),
            step=jnp.int32(0),
            episodes=jnp.int32(0),
            seed=jnp.uint32(0),
            kl_coef=jnp.float32(0.0),
            tokens=jnp.uint32(0),
            ref_params=jax.tree.map(jnp.array, ref_params) if self.config.sync_ref_model else None,
        )
        self.report = Report()
        self.programs: dict[Any, Any] = {}

    def read_options(self) -> RLOOConfig:
        """The config that does what TRL did."""
        raise NotImplementedError

    def program(self, name: str):
        """The compiled method of that name."""
        if name not in self.programs:
            self.programs[name] = jax.jit(getattr(self, name))
        return self.programs[name]

    def _experience(self, params, ref, rollout, scores, scorable):
        return rloo.make_experience(self.nets, params, ref, rollout, scores, scorable, self.config, self.eos)

    def _learn(self, state, experience, shuffles, rates):
        # TRL shuffles rows, not groups.
        alone = rloo.apart(experience)
        return rloo.update(self.nets, self.optimizer, state, alone, shuffles, rates, self.config)

    def reference(self):
        """The reference as it is now."""
        return self.ref_params if self.state.ref_params is None else self.state.ref_params

    def compare_metrics(self, where: str, ours: dict[str, float], theirs: dict[str, float]) -> None:
        """Every metric that TRL logged."""
        for name, value in theirs.items():
            if name in CLOCKS:
                continue
            if name not in ours:
                raise Refused(f"{self.folder.name}: metric {name} in the log of {where} is not one of RLOO's")
            self.report.add(name, metric_distance(float(ours[name]), value), METRICS, where)

    def finish(self) -> Report:
        """The final weights."""
        heads = self.nets.policy.config.num_attention_heads
        params, epsilon = self.state.params["policy"], self.config.adam_epsilon
        compare_weights(self.report, self.folder, "policy", "causal", params, heads, epsilon)
        return self.report


class Current(RLOOReplay):
    """TRL 1.12.0's RLOOTrainer."""

    def read_options(self) -> RLOOConfig:
        """See `options.rloo_config`."""
        self.micro, self.accum = opt.micro_and_accum(self.options, self.folder.name)
        rows = self.trace["completion_ids_0"].shape[0]
        return opt.rloo_config(self.options, len(self.logs), rows, self.folder.name)

    def rollout(self, generation: int) -> Rollout:
        """A generation batch. Ids that TRL masks as cut off are there still, so lengths come from the ids."""
        names = ("prompt_ids", "prompt_mask", "completion_ids")
        prompts, prompt_mask, ids = (self.trace[f"{name}_{generation}"] for name in names)
        stopped = ids == self.eos
        # A row without an end is as wide as the batch: TRL stops early only when all have ended.
        lengths = np.where(stopped.any(1), stopped.argmax(1) + 1, ids.shape[1])
        # To TRL a pad that was sampled last is an end too.
        last = ids[np.arange(len(ids)), lengths - 1]
        ended = (last == self.eos) | (last == self.pad)
        return Rollout(
            prompt_tokens=jnp.asarray(prompts, jnp.int32),
            prompt_lengths=jnp.asarray(prompt_mask.sum(1), jnp.int32),
            response=jnp.asarray(ids, jnp.int32),
            lengths=jnp.asarray(lengths, jnp.int32),
            ended=jnp.asarray(ended),
            logprobs=jnp.zeros(ids.shape, jnp.float32),
            response_mask=jnp.asarray(np.arange(ids.shape[1])[None] < lengths[:, None]),
        )

    def order(self, generation: int, steps: int) -> np.ndarray:
        """The rows of each micro-batch of a generation batch, [iterations, B], found again by what is in them."""
        rows = self.trace[f"completion_ids_{generation}"].shape[0]

        def fingerprints(prefix: str, suffix: str, count: int):
            names = ("prompt_ids", "completion_ids", "advantages", "old_logps")
            parts = [self.trace[f"{prefix}{name}{suffix}"] for name in names]
            return [tuple(part[i].tobytes() for part in parts) for i in range(count)]

        known = fingerprints("", f"_{generation}", rows)
        micros = rows // self.micro
        first = generation * steps * self.accum
        orders = []
        for iteration in range(self.config.num_iterations):
            free, order = list(range(rows)), []
            for micro in range(micros):
                step = first + iteration * micros + micro
                for mark in fingerprints(f"step{step}_", "", self.micro):
                    row = next((i for i in free if known[i] == mark), None)
                    if row is None:
                        raise Refused(f"{self.folder.name}: step {step} has a row that generation {generation} lacks")
                    free.remove(row)
                    order.append(row)
            orders.append(order)
        return np.asarray(orders, np.int32)

    def run(self) -> Report:
        """All generation batches, then the weights they ended with."""
        steps = rloo.steps_of(self.config)
        tokens = 0.0
        for generation in range(len(self.logs) // steps):
            where = f"generation {generation}"
            rollout = self.rollout(generation)
            each = jnp.asarray(self.trace[f"rewards_per_func_{generation}"])
            weights = self.options.get("reward_weights") or [1.0] * each.shape[1]
            scores, scorable = adv.combine_rewards(each, jnp.asarray(weights, jnp.float32))
            params, ref = self.state.params, self.reference()
            experience, found = self.program("_experience")(params, ref, rollout, scores, scorable)
            found = {**rollouts.length_metrics(rollout), **found, **self.reward_metrics(each)}
            inside = adv.response_mask(experience.lengths.reshape(-1), rollout.response.shape[1])
            old = jnp.sum(jnp.where(inside, experience.logprobs.reshape(inside.shape), 0.0), axis=1)
            self.report.add(
                "old log-probabilities", distance(old, self.trace[f"old_logps_{generation}"]), ARRAYS, where
            )
            ours, theirs = experience.advantages.reshape(-1), self.trace[f"advantages_{generation}"]
            self.report.add("advantages", distance(ours, theirs), ARRAYS, where)
            numbers = jnp.arange(steps) + generation * steps
            rates = jax.vmap(lambda i: common.learning_rate(self.config, i, len(self.logs)))(numbers)
            order = jnp.asarray(self.order(generation, steps))
            self.state, stats = self.program("_learn")(self.state, experience, order, rates)
            tokens += float(found["rollout/tokens"])
            for step in range(steps):
                number = generation * steps + step
                metrics = {name: x[step] for name, x in stats.items()}
                metrics |= {"learning_rate": rates[step], "num_tokens": tokens}
                # What belongs to the generation is logged with its first step.
                metrics |= found if step == 0 else {}
                self.compare_metrics(f"step {number}", metrics, self.logs[number])
        return self.finish()

    def reward_metrics(self, each) -> dict[str, float]:
        """rewards/NAME/mean and std under the names in the log, which are in the order of the functions."""
        names = [name[len("rewards/") : -len("/mean")] for name in self.logs[0] if name.endswith("/mean")]
        names = [name for name in names if f"rewards/{name}/std" in self.logs[0]]
        found = {}
        for name, column in zip(names, np.asarray(each).T, strict=True):
            there = column[~np.isnan(column)]
            found[f"rewards/{name}/mean"] = there.mean() if len(there) else np.nan
            found[f"rewards/{name}/std"] = there.std(ddof=1) if len(there) > 1 else np.nan
        return found


class Legacy(RLOOReplay):
    """TRL 0.17.0's RLOOTrainer. Its rows are tiled: row i and row i + B / k share a prompt."""

    def read_options(self) -> RLOOConfig:
        """See `options.legacy_rloo_config`."""
        self.stop = self.options.get("stop_token_id")
        if self.options.get("stop_token") == "eos":
            self.stop = self.eos
        return opt.legacy_rloo_config(self.options, len(self.logs), self.folder.name)

    def _score(self, params, rollout):
        return reward.score_rollout(self.reward_model, params, rollout, dtype=jnp.float32)

    def rollout(self, update: int) -> Rollout:
        """TRL's samples, groups side by side. Masks come from ids, as in TRL."""
        ids = self.trace[f"query_responses_{update}"][self.adjacent]
        context = int(self.trace[f"context_length_{update}"])
        prompts, response = ids[:, :context], ids[:, context:]
        cut = response
        if self.stop is not None:
            kept = adv.response_mask(adv.response_lengths(response, self.stop), response.shape[1])
            cut = np.where(np.asarray(kept), response, self.pad)
        return Rollout(
            prompt_tokens=jnp.asarray(prompts, jnp.int32),
            prompt_lengths=jnp.asarray((prompts != self.pad).sum(1), jnp.int32),
            response=jnp.asarray(response, jnp.int32),
            lengths=jnp.asarray(adv.first_true(cut == self.pad)),
            ended=jnp.asarray((cut == self.stop).any(1)) if self.stop is not None else jnp.zeros(len(cut), bool),
            logprobs=jnp.zeros(response.shape, jnp.float32),
            response_mask=jnp.asarray(response != self.pad),
        )

    def run(self) -> Report:
        """All updates, then the weights they ended with."""
        c = self.config
        groups = c.batch_size // c.num_generations
        self.adjacent = np.arange(c.batch_size).reshape(c.num_generations, groups).T.reshape(-1)
        back = np.argsort(self.adjacent)
        self.reward_model, reward_params = hf.load(self.folder / "reward", kind="scalar")
        for update, log in enumerate(self.logs):
            where = f"update {update}"
            rollout = self.rollout(update)
            scores = self.program("_score")(reward_params, rollout)
            chunk = self.options.get("local_rollout_forward_batch_size", opt.FORWARD_BATCH)
            calls = -(-c.batch_size // chunk)
            recorded = [self.trace[f"get_reward_{i}"] for i in range(update * calls, (update + 1) * calls)]
            theirs = np.concatenate(recorded)[self.adjacent]
            self.report.add("reward-model scores", distance(scores, theirs), ARRAYS, where)
            everyone = jnp.ones(c.batch_size, bool)
            params, ref = self.state.params, self.reference()
            experience, found = self.program("_experience")(params, ref, rollout, scores, everyone)
            inside = np.asarray(adv.response_mask(rollout.lengths, rollout.response.shape[1]))
            logits = self.trace[f"gen_logits_{update}"][self.adjacent]
            sampled = losses.logprobs_from_logits(logits, rollout.response)
            ours = experience.logprobs.reshape(inside.shape)
            self.report.add("old log-probabilities", distance(ours[inside], sampled[inside]), ARRAYS, where)
            epochs = c.num_iterations
            shuffles = np.stack([back[self.trace[f"permutation_{update * epochs + i}"]] for i in range(epochs)])
            rate = common.learning_rate(c, jnp.int32(update), len(self.logs))
            rates = jnp.broadcast_to(rate, (rloo.steps_of(c),))
            shuffles = jnp.asarray(shuffles, jnp.int32)
            self.state, stats = self.program("_learn")(self.state, experience, shuffles, rates)
            metrics = {**found, **rloo.averaged(stats, c), "lr": rate, "episode": (update + 1) * c.batch_size}
            self.compare_metrics(where, metrics, log)
        return self.finish()


def replay_of(folder: Path, options: dict[str, Any]):
    """The replay for a case, by what it recorded; None for one that is not RLOO's."""
    if "rloo_k" in options:
        return functools.partial(Legacy, folder)
    recorded = np.load(folder / "trace.npz").files if (folder / "trace.npz").exists() else ()
    if "num_generations" in options or "completion_ids_0" in recorded:
        return functools.partial(Current, folder)
    return None

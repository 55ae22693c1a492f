"""Replays recorded RLOO runs: TRL's present trainer, and its trainer before 0.22. See `tests.parity.replay`."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms import reward_model, rloo
from rlhf_jax.algorithms.groups import split_groups
from rlhf_jax.algorithms.metrics import length_metrics
from rlhf_jax.algorithms.optimizer import learning_rate, scale_by_adamw
from rlhf_jax.config import RLOOConfig
from rlhf_jax.models.io import hf
from rlhf_jax.types import Rollout, TrainState
from tests.helpers.algorithms import at_rates, models_of, scored, with_params
from tests.parity import adapters, trl_steps, vision
from tests.parity import options as opt
from tests.parity.options import Refused
from tests.parity.report import (
    LOSSES,
    Report,
    absolute,
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
CLOCKS = ("eps", "epoch", "step_time", "step", "total_flos")


class RLOOReplay:
    """What both trainers' replays share: the models, the state, the report."""

    parts: tuple[str, ...] = ("trace.npz", "policy", "tokenizer", "final_policy")
    always_ref = False  # a reference is asked even where its KL costs nothing
    trains_on = False  # an adapter that was there before is its own reference
    objective: pg.Objective = trl_steps.with_zero_std(trl_steps.unmasked(rloo.OBJECTIVE))

    def __init__(self, folder: Path) -> None:
        opt.check_folder(folder)
        parts = [vision.PROCESSING if part == "tokenizer" else part for part in self.parts]
        opt.check_parts(folder, parts if vision.has_images(folder) else self.parts)
        case = json.loads((folder / "case.json").read_text())
        self.folder, self.options = folder, vision.options_of(folder, case["options"])
        self.logs = [log for log in case["logs"] if "train_runtime" not in log and "eval_loss" not in log]
        self.trace = np.load(folder / "trace.npz")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(vision.tokenizer_folder(folder))
        self.pad, self.eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        # What is recorded was sampled and trained without dropout.
        self.config: RLOOConfig = dataclasses.replace(self.read_options(), disable_dropout=True)
        self.start = adapters.start_of(folder, self.options, trains_on=self.trains_on)
        self.check_adapter()
        self.base = self.start.base
        self.ref_params = self.start.ref_params if self.config.beta or self.always_ref else None
        self.models = models_of(self.start.policy, self.start.ref)
        self.optimizer = scale_by_adamw(self.config)
        self.start_params = {"policy": self.start.params}
        self.programs: dict[Any, Any] = {}

    def begin(self) -> None:
        """The state before the first update, and an empty report."""
        params = jax.tree.map(jnp.asarray, self.start_params)
        self.state = TrainState(
            params=params,
            opt_state=accumulating(self.optimizer, 1).init(params),
            step=jnp.int32(0),
            episodes=jnp.int32(0),
            seed=jnp.uint32(0),
            kl_coef=jnp.float32(0.0),
            tokens=jnp.uint32(0),
            ref_params=jax.tree.map(jnp.array, self.ref_params) if self.config.sync_ref_model else None,
        )
        self.report = Report()
        self.report.notes += self.start.notes
        if vision.has_images(self.folder):
            vision.compare_processing(self.report, self.folder, self.start.policy, self.trace)

    def read_options(self) -> RLOOConfig:
        """The config that does what TRL did."""
        raise NotImplementedError

    def check_adapter(self) -> None:
        """Refused for what cannot be done over with an adapter."""

    def program(self, name: str, *statics):
        """The compiled method of that name."""
        key = (name, *statics)
        if key not in self.programs:
            self.programs[key] = jax.jit(functools.partial(getattr(self, name), *statics))
        return self.programs[key]

    def _experience(self, params, base, ref, rollout, scores, scorable, images=None):
        return self._make_experience(self.config, params, base, ref, rollout, scores, scorable, images)

    def _make_experience(self, config, params, base, ref, rollout, scores, scorable, images=None):
        models = with_params(self.models.with_base(base), params, ref)
        batch = scored(rollout, scores, scorable, eos_id=self.eos, group_size=config.num_generations)
        batch = batch.replace(images=images)
        return pg.make_experience(models, batch, config=config, objective=self.objective)

    def steps_of_a_rate(self) -> int:
        """Optimizer steps of one step of the schedule."""
        return 1

    def reference(self):
        """The reference as it is now."""
        return self.ref_params if self.state.ref_params is None else self.state.ref_params

    def compare_metrics(self, where: str, ours: dict[str, float], theirs: dict[str, float], size: float) -> None:
        """Every metric that TRL logged; `size`: mean |advantage|, the size of the loss's terms."""
        unknown = f"{self.folder.name}: not one of RLOO's metrics"
        terms = {"loss": size, "loss/policy_avg": size}
        if "objective/kl" in theirs:
            terms |= terms_of_kl(ours, self.config.beta)
        compare_log(self.report, ours, theirs, where, CLOCKS, unknown, terms)

    def finish(self) -> Report:
        """The final weights."""
        model = self.models.policy.model
        params, theirs = adapters.ended(self.start, self.state.params["policy"])
        rates = self.steps_of_a_rate() * sum_of_rates(self.config, len(self.logs))
        compare_weights(self.report, "policy", params, theirs, model, self.config.adam_epsilon, rates)
        return self.report


@dataclasses.dataclass
class Generation:
    """A generation batch: its rows apart, and the order TRL gave them."""

    rows: Any  # Experience, groups of one
    order: np.ndarray  # [iterations, micro-batches, rows a micro-batch]
    size: float  # of the terms of its losses


class Current(RLOOReplay):
    """TRL 1.12.0's RLOOTrainer: a stream of micro-batches, `accum` to an optimizer step."""

    trains_on = True
    fingerprinted = ("prompt_ids", "completion_ids", "advantages", "old_logps")

    def check_adapter(self) -> None:
        """Refused for dropout, which draws anew, and for a reference that moves, which TRL refuses itself."""
        form = self.start.policy.lora
        if form is None:
            return
        if form.dropout and not self.options.get("disable_dropout"):
            raise Refused(
                f"{self.folder.name}: lora_dropout is {form.dropout} in adapter_config.json: what it dropped is not "
                "recorded (record with lora_dropout 0, or with disable_dropout)"
            )
        if self.config.sync_ref_model:
            raise Refused(f"{self.folder.name}: option sync_ref_model with an adapter, which TRL does not train")

    def read_options(self) -> RLOOConfig:
        """The config, and how TRL cut generations into micro-batches."""
        self.micro, self.accum = opt.micro_and_accum(self.options, self.folder.name)
        rows = self.trace["completion_ids_0"].shape[0]
        self.micros = sum(name.endswith("_loss") for name in self.trace.files)
        steps = self.micros // self.accum
        if len(self.logs) != steps:
            raise Refused(
                f"{self.folder.name}: logs has {len(self.logs)} entries for {steps} optimizer steps (option "
                "logging_steps is to be 1)"
            )
        generations = range(sum(name.startswith("completion_ids_") for name in self.trace.files))
        self.names = self.function_names()
        # One width for all generations, so that there is one program; padding changes nothing.
        self.widths = [max(self.trace[f"{x}_ids_{g}"].shape[1] for g in generations) for x in ("prompt", "completion")]
        return self.config_of(steps, rows)

    def images(self, generation: int):
        """The images of a generation batch's prompts; None without images."""
        return vision.images_of(self.trace, generation, self.config.num_generations)

    def config_of(self, steps: int, rows: int):
        """See `options.rloo_config`."""
        return opt.rloo_config(self.options, steps, rows, self.folder.name)

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
        prompt_width, width = self.widths
        prompts = np.pad(prompts, ((0, 0), (prompt_width - prompts.shape[1], 0)), constant_values=self.pad)
        ids = np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=self.pad)
        return Rollout(
            prompt_tokens=jnp.asarray(prompts, jnp.int32),
            prompt_lengths=jnp.asarray(prompt_mask.sum(1), jnp.int32),
            response=jnp.asarray(ids, jnp.int32),
            lengths=jnp.asarray(lengths, jnp.int32),
            ended=jnp.asarray(ended),
            logprobs=jnp.zeros(ids.shape, jnp.float32),
            response_mask=jnp.asarray(np.arange(width)[None] < lengths[:, None]),
        )

    def order(self, generation: int) -> np.ndarray:
        """The rows of each micro-batch of a generation batch, found again by what is in them.

        Returns:
          [iterations, micro-batches, rows a micro-batch]; -1 where the run ended before.
        """
        rows = self.trace[f"completion_ids_{generation}"].shape[0]

        def fingerprints(prefix: str, suffix: str, count: int):
            names = self.fingerprinted
            parts = [self.trace[f"{prefix}{name}{suffix}"] for name in names]
            return [tuple(part[i].tobytes() for part in parts) for i in range(count)]

        known = fingerprints("", f"_{generation}", rows)
        micros = rows // self.micro
        first = generation * micros * self.config.num_iterations
        order = np.full((self.config.num_iterations, micros, self.micro), -1, np.int32)
        for iteration in range(self.config.num_iterations):
            free = list(range(rows))
            for micro in range(micros):
                step = first + iteration * micros + micro
                if step >= self.micros:
                    return order
                for place, mark in enumerate(fingerprints(f"step{step}_", "", self.micro)):
                    row = next((i for i in free if known[i] == mark), None)
                    if row is None:
                        raise Refused(f"{self.folder.name}: step {step} has a row that generation {generation} lacks")
                    free.remove(row)
                    order[iteration, micro, place] = row
        return order

    def _step(self, state, base, micros, rate, batch_tokens):
        """One optimizer step on `accum` micro-batches.

        Returns:
          (state, metrics of the step, metrics of each micro-batch [accum])
        """
        state, metrics, each, _ = trl_steps.step(
            self.models.with_base(base),
            state,
            micros,
            config=self.config,
            objective=self.objective,
            optimizer=at_rates(accumulating(self.optimizer, 1), rate),
            number=state.step,
            batch_tokens=batch_tokens,
        )
        return state.replace(step=state.step + 1), metrics, each

    def generate(self, generation: int) -> tuple[Generation, dict[str, float]]:
        """Experience of a generation batch with the params as they are, compared, and its metrics."""
        where = f"generation {generation}"
        rollout = self.rollout(generation)
        each = jnp.asarray(self.trace[f"rewards_per_func_{generation}"])
        weights = self.options.get("reward_weights") or [1.0] * each.shape[1]
        if len(weights) != each.shape[1]:
            raise Refused(f"{self.folder.name}: option reward_weights: {len(weights)} for {each.shape[1]} functions")
        scores, scorable = adv.combine_rewards(each, jnp.asarray(weights, jnp.float32))
        params, ref = self.state.params, self.reference()
        given = params, self.base, ref, rollout, scores, scorable, self.images(generation)
        experience, found = self.program("_experience")(*given)
        inside = np.asarray(experience.trained_mask).reshape(rollout.response.shape)
        old = jnp.sum(jnp.where(inside, experience.logprobs.reshape(inside.shape), 0.0), axis=1)
        self.report.add("old log-probabilities", distance(old, self.trace[f"old_logps_{generation}"]), ARRAYS, where)
        # An advantage is a difference of rewards, and as exact as they are.
        ours, theirs = np.asarray(experience.advantages).reshape(-1), self.trace[f"advantages_{generation}"]
        rewards = np.asarray(scores) / self.divisor(*given)
        size = max(float(np.linalg.norm(theirs)), float(np.linalg.norm(rewards)))
        self.report.add("advantages", absolute(ours, theirs) / (size or 1.0), ARRAYS, where)
        found = {**length_metrics(rollout), **found, **self.reward_metrics(each)}
        size = max(float(np.mean(np.abs(theirs))), float(np.mean(np.abs(rewards))))
        metrics = {name: float(x) for name, x in found.items()}
        return Generation(split_groups(experience), self.order(generation), size), metrics

    def batch_tokens(self, step: int) -> np.ndarray:
        """`Counts.batch_tokens` of each micro-batch of an optimizer step, which RLOO's loss does not read."""
        return np.ones(self.accum, np.float32)

    def recorded_share(self) -> float:
        """A recorded loss of a micro-batch over its own loss: TRL's RLOO does not divide it by `accum`."""
        return 1.0

    def divisor(self, params, base, ref, rollout, scores, scorable, images) -> float:
        """What normalize_advantages divided by; 1 without it."""
        if not self.config.normalize_advantages:
            return 1.0
        experience, _ = self.program("_unnormalized")(params, base, ref, rollout, scores, scorable, images)
        counts = np.asarray(scorable).reshape(-1, self.config.num_generations).sum(1)
        keep = np.asarray(scorable) & (np.repeat(counts, self.config.num_generations) > 1)
        return float(adv.normalize(experience.advantages.reshape(-1), jnp.asarray(keep), 1e-4)[1])

    def _unnormalized(self, params, base, ref, rollout, scores, scorable, images):
        config = dataclasses.replace(self.config, normalize_advantages=False)
        return self._make_experience(config, params, base, ref, rollout, scores, scorable, images)

    def run(self) -> Report:
        """All micro-batches, then the weights they ended with."""
        self.begin()
        a_generation = self.config.batch_size // self.micro * self.config.num_iterations
        current, tokens = None, 0.0
        for step in range(len(self.logs)):
            where = f"step {step}"
            found, parts = [], []
            for micro in range(step * self.accum, (step + 1) * self.accum):
                if micro % a_generation == 0:
                    current, metrics = self.generate(micro // a_generation)
                    found.append(metrics)
                    tokens += metrics["rollout/tokens"]
                chosen = current.order.reshape(-1, self.micro)[micro % a_generation]
                parts.append(jax.tree.map(lambda x, rows=chosen: x[rows], current.rows))
            micros = jax.tree.map(lambda *x: jnp.stack(x), *parts)
            rate = learning_rate(self.config, jnp.int32(step), len(self.logs))
            given = self.state, self.base, micros, rate, self.batch_tokens(step)
            self.state, metrics, each = self.program("_step")(*given)
            size = current.size
            for i, loss in enumerate(np.asarray(each["loss"])):
                micro = step * self.accum + i
                theirs = float(self.trace[f"step{micro}_loss"])
                gap = abs(float(loss) * self.recorded_share() - theirs) / (size or 1.0)
                self.report.add("losses of micro-batches", gap, LOSSES, f"micro-batch {micro}")
            stats = {name: metrics[name] for name in ("grad_norm", "entropy_coef") if name in metrics}
            stats = {**trl_steps.mean_of_micro_batches(each, self.config), **stats}
            # What belongs to generation batches is logged with the first step after them.
            metrics = {**stats, "learning_rate": rate, "num_tokens": tokens}
            for name in {name for one in found for name in one}:
                metrics[name] = mean_of_numbers([one[name] for one in found])
            self.compare_metrics(where, metrics, self.logs[step], size)
        return self.finish()

    def reward_metrics(self, each) -> dict[str, float]:
        """rewards/NAME/mean and std under the names in the logs, which are in the order of the functions."""
        columns = [column[~np.isnan(column)] for column in np.asarray(each).T]
        stats = {
            "mean": [column.mean() if len(column) else np.nan for column in columns],
            "std": [column.std(ddof=1) if len(column) > 1 else np.nan for column in columns],
        }
        return {
            f"rewards/{name}/{kind}": mean_of_numbers([values[i] for i, own in enumerate(self.names) if own == name])
            for name in self.names
            for kind, values in stats.items()
        }

    def function_names(self) -> list[str]:
        """The name under which each reward function was logged, functions of one name together (models without one)."""
        keys = list(dict.fromkeys(name for log in self.logs for name in log))
        names = [name[len("rewards/") : -len("/mean")] for name in keys if name.endswith("/mean")]
        names = [name for name in names if f"rewards/{name}/std" in keys]
        functions = self.trace["rewards_per_func_0"].shape[1]
        if len(names) == functions:
            return names
        if len(names) == 1:
            return names * functions
        raise Refused(f"{self.folder.name}: logs has rewards/NAME/mean of {len(names)} names for {functions} functions")


def mean_of_numbers(values: list[float]) -> float:
    """The mean of those that are not nan, as TRL's log takes it; nan for none."""
    there = [float(x) for x in values if not math.isnan(x)]
    return sum(there) / len(there) if there else math.nan


class Legacy(RLOOReplay):
    """TRL 0.17.0's RLOOTrainer. Its rows are tiled: row i and row i + B / k share a prompt."""

    parts = (*RLOOReplay.parts, "ref", "reward")
    always_ref = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        rows, group = self.config.batch_size, self.config.num_generations
        self.adjacent = np.arange(rows).reshape(group, rows // group).T.reshape(-1)
        self.reward_model, self.reward_params = hf.load(folder / "reward", kind="scalar")

    def read_options(self) -> RLOOConfig:
        """See `options.legacy_rloo_config`."""
        self.stop = self.options.get("stop_token_id")
        if self.options.get("stop_token") == "eos":
            self.stop = self.eos
        self.cut = opt.legacy_stepping(self.options, self.folder.name)
        return opt.legacy_rloo_config(self.options, len(self.logs), self.folder.name)

    def steps_of_a_rate(self) -> int:
        """See `RLOOReplay.steps_of_a_rate`."""
        return self.config.num_iterations * self.cut.micros

    def _learn(self, steps, accum, state, base, experience, orders, rate):
        # TRL orders rows, not groups.
        rows = split_groups(experience)
        optimizer, models = at_rates(accumulating(self.optimizer, accum), rate), self.models.with_base(base)
        options = {"steps": steps, "config": self.config, "objective": self.objective, "optimizer": optimizer}
        return trl_steps.update(models, state, rows, orders, **options)

    def _score(self, params, rollout):
        return reward_model.score_rollout(self.reward_model, params, rollout, dtype=jnp.float32)

    def rollout(self, update: int) -> Rollout:
        """TRL's samples, groups side by side, see `samples.rollout_of`."""
        ids = self.trace[f"query_responses_{update}"][self.adjacent]
        context = int(self.trace[f"context_length_{update}"])
        return rollout_of(ids[:, :context], ids[:, context:], self.stop, self.pad)

    def run(self) -> Report:
        """All updates, then the weights they ended with."""
        return as_accelerate_stepped(self.run_stepping, self.cut, len(self.logs))

    def run_stepping(self, period: int | None) -> Report:
        """As `run`, with passes over the data of that many updates."""
        self.begin()
        c = self.config
        back = np.argsort(self.adjacent)
        for update, log in enumerate(self.logs):
            where = f"update {update}"
            rollout = self.rollout(update)
            scores = self.program("_score")(self.reward_params, rollout)
            chunk = self.options.get("local_rollout_forward_batch_size", opt.FORWARD_BATCH)
            calls = -(-c.batch_size // chunk)
            recorded = [self.trace[f"get_reward_{i}"] for i in range(update * calls, (update + 1) * calls)]
            theirs = np.concatenate(recorded)[self.adjacent]
            self.report.add("reward-model scores", distance(scores, theirs), ARRAYS, where)
            scores = credited(scores, rollout, c.missing_eos_penalty, self.stop, self.eos, self.pad)
            everyone = jnp.ones(c.batch_size, bool)
            params, ref = self.state.params, self.reference()
            experience, found = self.program("_experience")(params, self.base, ref, rollout, scores, everyone)
            inside = np.asarray(adv.response_mask(rollout.lengths, rollout.response.shape[1]))
            logits = self.trace[f"gen_logits_{update}"][self.adjacent]
            sampled = losses.logprobs_from_logits(logits, rollout.response)
            ours = experience.logprobs.reshape(inside.shape)
            self.report.add("old log-probabilities", distance(ours[inside], sampled[inside]), ARRAYS, where)
            epochs = c.num_iterations
            orders = np.stack([back[self.trace[f"permutation_{update * epochs + i}"]] for i in range(epochs)])
            orders = jnp.asarray(orders, jnp.int32)
            rate = learning_rate(c, jnp.int32(update), len(self.logs))
            learn = self.program("_learn", *self.cut.stepped(pass_ends(update, period)))
            self.state, metrics = learn(self.state, self.base, experience, orders, rate)
            found |= {"objective/entropy": trl_steps.surprise(experience)}
            found |= {"val/num_eos_tokens": trl_steps.eos_count(rollout, self.eos)}
            metrics |= {**found, "lr": rate, "episode": (update + 1) * c.batch_size}
            self.compare_metrics(where, metrics, log, float(np.mean(np.abs(experience.advantages))))
        return self.finish()


def replay_of(folder: Path, options: dict[str, Any]):
    """The replay for a case, by what it recorded; None for one that is not RLOO's."""
    recorded = np.load(folder / "trace.npz").files if (folder / "trace.npz").exists() else ()
    if options.get("algorithm", "rloo") != "rloo":
        return None
    if "num_generations" in options or "completion_ids_0" in recorded:
        return functools.partial(Current, folder)
    if "rloo_k" in options or (recorded and "whiten_in_0" not in recorded):
        return functools.partial(Legacy, folder)
    return None

"""All rewards of a run on one rollout: reward models and JAX functions on the device, the others on the host."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import advantages as adv
from rlhf_jax import data
from rlhf_jax.algorithms import microbatch, reward_model
from rlhf_jax.data.reward_tokens import reward_tokens
from rlhf_jax.errors import UserError
from rlhf_jax.generate import map_in_chunks
from rlhf_jax.models.io import hf
from rlhf_jax.parallel import local_rows, multihost, sharding
from rlhf_jax.rewards import interface
from rlhf_jax.rewards import python_functions as on_host
from rlhf_jax.rewards.server import RemoteReward
from rlhf_jax.types import Array, Params, Rollout
from rlhf_jax.utils.text import printable


@dataclasses.dataclass
class RewardModel:
    """A reward model of a run; `tokenizer` is its own where it reads text, None where it reads the sampled ids."""

    name: str
    path: str
    revision: str
    model: Any
    tokenizer: Any | None
    params: Params | None = None


@dataclasses.dataclass
class Scored:
    """What the rewards made of a rollout of B rows."""

    scores: Array
    """[B] float32, the weighted sum; dense rewards are not in it."""
    scorable: Array
    """[B] bool: some reward was applicable, and none failed."""
    token_rewards: Array | None
    """[B, T] float32, weighted dense rewards."""
    each: Array
    """[B, F] float32, unweighted, NaN where not applicable; dense ones summed over the response."""
    metrics: dict[str, Any]
    seconds: dict[str, float]
    extra: dict[str, list[Any]]
    """Columns that functions gave to log_extra."""
    nothing: bool
    """No row of the batch has a score."""

    @property
    def whole(self) -> Array:
        """[B] scores with dense rewards summed into them."""
        return self.scores if self.token_rewards is None else self.scores + self.token_rewards.sum(axis=1)


def open_models(config, tokenizer, conversational: bool) -> list[RewardModel]:
    """The reward models of a config, without their weights.

    Raises:
      UserError: one cannot be read, has too few rows for the policy's ids, or lacks a tokenizer that it needs.
    """
    if config.reward_model_path is None:
        return []
    places = [(config.reward_model_path, config.reward_model_revision)]
    places += [(path, "main") for path in config.more_reward_models]
    # The last part of each path, as TRL names them.
    names = interface.number_duplicates(path.rstrip("/").split("/")[-1] for path, _ in places)
    found = []
    for (path, revision), name in zip(places, names):
        model = hf.load_model(path, revision=revision)
        if config.reward_input == "ids":
            data.check_same_tokenizer(tokenizer, path, revision)
            as_ids = True
        else:
            agree = config.reward_input == "auto" and not conversational
            as_ids = agree and data.same_tokenizer(tokenizer, path, revision)
        rows = model.config.vocab_size
        if as_ids and rows <= max(tokenizer.pad_id, tokenizer.eos_id):
            raise UserError(
                f"reward model {path} has {rows} embedding rows, but the policy's tokenizer uses id "
                f"{max(tokenizer.pad_id, tokenizer.eos_id)}: they were not made for one tokenizer"
            )
        own = None if as_ids else data.load_tokenizer(path, revision, vocab_size=rows)
        found.append(RewardModel(name, path, revision, model, own))
    return found


def _weighted_mean(given: list[tuple[float, int]]) -> float:
    """The mean of (value, weight) without the values that are NaN, unless all are."""
    numbers = [pair for pair in given if not np.isnan(pair[0])] or given
    return sum(value * weight for value, weight in numbers) / sum(weight for _, weight in numbers)


class Scorer:
    """The rewards of a run, in the order of `reward_weights`: models (or their ensemble), functions, server.

    Attributes:
      names: of the rewards, for metrics and tables.
      models: the reward models; `set_params` sets their params.
    """

    def __init__(self, config, tokenizer, models: list[RewardModel], functions: Sequence[Callable], mesh):
        """Raises UserError for no reward at all, or for weights of another number."""
        self.config, self.tokenizer, self.models, self._mesh = config, tokenizer, models, mesh
        given = [*(on_host.resolve(spec) for spec in config.reward_funcs), *functions]
        if config.reward_server is not None:
            given.append(
                RemoteReward(
                    config.reward_server,
                    timeout=config.reward_server_timeout,
                    total_timeout=config.reward_server_total_timeout,
                    retries=config.reward_server_retries,
                    batch_size=config.reward_server_batch_size,
                    concurrency=config.reward_server_concurrency,
                    token_env=config.reward_server_token_env,
                )
            )
        if not given and not models:
            raise UserError(
                "no reward: set --reward_model_path, --reward_funcs or --reward_server, or give reward_funcs to "
                "rlhf_jax.run"
            )
        function_names = on_host.unique_names(given)
        self._ensemble = len(models) > 1 and config.reward_ensemble != "sum"
        model_names = [f"ensemble_{config.reward_ensemble}"] if self._ensemble else [m.name for m in models]
        self.names = (*model_names, *function_names)
        self._jax = [on_host.is_jax_reward(f) for f in given]
        self._device_functions = [f for f, on_device in zip(given, self._jax) if on_device]
        self._device_names = [n for n, on_device in zip(function_names, self._jax) if on_device]
        host = [f for f, on_device in zip(given, self._jax) if not on_device]
        self._host = None
        if host:
            names = [n for n, on_device in zip(function_names, self._jax) if not on_device]
            limits = {"failure": config.reward_failure, "timeout": config.reward_timeout}
            self._host = on_host.HostRewards(host, **limits, names=names)
        weights = config.reward_weights
        if weights is not None and len(weights) != len(self.names):
            raise UserError(
                f"reward_weights has {len(weights)} numbers, but there are {len(self.names)} rewards: "
                f"{', '.join(self.names)}. Give one number for each, in this order"
            )
        self._weights = tuple(weights or (1.0,) * len(self.names))
        self._on_device = jax.jit(self._pure_device, static_argnums=2)
        self._texts = jax.jit(self._pure_texts, static_argnums=0)
        self._combine = jax.jit(self._pure_combine)

    @property
    def needs_text(self) -> bool:
        """Whether responses have to come to the host."""
        return self._host is not None or any(model.tokenizer is not None for model in self.models)

    def check_columns(self, columns: Sequence[str]) -> None:
        """UserError when a function must get a keyword that is no column of the data."""
        if self._host is not None:
            self._host.check_columns(columns)

    def set_params(self, params: Sequence[Params]) -> None:
        """Takes the params of the reward models, in order, on the mesh."""
        for reader, own in zip(self.models, params, strict=True):
            reader.params = own

    # --- programs

    def _pure_device(self, params: list[Params], rollout: Rollout, group: int):
        """[B, M] scores of the models that read ids; the JAX functions' [B] or [B, T], in order."""
        c = self.config
        readers = [m.model for m in self.models if m.tokenizer is None]

        def some(groups):
            part = jax.tree.map(lambda x: x.reshape((-1,) + x.shape[2:]), groups)
            scores = [
                reward_model.score_rollout(model, p, part, dtype=jnp.dtype(c.dtype), group_size=group)
                for model, p in zip(readers, params)
            ]
            return [x.reshape(-1, group) for x in scores]

        groups = jax.tree.map(lambda x: x.reshape((-1, group) + x.shape[1:]), rollout)
        at_once = microbatch.groups_per_chunk(c.rollout_batch_size, group, groups.lengths.shape[0])
        scores = [x.reshape(-1) for x in map_in_chunks(some, groups, at_once)] if readers else []
        b, t = rollout.response.shape
        dense = []
        for function in self._device_functions:
            found = jnp.asarray(function(rollout.response, jnp.maximum(rollout.lengths, 0)))
            if found.shape not in ((b,), (b, t)):
                raise UserError(
                    f"reward function {on_host.function_name(function)} returned shape {found.shape} for {b} responses "
                    f"of {t} columns; return [{b}] or [{b}, {t}]"
                )
            dense.append(found.astype(jnp.float32))
        inside = adv.response_mask(rollout.lengths, t)
        finite = [jnp.isfinite(x) for x in scores]
        finite += [jnp.isfinite(x) if x.ndim == 1 else jnp.all(jnp.isfinite(x) | ~inside, axis=1) for x in dense]
        return scores, dense, finite

    def _pure_texts(self, index: int, params: Params, tokens: Array, lengths: Array) -> Array:
        model, dtype = self.models[index].model, jnp.dtype(self.config.dtype)
        return map_in_chunks(
            lambda part: reward_model.score_texts(model, params, *part, dtype=dtype),
            (tokens, lengths),
            self.config.rollout_batch_size,
        )

    def _pure_combine(self, columns: list[Array], failed: Array, broken: Array, lengths: Array):
        """Scores, scorable rows, dense rewards, the rewards one by one, and their means and deviations."""
        c = self.config
        t = max((x.shape[1] for x in columns if x.ndim == 2), default=0)
        if self._ensemble:
            members = jnp.stack(columns[: len(self.models)])
            if c.reward_ensemble == "min":
                together = jnp.min(members, axis=0)
            else:
                spread = c.reward_ensemble_std_coef if c.reward_ensemble == "mean_minus_std" else 0.0
                together = jnp.mean(members, axis=0) - spread * jnp.std(members, axis=0)
            columns = [together, *columns[len(self.models) :]]
        inside = adv.response_mask(lengths, t)
        dense = [(w, jnp.where(inside, x, 0.0)) for w, x in zip(self._weights, columns) if x.ndim == 2]
        each = [x if x.ndim == 1 else jnp.sum(jnp.where(inside, x, 0.0), axis=1) for x in columns]
        each = jnp.stack(each, axis=1)
        scalar_weights = jnp.array([w if x.ndim == 1 else 0.0 for w, x in zip(self._weights, columns)])
        scores, scorable = adv.combine_rewards(each, scalar_weights)
        # For the guard of the update to see: NaN alone would say that the reward does not apply.
        scores = jnp.where(broken, jnp.nan, scores)
        scorable = (scorable | broken) & ~failed & (lengths >= 0)
        token_rewards = sum(w * x for w, x in dense) if dense else None
        there = ~jnp.isnan(each) & (lengths >= 0)[:, None]
        metrics = {}
        for i, name in enumerate(self.names):
            clean = jnp.where(there[:, i], each[:, i], 0.0)
            any_there = jnp.any(there[:, i])
            metrics[f"rewards/{name}/mean"] = jnp.where(any_there, adv.masked_mean(clean, there[:, i]), jnp.nan)
            deviation = jnp.sqrt(adv.masked_var(clean, there[:, i]))
            metrics[f"rewards/{name}/std"] = jnp.where(any_there, deviation, jnp.nan)
        if self.config.reward_failure == "drop":
            metrics["rewards/dropped"] = jnp.sum(failed & (lengths >= 0)).astype(jnp.float32)
        return scores, scorable, token_rewards, each, metrics

    def programs(self, build: Callable, rollout: Rollout, group: int) -> None:
        """Hands the program of the reward models that read ids to `build`; see `RolloutStage.trace_programs`."""
        held = [m.params for m in self.models if m.tokenizer is None]
        if held:
            build("score", self._on_device, sharding.resident(held), rollout, group, resident=held)

    # --- scoring

    def score(self, rollout: Rollout, source, rows: np.ndarray, group: int, state: Any, limit: int | None = None):
        """Scores a rollout; waits for nothing but what host functions need.

        Args:
          rollout: B rows on the device, groups adjacent; rows of length -1 are absent.
          source: the PromptData that the prompts came from.
          rows: [B] rows of it.
          group: adjacent rows that share a prompt.
          state: a TrainerState for functions that want one.
          limit: only the first so many rows are real; the others fill the batch up. None: all.

        Returns:
          Scored.

        Raises:
          RewardFailure: a reward is wrong and reward_failure is 'raise', on whichever process. A reward of the device
            that is not finite is none in training: it becomes a score of NaN, which `guard` tells.
        """
        seconds, began = {}, time.perf_counter()
        b = len(rows)
        limit = b if limit is None else limit
        here, owners = local_rows.held_rows(self._mesh, b), local_rows.owners(self._mesh, b)
        owned = [np.flatnonzero(owners[:limit] == i) for i in range(jax.process_count())]
        readers = [m for m in self.models if m.tokenizer is None]
        scores, dense, finite = self._on_device([sharding.resident(m.params) for m in readers], rollout, group)
        wanted = (rollout.response, rollout.lengths, rollout.ended) if self.needs_text else ()
        host, finite = local_rows.fetch((wanted, finite), self._mesh)
        names = [m.name for m in readers] + self._device_names
        if names:
            seconds["device"] = time.perf_counter() - began
        by_model = dict(zip((m.name for m in readers), scores))
        ids = texts = None
        if self.needs_text:
            response, lengths, ended = host
            ids = interface.completion_ids(response, np.maximum(lengths, 0))
            texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        for i, model in enumerate(self.models):
            if model.tokenizer is not None:
                began = time.perf_counter()
                placed = self._tokens(model, source, rows[here], texts, ended, b)
                by_model[model.name] = self._texts(i, sharding.resident(model.params), *placed)
                names.append(model.name)
                finite.append(np.isfinite(local_rows.fetch(by_model[model.name], self._mesh)))
                seconds[model.name] = time.perf_counter() - began
        said = error = None
        try:
            said = self._own(names, finite, source, rows, here, owned[jax.process_index()], texts, ids, state)
        except UserError as wrong:
            error = wrong
        failed, broken, host_columns, metrics, extra = self._together(
            multihost.agree(said, error, on_host.RewardFailure), owned, b, limit, seconds
        )
        columns = [by_model[m.name] for m in self.models]
        placed = sharding.shard_batch((failed, host_columns, broken), self._mesh)
        of_host, of_device = 0, iter(dense)
        for on_device in self._jax:
            if on_device:
                columns.append(next(of_device))
            else:
                columns.append(placed[1][:, of_host])
                of_host += 1
        scores, scorable, token_rewards, each, found = self._combine(columns, placed[0], placed[2], rollout.lengths)
        nothing = bool(failed[:limit].all())
        if not nothing and len(columns) == of_host:
            nothing = bool((np.isnan(host_columns[:limit]).all(axis=1) | failed[:limit]).all())
        return Scored(scores, scorable, token_rewards, each, {**found, **metrics}, seconds, extra, nothing)

    def _tokens(self, model: RewardModel, source, rows, texts, ended, count: int) -> tuple[Array, Array]:
        """What a model that reads text reads of `count` rows, on the mesh; this process has some of them."""
        longest = model.model.config.max_position_embeddings
        tokens = lengths = error = None
        try:
            tokens, lengths = reward_tokens(
                model.tokenizer,
                source.texts(rows),
                source.as_completions(texts),
                ended,
                text_eos=self.config.reward_text_eos,
                chat_template_kwargs=self.config.chat_template_kwargs,
                max_length=longest,
                buckets=tuple(64 * 2**i for i in range(16) if 64 * 2**i < longest) + (longest,),
            )
        except UserError as wrong:
            error = wrong
        width = max(multihost.agree(None if error else tokens.shape[1], error))
        tokens = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=model.tokenizer.pad_id)
        return local_rows.place((tokens, lengths), self._mesh, count)

    def _own(self, names, finite, source, rows, here, owned, texts, ids, state) -> dict[str, Any]:
        """What this process has to say of the rows that it answers for, as JSON holds it."""
        own = np.searchsorted(here, owned)  # where they are among the rows that it holds
        rows, texts = rows[owned], None if texts is None else [texts[i] for i in own]
        failed, broken, told = np.zeros(len(owned), bool), np.zeros(len(owned), bool), []
        guarded = self.config.reward_failure == "raise" and not state.is_eval
        for name, fine in zip(names, finite):
            if guarded:  # the update tells, and on_nonfinite says what becomes of it
                broken |= ~fine[own]
                continue
            told += self._check(name, fine[own], source, rows, texts, owned)
            failed |= ~fine[own]
        said = {"rewards": None, "metrics": {}, "extra": {}, "seconds": {}}
        if self._host is not None:
            called = self._host.call(
                source.texts(rows), source.as_completions(texts), [ids[i] for i in own], source.columns(rows), state
            )
            failed |= called.failed
            said = {name: getattr(called, name) for name in said}
            told += [f"{problem}; its rows are left out" for problem in called.problems]
            if not self.models and not self._device_functions:
                told += filter(
                    None, [on_host.unscored_warning(called, source.texts(rows), texts, source.columns(rows))]
                )
        return {**said, "failed": failed, "broken": broken, "told": told}

    def _together(self, parts: list[dict[str, Any]], owned: list[np.ndarray], count: int, limit: int, seconds: dict):
        """What all processes said of a batch: (failed [B], broken [B], host rewards [B, F] or None, metrics, columns).

        Warnings come from the first process; the slowest process' seconds are added to `seconds`.
        """
        failed, broken, rewards, extra = np.zeros(count, bool), np.zeros(count, bool), None, {}
        if self._host is not None:
            rewards = np.full((count, len(self._host.names)), np.nan, np.float32)
        values: dict[str, list[tuple[float, int]]] = {}
        for index, (said, rows) in enumerate(zip(parts, owned)):
            failed[rows], broken[rows] = said["failed"], said["broken"]
            if rewards is not None:
                rewards[rows] = np.asarray(said["rewards"], np.float32).reshape(len(rows), len(self._host.names))
            for name, column in said["extra"].items():
                whole = extra.setdefault(name, [None] * limit)
                for row, value in zip(rows, column):
                    whole[row] = value
            for name, value in said["metrics"].items():
                if len(rows) or len(parts) == 1:
                    values.setdefault(name, []).append((value, len(rows)))
            for name, value in said["seconds"].items():
                seconds[name] = max(value, seconds.get(name, 0.0))
            if multihost.is_main():
                for line in said["told"]:
                    who = f"process {index}: " if len(parts) > 1 else ""
                    warnings.warn(printable(f"{who}{line}"), stacklevel=3)
        # A mean over a process' rows becomes the mean over all.
        metrics = {name: given[0][0] if len(given) == 1 else _weighted_mean(given) for name, given in values.items()}
        return failed, broken, rewards, metrics, extra

    def _check(self, name: str, fine: np.ndarray, source, rows, texts, numbers) -> list[str]:
        """A reward on the device that is not finite, where rows are dropped or in an evaluation: a warning, or an error
        with the row."""
        if fine.all():
            return []
        row = int(np.flatnonzero(~fine)[0])
        shown = source.display_texts(rows[row : row + 1])[0]
        answer = f" -> {texts[row]!r}" if texts is not None else ""
        message = (
            f"reward {name} gave a score that is not a finite number for {int((~fine).sum())} of {len(fine)} "
            f"responses, first for row {numbers[row]}: {shown[-200:]!r}{answer}"
        )
        if self.config.reward_failure == "raise" and self.config.on_nonfinite == "stop":
            raise on_host.RewardFailure(message)
        return [message + "; left out"]

    def close(self) -> None:
        """Ends the threads of the host functions."""
        if self._host is not None:
            self._host.close()

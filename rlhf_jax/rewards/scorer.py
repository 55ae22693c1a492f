"""All rewards of a run on one rollout: reward models and JAX functions on the device, the others on the host."""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import advantages as adv
from rlhf_jax import data
from rlhf_jax.algorithms import microbatch, reward_model
from rlhf_jax.data.chat import ChatTemplate, Conversation
from rlhf_jax.data.reward_inputs import reward_tokens
from rlhf_jax.errors import UserError
from rlhf_jax.generate import map_in_chunks
from rlhf_jax.models.io import hf
from rlhf_jax.parallel import local_rows, multihost, sharding
from rlhf_jax.parallel.compile_ahead import run_program
from rlhf_jax.rewards import interface
from rlhf_jax.rewards import python_functions as on_host
from rlhf_jax.rewards.options import RewardOptions
from rlhf_jax.rewards.server import RemoteReward
from rlhf_jax.types import Array, Params, Rollout
from rlhf_jax.utils.text import printable


@dataclasses.dataclass
class RewardModel:
    """A reward model of a run; `tokenizer` is set if it reads text, None if it reads the sampled ids."""

    name: str
    path: str
    revision: str
    model: Any
    tokenizer: Any | None
    params: Params | None = None


@dataclasses.dataclass
class Scored:
    """Scores of a rollout of B rows."""

    scores: Array
    """[B] float32, the weighted sum without token-level rewards."""
    scorable: Array
    """[B] bool: at least one reward applies and none failed."""
    token_rewards: Array | None
    """[B, T] float32, weighted token-level rewards."""
    each_reward: Array
    """[B, F] float32, each reward unweighted, NaN where not applicable; token-level ones summed over the response."""
    weights: tuple[float, ...]
    """The weight of each reward, [F]."""
    metrics: dict[str, Any]
    seconds: dict[str, float]
    extra: dict[str, list[Any]]
    """Columns that functions passed to log_extra."""
    failed: np.ndarray
    """[B] bool: rows that are dropped since a reward failed."""
    function_metrics: dict[str, float]
    """Those of `metrics` that functions logged."""
    none_scorable: bool
    """Whether no row of the batch has a score."""

    @property
    def total_scores(self) -> Array:
        """[B] scores plus the sum of token-level rewards."""
        return self.scores if self.token_rewards is None else self.scores + self.token_rewards.sum(axis=1)


@dataclasses.dataclass
class _HeldRows:
    """What a process has on the host of a rollout of B rows: the H rows that its devices hold."""

    source: Any
    """The PromptData of the prompts."""
    rows: np.ndarray
    """[B] row numbers in it."""
    positions: np.ndarray
    """[H] of the rows that it holds, ascending."""
    ids: list[Any] | None = None
    """Tokens of each held response; None, as all that follows, if no reward reads text."""
    texts: list[str] | None = None
    ended: np.ndarray | None = None
    """[H] bool: it has its stop token."""
    completions: list[str] | list[Conversation] | None = None
    """The responses as functions and reward models that read text get them."""
    columns: Mapping[str, list[Any]] = dataclasses.field(default_factory=dict)
    """What functions get beside the columns of the data."""


def open_model(path: str, revision: str | None) -> Any:
    """A reward model without its weights. Its pad id is its tokenizer's, which TRL writes into the model's config;
    if there is none, that of config.json."""
    model, pad = hf.load_model(path, revision=revision), data.own_pad_id(path, revision)
    return model if pad is None else dataclasses.replace(model, pad_id=pad)


def open_models(config: RewardOptions, tokenizer, conversational: bool) -> list[RewardModel]:
    """The reward models of a config, without their weights.

    Raises:
      UserError: one cannot be read, has too few embedding rows for the policy's ids, or lacks the tokenizer it needs.
    """
    if config.reward_model_path is None:
        return []
    sources = [(config.reward_model_path, config.reward_model_revision)]
    sources += [(path, "main") for path in config.more_reward_models]
    # The last part of each path, as TRL names them.
    names = interface.number_duplicates(path.rstrip("/").split("/")[-1] for path, _ in sources)
    reward_models = []
    for (path, revision), name in zip(sources, names):
        model = open_model(path, revision)
        if config.reward_input == "ids":
            data.check_same_tokenizer(tokenizer, path, revision)
            as_ids = True
        else:
            may_read_ids = config.reward_input == "auto" and not conversational
            as_ids = may_read_ids and data.same_tokenizer(tokenizer, path, revision)
        rows = model.config.vocab_size
        if as_ids:
            tokenizer.check_rows(rows, f"reward model {path}")
        model_tokenizer = None
        if not as_ids:
            model_tokenizer = data.load_tokenizer(path, revision, vocab_size=rows)
            model_tokenizer = dataclasses.replace(model_tokenizer, template_date=tokenizer.template_date)
        reward_models.append(RewardModel(name, path, revision, model, model_tokenizer))
    return reward_models


def _weighted_mean(pairs: list[tuple[float, int]]) -> float:
    """The mean of (value, weight) pairs, ignoring NaN values unless all are."""
    numbers = [pair for pair in pairs if not np.isnan(pair[0])] or pairs
    return sum(value * weight for value, weight in numbers) / sum(weight for _, weight in numbers)


class Scorer:
    """The rewards of a run, in the order of `reward_weights`: models (or their ensemble), functions, server.

    Attributes:
      names: of the rewards, for metrics and tables.
      models: the reward models; `set_params` sets their params.
      weights: of the rewards, in the order of `names`.
      run: calls programs of models, as `run_program`.
    """

    run: Callable[..., Any] = staticmethod(run_program)

    def __init__(
        self, config: RewardOptions, tokenizer, models: list[RewardModel], functions: Sequence[Callable], mesh
    ):
        """Raises a UserError if there is no reward, or the number of weights differs from that of rewards."""
        self.config, self.tokenizer, self.models, self._mesh = config, tokenizer, models, mesh
        functions = [*(on_host.resolve(spec) for spec in config.reward_funcs), *functions]
        if config.reward_server is not None:
            functions.append(
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
        if not functions and not models:
            raise UserError(
                "no reward: set --reward_model_path, --reward_funcs or --reward_server, or pass reward_funcs to "
                "rlhf_jax.run"
            )
        function_names = on_host.unique_names(functions)
        self._ensemble = len(models) > 1 and config.reward_ensemble != "sum"
        model_names = [f"ensemble_{config.reward_ensemble}"] if self._ensemble else [m.name for m in models]
        self.names = (*model_names, *function_names)
        self._jax = [on_host.is_jax_reward(f) for f in functions]
        self._device_functions = [f for f, on_device in zip(functions, self._jax) if on_device]
        self._device_names = [n for n, on_device in zip(function_names, self._jax) if on_device]
        host = [f for f, on_device in zip(functions, self._jax) if not on_device]
        self._host = None
        if host:
            names = [n for n, on_device in zip(function_names, self._jax) if not on_device]
            limits = {"failure": config.reward_failure, "timeout": config.reward_timeout}
            self._host = on_host.HostRewards(host, **limits, names=names)
        weights = config.reward_weights
        if weights is not None and len(weights) != len(self.names):
            raise UserError(
                f"reward_weights has {len(weights)} numbers, but there are {len(self.names)} rewards: "
                f"{', '.join(self.names)}. Set one weight for each, in this order"
            )
        self.weights = tuple(weights or (1.0,) * len(self.names))
        self._on_device = jax.jit(self._pure_device, static_argnums=2)
        self._texts = jax.jit(self._pure_texts, static_argnums=0)
        self._combine = jax.jit(self._pure_combine)

    @property
    def needs_text(self) -> bool:
        """Whether responses must be decoded on the host."""
        return self._host is not None or any(model.tokenizer is not None for model in self.models)

    @property
    def template_date(self) -> str | None:
        """The date that the chat template of a reward model prints for conversations (see `ChatTemplate.date`)."""
        tokenizers = (model.tokenizer for model in self.models if model.tokenizer is not None)
        dates = (ChatTemplate(tokenizer, self.config.chat_template_kwargs).date for tokenizer in tokenizers)
        return next(filter(None, dates), None)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises a UserError if a function requires a keyword that is not a data column."""
        if self._host is not None:
            self._host.check_columns(columns)

    def type_notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Lines on columns of these rows that hold another type than a function expects."""
        return [] if self._host is None else self._host.type_notes(rows)

    def set_params(self, params: Sequence[Params]) -> None:
        """Takes the params of the reward models, in order, on the mesh."""
        for reader, model_params in zip(self.models, params, strict=True):
            reader.params = model_params

    # --- programs

    def _pure_device(self, params: list[Params], rollout: Rollout, group: int):
        """Scores [B] of each model that reads ids, rewards [B] or [B, T] of each JAX function, and whether they are
        finite, [B] of each."""
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
            rewards = jnp.asarray(function(rollout.response, jnp.maximum(rollout.lengths, 0)))
            if rewards.shape not in ((b,), (b, t)):
                raise UserError(
                    f"reward function {on_host.function_name(function)} returned shape {rewards.shape} for {b} "
                    f"responses of {t} columns; return [{b}] or [{b}, {t}]"
                )
            dense.append(rewards.astype(jnp.float32))
        response_mask = adv.response_mask(rollout.lengths, t)
        finite = [jnp.isfinite(x) for x in scores]
        finite += [jnp.isfinite(x) if x.ndim == 1 else jnp.all(jnp.isfinite(x) | ~response_mask, axis=1) for x in dense]
        return scores, dense, finite

    def _pure_texts(self, index: int, params: Params, tokens: Array, lengths: Array) -> Array:
        model, dtype = self.models[index].model, jnp.dtype(self.config.dtype)
        return map_in_chunks(
            lambda part: reward_model.score_texts(model, params, *part, dtype=dtype),
            (tokens, lengths),
            self.config.rollout_batch_size,
        )

    def _pure_combine(self, columns: list[Array], failed: Array, broken: Array, lengths: Array):
        """Scores, scorable rows, token-level rewards, each reward by itself, and their means and deviations."""
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
        response_mask = adv.response_mask(lengths, t)
        dense = [(w, jnp.where(response_mask, x, 0.0)) for w, x in zip(self.weights, columns) if x.ndim == 2]
        each = [x if x.ndim == 1 else jnp.sum(jnp.where(response_mask, x, 0.0), axis=1) for x in columns]
        each = jnp.stack(each, axis=1)
        scalar_weights = jnp.array([w if x.ndim == 1 else 0.0 for w, x in zip(self.weights, columns)])
        scores, scorable = adv.combine_rewards(each, scalar_weights)
        # `nonfinite` must see these rows: in `each`, NaN means that a reward does not apply.
        scores = jnp.where(broken, jnp.nan, scores)
        scorable = (scorable | broken) & ~failed & (lengths >= 0)
        token_rewards = sum(w * x for w, x in dense) if dense else None
        applies = ~jnp.isnan(each) & (lengths >= 0)[:, None]
        metrics = {}
        for i, name in enumerate(self.names):
            values = jnp.where(applies[:, i], each[:, i], 0.0)
            any_applies = jnp.any(applies[:, i])
            metrics[f"rewards/{name}/mean"] = jnp.where(any_applies, adv.masked_mean(values, applies[:, i]), jnp.nan)
            deviation = jnp.sqrt(adv.masked_var(values, applies[:, i]))
            metrics[f"rewards/{name}/std"] = jnp.where(any_applies, deviation, jnp.nan)
        if self.config.reward_failure == "drop":
            metrics["rewards/dropped"] = jnp.sum(failed & (lengths >= 0)).astype(jnp.float32)
        return scores, scorable, token_rewards, each, metrics

    @property
    def _scores_ids(self) -> bool:
        """Whether a program scores ids."""
        return bool(self._device_functions) or any(model.tokenizer is None for model in self.models)

    def programs(self, build: Callable, params: Sequence[Params], rollout: Rollout, group: int) -> Any:
        """Hands the program that scores ids to `build`; see `Stage.trace_programs`. `params`: of `set_params`.

        Returns:
          The shape of token-level rewards; None: there are none.
        """
        if not self._scores_ids:
            return None
        reader_params = [
            model_params for model, model_params in zip(self.models, params, strict=True) if model.tokenizer is None
        ]
        _, dense, _ = build(
            "score", self._on_device, sharding.resident(reader_params), rollout, group, resident=reader_params
        )
        return next((x for x in dense if x.ndim == 2), None)

    # --- scoring

    def score(
        self,
        rollout: Rollout,
        source,
        rows: np.ndarray,
        *,
        group: int,
        state: Any,
        limit: int | None = None,
        present: np.ndarray | None = None,
        conversations: Any = None,
    ):
        """Scores a rollout; waits only for what host functions need.

        Args:
          rollout: B rows on the device, groups adjacent; rows of length -1 are absent.
          source: the PromptData of the prompts.
          rows: [B] row numbers in it.
          group: adjacent rows that share a prompt.
          state: a TrainerState, for functions that take one.
          limit: number of real rows; the rest pad the batch. None: all.
          present: [B] bool, False for rows that are absent among the real ones. None: none is.
          conversations: `messages` of each response that this process holds, and further `columns` for functions
            (`stages.turns.Conversations`). None: a response is one message.

        Returns:
          Scored.

        Raises:
          RewardFailure: a reward failed on any process and reward_failure is 'raise'. In training, a non-finite reward
            of the device does not raise: it becomes a score of NaN, which the update reports (see `nonfinite`).
        """
        seconds, began = {}, time.perf_counter()
        b = len(rows)
        limit = b if limit is None else limit
        owners = local_rows.owners(self._mesh, b)
        present = np.arange(b) < limit if present is None else present & (np.arange(b) < limit)
        owned = [np.flatnonzero((owners == i) & present) for i in range(jax.process_count())]
        readers = [m for m in self.models if m.tokenizer is None]
        params = [sharding.resident(m.params) for m in readers]
        run = self.run if self._scores_ids else run_program
        scores, dense, finite = run("score", self._on_device, params, rollout, group)
        held_rows, finite = self._fetch(rollout, source, rows, finite, conversations)
        checks = list(zip([*(m.name for m in readers), *self._device_names], finite))
        if checks:
            seconds["device"] = time.perf_counter() - began
        by_model = dict(zip((m.name for m in readers), scores))
        for i, model in enumerate(self.models):
            if model.tokenizer is not None:
                began = time.perf_counter()
                placed = self._tokens(model, held_rows, b)
                by_model[model.name] = self._texts(i, sharding.resident(model.params), *placed)
                checks.append((model.name, np.isfinite(local_rows.fetch(by_model[model.name], self._mesh))))
                seconds[model.name] = time.perf_counter() - began
        results = error = None
        try:
            results = self._score_owned(held_rows, owned[jax.process_index()], checks, state)
        except UserError as raised:
            error = raised
        failed, broken, host_rewards, metrics, extra = self._merge(
            multihost.agree(results, error, on_host.RewardFailure), owned, b, limit, seconds
        )
        placed = sharding.shard_batch((failed, host_rewards, broken), self._mesh)
        by_device = iter(dense)
        by_host = (placed[1][:, i] for i in range(0 if host_rewards is None else host_rewards.shape[1]))
        columns = [by_model[m.name] for m in self.models]
        columns += [next(by_device if on_device else by_host) for on_device in self._jax]
        scores, scorable, token_rewards, each, reward_metrics = self._combine(
            columns, placed[0], placed[2], rollout.lengths
        )
        none_scorable = bool(failed[present].all())
        if not none_scorable and not self.models and not self._device_functions:
            none_scorable = bool((np.isnan(host_rewards[present]).all(axis=1) | failed[present]).all())
        return Scored(
            scores,
            scorable,
            token_rewards,
            each,
            self.weights,
            {**reward_metrics, **metrics},
            seconds,
            extra,
            failed,
            metrics,
            none_scorable,
        )

    def _fetch(
        self, rollout: Rollout, source, rows: np.ndarray, finite, conversations: Any
    ) -> tuple[_HeldRows, list[np.ndarray]]:
        """Fetches, in one transfer, what rewards on the host read of the rows of this process, and `finite` of these
        rows."""
        held_rows = _HeldRows(source, rows, local_rows.held_rows(self._mesh, len(rows)))
        to_fetch = (rollout.response, rollout.lengths, rollout.ended) if self.needs_text else ()
        fetched, finite = local_rows.fetch((to_fetch, finite), self._mesh)
        if self.needs_text:
            response, lengths, held_rows.ended = fetched
            held_rows.ids = interface.completion_ids(response, np.maximum(lengths, 0))
            held_rows.texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in held_rows.ids]
            held_rows.completions = source.as_completions(held_rows.texts)
            if conversations is not None:
                held_rows.completions, held_rows.columns = conversations.messages, conversations.columns
        return held_rows, finite

    def _tokens(self, model: RewardModel, held_rows: _HeldRows, count: int) -> tuple[Array, Array]:
        """Tokens of a batch of `count` rows by the tokenizer of a model that reads text, on the mesh."""
        context, source = model.model.config.max_position_embeddings, held_rows.source
        tokens = lengths = error = None
        try:
            tokens, lengths = reward_tokens(
                model.tokenizer,
                source.texts(held_rows.rows[held_rows.positions]),
                held_rows.completions,
                held_rows.ended,
                text_eos=self.config.reward_text_eos,
                chat_template_kwargs=self.config.chat_template_kwargs,
                max_length=context,
                buckets=tuple(64 * 2**i for i in range(16) if 64 * 2**i < context) + (context,),
            )
        except UserError as raised:
            error = raised
        width = max(multihost.agree(None if error else tokens.shape[1], error))
        tokens = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=model.tokenizer.pad_id)
        return local_rows.place((tokens, lengths), self._mesh, count)

    def _score_owned(
        self, held_rows: _HeldRows, owned: np.ndarray, checks: list[tuple[str, np.ndarray]], state
    ) -> dict[str, Any]:
        """Results of this process for the rows that it owns, of values that JSON has.

        Args:
          held_rows: the rows that it holds.
          owned: positions in the batch of those that it owns.
          checks: (name of a reward of the device, whether it is finite, of the rows that it holds).
          state: a TrainerState.
        """
        indices, source, rows = np.searchsorted(held_rows.positions, owned), held_rows.source, held_rows.rows[owned]
        texts = None if held_rows.texts is None else [held_rows.texts[i] for i in indices]
        failed, broken, messages = np.zeros(len(owned), bool), np.zeros(len(owned), bool), []
        update_reports = self.config.reward_failure == "raise" and not state.is_eval  # then on_nonfinite decides
        for name, is_finite in checks:
            if update_reports:
                broken |= ~is_finite[indices]
                continue
            messages += self._check_finite(name, is_finite[indices], source, rows, texts, owned)
            failed |= ~is_finite[indices]
        results = {"rewards": None, "metrics": {}, "extra": {}, "seconds": {}}
        if self._host is not None:
            ids = [held_rows.ids[i] for i in indices]
            completions = copy.deepcopy([held_rows.completions[i] for i in indices])
            columns = {name: [values[i] for i in indices] for name, values in held_rows.columns.items()}
            columns = {**source.columns(rows), **columns}
            called = self._host.call(source.texts(rows), completions, ids, columns, state)
            failed |= called.failed
            results = {name: getattr(called, name) for name in results}
            messages += [f"{problem}; its rows are dropped" for problem in called.problems]
            if not self.models and not self._device_functions:
                messages += filter(
                    None, [on_host.unscored_warning(called, source.texts(rows), texts, source.columns(rows))]
                )
        return {**results, "failed": failed, "broken": broken, "messages": messages}

    def _merge(self, parts: list[dict[str, Any]], owned: list[np.ndarray], count: int, limit: int, seconds: dict):
        """Merges the processes' results: (failed [B], broken [B], host rewards [B, F] or None, metrics, columns).

        The first process prints the warnings; the seconds of the slowest process are added to `seconds`.
        """
        failed, broken, rewards, extra = np.zeros(count, bool), np.zeros(count, bool), None, {}
        if self._host is not None:
            rewards = np.full((count, len(self._host.names)), np.nan, np.float32)
        values: dict[str, list[tuple[float, int]]] = {}
        for index, (part, rows) in enumerate(zip(parts, owned)):
            failed[rows], broken[rows] = part["failed"], part["broken"]
            if rewards is not None:
                rewards[rows] = np.asarray(part["rewards"], np.float32).reshape(len(rows), len(self._host.names))
            for name, column in part["extra"].items():
                merged_column = extra.setdefault(name, [None] * limit)
                for row, value in zip(rows, column):
                    merged_column[row] = value
            for name, value in part["metrics"].items():
                if len(rows) or len(parts) == 1:
                    values.setdefault(name, []).append((value, len(rows)))
            for name, value in part["seconds"].items():
                seconds[name] = max(value, seconds.get(name, 0.0))
            if multihost.is_main():
                for line in part["messages"]:
                    who = f"process {index}: " if len(parts) > 1 else ""
                    warnings.warn(printable(f"{who}{line}"), stacklevel=3)
        # Means over the rows of each process become means over all rows.
        metrics = {name: pairs[0][0] if len(pairs) == 1 else _weighted_mean(pairs) for name, pairs in values.items()}
        return failed, broken, rewards, metrics, extra

    def _check_finite(self, name: str, is_finite: np.ndarray, source, rows, texts, numbers) -> list[str]:
        """A warning if a reward of the device is not finite.

        Raises:
          RewardFailure: instead, with reward_failure 'raise' and on_nonfinite 'stop'; names the first row.
        """
        if is_finite.all():
            return []
        row = int(np.flatnonzero(~is_finite)[0])
        prompt = source.display_texts(rows[row : row + 1])[0]
        answer = f" -> {texts[row]!r}" if texts is not None else ""
        message = (
            f"reward {name} is not a finite number for {int((~is_finite).sum())} of {len(is_finite)} responses, first "
            f"for row {numbers[row]}: {prompt[-200:]!r}{answer}"
        )
        if self.config.reward_failure == "raise" and self.config.on_nonfinite == "stop":
            raise on_host.RewardFailure(message)
        return [message + "; dropped"]

    def close(self) -> None:
        """Ends the threads of host functions."""
        if self._host is not None:
            self._host.close()

"""Options of batches, of supervised training, and of what PPO, RLOO and GRPO share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Literal

from rlhf_jax.algorithms.optimizer_options import OptimizerOptions
from rlhf_jax.data.options import LengthOptions
from rlhf_jax.generate.options import DecodingOptions, SamplingOptions
from rlhf_jax.models.options import ComputeOptions
from rlhf_jax.option import NonNegativeFloat, NonNegativeInt, Options, PositiveFloat, PositiveInt, Range, option

MaxSteps = Annotated[int, Range("-1 (use num_train_epochs) or at least 1", lambda v: v == -1 or v >= 1)]


@dataclasses.dataclass(frozen=True)
class BatchOptions(Options):
    """Rows of an update, and how they are cut."""

    # --- batches
    batch_size: PositiveInt = option(64, lowers={"evaluation": 4})
    """Rows (PPO: episodes) per update, over all devices."""
    micro_batch_size: PositiveInt | None = option(
        None, resume="rounding", lowers={"score": 2, "experience": 2, "update": 1, "evaluation": 2}
    )
    """Rows per forward and backward pass, over all devices; default: on a CPU as many as make 2,048 tokens, on GPUs and
    TPUs the most whose compiled update fits the memory (docs/scaling.md). A resume keeps them. Never changes the
    result."""
    num_train_epochs: PositiveFloat = 1.0
    """Epochs over the data."""

    # Where an algorithm has no options of these names.
    num_mini_batches = num_generations = response_length = 1
    shared_prompts = False

    @property
    def micro_batch_tokens(self) -> int | None:
        """None: micro-batches are of rows."""
        return None

    @property
    def rollout_batch_size(self) -> int | None:
        """None: there are no rollouts."""
        return None

    @property
    def epochs_per_update(self) -> int:
        """Epochs over each batch."""
        return 1

    @property
    def tokens_per_row(self) -> int:
        """Tokens of the longest row, padding included."""
        raise NotImplementedError

    def requested_rows(self, n_rows: int | None) -> int | None:
        """Rows (episodes) that the options ask for, of a data set of `n_rows`; None: they depend on it, and it is not
        known yet."""
        raise NotImplementedError

    @property
    def computes_groups(self) -> bool:
        """Whether log-probs and updates compute a prompt once for all responses to it."""
        return False

    @property
    def depends_on_micro_batching(self) -> bool:
        """Whether the loss depends on which rows share a micro-batch."""
        return False

    def problems(self) -> Iterator[str]:
        """Parts that do not divide the batch."""
        yield from super().problems()
        batch, minibatches = self.batch_size, self.num_mini_batches
        if minibatches > batch:
            yield f"num_mini_batches {minibatches} exceeds batch_size {batch}: minibatches would be empty."
        elif batch % minibatches:
            yield (
                f"batch_size {batch} / num_mini_batches {minibatches} = {batch / minibatches:.4g} rows per minibatch; "
                f"it must be a whole number (try batch_size {multiples(batch, minibatches)})."
            )
        else:
            rows, micro = batch // minibatches, self.micro_batch_size
            if micro is not None and rows % micro:
                source = f"batch_size {batch} / num_mini_batches {minibatches} = " if minibatches > 1 else "batch_size "
                yield (
                    f"{source}{rows} rows per minibatch / micro_batch_size {micro} = {rows / micro:.4g} micro-batches; "
                    f"it must be a whole number (try micro_batch_size {divisors(rows, micro)})."
                )


@dataclasses.dataclass(frozen=True)
class SupervisedOptions(BatchOptions, OptimizerOptions, ComputeOptions):
    """The length of supervised training."""

    # --- training
    max_steps: MaxSteps = -1
    """Number of updates, if above 0; overrides num_train_epochs."""

    def requested_rows(self, n_rows: int | None) -> int | None:
        """max_steps updates, or num_train_epochs without an epoch's incomplete batch, at least one update."""
        if self.max_steps > 0:
            return self.max_steps * self.batch_size
        if n_rows is None:
            return None
        return max(1, math.ceil(self.num_train_epochs * (n_rows // self.batch_size))) * self.batch_size


@dataclasses.dataclass(frozen=True)
class SFTOptions(SupervisedOptions):
    """Supervised fine-tuning."""

    # --- training
    completion_only_loss: bool = False
    """Compute the loss on the completion only; default: on prompt and completion, as N+."""
    early_stopping_patience: NonNegativeInt = option(0, rare=True)
    """Stop after this many evaluations without a lower validation loss; 0: never."""
    disable_dropout: bool = False
    """Disable the model's dropout."""


@dataclasses.dataclass(frozen=True)
class RewardModelOptions(SupervisedOptions):
    """A reward model: Bradley-Terry, -log sigmoid(chosen - rejected)."""

    # --- training
    center_rewards_coefficient: NonNegativeFloat | None = None
    """Weight of the auxiliary loss mean((chosen + rejected)^2), which centers rewards at 0."""
    score_init_std: PositiveFloat | None = option(None, rare=True)
    """Standard deviation of a new score head; default: 1/sqrt(D + 1), as N+. Refused where the model has a head."""
    disable_dropout: bool = True
    """Disable the model's dropout."""


@dataclasses.dataclass(frozen=True)
class PolicyGradientOptions(
    SamplingOptions, DecodingOptions, BatchOptions, OptimizerOptions, ComputeOptions, LengthOptions
):
    """What PPO, RLOO and GRPO share: episodes, and the optimizer steps on them."""

    # --- episodes
    total_episodes: PositiveInt | None = None
    """Total number of episodes; default: num_train_epochs epochs over the prompts."""
    num_train_epochs: PositiveFloat = 3.0
    """Epochs over the prompts, if total_episodes is not given."""
    rollout_batch_size: PositiveInt | None = option(
        None, resume="rounding", lowers={"generate": 1, "score": 1, "experience": 1, "evaluation": 1}
    )
    """Rows generated and scored at a time, over all devices; default: batch_size. Log-probs and values are computed
    micro_batch_size rows at a time, if that is smaller."""
    micro_batch_tokens: PositiveInt | None = option(
        None, rare=True, resume="rounding", lowers={"score": 3, "experience": 3, "update": 2, "evaluation": 3}
    )
    """Tokens per forward and backward pass, padding included, over all devices, in place of micro_batch_size rows. Rows
    of similar length share a pass, so that short responses are not padded to the longest. Log-probs and values are
    computed that many tokens at a time too. Never changes the result."""

    # --- the update
    num_mini_batches: PositiveInt = 1
    """Optimizer steps per epoch."""
    old_logprobs: Literal["forward", "sampler"] = option("forward", rare=True)
    """Behavior-policy log-probs: from a forward pass, or from the sampler."""
    structured_outputs_logprobs: Literal["unconstrained", "constrained"] = option("unconstrained", rare=True)
    """Log-probs of responses that match structured_outputs_regex: of all tokens (TRL), or of the tokens that may
    follow, from which they were sampled."""
    target_kl: PositiveFloat | None = None
    """Skip the rest of an update's optimizer steps once policy/approxkl of a minibatch exceeds 1.5 times this; None:
    never."""

    # --- scores
    missing_eos_penalty: (
        Annotated[float, Range("at least 0, since it is subtracted from the score", lambda v: v >= 0)] | None
    ) = None
    """Penalty on the score of a response without eos (see eos_penalty_mode)."""
    eos_penalty_mode: Literal["subtract", "replace"] = option("subtract", rare=True)
    """subtract: score - penalty (TRL); replace: the score becomes -penalty (N+)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the per-token KL (Schulman, Approximating KL Divergence)."""

    @property
    def tokens_per_row(self) -> int:
        """Of a prompt and its response."""
        return self.query_length + self.response_length

    def requested_rows(self, n_rows: int | None) -> int | None:
        """total_episodes, or num_train_epochs times the responses to the prompts."""
        if self.total_episodes is not None or n_rows is None:
            return self.total_episodes
        return int(self.num_train_epochs * n_rows * self.num_generations)

    # Where an algorithm has no options of these names.
    mask_truncated_completions = importance_sampling_correction = False
    reshuffle = "per_epoch"
    entropy_target = ref_model_mixup_alpha = 0.0
    ref_model_sync_steps = 1

    def problems(self) -> Iterator[str]:
        """Penalties, micro-batches and ways of decoding that need other options."""
        yield from super().problems()
        if self.eos_penalty_mode == "replace" and self.missing_eos_penalty is None:
            yield "eos_penalty_mode 'replace' needs missing_eos_penalty: a response without eos scores -penalty."
        if self.micro_batch_tokens is not None:
            if self.micro_batch_size is not None:
                yield (
                    f"micro_batch_tokens {self.micro_batch_tokens} and micro_batch_size {self.micro_batch_size} both "
                    "set the size of a micro-batch: remove one of them (--micro_batch_size none)."
                )
            if self.depends_on_micro_batching:
                yield (
                    "micro_batch_tokens with loss_aggregation 'token_mean_micro': the result would depend on which "
                    "rows share a micro-batch, and these are chosen by length. Remove one of them."
                )
        batch, rollout = self.batch_size, self.rollout_batch_size
        if rollout is not None and batch % rollout:
            yield (
                f"batch_size {batch} / rollout_batch_size {rollout} = {batch / rollout:.4g} rounds; "
                f"it must be a whole number (try rollout_batch_size {divisors(batch, rollout)})."
            )
        yield from self._decoding_problems()

    def _decoding_problems(self) -> Iterator[str]:
        batch, rollout = self.batch_size, self.rollout_batch_size
        if self.decode_slots is not None:
            if self.decode_slots > batch:
                yield (
                    f"decode_slots {self.decode_slots} exceeds batch_size {batch}: there are no more rows to decode "
                    f"(decode_slots at most {batch})."
                )
            if rollout not in (None, batch):
                yield (
                    f"decode_slots {self.decode_slots} with rollout_batch_size {rollout}: the rows of a batch are one "
                    "queue. Remove rollout_batch_size; micro_batch_size bounds the forward passes."
                )
        if self.kv_cache_dtype == "int8" and not self.importance_sampling_correction:
            yield (
                "kv_cache_dtype int8 samples from another distribution than the policy that is trained: GRPO corrects "
                "for that with importance_sampling_correction true; else use kv_cache_dtype auto."
            )
        constrained = self.structured_outputs_logprobs == "constrained"
        if constrained and not self.guided:
            yield "structured_outputs_logprobs constrained needs structured_outputs_regex."
        if self.guided and not constrained and (self.old_logprobs == "sampler" or self.importance_sampling_correction):
            which = "old_logprobs sampler" if self.old_logprobs == "sampler" else "importance_sampling_correction true"
            yield (
                f"structured_outputs_regex with {which}: the sampler's log-probabilities are of the tokens that may "
                "follow, so the learner's must be too: set structured_outputs_logprobs constrained."
            )
        if self.rollout_max_steps is not None:
            if self.old_logprobs != "sampler":
                yield (
                    f"rollout_max_steps {self.rollout_max_steps} needs old_logprobs sampler: the tokens of a response "
                    "are of several policies, whose log-probabilities are known when they are sampled."
                )
            if rollout not in (None, batch):
                yield (
                    f"rollout_max_steps {self.rollout_max_steps} with rollout_batch_size {rollout}: the steps are "
                    "those of the whole batch. Remove rollout_batch_size; decode_slots bounds the memory of generation."
                )


def multiples(total: int, part: int) -> str:
    """The multiples of `part` next to `total`: '8 or 16'."""
    below = total - total % part
    return f"{below} or {below + part}" if below else f"{part}"


def divisors(total: int, near: float, times: int = 1) -> str:
    """The divisors of `total` next to `near`, each multiplied by `times`: '4 or 9'."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    divisors = sorted({*small, *(total // d for d in small)})
    around = [d for d in divisors if d < near][-1:] + [d for d in divisors if d > near][:1]
    return " or ".join(str(d * times) for d in around)

"""Options of PPO."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from rlhf_jax.algorithms.options import PolicyGradientOptions
from rlhf_jax.option import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, option


@dataclasses.dataclass(frozen=True)
class PPOOptions(PolicyGradientOptions):
    """PPO, with the numerics of TRL."""

    # --- the critic
    value_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of the critic, on the policy's schedule; with value_model shared_backbone, of the value head
    alone. None: learning_rate."""
    critic_warmup_steps: NonNegativeInt = option(0, rare=True)
    """Number of first updates in which only the critic learns (with value_model shared_backbone, only the value head).
    The policy's learning-rate schedule counts these updates too."""

    # --- PPO
    batch_size: PositiveInt = 512
    """Episodes per update, over all devices."""
    num_ppo_epochs: PositiveInt = 4
    """Epochs over each batch of episodes."""
    kl_coef: NonNegativeFloat = 0.05
    """Coefficient of the KL penalty in the reward."""
    kl_target: PositiveFloat | None = None
    """Target KL per response of the adaptive controller; None: kl_coef stays fixed."""
    kl_horizon: PositiveInt = option(10000, rare=True)
    """Horizon of the adaptive controller, in episodes."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL to the reference as a term of the loss, per token; 0: none."""
    kl_loss_estimator: Literal["k1", "k2", "k3"] = option("k3", rare=True)
    """Estimator of that KL. The gradient of k1 has mean 0 under the policy itself."""
    cliprange: PositiveFloat = 0.2
    """Clip range of the policy ratio below 1, and above 1 if epsilon_high is not given."""
    epsilon_high: PositiveFloat | None = None
    """Clip range of the policy ratio above 1 (DAPO's clip-higher); default: cliprange."""
    dual_clip: Annotated[float, Range("above 1", lambda v: v > 1)] | None = option(None, rare=True)
    """Upper bound of a token's loss, in multiples of -advantage, where the advantage is below 0 (dual-clip PPO, Ye et
    al. 2020); None: none."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the loss: entropy of the next-token distribution, in nats per token; 0: no
    bonus."""
    vf_coef: NonNegativeFloat = 0.1
    """Coefficient of the value loss."""
    cliprange_value: PositiveFloat = 0.2
    """Clip range of the value around its old prediction."""
    gamma: Fraction = 1.0
    """Discount factor."""
    lam: Fraction = 0.95
    """GAE lambda."""
    value_lam: Fraction | None = option(None, rare=True)
    """GAE lambda of the returns that the critic learns from (VC-PPO and VAPO: 1.0); None: lam."""
    adaptive_lam_alpha: PositiveFloat | None = option(None, rare=True)
    """GAE lambda of the advantages by the response's length l in tokens: 1 - 1 / (adaptive_lam_alpha * l), at least 0
    (VAPO: 0.05); None: lam."""
    gae_unit: Literal["token", "turn"] = option("token", rare=True)
    """What gamma and the GAE lambdas apply to: each token, or each turn of a response that calls tools; within a turn
    both are 1."""
    whiten_rewards: bool = False
    """Divide rewards by their standard deviation; the mean is kept."""
    whiten_ddof: Literal[0, 1] = option(1, rare=True)
    """Variance divides by n - 1 (TRL) or n (OpenAI, N+)."""
    score_position: Literal["after_eos", "eos"] = option("after_eos", rare=True)
    """Position of the score: one token after eos (OpenAI, TRL) or eos itself."""
    loss_aggregation: Literal["token_mean", "token_mean_micro", "seq_mean"] = option("token_mean", rare=True)
    """Mean over all tokens of the minibatch; mean of micro-batch means (TRL); mean over rows of token means."""

    @property
    def epochs_per_update(self) -> int:
        """num_ppo_epochs."""
        return self.num_ppo_epochs

    @property
    def depends_on_micro_batching(self) -> bool:
        """With a mean of micro-batch means."""
        return self.loss_aggregation == "token_mean_micro"

    def problems(self) -> Iterator[str]:
        """Options with which nothing would learn."""
        yield from super().problems()
        rows = self.batch_size // self.num_mini_batches
        if self.whiten_rewards and rows < 8:
            yield (
                f"whiten_rewards needs at least 8 rows per minibatch: batch_size {self.batch_size} / "
                f"num_mini_batches {self.num_mini_batches} = {rows}."
            )
        if self.kl_target is not None and self.kl_coef == 0:
            yield f"kl_target {self.kl_target} with kl_coef 0: the controller multiplies kl_coef, so it would stay 0."
        if self.critic_warmup_steps:
            option = f"critic_warmup_steps {self.critic_warmup_steps}"
            if self.vf_coef == 0:
                yield f"{option} with vf_coef 0: the value loss has no gradient, so nothing would learn."
            if self.value_learning_rate == 0:
                yield f"{option} with value_learning_rate 0: the critic would not learn."
        if self.value_learning_rate and self.vf_coef == 0:
            yield f"value_learning_rate {self.value_learning_rate:g} with vf_coef 0: the value loss has no gradient."
        alpha, longest = self.adaptive_lam_alpha, self.response_length
        if alpha is not None and self.gae_unit == "turn":
            yield "adaptive_lam_alpha with gae_unit turn: it makes a lambda of tokens; remove one of them."
        if alpha is not None and alpha * longest <= 1:
            yield (
                f"adaptive_lam_alpha {alpha:g} x response_length {longest} = {alpha * longest:g}: lambda = "
                "1 - 1 / (alpha x length) would be 0 for every response; increase adaptive_lam_alpha."
            )

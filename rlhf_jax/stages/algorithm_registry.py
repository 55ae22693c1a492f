"""The registry of algorithms: for each, a record of what a stage needs to train by it.

An algorithm is its equations, one file with an `Objective`, one config and one record here. A config file may register
its own: see `register_algorithm`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from rlhf_jax.algorithms import grpo, policy_gradient, ppo, rloo
from rlhf_jax.config import GRPOConfig, PolicyConfig, PPOConfig, RLOOConfig, StageConfig, register_stage
from rlhf_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What a stage must know of its algorithm: `RolloutAlgorithm`, or `supervised.SupervisedAlgorithm`.

    Attributes:
      name: of the stage, in config.json and for the run's folder.
      config: its config dataclass.
      update: pure, -> (TrainState, metrics); its arguments are of the kind of algorithm.
      progress: names of the metrics for the terminal, in order.
      continues_adapter: whether an adapter that training starts from is trained further by default; else it is merged.
    """

    KIND_OF_CONFIG: ClassVar[type[StageConfig]] = StageConfig
    """What `config` inherits."""
    name: str
    config: type
    update: Callable
    progress: tuple[str, ...] = ("loss",)
    continues_adapter: bool = False

    def __post_init__(self):
        """Raises a UserError if the config is not of the kind of algorithm."""
        if not issubclass(self.config, self.KIND_OF_CONFIG):
            why = f"{self.config.__name__} does not inherit {self.KIND_OF_CONFIG.__name__}"
            raise UserError(f"algorithm {self.name!r}: {why}, whose options a {type(self).__name__} reads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutAlgorithm(Algorithm):
    """An algorithm that learns from responses of the policy; its config is a PolicyConfig.

    Its update: (Models, TrainState, experience, *, config, optimizer, key, causes) -> (TrainState, metrics).

    Attributes beside those of `Algorithm`:
      make_experience: (Models, ScoredRollout, *, config, kl_coef) -> (experience, metrics); pure.
      eval_metrics: (Models, experience, *, config) -> metrics of the loss without an update; pure. None: none.
      row_measures: (Models, params, experience, *, config) -> what each response adds to the loss; pure. None: unknown.
      steps_per_update: optimizer steps of an update, of a config.
      group_size: responses to a prompt in training, of a config.
      eval_group_size: the same in evaluation.
      recomputes: whether an update computes the responses' log-probabilities again before it learns, of a config.
      shares_prompts: whether generation computes each prompt once for its group, of (Models, config).
      has_value_model: whether there is a critic, by the options value_model, value_model_path and lora_value.
      uses_reference: whether there is a reference policy, of a config.
      moves_reference: whether updates move the reference, of a config.
      initial_entropy_control: what `TrainState.entropy_control` starts from, of a config.
      adapt_kl_coef: (TrainState, metrics of make_experience, config) -> TrainState after an update; None: fixed.
      token_advantages: whether a response has advantages token by token without others to its prompt.
      learning_rate_metrics: names of the learning rate among the metrics.
    """

    KIND_OF_CONFIG = PolicyConfig
    make_experience: Callable
    eval_metrics: Callable | None = None
    row_measures: Callable | None = None
    steps_per_update: Callable[[Any], int] = lambda config: 1
    group_size: Callable[[Any], int] = lambda config: 1
    eval_group_size: Callable[[Any], int] = lambda config: 1
    recomputes: Callable[[Any], bool] = lambda config: config.old_logprobs == "forward"
    shares_prompts: Callable[[Any, Any], bool] = lambda models, config: False
    has_value_model: bool = False
    uses_reference: Callable[[Any], bool] = lambda config: True
    moves_reference: Callable[[Any], bool] = lambda config: False
    initial_entropy_control: Callable[[Any], Any] = lambda config: None
    adapt_kl_coef: Callable | None = None
    token_advantages: bool = False
    progress: tuple[str, ...] = ("objective/scores", "objective/kl", "val/response_length")
    learning_rate_metrics: tuple[str, ...] = ("lr",)


ALGORITHMS: dict[str, Algorithm] = {}
"""By name."""


def policy_gradient_algorithm(
    name: str, config: type, objective: policy_gradient.Objective, **options: Any
) -> RolloutAlgorithm:
    """The record of an algorithm that is an `Objective` of the trainer.

    Args:
      **options: other fields of the record, which override those of the trainer.
    """
    functions = ("make_experience", "update", "eval_metrics", "row_measures")
    bound = {f: functools.partial(getattr(policy_gradient, f), objective=objective) for f in functions}
    trainer = {"steps_per_update": policy_gradient.steps_per_update, "shares_prompts": policy_gradient.shares_prompts}
    trainer["recomputes"] = lambda config: objective.needs(config).logprobs and config.old_logprobs == "forward"
    return RolloutAlgorithm(name, config, **{**bound, **trainer, **options})


def register_algorithm(algorithm: Algorithm) -> None:
    """Makes an algorithm known to the command by its config; a config file may call it (docs/architecture.md)."""
    register_stage(algorithm.name, algorithm.config)
    ALGORITHMS[algorithm.name] = algorithm


OF_GROUPS = {
    "group_size": lambda config: config.num_generations,
    "eval_group_size": lambda config: config.num_generations_eval or config.num_generations,
    "uses_reference": lambda config: bool(config.beta),
    "moves_reference": lambda config: config.sync_ref_model,
    "continues_adapter": True,
    "learning_rate_metrics": ("learning_rate", "lr"),
}
"""What RLOO and GRPO have in common."""
register_algorithm(
    policy_gradient_algorithm(
        "ppo",
        PPOConfig,
        ppo.OBJECTIVE,
        has_value_model=True,
        adapt_kl_coef=ppo.adapt_kl_coef,
        token_advantages=True,
        progress=(
            "objective/scores",
            "objective/rlhf_reward",
            "objective/kl",
            "val/response_length",
            "policy/approxkl_avg",
        ),
    )
)
register_algorithm(
    policy_gradient_algorithm(
        "rloo",
        RLOOConfig,
        rloo.OBJECTIVE,
        progress=("reward", "objective/rlhf_reward", "objective/kl", "completions/mean_length", "policy/approxkl_avg"),
        **OF_GROUPS,
    )
)
register_algorithm(
    policy_gradient_algorithm(
        "grpo",
        GRPOConfig,
        grpo.OBJECTIVE,
        initial_entropy_control=grpo.initial_entropy_control,
        progress=("reward", "reward_std", "kl", "entropy", "completions/mean_length", "frac_reward_zero_std"),
        **OF_GROUPS,
    )
)

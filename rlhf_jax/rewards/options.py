"""Options of rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from rlhf_jax.option import NonNegativeFloat, NonNegativeInt, Options, PositiveFloat, PositiveInt, nearest, option
from rlhf_jax.rewards.interface import BY_NAME, split_spec


@dataclasses.dataclass(frozen=True)
class RewardOptions(Options):
    """What scores a response: reward models, functions, a server."""

    # --- rewards
    reward_model_path: str | None = option(None, path=True)
    """Reward model; None: only reward functions or a server."""
    reward_model_revision: str = option("main", rare=True)
    """Hub revision of the reward model."""
    more_reward_models: tuple[str, ...] = option((), path=True)
    """More reward models (see reward_ensemble)."""
    reward_ensemble: Literal["sum", "mean", "min", "mean_minus_std"] = "sum"
    """How to combine reward models: sum: each with its own weight; mean, min, mean - std: as one reward."""
    reward_ensemble_std_coef: NonNegativeFloat = option(1.0, rare=True)
    """Weight of the standard deviation in mean_minus_std."""
    reward_input: Literal["auto", "ids", "text"] = option("auto", rare=True)
    """What reward models read: sampled ids, or text in their own tokenization; auto: ids if both tokenizers agree."""
    reward_text_eos: bool = option(True, rare=True)
    """Append the reward model's eos to the text of a response that ended (TRL's RLOO leaves it out)."""
    reward_funcs: tuple[str, ...] = option((), path=True)
    """Reward functions: 'module:function', 'file.py:function', 'package.module.function', a name of TRL's
    (accuracy_reward, reasoning_accuracy_reward, think_format_reward, get_soft_overlong_punishment), exact_match_reward
    or boxed_format_reward."""
    reward_timeout: PositiveFloat = option(600.0, rare=True)
    """Timeout of one call of a Python reward function, in seconds."""
    reward_server: str | None = None
    """URL of a reward server: it receives prompts and completions by POST and returns scores."""
    reward_server_timeout: PositiveFloat = option(60.0, rare=True)
    """Timeout of one request to the reward server, in seconds."""
    reward_server_total_timeout: PositiveFloat = option(600.0, rare=True)
    """Timeout of all requests and retries of one batch, in seconds."""
    reward_server_retries: NonNegativeInt = option(5, rare=True)
    """Retries after a lost connection, status 429 or 5xx."""
    reward_server_batch_size: PositiveInt = option(64, rare=True)
    """Rows per request."""
    reward_server_concurrency: PositiveInt = option(4, rare=True)
    """Concurrent requests."""
    reward_server_token_env: str = option("RLHF_JAX_REWARD_TOKEN", rare=True)
    """Environment variable with the reward server's bearer token, if it needs one."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward, in the order models, functions, server; default: 1 each."""
    reward_failure: Literal["raise", "drop"] = option("raise", rare=True)
    """When a reward function or server fails: stop with an error, or drop its rows and count them."""

    def problems(self) -> Iterator[str]:
        """Options that belong to rewards that are not there. A config without any reward passes: functions may come as
        objects, so the stage checks that."""
        yield from super().problems()
        models = len(self.more_reward_models)
        if models and self.reward_model_path is None:
            yield "more_reward_models needs reward_model_path, the first reward model."
        if self.reward_ensemble != "sum" and not models:
            yield f"reward_ensemble {self.reward_ensemble!r} needs more_reward_models: there is at most one model."
        server = self.reward_server
        if server is not None and not server.startswith(("http://", "https://")):
            yield f"reward_server is {server!r}; it must start with http:// or https://."
        for function in self.reward_funcs:
            module, name = split_spec(function)
            named = module and not function.endswith(".py") and all(part.isidentifier() for part in name.split("."))
            if not named and function not in BY_NAME:
                yield (
                    f"reward_funcs: {function!r} must be 'module:function', 'file.py:function', "
                    f"'package.module.function' or one of {', '.join(BY_NAME)}."
                    f"{nearest(function, BY_NAME)}"
                )
        models = 0 if self.reward_model_path is None else 1 + models
        rewards = (models if self.reward_ensemble == "sum" else 1) + len(self.reward_funcs) + (server is not None)
        if self.reward_weights is not None and len(self.reward_weights) < rewards:
            yield (
                f"reward_weights has {len(self.reward_weights)} weights, but the config has {rewards} rewards "
                "(models, functions, server, in this order): give one weight per reward."
            )

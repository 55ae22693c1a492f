"""Random options of TRL's trainers, for sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.recording.tiny import Setting

FUNCTIONS = (("even_share",), ("low_ids",), ("hard_groups",), ("even_share", "low_ids"), ("hard_groups", "sometimes"))


class Draws:
    """Choices from one seed."""

    def __init__(self, trainer: str, seed: int) -> None:
        self.rng = np.random.default_rng([seed, sum(trainer.encode())])

    def of(self, *choices: Any) -> Any:
        """One of them."""
        return choices[self.rng.integers(len(choices))]

    def chance(self, share: float) -> bool:
        """True with this probability."""
        return bool(self.rng.random() < share)

    def learning(self) -> dict[str, Any]:
        """Options of optimizer and schedule."""
        options = {
            "learning_rate": self.of(3e-4, 1e-3, 2e-3),
            "adam_beta1": self.of(0.9, 0.8),
            "adam_beta2": self.of(0.999, 0.98),
            "adam_epsilon": self.of(1e-5, 1e-4),
            "weight_decay": self.of(0.0, 0.0, 0.1),
            "lr_scheduler_type": self.of("linear", "linear", "cosine", "constant", "constant_with_warmup"),
        }
        if self.chance(0.3):
            options["warmup_steps"] = 1
        return options

    def sampling(self) -> dict[str, Any]:
        """Options of responses, of the trainers that have a stop token."""
        options = {
            "response_length": self.of(5, 8, 10),
            "temperature": self.of(0.5, 0.7, 1.0, 1.3),
            "kl_coef": self.of(0.0, 0.05, 0.3),
            "cliprange": self.of(0.1, 0.2, 0.3),
            "num_ppo_epochs": self.of(1, 2, 3),
        }
        stop = self.of("eos", "eos", None, 5)
        options |= {"stop_token_id": stop} if stop == 5 else {"stop_token": stop}
        if self.chance(0.4):
            options["missing_eos_penalty"] = self.of(0.5, 1.0)
        return options

    def surroundings(self) -> dict[str, Any]:
        """Fields of Setting."""
        return {
            "sequential": self.chance(0.3),
            "crafted": self.chance(0.5),
            "layers": self.of(1, 2),
            "prompts": self.of(16, 64),  # 16: an update on the last batch of a pass over the data
        }


def draw_ppo(seed: int, folder: Path) -> Setting:
    """A PPO run of TRL 1.12.0."""
    d = Draws("ppo", seed)
    options = d.learning() | d.sampling()
    options |= {
        "kl_estimator": d.of("k1", "k3"),
        "vf_coef": d.of(0.1, 0.5),
        "cliprange_value": d.of(0.05, 0.2),
        "gamma": d.of(1.0, 0.95),
        "lam": d.of(0.95, 1.0, 0.7),
    }
    micro, accum, minibatches = d.of((8, 1, 1), (16, 1, 2), (8, 1, 2), (4, 2, 1), (4, 3, 1), (8, 2, 1))
    options["num_mini_batches"] = minibatches
    if d.chance(0.4) and micro * accum // minibatches >= 8:
        options["whiten_rewards"] = True
    if d.chance(0.2):
        options["local_rollout_forward_batch_size"] = micro
    eos_fill = d.chance(0.4)
    return Setting(folder, options, micro=micro, accum=accum, seed=seed, eos_fill=eos_fill, **d.surroundings())


def draw_rloo_legacy(seed: int, folder: Path) -> Setting:
    """An RLOO run of TRL 0.17.0."""
    d = Draws("rloo_legacy", seed)
    options = d.learning() | d.sampling()
    options |= {
        "rloo_k": d.of(2, 4),
        "normalize_reward": d.chance(0.4),
        "reward_clip_range": d.of(10.0, 0.5),
        "normalize_advantage": d.chance(0.3),
        "token_level_kl": d.chance(0.3),
        "num_mini_batches": d.of(1, 2),
    }
    micro, accum = d.of((8, 1), (4, 2), (16, 1))
    return Setting(folder, options, micro=micro, accum=accum, seed=seed, **d.surroundings())


def draw_rloo(seed: int, folder: Path) -> Setting:
    """An RLOO run of TRL 1.12.0."""
    d = Draws("rloo", seed)
    functions = d.of(*FUNCTIONS)
    options = d.learning() | {
        "max_completion_length": d.of(5, 8, 10),
        "temperature": d.of(0.6, 1.0, 1.2),
        "num_generations": d.of(2, 4),
        "num_iterations": d.of(1, 1, 2),
        "beta": d.of(0.0, 0.05, 0.3),
        "epsilon": d.of(0.1, 0.2),
        "epsilon_high": d.of(None, 0.3),
        "normalize_advantages": d.chance(0.3),
        "mask_truncated_completions": d.chance(0.4),
        "max_grad_norm": d.of(1.0, 0.3),
    }
    if d.chance(0.4):
        options["reward_clip_range"] = d.of([-0.5, 0.6], [0.0, 1.0])
    if len(functions) > 1 and d.chance(0.7):
        options["reward_weights"] = [0.3, 1.5]
    if options["beta"] and d.chance(0.3):
        options |= {"sync_ref_model": True, "ref_model_sync_steps": d.of(1, 2), "ref_model_mixup_alpha": d.of(0.3, 0.6)}
    # The last two: an optimizer step on two generation batches, and a run that ends within one.
    micro, accum, a_generation, steps = d.of(
        (8, 1, 1, 3), (8, 2, 2, 3), (8, 1, 2, 4), (4, 2, 4, 4), (8, 2, 1, 3), (8, 1, 2, 5)
    )
    options["steps_per_generation"] = a_generation
    around = d.surroundings()
    return Setting(folder, options, updates=steps, micro=micro, accum=accum, seed=seed, functions=functions, **around)


DRAW = {"ppo": draw_ppo, "rloo": draw_rloo, "rloo_legacy": draw_rloo_legacy}

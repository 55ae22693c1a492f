"""Published algorithms as options of GRPOConfig: `--preset dapo` on the command line, `preset("dapo")` in Python.

A preset sets only what its publication changes; everything else keeps its default, and flags override it. Constants are
those of TRL's paper index, OpenRLHF and verl.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlhf_jax.config.stages import GRPOConfig, StageConfig
from rlhf_jax.errors import UserError
from rlhf_jax.option import nearest

_REINFORCE_PP = {
    "loss_type": "bnpo",
    "scale_rewards": "none",
    "kl_in_reward": True,
    "beta": 0.01,
    "whiten_advantages": True,
    "whiten_ddof": 0,
}
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": (
        "DeepSeekMath, arXiv 2402.03300: mean over rows of token means, KL 0.04 in the loss.",
        {"loss_type": "grpo", "scale_rewards": "group", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "dr_grpo": (
        "arXiv 2503.20783: no division by the group's deviation, nor by the length of a response.",
        {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
    ),
    "dapo": (
        "arXiv 2503.14476: higher upper clip, mean over tokens, truncated responses masked. Its penalty for long "
        "responses is the reward function get_soft_overlong_punishment.",
        {
            "loss_type": "dapo",
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.0,
            "mask_truncated_completions": True,
        },
    ),
    "gspo": (
        "arXiv 2507.18071: the ratio of whole responses, with its small clip range.",
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
            "beta": 0.0,
        },
    ),
    "luspo": (
        "arXiv 2602.05261: GSPO with rows weighted by their length.",
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 2e-3,
            "epsilon_high": 2.5e-3,
            "beta": 0.0,
        },
    ),
    "cispo": (
        "MiniMax-M1, arXiv 2506.13585, with the cap of ScaleRL: every token has a gradient, at a capped weight.",
        {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.0},
    ),
    "sapo": ("arXiv 2511.20347: a soft gate in place of the clip.", {"loss_type": "sapo", "beta": 0.0}),
    "vespo": (
        "arXiv 2602.10693: responses weighted by a function of their ratio.",
        {"loss_type": "vespo", "beta": 0.0},
    ),
    "reinforce_pp": (
        "REINFORCE++, arXiv 2501.03262, as OpenRLHF's reinforce: no baseline, KL in the reward of each token, "
        "advantages normalized over all tokens of the batch.",
        {**_REINFORCE_PP, "baseline": "none"},
    ),
    "reinforce_pp_baseline": (
        "The same with the mean of the group subtracted first, as OpenRLHF's reinforce_baseline.",
        {**_REINFORCE_PP, "baseline": "group_mean"},
    ),
}
"""(what it is, its options), by name."""


def with_preset(config: StageConfig, name: str) -> StageConfig:
    """A GRPOConfig with the options of a preset.

    Args:
      config: the other options.
      name: one of PRESETS.

    Raises:
      UserError: there is no such preset, or the config is not GRPO's.
    """
    if not isinstance(config, GRPOConfig):
        raise UserError(f"preset {name!r} sets options of grpo, and this stage is not grpo.")
    if name not in PRESETS:
        raise UserError(f"preset {name!r} does not exist; choose from {', '.join(PRESETS)}.{nearest(name, PRESETS)}")
    return dataclasses.replace(config, **PRESETS[name][1])


def preset(name: str, **options: Any) -> GRPOConfig:
    """A GRPOConfig with the options of a preset and others, which override them.

    Args:
      name: of the preset, as dapo (docs/options.md).
      **options: fields of GRPOConfig.

    Raises:
      UserError: there is no such preset.
    """
    config = with_preset(GRPOConfig(), name)
    assert isinstance(config, GRPOConfig)
    return dataclasses.replace(config, **options)

"""TRL's options and what became of each: the same name, another name, or refused with the reason.

A name that is a field here is the same option (NOTES says what differs); migrating_tables has the rest. The command
line reads `answer`, and `python -m rlhf_jax.config.trl_options` prints docs/migrating.md.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Literal

from rlhf_jax.config import STAGES
from rlhf_jax.config.trl_options_tables import (
    NOTES,
    NOTES_IN,
    REFUSED,
    REFUSED_IN,
    RENAMED,
    TABLES,
    TRANSLATED,
    Renamed,
)

__all__ = ["NOTES", "NOTES_IN", "REFUSED", "REFUSED_IN", "RENAMED", "TABLES", "TRANSLATED", "Answer", "Renamed"]
__all__ += ["answer", "page"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of a name in one stage."""

    kind: Literal["same", "renamed", "translated", "refused"]
    text: str = ""
    renamed: Renamed | None = None


def answer(name: str, stage: str) -> Answer | None:
    """What became of TRL's option `name` in `stage` ('sft', 'reward', 'ppo', 'rloo'); None: never heard of."""
    fields = {key: set(config_type.__dataclass_fields__) for key, config_type in STAGES.items()}
    if name in fields[stage]:
        return Answer("same", NOTES_IN[stage].get(name, NOTES.get(name, "")))
    if name in TRANSLATED and "num_mini_batches" in fields[stage]:
        return Answer("translated", TRANSLATED[name])
    renamed = RENAMED.get(name)
    if renamed and renamed.to in fields[stage]:
        return Answer("renamed", renamed.note, renamed)
    reasons = [*REFUSED_IN.get(stage, {}).items(), *REFUSED.items()]  # the stage's own first
    reason = next((text for key, text in reasons if fnmatch.fnmatchcase(name, key)), None)
    if reason:
        return Answer("refused", reason)
    owners = [key for key in STAGES if name in fields[key]]
    called = "It is "
    if not owners and renamed:
        owners, called = [key for key in STAGES if renamed.to in fields[key]], f"It is {renamed.to} here, "
    if owners:
        return Answer("refused", f"{called}an option of {' and '.join(owners)}, not of {stage}.")
    if name in TRANSLATED:
        return Answer("refused", f"It is an option of ppo and rloo, not of {stage}.")
    return None


def _row(name: str, stages: tuple[str, ...]) -> str:
    """One line of the page: the answers of the table's stages, equal ones together."""
    cells: dict[str, list[str]] = {}
    for stage in stages:
        found = answer(name, stage)
        assert found is not None, f"TRL's {name} has no answer in {stage}"
        what = f"`{found.renamed.to}`" if found.renamed else found.kind
        colon = ": " if found.kind in ("refused", "translated") else "; "
        cells.setdefault(what + colon + found.text if found.text else what, []).append(stage)
    if len(cells) == 1:
        return f"| `{name}` | {next(iter(cells))} |"
    return (
        f"| `{name}` | " + "; ".join(f"**{', '.join(who)}** {text.rstrip('.')}" for text, who in cells.items()) + " |"
    )


_HEAD = """# Coming from TRL

<!-- written by `python -m rlhf_jax.config.trl_options > docs/migrating.md` from the tables that the parser reads -->

Options keep TRL's names. Each is a flag (`--kl_coef 0.1`, dashes work too) and a field of `SFTConfig`, `RewardConfig`,
`PPOConfig` or `RLOOConfig`; in a config of several stages a flag names its stage (`--ppo.kl_coef 0.1`). Below is every
option of TRL 1.12.0, of its RLOO trainer before and after 0.22, and of its scripts: **same**, another name that is
accepted and told, **translated** into other options, or **refused** with the reason, which is also what the command
line says.

## Batches

| TRL | here |
|---|---|
| `per_device_train_batch_size` x devices | `micro_batch_size`: rows a forward and backward pass |
| `per_device_train_batch_size` x `gradient_accumulation_steps` x devices | PPO: `batch_size`, episodes an update. \
RLOO since 0.22: `batch_size` / `num_mini_batches`, rows an optimizer step |
| the same x `num_mini_batches` | RLOO until 0.21, PPO until 0.16: `batch_size` |
| `batch_size` / `num_mini_batches` | the same: rows an optimizer step |
| `generation_batch_size`, or `per_device_train_batch_size` x `steps_per_generation` x devices | RLOO: `batch_size`, \
responses an update, all those of a prompt counted |
| `steps_per_generation` / `gradient_accumulation_steps` | RLOO: `num_mini_batches`, optimizer steps a pass |
| `batch_size` / `num_generations` | the same: prompts an update |
| `local_rollout_forward_batch_size` x devices | `rollout_batch_size`: rows generated and scored at a time |
| `num_total_batches` | ceil(`total_episodes` / `batch_size`) updates |
| `max_steps` of RLOO since 0.22 | `total_episodes` = `max_steps` x `batch_size` / (`num_iterations` x \
`num_mini_batches`) |

The published PPO run on 8 GPUs, 16 x 4 x 8, is `--batch_size 512 --micro_batch_size 128`; the RLOO run of TRL 0.21,
16 x 16 x 8 with 2 minibatches, is `--batch_size 4096 --num_mini_batches 2 --micro_batch_size 128`. All are counts over
all devices, so a run gives the same result on any number of them. `--dry_run` prints the arithmetic.

`--steps_per_generation` and `--generation_batch_size` work as flags: `batch_size` becomes what they mean, a minibatch
keeps its rows, and `num_mini_batches` follows, whatever the order of the flags.

## RLOO: three generations of names

| until 0.21 | since 0.22 | here |
|---|---|---|
| `rloo_k` | `num_generations` | `num_generations` |
| `num_ppo_epochs` | `num_iterations` | `num_iterations` |
| `cliprange` | `epsilon`, `epsilon_high` | `epsilon`, `epsilon_high` |
| `kl_coef` | `beta` | `beta` |
| `normalize_advantage` | `normalize_advantages` | `normalize_advantages`, `advantage_epsilon` (1e-8; 1e-4) |
| `normalize_reward`, `reward_clip_range` X | none; `reward_clip_range` LOW HIGH | `normalize_reward`, \
`reward_clip_range` X or LOW HIGH |
| `token_level_kl` (did nothing) | none | `token_level_kl` (works) |
| `num_mini_batches` | `steps_per_generation` / `gradient_accumulation_steps` | `num_mini_batches` |
| a new shuffle each epoch | one shuffle | `reshuffle` per_epoch; once |
| schedule per update | per optimizer step | `lr_scheduler_unit` update; optimizer_step |
| `response_length` | `max_completion_length` | `response_length` |
| `missing_eos_penalty`, `stop_token` | none | `missing_eos_penalty`, `stop_token` |
| `total_episodes` | `max_steps` or `num_train_epochs` | `total_episodes` or `num_train_epochs` |
| `sft_model_path` | `model_name_or_path` | `sft_model_path` |
| `reward_model_path` | `reward_model_name_or_path`, `reward_funcs` | `reward_model_path`, `reward_funcs` |
| `config`, `policy`, `reward_model` of the trainer | `args`, `model`, `reward_funcs` | `rlhf_jax.run(config, \
reward_funcs=...)` |

The older names are accepted as flags. Three rows of TRL's own migration guide are wrong:

- `normalize_reward` is not the normalisation of advantages: it normalised the scores, before the KL.
- `num_mini_batches` is not `steps_per_generation`: that is `gradient_accumulation_steps` x `num_mini_batches`.
- `max_steps` is not `total_episodes` / `gradient_accumulation_steps`: divide by `per_device_train_batch_size` x devices
  x `gradient_accumulation_steps`, and count `num_iterations` and minibatches.

## Defaults that differ

| | TRL | here |
|---|---|---|
| `batch_size` | 8 rows a device | 64 rows, PPO 512 |
| `logging_steps` | 10 | 1 |
| `gradient_checkpointing` | true | false |
| `bf16` | true | `dtype` float32 |
| `report_to` | none | tensorboard |
| `stop_token` | PPO, RLOO until 0.21: None | eos |
| `response_length` of RLOO | 53; since 0.22 512 | 512 |
| `learning_rate` of RLOO | 5e-5; since 0.22 1e-6 | 1e-6 |
| `temperature` of RLOO | 0.7; since 0.22 1.0 | 1.0 |
| `num_ppo_epochs` of RLOO | 4; since 0.22 1 | `num_iterations` 1 |
| `max_grad_norm` | 1.0, ignored by PPO and by RLOO until 0.21 | None, RLOO 1.0 |
| longer prompts | PPO's script drops them, RLOO since 0.22 keeps them whole | `query_length` 512: cut paragraph-wise |
| text that a reward model reads | RLOO since 0.22: without eos | with it (`reward_text_eos`) |
| `sft_model_path`, `reward_model_path` | pythia-160m, untrained | the published 1b checkpoints |
"""


def page() -> str:
    """The text of docs/migrating.md."""
    parts = [_HEAD]
    for title, (stages, names) in TABLES.items():
        rows = "\n".join(_row(name, stages) for name in names.split())
        parts.append(f"\n## {title}\n\n| TRL | here |\n|---|---|\n{rows}\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")

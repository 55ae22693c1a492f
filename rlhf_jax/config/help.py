"""Help texts of options, from the config dataclasses: `--help` in groups with a line each, `--help_all` in full."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_jax.config.dataclasses import STAGES, Pipeline, PolicyConfig
from rlhf_jax.config.values import describe_type, field_ranges, field_types

RARE = frozenset(
    """
    override_resume deterministic run_name project hub_model_id hub_private_repo save_minutes save_total_limit
    metric_for_best_model greater_is_better load_best_model_at_end eval_on_start model_revision attn_implementation
    gradient_checkpointing_policy use_rslora lora_dropout modules_to_save export_merged dataset_config dataset_revision
    dataset_streaming chat_template_kwargs on_bad_row length_buckets lr_scheduler_kwargs adam_beta1 adam_beta2
    adam_epsilon adam_mu_dtype weight_decay_on max_nonfinite num_processes process_id max_eval_samples
    eval_packing early_stopping_patience normalize_samples score_init_std margin_column
    ref_model_revision start_adapter adapters model_adapter_name ref_adapter_name reward_model_revision
    reward_ensemble_std_coef reward_input reward_text_eos reward_timeout reward_server_timeout
    reward_server_total_timeout reward_server_retries reward_server_batch_size reward_server_concurrency
    reward_server_token_env reward_failure decode_slots decode_longest_first decode_shrink draft draft_tokens
    kv_cache_dtype rollout_max_steps micro_batch_tokens offload_frozen shuffle_dataset min_p repetition_penalty
    suppress_unused_ids generation_kwargs stop_token_id eos_penalty_mode old_logprobs alarm_kl_below alarm_kl_above
    alarm_first_ratio alarm_first_ratio_bfloat16 alarm_reward_std alarm_eos_share alarm_unused_ids
    alarm_length_growth alarm_length_collapse
    num_completions_to_print log_unique_prompts value_model_revision lora_value critic_warmup_steps kl_horizon
    kl_loss_estimator dual_clip value_lam adaptive_lam_alpha whiten_ddof score_position loss_aggregation
    lr_scheduler_unit num_generations_eval shared_prompts reshuffle sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps advantage_epsilon baseline_excludes_truncated multi_objective_aggregation
    use_bias_correction_kl delta sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg
    vespo_lambda_neg off_policy_mask_threshold use_adaptive_entropy entropy_coef_min entropy_coef_max
    entropy_coef_delta entropy_target importance_sampling_mode importance_sampling_clip_min
    importance_sampling_clip_max ref_model_revision query_overflow judge_timeout judge_retries judge_concurrency
    judge_kwargs judge_api_key_env bootstrap_resamples calibration_bins pairs_split
    """.split()
)
"""Options that `--help` leaves out unless the config sets them."""
TITLES = {"sft": "SFT", "reward": "Reward model", "ppo": "PPO", "rloo": "RLOO", "grpo": "GRPO"}
_FLAG_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class Option:
    """An option in the source: the section that it is in, its name and its help text."""

    section: str
    name: str
    meaning: str


@functools.cache
def options_of(config: type) -> tuple[Option, ...]:
    """The options that a class itself defines, in order; without a help text if it only changes a default."""
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except (OSError, TypeError):  # a class of the user's without a file
        return tuple(Option("", name, "") for name in config.__annotations__)
    sections = {n: line.strip()[5:].strip() for n, line in enumerate(source.splitlines(), 1) if "# --- " in line}
    options = []
    body = ast.parse(source).body[0].body
    for node, after in zip(body, [*body[1:], None]):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            section = next((sections[n] for n in sorted(sections, reverse=True) if n < node.lineno), "")
            meaning = " ".join(after.value.value.split()) if documented else ""
            options.append(Option(section, node.target.id, meaning))
    return tuple(options)


def inherited(config: type, name: str) -> Option | None:
    """The option of that name in a class that `config` extends."""
    bases = [base for base in config.__mro__[1:] if dataclasses.is_dataclass(base)]
    return next(
        (option for base in bases for option in options_of(base) if option.name == name and option.meaning), None
    )


def groups(config_type: type) -> dict[str, list[Option]]:
    """Options by section, those of the class itself first; each once, in the section that the nearest class names."""
    found: dict[str, tuple[int, int, Option]] = {}  # where it is first in a section: number of its class, of its line
    for depth, owner in enumerate(owner for owner in config_type.__mro__ if dataclasses.is_dataclass(owner)):
        for place, option in enumerate(options_of(owner)):
            known = found.get(option.name)
            if known is None:
                found[option.name] = depth, place, option
            elif option.section and not known[2].section:  # an override stands where its base does
                found[option.name] = (
                    depth,
                    place,
                    Option(option.section, option.name, known[2].meaning or option.meaning),
                )
            elif not known[2].meaning:
                found[option.name] = *known[:2], Option(known[2].section, option.name, option.meaning)
    by_section: dict[str, list[Option]] = {}
    for *_, option in sorted(found.values(), key=lambda entry: entry[:2]):
        by_section.setdefault(option.section, []).append(option)
    return by_section


def text(config: Any, usage: str, everything: bool = False) -> str:
    """The help of a config: every option with its value in it.

    Args:
      config: a stage's config, a Pipeline, or another dataclass with options.
      usage: the first line, without 'usage: '.
      everything: all options with type and whole meaning; else a line for each that is not rare.
    """
    lines = [f"usage: {usage}", "", *textwrap.wrap(" ".join(type(config).__doc__.split()), _width()), ""]
    if isinstance(config, Pipeline):
        lines += _pipeline(config, everything)
    else:
        for section, options in groups(type(config)).items():
            lines += _group(_heading(config, section, options), options, config, "", everything)
    shortened = not everything and (isinstance(config, Pipeline) or any(_hidden(config, n) for n in vars(config)))
    more = " --help_all lists all, in full." if shortened else ""
    lines += [f"Each option is shown with its value here.{more} Lists: a b or a,b. Dicts: JSON."]
    return "\n".join(lines)


def _pipeline(config: Pipeline, everything: bool) -> Iterator[str]:
    """The options of a pipeline: its own, the policy's, and of the other stages what is theirs or set by the config."""
    stages = {name: stage for name in STAGES if (stage := getattr(config, name)) is not None}
    policy = next((name for name, stage in stages.items() if isinstance(stage, PolicyConfig)), [*stages][-1])
    own = [option for option in options_of(Pipeline) if option.name not in STAGES]
    yield from _group("The run", own, config, "", everything)
    of_all = {option.name for option in own}  # of every stage at once
    for name in [policy, *(name for name in stages if name != policy)]:
        stage, mine = stages[name], {option.name for option in options_of(type(stages[name]))}
        for section, options in groups(type(stage)).items():
            if not everything:
                options = [option for option in options if option.name not in of_all]
            if not (everything or name == policy):
                options = [option for option in options if option.name in mine or _differs(stage, option.name)]
            title = f"{TITLES.get(name, name)}: {section}" if section else TITLES.get(name, name)
            yield from _group(title, options, stage, f"{name}.", everything)
    if not everything:
        yield f"Options of {policy}. that every stage has exist for the other stages too, as --sft.learning_rate."
        yield ""


def _heading(config: Any, section: str, options: Sequence[Option]) -> str:
    """'PPO: the algorithm' for what the config's class itself defines, 'Rollout' for what it extends."""
    names = {option.name for option in options}
    owners = [owner for owner in type(config).__mro__ if dataclasses.is_dataclass(owner)]
    owner = next(owner for owner in owners if any(o.name in names and o.section == section for o in options_of(owner)))
    title = next((TITLES.get(name, name) for name, stage in STAGES.items() if stage is owner), "")
    heading = ": ".join(filter(None, [title, section]))
    return heading[:1].upper() + heading[1:]


def _group(heading: str, options: Sequence[Option], config: Any, prefix: str, everything: bool) -> Iterator[str]:
    shown = [option for option in options if everything or not _hidden(config, option.name)]
    if shown:
        yield from filter(None, [heading])
        for option in shown:
            yield from _lines(option, config, prefix, everything)
        yield ""


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _differs(config: Any, name: str) -> bool:
    field = type(config).__dataclass_fields__[name]
    return field.default is not dataclasses.MISSING and getattr(config, name) != field.default


def _hidden(config: Any, name: str) -> bool:
    return name in RARE and not _differs(config, name)


def _lines(option: Option, config: Any, prefix: str, everything: bool) -> Iterator[str]:
    flag = f"  --{prefix}{option.name} {value_text(getattr(config, option.name))}"
    if not everything:
        sentence = re.split(r"(?<!al\.)(?<=\.) ", option.meaning, maxsplit=1)[0].removesuffix(".")
        room = _width() - max(len(flag), _FLAG_WIDTH) - 2
        yield f"{flag:<{_FLAG_WIDTH}}  {_clipped(sentence, room)}" if room >= 12 else flag
        return
    kind = describe_type(field_types(type(config))[option.name])
    allowed = field_ranges(type(config)).get(option.name)
    kind += f", {allowed.description}" if allowed else ""
    yield flag
    yield from textwrap.wrap(
        f"{option.meaning} [{kind}]",
        _width(),
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_long_words=False,
    )


def _clipped(sentence: str, room: int) -> str:
    """A sentence of at most `room` characters: one that is longer ends at a clause, with ' ...'."""
    if len(sentence) <= room:
        return sentence
    for mark in ("; ", ": ", ", ", " ("):
        end = sentence.rfind(mark, room // 3, room - 4)
        if end > 0:
            return sentence[:end] + " ..."
    return textwrap.shorten(sentence, room, placeholder=" ...")


def value_text(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value).removesuffix(".0")

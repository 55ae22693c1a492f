"""The options of `rlhf-jax evaluate`: parsing and validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from rlhf_jax.config import command_line
from rlhf_jax.config.check import problems_of
from rlhf_jax.data.options import DataOptions, DemonstrationOptions, PairOptions
from rlhf_jax.errors import UserError
from rlhf_jax.generate.options import SamplingOptions
from rlhf_jax.models.options import ComputeOptions, Dtype, ModelOptions
from rlhf_jax.option import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    TopP,
    option,
)
from rlhf_jax.parallel.options import ProcessOptions
from rlhf_jax.rewards.options import RewardOptions
from rlhf_jax.tools.options import ToolOptions
from rlhf_jax.utils.text import has_password

PROG = "rlhf-jax evaluate"
ALIASES = {
    "model_name_or_path": "model",
    "dataset_name": "data",
    "dataset_test_split": "split",
    "max_new_tokens": "response_length",
    "limit": "max_eval_samples",
    "judge_base_url": "judge_url",
}
"""Accepted option names -> names in `EvaluateConfig`."""


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(ProcessOptions):
    """Evaluation of a policy on held-out prompts, and of a reward model on pairs. Options that are None default to
    those of the run in run_dir, or to PPO's defaults."""

    # --- policies
    run_dir: str | None = None
    """Folder of a finished run, local or in a bucket, of one stage or a pipeline: default for the policy, data,
    rewards and options."""
    model: str | None = None
    """Policy to evaluate: checkpoint folder, run folder or hub name; default: that of run_dir."""
    model_revision: str | None = option(None, rare=True)
    """Hub revision of the policy."""
    tokenizer_name_or_path: str | None = option(None, like=ModelOptions)
    against: tuple[str, ...] | None = None
    """Opponents of the policy: 'reference' (reference answers of the data), 'ref_model', checkpoints, or 'none';
    default: reference and ref_model, if available."""
    ref_model_path: str | None = None
    """Reference model of the KL; default: the model that the run started from."""

    # --- prompts
    data: str | None = None
    """Held-out prompts: hub name, local file or folder, or a built-in task (see dataset_name of rlhf-jax train);
    default: the run's evaluation data."""
    dataset_config: str | None = option(None, like=DataOptions)
    dataset_revision: str | None = option(None, like=DataOptions)
    split: str = "validation"
    """Split of data."""
    max_eval_samples: PositiveInt | None = option(None, like=DataOptions)
    prompt_column: str | None = option(None, like=DataOptions)
    completion_column: str = option("completion", like=DemonstrationOptions)
    query_length: PositiveInt | None = option(None, like=DataOptions)
    query_overflow: Literal["truncate", "drop"] | None = option(None, like=DataOptions)
    on_bad_row: Literal["raise", "skip"] | None = option(None, like=DataOptions)
    chat_template_kwargs: dict[str, Any] | None = option(None, like=DataOptions)

    # --- responses
    num_generations: PositiveInt | None = None
    """Responses to each prompt; default: the largest best_of_n, or 1. Win rates and ROUGE use the first."""
    response_length: PositiveInt | None = option(None, like=SamplingOptions)
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0: greedy decoding, without KL."""
    top_k: NonNegativeInt | None = option(None, like=SamplingOptions)
    top_p: TopP | None = option(None, like=SamplingOptions)
    min_p: Fraction | None = option(None, like=SamplingOptions)
    repetition_penalty: PositiveFloat | None = option(None, like=SamplingOptions)
    stop_token_ids: tuple[int, ...] | Literal["generation_config"] | None = option(None, like=SamplingOptions)
    structured_outputs_regex: str | None = option(None, like=SamplingOptions)
    structured_outputs_regex_column: str | None = option(None, like=SamplingOptions)
    tools: tuple[str, ...] | None = option(None, like=ToolOptions)
    environment_factory: tuple[str, ...] | None = option(None, like=ToolOptions)
    max_tool_calling_iterations: PositiveInt | None = option(None, like=ToolOptions)
    tool_timeout: PositiveFloat | None = option(None, like=ToolOptions)
    seed: Seed = 42
    """Seed of responses and bootstrap resamples."""
    batch_size: PositiveInt = 64
    """Responses generated and scored at a time, over all devices; does not change the results."""
    dtype: Dtype | None = option(None, like=ComputeOptions)

    # --- rewards
    reward_model_path: str | None = None
    """Reward model; also evaluated on pairs."""
    reward_model_revision: str | None = option(None, like=RewardOptions)
    more_reward_models: tuple[str, ...] | None = option(None, like=RewardOptions)
    reward_ensemble: Literal["sum", "mean", "min", "mean_minus_std"] | None = option(None, like=RewardOptions)
    reward_input: Literal["auto", "ids", "text"] | None = option(None, like=RewardOptions)
    reward_funcs: tuple[str, ...] | None = option(None, like=RewardOptions)
    reward_weights: tuple[float, ...] | None = option(None, like=RewardOptions)
    reward_timeout: PositiveFloat | None = option(None, like=RewardOptions)
    reward_server: str | None = None
    """URL of a reward server; its other options are those of the run."""
    reward_server_token_env: str | None = option(None, like=RewardOptions)

    # --- judges
    judge_funcs: tuple[str, ...] = ()
    """Functions of (prompts, completions: pairs) -> index of the better one, 0 or 1; 0.5: tie; None: no verdict."""
    judge_url: str | None = None
    """Base URL of an OpenAI-compatible API, as http://localhost:8000/v1, of a chat model that judges in both orders."""
    judge_model: str | None = None
    """Name of the judge model in the API."""
    judge_api_key_env: str = option("RLHF_JAX_JUDGE_API_KEY", rare=True)
    """Environment variable with the API key, if one is needed; the key is not an option and is never written."""
    judge_prompt: str | None = None
    """File with the judge's prompt: {prompt}, {answer_a}, {answer_b}; replies need [[A]], [[B]] or [[C]] (tie)."""
    judge_kwargs: dict[str, Any] | None = option(None, rare=True)
    """Further request fields; default: temperature 0, max_tokens 512. null removes a field."""
    judge_timeout: PositiveFloat = option(60.0, rare=True)
    """Timeout in seconds for a request to the judge."""
    judge_retries: NonNegativeInt = option(5, rare=True)
    """Retries after a connection error, a timeout, status 429 or 5xx."""
    judge_concurrency: PositiveInt = option(8, rare=True)
    """Concurrent requests to the judge."""

    # --- statistics
    rouge: bool = False
    """ROUGE of the answers against the reference answers (needs the extra rouge)."""
    best_of_n: tuple[int, ...] = ()
    """Values of n for the expected reward of the best of n responses, as 1,2,4,8."""
    bootstrap_resamples: Annotated[int, Range("at least 100", lambda v: v >= 100)] = option(2000, rare=True)
    """Bootstrap resamples for 95 % intervals."""

    # --- the reward model on pairs
    pairs: str | None = None
    """Preference pairs to evaluate the reward model on; default: the evaluation pairs of a pipeline or reward run."""
    pairs_split: str = option("validation", rare=True)
    """Split of pairs."""
    chosen_column: str | None = option(None, like=PairOptions)
    rejected_column: str | None = option(None, like=PairOptions)
    max_length: PositiveInt | None = None
    """Maximum length of prompt + completion; longer pairs are dropped. Default for pairs: the model's context."""
    calibration_bins: PositiveInt = option(10, rare=True)
    """Confidence bins from 0.5 to 1 for the expected calibration error."""

    # --- output
    output_dir: str | None = None
    """Folder of evaluation.json and samples.jsonl; default: RUN_DIR/evaluation, or runs/evaluation."""
    num_completions_to_print: NonNegativeInt | None = option(3, rare=True)
    """Prompts printed with answers side by side; None: all. samples.jsonl has all."""

    def problems(self) -> Iterator[str]:
        """Options that need others. Reads no file, model or network."""
        yield from super().problems()
        for name, value in vars(self).items():
            if isinstance(value, str) and has_password(value):
                yield (
                    f"{name} is a URL with a user name or a password, and evaluation.json would contain it. Remove it."
                )
        if self.run_dir is None and self.model is None and self.pairs is None:
            yield (
                "nothing to evaluate: set --run_dir RUN, --model CHECKPOINT --data DATA, or --reward_model_path "
                "--pairs."
            )
        if self.model is not None and self.run_dir is None and self.data is None:
            yield "--model needs --data, or --run_dir for the data of a run."
        if self.pairs is not None and self.reward_model_path is None and self.run_dir is None:
            yield "--pairs needs --reward_model_path: the reward model to evaluate on them."
        if self.model is None and self.run_dir is None and self.data is not None:
            yield "--data needs --model, or --run_dir for the policy of a run."
        largest = max(self.best_of_n, default=1)
        if any(n < 1 for n in self.best_of_n):
            yield f"best_of_n is {', '.join(map(str, self.best_of_n))}; each must be at least 1."
        if self.num_generations is not None and largest > self.num_generations:
            yield f"best_of_n {largest} needs as many responses to a prompt; num_generations is {self.num_generations}."
        if (self.judge_url is None) != (self.judge_model is None):
            present, missing = (
                ("judge_url", "judge_model") if self.judge_model is None else ("judge_model", "judge_url")
            )
            yield f"--{present} needs --{missing}: set both the API's URL and its model."
        if self.judge_url is None:
            for name in ("judge_prompt", "judge_kwargs"):
                if getattr(self, name) is not None:
                    yield f"--{name} needs --judge_url: it is an option of the remote judge."
        for name in set(self.judge_kwargs or ()) & {"model", "messages", "stream", "n"}:
            yield f"judge_kwargs[{name!r}] cannot be set: evaluation sets it."


def parse(argv: Sequence[str]) -> EvaluateConfig:
    """The config of a command line. Prints help and raises SystemExit for --help or without any flag.

    Raises:
      UserError: an option is unknown, has the wrong type or range, or needs another option.
    """
    config = command_line.parse_options(argv, EvaluateConfig, PROG, aliases=ALIASES, empty_by_none=("against",))
    check(config)
    return config


def check(config: EvaluateConfig) -> None:
    """UserError with one line for each invalid option. Reads no file, model or network."""
    if problems := problems_of(config):
        raise UserError("\n".join(problems))

"""The options of `python -m rlhf_jax.evaluate`, from the command line, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from rlhf_jax.config import command_line, validation
from rlhf_jax.config.dataclasses import Seed, TopP
from rlhf_jax.config.values import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    field_types,
    nearest,
    value_from_words,
)
from rlhf_jax.errors import UserError
from rlhf_jax.utils.text import has_password

PROG = "python -m rlhf_jax.evaluate"
ALIASES = {
    "model_name_or_path": "model",
    "dataset_name": "data",
    "dataset_test_split": "split",
    "max_new_tokens": "response_length",
    "limit": "max_eval_samples",
    "judge_base_url": "judge_url",
}
"""Other names that are accepted."""


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation of a policy on held-out prompts, and of a reward model on pairs. An option that is None is the run's
    (with run_dir), else that of PPO's defaults."""

    # --- what is evaluated
    run_dir: str | None = None
    """Folder of a finished run, a stage's or a pipeline's: its policy, data, rewards and options where not given."""
    model: str | None = None
    """Policy to evaluate: a checkpoint's folder, a run's folder or a hub name; default: that of run_dir."""
    model_revision: str | None = None
    """Hub revision of the policy."""
    tokenizer_name_or_path: str | None = None
    """Tokenizer, where the policy has none of its own; 'synthetic' is the built-in one."""
    against: tuple[str, ...] | None = None
    """Whom the policy is compared with: 'reference' (the data's own answers), 'ref_model', checkpoints; default:
    the first two, where they are there. none: nobody."""
    ref_model_path: str | None = None
    """Reference model of the KL; default: what the run started from."""
    ref_model_revision: str | None = None
    """Hub revision of the reference model."""

    # --- prompts
    data: str | None = None
    """Held-out prompts: hub name, local file or folder, or 'synthetic'; default: the run's evaluation data."""
    dataset_config: str | None = None
    """Configuration of the data set on the hub."""
    dataset_revision: str | None = None
    """Hub revision of the data set."""
    split: str = "validation"
    """Split of data."""
    max_eval_samples: PositiveInt | None = None
    """Only the first so many prompts (and pairs); default: the run's, or 256."""
    prompt_column: str | None = None
    """Column with the prompt."""
    completion_column: str = "completion"
    """Column with the reference answer."""
    query_length: PositiveInt | None = None
    """Most prompt tokens."""
    query_overflow: Literal["truncate", "drop"] | None = None
    """Longer prompts: cut the post paragraph-wise, or drop the row."""
    on_bad_row: Literal["raise", "skip"] | None = None
    """A row with a missing, mistyped or empty field: stop and name it, or skip and count it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the tokenizer's chat template, where prompts are conversations."""

    # --- responses
    num_generations: PositiveInt | None = None
    """Responses to each prompt; default: the largest of best_of_n, or 1. Win rates and ROUGE take the first."""
    response_length: PositiveInt | None = None
    """Most tokens of a response."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 takes the likeliest token, and there is no KL then."""
    top_k: NonNegativeInt | None = None
    """Sample among the k likeliest tokens only; 0: all."""
    top_p: TopP | None = None
    """Sample among the likeliest tokens that make up this probability; 1: all."""
    min_p: Fraction | None = None
    """Leave out tokens less likely than this share of the likeliest."""
    repetition_penalty: PositiveFloat | None = None
    """Divide (multiply) positive (negative) logits of tokens already seen; 1: off."""
    seed: Seed = 42
    """What is drawn, responses and resamples, is a function of the seed."""
    batch_size: PositiveInt = 64
    """Responses generated and scored at a time, over all devices; never changes what is drawn."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute precision."""

    # --- rewards
    reward_model_path: str | None = None
    """Reward model; also measured on pairs."""
    reward_model_revision: str | None = None
    """Hub revision of the reward model."""
    more_reward_models: tuple[str, ...] | None = None
    """Further reward models."""
    reward_ensemble: Literal["sum", "mean", "min", "mean_minus_std"] | None = None
    """Several reward models: each a reward with its own weight, or one reward by their mean, minimum, mean - std."""
    reward_input: Literal["auto", "ids", "text"] | None = None
    """What reward models read: the sampled ids, or the text by their own tokenizer; auto: ids where the two agree."""
    reward_funcs: tuple[str, ...] | None = None
    """Reward functions, 'module:function' or 'file.py:function'."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward in the score: models, functions, server, in this order; default: 1 each."""
    reward_timeout: PositiveFloat | None = None
    """Most seconds of one call of a Python function, a reward's or a judge's."""
    reward_server: str | None = None
    """URL of a reward server; its other options are the run's."""
    reward_server_token_env: str | None = None
    """Environment variable with the reward server's bearer token."""

    # --- judges
    judge_funcs: tuple[str, ...] = ()
    """Functions of (prompts, completions: a pair each) -> 0 or 1, the better one's place; 0.5: a tie; None: none."""
    judge_url: str | None = None
    """Base URL of an OpenAI-compatible API, as http://localhost:8000/v1: its chat model judges pairs in both orders."""
    judge_model: str | None = None
    """The judging model's name there."""
    judge_api_key_env: str = "RLHF_JAX_JUDGE_API_KEY"
    """Environment variable with the API key, where one is needed; the key is no option and is written nowhere."""
    judge_prompt: str | None = None
    """File with the question: {prompt}, {answer_a}, {answer_b}; the answer must hold [[A]], [[B]] or [[C]] (a tie)."""
    judge_kwargs: dict[str, Any] | None = None
    """Further fields of a request; default: temperature 0, max_tokens 512. null leaves one of these out."""
    judge_timeout: PositiveFloat = 60.0
    """Most seconds of one request to the judge."""
    judge_retries: NonNegativeInt = 5
    """Tries again after a lost connection, a timeout, 429 or a 5xx status."""
    judge_concurrency: PositiveInt = 8
    """Requests at a time."""

    # --- statistics
    rouge: bool = False
    """ROUGE of the answers against the reference answers (needs the extra rouge)."""
    best_of_n: tuple[int, ...] = ()
    """Expected reward of the best of so many responses, as 1,2,4,8."""
    bootstrap_resamples: Annotated[int, Range("at least 100", lambda v: v >= 100)] = 2000
    """Resamples of the 95 % intervals."""

    # --- the reward model on pairs
    pairs: str | None = None
    """Preference pairs to measure reward models on; default: a pipeline's or a reward run's evaluation pairs."""
    pairs_split: str = "validation"
    """Split of pairs."""
    chosen_column: str | None = None
    """Column with the preferred completion."""
    rejected_column: str | None = None
    """Column with the other completion."""
    max_length: PositiveInt | None = None
    """Most tokens of prompt and completion; longer pairs are dropped. Default for pairs: the model's context."""
    calibration_bins: PositiveInt = 10
    """Bins of the confidence, 0.5 to 1, in the expected calibration error."""

    # --- what is written
    output_dir: str | None = None
    """Folder of evaluation.json and samples.jsonl; default: RUN_DIR/evaluation, or runs/evaluation."""
    num_completions_to_print: NonNegativeInt | None = 3
    """Prompts shown side by side in the terminal; None: all. samples.jsonl has all."""


def parse(argv: Sequence[str]) -> EvaluateConfig:
    """The options of a command line. Prints help and raises SystemExit on --help or no flag at all.

    Raises:
      UserError: an option is unknown, or of another type or range, or needs another one.
    """
    flags = command_line.split_flags(argv)
    if not flags or any(name in ("help", "h") for name, _ in flags):
        command_line.print_help(EvaluateConfig(), PROG)
        raise SystemExit(0 if flags else 2)
    hints, values = field_types(EvaluateConfig), {}
    for given, words in flags:
        name = ALIASES.get(given, given)
        if name != given:
            print(f"note: --{given} is --{name} here.", file=sys.stderr)
        name, words = command_line.positive(name, words, hints)
        if name not in hints:
            hint = nearest(given, [*hints, *ALIASES])
            raise UserError(f"unknown option --{given}.{hint} (--help lists all.)")
        nobody = name == "against" and [word.lower() for word in words] == ["none"]
        values[name] = () if nobody else value_from_words(f"--{name}", hints[name], words)
    config = EvaluateConfig(**values)
    check(config)
    return config


def check(config: EvaluateConfig) -> None:
    """UserError, a line a problem, for values that cannot be. Needs no file, model or network."""
    if problems := [*_problems(config)]:
        raise UserError("\n".join(problems))


def _problems(config: EvaluateConfig) -> Iterator[str]:
    yield from validation.out_of_range(config)
    for name, value in vars(config).items():
        if isinstance(value, str) and has_password(value):
            yield f"{name} is a URL with a user name or a password in it: evaluation.json would hold it. Take it out."
    if config.run_dir is None and config.model is None and config.pairs is None:
        yield "nothing to evaluate: give --run_dir RUN, --model CHECKPOINT --data DATA, or --reward_model_path --pairs."
    if config.model is not None and config.run_dir is None and config.data is None:
        yield "--model needs --data (or --run_dir, whose data it then answers)."
    if config.pairs is not None and config.reward_model_path is None and config.run_dir is None:
        yield "--pairs needs --reward_model_path: the reward model to measure on them."
    if config.model is None and config.run_dir is None and config.data is not None:
        yield "--data needs --model, a policy to answer it (or --run_dir)."
    most = max(config.best_of_n, default=1)
    if any(n < 1 for n in config.best_of_n):
        yield f"best_of_n is {', '.join(map(str, config.best_of_n))}; each must be at least 1."
    if config.num_generations is not None and most > config.num_generations:
        yield f"best_of_n {most} needs as many responses to a prompt; num_generations is {config.num_generations}."
    if (config.judge_url is None) != (config.judge_model is None):
        there, missing = ("judge_url", "judge_model") if config.judge_model is None else ("judge_model", "judge_url")
        yield f"--{there} needs --{missing}: the API's address and the model's name there."
    if config.judge_url is None:
        for name in ("judge_prompt", "judge_kwargs"):
            if getattr(config, name) is not None:
                yield f"--{name} needs --judge_url: it is about a remote judge."
    for name in set(config.judge_kwargs or ()) & {"model", "messages", "stream", "n"}:
        yield f"judge_kwargs[{name!r}] cannot be set: it is the judge's own."

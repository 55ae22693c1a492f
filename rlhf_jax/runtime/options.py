"""Options of a run: its folder, trackers, checkpoints, evaluations, printed samples."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any, Literal

from rlhf_jax.option import (
    Metadata,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    Seed,
    StepsOrFraction,
    metadata,
    option,
)
from rlhf_jax.parallel.options import ProcessOptions

TRACKERS = ("tensorboard", "wandb", "trackio", "all")


@functools.cache
def options_metadata() -> dict[str, Metadata]:
    """The metadata of every option of a run: of the configs of all stages and of pipelines, by its name."""
    by_name: dict[str, Metadata] = {}
    classes: list[type] = [CommandOptions]
    for owner in classes:  # which grows
        classes += owner.__subclasses__()
        for name in getattr(owner, "__dataclass_fields__", ()):
            by_name.setdefault(name, metadata(owner, name))
    return by_name


@dataclasses.dataclass(frozen=True)
class CommandOptions(ProcessOptions):
    """Options of a command, which all stages of a pipeline share."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        options_metadata.cache_clear()

    # --- the command
    max_minutes: PositiveFloat | None = option(None, resume="free")
    """Save and exit with code 75 before this many minutes of wall time have passed; rerun to resume. None: no limit."""
    deterministic: bool = option(False, rare=True, resume="rounding")
    """Use only deterministic kernels, none chosen by timing, on GPUs too; slower there. Other devices always do so."""
    dry_run: bool = option(False, resume="free")
    """Print the resolved config, the batch arithmetic, the mesh and the memory of compiled programs, then exit."""
    topology: str | None = option(None, in_config_json=False)
    """With dry_run: compile for TPUs or GPUs you do not have: a slice such as v5e:4x4 (extra tpu-aot), or a100,
    a100_40gb, a6000, h100 or h200 and their number (extra gpu-aot): h100:8, or h100:8x4 for four machines of eight."""


@dataclasses.dataclass(frozen=True)
class RunOptions(CommandOptions):
    """The folder of a run, what it reports, saves and evaluates."""

    # --- the run
    run_dir: str | None = option(None, resume="free")
    """Run folder, local or in a bucket (s3://, gs://; docs/scaling.md); default: runs/<stage>."""
    resume: Literal["auto", "must", "never"] = option("auto", resume="free")
    """auto: resume from the newest checkpoint if there is one; must: fail without one; never: refuse a used folder."""
    override_resume: bool = option(False, rare=True, resume="free")
    """Resume even if options, data or starting models have changed since the run began; the changes are printed."""
    seed: Seed = 42
    """Random seed; every key is a function of the seed, the step and the row."""
    report_to: tuple[str, ...] = option(("tensorboard",), resume="free")
    """Trackers besides metrics.jsonl: tensorboard, wandb and trackio (if installed), all of them, or none."""
    run_name: str | None = option(None, rare=True, resume="free")
    """Run name in W&B and trackio; default: the run folder."""
    project: str | None = option(None, rare=True, resume="free")
    """Project in W&B and trackio; default: WANDB_PROJECT in the environment, or rlhf_jax."""
    push_to_hub: bool = option(False, resume="free")
    """Upload the final model (policy/ or reward_model/) with tokenizer and model card to the Hugging Face Hub."""
    hub_model_id: str | None = option(None, rare=True, resume="free")
    """Hub repository, NAME or OWNER/NAME; default: the run folder's name; the default owner is the token's user."""
    hub_private_repo: bool | None = option(None, rare=True, resume="free")
    """Whether a new Hub repository is private; None: the owner's default."""
    logging_steps: PositiveInt = option(1, resume="free")
    """Updates between progress lines (metrics.jsonl gets every update)."""
    save_steps: StepsOrFraction = option(500, resume="free")
    """Updates between checkpoints; below 1: that fraction of the run; 0: only at the end."""
    save_minutes: PositiveFloat | None = option(None, rare=True, resume="free")
    """Also save a checkpoint when the last one is this many minutes old; None: never."""
    save_total_limit: PositiveInt | None = option(2, rare=True, resume="free")
    """Number of newest checkpoints to keep, besides the best one; None: keep all."""
    metric_for_best_model: str | None = option(None, rare=True, resume="free")
    """Metric that selects the best checkpoint, which is kept besides the newest, as eval/loss; None: none is kept."""
    greater_is_better: bool = option(False, rare=True, resume="free")
    """Whether a larger metric_for_best_model is better."""
    load_best_model_at_end: bool = option(False, rare=True, resume="free")
    """Export the best checkpoint by metric_for_best_model instead of the last."""
    eval_steps: StepsOrFraction = 0
    """Updates between evaluations; below 1: that fraction of the run; 0: only at the end."""
    eval_on_start: bool = option(False, rare=True)
    """Also evaluate before the first update."""

    # Where a stage has no options of these names.
    early_stopping_patience = 0

    def problems(self) -> Iterator[str]:
        """Unknown trackers."""
        yield from super().problems()
        unknown = [name for name in self.report_to if name not in TRACKERS]
        if unknown:
            choices = ", ".join((*TRACKERS, "none"))
            yield (
                f"report_to: {', '.join(unknown)} is not supported; choose from {choices} (metrics.jsonl is always "
                "written)."
            )


@dataclasses.dataclass(frozen=True)
class SampleOptions(Options):
    """Sampled responses that are written and printed."""

    # --- samples
    num_sample_generations: NonNegativeInt = 10
    """Number of times during a run that sample completions are written; 0: never. The first, the last and two between
    are printed."""
    log_completions: bool = False
    """Also print and write the responses of training batches, every logging_steps updates."""
    log_multimodal: bool = True
    """In the files of sample and training completions, also write thumbnails of the prompts' images."""
    num_completions_to_print: PositiveInt | None = option(3, rare=True, resume="free")
    """Rows of a completion table in the terminal, where long texts are cut; None: all. The files have all."""
    log_unique_prompts: bool = option(False, rare=True)
    """Show only one row per prompt in these tables."""


def bucket_paths(run_dir: str) -> Iterator[str]:
    """A line for a run_dir that is a URL and no folder of a bucket."""
    if "://" in run_dir and not re.fullmatch(r"(s3|gs)://[^/\s?#]+(/[^?#]*)?", run_dir):
        yield f"run_dir is {run_dir!r}; it must be a folder, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER."

"""Options of data: sources, columns, lengths."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from rlhf_jax.data.format import Format
from rlhf_jax.errors import UserError
from rlhf_jax.option import Options, PositiveInt, checked_types, option, out_of_range

NAMES = {
    "path": "dataset_name",
    "name": "dataset_config",
    "revision": "dataset_revision",
    "split": "dataset_train_split",
}
"""TRL's names in an entry of the option datasets -> our options."""
OWN = ("weight", "fraction", "format", "parameters")
"""What an entry may have beside options."""
ENTRY_OPTIONS = (
    *("prompt_column", "completion_column", "chosen_column", "rejected_column", "margin_column"),
    *("chat_template_kwargs", "max_train_samples", "query_length", "query_overflow", "on_bad_row"),
)
"""Options that an entry may set for its rows."""


@dataclasses.dataclass(frozen=True)
class LengthOptions(Options):
    """Widths of rows."""

    # --- lengths
    query_length: PositiveInt = 512
    """Maximum number of prompt tokens."""
    query_overflow: Literal["truncate", "drop"] = option("truncate", rare=True)
    """Prompts of more than query_length tokens: truncate drops the last paragraphs of a TL;DR post, as OpenAI did,
    keeps the last query_length tokens of another text, and drops the row if the prompt is a conversation; drop drops
    the row, as TRL's scripts do."""
    length_buckets: tuple[int, ...] | None = option(None, rare=True, lowers={"update": 4})
    """Lengths to pad rows to. SFT and reward model: one per batch; default: quarters of the maximum. PPO, RLOO and
    GRPO: one per micro-batch for its prompts, within one program; default: half, three quarters and all of the
    maximum."""

    def problems(self) -> Iterator[str]:
        """Buckets that do not increase."""
        yield from super().problems()
        buckets = self.length_buckets
        if buckets is None:
            return
        if not buckets or buckets[0] < 1 or any(a >= b for a, b in itertools.pairwise(buckets)):
            yield f"length_buckets is {buckets}; lengths must be at least 1 and increasing."


@dataclasses.dataclass(frozen=True)
class DataOptions(LengthOptions):
    """Where rows come from."""

    # --- data
    dataset_name: str = option("trl-lib/tldr", path=True)
    """Hub name, file or folder (jsonl, json and csv, also compressed as .gz, .bz2 or .zst, parquet, arrow; local or in
    a bucket), or a built-in task: 'synthetic' (summaries and preferences), 'arithmetic' (sums with worked solutions),
    'shapes' (pictures and questions), 'boxes', 'guess_number' and 'seeds' (for tools, docs/tools.md), 'instructions'
    (questions with requirements that a program checks) or 'reasoning_gym:TASK?PARAMETER=VALUE&...'
    (docs/rewards.md)."""
    datasets: tuple[dict[str, Any], ...] | None = option(None, path=True)
    """Several datasets to train on, in place of dataset_name: a list of dicts with path, and name, revision, split,
    parameters, weight or fraction, max_train_samples, format and columns of their own (docs/tutorial.md)."""
    dataset_config: str | None = option(None, rare=True)
    """Configuration of the dataset on the Hub."""
    dataset_revision: str | None = option(None, rare=True)
    """Hub revision of the dataset."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str | None = "validation"
    """Split to evaluate on; None: no evaluation."""
    eval_dataset_name: str | None = option(None, path=True)
    """Another dataset (or file) to evaluate on; several as NAME=SOURCE,NAME=SOURCE."""
    dataset_num_proc: PositiveInt | None = option(None, resume="free")
    """Processes that tokenize the rows of a dataset, once; None: one, with the tokenizer's own threads. Chat templates
    are rendered by one thread a process."""
    max_train_samples: PositiveInt | None = None
    """Use only this many rows, the first, of the training split."""
    max_eval_samples: PositiveInt | None = option(256, rare=True)
    """Use only this many rows, the first, of the evaluation split."""
    prompt_column: str = "prompt"
    """Column with the prompt: texts, or conversations (lists of messages with role and content)."""
    chat_template_kwargs: dict[str, Any] | None = option(None, rare=True)
    """Keyword arguments of the tokenizer's chat template, for conversations."""
    on_bad_row: Literal["raise", "skip"] = option("raise", rare=True)
    """On a row with a missing, empty or wrongly typed field: stop and name the row, or skip and count it."""

    # Where a stage has no options of these names.
    completion_column = "completion"
    assistant_only_loss = completion_only_loss = False

    def with_entry(self, entry: Mapping[str, Any]) -> Self:
        """The options of one data set of the mixture."""
        options = {NAMES.get(name, name): value for name, value in entry.items() if name not in OWN}
        if "parameters" in entry:
            options["dataset_name"] += f"?{json.dumps(entry['parameters'], sort_keys=True)}"
        hub = {"dataset_config": None, "dataset_revision": None}
        return dataclasses.replace(self, datasets=None, length_buckets=None, **{**hub, **options})

    def problems(self) -> Iterator[str]:
        """Everything that is wrong with datasets."""
        yield from super().problems()
        problems = list(self._mixture_problems())
        yield from problems
        for number, entry in enumerate(() if problems else self.datasets or (), 1):
            try:
                lines = list(out_of_range(checked_types(self.with_entry(entry))))
            except UserError as error:
                lines = [str(error)]
            yield from (f"datasets, entry {number}: {line}" for line in lines)

    def _mixture_problems(self) -> Iterator[str]:
        if not self.datasets:
            if self.datasets is not None:
                yield "datasets is empty; give a list of dicts with 'path', or leave it out."
            return
        allowed_keys = [*NAMES, *OWN, *(name for name in ENTRY_OPTIONS if name in vars(self))]
        for number, entry in enumerate(self.datasets, 1):
            where = f"datasets, entry {number}"
            if unknown := sorted(entry.keys() - set(allowed_keys)):
                yield f"{where}: {', '.join(unknown)} is not known; it takes {', '.join(allowed_keys)}."
            if not isinstance(entry.get("path"), str) or not entry["path"]:
                yield f"{where} has no 'path': a hub name, a file or folder, or a built-in task."
            for name in ("weight", "fraction"):
                value = entry.get(name, 1)
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                    yield f"{where}: {name} is {value!r}; it must be a number above 0."
            if "parameters" in entry and not (
                isinstance(entry["parameters"], dict) and str(entry.get("path")).startswith("reasoning_gym:")
            ):
                yield f"{where}: parameters is a dict for a path of the form 'reasoning_gym:TASK'."
            try:
                Format(entry.get("format") or {})
            except UserError as error:
                yield f"{where}: {error}"
        for name in ("weight", "fraction"):
            if 0 < sum(name in entry for entry in self.datasets) < len(self.datasets):
                yield f"datasets: give {name} to all data sets, or to none."
        if any("weight" in entry for entry in self.datasets) and any("fraction" in entry for entry in self.datasets):
            yield "datasets: give weight or fraction, not both."


@dataclasses.dataclass(frozen=True)
class PromptOptions(DataOptions):
    """Prompts to respond to."""

    # --- data
    shuffle_dataset: bool = option(True, rare=True)
    """Shuffle the prompts each epoch; false: keep their order."""

    # Where there are no options of tools.
    environment_factory = ()


@dataclasses.dataclass(frozen=True)
class SequenceOptions(DataOptions):
    """Prompts with their completions."""

    # --- lengths
    max_length: PositiveInt = 562
    """Maximum number of tokens of prompt and completion together; with packing, of a row."""

    def problems(self) -> Iterator[str]:
        """No room for a completion."""
        yield from super().problems()
        if self.max_length <= self.query_length:
            yield (
                f"max_length {self.max_length} - query_length {self.query_length} = "
                f"{self.max_length - self.query_length} tokens left for the completion; increase max_length."
            )


@dataclasses.dataclass(frozen=True)
class DemonstrationOptions(SequenceOptions):
    """Demonstrations to imitate."""

    # --- demonstrations
    completion_column: str = "completion"
    """Column with the demonstration; a column 'messages' may hold whole conversations instead."""
    assistant_only_loss: bool = False
    """Compute the loss on the assistant's messages only, which generation blocks of the chat template must mark."""
    packing: bool = False
    """Pack several demonstrations into rows of max_length tokens (best-fit decreasing). Positions and attention restart
    at each, so the loss of a token is what it is unpacked; batch_size then counts packed rows."""
    eval_packing: bool | None = option(None, rare=True)
    """Pack evaluation sets too; None: as packing."""


@dataclasses.dataclass(frozen=True)
class PairOptions(SequenceOptions):
    """Preference pairs."""

    # --- pairs
    dataset_name: str = "trl-lib/tldr-preference"
    """Preference pairs: Hub name, local file or folder, or 'synthetic'."""
    chosen_column: str = "chosen"
    """Column with the chosen completion, or the whole text or conversation where there is no prompt column."""
    rejected_column: str = "rejected"
    """Column with the rejected completion."""
    margin_column: str | None = option(None, rare=True)
    """Column with the margin by which the chosen score must exceed the rejected one."""
    max_length: PositiveInt = 638
    """Maximum number of tokens of prompt and completion together; longer pairs are dropped and counted."""
    normalize_dataset_name: str | None = option(None, path=True)
    """Demonstrations (prompt, completion) whose mean score is shifted to 0 after training; None: no shift."""
    normalize_samples: PositiveInt = option(512, rare=True)
    """Number of demonstrations in that mean."""

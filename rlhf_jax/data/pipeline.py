"""The data of a stage: the rows that its options name, tokenized, of one data set or a mixture."""

from __future__ import annotations

from typing import Any, TypeVar

from rlhf_jax.data.batches import Batched
from rlhf_jax.data.files import Rows
from rlhf_jax.data.images import ImageProcessor
from rlhf_jax.data.loading import eval_sets
from rlhf_jax.data.mixture import TrainingRows, load_training_rows, mixed
from rlhf_jax.data.options import DataOptions
from rlhf_jax.data.tokenized import tokenize
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError

Data = TypeVar("Data", bound=Batched)


def from_rows(
    kind: type[Data], rows: Rows, options: DataOptions, tokenizer: Tokenizer, processor: ImageProcessor | None = None
) -> Data:
    """Tokenizes rows.

    Args:
      kind: PromptData, DemoData or PairData, whose `encoder` has the rules.
      options: PromptOptions, DemonstrationOptions or PairOptions.
      processor: of a model that reads images, for rows with images.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, the longest row fits no bucket, conversations
        have no chat template, or an option does not apply to the rows.
    """
    rows, encoder = kind.encoder(rows, options, tokenizer, processor)
    tokenized = tokenize(rows, encoder, on_bad_row=options.on_bad_row, num_proc=options.dataset_num_proc)
    return encoder.data(tokenized, options.length_buckets)


def load(
    kind: type[Data],
    options: DataOptions,
    tokenizer: Tokenizer,
    dataset: Any = None,
    processor: ImageProcessor | None = None,
) -> Data:
    """The training data of a stage.

    Args:
      kind, options, tokenizer, processor: as `from_rows`.
      dataset: an object in place of the names in the options, or their TrainingRows.

    Raises:
      UserError: as `from_rows`, `loading.load_rows` and `mixture.mixed`; images are in a mixture.
    """
    if processor is not None and options.datasets:
        raise UserError("datasets: images are read from one data set; give it as dataset_name")
    loaded = dataset if isinstance(dataset, TrainingRows) else load_training_rows(options, kind.source, dataset)
    parts = [from_rows(kind, rows, set_options, tokenizer, processor) for rows, set_options in loaded.sets]
    return mixed(parts, loaded.weights, options.length_buckets) if loaded.is_mixture else parts[0]


def load_eval(
    kind: type[Data],
    options: DataOptions,
    tokenizer: Tokenizer,
    dataset: Any = None,
    processor: ImageProcessor | None = None,
) -> dict[str, Data]:
    """The evaluation sets of a stage, by name; the arguments are those of `load`. Raises as `from_rows` and
    `loading.eval_sets`."""
    sets = eval_sets(options, kind.source, dataset)
    return {name: from_rows(kind, rows, options, tokenizer, processor) for name, rows in sets.items()}

"""The built-in data set 'instructions': everyday questions with requirements that a program can check.

    Describe a thunderstorm from behind a window. Answer in exactly 3 sentences. Do not use the word "rain".

The questions and their topics are in instructions.toml; no topic is in two splits. The requirements are columns of the
row, which are the parameters of the functions in `rewards.instructions`; a column is null where it is not required.

Source: the verifiable instructions of IFEval, Zhou et al. 2023 (arXiv 2311.07911).
"""

from __future__ import annotations

import functools
import pathlib
import tomllib
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.errors import MissingSplit, UserError

SIZES = {"train": 4096, "validation": 512, "test": 512}
"""Default number of rows of each split."""
TWO_REQUIREMENTS = 0.5
"""Share of the rows with two requirements: one of `_FORMS` and one of `_CONTENTS`."""
JSON_KEYS = ("answer", "reason", "title", "summary", "example", "tip")
STARTS = ("In short,", "First of all,", "Good question!", "Here is my answer:", "Well,")
ENDS = ("I hope this helps.", "That is all.", "Good luck!", "Any questions?", "Have a nice day!")


class Instruction(NamedTuple):
    """A question, its topic, and words that belong to the topic."""

    text: str
    topic: str
    words: tuple[str, ...]


@functools.cache
def known_instructions() -> dict[str, tuple[Instruction, ...]]:
    """The questions of each split."""
    topics = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return {
        split: tuple(
            Instruction(text, topic, tuple(entry["words"]))
            for topic, entry in topics[split].items()
            for text in entry["instructions"]
        )
        for split in SIZES
    }


# --- requirements: (rng, words of the topic) -> (sentence, columns)

_Required = tuple[str, dict[str, Any]]


def _some(rng: np.random.Generator, values: tuple[str, ...], count: int = 1) -> list[str]:
    return [values[i] for i in rng.permutation(len(values))[:count]]


def _words(rng: np.random.Generator, words: tuple[str, ...]) -> _Required:
    low, high = 10 * int(rng.integers(2, 6)), 10 * int(rng.integers(2, 7))
    return [
        (f"Use at least {low} words.", {"min_words": low}),
        (f"Use at most {high} words.", {"max_words": high}),
        (f"Use between {low} and {low + 20} words.", {"min_words": low, "max_words": low + 20}),
    ][rng.integers(3)]


def _sentences(rng: np.random.Generator, words: tuple[str, ...]) -> _Required:
    count = int(rng.integers(1, 6))
    if count > 1 and rng.random() < 0.5:
        return f"Use at most {count} sentences.", {"max_sentences": count}
    text = "one sentence" if count == 1 else f"exactly {count} sentences"
    return f"Answer in {text}.", {"min_sentences": count, "max_sentences": count}


def _bullets(rng: np.random.Generator, words: tuple[str, ...]) -> _Required:
    count = int(rng.integers(2, 6))
    return f'Answer with exactly {count} bullet points, each on a line that starts with "- ".', {"bullets": count}


def _json(rng: np.random.Generator, words: tuple[str, ...]) -> _Required:
    keys = _some(rng, JSON_KEYS, int(rng.integers(2, 4)))
    names = ", ".join(f'"{key}"' for key in keys[:-1]) + f' and "{keys[-1]}"'
    return f"Answer with a JSON object with the keys {names}, and nothing else.", {"json_keys": keys}


def _keywords(rng: np.random.Generator, words: tuple[str, ...]) -> _Required:
    keywords = _some(rng, words, int(rng.integers(1, 3)))
    names = " and ".join(f'"{word}"' for word in keywords)
    return f"Use the word{'s' if len(keywords) > 1 else ''} {names}.", {"keywords": keywords}


def _forbidden(rng: np.random.Generator, words: tuple[str, ...]) -> _Required:
    [word] = _some(rng, words)
    return f'Do not use the word "{word}".', {"forbidden_words": [word]}


def _letter_case(rng: np.random.Generator, words: tuple[str, ...]) -> _Required:
    if rng.random() < 0.5:
        return "Write in lower case only.", {"letter_case": "lower"}
    return "Write in CAPITAL LETTERS only.", {"letter_case": "upper"}


def _start(rng: np.random.Generator, words: tuple[str, ...]) -> _Required:
    [start] = _some(rng, STARTS)
    return f'Start with "{start}"', {"starts_with": start}


def _end(rng: np.random.Generator, words: tuple[str, ...]) -> _Required:
    [end] = _some(rng, ENDS)
    return f'End with "{end}"', {"ends_with": end}


_FORMS = {
    _words: (_keywords, _forbidden, _letter_case, _start, _end),
    _sentences: (_keywords, _forbidden, _letter_case, _start, _end),
    _bullets: (_keywords, _forbidden, _letter_case),
    _json: (_keywords, _forbidden),
}
"""Requirements on the form of an answer, and those on its content that it can have beside each."""
_CONTENTS = _FORMS[_words]
COLUMNS = (
    *("min_words", "max_words", "min_sentences", "max_sentences", "bullets"),
    *("json_keys", "keywords", "forbidden_words", "letter_case", "starts_with", "ends_with"),
)


def make_row(split: str, seed: int, row: int) -> dict[str, Any]:
    """One row; it depends on nothing else."""
    rng = np.random.default_rng([seed, list(SIZES).index(split), row])
    instructions = known_instructions()[split]
    asked = instructions[rng.integers(len(instructions))]
    forms = list(_FORMS)
    if rng.random() < TWO_REQUIREMENTS:
        form = forms[rng.integers(len(forms))]
        makers = [form, _FORMS[form][rng.integers(len(_FORMS[form]))]]
    else:
        either = [*forms, *_CONTENTS]
        makers = [either[rng.integers(len(either))]]
    required = [make(rng, asked.words) for make in makers]
    content = " ".join([asked.text, *(sentence for sentence, _ in required)])
    columns = {name: value for _, values in required for name, value in values.items()}
    return {
        "prompt": [{"role": "user", "content": content}],
        "topic": asked.topic,
        **{name: columns.get(name) for name in COLUMNS},
    }


def load_instructions(kind: str, split: str = "train", size: int | None = None, seed: int = 0):
    """A datasets.Dataset of questions with requirements. Splits (train, validation, test) share no topic. Rows are a
    function of the arguments; a smaller size gives the first rows.

    Args:
      kind: 'prompts' or 'demonstrations', which have no completions.
      split: train, validation or test.

    Returns:
      rows {"prompt": messages, "topic", and COLUMNS, null where they are not required}
    """
    import datasets

    if split not in SIZES:
        raise MissingSplit("the data set 'instructions'", split, SIZES)
    if kind not in ("prompts", "demonstrations"):
        raise UserError(f"the data set 'instructions' has no {kind}; it has prompts")
    text, number = datasets.Value("string"), datasets.Value("int64")
    types = {"json_keys": [text], "keywords": [text], "forbidden_words": [text]}
    types |= {"letter_case": text, "starts_with": text, "ends_with": text}
    features = datasets.Features(
        {
            "prompt": [{"role": text, "content": text}],
            "topic": text,
            **{name: types.get(name, number) for name in COLUMNS},
        }
    )
    rows = [make_row(split, seed, row) for row in range(SIZES[split] if size is None else size)]
    return datasets.Dataset.from_list(rows, features=features)

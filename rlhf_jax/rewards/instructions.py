"""Reward functions for requirements that a program can check, with their parameters in the row.

Each gives 1 where the completion meets the row's requirement, 0 where it does not, None where the row has none. The
built-in data set 'instructions' has rows for them.

Source: the verifiable instructions of IFEval, Zhou et al. 2023 (arXiv 2311.07911). Its own program counts with nltk
and langdetect; here each function says what it counts.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.rewards.builtin import Completion, completion_text

_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?:\s+|\Z)")
_BULLET = re.compile(r"^\s*[-*•]\s+\S", re.MULTILINE)
_FENCED = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL | re.IGNORECASE)
_SCRIPT_NAMES = {"Han": ("CJK", "IDEOGRAPHIC")}  # in Unicode's character names, where they differ from the script's


# --- checks of one text


def _within(count: int, low: int | None, high: int | None) -> bool:
    return (low is None or count >= low) and (high is None or count <= high)


def _listed(words: str | Sequence[str]) -> Sequence[str]:
    return [words] if isinstance(words, str) else words


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _word_count(text: str, low: int | None, high: int | None) -> bool:
    return _within(len(_WORD.findall(text)), low, high)


def _sentence_count(text: str, low: int | None, high: int | None) -> bool:
    return _within(sum(_WORD.search(part) is not None for part in _SENTENCE_END.split(text)), low, high)


def _keywords(text: str, words: str | Sequence[str]) -> bool:
    return all(_has_word(text, word) for word in _listed(words))


def _forbidden_words(text: str, words: str | Sequence[str]) -> bool:
    return not any(_has_word(text, word) for word in _listed(words))


def _letter_case(text: str, case: str) -> bool:
    if case not in ("lower", "upper"):
        raise UserError(f"column letter_case has {case!r}; it must be 'lower' or 'upper'")
    return text.islower() if case == "lower" else text.isupper()


def _json_object(text: str, keys: str | Sequence[str]) -> bool:
    fenced = _FENCED.match(text.strip())
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.keys() == set(_listed(keys))


def _bullet_count(text: str, count: int) -> bool:
    return len(_BULLET.findall(text)) == count


def _start(text: str, start: str) -> bool:
    return text.strip().lower().startswith(start.strip().lower())


def _end(text: str, end: str) -> bool:
    return text.strip().lower().endswith(end.strip().lower())


def _script(text: str, scripts: str | Sequence[str]) -> bool:
    prefixes = tuple(prefix for script in _listed(scripts) for prefix in _SCRIPT_NAMES.get(script, (script.upper(),)))
    letters = [character for character in text if character.isalpha()]
    return bool(letters) and all(unicodedata.name(letter, "").startswith(prefixes) for letter in letters)


_CHECKS: dict[str, tuple[Callable[..., bool], tuple[str, ...]]] = {
    "words": (_word_count, ("min_words", "max_words")),
    "sentences": (_sentence_count, ("min_sentences", "max_sentences")),
    "keywords": (_keywords, ("keywords",)),
    "forbidden_words": (_forbidden_words, ("forbidden_words",)),
    "letter_case": (_letter_case, ("letter_case",)),
    "json": (_json_object, ("json_keys",)),
    "bullets": (_bullet_count, ("bullets",)),
    "start": (_start, ("starts_with",)),
    "end": (_end, ("ends_with",)),
    "script": (_script, ("scripts",)),
}
"""Each check, and the columns that are its arguments after the text."""
COLUMNS = tuple(column for _, names in _CHECKS.values() for column in names)


def _met(name: str, completions: Sequence[Completion], columns: dict[str, Any]) -> list[bool | None]:
    """Whether B completions pass a check; None where its columns are null or empty."""
    check, names = _CHECKS[name]
    values = [columns.get(column) for column in names]
    if all(column is None for column in values):
        raise UserError(f"the data have no column {' or '.join(names)}")
    rows = zip(*(column or [None] * len(completions) for column in values), strict=True)
    return [
        None if all(value is None or value in ("", []) for value in row) else check(completion_text(completion), *row)
        for completion, row in zip(completions, rows, strict=True)
    ]


def _rewards(name: str, completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    return [None if met is None else float(met) for met in _met(name, completions, columns)]


# --- reward functions


def word_count_reward(
    completions: Sequence[Completion],
    min_words: Sequence[int | None] | None = None,
    max_words: Sequence[int | None] | None = None,
    **kwargs,
) -> list[float | None]:
    """Whether the number of words is within bounds. "don't" and "well-known" are one word each.

    Args:
      completions: B texts or lists of one message.
      min_words, max_words: B numbers; None for no bound.
      **kwargs: not read.

    Returns:
      B numbers or None.
    """
    return _rewards("words", completions, min_words=min_words, max_words=max_words)


def sentence_count_reward(
    completions: Sequence[Completion],
    min_sentences: Sequence[int | None] | None = None,
    max_sentences: Sequence[int | None] | None = None,
    **kwargs,
) -> list[float | None]:
    """Whether the number of sentences is within bounds. A sentence ends with '.', '!' or '?' before white space, also
    in "e.g. this", or with the text.

    Args:
      completions: B texts or lists of one message.
      min_sentences, max_sentences: B numbers; None for no bound.
      **kwargs: not read.

    Returns:
      B numbers or None.
    """
    return _rewards("sentences", completions, min_sentences=min_sentences, max_sentences=max_sentences)


def keywords_reward(
    completions: Sequence[Completion], keywords: Sequence[Sequence[str] | None], **kwargs
) -> list[float | None]:
    """Whether all of the keywords occur, as whole words, in any case.

    Args:
      completions: B texts or lists of one message.
      keywords: B lists of words or phrases, or one word each.
      **kwargs: not read.

    Returns:
      B numbers or None.
    """
    return _rewards("keywords", completions, keywords=keywords)


def forbidden_words_reward(
    completions: Sequence[Completion], forbidden_words: Sequence[Sequence[str] | None], **kwargs
) -> list[float | None]:
    """Whether none of the words occurs, as a whole word, in any case.

    Args:
      completions: B texts or lists of one message.
      forbidden_words: B lists of words or phrases, or one word each.
      **kwargs: not read.

    Returns:
      B numbers or None.
    """
    return _rewards("forbidden_words", completions, forbidden_words=forbidden_words)


def letter_case_reward(
    completions: Sequence[Completion], letter_case: Sequence[str | None], **kwargs
) -> list[float | None]:
    """Whether all letters are of one case, and there is a letter.

    Args:
      completions: B texts or lists of one message.
      letter_case: B of 'lower' or 'upper'.
      **kwargs: not read.

    Returns:
      B numbers or None.

    Raises:
      UserError: another value.
    """
    return _rewards("letter_case", completions, letter_case=letter_case)


def json_object_reward(
    completions: Sequence[Completion], json_keys: Sequence[Sequence[str] | None], **kwargs
) -> list[float | None]:
    """Whether the completion is a JSON object with exactly these keys, alone or in a ```json block.

    Args:
      completions: B texts or lists of one message.
      json_keys: B lists of keys, or one key each.
      **kwargs: not read.

    Returns:
      B numbers or None.
    """
    return _rewards("json", completions, json_keys=json_keys)


def bullet_count_reward(
    completions: Sequence[Completion], bullets: Sequence[int | None], **kwargs
) -> list[float | None]:
    """Whether the completion has this number of bullet points: lines that start with '- ', '* ' or '• '.

    Args:
      completions: B texts or lists of one message.
      bullets: B numbers.
      **kwargs: not read.

    Returns:
      B numbers or None.
    """
    return _rewards("bullets", completions, bullets=bullets)


def start_reward(completions: Sequence[Completion], starts_with: Sequence[str | None], **kwargs) -> list[float | None]:
    """Whether the completion starts with a text, in any case; white space around both is ignored.

    Args:
      completions: B texts or lists of one message.
      starts_with: B texts.
      **kwargs: not read.

    Returns:
      B numbers or None.
    """
    return _rewards("start", completions, starts_with=starts_with)


def end_reward(completions: Sequence[Completion], ends_with: Sequence[str | None], **kwargs) -> list[float | None]:
    """Whether the completion ends with a text, in any case; white space around both is ignored.

    Args:
      completions: B texts or lists of one message.
      ends_with: B texts.
      **kwargs: not read.

    Returns:
      B numbers or None.
    """
    return _rewards("end", completions, ends_with=ends_with)


def script_reward(
    completions: Sequence[Completion], scripts: Sequence[Sequence[str] | None], **kwargs
) -> list[float | None]:
    """Whether all letters are of these scripts, and there is a letter.

    Args:
      completions: B texts or lists of one message.
      scripts: B lists of names, or one name each, with which Unicode's names of characters start: 'Latin', 'Cyrillic',
        'Arabic'; 'Han' for Chinese, ['Han', 'Hiragana', 'Katakana'] for Japanese.
      **kwargs: not read.

    Returns:
      B numbers or None.
    """
    return _rewards("script", completions, scripts=scripts)


def instruction_reward(
    completions: Sequence[Completion], log_metric: Callable[[str, float], None] | None = None, **columns
) -> list[float | None]:
    """The share of the row's requirements that the completion meets: of all functions above.

    Args:
      completions: B texts or lists of one message.
      log_metric: receives instructions/CHECK, the share of the rows with that requirement that meet it, and
        instructions/all, the share of the rows that meet all of theirs.
      **columns: those of the functions above, B values each; others are not read.

    Returns:
      B numbers or None.

    Raises:
      UserError: the data have none of these columns.
    """
    present = [name for name, (_, names) in _CHECKS.items() if any(columns.get(column) is not None for column in names)]
    if not present:
        raise UserError(f"instruction_reward: the data have none of the columns {', '.join(COLUMNS)}")
    met = {name: _met(name, completions, columns) for name in present}
    by_row = [[value for value in row if value is not None] for row in zip(*met.values(), strict=True)]
    if log_metric is not None:
        known_rows = [all(row) for row in by_row if row]
        for name, values in {**met, "all": known_rows}.items():
            if outcomes := [value for value in values if value is not None]:
                log_metric(f"instructions/{name}", sum(outcomes) / len(outcomes))
    return [sum(row) / len(row) if row else None for row in by_row]


FUNCTIONS = (
    *(word_count_reward, sentence_count_reward, keywords_reward, forbidden_words_reward, letter_case_reward),
    *(json_object_reward, bullet_count_reward, start_reward, end_reward, script_reward, instruction_reward),
)

# Data without any of them are refused when a run starts: see `HostRewards.check_columns`.
word_count_reward.any_of_columns = ("min_words", "max_words")
sentence_count_reward.any_of_columns = ("min_sentences", "max_sentences")
instruction_reward.any_of_columns = COLUMNS

"""Tasks of the package reasoning-gym as data sets: 'reasoning_gym:TASK?PARAMETER=VALUE&PARAMETER=VALUE'.

A row is a function of (seed, index). The package makes row i of seed s from s + i, so that neighbouring seeds share
their rows; here a hash of seed and block number is the package's seed of each block of rows. Splits share no question,
whatever the seed: the split of a question depends on a hash of its text.

The column 'reasoning_gym' has what makes the row again, so that the package's own verifier can score answers to it. The
package runs in a child process, reasoning_gym_worker.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import re
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

from rlhf_jax.data.reasoning_gym_worker import BLOCK, ROW_SECONDS
from rlhf_jax.data.splits import assigned_split
from rlhf_jax.errors import MissingSplit, UserError
from rlhf_jax.option import nearest
from rlhf_jax.utils.json_worker import JsonWorker, NotStarted

PREFIX = "reasoning_gym:"
SIZES = {"train": 4096, "validation": 512, "test": 512}
"""Default number of rows of each split; those of the last two have different questions."""
BOXED_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
INSTALL = "pip install '.[reasoning-gym]'"

AnswerFormat = Literal["tag", "boxed", "number", "text"]
_FORMATS: dict[str, tuple[str, re.Pattern[str]]] = {  # how an answer is written and found; the last one counts
    "tag": ("<answer>{}</answer>", re.compile(r"<answer>(.*?)</answer>", re.DOTALL)),
    "boxed": ("\\boxed{{{}}}", re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")),
    "number": ("{}", re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")),
    "text": ("{}", re.compile(r"\A(.*)\Z", re.DOTALL)),
}
_CHUNK = 25  # rows a request


def check_installed(what: str) -> None:
    """UserError, naming what needs it, if reasoning-gym is not installed."""
    if find_spec("reasoning_gym") is None:
        raise UserError(
            f"{what} needs the package reasoning-gym: {INSTALL}. One of its packages, pycosat, is built from source "
            "and needs a C compiler (Debian, Ubuntu: apt install gcc python3-dev)"
        )


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set's name, parsed.

    Attributes:
      task: the package's name.
      parameters: of the task, and `level`: of its curriculum.
      seed: another one gives other rows.
      size: rows of the training split.
      system_prompt: text, or the name of one of the package's; '' for none; None: the package's 'default' for 'tag',
        `BOXED_PROMPT` for 'boxed', none for 'number' and 'text'.
      answer_format: what of a response is its answer: 'tag': the last <answer>...</answer>; 'boxed': the last
        \\boxed{}; 'number': the last number, as lm-eval's flexible-extract; 'text': all of it.
      partial_scores: whether the verifier's scores between 0 and 1 are kept; otherwise they become 0.
    """

    task: str
    parameters: dict[str, Any]
    seed: int = 0
    size: int = SIZES["train"]
    system_prompt: str | None = None
    answer_format: AnswerFormat = "tag"
    partial_scores: bool = True


_KIND_NAMES = {int: "a whole number", bool: "true or false", str: "text"}
_OPTIONS = {field.name: field for field in dataclasses.fields(Source) if field.name not in ("task", "parameters")}


def parse(name: str) -> Source:
    """The parts of 'reasoning_gym:TASK?PARAMETER=VALUE&...' or 'reasoning_gym:TASK?{JSON}'. A value is JSON, or text.

    Raises:
      UserError: a part is no PARAMETER=VALUE, or an option has an impossible value.
    """
    task, _, query = name.removeprefix(PREFIX).partition("?")
    parameters: dict[str, Any] = {}
    if query.startswith("{"):
        try:
            parameters = json.loads(query)
        except ValueError as error:
            raise UserError(f"{name}: the text after '?' is no JSON object: {error}") from error
    else:
        for part in filter(None, query.split("&")):
            key, equals, value = part.partition("=")
            if not equals or not key:
                raise UserError(f"{name}: {part!r} is not PARAMETER=VALUE")
            try:
                parameters[key] = json.loads(value)
            except ValueError:
                parameters[key] = value
    options = {key: parameters.pop(key) for key in _OPTIONS.keys() & parameters.keys()}
    source = Source(task, parameters, **options)
    kinds = {"seed": int, "size": int, "partial_scores": bool, "system_prompt": str}
    for key, kind in kinds.items():
        if key in options and type(options[key]) is not kind:
            raise UserError(f"{name}: {key} is {options[key]!r}; it must be {_KIND_NAMES[kind]}")
    if source.seed < 0 or source.size < 1:
        raise UserError(f"{name}: seed must be at least 0 and size at least 1")
    if source.answer_format not in get_args(AnswerFormat):
        raise UserError(
            f"{name}: answer_format is {source.answer_format!r}; it must be one of {', '.join(get_args(AnswerFormat))}"
        )
    return source


def written(answer: str, answer_format: AnswerFormat) -> str:
    """An answer in its format."""
    return _FORMATS[answer_format][0].format(answer)


def extracted(response: str, answer_format: AnswerFormat) -> str | None:
    """The answer in a response; None if it has none."""
    matches = _FORMATS[answer_format][1].findall(response)
    if not matches:
        return None
    return matches[-1].replace(",", "") if answer_format == "number" else matches[-1].strip()


# --- the child process


_worker = JsonWorker(pathlib.Path(__file__).with_name("reasoning_gym_worker.py"))
close = _worker.close
"""Ends the child process, after the request that it is at."""


def _ask(what: str, request: list[Any], replies: int = 1) -> list[Any]:
    """The replies of the child process; fewer if a row or an answer took too long.

    Raises:
      UserError: the package cannot be imported, or there is no such task or parameter.
    """
    check_installed(what)
    try:
        answered = _worker.ask(request, lambda rows: len(rows) == replies or _error(rows) is not None)
    except NotStarted as error:
        raise UserError(f"reasoning-gym cannot be imported: {error}. {INSTALL}") from error
    if (error := _error(answered)) is not None:
        raise UserError(f"{what}: {_with_suggestion(error, request[1])}")
    return answered


def _error(replies: list[Any]) -> str | None:
    """The user's error that ends the replies, or None."""
    return replies[-1].get("error") if replies and isinstance(replies[-1], dict) else None


def _with_suggestion(error: str, task: str) -> str:
    head, names, tasks = error.partition(" Tasks: ")
    return f"{head}{nearest(task, tasks.split(', '))}{names}{tasks}" if names else error


def _system_prompt(name: str, source: Source) -> str:
    [prompts] = _ask(name, ["open", source.task, source.parameters]) or [{}]
    if source.system_prompt is None:
        return {"tag": prompts.get("default", ""), "boxed": BOXED_PROMPT}.get(source.answer_format, "")
    return prompts.get(source.system_prompt, source.system_prompt)


def _stream(name: str, source: Source) -> Iterator[tuple[int, int, str, str | None, str | None, str]]:
    """(the package's seed, row, question, answer, worked answer, task) of rows without end."""
    block = 0
    while True:
        seed = int.from_bytes(hashlib.sha256(f"{source.seed}/{block}".encode()).digest()[:4], "big")
        for start in range(0, BLOCK, _CHUNK):
            request = ["rows", source.task, source.parameters, seed, start, start + _CHUNK]
            rows = _ask(name, request, _CHUNK)
            for row, fields in enumerate(rows, start):
                yield (seed, row, *fields)
            if len(rows) < _CHUNK:
                raise UserError(f"{name}: a row took more than {ROW_SECONDS} s to make; choose an easier task")
        block += 1


# --- rows


def _rows(name: str, source: Source, split: str, size: int) -> list[tuple]:
    """The first rows of a split, of other splits than train without repeated questions. A task with few questions has
    fewer than `size`."""
    rows: list[tuple] = []
    seen: set[str] = set()
    for count, row in enumerate(_stream(name, source)):
        question = row[2]
        if assigned_split(question) == split and (split == "train" or question not in seen):
            seen.add(question)
            rows.append(row)
        if len(rows) == size or count == 40 * size + 1000:
            break
    if not rows:
        raise UserError(f"{name}: the task has too few distinct questions for a split {split}; give other parameters")
    return rows


def load_reasoning_gym(name: str, kind: str, split: str = "train", size: int | None = None, seed: int = 0):
    """A datasets.Dataset of a task. Rows are a function of the arguments; a smaller size gives the first rows.

    Args:
      kind: 'prompts' or 'demonstrations', which have the completion too where the task has one right answer.
      split: train, validation or test.
      seed: added to the seed in the name.

    Returns:
      rows {"prompt": messages, "question", "answer", "task", "reasoning_gym": for `reasoning_gym_reward`}

    Raises:
      UserError: the package is not installed, or there is no such task, parameter or split.
    """
    import datasets

    source = parse(name)
    source = dataclasses.replace(source, seed=source.seed + seed)
    if split not in SIZES:
        raise MissingSplit(f"{PREFIX}{source.task}", split, SIZES)
    if kind not in ("prompts", "demonstrations"):
        raise UserError(f"{PREFIX}{source.task} has no {kind}; it has prompts and demonstrations")
    system_prompt = _system_prompt(name, source)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    scoring = {"answer_format": source.answer_format, "partial_scores": source.partial_scores}
    largest = {**SIZES, "train": source.size}[split]
    table = []
    for package_seed, index, question, answer, worked, task in _rows(
        name, source, split, largest if size is None else min(size, largest)
    ):
        again = [source.task, source.parameters, package_seed, index, zlib.crc32(question.encode())]
        row: dict[str, Any] = {"prompt": [*system, {"role": "user", "content": question}], "question": question}
        row |= {"answer": answer, "task": task, "reasoning_gym": json.dumps({"task": task, "row": again, **scoring})}
        if kind == "demonstrations":
            row["completion"] = None if answer is None else _completion(worked, answer, source.answer_format)
        table.append(row)
    dataset = datasets.Dataset.from_list(table)
    if kind == "demonstrations" and all(row["completion"] is None for row in table):
        dataset = dataset.remove_columns("completion")
    return dataset


def _completion(worked: str | None, answer: str, answer_format: AnswerFormat) -> list[dict[str, str]]:
    """A demonstration: the worked answer if there is one, and the answer."""
    steps = [] if worked is None or answer_format == "text" else [re.sub(r"\n?####.*\Z", "", worked, flags=re.DOTALL)]
    return [{"role": "assistant", "content": "\n".join([*steps, written(answer, answer_format)])}]


def note(table: Any) -> str:
    """The number of distinct questions, for the report on the data."""
    return f"{len(table.unique('question'))} distinct questions"


def identity(name: str) -> list[Any]:
    """What rows depend on beside `load_reasoning_gym`'s arguments, of JSON types."""
    check_installed(name)
    return [importlib.metadata.version("reasoning-gym")]


class Scored(NamedTuple):
    """What a verifier says.

    Attributes:
      score: from 0 to 1 for most tasks; 0 for an answer that takes too long.
      answer: the answer in the response, None if it has none.
      task: the package's name.
    """

    score: float
    answer: str | None
    task: str


def score(record: str, response: str) -> Scored:
    """The verifier's score of a response.

    Args:
      record: the row's column 'reasoning_gym'.

    Raises:
      UserError: the package is not installed, or another version of it makes another row.
    """
    fields = json.loads(record)
    answer = extracted(response, fields["answer_format"])
    if answer is None:
        return Scored(0.0, None, fields["task"])
    replies = _ask("reasoning_gym_reward", ["score", *fields["row"], answer])
    value = replies[0] if replies else 0.0
    return Scored(value if fields["partial_scores"] or value >= 1 else 0.0, answer, fields["task"])

"""The process that runs reasoning-gym: a script, which imports no jax. Some of its verifiers `eval` an answer.

Requests, each [NAME, task, parameters, ...], and their replies:

- ["open", task, parameters]: the package's system prompts by name;
- ["rows", task, parameters, seed, start, stop]: for each row [question, answer, worked answer, task];
- ["score", task, parameters, seed, row, crc32 of its question, answer]: a number.

A reply {"error": TEXT} is an error of the user's. A row or an answer that takes too long ends the process.
"""

import contextlib
import dataclasses
import functools
import json
import random
import zlib

from rlhf_jax.utils.json_worker import Requests

BLOCK = 500  # rows of a data set of the package's, which are those of neighbouring seeds
ROW_SECONDS = 120
SCORE_SECONDS = 10
MEMORY = 2**33  # bytes
WORKED_ANSWERS = ("answer_cot",)  # where the package's rows keep them


class Unusable(Exception):
    """An error of the user's."""


def configuration(task: str, parameters: dict):
    """The package's configuration of a task: at a level of its curriculum if `parameters` name one."""
    from reasoning_gym import factory
    from reasoning_gym.composite import DatasetSpec

    if task not in factory.DATASETS:
        raise Unusable(f"there is no task {task!r}. Tasks: {', '.join(sorted(factory.DATASETS))}")
    parameters = dict(parameters)
    level = parameters.pop("level", None)
    config_class = factory.DATASETS[task][1]
    names = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
    if unknown := sorted(parameters.keys() - names):
        raise Unusable(f"{task} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(names))} and level")
    if task == "composite":
        if level is not None:
            raise Unusable("composite has no level; give one in the config of each of its datasets")
        parameters["datasets"] = [part(entry, DatasetSpec) for entry in parameters.get("datasets", ())]
    try:
        if level is None:
            return config_class(**parameters)
        if not factory.has_curriculum(task):
            raise Unusable(f"{task} has no curriculum, and so no level")
        if type(level) is not int or level < 0:
            raise Unusable(f"level is {level!r}; it must be a whole number of at least 0")
        curriculum = factory.create_curriculum(task)
        for name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
        return dataclasses.replace(curriculum.generate_configuration(), **parameters)
    except (AssertionError, TypeError, ValueError) as error:
        raise Unusable(f"{task}: {error or 'invalid parameters'}") from error


def part(entry, make):
    """A data set of a composite."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise Unusable(
            'composite: datasets is a list of {"name": TASK, "weight": NUMBER, "config": {PARAMETER: VALUE}}'
        )
    config = dataclasses.asdict(configuration(entry["name"], entry.get("config", {})))
    config = {name: value for name, value in config.items() if name not in ("seed", "size")}
    return make(name=entry["name"], weight=float(entry.get("weight", 1.0)), config=config)


@functools.lru_cache(maxsize=32)
def dataset(task: str, parameters: str, seed: int):
    """BLOCK rows of a task."""
    from reasoning_gym import factory

    config = dataclasses.replace(configuration(task, json.loads(parameters)), seed=seed, size=BLOCK)
    try:
        return factory.DATASETS[task][0](config)
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        raise Unusable(f"{task}: {error or 'invalid parameters'}") from error


@functools.lru_cache(maxsize=256)
def entry(task: str, parameters: str, seed: int, row: int) -> dict:
    """A row as the package makes it."""
    random.seed(seed * BLOCK + row)  # for a task that draws from the global generator
    return dataset(task, parameters, seed)[row]


def shown(row: dict, task: str) -> list:
    """What the parent sees of a row."""
    metadata = row["metadata"]
    worked = next((metadata[name] for name in WORKED_ANSWERS if metadata.get(name)), None)
    answer = row["answer"] if row["answer"] is None else str(row["answer"])
    return [row["question"], answer, worked, metadata.get("source_dataset", task)]


def score(task: str, parameters: str, seed: int, row: int, checksum: int, answer: str) -> float:
    """The verifier's score of an answer; 0 where it raises an exception."""
    package_row = entry(task, parameters, seed, row)
    if zlib.crc32(package_row["question"].encode()) != checksum:
        raise Unusable(f"{task}: this version of reasoning-gym makes another question than the one in the data")
    try:
        random.seed(0)  # a score must not depend on the rows before it
        return float(dataset(task, parameters, seed).score_answer(answer, package_row))
    except Exception:  # of any kind: the answer is a model's
        return 0.0


def main() -> None:
    """Serves requests until stdin ends."""
    requests = Requests()
    try:
        from reasoning_gym.utils import SYSTEM_PROMPTS
    except ImportError as error:
        requests.reply({"error": str(error)})
        return
    with contextlib.suppress(ImportError, OSError, ValueError):  # systems without such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    requests.reply("ready")
    for name, task, parameters, *rest in requests:
        parameters = json.dumps(parameters, sort_keys=True)
        try:
            if name == "open":
                requests.limit(ROW_SECONDS)
                dataset(task, parameters, 0)
                requests.reply(SYSTEM_PROMPTS)
            elif name == "rows":
                seed, start, stop = rest
                for row in range(start, stop):
                    requests.limit(ROW_SECONDS)
                    requests.reply(shown(entry(task, parameters, seed, row), task))
            else:
                requests.limit(SCORE_SECONDS + ROW_SECONDS)
                entry(task, parameters, *rest[:2])
                requests.limit(SCORE_SECONDS)
                requests.reply(score(task, parameters, *rest))
        except Unusable as error:
            requests.reply({"error": str(error)})


if __name__ == "__main__":
    main()

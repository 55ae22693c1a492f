"""The built-in synthetic TL;DR task: posts with facts, imperfect demonstrations, and an exact reward.

A post states 2 to 4 facts among filler sentences, each a verb and its object in one sentence:

    SUBREDDIT: r/advice

    TITLE: what should i do now

    POST: it was a long day. i lost keys. i do not know why. i met anna. i visited rome.

    TL;DR: met anna; lost keys; visited oslo

A summary lists facts in the order of FACTS, separated by "; "; the last one here is invented. A verb occurs once in a
post and every object belongs to one verb, so a small transformer learns to copy facts within a few hundred updates. The
gold reward is exact and needs no labels, since it parses the facts from the post. Demonstrations drop and invent facts
at the rates below, so that RL can improve on a policy that imitates them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from rlhf_jax.data import splits
from rlhf_jax.data.fast_tokenizer import EOS, PAD, UNK, word_level_tokenizer
from rlhf_jax.data.tldr import format_post, parse_post
from rlhf_jax.errors import MissingSplit, UserError

Kind = Literal["prompts", "demonstrations", "pairs"]

FACTS = {
    "met": tuple("anna omar lena igor maya noah ruth juan".split()),
    "lost": tuple("keys tickets shoes plates books lamps coins photos".split()),
    "visited": tuple("rome oslo cairo lima paris delhi seoul quito".split()),
    "felt": tuple("sad angry proud tired lonely scared happy calm".split()),
    "ate": tuple("soup bread cheese apples rice beans eggs cake".split()),
    "paid": tuple("ten twenty thirty forty fifty sixty seventy nothing".split()),
}
"""Verb -> its possible objects."""
SUBREDDITS = tuple("advice family school work travel friends".split())
TITLES = (
    "what should i do now",
    "is this my fault",
    "how do i handle this",
    "a very strange week",
    "please help me decide",
    "i need some advice",
)
FILLERS = (
    "it was a long day",
    "i do not know why",
    "we talked for an hour",
    "nobody said a word",
    "that is the story",
    "i am still confused",
    "this happened last week",
    "my head hurts",
)

MIN_FACTS, MAX_FACTS = 2, 4
MAX_FILLERS = 2
DROP_RATE = 0.45
"""Probability that a demonstration drops a fact; it keeps at least one."""
INVENT_RATE = 0.3
"""Share of the facts in demonstrations that are invented."""
WRONG_OBJECT_SHARE = 0.2
"""Share of the invented facts that combine a verb of the post with another object; the others use another verb."""
WORD_COST = 0.25
"""Penalty in the gold reward for each word that is not part of a kept fact."""
LABEL_SHARPNESS = 6.0
"""Preference labels follow sigmoid(LABEL_SHARPNESS * difference of gold rewards)."""
REPETITION_SHARE = 0.3
"""Share of the summaries in preference pairs that repeat facts."""
SIZES = {"train": 16384, "validation": 2048, "test": 2048}
"""Default number of rows of each split."""

_SEED_STREAMS = {"prompts": 0, "demonstrations": 0, "pairs": 1}

Fact = tuple[str, str]


class Post(NamedTuple):
    """A post and its facts, in order."""

    prompt: str
    facts: tuple[Fact, ...]


def post_split(facts: Sequence[Fact]) -> str:
    """The split of posts with these facts. It does not depend on their order, the seed or fillers: splits are
    disjoint."""
    return splits.assigned_split(repr(sorted(facts)))


def _random_object(rng: np.random.Generator, verb: str) -> str:
    return FACTS[verb][int(rng.integers(len(FACTS[verb])))]


def make_post(rng: np.random.Generator, split: str) -> Post:
    """A random post of a split. It starts with a filler sentence, and no verb occurs twice."""
    while True:
        count = int(rng.integers(MIN_FACTS, MAX_FACTS + 1))
        facts = tuple((verb, _random_object(rng, verb)) for verb in rng.permutation(list(FACTS))[:count].tolist())
        if post_split(facts) == split:
            break
    opening, *fillers = rng.permutation(FILLERS)[: int(rng.integers(1, MAX_FILLERS + 1))].tolist()
    sentences = [f"i {verb} {obj}" for verb, obj in facts]
    for sentence in fillers:
        sentences.insert(int(rng.integers(len(sentences) + 1)), sentence)
    post = " ".join(sentence + "." for sentence in (opening, *sentences))
    subreddit, title = SUBREDDITS[int(rng.integers(len(SUBREDDITS)))], TITLES[int(rng.integers(len(TITLES)))]
    return Post(format_post(subreddit, title, post), facts)


def make_summary(rng: np.random.Generator, facts: Sequence[Fact], drop_rate: float, invent_rate: float) -> str:
    """A completion, which starts with a space.

    Each fact of the post is dropped with probability `drop_rate`. Each kept fact is replaced with probability
    `invent_rate` by an invented one: its verb with another object in WRONG_OBJECT_SHARE of the cases, otherwise a verb
    that is not in the post. A completion has at least one fact, and no verb twice.
    """
    dropped = rng.random(len(facts)) < drop_rate
    if dropped.all():
        dropped[int(rng.integers(len(facts)))] = False
    true_objects = dict(facts)
    unused_verbs = [verb for verb in rng.permutation(list(FACTS)).tolist() if verb not in true_objects]
    summary: dict[str, str] = {}
    for (verb, obj), drop in zip(facts, dropped, strict=True):
        if drop:
            continue
        if rng.random() < invent_rate:
            verb = unused_verbs.pop() if unused_verbs and rng.random() >= WRONG_OBJECT_SHARE else verb
            while (obj := _random_object(rng, verb)) == true_objects.get(verb):
                pass
        summary[verb] = obj
    return " " + "; ".join(f"{verb} {summary[verb]}" for verb in FACTS if verb in summary)


def _parse_fact(words: list[str]) -> Fact | None:
    return (words[0], words[1]) if len(words) == 2 and words[1] in FACTS.get(words[0], ()) else None


def parse_facts(prompt: str) -> tuple[Fact, ...]:
    """The facts in a post, parsed from its text."""
    parts = parse_post(prompt)
    if parts is None:
        raise UserError(
            f"the gold reward needs posts in the TL;DR template (SUBREDDIT, TITLE, POST, TL;DR), not {prompt[:60]!r}"
        )
    return tuple(fact for sentence in parts.post.split(".") if (fact := _parse_fact(sentence.split()[1:])) is not None)


class FactCounts(NamedTuple):
    """The counts in one completion that make up its gold reward."""

    kept: int
    invented: int
    excess_words: int

    @property
    def reward(self) -> float:
        return self.kept - self.invented - WORD_COST * self.excess_words


def count_facts(prompt: str, completion: str) -> FactCounts:
    """Counts of one completion: facts of the post, distinct invented facts, and words that are not part of a kept
    fact, including those of invented, repeated and malformed facts."""
    facts = set(parse_facts(prompt))
    claimed = {fact for part in completion.split(";") if (fact := _parse_fact(part.split())) is not None}
    usable_count = len(claimed & facts)
    words = len(re.findall(r"[^\s;]+", completion))
    return FactCounts(usable_count, len(claimed) - usable_count, words - 2 * usable_count)


def gold_reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The exact reward of each completion, computed from the two texts alone: + 1 for a kept fact, - 1 for an invented
    one, - WORD_COST for every word that is not part of a kept fact."""
    if len(prompts) != len(completions):
        raise UserError(f"gold_reward got {len(prompts)} prompts but {len(completions)} completions")
    return [count_facts(prompt, completion).reward for prompt, completion in zip(prompts, completions, strict=True)]


def _posts(kind: Kind, split: str, seed: int) -> Iterator[tuple[np.random.Generator, Post]]:
    """Infinite posts of a split, each with a random generator for its completions. Row n does not depend on the number
    of rows; prompts and demonstrations share posts."""
    row = 0
    while True:
        rng = np.random.default_rng([seed, splits.SPLITS.index(split), _SEED_STREAMS[kind], row])
        yield rng, make_post(rng, split)
        row += 1


def prompts(size: int, *, split: str = "train", seed: int = 0) -> list[dict[str, str]]:
    """Rows {"prompt"}, with the posts of `demonstrations` of the same split and seed."""
    return [{"prompt": post.prompt} for _, (_, post) in zip(range(size), _posts("prompts", split, seed), strict=False)]


def demonstrations(size: int, *, split: str = "train", seed: int = 0) -> list[dict[str, str]]:
    """Rows {"prompt", "completion"}, with summaries that drop facts at DROP_RATE and invent them at INVENT_RATE."""
    rows = zip(range(size), _posts("demonstrations", split, seed), strict=False)
    return [
        {"prompt": post.prompt, "completion": make_summary(rng, post.facts, DROP_RATE, INVENT_RATE)}
        for _, (rng, post) in rows
    ]


def _maybe_repeat(rng: np.random.Generator, summary: str) -> str:
    """The summary, in REPETITION_SHARE of the cases with 1 to 3 of its facts repeated. Without such pairs a reward
    model rewards length, which PPO exploits."""
    if rng.random() >= REPETITION_SHARE:
        return summary
    parts = summary.split(";")
    repeated = [parts[int(i)] for i in rng.integers(len(parts), size=int(rng.integers(1, 4)))]
    return ";".join([*parts, *(" " + part.strip() for part in repeated)])


def preference_pairs(size: int, *, split: str = "train", seed: int = 0) -> list[dict[str, str]]:
    """Rows {"prompt", "chosen", "rejected"}: two different summaries with random drop and invent rates, labelled by
    Bradley-Terry: the first is chosen with probability sigmoid(LABEL_SHARPNESS * difference of gold
    rewards)."""
    rows = []
    for _, (rng, post) in zip(range(size), _posts("pairs", split, seed), strict=False):
        first = second = ""
        while first == second:
            rates = rng.random((2, 2)) * (0.7, 0.6)
            first, second = (_maybe_repeat(rng, make_summary(rng, post.facts, *pair)) for pair in rates)
        first_reward, second_reward = gold_reward([post.prompt] * 2, [first, second])
        # sigmoid(x) = (1 + tanh(x / 2)) / 2, without overflow
        if rng.random() >= 0.5 + 0.5 * np.tanh(LABEL_SHARPNESS * (first_reward - second_reward) / 2):
            first, second = second, first
        rows.append({"prompt": post.prompt, "chosen": first, "rejected": second})
    return rows


_MAKERS = {"prompts": prompts, "demonstrations": demonstrations, "pairs": preference_pairs}


def load_synthetic(kind: Kind, split: str = "train", size: int | None = None, seed: int = 0):
    """A datasets.Dataset of the synthetic task. Splits (train, validation, test) share no post. Rows are a function of
    the arguments; a smaller size gives the first rows."""
    import datasets

    if split not in SIZES:
        raise MissingSplit("the synthetic data set", split, SIZES)
    if kind not in _MAKERS:
        raise UserError(f"the synthetic data set has no kind {kind!r}; it has {', '.join(_MAKERS)}")
    return datasets.Dataset.from_list(_MAKERS[kind](SIZES[split] if size is None else size, split=split, seed=seed))


_PIECES = r"SUBREDDIT:|TITLE:|POST:|TL;DR:| r/\w+| ?\w+|[.;]|\n\n|\n| "


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """All tokens of the task in a fixed order, eos first."""
    pieces = [EOS, PAD, UNK, "\n\n", "\n", " ", ".", ";", "SUBREDDIT:", "TITLE:", "POST:", "TL;DR:"]
    pieces += [f" r/{name}" for name in SUBREDDITS]
    pieces += [" " + word for verb, objects in FACTS.items() for word in (verb, *objects)]
    pieces += sorted({" " + word for sentence in TITLES + FILLERS for word in sentence.split()})
    return tuple(pieces)


def build_tokenizer():
    """The word-level tokenizer of the task, a PreTrainedTokenizerFast. A word token includes the space before it, so
    that decoding inverts encoding; eos has id 0."""
    return word_level_tokenizer(vocabulary(), _PIECES)

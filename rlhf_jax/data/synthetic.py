"""The built-in synthetic TL;DR: posts with facts in them, demonstrations that err as people do, and an exact reward.

A post tells 2 to 4 facts, each a deed and its detail in a sentence of its own, among filler sentences:

    SUBREDDIT: r/advice

    TITLE: what should i do now

    POST: it was a long day. i lost keys. i do not know why. i met anna. i visited rome.

    TL;DR: met anna; lost keys; visited oslo

A summary lists facts in the order of FACTS with "; " between them; the last one here is invented. A deed occurs once in
a post and every detail belongs to one deed, so a small transformer learns to copy facts within a few hundred updates,
while the gold reward stays exact: it reads the facts back out of the post and needs no labels. Demonstrations drop and
invent facts at the rates below, so a policy that only imitates them leaves much room for one that is rewarded.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from rlhf_jax.data.tldr import format_post, parse_post
from rlhf_jax.errors import UserError

Kind = Literal["prompts", "demonstrations", "pairs"]

FACTS = {
    "met": tuple("anna omar lena igor maya noah ruth juan".split()),
    "lost": tuple("keys tickets shoes plates books lamps coins photos".split()),
    "visited": tuple("rome oslo cairo lima paris delhi seoul quito".split()),
    "felt": tuple("sad angry proud tired lonely scared happy calm".split()),
    "ate": tuple("soup bread cheese apples rice beans eggs cake".split()),
    "paid": tuple("ten twenty thirty forty fifty sixty seventy nothing".split()),
}
"""Deeds and the details that each may have."""
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
"""Probability that a demonstration leaves a fact out; where it would leave out all, one stays."""
INVENT_RATE = 0.3
"""Share of the facts that demonstrations tell which are invented."""
WRONG_DETAIL_SHARE = 0.2
"""Share of the invented facts that are a deed of the post with another detail; the others are other deeds."""
WORD_COST = 0.25
"""What the gold reward takes off for each word that is not part of a kept fact."""
LABEL_SHARPNESS = 6.0
"""Preference labels follow sigmoid(sharpness * difference of gold rewards)."""
RAMBLING_SHARE = 0.3
"""Share of the summaries in preference pairs that repeat themselves."""
SIZES = {"train": 16384, "validation": 2048, "test": 2048}
"""Rows of each split when no size is asked for."""

_SHARES = {"train": range(0, 8), "validation": range(8, 9), "test": range(9, 10)}
_STREAMS = {"prompts": 0, "demonstrations": 0, "pairs": 1}

Fact = tuple[str, str]


class Post(NamedTuple):
    """A post and the facts in it, in their order."""

    prompt: str
    facts: tuple[Fact, ...]


def split_of(facts: Sequence[Fact]) -> str:
    """The split that posts with these facts belong to, whatever their order, seed or filler: splits are disjoint."""
    share = zlib.crc32(repr(sorted(facts)).encode()) % 10
    return next(name for name, shares in _SHARES.items() if share in shares)


def _detail(rng: np.random.Generator, deed: str) -> str:
    return FACTS[deed][int(rng.integers(len(FACTS[deed])))]


def make_post(rng: np.random.Generator, split: str) -> Post:
    """One post of a split: no deed occurs twice, and a filler sentence opens it."""
    while True:
        count = int(rng.integers(MIN_FACTS, MAX_FACTS + 1))
        facts = tuple((deed, _detail(rng, deed)) for deed in rng.permutation(list(FACTS))[:count].tolist())
        if split_of(facts) == split:
            break
    opening, *others = rng.permutation(FILLERS)[: int(rng.integers(1, MAX_FILLERS + 1))].tolist()
    sentences = [f"i {deed} {detail}" for deed, detail in facts]
    for sentence in others:
        sentences.insert(int(rng.integers(len(sentences) + 1)), sentence)
    post = " ".join(sentence + "." for sentence in (opening, *sentences))
    subreddit, title = SUBREDDITS[int(rng.integers(len(SUBREDDITS)))], TITLES[int(rng.integers(len(TITLES)))]
    return Post(format_post(subreddit, title, post), facts)


def make_summary(rng: np.random.Generator, facts: Sequence[Fact], drop_rate: float, invent_rate: float) -> str:
    """A completion (it begins with a space). Each fact of the post is left out with probability `drop_rate`; each that
    is told gives way, with probability `invent_rate`, to an invented one: its own deed with another detail in
    WRONG_DETAIL_SHARE of the cases, else a deed that is not in the post. At least one fact is told, no deed twice."""
    dropped = rng.random(len(facts)) < drop_rate
    if dropped.all():
        dropped[int(rng.integers(len(facts)))] = False
    truth = dict(facts)
    absent = [deed for deed in rng.permutation(list(FACTS)).tolist() if deed not in truth]
    told: dict[str, str] = {}
    for (deed, detail), drop in zip(facts, dropped, strict=True):
        if drop:
            continue
        if rng.random() < invent_rate:
            deed = absent.pop() if absent and rng.random() >= WRONG_DETAIL_SHARE else deed
            while (detail := _detail(rng, deed)) == truth.get(deed):
                pass
        told[deed] = detail
    return " " + "; ".join(f"{deed} {told[deed]}" for deed in FACTS if deed in told)


def _fact(words: list[str]) -> Fact | None:
    return (words[0], words[1]) if len(words) == 2 and words[1] in FACTS.get(words[0], ()) else None


def facts_of(prompt: str) -> tuple[Fact, ...]:
    """The facts in a post, read from its text."""
    parts = parse_post(prompt)
    if parts is None:
        raise UserError(
            f"the gold reward reads posts in the TL;DR template (SUBREDDIT, TITLE, POST, TL;DR), not {prompt[:60]!r}"
        )
    return tuple(fact for sentence in parts.post.split(".") if (fact := _fact(sentence.split()[1:])) is not None)


class Judgement(NamedTuple):
    """What the gold reward counts in one completion."""

    kept: int
    invented: int
    needless_words: int

    @property
    def reward(self) -> float:
        return self.kept - self.invented - WORD_COST * self.needless_words


def judge(prompt: str, completion: str) -> Judgement:
    """Counts of one completion: facts of the post that it tells, distinct facts that it makes up, and words beyond
    those of kept facts (invented, repeated and malformed facts are needless words too)."""
    facts = set(facts_of(prompt))
    told = {fact for part in completion.split(";") if (fact := _fact(part.split())) is not None}
    kept = len(told & facts)
    words = len(re.findall(r"[^\s;]+", completion))
    return Judgement(kept, len(told) - kept, words - 2 * kept)


def gold_reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The exact reward of each completion: + 1 for a fact kept, - 1 for a fact invented, - WORD_COST for every word
    that is not part of a kept fact. It knows nothing but the two texts."""
    if len(prompts) != len(completions):
        raise UserError(f"gold_reward got {len(prompts)} prompts but {len(completions)} completions")
    return [judge(prompt, completion).reward for prompt, completion in zip(prompts, completions, strict=True)]


def _posts(kind: Kind, split: str, seed: int) -> Iterator[tuple[np.random.Generator, Post]]:
    """Endless posts of a split, each with the generator for what is written about it. Row n does not depend on how
    many rows are asked for; prompts are those of the demonstrations."""
    row = 0
    while True:
        rng = np.random.default_rng([seed, list(_SHARES).index(split), _STREAMS[kind], row])
        yield rng, make_post(rng, split)
        row += 1


def prompts(size: int, *, split: str = "train", seed: int = 0) -> list[dict[str, str]]:
    """Rows {"prompt"}; the same posts as `demonstrations` of the same split and seed."""
    return [{"prompt": post.prompt} for _, (_, post) in zip(range(size), _posts("prompts", split, seed), strict=False)]


def demonstrations(
    size: int,
    *,
    split: str = "train",
    seed: int = 0,
    drop_rate: float = DROP_RATE,
    invent_rate: float = INVENT_RATE,
) -> list[dict[str, str]]:
    """Rows {"prompt", "completion"}: summaries that drop and invent facts at the stated rates."""
    rows = zip(range(size), _posts("demonstrations", split, seed), strict=False)
    return [
        {"prompt": post.prompt, "completion": make_summary(rng, post.facts, drop_rate, invent_rate)}
        for _, (rng, post) in rows
    ]


def _rambling(rng: np.random.Generator, summary: str) -> str:
    """The summary, in RAMBLING_SHARE of the cases with 1 to 3 of its facts told once more. Without such pairs a learned
    reward takes length for content, and PPO finds out."""
    if rng.random() >= RAMBLING_SHARE:
        return summary
    told = summary.split(";")
    again = [told[int(i)] for i in rng.integers(len(told), size=int(rng.integers(1, 4)))]
    return ";".join([*told, *(" " + part.strip() for part in again)])


def preference_pairs(
    size: int, *, split: str = "train", seed: int = 0, sharpness: float = LABEL_SHARPNESS
) -> list[dict[str, str]]:
    """Rows {"prompt", "chosen", "rejected"}: two different summaries, each at drop and invent rates of its own, the
    first preferred with the Bradley-Terry probability sigmoid(sharpness * (gold reward - gold reward))."""
    rows = []
    for _, (rng, post) in zip(range(size), _posts("pairs", split, seed), strict=False):
        first = second = ""
        while first == second:
            rates = rng.random((2, 2)) * (0.7, 0.6)
            first, second = (_rambling(rng, make_summary(rng, post.facts, *pair)) for pair in rates)
        better, worse = gold_reward([post.prompt] * 2, [first, second])
        if rng.random() >= 0.5 + 0.5 * np.tanh(sharpness * (better - worse) / 2):  # the sigmoid, without overflow
            first, second = second, first
        rows.append({"prompt": post.prompt, "chosen": first, "rejected": second})
    return rows


_MAKERS = {"prompts": prompts, "demonstrations": demonstrations, "pairs": preference_pairs}


def load_synthetic(kind: Kind, split: str = "train", size: int | None = None, seed: int = 0):
    """A datasets.Dataset of the synthetic task. Splits (train, validation, test) never share a post; the same
    arguments give the same rows, and a smaller size the first of them."""
    import datasets

    if split not in SIZES:
        raise UserError(f"the synthetic data set has no split {split!r}; it has {', '.join(SIZES)}")
    if kind not in _MAKERS:
        raise UserError(f"the synthetic data set has no kind {kind!r}; it has {', '.join(_MAKERS)}")
    return datasets.Dataset.from_list(_MAKERS[kind](SIZES[split] if size is None else size, split=split, seed=seed))


EOS, PAD, UNK = "<|endoftext|>", "[PAD]", "[UNK]"
_PIECES = r"SUBREDDIT:|TITLE:|POST:|TL;DR:| r/\w+| ?\w+|[.;]|\n\n|\n| "


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """Every piece of the language, eos first, in a fixed order."""
    pieces = [EOS, PAD, UNK, "\n\n", "\n", " ", ".", ";", "SUBREDDIT:", "TITLE:", "POST:", "TL;DR:"]
    pieces += [f" r/{name}" for name in SUBREDDITS]
    pieces += [" " + word for deed, details in FACTS.items() for word in (deed, *details)]
    pieces += sorted({" " + word for sentence in TITLES + FILLERS for word in sentence.split()})
    return tuple(pieces)


def build_tokenizer():
    """The task's own word-level tokenizer, a PreTrainedTokenizerFast: a word carries the space before it, so decoding
    gives the text back exactly; eos has id 0."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from rlhf_jax.data.fast_tokenizer import fast_tokenizer

    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary())}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return fast_tokenizer()(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )

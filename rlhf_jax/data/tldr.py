"""The TL;DR template, and OpenAI's truncation of posts that are too long."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

_MAX_MISSES = 16
_MAX_EXCESS = 16

EncodeBatch = Callable[[Sequence[str]], list[list[int]]]


class PostParts(NamedTuple):
    """The fields of the template."""

    subreddit: str
    title: str
    post: str


def format_post(subreddit: str, title: str, post: str) -> str:
    """The prompt of a post. No space follows "TL;DR:", since completions start with one (N+ details 2.1 and 2.3)."""
    return f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"


def parse_post(prompt: str) -> PostParts | None:
    """The fields of a prompt, so that `format_post` restores the prompt; None if it does not follow the template."""
    # Not a regular expression, whose backtracking takes hours on a prompt of 1 MB with many titles and posts.
    start, end = "SUBREDDIT: r/", "\n\nTL;DR:"
    if not prompt.startswith(start) or not prompt.endswith(end):
        return None
    subreddit, title_mark, rest = prompt[len(start) :].partition("\n\nTITLE: ")
    title, post_mark, rest = rest.partition("\n\nPOST: ")
    return (
        PostParts(subreddit, title, rest.removesuffix(end)) if title_mark and post_mark and rest.endswith(end) else None
    )


Cut = tuple[list[int], str]
"""The ids of a truncated prompt, and its text."""
Search = Generator[list[str], list[list[int]], Cut | None]
"""Yields texts and is sent the ids of each; returns what it looked for."""


def _search(parts: PostParts, max_tokens: int) -> Search:
    """The truncation of one post, asking for ids."""
    post = parts.post

    def texts(lengths: Sequence[int]) -> list[str]:
        return [format_post(parts.subreddit, parts.title, post[:length]) for length in lengths]

    newlines = [i for i, character in enumerate(post) if character == "\n"]
    first = newlines[0] if newlines else len(post)
    cuts = [*range(first), *newlines, len(post)]
    ends = yield texts([0, len(post)])
    if len(ends[1]) <= max_tokens:
        return ends[1], format_post(*parts)
    low, high, longest = 0, len(cuts) - 1, None  # cuts[low - 1] fits, cuts[high] does not
    below, beyond = (0, len(ends[0])), (len(post), len(ends[1]))  # characters and tokens at the two ends
    shrinks = True
    while low < high:
        middle = (low + high) // 2
        if shrinks:  # tokens grow nearly linearly with characters
            share = (max_tokens - below[1]) / max(1, beyond[1] - below[1])
            middle = bisect.bisect_right(cuts, below[0] + share * (beyond[0] - below[0]), low, high) - 1
            middle = min(max(middle, low), high - 1)
        size = high - low
        (ids,) = yield texts([cuts[middle]])
        if len(ids) <= max_tokens:
            low, longest, below = middle + 1, ids, (cuts[middle], len(ids))
        else:
            high, beyond = middle, (cuts[middle], len(ids))
        shrinks = high - low <= size // 2
    best, above, excess = low - 1, low + 1, beyond[1] - max_tokens
    while above < len(cuts) and above - best <= _MAX_MISSES and excess <= _MAX_EXCESS:
        longer = cuts[above : best + _MAX_MISSES + 1]
        counts = []
        for place, ids in enumerate((yield texts(longer)), above):
            counts.append(len(ids))
            if len(ids) <= max_tokens:
                best, longest = place, ids
        above, excess = above + len(longer), max(counts) - max_tokens
    return None if longest is None else (longest, *texts([cuts[best]]))


def truncate_posts(posts: Sequence[PostParts], encode_batch: EncodeBatch, max_tokens: int) -> list[Cut | None]:
    """OpenAI's truncation (N+ `process_query`) of each post: while the formatted post has more than `max_tokens`
    tokens, cut it before its last newline, or without one drop its last character, and tokenize again.

    All candidates are prefixes of the post, so interpolation finds the longest that fits. Tokens are not quite
    monotonic in the prefix length, since cutting a word can add a few; so longer candidates are tried too, until
    `_MAX_MISSES` in a row are too long, or one is by more than `_MAX_EXCESS` tokens. Each call of `encode_batch` has
    candidates of all posts, so that the tokenizer's threads share them.

    Args:
      encode_batch: texts -> the ids of each, no special tokens.
      max_tokens: maximum number of ids.

    Returns:
      The ids and the text of each post, or None where even an empty post is too long.
    """
    cuts: list[Cut | None] = [None] * len(posts)
    searches = {i: _search(post, max_tokens) for i, post in enumerate(posts)}
    asked = {i: next(search) for i, search in searches.items()}
    while asked:
        ids = iter(encode_batch([text for texts in asked.values() for text in texts]))
        answers = {i: [next(ids) for _ in texts] for i, texts in asked.items()}
        for i, answer in answers.items():
            try:
                asked[i] = searches[i].send(answer)
            except StopIteration as end:
                cuts[i] = end.value
                del asked[i]
    return cuts


def fit_prompts(
    prompts: Sequence[str], encode_batch: EncodeBatch, ids: Sequence[list[int]], max_tokens: int
) -> list[tuple[list[int], str | None] | None]:
    """Truncates the ids of prompts: `truncate_posts` for a post in the template, otherwise the last `max_tokens` ids,
    for which there is no text. None if the template alone is too long."""
    fitted: list[tuple[list[int], str | None] | None] = [
        (prompt_ids, text) if len(prompt_ids) <= max_tokens else (prompt_ids[-max_tokens:], None)
        for prompt_ids, text in zip(ids, prompts, strict=True)
    ]
    long = {i: parse_post(prompts[i]) for i, prompt_ids in enumerate(ids) if len(prompt_ids) > max_tokens}
    posts = {i: parts for i, parts in long.items() if parts is not None}
    for i, cut in zip(posts, truncate_posts([*posts.values()], encode_batch, max_tokens), strict=True):
        fitted[i] = cut
    return fitted

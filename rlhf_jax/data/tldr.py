"""The TL;DR template, and OpenAI's truncation of posts that are too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

_MAX_MISSES = 16

Encode = Callable[[str], list[int]]


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


def truncate_post(parts: PostParts, encode: Encode, max_tokens: int) -> list[int] | None:
    """OpenAI's truncation (N+ `process_query`): while the formatted post has more than `max_tokens` tokens, cut it
    before its last newline, or without one drop its last character, and tokenize again.

    All candidates are prefixes of the post, so bisection finds the longest that fits. Tokens are not quite monotonic in
    the prefix length, since cutting a word can add a few; so longer candidates are tried too, until `_MAX_MISSES` in a
    row are too long.

    Args:
      parts: the post.
      encode: text -> ids, no special tokens.
      max_tokens: maximum number of ids.

    Returns:
      The ids, or None if even an empty post is too long.
    """
    post = parts.post

    def ids_of(length: int) -> list[int]:
        return encode(format_post(parts.subreddit, parts.title, post[:length]))

    newlines = [i for i, character in enumerate(post) if character == "\n"]
    first = newlines[0] if newlines else len(post)
    cuts = [*range(first), *newlines, len(post)]
    low, high = 0, len(cuts)  # cuts[low - 1] fits, cuts[high] does not
    while low < high:
        middle = (low + high) // 2
        if len(ids_of(cuts[middle])) <= max_tokens:
            low = middle + 1
        else:
            high = middle
    best, above = low - 1, low
    while above < len(cuts) and above - best <= _MAX_MISSES:
        if len(ids_of(cuts[above])) <= max_tokens:
            best = above
        above += 1
    return ids_of(cuts[best]) if best >= 0 else None


def fit_prompt(prompt: str, encode: Encode, ids: list[int], max_tokens: int) -> list[int] | None:
    """Truncates the ids of a prompt: `truncate_post` for a post in the template, otherwise the last `max_tokens` ids.
    None if the template alone is too long."""
    if len(ids) <= max_tokens:
        return ids
    parts = parse_post(prompt)
    return ids[-max_tokens:] if parts is None else truncate_post(parts, encode, max_tokens)

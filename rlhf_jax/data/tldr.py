"""The TL;DR template, by one formatter for every data set, and OpenAI's truncation of posts that are too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

_LOOK_ABOVE = 16

Encode = Callable[[str], list[int]]


class PostParts(NamedTuple):
    """What the template is filled with."""

    subreddit: str
    title: str
    post: str


def format_post(subreddit: str, title: str, post: str) -> str:
    """The prompt of a post. No space follows "TL;DR:": the completion begins with one (N+ details 2.1 and 2.3)."""
    return f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"


def parse_post(prompt: str) -> PostParts | None:
    """The parts of a prompt in the template, such that `format_post` gives the prompt back; None in any other form."""
    # By hand, once through the text: a regular expression tries every title with every post, for hours where there are
    # many in a prompt of 1 MB.
    start, end = "SUBREDDIT: r/", "\n\nTL;DR:"
    if not prompt.startswith(start) or not prompt.endswith(end):
        return None
    subreddit, title_mark, rest = prompt[len(start) :].partition("\n\nTITLE: ")
    title, post_mark, rest = rest.partition("\n\nPOST: ")
    return (
        PostParts(subreddit, title, rest.removesuffix(end)) if title_mark and post_mark and rest.endswith(end) else None
    )


def truncate_post(parts: PostParts, encode: Encode, max_tokens: int) -> list[int] | None:
    """OpenAI's truncation (N+ `process_query`): while the formatted post has more than `max_tokens` tokens, cut it just
    before its last newline, or, where it has none, drop one character; format and tokenise anew each time.

    Every cut is a shorter beginning of the post, so the first that fits is found by bisection. The count of tokens can
    rise by a few when a word loses its end; so the cuts just above are tried too, until `_LOOK_ABOVE` in a row fail.

    Args:
      parts: the post.
      encode: text -> ids, no special tokens.
      max_tokens: at most so many ids.

    Returns:
      The ids, or None when not even an empty post fits.
    """
    post = parts.post

    def ids_of(length: int) -> list[int]:
        return encode(format_post(parts.subreddit, parts.title, post[:length]))

    newlines = [i for i, character in enumerate(post) if character == "\n"]
    first = newlines[0] if newlines else len(post)
    cuts = [*range(first), *newlines, len(post)]
    low, high = 0, len(cuts)  # cuts[low - 1] fits (as far as seen), cuts[high] does not
    while low < high:
        middle = (low + high) // 2
        if len(ids_of(cuts[middle])) <= max_tokens:
            low = middle + 1
        else:
            high = middle
    best, above = low - 1, low
    while above < len(cuts) and above - best <= _LOOK_ABOVE:
        if len(ids_of(cuts[above])) <= max_tokens:
            best = above
        above += 1
    return ids_of(cuts[best]) if best >= 0 else None


def fit_prompt(prompt: str, encode: Encode, ids: list[int], max_tokens: int) -> list[int] | None:
    """Makes the ids of a prompt fit: a post in the template by `truncate_post`, any other prompt by leaving out its
    first tokens. None when the template alone is too long."""
    if len(ids) <= max_tokens:
        return ids
    parts = parse_post(prompt)
    return ids[-max_tokens:] if parts is None else truncate_post(parts, encode, max_tokens)

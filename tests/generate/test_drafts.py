"""Drafts: what followed the last two tokens before."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.generate.drafts import NGRAM, ngram_drafts

draft = jax.jit(ngram_drafts, static_argnames="count")
COLUMNS, TOKENS, GROUP, COUNT = 4, 8, 3, 3


def drafts_of(prompt, own, siblings=(), count=COUNT):
    """Drafts of one row, all tokens given as lists."""
    texts = [own, *siblings, *[[]] * (GROUP - 1 - len(siblings))]
    rows = np.array([text + [-9] * (TOKENS - len(text)) for text in texts], np.int32)
    prompt = np.array([[-5] * (COLUMNS - len(prompt)) + prompt], np.int32)
    lengths = np.array([[len(text) for text in texts]], np.int32)
    return draft(prompt, rows[:1], rows[None], lengths, lengths[:, 0], count=count)[0].tolist()


def test_a_draft_is_what_followed_the_last_two_tokens():
    assert drafts_of([1, 2], [3, 4, 5, 6, 3, 4]) == [5, 6, 3]


def test_of_several_places_it_takes_the_last():
    assert drafts_of([1, 2], [3, 4, 5, 3, 4, 6, 3, 4]) == [6, 3, 4]


def test_it_finds_the_prompt_and_the_border_to_the_response():
    assert drafts_of([7, 1, 2, 8], [9, 1, 2]) == [8, 9, 1]
    assert drafts_of([3, 7], [8, 9, 7, 8]) == [9, 7, 8]


def test_the_last_two_tokens_are_no_occurrence_of_themselves():
    # Three equal tokens: the pair before the last, followed by the last token.
    assert drafts_of([1, 2], [4, 4, 4])[0] == 4
    # In the prompt (1, 2) occurs with nothing after it but the row's own text.
    assert drafts_of([1, 2], [5, 1, 2])[:3] == [5, 1, 2]


def test_siblings_answer_where_the_row_has_no_occurrence_and_only_then():
    assert drafts_of([1, 2], [3, 4], [[9, 3, 4, 8, 7, 6]]) == [8, 7, 6]
    assert drafts_of([1, 2], [3, 4, 5, 3, 4], [[9, 3, 4, 8, 7, 6]]) == [5, 3, 4]
    # The last tokens of a sibling have nothing after them yet; of two siblings the last answers.
    assert drafts_of([1, 2], [3, 4], [[3, 4, 5, 6, 7], [8, 3, 4]]) == [5, 6, 7]
    assert drafts_of([1, 2], [3, 4], [[3, 4, 5, 6, 7], [3, 4, 8, 9, 9]]) == [8, 9, 9]


def reference(prompt, own, siblings):
    """The same by loops; None: no occurrence."""
    text = prompt + own
    for end in range(len(text) - 1, NGRAM - 1, -1):
        if text[end - NGRAM : end] == text[-NGRAM:]:
            return text[end : end + COUNT]
    for sibling in [own, *siblings][::-1]:
        for end in range(len(sibling) - 1, NGRAM - 1, -1):
            if sibling[end - NGRAM : end] == text[-NGRAM:]:
                return sibling[end : end + COUNT]
    return None


words = st.lists(st.integers(1, 3), min_size=1, max_size=TOKENS)


@given(prompt=st.lists(st.integers(1, 3), min_size=1, max_size=COLUMNS), own=words, siblings=st.tuples(words, words))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_drafts_equal_a_search_by_loops(prompt, own, siblings):
    found, wanted = drafts_of(prompt, own, list(siblings)), reference(prompt, own, siblings)
    if wanted is not None:
        assert found[: len(wanted)] == wanted

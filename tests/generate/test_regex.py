"""Regular expressions as automata over bytes: what Python's `re` matches, and nothing else."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.errors import UserError
from rlhf_jax.generate.regex import compile_regex

ALPHABET = "ab1_ -.\n\tAé\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff"
pieces = st.sampled_from(
    ["a", "b", "1", " ", "é", "\U00010000", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\.", "[ab]", "[^a]"]
    + [r"[^\W\d]", "[a-z]", "[é-\uffff]", r"[\da-b-]", "[^\u0800-\U00010000]", "ab", "(?:)", r"\n"]
)


def grown(inner):
    repeated = st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?", "{1,2}?"]))
    return st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        repeated.map(lambda part: f"(?:{part[0]}){part[1]}"),
        inner.map(lambda part: f"({part})"),
    )


patterns = st.recursive(pieces, grown, max_leaves=6)


def agrees(pattern: str, text: str) -> bool:
    return compile_regex(pattern).matches(text.encode()) == bool(re.fullmatch(pattern, text, re.ASCII))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dot_all=st.booleans(), pattern=patterns)
def test_an_automaton_accepts_what_re_matches(data, dot_all, pattern):
    pattern = f"(?s){pattern}" if dot_all else pattern
    text = st.one_of(st.text(ALPHABET, max_size=6), st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    assert agrees(pattern, data.draw(text))


@pytest.mark.parametrize(
    "pattern", ["^a+$", r"\Aa\Z", "^(yes|no)$", "", "a|", "(?x) a b # and\n", "[]a]", r"(?s:.)b", "(?P<x>a)"]
)
@pytest.mark.parametrize("text", ["", "a", "aa", "yes", "ab", "]", "\nb", "a\n"])
def test_anchors_flags_and_empty_expressions(pattern, text):
    assert agrees(pattern, text)


@pytest.mark.parametrize("pattern", [".", "[^a]", r"\W", "[\u0080-\U0010ffff]"])
def test_every_byte_of_a_character_counts(pattern):
    automaton = compile_regex(pattern)
    for number in [*range(0x900), *range(0xD000, 0xD800), *range(0xE000, 0x11000, 7), 0x10FFFF]:
        text = chr(number)
        assert automaton.matches(text.encode()) == bool(re.fullmatch(pattern, text, re.ASCII)), hex(number)
    for wrong in (b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\xc3", b"\x80"):
        assert not automaton.matches(wrong), wrong  # no UTF-8


@pytest.mark.parametrize(
    "pattern, says",
    [
        ("(", "is no regular expression: missing )"),
        ("[z-a]", "is no regular expression: bad character range z-a"),
        ("a**", "is no regular expression: multiple repeat"),
        ("(?i)a", "has the flag IGNORECASE"),
        ("(?i:a)", "has the flag IGNORECASE"),
        (r"\ba", "has an anchor or a word boundary"),
        ("a^b", "has an anchor or a word boundary"),
        ("(?=a)b", "has a look-around (?=...)"),
        ("(?<!a)b", "has a look-around (?!...)"),
        (r"(a)\1", r"has a back-reference \1"),
        ("(a)?(?(1)b|c)", "has a conditional group"),
        ("(?>a)", "has an atomic group"),
        ("a++", "has a possessive quantifier"),
        ("(?:.{1000}){1000}", "is too large: use smaller counts"),
        ("(a|b)*a(a|b){20}", "has more than 20,000 states"),
        ("(" * 5000 + ")" * 5000, "is no regular expression"),
    ],
)
def test_what_an_automaton_cannot_follow_is_named(pattern, says):
    with pytest.raises(UserError) as error:
        compile_regex(pattern)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "pattern, states",
    [("yes|no", 5), (".{1,300}", 2401), (r"\\boxed\{[^{}]+\}", 24), (r"[A-Z][a-z]*( [a-z]+){4,19}\.", 41), ("a*", 1)],
)
def test_automata_are_small(pattern, states):
    assert len(compile_regex(pattern).accepting) == states

"""One formatter, and OpenAI's truncation."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_jax import data
from rlhf_jax.data import synthetic, tldr
from rlhf_jax.data.tokenizer import Tokenizer as Wrapped
from tests.helpers.made_data import make_demonstrations, make_pairs, make_prompts

WORDS = "we went home because nobody could agree on anything at all yesterday evening then it rained".split()


@pytest.fixture(scope="module")
def bpe():
    """A small byte-level BPE, whose counts do not always fall when a word loses its end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(
        [" ".join(WORDS)] * 20 + ["SUBREDDIT: r/a\n\nTITLE: b\n\nPOST: c\n\nTL;DR:"] * 20, trainer
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    return Wrapped(hf=hf, name="bpe", pad_id=0, eos_id=0, vocab_size=len(hf))


def literally(parts, encode, limit):
    """N+ process_query, word for word: cut at the last newline, else drop a character, tokenise again."""
    subreddit, title, post = parts
    ids = encode(tldr.format_post(subreddit, title, post))
    while len(ids) > limit:
        if not post:
            return None
        newline = post.rfind("\n")
        post = post[:newline] if newline >= 0 else post[:-1]
        ids = encode(tldr.format_post(subreddit, title, post))
    return ids


def truncate(parts, encode, limit):
    """`truncate_posts` of one post."""
    return tldr.truncate_posts([parts], lambda texts: [encode(text) for text in texts], limit)[0]


def random_post(rng):
    paragraphs = []
    for _ in range(int(rng.integers(1, 6))):
        paragraphs.append(" ".join(rng.choice(WORDS, int(rng.integers(0, 25)))))
    return tldr.PostParts("advice", "help", rng.choice(["\n", "\n\n", "\n \n"]).join(paragraphs))


def test_truncation_equals_the_literal_algorithm(bpe):
    rng = np.random.default_rng(0)
    cut = 0
    for _ in range(60):
        parts = random_post(rng)
        limit = int(rng.integers(25, 120))
        expected = literally(parts, bpe.encode, limit)
        cut_post = truncate(parts, bpe.encode, limit)
        assert (cut_post and cut_post[0]) == expected
        assert cut_post is None or bpe.encode(cut_post[1]) == expected
        cut += expected is not None and len(expected) < len(bpe.encode(tldr.format_post(*parts)))
    assert cut > 20


def test_posts_are_truncated_together_as_each_by_itself(bpe):
    rng = np.random.default_rng(1)
    posts = [random_post(rng) for _ in range(30)]
    posts.append(tldr.PostParts("advice", " ".join(WORDS * 5), "nothing fits"))
    found = tldr.truncate_posts(posts, bpe.encode_batch, 45)
    assert [own and own[0] for own in found] == [literally(post, bpe.encode, 45) for post in posts]
    assert found[-1] is None
    assert tldr.truncate_posts([], bpe.encode_batch, 45) == []


def test_truncation_without_newline_drops_characters(bpe):
    parts = tldr.PostParts("advice", "help", " ".join(WORDS * 6))
    ids, _ = truncate(parts, bpe.encode, 80)
    assert ids == literally(parts, bpe.encode, 80)
    text = bpe.decode(ids)
    assert text.endswith("\n\nTL;DR:") and parts.post.startswith(tldr.parse_post(text).post)


def test_truncation_keeps_whole_paragraphs(bpe):
    parts = tldr.PostParts("advice", "help", "we went home\nnobody could agree\n" + " ".join(WORDS * 9))
    ids, text = truncate(parts, bpe.encode, 60)
    assert bpe.decode(ids) == text and tldr.parse_post(text).post == "we went home\nnobody could agree"


def test_truncation_is_quick_on_a_very_long_line(bpe):
    calls = 0

    def encode(text):
        nonlocal calls
        calls += 1
        return bpe.encode(text)

    parts = tldr.PostParts("advice", "help", "x" * 50_000)
    assert len(truncate(parts, encode, 100)[0]) <= 100
    assert calls < 60


def test_nothing_fits_beside_a_long_title(bpe):
    parts = tldr.PostParts("advice", " ".join(WORDS * 5), "we went home")
    assert truncate(parts, bpe.encode, 40) is None
    assert literally(parts, bpe.encode, 40) is None


def test_other_prompts_lose_their_beginning(bpe):
    prompt = "Question: " + " ".join(WORDS)
    ids = bpe.encode(prompt)
    assert tldr.fit_prompts([prompt], bpe.encode_batch, [ids], 7) == [(ids[-7:], None)]
    assert tldr.fit_prompts([prompt], bpe.encode_batch, [ids], len(ids)) == [(ids, prompt)]


def test_template_has_no_trailing_space_and_parses_back():
    prompt = data.format_post("pets", "my dog", "one\n\nTITLE: two\n\nPOST: three\n\nTL;DR: four")
    assert prompt.startswith("SUBREDDIT: r/pets\n\nTITLE: my dog\n\nPOST: one") and prompt.endswith("\n\nTL;DR:")
    assert data.format_post(*data.parse_post(prompt)) == prompt
    assert data.parse_post("no template") is None


def test_every_data_set_has_one_formatter():
    tokenizer = data.load_tokenizer("synthetic")
    row = synthetic.demonstrations(1)[0]
    parts = data.parse_post(row["prompt"])._asdict()
    rows = data.load_rows([{**parts, "summary": row["completion"][1:]}])
    made = make_demonstrations(rows, tokenizer)
    whole = make_demonstrations(data.load_rows([row]), tokenizer)
    assert made.fingerprint == whole.fingerprint
    assert make_prompts(rows, tokenizer).prompts == [row["prompt"]]
    pair = {"chosen": " met anna", "rejected": " met omar"}
    from_parts = make_pairs(data.load_rows([{**parts, **pair}]), tokenizer)
    from_prompt = make_pairs(data.load_rows([{"prompt": row["prompt"], **pair}]), tokenizer)
    assert from_parts.fingerprint == from_prompt.fingerprint


def test_truncated_and_dropped_prompts_are_counted(bpe):
    rows = [{"prompt": tldr.format_post("a", "b", " ".join(WORDS * n))} for n in (1, 4, 5)]
    rows.append({"prompt": tldr.format_post("a", " ".join(WORDS * 5), "c")})
    cut = make_prompts(data.load_rows(rows), bpe, query_length=70)
    assert (cut.report.kept, cut.report.truncated, cut.report.dropped) == (3, 2, 1)
    assert "2 truncated" in str(cut.report) and "1 too long, dropped" in str(cut.report)
    assert cut.prompts[0] == rows[0]["prompt"] and cut.prompts[1].endswith("TL;DR:")
    assert bpe.encode(cut.prompts[1]) == cut.tokens[1].tolist()
    dropped = make_prompts(data.load_rows(rows), bpe, query_length=70, query_overflow="drop")
    assert (dropped.report.kept, dropped.report.truncated, dropped.report.dropped) == (1, 0, 3)

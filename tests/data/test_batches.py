"""Batches are pure functions of seed and step; lengths travel with tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import data
from rlhf_jax.data import batches, synthetic
from rlhf_jax.errors import UserError
from tests.helpers.made_data import make_demonstrations, make_pairs, make_prompts


@pytest.fixture(scope="module")
def tokenizer():
    return data.load_tokenizer("synthetic")


@pytest.fixture(scope="module")
def demonstrations():
    return data.load_rows(synthetic.demonstrations(10))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3), st.integers(0, 30))
def test_rows_of_a_step_are_slices_of_epoch_permutations(rows, batch_size, seed, step):
    if rows < batch_size:
        with pytest.raises(UserError, match=f"{rows} usable rows.*batch_size = {batch_size}"):
            batches.rows_of_step(rows, batch_size, seed, step)
        return
    epoch, place = divmod(step, rows // batch_size)
    expected = np.random.default_rng([seed, epoch]).permutation(rows)[place * batch_size :][:batch_size]
    np.testing.assert_array_equal(batches.rows_of_step(rows, batch_size, seed, step), expected)


def test_an_epoch_sees_every_row_once_and_epochs_differ():
    epochs = [np.concatenate([batches.rows_of_step(12, 4, 0, 3 * e + i) for i in range(3)]) for e in range(2)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])


def test_batches_do_not_depend_on_what_was_asked_before(tokenizer, demonstrations):
    made = make_prompts(demonstrations, tokenizer)
    later = made.batch(5, 7, 4)
    for step in range(9):
        made.batch(5, step, 4)
    again, other = made.batch(5, 7, 4), made.batch(6, 7, 4)
    for name in ("tokens", "lengths", "rows"):
        np.testing.assert_array_equal(getattr(later, name), getattr(again, name))
    assert list(other.rows) != list(again.rows)


def test_prompts_are_left_padded_with_lengths_and_rows(tokenizer, demonstrations):
    made = make_prompts(demonstrations, tokenizer)
    batch = made.batch(0, 0, 4)
    assert batch.tokens.dtype == batch.lengths.dtype == batch.rows.dtype == np.int32
    assert batch.tokens.shape == (4, batches.bucket(batch.lengths.max(), made.buckets))
    for tokens, length, text in zip(batch.tokens, batch.lengths, made.texts(batch.rows), strict=True):
        assert tokens[-length:].tolist() == tokenizer.encode(text)
        assert (tokens[:-length] == tokenizer.pad_id).all()
    assert list(made.columns(batch.rows)) == ["completion"]
    rows = list(demonstrations)
    assert made.columns([3, 1])["completion"] == [rows[3]["completion"], rows[1]["completion"]]


def test_evaluation_goes_in_order_and_fills_the_last_batch(tokenizer, demonstrations):
    prompts = make_prompts(demonstrations, tokenizer)
    assert prompts.in_order(8, 4).rows.tolist() == [8, 9, 9, 9]
    demos = make_demonstrations(demonstrations, tokenizer)
    filled = demos.in_order(8, 4)
    assert (filled.lengths[:2] > 0).all() and filled.lengths[2:].tolist() == [0, 0]


def test_a_share_of_a_batch_is_its_rows_at_the_width_of_the_whole(tokenizer, demonstrations):
    pairs = data.load_rows(synthetic.preference_pairs(10))
    for made in (
        make_prompts(demonstrations, tokenizer),
        make_demonstrations(demonstrations, tokenizer),
        make_pairs(pairs, tokenizer),
    ):
        for take in (lambda *here: made.batch(3, 1, 5, *here), lambda *here: made.in_order(7, 5, *here)):  # noqa: B023
            whole = vars(take())
            for here in (np.array([0, 3]), np.array([4]), np.array([1, 2])):
                for name, values in vars(take(here)).items():
                    if values is None:  # demonstrations of text have no mask
                        continue
                    of_all = name == "rows"  # numbers of all rows, for whoever scores them
                    np.testing.assert_array_equal(values, whole[name] if of_all else whole[name][here])


def test_demonstrations_are_prompt_completion_eos(tokenizer, demonstrations):
    made = make_demonstrations(demonstrations, tokenizer)
    batch = made.in_order(0, 10)
    for row, tokens, prompt_length, length in zip(
        demonstrations, batch.tokens, batch.prompt_lengths, batch.lengths, strict=True
    ):
        expected = tokenizer.encode(row["prompt"]) + tokenizer.encode(row["completion"]) + [tokenizer.eos_id]
        assert tokens[:length].tolist() == expected and (tokens[length:] == tokenizer.pad_id).all()
        assert prompt_length == len(tokenizer.encode(row["prompt"]))


def test_an_eos_in_the_text_is_not_doubled(tokenizer):
    rows = [{"prompt": "POST: i met anna.", "completion": " met anna<|endoftext|>"}]
    (tokens,) = make_demonstrations(data.load_rows(rows), tokenizer).tokens
    assert tokens.tolist().count(tokenizer.eos_id) == 1 and tokens[-1] == tokenizer.eos_id


def test_long_demonstrations_are_cut_without_a_false_eos_or_dropped(tokenizer):
    rows = data.load_rows(
        [
            {"prompt": "POST: i met anna.", "completion": " met anna; lost keys; felt sad"},  # 5 + 8 + eos
            {"prompt": "POST: i met anna.", "completion": " met anna"},  # 5 + 2 + eos
            {"prompt": "POST: i met anna. i lost keys.", "completion": " met anna"},  # 9 + 2 + eos
        ]
    )
    cut = make_demonstrations(rows, tokenizer, max_length=9)
    assert [len(tokens) for tokens in cut.tokens] == [9, 8]
    assert cut.tokens[0][-1] != tokenizer.eos_id and cut.tokens[1][-1] == tokenizer.eos_id
    assert (cut.report.kept, cut.report.truncated, cut.report.dropped) == (2, 1, 1)
    dropped = make_demonstrations(rows, tokenizer, max_length=9, query_overflow="drop")
    assert (dropped.report.kept, dropped.report.truncated, dropped.report.dropped) == (1, 0, 2)
    with pytest.raises(UserError, match="3 rows.*max_length = 3"):
        make_demonstrations(rows, tokenizer, max_length=3)


def test_pairs_share_a_width_and_carry_margins(tokenizer):
    rows = data.load_rows(
        [
            {"prompt": "POST: i met anna.", "chosen": " met anna", "rejected": " met omar; lost keys", "by": 0.5},
            {"prompt": "POST: i met anna.", "chosen": " met anna", "rejected": " met omar", "by": 2},
        ]
    )
    made = make_pairs(rows, tokenizer, margin_column="by")
    batch = made.in_order(0, 2)
    assert batch.chosen_tokens.shape == batch.rejected_tokens.shape
    assert batch.chosen_lengths.tolist() == [8, 8] and batch.rejected_lengths.tolist() == [11, 8]
    assert batch.margin.tolist() == [0.5, 2.0] and batch.margin.dtype == np.float32
    assert batch.rejected_tokens[0][:11].tolist() == tokenizer.encode(
        rows.table[0]["prompt"] + " met omar; lost keys"
    ) + [0]
    assert make_pairs(rows, tokenizer).in_order(0, 2).margin.tolist() == [0.0, 0.0]
    short = make_pairs(rows, tokenizer, max_length=10)
    assert (short.report.kept, short.report.dropped) == (1, 1)


def test_pairs_of_whole_texts_need_no_prompt_column(tokenizer):
    whole = [{"chosen": "POST: i met anna. met anna", "rejected": "POST: i met anna. met omar"}]
    split = [{"prompt": "POST: i met anna.", "chosen": " met anna", "rejected": " met omar"}]
    made = [make_pairs(data.load_rows(rows), tokenizer) for rows in (whole, split)]
    assert made[0].fingerprint == made[1].fingerprint
    with pytest.raises(UserError, match="no column 'question'.*prompt_column"):
        make_pairs(data.load_rows(whole), tokenizer, prompt_column="question")


def test_buckets():
    assert data.default_buckets(512) == (128, 256, 384, 512)
    assert data.default_buckets(50) == (16, 32, 40, 56)
    assert data.default_buckets(1) == (8,)
    assert data.bucket(129, (384, 256, 128)) == 256
    with pytest.raises(UserError, match="length_buckets.*128.*129"):
        data.bucket(129, (64, 128))


def test_buckets_that_are_too_short_are_refused_at_once(tokenizer, demonstrations):
    with pytest.raises(UserError, match="length_buckets ends at 8"):
        make_prompts(demonstrations, tokenizer, length_buckets=(8,))
    assert make_prompts(demonstrations, tokenizer, length_buckets=(96,)).batch(0, 0, 2).tokens.shape == (2, 96)


def test_a_fingerprint_sees_every_token_and_length():
    one = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    assert data.fingerprint(one) == data.fingerprint([tokens.copy() for tokens in one])
    assert data.fingerprint(one) != data.fingerprint([np.array([1], np.int32), np.array([2, 3], np.int32)])
    assert data.fingerprint(one) != data.fingerprint([one[0], np.array([4], np.int32)])


def test_a_report_is_one_line(tokenizer, demonstrations):
    report = make_prompts(demonstrations, tokenizer).report
    assert "\n" not in str(report) and "10 of 10 rows" in str(report)
    assert report.tokens == sum(len(tokenizer.encode(row["prompt"])) for row in demonstrations)


def test_all_batches_of_prompts_have_one_shape():
    tokenizer = data.load_tokenizer("synthetic")
    made = make_prompts(data.load_rows(synthetic.prompts(40)), tokenizer)
    shapes = {made.batch(0, step, 2).tokens.shape for step in range(20)}
    assert shapes == {(2, data.bucket(made.report.longest, made.buckets))}

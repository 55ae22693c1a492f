"""Packed demonstrations: TRL's rows, the tokens and labels of each demonstration, batches of seed and step."""

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_jax import data
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.demonstrations import DemoData


def demonstrations(lengths, prompts=None, masks=None) -> DemoData:
    """Demonstrations whose tokens are all different."""
    ends = np.cumsum(lengths)
    tokens = [np.arange(end - size, end, dtype=np.int32) for size, end in zip(lengths, ends, strict=True)]
    prompts = np.asarray([0] * len(lengths) if prompts is None else prompts, np.int32)
    report = DataReport("rows", len(lengths), len(lengths), longest=max(lengths), tokens=int(ends[-1]))
    return DemoData(tokens, prompts, 0, (8,), report, masks)


@given(st.integers(1, 12).flatmap(lambda width: st.tuples(st.just(width), st.lists(st.integers(1, width), min_size=1))))
def test_every_sequence_is_in_one_row_that_is_not_too_long_and_no_two_rows_fit_one(case):
    width, lengths = case
    rows = data.best_fit_decreasing(lengths, width)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[index] for index in row) for row in rows)
    assert sizes[-1] <= width
    assert len(sizes) < 2 or sizes[0] + sizes[1] > width


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_trl(seed):
    pack_dataset = pytest.importorskip("trl").data_utils.pack_dataset
    lengths = np.random.default_rng(seed).integers(1, 33, 200)
    packed = data.pack(demonstrations(lengths), 32, False)
    theirs = pack_dataset(datasets.Dataset.from_dict({"input_ids": packed.data.tokens}), 32, "bfd")
    ours = [np.concatenate([packed.data.tokens[i] for i in pack]).tolist() for pack in packed.packs]
    assert ours == theirs["input_ids"]
    assert [[len(packed.data.tokens[i]) for i in pack] for pack in packed.packs] == theirs["seq_lengths"]


def test_a_row_has_the_labels_of_its_demonstrations_and_a_segment_for_each():
    masks = [np.array([1, 1, 0, 1, 1], bool), np.array([1, 0, 1], bool), np.array([1, 1, 1, 1], bool)]
    packed = data.pack(demonstrations([5, 3, 4], [3, 1, 0], masks), 8, True)
    assert [pack.tolist() for pack in packed.packs] == [[0, 1], [2]]
    batch = packed.in_order(0, 3)
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 0, 0, 0, 0], [8, 9, 10, 11, 0, 0, 0, 0]]
    assert batch.lengths.tolist() == [8, 4, 0]
    assert batch.segment_ids.tolist() == [[0] * 5 + [1] * 3, [0] * 8, [0] * 8]
    assert batch.loss_mask.astype(int).tolist() == [[0, 0, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 0, 0, 0, 0], [0] * 8]
    assert batch.prompt_lengths.tolist() == [0, 0, 0]


def test_batches_are_a_function_of_seed_and_step_with_equal_shapes():
    packed = data.pack(demonstrations(np.random.default_rng(0).integers(1, 17, 60)), 16, False)
    first, again = packed.batch(3, 5, 4), packed.batch(3, 5, 4)
    for field in ("tokens", "lengths", "loss_mask", "segment_ids"):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
    part = packed.batch(3, 5, 4, np.array([2, 3]))
    np.testing.assert_array_equal(part.tokens, first.tokens[2:])
    seen = [row for step in range(len(packed) // 4) for row in packed.rows_of(3, step, 4)]
    assert len(set(seen)) == len(seen)
    assert {packed.batch(3, step, 4).tokens.shape for step in range(4)} == {(4, 16)}


def test_the_report_says_how_full_the_rows_are():
    packed = data.pack(demonstrations([5, 3, 4]), 8, False)
    assert "packed into 2 rows of 8 tokens, 75% full" in str(packed.report)
    assert packed.source_rows(0) == {"rows": [0, 1]}
    assert packed.fingerprint == packed.data.fingerprint

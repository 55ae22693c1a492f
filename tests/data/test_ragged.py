import numpy as np
import pyarrow as pa
import pytest

from rlhf_jax.data.ragged import Chained, Lazy, Ragged, lengths_of

LISTS = [[1, 2, 3], [], [4], [5, 6], [], [7]]


def chunked(kind):
    return pa.chunked_array([pa.array(LISTS[:2], pa.list_(kind)), pa.array(LISTS[2:], pa.list_(kind))])


@pytest.mark.parametrize(
    "made",
    [
        Ragged.from_lists(LISTS),
        Ragged.from_column(chunked(pa.int32())),
        Chained([Ragged.from_lists(LISTS[:4]), [[], [7]]]),
    ],
)
def test_sequences_are_those_that_were_given(made):
    assert [list(one) for one in made] == LISTS and len(made) == 6
    assert [list(one) for one in made[1:4]] == LISTS[1:4] and list(made[-1]) == [7]
    assert lengths_of(made).tolist() == [3, 0, 1, 2, 0, 1] and lengths_of(made).dtype == np.int32
    for index in (6, -7):
        with pytest.raises(IndexError):
            made[index]


def test_some_rows_in_another_order():
    made = Ragged.from_column(chunked(pa.int32()), np.array([5, 0, 3]))
    assert [one.tolist() for one in made] == [[7], [1, 2, 3], [5, 6]] and made.lengths.tolist() == [1, 3, 2]
    assert np.concatenate(list(made.values())).tolist() == [7, 1, 2, 3, 5, 6]


def test_masks_are_views_of_bytes():
    column = pa.chunked_array([pa.array([[1, 0], [1]], pa.list_(pa.uint8()))])
    made = Ragged.from_column(column)
    assert made[0].dtype == bool and made[0].tolist() == [True, False] and not made[0].flags.owndata


def test_elements_are_made_when_they_are_read():
    asked = []
    made = Lazy(3, lambda i: asked.append(i) or i * 2)
    assert made[1] == 2 and asked == [1] and made[-1] == 4 and made == [0, 2, 4] and made != [0, 2]
    with pytest.raises(IndexError):
        made[3]

"""Which tokens SFT trains on."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms import sft


@pytest.mark.parametrize("completion_only", [False, True])
def test_labels_lie_within_the_row_the_completion_and_the_mask(completion_only):
    lengths, prompt_lengths, s = jnp.array([6, 3, 0]), jnp.array([2, 1, 0]), 6
    loss_mask = jnp.array([[1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], bool)
    found = np.asarray(sft.label_mask(lengths, prompt_lengths, s, completion_only, loss_mask))
    plain = np.asarray(sft.label_mask(lengths, prompt_lengths, s, completion_only))
    for row in range(3):
        for label in range(1, s):
            expected = label < lengths[row] and not (completion_only and label < prompt_lengths[row])
            assert plain[row, label - 1] == expected
            assert found[row, label - 1] == (expected and bool(loss_mask[row, label]))

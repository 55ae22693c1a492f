"""Parts of a batch one after another are the batch at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.generate.chunks import largest_divisor, map_in_chunks


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 12, 99, None])
def test_chunks_are_the_whole_batch_in_its_order(rows):
    batch = {"a": jnp.arange(12), "b": (jnp.arange(24.0).reshape(12, 2), None)}
    seen = []

    def function(part):
        seen.append(len(part["a"]))
        return part["a"] * 2, part["b"][0].sum(axis=1)

    first, second = map_in_chunks(function, batch, rows)
    np.testing.assert_array_equal(first, np.arange(12) * 2)
    np.testing.assert_array_equal(second, np.arange(24).reshape(12, 2).sum(axis=1))
    assert set(seen) == {min(rows or 12, 12)}


def test_a_chunk_takes_every_nth_row_so_that_it_spans_all_devices():
    chunks = map_in_chunks(lambda x: jnp.broadcast_to(x.max(), x.shape), jnp.arange(12), 3)
    # Rows 0, 4 and 8 are one chunk, 1, 5 and 9 the next.
    assert chunks.tolist() == [8, 9, 10, 11] * 3


def test_chunked_typed_keys_stay_keys():
    keys = jax.random.split(jax.random.key(0), 6)
    whole = jax.vmap(jax.random.uniform)(keys)
    np.testing.assert_array_equal(map_in_chunks(jax.vmap(jax.random.uniform), keys, 2), whole)


@given(total=st.integers(1, 300), most=st.integers(-3, 400))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_largest_divisor_divides_and_is_the_largest(total, most):
    found = largest_divisor(total, most)
    assert total % found == 0 and (found <= most or found == 1)
    assert not [n for n in range(found + 1, min(total, most) + 1) if total % n == 0]

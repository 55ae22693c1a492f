"""scripts/bench/difference.py: forms from the sampler's to the learner's, and parts of a model in float32."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import decoder, layers
from tests.helpers.paths import SCRIPTS

sys.path.insert(0, str(SCRIPTS / "bench"))  # as for a script run from there

import difference  # noqa: E402


@pytest.fixture(scope="module")
def result():
    model = difference.models.custom_shape("2x64x4", 256)
    return difference.measure(difference.random_case(model, 4, 16, 4))


def test_the_first_form_is_the_sampler_and_the_last_the_learner(result):
    first, *others = result["forms"].values()
    assert first["sampler"]["max"] < 1e-5 and others[-1]["learner"]["max"] == 0.0
    assert first["learner"]["mean"] == pytest.approx(others[-1]["sampler"]["mean"], rel=1e-2)
    assert first["learner"]["mean"] == pytest.approx(result["precisions"]["bfloat16"]["difference"]["mean"], rel=1e-2)
    assert all(0 < row["float32"]["mean"] < row["float32"]["max"] < 0.05 for row in result["forms"].values())


def test_more_parts_in_float32_and_float16_leave_less_of_the_difference(result):
    means = {name: row["difference"]["mean"] for name, row in result["precisions"].items()}
    assert means["and head"] < 0.6 * means["bfloat16"] and means["float16"] < 0.25 * means["bfloat16"]
    assert means["float32"] < 1e-5


def test_tables_have_a_line_for_each(result):
    lines = difference.tables(result).splitlines()
    for name in (*result["forms"], *result["precisions"]):
        assert sum(line.startswith(f"| {name} | ") for line in lines) == 1


def test_a_part_is_in_float32_only_within_its_context():
    case = difference.random_case(difference.models.custom_shape("1x32x2", 256), 2, 8, 4)
    tokens, mask = case.prompts.tokens, case.prompt_mask
    functions = (decoder._embed, decoder._final_norm, layers.product, decoder.Attention.__call__)

    def hidden():
        return jax.jit(lambda params: case.model.hidden(params, tokens, mask, dtype=jnp.bfloat16))(case.params)

    before = hidden()
    with difference.in_float32("residual", "products", "head"):
        within = hidden()
    assert (before.dtype, within.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(hidden(), before)
    assert functions == (decoder._embed, decoder._final_norm, layers.product, decoder.Attention.__call__)

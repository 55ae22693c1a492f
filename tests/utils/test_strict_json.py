"""JSON without NaN as a bare word."""

import json
import math

import numpy as np

from rlhf_jax.utils.strict_json import json_text


def test_json_text_is_strict_for_nested_values():
    text = json_text({"a": [np.float32(1.5), math.nan], "b": {"c": (True, None, "é")}, "d": np.arange(2)})
    assert json.loads(text) == {"a": [1.5, "NaN"], "b": {"c": [True, None, "é"]}, "d": [0, 1]}

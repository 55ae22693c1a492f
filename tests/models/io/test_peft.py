"""An adapter_config.json that asks for more than the sum of a base and A B is refused."""

import json

import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.models.io import peft

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}


def read(folder, **changes):
    """read_config of a folder with nothing but a config."""
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **changes}))
    return peft.read_config(folder)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "corda", "loftq"])
def test_an_adapter_whose_start_was_taken_off_the_base_is_refused(tmp_path, start):
    """PEFT takes it off again whenever it loads the adapter: base + A B is not what was trained."""
    with pytest.raises(UserError, match=f"init_lora_weights.*'{start}'"):
        read(tmp_path, init_lora_weights=start)


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva", None])
def test_other_starts_leave_the_base_as_it_is(tmp_path, start):
    assert read(tmp_path, init_lora_weights=start).r == 4


@pytest.mark.parametrize("key", ["use_dora", "kasa_config", "monteclora_config", "use_bdlora", "rank_pattern"])
def test_other_functions_of_the_same_tensors_are_refused(tmp_path, key):
    with pytest.raises(UserError, match=f"{key} is .* not supported"):
        read(tmp_path, **{key: {"on": 1}})
    assert read(tmp_path, **{key: None}).alpha == 8

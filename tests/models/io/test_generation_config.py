"""stop_token_ids: a checkpoint's own list, its checks, and what exports keep of it."""

import json

import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.models.io import generation_config

ROWS = 50


def folder_with(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    if content is not None:
        (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def resolve(given, path=None, rows=ROWS):
    return generation_config.resolve_stop_ids(given, path=path, revision=None, rows=rows)


def test_given_ids_are_kept_in_their_order_each_once():
    assert resolve((7, 3, 7)) == (7, 3)
    assert resolve(None) is None


@pytest.mark.parametrize(("listed", "ids"), [([1, 49], (1, 49)), (7, (7,)), ([0], (0,))])
def test_generation_config_is_the_checkpoints_list_or_single_id(tmp_path, listed, ids):
    assert resolve("generation_config", folder_with(tmp_path / "model", {"eos_token_id": listed})) == ids


def test_an_adapter_without_a_list_has_its_bases(tmp_path):
    base = folder_with(tmp_path / "base", {"eos_token_id": [3, 4]})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    content = {"peft_type": "LORA", "base_model_name_or_path": str(base), "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    assert resolve("generation_config", adapter) == (3, 4)
    generation_config.write(adapter, (5,), pad_id=0)
    assert resolve("generation_config", adapter) == (5,)


def test_what_is_written_is_what_is_read_and_copied(tmp_path):
    folder, other = folder_with(tmp_path / "a", None), folder_with(tmp_path / "b", None)
    generation_config.copy(folder, None, other)
    assert not (other / "generation_config.json").exists()
    generation_config.write(folder, (9, 2), pad_id=1)
    generation_config.copy(folder, None, other)
    assert resolve("generation_config", other) == (9, 2)


@pytest.mark.parametrize("listed", [None, [], [1, ROWS], -1, [1, -2], "eos", ["1"], [1.0], [True], {"a": 1}], ids=str)
def test_a_list_that_no_response_could_end_by_is_refused_by_name(tmp_path, listed):
    path = folder_with(tmp_path / "model", {"eos_token_id": listed})
    with pytest.raises(UserError, match="stop_token_ids") as error:
        resolve("generation_config", path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("given", [(ROWS,), (-1,), (1.5,), (True,), "eos", ()], ids=str)
def test_given_ids_that_no_response_could_contain_are_refused_by_name(given):
    with pytest.raises(UserError, match="stop_token_ids"):
        resolve(given)


def test_a_checkpoint_without_a_list_is_refused_by_name(tmp_path):
    path = folder_with(tmp_path / "model", None)
    with pytest.raises(UserError, match="stop_token_ids") as error:
        resolve("generation_config", path)
    assert str(path) in str(error.value)
    with pytest.raises(UserError, match="stop_token_ids"):
        resolve("generation_config", None)

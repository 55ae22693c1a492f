"""stop_token_ids: a checkpoint's own list, its checks, and what exports keep of it."""

import json
import types

import numpy as np
import pytest
import transformers
from transformers.trainer_utils import align_special_tokens

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
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert resolve("generation_config", adapter) == (5,)


BASES = [  # eos_token_id of config.json, generation_config.json; None: absent
    ([7, 8], {"eos_token_id": [7, 8], "pad_token_id": 3, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 1}),
    (7, {"eos_token_id": [8, 7], "do_sample": True}),
    ([8, 9], {"eos_token_id": 8, "pad_token_id": 4}),
    (8, {"temperature": 0.5}),
    ([8, 7], None),
    (8, None),
    (None, {}),
]


@pytest.mark.parametrize(("config_ids", "content"), BASES, ids=str)
def test_an_export_keeps_its_bases_file_and_changes_what_transformers_trainer_does(tmp_path, config_ids, content):
    """Beside `align_special_tokens`, which TRL's trainers call before training; eos is 7 and pad 3."""
    folder = folder_with(tmp_path / "base", content)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": config_ids}))
    generation = generation_config.exported(folder, None, eos_id=7, pad_id=3)
    theirs = types.SimpleNamespace(
        config=transformers.LlamaConfig(eos_token_id=config_ids, bos_token_id=None, pad_token_id=None),
        generation_config=transformers.GenerationConfig(**content or {"eos_token_id": config_ids}),
    )
    tokenizer = types.SimpleNamespace(eos_token_id=7, bos_token_id=None, pad_token_id=3)
    align_special_tokens(theirs, tokenizer)
    assert generation.eos_token_id == theirs.config.eos_token_id
    generation.write(tmp_path)
    ours = transformers.GenerationConfig.from_pretrained(tmp_path)
    for name in ("eos_token_id", "pad_token_id"):
        first, second = (getattr(each, name) for each in (ours, theirs.generation_config))
        assert np.array_equal(np.atleast_1d(first), np.atleast_1d(second)), name
    others = {name: value for name, value in generation.content.items() if not name.endswith("_token_id")}
    assert others == {name: value for name, value in (content or {}).items() if not name.endswith("_token_id")}


def test_stop_token_ids_replace_all_ids_that_end_a_response(tmp_path):
    folder = folder_with(tmp_path / "base", {"eos_token_id": [7, 8], "temperature": 0.6})
    generation = generation_config.exported(folder, None, eos_id=7, pad_id=3, stop_ids=(9, 2))
    assert generation.eos_token_id == [9, 2]
    assert generation.content == {"eos_token_id": [9, 2], "temperature": 0.6, "pad_token_id": 3}
    generation.write(folder)
    assert resolve("generation_config", folder) == (9, 2)


def test_a_policy_from_random_weights_ends_at_its_tokenizers_eos(tmp_path):
    generation = generation_config.exported(None, None, eos_id=7, pad_id=3)
    assert generation == generation_config.Generation({"eos_token_id": 7, "pad_token_id": 3}, 7)
    generation.write(folder_with(tmp_path / "policy", None))
    assert resolve("generation_config", tmp_path / "policy") == (7,)


def test_a_damaged_file_is_refused_by_name_when_a_run_starts(tmp_path):
    folder = folder_with(tmp_path / "base", None)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config.json is not valid JSON"):
        generation_config.exported(folder, None, eos_id=7, pad_id=3)


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

"""Wrong files, as a new user would bring them: the command ends with 2 and one line that names the thing."""

import json
import pathlib
import shutil

import pytest
import safetensors.numpy

import rlhf_jax
from rlhf_jax import data, train
from rlhf_jax.config import PPOConfig
from rlhf_jax.config import files as config_files
from rlhf_jax.data import synthetic
from rlhf_jax.runtime import run_folder
from tests.helpers.made_data import write_jsonl
from tests.helpers.user_files import POSTS, arguments, config_with, mentions, model_of

QKV = "gpt_neox.layers.0.attention.query_key_value.weight"


# --- checkpoints: what else may be wrong with one is in tests/models/io/test_hf_errors.py and test_torch_bin.py


def tensor_missing(folder: pathlib.Path) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    del tensors[QKV]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


CHECKPOINTS = {
    "another model_type": (config_with(model_type="opt"), ["config.json", "model_type 'opt'", "gpt_neox"]),
    "tensor missing": (tensor_missing, ["model.safetensors", QKV, "is missing"]),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_bad_checkpoint_is_named(user_files, refusal, tmp_path, case):
    spoil, parts = CHECKPOINTS[case]
    folder = tmp_path / "checkpoint"
    shutil.copytree(user_files.sft, folder)
    spoil(folder)
    mentions(refusal(sft_model_path=folder), folder, *parts)


def test_one_thing_in_place_of_another(user_files, refusal):
    mentions(refusal(reward_model_path="./rewards"), "./rewards", "no such folder")
    mentions(refusal(reward_model_path=user_files.sft), user_files.sft, "scalar head", "not a reward model")
    mentions(refusal(sft_model_path=user_files.reward), user_files.reward, "causal head", "not a language model")


def test_sequences_longer_than_the_context(refusal):
    mentions(refusal(query_length=125), "query_length", "response_length", "129", "128")


# --- tokenizers: see also tests/data/test_tokenizer.py


def test_no_tokenizer(refusal, tmp_path, user_files):
    folder = model_of(tmp_path / "alone", user_files.rows)
    mentions(refusal(sft_model_path=folder), folder, "tokenizer", "tokenizer_name_or_path")


def test_a_tokenizer_that_has_no_end(refusal, tokenizer_folder):
    path = tokenizer_folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))
    mentions(refusal(tokenizer_name_or_path=tokenizer_folder), tokenizer_folder, "has no eos token")


def test_a_reward_model_of_another_tokenizer(user_files, refusal, tmp_path):
    folder = tmp_path / "reward"
    shutil.copytree(user_files.reward, folder)
    path, word = folder / "tokenizer.json", data.load_tokenizer("synthetic").hf.convert_ids_to_tokens(40)
    path.write_text(path.read_text().replace(json.dumps(word), '"swapped"'))
    message = refusal(reward_model_path=folder, reward_input="ids")
    mentions(message, folder, user_files.sft, f"id 40 is 'swapped' there and {word!r} here")
    # It may read text by its own tokenizer, but values are of the policy's ids.
    mentions(
        refusal(reward_model_path=folder),
        folder,
        "whose tokenizer is not the policy's",
        "value_model_path",
        "'shared_backbone'",
    )


# --- data: what else may be wrong with a file is in tests/data/test_loading.py

GOOD = synthetic.demonstrations(4)


def test_a_bad_row_is_named_by_file_and_number(refusal, tmp_path):
    path = write_jsonl(tmp_path / "posts.jsonl", [GOOD[0], {"prompt": "  "}, *GOOD])
    for option in ("dataset_name", "eval_dataset_name"):
        mentions(refusal(**{option: path}), path, "line 2", "'prompt' is empty", "on_bad_row=skip")


def test_a_folder_without_the_split(refusal, tmp_path):
    write_jsonl(tmp_path / "test.jsonl", GOOD)
    mentions(refusal(dataset_name=tmp_path), tmp_path, "no split 'train'", "test", "Set dataset_train_split")
    only_train = tmp_path / "only_train"
    only_train.mkdir()
    write_jsonl(only_train / "train.jsonl", GOOD)
    mentions(refusal(dataset_name=only_train), only_train, "no split 'validation'", "dataset_test_split")


def test_lengths_that_hold_no_row(user_files, refusal):
    mentions(refusal(query_length=8, query_overflow="drop"), user_files.posts, f"all {POSTS} rows", "query_length = 8")


def test_columns_of_the_other_stages(user_files, refusal, tmp_path):
    mentions(refusal("reward", dataset_name=user_files.posts), user_files.posts, "no column 'chosen'", "completion")
    mentions(
        refusal("sft", dataset_name=user_files.pairs), user_files.pairs, "no column 'completion'", "chosen, rejected"
    )
    pairs = [{**row, "rejected": ["a"]} for row in synthetic.preference_pairs(4)]
    path = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    mentions(refusal("reward", dataset_name=path), path, "line 1", "'rejected' is a list")


# --- run folders


def test_after_a_mistake_the_corrected_command_runs_and_then_guards_its_folder(user_files, refusal, tmp_path, capsys):
    run_dir = tmp_path / "run"
    mentions(refusal(resume="must"), run_dir, "resume is must", "no checkpoint")
    mentions(refusal(reward_model_path=user_files.sft), "not a reward model")
    assert train.main(arguments(user_files, "ppo", run_dir)) == 0, capsys.readouterr().err
    capsys.readouterr()
    mentions(refusal(kl_coef=0.2, seed=3), run_dir, "another config", "kl_coef: 0.05 -> 0.2", "seed: 42 -> 3")
    mentions(refusal(resume="never"), run_dir, "resume is never")
    assert train.main(arguments(user_files, "ppo", run_dir)) == 0


# --- reward functions: see also tests/rewards/test_python_functions.py


def test_a_bad_reward_function_is_named_and_its_folder_stays_open_to_a_mended_one(user_files, tmp_path):
    def brevity(prompts, **_):
        return [1.0, 1.0, float("nan"), 1.0]

    options = {
        **user_files.right["ppo"],
        "reward_model_path": None,
        "value_model_path": str(user_files.reward),
        "report_to": (),
    }
    options = {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in options.items()}
    config = PPOConfig(run_dir=str(tmp_path / "run"), **options)
    with pytest.raises(rlhf_jax.UserError) as error:
        rlhf_jax.run(config, reward_funcs=brevity)
    mentions(str(error.value), "reward function brevity", "returned nan for row 2")
    assert run_folder.check(config.run_dir, json.loads(config_files.to_json(config))) is None

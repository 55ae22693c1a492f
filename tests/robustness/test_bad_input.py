"""Wrong files, as a new user would bring them: the command ends with 2 and one line that names the thing."""

import json
import os
import pathlib
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import safetensors.numpy

import rlhf_jax
from rlhf_jax import data, train
from rlhf_jax.config import PPOConfig
from rlhf_jax.config import files as config_files
from rlhf_jax.data import synthetic
from rlhf_jax.runtime import run_folder
from tests.helpers.user_files import POSTS, arguments, config_with, mentions, model_of, write_jsonl

QKV = "gpt_neox.layers.0.attention.query_key_value.weight"


# --- checkpoints


def tensors_with(change):
    def spoil(folder: pathlib.Path) -> None:
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")

    return spoil


def without(name: str):
    return lambda folder: (folder / name).unlink()


def written(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def shard_missing(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {QKV: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def replaced_by_bin(content: bytes):
    def spoil(folder: pathlib.Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return spoil


CHECKPOINTS = {
    "no config.json": (without("config.json"), ["config.json"]),
    "config.json cut off": (written("config.json", b'{"model_type": "gpt'), ["config.json", "JSON"]),
    "another model_type": (config_with(model_type="opt"), ["config.json", "model_type 'opt'", "gpt_neox"]),
    "another class": (config_with(architectures=["GPTNeoXForTokenClassification"]), ["GPTNeoXForTokenClassification"]),
    "another activation": (config_with(hidden_act="gelu_new"), ["config.json", "hidden_act 'gelu_new'"]),
    "scaled rope": (config_with(rope_scaling={"type": "linear", "factor": 2.0}), ["rope_scaling", "linear"]),
    "quantized": (config_with(quantization_config={"bits": 4}), ["quantization_config"]),
    "impossible heads": (config_with(num_attention_heads=3), ["hidden_size 16", "num_attention_heads 3"]),
    "no weights": (without("model.safetensors"), ["model.safetensors"]),
    "tensor missing": (tensors_with(lambda tensors: tensors.pop(QKV)), ["model.safetensors", QKV, "is missing"]),
    "tensor misshapen": (
        tensors_with(lambda tensors: tensors.update({QKV: tensors[QKV][:, :-1].copy()})),
        [QKV, "[48, 15]", "[48, 16]"],
    ),
    "tensor extra": (
        tensors_with(lambda tensors: tensors.update({"gpt_neox.layers.1.mlp.bias": np.zeros(3, np.float32)})),
        ["model.safetensors", "gpt_neox.layers.1.mlp.bias"],
    ),
    "tensor of integers": (
        tensors_with(lambda tensors: tensors.update({QKV: tensors[QKV].astype(np.int8)})),
        [QKV, "dtype"],
    ),
    "weights cut off": (lambda folder: os.truncate(folder / "model.safetensors", 2000), ["model.safetensors"]),
    "weights not downloaded": (
        written("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        ["model.safetensors", "not a valid safetensors file"],
    ),
    "a shard missing": (shard_missing, ["model-00001-of-00002.safetensors"]),
    ".bin of nothing": (replaced_by_bin(b"nothing"), ["pytorch_model.bin", "safetensors"]),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_bad_checkpoint_is_named(user_files, refusal, tmp_path, case):
    spoil, parts = CHECKPOINTS[case]
    folder = tmp_path / "checkpoint"
    shutil.copytree(user_files.sft, folder)
    spoil(folder)
    mentions(refusal(sft_model_path=folder), folder, *parts)


class Hostile:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_hostile_bin_is_refused_by_name_and_never_run(user_files, refusal, tmp_path):
    folder, trap = tmp_path / "checkpoint", tmp_path / "trap"
    shutil.copytree(user_files.sft, folder)
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"weight": Hostile(f"touch {trap}")}, protocol=2))
        archive.writestr("archive/version", "3\n")
    mentions(refusal(sft_model_path=folder), folder / "pytorch_model.bin", "system", "nothing was run")
    assert not trap.exists()


def test_a_checkpoint_that_is_not_there(refusal, tmp_path):
    mentions(refusal(sft_model_path=tmp_path / "nowhere"), tmp_path / "nowhere", "no such folder")
    mentions(refusal(reward_model_path="./rewards"), "./rewards", "no such folder")


def test_one_thing_in_place_of_another(user_files, refusal):
    mentions(refusal(sft_model_path=user_files.posts), user_files.posts, "is a file", "folder")
    mentions(refusal(reward_model_path=user_files.sft), user_files.sft, "scalar head", "not a reward model")
    mentions(refusal(sft_model_path=user_files.reward), user_files.reward, "causal head", "not a language model")


def test_a_reward_model_with_two_labels(user_files, refusal, tmp_path):
    folder = tmp_path / "reward"
    shutil.copytree(user_files.reward, folder)
    config_with(id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})(folder)
    mentions(refusal(reward_model_path=folder), folder / "config.json", "num_labels is 2")


def test_sequences_longer_than_the_context(refusal):
    mentions(refusal(query_length=125), "query_length", "response_length", "129", "128")


# --- tokenizers


def tokenizer_with(folder: pathlib.Path, **changes) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_no_tokenizer(refusal, tmp_path, user_files):
    folder = model_of(tmp_path / "alone", user_files.rows)
    mentions(refusal(sft_model_path=folder), folder, "tokenizer", "tokenizer_name_or_path")
    mentions(refusal(tokenizer_name_or_path=tmp_path / "nowhere"), tmp_path / "nowhere", "tokenizer")


def test_a_tokenizer_that_is_damaged_or_has_no_end(refusal, tokenizer_folder):
    tokenizer_with(tokenizer_folder, eos_token=None)
    mentions(refusal(tokenizer_name_or_path=tokenizer_folder), tokenizer_folder, "has no eos token")
    (tokenizer_folder / "tokenizer.json").write_text('{"version": "1.0"')
    mentions(refusal(tokenizer_name_or_path=tokenizer_folder), tokenizer_folder, "no tokenizer could be loaded")


def test_a_tokenizer_with_more_ids_than_the_model_has_rows(user_files, refusal, tmp_path):
    folder = model_of(tmp_path / "small", user_files.rows - 10)
    message = refusal(sft_model_path=folder, tokenizer_name_or_path=user_files.sft)
    mentions(message, user_files.sft, f"{user_files.rows} ids", f"{user_files.rows - 10} rows")


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


# --- data

GOOD = synthetic.demonstrations(4)
ROWS = {  # rows of a .jsonl: what is said of it
    "not JSON": ([*GOOD, '{"prompt": "a'], ["line 5", "JSON"]),
    "not an object": ([*GOOD, "[1, 2]"], ["line 5", "list"]),
    "empty prompt": ([GOOD[0], {"prompt": "  "}, *GOOD], ["line 2", "'prompt' is empty", "on_bad_row=skip"]),
    "prompt of another type": ([*GOOD, {"prompt": 7}, {"prompt": None}], ["line 5", "int", "2 of 6 rows"]),
    "prompt missing in a row": ([*GOOD, {"completion": "x"}], ["line 5", "'prompt' is missing"]),
    "another column": ([{"query": "a", "label": 1}] * 4, ["no column 'prompt'", "query, label", "prompt_column"]),
    "nothing": ([], ["empty"]),
    "fewer rows than a batch": (GOOD[:3], ["3 usable rows", "batch_size = 4"]),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_bad_row_is_named_by_file_and_number(refusal, tmp_path, case):
    rows, parts = ROWS[case]
    path = write_jsonl(tmp_path / "posts.jsonl", rows)
    mentions(refusal(dataset_name=path), path, *parts)


def test_no_row_is_good_and_no_file_is_there(refusal, tmp_path):
    path = write_jsonl(tmp_path / "posts.jsonl", [{"prompt": ""}] * 4)
    mentions(refusal(dataset_name=path, on_bad_row="skip"), path, "4 of 4 rows are bad", "No row is usable")
    path.unlink()
    mentions(refusal(dataset_name=path), path, "no such file")


FILES = {
    "posts.txt": (b"text", [".jsonl", ".parquet", ".txt"]),
    "posts.parquet": (b"PAR1 cut off", ["cannot be read as parquet"]),
    "posts.json": (b'[{"prompt": "a"},', ["is not JSON", "line 1"]),
    "posts.csv": (b"query,label\na,b\n", ["no column 'prompt'", "query, label"]),
    "posts.arrow": (b"no arrow", ["cannot be read as arrow"]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_form(refusal, tmp_path, name):
    content, parts = FILES[name]
    (tmp_path / name).write_bytes(content)
    mentions(refusal(dataset_name=tmp_path / name), tmp_path / name, *parts)


def test_a_folder_without_the_split(refusal, tmp_path):
    write_jsonl(tmp_path / "test.jsonl", GOOD)
    mentions(refusal(dataset_name=tmp_path), tmp_path, "no split 'train'", "test", "Set dataset_train_split")
    only_train = tmp_path / "only_train"
    only_train.mkdir()
    write_jsonl(only_train / "train.jsonl", GOOD)
    mentions(refusal(dataset_name=only_train), only_train, "no split 'validation'", "dataset_test_split")
    (tmp_path / "empty").mkdir()
    mentions(refusal(dataset_name=tmp_path / "empty"), tmp_path / "empty", "no data files")


def test_lengths_that_hold_no_row(user_files, refusal):
    mentions(refusal(query_length=8, query_overflow="drop"), user_files.posts, f"all {POSTS} rows", "query_length = 8")
    mentions(refusal(length_buckets=8), "length_buckets ends at 8")


def test_columns_of_the_other_stages(user_files, refusal, tmp_path):
    mentions(refusal("reward", dataset_name=user_files.posts), user_files.posts, "no column 'chosen'", "completion")
    mentions(
        refusal("sft", dataset_name=user_files.pairs), user_files.pairs, "no column 'completion'", "chosen, rejected"
    )
    pairs = [{**row, "rejected": ["a"]} for row in synthetic.preference_pairs(4)]
    path = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    mentions(refusal("reward", dataset_name=path), path, "line 1", "'rejected' is a list")


# --- run folders


def test_a_folder_of_something_else(refusal, tmp_path):
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("text")
    mentions(refusal(run_dir=thesis), thesis, "chapter.tex", "another folder")
    mentions(refusal(run_dir=thesis / "chapter.tex"), "is a file")


def test_after_a_mistake_the_corrected_command_runs_and_then_guards_its_folder(user_files, refusal, tmp_path, capsys):
    run_dir = tmp_path / "run"
    mentions(refusal(resume="must"), run_dir, "resume is must", "no checkpoint")
    mentions(refusal(reward_model_path=user_files.sft), "not a reward model")
    assert train.main(arguments(user_files, "ppo", run_dir)) == 0, capsys.readouterr().err
    capsys.readouterr()
    mentions(refusal(kl_coef=0.2, seed=3), run_dir, "another config", "kl_coef: 0.05 -> 0.2", "seed: 42 -> 3")
    mentions(refusal(resume="never"), run_dir, "resume is never")
    assert train.main(arguments(user_files, "ppo", run_dir)) == 0


# --- reward functions

REWARDS = {
    "too few": (lambda prompts, **_: [1.0] * (len(prompts) - 1), "returned 3 rewards for 4 rows"),
    "NaN": (lambda prompts, **_: [1.0, 1.0, float("nan"), 1.0], "returned nan for row 2"),
    "words": (lambda prompts, **_: ["good"] * len(prompts), "returned 'good' for row 0"),
    "nothing": (lambda prompts, **_: None, "returned None for 4 rows"),
}


@pytest.mark.parametrize("case", REWARDS)
def test_a_bad_reward_function_is_named_and_its_folder_stays_open_to_a_mended_one(user_files, tmp_path, case):
    function, part = REWARDS[case]
    function.__name__ = "brevity"
    options = {
        **user_files.right["ppo"],
        "reward_model_path": None,
        "value_model_path": str(user_files.reward),
        "report_to": (),
    }
    options = {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in options.items()}
    config = PPOConfig(run_dir=str(tmp_path / "run"), **options)
    with pytest.raises(rlhf_jax.UserError) as error:
        rlhf_jax.run(config, reward_funcs=function)
    mentions(str(error.value), "reward function brevity", part)
    assert run_folder.check(config.run_dir, json.loads(config_files.to_json(config))) is None

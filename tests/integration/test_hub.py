"""The headline command to the letter: tldr_ppo.py's own hub names, served on loopback to a Python without torch."""

import importlib.util
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import textwrap

import datasets
import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from rlhf_jax import models
from rlhf_jax.data import synthetic
from rlhf_jax.models.io import hf
from tests.helpers.children import QUICK
from tests.helpers.hub import Hub, environment_without_torch
from tests.helpers.optional import optional

torch = optional("torch")
SFT = "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr"
REWARD = "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"
POSTS = "trl-lib/tldr"
PLANNED = "somebody/large-model"
COMMAND = (sys.executable, "-m", "rlhf_jax.train", "--config", "tldr_ppo.py", "--total_episodes", "64")
EOS = "<|endoftext|>"

METRICS = """
eps lr episode epoch objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg val/clipfrac_avg val/ratio
val/ratio_var val/num_eos_tokens
""".split()


# --- what the hub serves


def posts(split: str, count: int) -> list[dict[str, str]]:
    return synthetic.demonstrations(count, split=split, seed=1)


def tokenizer_files() -> dict[str, bytes]:
    """A byte-level BPE in the files that Pythia has, with Pythia's special token and without a pad token."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    texts = [text for row in posts("train", 200) for text in row.values()]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    special = {"bos_token": EOS, "eos_token": EOS, "unk_token": EOS}
    config = {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False, **special}
    return {
        "tokenizer.json": bpe.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "special_tokens_map.json": json.dumps(special).encode(),
    }


def model_files(kind: str, seed: int) -> dict[str, bytes]:
    """A 2-layer GPT-NeoX of 512 + 53 tokens and more, as `hf.save` writes it."""
    model = models.custom_shape("2x32x4", vocab_size=640, max_positions=1024)
    params = jax.device_get(model.init(jax.random.key(seed), heads=(kind,), score_std=0.2))
    with tempfile.TemporaryDirectory() as folder:
        hf.save(folder, model, params, kind=kind, dtype="float16")
        return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def as_bin(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same checkpoint as it was published before safetensors, with transformers 4's keys."""
    tensors = safetensors.numpy.load(files["model.safetensors"])
    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(array.copy()) for name, array in tensors.items()}, buffer)
    config = json.loads(files["config.json"])
    del config["rope_parameters"]
    return {"config.json": json.dumps(config).encode(), "pytorch_model.bin": buffer.getvalue()}


def data_files() -> dict[str, bytes]:
    long = {"prompt": posts("train", 1)[0]["prompt"] * 40, "completion": " too long"}
    splits = {"train": [*posts("train", 540), long], "validation": posts("validation", 64), "test": posts("test", 8)}
    files = {}
    for split, rows in splits.items():
        buffer = io.BytesIO()
        datasets.Dataset.from_list(rows).to_parquet(buffer)
        files[f"data/{split}-00000-of-00001.parquet"] = buffer.getvalue()
    return files


@pytest.fixture(scope="module")
def hub():
    tokenizer = tokenizer_files()
    with Hub() as hub:
        hub.add(SFT, {**model_files("causal", 1), **tokenizer, "README.md": b"a policy"})
        hub.add(SFT, {**model_files("causal", 2), **tokenizer}, revision="sft__44413__1708611267")
        hub.add(REWARD, {**as_bin(model_files("scalar", 3)), **tokenizer})
        hub.add(POSTS, data_files(), kind="dataset")
        hub.add(PLANNED, {**model_files("scalar", 4), **tokenizer})
        yield hub


@pytest.fixture(scope="module")
def environment(hub, tmp_path_factory):
    """The user's: a hub, an empty cache, no torch."""
    return environment_without_torch(hub, tmp_path_factory.mktemp("home"))


def command(environment, *arguments: str, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        arguments, env=environment, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600
    )


@pytest.fixture(scope="module")
def finished(hub, environment, tmp_path_factory):
    """(the finished process, its run folder) of the headline command."""
    folder = tmp_path_factory.mktemp("headline")
    done = command(environment, *COMMAND, "--run_dir", str(folder / "run"), cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done, folder / "run"


# --- what the command does


def test_torch_is_not_there(environment, tmp_path):
    code = """
        import importlib.util
        assert importlib.util.find_spec("torch") is None
        try:
            import torch
        except ModuleNotFoundError as error:
            assert error.name == "torch"
        else:
            raise SystemExit(1)
    """
    assert importlib.util.find_spec("torch") is not None
    assert command(environment, sys.executable, "-c", textwrap.dedent(code), cwd=tmp_path).returncode == 0


@pytest.mark.runs
def test_the_headline_command_trains_from_the_hub_without_torch(finished):
    done, run = finished
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clocks = json.loads((run / "timings.jsonl").read_text().splitlines()[0])
    updates = [line for line in lines if "objective/kl" in line]
    assert [line["step"] for line in updates] == [1]
    assert updates[0]["episode"] == 512  # 64 episodes asked for; updates are whole, as TRL's
    assert not [name for name in METRICS if name not in {**updates[0], **clocks}]
    assert all(np.isfinite(value) for value in updates[0].values())
    assert "64 episodes / 512 = 1 updates" in done.stdout and "512 episodes (rounded up)" in done.stdout


@pytest.mark.runs
def test_prompts_over_512_tokens_are_dropped_and_counted(finished):
    assert "540 of 541 rows (1 too long, dropped)" in finished[0].stdout


@pytest.mark.runs
def test_only_the_files_that_are_needed_are_downloaded(hub, finished):
    assert "model.safetensors" in hub.downloaded(SFT) and "README.md" not in hub.downloaded(SFT)
    assert "pytorch_model.bin" in hub.downloaded(REWARD)
    assert "data/train-00000-of-00001.parquet" in hub.downloaded(POSTS, kind="dataset")


def test_a_dry_run_downloads_no_weights(hub, environment, tmp_path):
    models = ("--sft_model_path", PLANNED, "--reward_model_path", PLANNED)
    short = ("--query_length", "32", "--response_length", "8")
    quick = environment | {"XLA_FLAGS": QUICK}  # its programs are compiled for their memory, and never run
    done = command(quick, *COMMAND, *models, "--dataset_name", "nobody/nothing", *short, "--dry_run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "memory: fits" in done.stdout
    assert {"config.json", "tokenizer.json"} <= set(hub.downloaded(PLANNED))
    assert not [name for name in hub.downloaded(PLANNED) if name.endswith((".safetensors", ".bin"))]


@pytest.mark.runs
def test_policy_and_value_model_are_left_in_hugging_face_form(finished):
    import transformers

    _, run = finished
    policy = transformers.AutoModelForCausalLM.from_pretrained(run / "policy")
    value = transformers.AutoModelForSequenceClassification.from_pretrained(run / "value")
    assert policy.config.num_hidden_layers == value.config.num_hidden_layers == 2 and value.config.num_labels == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "policy")
    assert tokenizer.pad_token == "[PAD]" and tokenizer.eos_token == EOS
    assert policy.config.pad_token_id == tokenizer.pad_token_id < policy.config.vocab_size
    config = json.loads((run / "config.json").read_text())
    assert config["sft_model_path"] == SFT and config["dataset_name"] == POSTS
    assert any((run / "completions").glob("*.jsonl")) and any((run / "checkpoints").iterdir())


@pytest.mark.runs
def test_the_same_command_again_does_nothing(environment, finished, tmp_path):
    before = (finished[1] / "metrics.jsonl").read_bytes()
    done = command(environment, *COMMAND, "--run_dir", str(finished[1]), cwd=tmp_path)
    assert done.returncode == 0 and "is finished (update 1); nothing to do" in done.stdout
    assert (finished[1] / "metrics.jsonl").read_bytes() == before


# --- revisions, and names that are not there


def test_a_revision_is_another_model(hub, environment, tmp_path):
    code = f"""
        from rlhf_jax.models.io import hf
        for revision in (None, "main", "sft__44413__1708611267", {hub.commit(SFT)!r}):
            print(hf.load({SFT!r}, revision=revision)[1]["embed_out"]["kernel"].sum())
    """
    done = command(environment, sys.executable, "-c", textwrap.dedent(code), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    default, main, other, commit = done.stdout.split()
    assert default == main == commit != other


WRONG = [
    (["--sft_model_path", "cleanrl/pythia-1b-sft"], ["'cleanrl/pythia-1b-sft'"]),
    (["--model_revision", "sft__1"], [SFT, "'sft__1'"]),
    (["--reward_model_revision", "reward__1"], [REWARD, "'reward__1'"]),
    (["--dataset_name", "trl-lib/tldr2"], ["'trl-lib/tldr2'"]),
    (["--dataset_revision", "v2"], [POSTS, "v2"]),
    (["--dataset_train_split", "training"], [POSTS, "'training'", "train", "validation"]),
]


@pytest.fixture(scope="module")
def wrong(environment, tmp_path_factory):
    """What main says to each of WRONG: [exit code, stderr, whether a run folder is left], all in one process."""
    folder = tmp_path_factory.mktemp("wrong")
    code = f"""
        import contextlib, io, json, os, sys
        from rlhf_jax import train
        found = []
        for i, flags in enumerate({[flags for flags, _ in WRONG]!r}):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                status = train.main([*{list(COMMAND[3:])!r}, "--run_dir", f"run{{i}}", *flags])
            found.append([status, said.getvalue(), os.path.exists(f"run{{i}}")])
        json.dump(found, open("found.json", "w"))
    """
    done = command(environment, sys.executable, "-c", textwrap.dedent(code), cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", range(len(WRONG)), ids=[" ".join(flags) for flags, _ in WRONG])
def test_a_wrong_name_is_one_clear_line(wrong, case):
    status, said, folder_left = wrong[case]
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1 and not folder_left
    for part in WRONG[case][1]:
        assert part in errors[0]


def test_the_command_itself_ends_with_2_and_no_traceback(environment, tmp_path):
    done = command(environment, *COMMAND, "--run_dir", "run", "--model_revision", "sft__1", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and SFT in last and "'sft__1'" in last
    assert not (tmp_path / "run").exists()

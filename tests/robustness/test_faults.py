"""Mistakes and accidents that once ended in a traceback, in a wrong message, or in silence."""

import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import data, train
from rlhf_jax.config import batch_sizes, command_line, resolve
from rlhf_jax.data import loading
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.runtime import run_folder
from rlhf_jax.runtime.callbacks import Callback
from rlhf_jax.runtime.checkpoint import Checkpoints, Damaged
from rlhf_jax.stages import open_stage
from tests.helpers.hub import Hub
from tests.helpers.made_data import make_prompts, write_jsonl
from tests.helpers.user_files import arguments, config_with, mentions

SOME = {"stage": "ppo", "seed": 1}


# --- run folders


class OutOfMemory(Callback):
    def on_train_begin(self, stage, control):
        raise MemoryError


def test_a_run_that_died_before_its_first_checkpoint_may_begin_anew(user_files, refusal, tmp_path, capsys):
    run_dir = tmp_path / "run"
    config = command_line.parse(arguments(user_files, "sft", run_dir, learning_rate=1e-3))
    with pytest.raises(MemoryError):
        train.run(config, callbacks=[OutOfMemory()])
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "stale": 1}\n')
    mended = {"learning_rate": 1e-4, "warmup_steps": 30, "resume": "never"}
    assert train.main(arguments(user_files, "sft", run_dir, **mended)) == 0
    assert "warning: warmup_steps 30 >= 1 updates" in capsys.readouterr().out
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [1] and "stale" not in found[0]
    mentions(refusal("sft", run_dir=run_dir, learning_rate=1e-3), run_dir, "another config")
    (run_dir / "finished.json").unlink()
    mentions(refusal("sft", run_dir=run_dir, learning_rate=1e-3), run_dir, "another config")  # its checkpoint is there
    mentions(refusal("sft", run_dir=run_dir, **mended), run_dir, "resume is never")


def test_a_models_folder_is_no_runs_folder(user_files, refusal, tmp_path):
    shutil.copytree(user_files.sft, tmp_path / "model")
    mentions(refusal("sft", run_dir=tmp_path / "model"), tmp_path / "model", "not a run's folder")


def test_a_run_folder_below_a_file(refusal, user_files, monkeypatch):
    monkeypatch.setattr(train, "open_stage", None)  # refused before any model is opened
    mentions(refusal(run_dir=user_files.posts / "x" / "y"), "--run_dir", f"{user_files.posts} is a file")


@pytest.mark.parametrize("text", ["", '{"step": 3', "[]", '{"step": 3, "metrics": 7, "paths": {}}', "\udcff"])
def test_a_damaged_finished_json_is_named(tmp_path, text):
    run = run_folder.RunFolder.open(str(tmp_path / "run"), SOME)
    run.close()
    pathlib.Path(run.finished_file).write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match="finished.json.*damaged"):
        run_folder.check(run.path, SOME)


def truncated(step: pathlib.Path) -> None:
    for path in step.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_arrays(step: pathlib.Path) -> None:
    shutil.rmtree(step / "state" / "d", ignore_errors=True)
    for path in (step / "state").glob("ocdbt*"):
        shutil.rmtree(path)


DAMAGE = {
    "no state": lambda step: shutil.rmtree(step / "state"),
    "no extra": lambda step: shutil.rmtree(step / "extra"),
    "extra is no JSON": lambda step: next((step / "extra").glob("metadata")).write_text("{"),
    "extra is another JSON": lambda step: next((step / "extra").glob("metadata")).write_text("{}"),
    "nothing": lambda step: [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in step.iterdir()],
    "no arrays": no_arrays,
    "cut short": truncated,
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, case):
    state = {"kernel": jnp.arange(6.0).reshape(2, 3)}
    with Checkpoints(str(tmp_path)) as checkpoints:
        for step in (2, 5):
            checkpoints.save(step, state)
    DAMAGE[case](tmp_path / "5")
    with Checkpoints(str(tmp_path)) as checkpoints:
        with pytest.raises(Damaged) as error:
            checkpoints.restore(5, state)
    mentions(str(error.value), f"checkpoint {tmp_path / '5'} is damaged")
    said = []
    with Checkpoints(str(tmp_path), warn=said.append) as checkpoints:
        restored, _, step = checkpoints.restore_newest(state)
        assert step == 2 and checkpoints.steps() == [2]
        np.testing.assert_array_equal(restored["kernel"], state["kernel"])
        mentions(said[0], f"checkpoint {tmp_path / '5'} is damaged", "5.damaged")
        assert checkpoints.save(5, state)  # its place is free again
    DAMAGE[case](tmp_path / "5")
    DAMAGE[case](tmp_path / "2")
    with Checkpoints(str(tmp_path), warn=said.append) as checkpoints:
        with pytest.raises(UserError, match="No other checkpoint"):
            checkpoints.restore_newest(state)


QUIET = """
import sys
import jax.numpy as jnp
from rlhf_jax.runtime.checkpoint import Checkpoints
state = {str(number): jnp.arange(6.0) + number for number in range(40)}
for folder in sys.argv[1:]:  # what a failed restore leaves behind ends in any order
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.restore_newest(state)[2] == 2
"""


def no_manifest(step):
    (step / "state" / "manifest.ocdbt").unlink()


@pytest.mark.parametrize("damage", [no_manifest, truncated])
def test_a_damaged_checkpoint_is_one_line(tmp_path, damage):
    state = {str(number): jnp.arange(6.0) + number for number in range(40)}
    with Checkpoints(str(tmp_path / "0")) as checkpoints:
        for step in (2, 5):
            checkpoints.save(step, state)
    damage(tmp_path / "0" / "5")
    for name in ("1", "2"):
        shutil.copytree(tmp_path / "0", tmp_path / name)
    command = [sys.executable, "-c", QUIET, *(str(tmp_path / name) for name in "012")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    said = found.stderr.splitlines()
    assert len(said) == 3
    for line in said:
        assert line.startswith("warning: checkpoint") and "resuming from update 2" in line


FAILED_SAVE = """
import shutil, sys, threading
import jax.numpy as jnp
from rlhf_jax.runtime.checkpoint import Checkpoints

def remove(folder, ended):
    while not ended.is_set():
        shutil.rmtree(folder, ignore_errors=True)

for folder in sys.argv[1:]:  # what a failed save leaves behind ends in any order
    with Checkpoints(folder) as checkpoints:
        ended = threading.Event()
        checkpoints.save(1, {str(number): jnp.ones((64, 64)) for number in range(60)})
        remover = threading.Thread(target=remove, args=(folder, ended))
        remover.start()
        checkpoints.wait()
        ended.set()
        remover.join()
"""


def test_the_tasks_of_a_save_that_fails_print_nothing(tmp_path):
    folders = [str(tmp_path / name) for name in "012"]
    command = [sys.executable, "-c", FAILED_SAVE, *folders]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stderr.startswith("warning: checkpoint")
    for folder in folders:
        assert re.search(rf"warning: checkpoint {re.escape(folder)}.* could not be written", found.stderr)
    assert "Event loop is closed" not in found.stderr and "never retrieved" not in found.stderr


# --- models


def test_architectures_as_a_string_are_one_name(user_files, refusal, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(user_files.sft, path)
    config_with(architectures="GPTNeoXForCausalLM")(path)
    assert hf.load_model(path) == hf.load_model(user_files.sft)
    config_with(architectures="OPTForCausalLM")(path)
    mentions(refusal(sft_model_path=path), path / "config.json", "architectures 'OPTForCausalLM'")


def test_a_stop_token_id_beyond_the_vocabulary(user_files, refusal):
    message = refusal(stop_token=None, stop_token_id=99999)
    mentions(message, "--stop_token_id 99999", user_files.sft, f"0 to {user_files.rows - 1}")


def test_stop_token_ids_that_no_response_contains(user_files, refusal):
    message = refusal(stop_token_ids="0,99999")
    mentions(message, "--stop_token_ids", "99999", user_files.sft, f"0 to {user_files.rows - 1}")
    mentions(refusal(stop_token_ids="generation_config"), "--stop_token_ids generation_config", user_files.sft)


# --- data


def test_lines_that_are_all_malformed_are_named(refusal, tmp_path):
    path = write_jsonl(tmp_path / "posts.jsonl", ["prompt: a", "[1]"])
    message = refusal(dataset_name=path)
    mentions(message, f"{path}, line 1: is not JSON", "2 of 2 rows are bad", "No row is usable")
    assert "no column" not in message
    with pytest.raises(UserError, match="row 1.*int.*1 of 1 rows"):
        loading.require_columns(data.load_rows([3]), {"prompt_column": "prompt"})


LATIN1 = "caf\xe9".encode("latin-1")
GOOD = b'{"prompt": "caf\xc3\xa9 \xf0\x9f\x98\x80"}\n'


def test_bytes_that_are_not_utf8_are_a_bad_row(refusal, tmp_path):
    path = tmp_path / "posts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD * 4 + b'{"prompt": "' + LATIN1 + b'"}\n')
    mentions(
        refusal(dataset_name=path), f"{path}, line 5: is not UTF-8: byte 0xe9 at character 16", "1 of 5 rows is bad"
    )
    assert [row["prompt"] for row in data.load_rows(str(path)).first(4)] == ["caf\xe9 \U0001f600"] * 4


FILES = {
    "a.json": (
        b'[{"prompt": "x"},\n {"prompt": "' + LATIN1 + b'"}]',
        ", line 2: is not UTF-8: byte 0xe9 at character 17",
    ),
    "b.json": (GOOD * 2 + b'{"prompt": "' + LATIN1 + b'"}', ", line 3: is not UTF-8"),
    "c.json": ('[{"prompt": "x"}]'.encode("utf-16"), ", line 1: is not UTF-8: byte 0xff at character 1$"),
    "d.jsonl": ('{"prompt": "x"}'.encode("utf-16"), ", line 1: is not UTF-8"),
    "e.csv": (b"prompt,id\nx,1\n" + LATIN1 + b",2\n", ", row 2: 'prompt' is not UTF-8"),
    "f.json": (b'[{"prompt": "a\nb"}]', ", line 1: is not JSON: Invalid control character at column"),
    "g.jsonl": (b'{"prompt": "a\tb"}', ", line 1: is not JSON: Invalid control character at character"),
    "deep.json": (b"[" * 100_000, ", line 1.*Nested too deep"),
    "deep.jsonl": (b'{"prompt":' * 100_000, ", line 1.*Nested too deep"),
    "digits.jsonl": (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", ", line 1.*too many digits"),
    "blank.jsonl": (b"\n \n\n", ".*has no rows"),
    "empty.json": (b"[]", ".*has no rows"),
    "head.csv": (b"prompt,completion\n", ".*has no rows"),
    "column.jsonl": (b'{"\\u001b[31mprompt": "a"}', r".*no column 'prompt'.*\\x1b\[31mprompt"),
    "query.csv": (b"query,label\na,b\n", ".*no column 'prompt'.*query, label"),
    "none.arrow": (b"no arrow", ".*cannot be read as arrow"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_another_encoding_of_nothing_or_of_too_much_are_named(tmp_path, name):
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}{message}"):
        make_prompts(data.load_rows(str(tmp_path / name)), data.load_tokenizer("synthetic"))


def test_half_a_surrogate_pair_is_a_bad_row(refusal, tmp_path):
    path = write_jsonl(
        tmp_path / "posts.jsonl", [{"prompt": "a"}, '{"prompt": "ab\\ud83d"}', '{"prompt": "\\ud83d\\ude00"}']
    )
    mentions(refusal(dataset_name=path), f"{path}, line 2: 'prompt' holds \\ud83d at character 3", "1 of 3 rows is bad")


# --- tokenizers from the hub


def test_a_hub_out_of_reach_is_said_at_once(monkeypatch, tmp_path):
    away = functools.partial(
        huggingface_hub.snapshot_download, endpoint="http://127.0.0.1:9", cache_dir=str(tmp_path / "cache")
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", away)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"'owner/name' \(revision v1\).*tokenizer_name"):
        data.load_tokenizer("owner/name", "v1")
    assert time.monotonic() - began < 30


def test_a_tokenizer_comes_from_the_hub_and_only_its_files(user_files, monkeypatch, tmp_path):
    files = {path.name: path.read_bytes() for path in user_files.sft.iterdir()}
    with Hub() as hub:
        hub.add("owner/name", {**files, "sub/tokenizer.json": b"{}", "README.md": b"a policy"}, revision="v1")
        there = functools.partial(
            huggingface_hub.snapshot_download, endpoint=hub.endpoint, cache_dir=str(tmp_path / "cache")
        )
        monkeypatch.setattr(huggingface_hub, "snapshot_download", there)
        tokenizer = data.load_tokenizer("owner/name", "v1")
        assert hub.downloaded("owner/name") <= {name for name in files if "token" in name} | {"config.json"}
    assert tokenizer.hf.get_vocab() == data.load_tokenizer(str(user_files.sft)).hf.get_vocab()
    assert tokenizer.name == "owner/name"
    data.save_tokenizer(tokenizer, str(tmp_path / "saved"))
    assert str(tmp_path / "cache") not in (tmp_path / "saved" / "tokenizer_config.json").read_text()


# --- what a run adds up to


def stage_of(user_files, name: str, tmp_path, **options):
    return open_stage(resolve(command_line.parse(arguments(user_files, name, tmp_path / "run", **options))))


@pytest.mark.parametrize(
    ("name", "options", "updates"),
    [
        ("sft", {"max_steps": -1, "batch_size": 8, "num_train_epochs": 1.5}, 2),  # 12 rows: 1 update an epoch
        ("reward", {"max_steps": -1, "batch_size": 5, "num_train_epochs": 1.0}, 2),
        ("sft", {"max_steps": 7, "batch_size": 8}, 7),
        ("ppo", {"total_episodes": 9, "batch_size": 4}, 3),
        ("ppo", {"total_episodes": None, "num_train_epochs": 1.0, "batch_size": 8}, 2),
    ],
)
def test_the_line_that_is_printed_is_the_run(user_files, tmp_path, name, options, updates):
    stage = stage_of(user_files, name, tmp_path, **options)
    assert stage.total_steps == updates
    (line,) = [line for line in batch_sizes.batch_lines(stage.config, stage.rows) if line.startswith("run:")]
    assert f" = {updates} updates, " in line


def test_nothing_to_train_on(user_files, refusal):
    mentions(refusal(total_episodes=None, num_train_epochs=0.01), "num_train_epochs 0.01 x 12 rows")


def test_evaluation_does_not_compile_the_rollout_again(user_files, tmp_path):
    options = {"total_episodes": 8, "eval_dataset_name": user_files.posts, "length_buckets": 64}
    stage = stage_of(user_files, "ppo", tmp_path, **options)
    state, _, _ = stage.train_step(stage.state, 0)
    stage.evaluator.complete(state.params["policy"], stage.evaluator.held_out, 8, stage.config.temperature)
    state, _, _ = stage.train_step(state, 1)
    assert stage.programs.jitted.generate._cache_size() == 1
    assert jax.tree.leaves(stage.evaluator.seed)[0].sharding == state.seed.sharding

import dataclasses
import os
import subprocess
import sys

import datasets
import pytest

from rlhf_jax import data
from rlhf_jax.data import arrow_cache, synthetic, tokenized
from rlhf_jax.errors import UserError
from tests.helpers.chat_tokenizer import CHATML, MARKED, assistant, bytes_tokenizer, user
from tests.helpers.made_data import make_demonstrations, make_prompts, write_jsonl
from tests.helpers.paths import ROOT

CHATS = [{"prompt": [user(f"q {i}")], "completion": [assistant("a")], "label": i} for i in range(30)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, also for small files."""
    monkeypatch.setattr(arrow_cache, "MINIMUM_BYTES", 0)
    monkeypatch.setattr(arrow_cache, "folder", lambda: str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def count(monkeypatch):
    """Counts calls of the tokenizer."""
    calls = []
    for name in ("encode", "encode_batch"):
        own = getattr(data.Tokenizer, name)

        def counted(self, texts, own=own):
            calls.append(texts)
            return own(self, texts)

        monkeypatch.setattr(data.Tokenizer, name, counted)
    return calls


def prompts(path, tokenizer=None, **options):
    return make_prompts(data.load_rows(path), tokenizer or data.load_tokenizer("synthetic"), **options)


def test_everything_that_changes_tokens_tokenizes_again_and_nothing_else(tmp_path, cache, count):
    path = write_jsonl(tmp_path / "a.jsonl", synthetic.demonstrations(30))

    def calls(make):
        count.clear()
        make()
        return len(count)

    make = lambda **options: prompts(path, **options)  # noqa: E731
    assert calls(make) and not calls(make)
    assert not calls(lambda: make(length_buckets=(64, 128))) and not calls(lambda: make(shuffle_dataset=False))
    assert not calls(lambda: make(on_bad_row="skip"))
    for changed in ({"query_length": 40}, {"query_length": 40, "query_overflow": "drop"}):
        assert calls(lambda: make(**changed)) and not calls(lambda: make(**changed))  # noqa: B023
    assert calls(lambda: make_prompts(data.load_rows(path, max_samples=20), data.load_tokenizer("synthetic")))
    assert calls(lambda: make(tokenizer=bytes_tokenizer()))
    other = data.load_tokenizer("synthetic")
    other.hf.add_tokens(["met anna"])
    assert calls(lambda: make(tokenizer=other))
    assert calls(lambda: make_demonstrations(data.load_rows(path), data.load_tokenizer("synthetic")))
    text = open(path).read()
    write_jsonl(tmp_path / "a.jsonl", synthetic.demonstrations(30, seed=1))
    assert calls(make)
    (tmp_path / "a.jsonl").write_text(text)
    assert not calls(make)


def test_a_changed_template_or_day_tokenizes_again(tmp_path, cache, count):
    path = write_jsonl(tmp_path / "a.jsonl", CHATS)
    dated = "{{ strftime_now('%d %m') }}" + CHATML

    def ids(template, date="2026-01-31", **options):
        count.clear()
        tokenizer = dataclasses.replace(bytes_tokenizer(template), template_date=date)
        made = prompts(path, tokenizer, **options)
        return made.tokens[3].tolist(), bool(count)

    plain, made = ids(CHATML)
    assert made and ids(CHATML) == (plain, False)
    assert ids(CHATML, "2026-02-01") == (plain, False)  # it prints no date
    assert ids(MARKED)[1]
    first, made = ids(dated)
    assert made and ids(dated) == (first, False)
    other, made = ids(dated, "2026-02-01")
    assert made and other != first
    assert ids(dated, None)[1] and ids(dated, None)[1]  # today's date: never cached
    assert ids(CHATML, chat_template_kwargs={"chat_template": MARKED})[1]


def test_rows_beside_the_tokens_are_read_when_they_are_needed(tmp_path, cache):
    path = write_jsonl(tmp_path / "a.jsonl", CHATS)
    for _ in range(2):
        made = prompts(path, bytes_tokenizer())
        (tmp_path / "a.jsonl").rename(tmp_path / "gone.jsonl")  # the cache has them
        assert made.columns([4, 2])["label"] == [4, 2] and made.texts([7]) == [CHATS[7]["prompt"]]
        assert made.columns([1])["completion"] == [CHATS[1]["completion"]]
        (tmp_path / "gone.jsonl").rename(tmp_path / "a.jsonl")


@pytest.mark.parametrize("rows", (1, 7, 8, 50))
def test_batches_that_are_made_ahead_are_those_of_one_batch(tmp_path, cache, monkeypatch, rows):
    # Shorter and shorter texts, so that later batches are ready before earlier ones.
    posts = [{"prompt": "word " * (1 + 400 // (i + 1)), "completion": str(i)} for i in range(rows)]
    path = write_jsonl(tmp_path / "posts.jsonl", posts)
    whole = prompts(path)
    monkeypatch.setattr(tokenized, "BATCH", 8)
    monkeypatch.setattr(arrow_cache, "folder", lambda: str(tmp_path / "another"))
    ahead = prompts(path)
    assert [list(own) for own in ahead.tokens] == [list(own) for own in whole.tokens] and len(ahead) == rows
    assert ahead.fingerprint == whole.fingerprint


def test_a_bad_row_of_a_batch_that_is_made_ahead_is_named(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(tokenized, "BATCH", 8)
    path = write_jsonl(tmp_path / "posts.jsonl", [{"prompt": "word" if i not in (30, 45) else 7} for i in range(50)])
    with pytest.raises(UserError, match=r"line 31: 'prompt' is an int, not text \(2 of 50 rows are bad\)"):
        prompts(path)


def test_bad_rows_that_were_skipped_are_refused_where_they_are_not(tmp_path, cache):
    path = write_jsonl(tmp_path / "a.jsonl", [*synthetic.prompts(5), {"prompt": 3}, {"prompt": ""}])
    error = r"a.jsonl, line 6: 'prompt' is an int, not text \(2 of 7 rows are bad\)"
    with pytest.raises(UserError, match=error):
        prompts(path)
    assert prompts(path, on_bad_row="skip").report.bad == 2
    with pytest.raises(UserError, match=error):
        prompts(path)


def test_tokens_are_made_in_memory_where_the_cache_cannot_be_written(tmp_path, cache, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", synthetic.demonstrations(30))
    expected = prompts(path)
    cache_file = tmp_path / "file"
    cache_file.touch()
    monkeypatch.setattr(arrow_cache, "folder", lambda: str(cache_file / "cache"))
    with pytest.warns(UserWarning, match="a.jsonl: the token cache .* cannot be written"):
        made = prompts(path)
    assert made.fingerprint == expected.fingerprint and made.report == expected.report


def test_data_sets_of_objects_are_cached_by_their_content(cache, count):
    rows = synthetic.demonstrations(30)
    for table in (datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows).map(lambda row: {"x": id(row)})):
        for _ in range(2):
            count.clear()
            made = make_prompts(data.load_rows(table), data.load_tokenizer("synthetic"))
        assert not count and made.columns([3])["completion"] == [rows[3]["completion"]]
    upper = table.with_transform(lambda batch: {"prompt": [text.upper() for text in batch["prompt"]]})
    made = make_prompts(data.load_rows(upper), data.load_tokenizer("synthetic"))  # the user's own: not cached
    assert count and made.texts([0]) == [rows[0]["prompt"].upper()]


SCRIPT = """
import sys, jax, jax.numpy as jnp
jnp.zeros(1).block_until_ready()  # JAX's threads run
from rlhf_jax import data
from rlhf_jax.data import arrow_cache
from tests.helpers.made_data import make_prompts
arrow_cache.MINIMUM_BYTES = 0
calls, encode = [], data.Tokenizer.encode_batch
data.Tokenizer.encode_batch = lambda self, texts: calls.append(1) or encode(self, texts)
made = make_prompts(data.load_rows(sys.argv[1]), data.load_tokenizer("synthetic"), dataset_num_proc=int(sys.argv[2]))
print(made.fingerprint, made.report)
print("tokenized" if calls else "mapped", file=open(sys.argv[1] + ".runs", "a"))
"""


@pytest.mark.processes
def test_processes_tokenize_once_and_workers_run_no_script(tmp_path):
    """Four at a time, of which one tokenizes; then a data set of another length with two workers of datasets'."""
    path = write_jsonl(tmp_path / "a.jsonl", synthetic.demonstrations(3000))
    (tmp_path / "script.py").write_text(SCRIPT)  # without `if __name__ == "__main__"`
    env = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def start(file, workers):
        command = [sys.executable, str(tmp_path / "script.py"), file, str(workers)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    processes = [start(path, 1) for _ in range(4)]
    ends = [process.communicate(timeout=100) for process in processes]
    assert len({out for out, _ in ends}) == 1 and ends[0][0].startswith("3000 rows"), ends
    assert sorted((tmp_path / "a.jsonl.runs").read_text().split()) == ["mapped"] * 3 + ["tokenized"]
    arrow = tmp_path / "cache" / "rlhf_jax"
    assert len(list(arrow.glob("*.arrow"))) == 2  # the lines, and their tokens
    in_processes = start(write_jsonl(tmp_path / "b.jsonl", synthetic.demonstrations(3000)), 2)
    out, errors = in_processes.communicate(timeout=100)
    assert out.replace("b.jsonl", "a.jsonl") == ends[0][0], errors
    assert (tmp_path / "b.jsonl.runs").read_text() == "mapped\n"
    assert not list(arrow.glob("*.building")) and len(list(arrow.glob("*.arrow"))) == 3  # the same lines

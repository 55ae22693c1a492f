"""Batches, fingerprints, reports and errors of every kind and form of data, as they were recorded."""

import json
import zlib

import pytest

from rlhf_jax import data
from rlhf_jax.data import arrow_cache
from tests.helpers import data_cases

RECORDED = json.loads(data_cases.RECORDED.read_text())


def test_small_data_sets_are_made_into_what_was_recorded(tmp_path):
    assert data_cases.results(tmp_path) == RECORDED


def test_cached_data_sets_are_made_into_what_was_recorded_and_read_without_the_tokenizer(
    tmp_path, token_cache, monkeypatch
):
    def chosen(name):
        return zlib.crc32(name.encode()) % 5 == 0

    first = data_cases.results(tmp_path / "files", chosen)
    assert len(first) > 60 and first == {name: RECORDED[name] for name in first}
    cached = {path.name for path in token_cache.glob("*.arrow")}
    objects = ("list", "synthetic", "arithmetic")  # rows in memory, and small ones of the built-in tasks
    files = {name for name in first if "error" not in first[name] and not name.split(" of ")[1].startswith(objects)}

    def refuse(self, texts):
        raise AssertionError("a text is tokenized again")

    monkeypatch.setattr(data.Tokenizer, "encode", refuse)
    monkeypatch.setattr(data.Tokenizer, "encode_batch", refuse)
    assert data_cases.results(tmp_path / "files", files.__contains__) == {name: first[name] for name in files}
    assert {path.name for path in token_cache.glob("*.arrow")} == cached


@pytest.fixture
def token_cache(tmp_path, monkeypatch):
    """A cache of its own, also for small files."""
    monkeypatch.setattr(arrow_cache, "MINIMUM_BYTES", 0)
    monkeypatch.setattr(arrow_cache, "folder", lambda: str(tmp_path / "cache"))
    (tmp_path / "files").mkdir()
    return tmp_path / "cache"

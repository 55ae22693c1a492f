"""Evaluation data: none, one source, or several by name."""

import functools

import datasets
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import data
from rlhf_jax.data import loading, synthetic
from rlhf_jax.errors import UserError
from tests.helpers.made_data import data_config, make_demonstrations, make_pairs, write_jsonl

ROWS = synthetic.demonstrations(6)
PAIRS = synthetic.preference_pairs(6)


@pytest.fixture(scope="module")
def tokenizer():
    return data.load_tokenizer("synthetic")


config = functools.partial(data_config, max_eval_samples=4)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_jsonl(path, rows)


def sizes(sets):
    return {name: len(made) for name, made in sets.items()}


# --- none and one


def test_columns_are_one_set_and_a_dict_of_them_several(tokenizer):
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    frame = pandas.DataFrame(columns)
    for source, expected in (
        (columns, {"": 4}),
        (frame, {"": 4}),
        ({"near": columns, "far": frame[:3], "all": ROWS}, {"near": 4, "far": 3, "all": 4}),
    ):
        assert sizes(data.load_eval(data.PromptData, config(), tokenizer, source)) == expected


def test_one_source_has_no_name(tmp_path, tokenizer):
    path = write(tmp_path / "posts.jsonl", ROWS[:3])
    assert sizes(data.load_eval(data.PromptData, config(), tokenizer)) == {"": 4}
    assert sizes(data.load_eval(data.PromptData, config(eval_dataset_name=path), tokenizer)) == {"": 3}
    assert sizes(data.load_eval(data.PromptData, config(), tokenizer, ROWS[:2])) == {"": 2}
    table = datasets.Dataset.from_list(ROWS)
    splits = datasets.DatasetDict(train=table, validation=table.select([0]))
    assert sizes(data.load_eval(data.PromptData, config(), tokenizer, splits)) == {"": 1}


def test_no_evaluation_data_is_an_empty_dict(tmp_path, tokenizer):
    path = write(tmp_path / "posts.jsonl", ROWS)
    assert data.load_eval(data.PromptData, config(dataset_name=path), tokenizer) == {}
    assert data.load_eval(data.PromptData, config(dataset_test_split=None), tokenizer) == {}
    assert data.load_eval(data.PromptData, config(), tokenizer, {}) == {}


# --- several


def test_several_sources_by_name(tmp_path, tokenizer):
    near, far = write(tmp_path / "near.jsonl", ROWS[:3]), write(tmp_path / "far.jsonl", ROWS)
    names = f"near={near}, far-2.x={far},made_up=synthetic"
    found = data.load_eval(data.PromptData, config(eval_dataset_name=names), tokenizer)
    assert list(found) == ["near", "far-2.x", "made_up"]
    assert sizes(found) == {"near": 3, "far-2.x": 4, "made_up": 4}
    assert found["near"].display_texts([2]) == [ROWS[2]["prompt"]]
    assert sizes(data.load_eval(data.PromptData, config(eval_dataset_name=f"only={near}"), tokenizer)) == {"only": 3}
    assert sizes(
        data.load_eval(data.PromptData, config(eval_dataset_name=names, dataset_test_split=None), tokenizer)
    ) == sizes(found)


def test_several_objects_by_name(tokenizer):
    objects = {"a": ROWS[:2], "b": datasets.Dataset.from_list(ROWS[:3]), "c": "synthetic"}
    assert sizes(data.load_eval(data.PromptData, config(eval_dataset_name="nowhere.jsonl"), tokenizer, objects)) == {
        "a": 2,
        "b": 3,
        "c": 4,
    }
    with pytest.raises(UserError, match="'b', row 2: 'prompt'.*null"):
        data.load_eval(data.PromptData, config(), tokenizer, {"a": ROWS, "b": [ROWS[0], {"prompt": None}]})
    with pytest.raises(UserError, match="'b'.*int"):
        data.load_eval(data.PromptData, config(), tokenizer, {"a": ROWS, "b": 3})


def test_demonstrations_and_pairs_have_evaluation_sets_too(tokenizer):
    found = data.load_eval(data.DemoData, config(), tokenizer, {"a": ROWS[:2], "b": ROWS})
    assert sizes(found) == {"a": 2, "b": 4}
    assert found["a"].fingerprint == make_demonstrations(data.load_rows(ROWS[:2]), tokenizer).fingerprint
    pairs = data.load_eval(data.PairData, config(), tokenizer, {"a": PAIRS[:2], "b": PAIRS})
    assert sizes(pairs) == {"a": 2, "b": 4}
    assert pairs["a"].fingerprint == make_pairs(data.load_rows(PAIRS[:2]), tokenizer).fingerprint
    synthetic_pairs = data.load_eval(data.PairData, config(eval_dataset_name="x=synthetic,y=synthetic"), tokenizer)
    assert sizes(synthetic_pairs) == {"x": 4, "y": 4}


# --- paths that look like names


@pytest.mark.parametrize("name", ["a=1,b=2.jsonl", "lr=1/val,2.jsonl", "val=x.jsonl", "one,two.jsonl"])
def test_paths_with_signs_of_a_list_are_paths(tmp_path, monkeypatch, tokenizer, name):
    path = write(tmp_path / name, ROWS[:3])
    monkeypatch.chdir(tmp_path)
    for source in (name, path):
        assert sizes(data.load_eval(data.PromptData, config(eval_dataset_name=source), tokenizer)) == {"": 3}


@pytest.mark.parametrize(
    "source",
    [
        r"C:\runs\lr=1,wd=2\val.jsonl",
        "https://example.org/posts?split=a,part=b",
        "data/lr=1,wd=2/val.jsonl",
        "/data/a=1,b=2.jsonl",
        "you/posts",
        "you/posts,b=2",
    ],
)
def test_one_source_is_asked_for_whole(monkeypatch, source):
    asked = []

    def load_rows(source, **options):
        asked.append(source)
        return loading.from_list(ROWS, "rows")

    monkeypatch.setattr(loading, "load_rows", load_rows)
    assert list(data.eval_sets(config(eval_dataset_name=source), "prompts")) == [""]
    assert asked == [source]


names = st.text(st.sampled_from("abXY09_.-"), min_size=1, max_size=5)
sources = st.text(st.characters(codec="ascii", exclude_characters=", \0", min_codepoint=33), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, sources, min_size=1, max_size=4))
def test_a_list_comes_apart_into_what_it_was_made_of(wanted):
    text = ",".join(f"{name}={source}" for name, source in wanted.items())
    assert loading._named_sources(text) == wanted


# --- what is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=", "'a=' is not NAME=SOURCE"),
        ("=synthetic", "'=synthetic' is not NAME=SOURCE"),
        ("a=synthetic,b=", "'b=' is not NAME=SOURCE"),
        ("a=synthetic,=synthetic", "'=synthetic' is not NAME=SOURCE"),
        ("a=synthetic,", "'' is not NAME=SOURCE"),
        ("a=synthetic,synthetic", "'synthetic' is not NAME=SOURCE"),
        ("a=synthetic,a=synthetic", "names two sets 'a'"),
    ],
)
def test_lists_that_are_no_lists_are_named(tokenizer, text, message):
    with pytest.raises(UserError) as error:
        data.load_eval(data.PromptData, config(eval_dataset_name=text), tokenizer)
    assert f"eval_dataset_name {text!r}" in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("name", ["", "a/b", "a b", 3])
def test_objects_need_names_that_metrics_can_have(tokenizer, name):
    with pytest.raises(UserError, match="eval_dataset_name.*metric"):
        data.load_eval(data.PromptData, config(), tokenizer, {"fine": ROWS, name: ROWS})


def test_streams_are_refused_among_several_too(tokenizer):
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(UserError, match="a stream is refused"):
        data.load_eval(data.PromptData, config(), tokenizer, {"a": ROWS, "b": stream})
    with pytest.raises(UserError, match="a stream is refused"):
        data.load_eval(data.PromptData, config(), tokenizer, datasets.IterableDatasetDict(validation=stream))

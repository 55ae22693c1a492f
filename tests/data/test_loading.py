"""Where rows may come from, and what a user is told when they are no good."""

import bz2
import datetime
import gzip
import json

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.feather
import pytest

from rlhf_jax import data
from rlhf_jax.data import arrow_cache, loading, synthetic
from rlhf_jax.data.options import PromptOptions
from rlhf_jax.errors import UserError
from tests.helpers.made_data import data_config, make_demonstrations, make_pairs, make_prompts, write_jsonl

ROWS = [{"prompt": row["prompt"], "completion": row["completion"], "id": i} for i, row in
        enumerate(synthetic.demonstrations(6))]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return data.load_tokenizer("synthetic")


# --- where rows come from


def test_every_format_gives_the_same_rows(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "c.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    write_jsonl(tmp_path / "d.json", ROWS)
    table.to_parquet(str(tmp_path / "e.parquet"))
    table.to_csv(str(tmp_path / "f.csv"))
    table.save_to_disk(str(tmp_path / "g"))
    (arrow,) = (tmp_path / "g").glob("*.arrow")
    pyarrow.feather.write_feather(table.data.table, str(tmp_path / "h.arrow"), compression="uncompressed")
    sources = [
        tmp_path / name for name in ("a.jsonl", "b.json", "c.json", "d.json", "e.parquet", "f.csv", "g", "h.arrow")
    ]
    for source in (*map(str, sources), str(arrow), ROWS, table, datasets.DatasetDict(train=table)):
        rows = data.load_rows(source)
        assert list(rows) == ROWS and rows.column_names == ("prompt", "completion", "id"), source
        assert list(rows.first(2)) == ROWS[:2]


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "zst": lambda text: pa.compress(text, "zstd", asbytes=True)}


@pytest.mark.parametrize("compression", list(COMPRESS))
def test_compressed_files_give_the_same_rows(tmp_path, compression, monkeypatch):
    def read(name, text):
        path = tmp_path / f"{name}.{compression}"
        path.write_bytes(COMPRESS[compression](text.encode()))
        return data.load_rows(str(path))

    lines = "".join(json.dumps(row) + "\r\n" for row in ROWS)
    table = datasets.Dataset.from_list(ROWS)
    table.to_csv(str(tmp_path / "plain.csv"))
    for name, text in {
        "a.jsonl": "\ufeff" + lines,
        "b.json": json.dumps(ROWS),
        "c.json": lines,
        "d.CSV": (tmp_path / "plain.csv").read_text(),
    }.items():
        assert list(read(name, text)) == ROWS, name
    with pytest.raises(UserError, match=f"e.jsonl.{compression}, line 2: is not JSON"):
        make_prompts(read("e.jsonl", '{"prompt": "x"}\n{'), data.load_tokenizer("synthetic"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"train.jsonl.{compression}").write_bytes(COMPRESS[compression](lines.encode()))
    (folder / "validation.jsonl").write_text(lines)
    assert list(data.load_rows(str(folder))) == ROWS
    monkeypatch.setattr(arrow_cache, "MINIMUM_BYTES", 1)
    assert list(read("f.jsonl", lines)) == ROWS and list(read("g.csv", (tmp_path / "plain.csv").read_text())) == ROWS


def test_gzip_files_of_several_parts_are_read_whole_and_broken_ones_are_named(tmp_path):
    line = json.dumps(ROWS[0]).encode() + b"\n"
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(line) + gzip.compress(line))
    assert len(data.load_rows(str(path))) == 2
    whole = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS))
    for name in ("b.jsonl.gz", "b.json.gz", "b.csv.gz"):
        for broken in (line, whole[:-40]):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(UserError, match=f"{name}: cannot be read as {name[2:]}"):
                data.load_rows(str(tmp_path / name))
    for name in ("a.jsonl.xz", "a.parquet.gz", "a.gz"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UserError, match=f"{name}: data files end in .*may be compressed .*gz, .bz2, .zst"):
            data.load_rows(str(tmp_path / name))


def test_a_missing_compressed_file_is_no_name_on_the_hub():
    with pytest.raises(UserError, match="posts.jsonl.gz: there is no such file or folder"):
        data.load_rows("posts.jsonl.gz")


COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_an_object_of_columns_is_columns_in_json(tmp_path):
    by_index = {name: {str(i): value for i, value in enumerate(values)} for name, values in COLUMNS.items()}
    for name, content in (("a.json", COLUMNS), ("b.jsonl", COLUMNS), ("c.json", by_index), ("d.json", {"data": ROWS})):
        (tmp_path / name).write_text(json.dumps(content))
        assert list(data.load_rows(str(tmp_path / name))) == ROWS, name
    one_column, chats = {"prompt": ["a", "b"]}, {"messages": [CHAT, CHAT]}
    for content, rows in (
        (one_column, [{"prompt": "a"}, {"prompt": "b"}]),
        (chats, [{"messages": CHAT}] * 2),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, [{"prompt": CHAT[:1], "completion": CHAT[1:]}]),  # a row
        ({"prompt": "a", "tags": ["b"], "more": ["c"]}, [{"prompt": "a", "tags": ["b"], "more": ["c"]}]),
    ):
        for name in ("e.json", "e.jsonl"):
            (tmp_path / name).write_text(json.dumps(content))
            assert list(data.load_rows(str(tmp_path / name))) == rows
    (tmp_path / "f.json").write_text(json.dumps({"prompt": ["a", "b"], "completion": ["c"]}))
    with pytest.raises(UserError, match="f.json: holds columns of different lengths: prompt 2, completion 1"):
        data.load_rows(str(tmp_path / "f.json"))
    (tmp_path / "g.json").write_text(json.dumps({"train": ROWS, "test": ROWS}))
    with pytest.raises(UserError, match="g.json: holds several lists of objects: train, test; give each a file"):
        data.load_rows(str(tmp_path / "g.json"))


def test_large_objects_of_columns_are_cached_as_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_cache, "MINIMUM_BYTES", 1)
    for name in ("a.json", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(COLUMNS))
        rows = data.load_rows(str(tmp_path / name))
        assert list(rows) == ROWS and rows.fingerprint is not None


def test_objects_of_python_give_the_same_rows():
    frame = pandas.DataFrame(COLUMNS, index=range(10, 16))
    for source in (
        frame,
        COLUMNS,
        {name: np.asarray(values) for name, values in COLUMNS.items()},
        {name: frame[name] for name in frame},
        {"train": ROWS},
        {"train": frame, "test": frame[:1]},
        {"train": COLUMNS},
        datasets.Dataset.from_list(ROWS).data.table,
        tuple(ROWS),
    ):
        rows = data.load_rows(source)
        assert list(rows) == ROWS and rows.column_names == ("prompt", "completion", "id")
        assert {type(value) for row in rows for value in row.values()} == {str, int}


def test_missing_values_arrays_and_mixed_columns_of_pandas_become_plain_values(tmp_path):
    frame = pandas.DataFrame(
        {"messages": [CHAT, CHAT], "solution": [7.0, None], "mixed": [7, "x"], "gap": [pandas.NA, 3]}
    )
    expected = [
        {"messages": CHAT, "solution": 7.0, "mixed": 7, "gap": None},
        {"messages": CHAT, "solution": None, "mixed": "x", "gap": 3},
    ]
    assert list(data.load_rows(frame)) == expected
    frame.drop(columns="mixed").to_parquet(tmp_path / "a.parquet")  # whose lists pandas reads as arrays
    (first, _) = data.load_rows(pandas.read_parquet(tmp_path / "a.parquet"))
    assert first == {"messages": CHAT, "solution": 7.0, "gap": None}


def test_objects_that_are_no_data_are_named_with_those_that_are():
    forms = "datasets.Dataset or DatasetDict, a pandas DataFrame, a list of dicts or a dict of lists"
    for source in (3, {1, 2}, map(str, ROWS), {"train": 3}):
        with pytest.raises(UserError, match=f"train data of type .*{forms}"):
            data.load_rows(source)
    with pytest.raises(
        UserError, match="the columns given as train data: holds columns of different lengths: a 1, b 2"
    ):
        data.load_rows({"a": ["x"], "b": ["x", "y"]})
    with pytest.raises(UserError, match="two columns have the same name"):
        data.load_rows(pandas.DataFrame([["x", "y"]], columns=["prompt", "prompt"]))
    with pytest.raises(UserError, match="the dict given has no split 'train'.*validation"):
        data.load_rows({"validation": ROWS})


def test_columns_of_csv_files_come_back_as_they_were_written(tmp_path):
    columns = {
        "prompt": ["1", "2"],  # text whatever it holds
        "count": ["7", "-3"],
        "gap": ["7", ""],
        "padded": ["007", "12"],
        "price": ["3.10", "2.5"],
        "share": ["1", "2.5"],
        "power": ["1e5", "2"],
        "flag": ["true", "false"],
        "shout": ["TRUE", "false"],
        "missing": ["NA", "3"],
        "empty": ["", ""],
        "word": ["NA", "null"],
        "day": ["2024-01-05", "2024-02-29"],
        "question": ["5", "6"],
    }
    lines = [",".join(columns), *(",".join(values) for values in zip(*columns.values()))]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    rows = list(data.load_rows(str(tmp_path / "a.csv"), text_columns=["question"]))
    typed = {
        "count": [7, -3],
        "gap": [7, None],
        "share": [1.0, 2.5],
        "flag": [True, False],
        "day": [datetime.date(2024, 1, 5), datetime.date(2024, 2, 29)],
    }
    for name, values in columns.items():
        assert [row[name] for row in rows] == typed.get(name, values), name


def test_the_columns_of_a_config_are_text_in_csv_files(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    path.write_text("question,answer,chosen,rejected,margin\n1,2,3,4,0.50\n5,6,7,8,1\n")
    options = {"dataset_name": str(path), "prompt_column": "question", "completion_column": "answer"}
    prompts = data.load(data.PromptData, data_config(**options), tokenizer)
    assert prompts.display_texts([0, 1]) == ["1", "5"] and prompts.columns([0])["answer"] == ["2"]
    assert len(data.load(data.DemoData, data_config(**options), tokenizer)) == 2
    pairs = data_config(**options, chosen_column="chosen", rejected_column="rejected", margin_column="margin")
    assert data.load(data.PairData, pairs, tokenizer).margin.tolist() == [0.5, 1.0]
    mixed = data_config(datasets=({"path": str(path), "format": {"prompt": "{answer} of {margin}"}},))
    mixed = PromptOptions(**{name: vars(mixed)[name] for name in PromptOptions.__dataclass_fields__})
    assert data.load(data.PromptData, mixed, tokenizer).display_texts([0, 1]) == ["2 of 0.50", "6 of 1"]


def test_folders_by_split(tmp_path):
    write_jsonl(tmp_path / "posts_train.jsonl", ROWS[:4])
    write_jsonl(tmp_path / "posts_val.jsonl", ROWS[4:])
    assert len(data.load_rows(str(tmp_path))) == 4
    assert len(data.load_rows(str(tmp_path), split="validation")) == 2
    with pytest.raises(UserError, match="'test'.*train, validation"):
        data.load_rows(str(tmp_path), split="test")
    write_jsonl(tmp_path / "pairs_train.jsonl", ROWS)
    with pytest.raises(UserError, match="'train'.*pairs_train.jsonl, posts_train.jsonl"):
        data.load_rows(str(tmp_path))


def test_shards_of_a_folder_are_joined_and_named(tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train-00000-of-00002.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "data" / "train-00001-of-00002.jsonl", ROWS[3:])
    rows = data.load_rows(str(tmp_path))
    assert list(rows) == ROWS and rows.location(3).endswith("train-00001-of-00002.jsonl, line 1")


def test_saved_data_sets_have_splits(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=table, test=table.select(range(2))).save_to_disk(str(tmp_path / "x"))
    assert len(data.load_rows(str(tmp_path / "x"), split="test")) == 2
    with pytest.raises(UserError, match="'validation'.*train, test"):
        data.load_rows(str(tmp_path / "x"), split="validation")


def test_a_plain_file_is_one_split_and_needs_an_evaluation_file(tmp_path, tokenizer):
    name = write_jsonl(tmp_path / "prompts_train.jsonl", ROWS)
    assert (
        len(data.load(data.PromptData, data_config(dataset_name=name, dataset_train_split="anything"), tokenizer)) == 6
    )
    assert data.load_eval(data.PromptData, data_config(dataset_name=name), tokenizer) == {}
    found = data.load_eval(
        data.PromptData, data_config(dataset_name=name, eval_dataset_name=name, max_eval_samples=2), tokenizer
    )
    assert [len(one) for one in found.values()] == [2]
    assert len(data.load(data.DemoData, data_config(dataset_name="nowhere.jsonl"), tokenizer, ROWS)) == 6


def test_synthetic_by_config(tokenizer):
    prompts = data.load(data.PromptData, data_config(max_train_samples=5), tokenizer)
    assert prompts.columns([0])["completion"] == [synthetic.demonstrations(1)[0]["completion"]]
    assert data.load_eval(data.PromptData, data_config(dataset_test_split=None), tokenizer) == {}
    (one,) = data.load_eval(data.DemoData, data_config(max_eval_samples=7), tokenizer).values()
    assert len(one) == 7
    assert data.load_normalization_data(data_config(), tokenizer) is None
    assert len(data.load_normalization_data(data_config(normalize_dataset_name="synthetic"), tokenizer)) == 4


def test_hub_answers_are_passed_on(monkeypatch):
    asked = {}

    def load_dataset(name, config, split, revision):
        asked.update(name=name, config=config, split=split, revision=revision)
        if split == "dev":
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train', 'validation'].")
        if config is None:
            raise ValueError("Config name is missing. Please pick one among the available configs: ['a', 'b']")
        if revision == "gone":
            raise ConnectionError("Couldn't reach 'you/posts' on the Hub")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = data.load_rows("you/posts", split="train", dataset_config="a", dataset_revision="v1")
    assert asked == {"name": "you/posts", "config": "a", "split": "train", "revision": "v1"} and len(rows) == 6
    assert rows.location(2) == "you/posts (train), row 3"
    with pytest.raises(UserError, match="you/posts.*'dev'.*train, validation. Set dataset_train_split"):
        data.load_rows("you/posts", split="dev", dataset_config="a")
    with pytest.raises(UserError, match="available configs.*Set dataset_config"):
        data.load_rows("you/posts")
    with pytest.raises(UserError, match=r"'you/posts' \(revision gone\).*Couldn't reach"):
        data.load_rows("you/posts", dataset_config="a", dataset_revision="gone")


# --- what is refused


def test_streams_are_refused():
    with pytest.raises(UserError, match="a stream is refused"):
        data.load_rows(datasets.Dataset.from_list(ROWS).to_iterable_dataset())


def test_files_that_are_no_data_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.json").write_text('{"prompt": \n nonsense}')
    (tmp_path / "d.parquet").write_text("not parquet")
    (tmp_path / "e.jsonl").write_text("\n\n")
    (tmp_path / "f.json").write_text("3")
    (tmp_path / "g").mkdir()
    for name, message in {
        "a.txt": "a.txt: data files end in .jsonl, .json, .parquet, .csv, .arrow, not .txt",
        "b.jsonl": "b.jsonl: is empty",
        "c.json": "c.json, line 2: is not JSON",
        "d.parquet": "d.parquet: cannot be read as parquet",
        "e.jsonl": "e.jsonl: has no rows",
        "f.json": "f.json: holds an int, not a list of objects",
        "g": "g: no data files",
        "h.jsonl": "h.jsonl: there is no such file or folder",
    }.items():
        with pytest.raises(UserError, match=message):
            data.load_rows(str(tmp_path / name))
    with pytest.raises(UserError, match="train data.*int"):
        data.load_rows(3)
    with pytest.raises(UserError, match="train data.*no rows"):
        data.load_rows([])


def test_missing_columns_are_named_with_the_option(tmp_path, tokenizer):
    rows = data.load_rows(write_jsonl(tmp_path / "a.jsonl", [{"prompts": "x", "completion": " y"}]))
    with pytest.raises(
        UserError,
        match="a.jsonl has no column 'prompt'; it has prompts, completion. Set prompt_column to the right one "
        r"\(did you mean 'prompts'\?\)",
    ):
        make_prompts(rows, tokenizer)
    assert len(make_prompts(rows, tokenizer, prompt_column="prompts")) == 1
    with pytest.raises(UserError, match="no column 'summary'.*completion_column"):
        make_demonstrations(rows, tokenizer, prompt_column="prompts", completion_column="summary")
    with pytest.raises(UserError, match="no column 'chosen'.*chosen_column"):
        make_pairs(rows, tokenizer)


BAD = {
    '{"prompt": "x", ': "is not JSON: ",
    "[1, 2]": "is a list, not an object",
    '{"completion": " met anna"}': "'prompt' is missing",
    '{"prompt": null, "completion": " met anna"}': "'prompt' is null",
    '{"prompt": 7, "completion": " met anna"}': "'prompt' is an int, not text",
    '{"prompt": [{"role": "user"}], "completion": " x"}': "'prompt' is a list, not text",
    '{"prompt": "", "completion": " met anna"}': "'prompt' is empty",
    '{"prompt": "x", "completion": " \\n"}': "'completion' is empty",
}


@pytest.mark.parametrize("line", list(BAD))
def test_bad_rows_are_named_by_file_and_line_or_skipped_and_counted(tmp_path, tokenizer, line):
    rows = data.load_rows(write_jsonl(tmp_path / "a.jsonl", [ROWS[0], "", line, ROWS[1], line]))
    with pytest.raises(UserError) as error:
        make_demonstrations(rows, tokenizer)
    assert f"a.jsonl, line 3: {BAD[line]}" in str(error.value)
    assert "2 of 4 rows are bad" in str(error.value) and "on_bad_row=skip" in str(error.value)
    made = make_demonstrations(rows, tokenizer, on_bad_row="skip")
    assert (len(made), made.report.read, made.report.bad) == (2, 4, 2)
    assert "2 bad" in str(made.report) and "line 3" in str(made.report)


def test_no_good_row_is_an_error_even_when_skipping(tokenizer):
    with pytest.raises(UserError, match="No row is usable"):
        make_prompts(data.load_rows([{"prompt": ""}]), tokenizer, on_bad_row="skip")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rejected": " met anna"}, "'chosen' and 'rejected' are the same"),
        ({"rejected": None}, "'rejected' is null"),
        ({"margin": "much"}, "'margin' is 'much', not a number"),
        ({"margin": float("nan")}, "'margin' is nan, not a number"),
    ],
)
def test_bad_pairs_are_named(tokenizer, extra, message):
    good = {"prompt": ROWS[0]["prompt"], "chosen": " met anna", "rejected": " met omar", "margin": 1}
    rows = data.load_rows([good, {**good, **extra}])
    with pytest.raises(UserError, match=f"row 2: {message}"):
        make_pairs(rows, tokenizer, margin_column="margin")
    assert make_pairs(rows, tokenizer, margin_column="margin", on_bad_row="skip").report.bad == 1


def test_rows_are_iterated_in_chunks_without_loss():
    table = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(2500)])
    assert [row["prompt"] for row in loading.load_rows(table)] == [str(i) for i in range(2500)]

import collections
import itertools
import json

import numpy as np
import pytest

from rlhf_jax import data
from rlhf_jax.config import RewardConfig, RLOOConfig, SFTConfig, files
from rlhf_jax.data import mixture, reasoning_gym, synthetic
from rlhf_jax.data.mixture import Shares
from rlhf_jax.errors import UserError
from tests.helpers.chat_tokenizer import bytes_tokenizer, user
from tests.helpers.made_data import write_jsonl


@pytest.fixture
def paths(tmp_path):
    """Three files of demonstrations, of 40, 10 and 25 rows."""
    made = []
    for number, count in enumerate((40, 10, 25)):
        rows = [{**row, "of": number} for row in synthetic.demonstrations(count, seed=number)]
        made.append(write_jsonl(tmp_path / f"{number}.jsonl", rows))
    return made


def config(entries, kind=SFTConfig, **options):
    made = files.from_json(files.to_json(kind(datasets=tuple(entries), **options)), "config.json")
    assert not list(made.problems()), list(made.problems())
    return made


def entries(paths, **lists):
    return [{"path": path, **{name: values[i] for name, values in lists.items()}} for i, path in enumerate(paths)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_sets_have_their_shares_and_repeat_no_row_before_all_of_theirs_were_used(shuffle):
    shares = Shares((40, 10, 25), (2.0, 1.0, 1.0))
    assert shares.counts == (37, 19, 19)
    sets = np.repeat([0, 1, 2], shares.sizes)
    visited = [[], [], []]
    for epoch in range(5):
        order = shares.order(3, epoch, shuffle)
        assert collections.Counter(sets[order].tolist()) == {0: 37, 1: 19, 2: 19}
        for row in order.tolist():
            visited[sets[row]].append(row)
    for number, rows in enumerate(visited):
        size = shares.sizes[number]
        for start in range(0, len(rows) - size + 1, size):
            assert len(set(rows[start : start + size])) == size


def test_the_order_is_a_function_of_seed_and_epoch():
    shares = Shares((40, 10), (1.0, 3.0))
    order = shares.order(1, 7, True)
    for epoch in (0, 3):
        shares.order(1, epoch, True)
    np.testing.assert_array_equal(Shares((40, 10), (1.0, 3.0)).order(1, 7, True), order)
    assert (order != shares.order(2, 7, True)).any() and (order != shares.order(1, 8, True)).any()


def test_a_mixture_by_weights_has_batches_of_all_sets_at_every_step(paths):
    made = data.load(data.DemoData, config(entries(paths, weight=[3, 1, 1])), data.load_tokenizer("synthetic"))
    assert len(made) == 75 and made.report.kept == 75
    sets = np.repeat([0, 1, 2], [40, 10, 25])
    steps = {step: made.rows_of(42, step, 15) for step in range(10)}
    counts = np.bincount(sets[np.concatenate([steps[step] for step in range(5)])])
    assert counts.tolist() == [45, 15, 15]  # rows of the small set occur twice, some of the others not
    for step in (7, 2):
        np.testing.assert_array_equal(made.rows_of(42, step, 15), steps[step])
    rows = [json.loads(line) for path in paths for line in open(path)]
    batch, tokenizer = made.batch(42, 3, 15), data.load_tokenizer("synthetic")
    for row, tokens, length in zip(steps[3], batch.tokens, batch.lengths, strict=True):
        text = rows[row]["prompt"] + rows[row]["completion"]
        assert tokens[:length].tolist() == [*tokenizer.encode(text), tokenizer.eos_id]


def test_without_weights_every_row_comes_once_an_epoch(paths, tmp_path):
    made = data.load(data.PromptData, config(entries(paths), RLOOConfig), data.load_tokenizer("synthetic"))
    assert sorted(np.concatenate([made.rows_of(1, step, 25) for step in range(3)]).tolist()) == list(range(75))
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(open(path).read() for path in paths))
    one = data.load(data.PromptData, RLOOConfig(dataset_name=str(whole)), data.load_tokenizer("synthetic"))
    np.testing.assert_array_equal(made.batch(1, 1, 25).tokens, one.batch(1, 1, 25).tokens)
    assert made.columns([0, 45, 74])["of"] == [0, 1, 2] and made.texts([45]) == one.texts([45])


def test_fractions_are_trls(paths):
    trl = pytest.importorskip("trl.scripts.utils")
    fractions = [0.5, 0.2, 0.3]
    made = data.load(
        data.PromptData, config(entries(paths, fraction=fractions), RLOOConfig), data.load_tokenizer("synthetic")
    )
    # TRL reads a file by its builder's name and data_files.
    theirs = [
        trl.DatasetConfig(path="json", data_files=path, fraction=fraction)
        for path, fraction in zip(paths, fractions, strict=True)
    ]
    expected = trl.get_dataset(trl.DatasetMixtureConfig(datasets=theirs))["train"]
    assert made.texts(range(len(made))) == expected["prompt"][:]


def test_sets_have_columns_formats_and_limits_of_their_own(paths, tmp_path):
    other = tmp_path / "other.jsonl"
    rows = [{"title": f"met {name}", "n": 1, "answer": " lost keys"} for name in ("anna", "omar")]
    write_jsonl(other, [*rows, {"title": None, "n": 3, "answer": " x"}])
    own = {"path": str(other), "format": {"prompt": "{title}; {n} {{}}"}, "completion_column": "answer"}
    made_of = config([{"path": paths[0], "max_train_samples": 3}, {**own, "on_bad_row": "skip"}])
    tokenizer = bytes_tokenizer()
    made = data.load(data.DemoData, made_of, tokenizer)
    assert len(made) == 5 and tokenizer.decode(made.tokens[3]) == "<bos>met anna; 1 {} lost keys<|im_end|>"
    assert "line 3: 'title', of which the format of 'prompt' is made, is NoneType" in made.report.first_bad
    with pytest.raises(UserError, match="other.jsonl, line 3: 'title'"):
        data.load(data.DemoData, config([own]), tokenizer)


def test_pairs_are_mixed(tmp_path):
    for name, count in (("a", 12), ("b", 4)):
        rows = synthetic.preference_pairs(count, seed=count)
        write_jsonl(tmp_path / f"{name}.jsonl", [{**row, "m": 2} for row in rows])
    both = [{"path": str(tmp_path / "a.jsonl"), "margin_column": "m"}, {"path": str(tmp_path / "b.jsonl")}]
    made = data.load(data.PairData, config(both, RewardConfig), data.load_tokenizer("synthetic"))
    assert made.margin.tolist() == [2.0] * 12 + [0.0] * 4 and len(made) == 16
    assert made.in_order(12, 4).margin.tolist() == [0.0] * 4


def test_packed_rows_of_a_mixture_by_weights_are_of_one_set_each(paths):
    made = data.load(data.DemoData, config(entries(paths, weight=[1, 1, 2])), data.load_tokenizer("synthetic"))
    packed = data.pack(made, 200, False)
    sets = np.repeat([0, 1, 2], [40, 10, 25])
    assert all(len({sets[row] for row in pack}) == 1 for pack in packed.packs)
    assert sorted(itertools.chain(*(pack.tolist() for pack in packed.packs))) == list(range(75))
    rows = len(packed)
    of = [sets[packed.packs[row][0]] for row in packed.rows_of(42, 0, rows)]
    assert abs(of.count(2) - rows / 2) <= 1 and packed.shares.sizes == tuple(
        sum(sets[pack[0]] == number for pack in packed.packs) for number in range(3)
    )


def test_a_changed_mixture_has_another_fingerprint(paths):
    tokenizer = data.load_tokenizer("synthetic")
    prints = {
        data.load(data.DemoData, config(made), tokenizer).fingerprint
        for made in (
            entries(paths),
            entries(paths, weight=[1, 1, 1]),
            entries(paths, weight=[1, 1, 2]),
            entries(paths[::-1]),
            entries(paths, max_train_samples=[9, 9, 9]),
        )
    }
    assert len(prints) == 5


def test_texts_and_conversations_are_not_mixed(paths, tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": [user("a")]}) + "\n")
    both = [{"path": paths[0]}, {"path": str(tmp_path / "chat.jsonl")}]
    with pytest.raises(UserError, match=r"chat.jsonl has conversations and .*0.jsonl has texts"):
        data.load(data.PromptData, config(both, RLOOConfig), bytes_tokenizer())


def test_an_object_takes_the_place_of_the_mixture_and_it_has_no_evaluation_data(paths):
    made_of = config(entries(paths))
    assert data.load_eval(data.DemoData, made_of, data.load_tokenizer("synthetic")) == {}
    made = data.load(data.DemoData, made_of, data.load_tokenizer("synthetic"), synthetic.demonstrations(5))
    assert len(made) == 5


@pytest.mark.parametrize(
    "wrong, named",
    [
        ([], "datasets is empty"),
        ([{"paht": "a"}], "entry 1: paht is not known"),
        ([{"weight": 1}], "entry 1 has no 'path'"),
        ([{"path": "a", "weight": 0}], "entry 1: weight is 0"),
        ([{"path": "a", "weight": 1}, {"path": "b"}], "give weight to all data sets"),
        ([{"path": "a", "weight": 1, "fraction": 1}], "weight or fraction, not both"),
        ([{"path": "a"}, {"path": "b", "max_train_samples": 0}], "entry 2: max_train_samples is 0"),
        ([{"path": "a", "prompt_column": 3}], "entry 1: prompt_column = 3"),
        ([{"path": "a", "chosen_column": "b"}], "entry 1: chosen_column is not known"),
        ([{"path": "a", "parameters": {"a": 1}}], "entry 1: parameters is a dict for a path"),
        ([{"path": "reasoning_gym:chain_sum", "parameters": 1}], "entry 1: parameters is a dict for a path"),
        ([{"path": "a", "format": "x"}], "entry 1: format is 'x'"),
        ([{"path": "a", "format": {"prompt": "{a!r}"}}], "entry 1: format of 'prompt'"),
        ([{"path": "a", "format": {"prompt": "{a"}}], "entry 1: format of 'prompt'"),
        ([{"path": "https://me:secret@x/a"}], "datasets is a URL with a user name"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_named(wrong, named):
    found = list(SFTConfig(datasets=tuple(wrong)).problems())
    assert any(named in line for line in found), found


def test_parameters_of_a_task_may_be_a_dict():
    entry = {"path": "reasoning_gym:chain_sum", "parameters": {"max_terms": 3, "operators": ["+", "-"]}}
    config = SFTConfig(datasets=(entry,))
    assert not list(config.problems())
    found = reasoning_gym.parse(config.with_entry(entry).dataset_name)
    assert (found.task, found.parameters) == ("chain_sum", entry["parameters"])


def test_a_format_reads_columns_alone():
    form = mixture.Format({"prompt": "{a.b}"})
    assert "is missing" in form({"a": "x"})  # no attributes: 'a.b' is a column
    assert form({"a.b": "x"})["prompt"] == "x"

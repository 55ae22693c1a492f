"""Input that nobody means well: it is refused by name, or shown as what it is, and no work is lost to it."""

import dataclasses
import io
import json
import os
import pathlib
import shutil
import sys
import time
import types
import typing

import pytest

from rlhf_jax import data, train
from rlhf_jax.algorithms.options import divisors
from rlhf_jax.config import STAGES, PPOConfig, SFTConfig, command_line
from rlhf_jax.config import files as config_files
from rlhf_jax.config.check import check
from rlhf_jax.data import tldr
from rlhf_jax.errors import UserError
from rlhf_jax.option import checked_types, field_types
from rlhf_jax.runtime import loop, run_folder
from rlhf_jax.utils import tables
from rlhf_jax.utils.output import guarded_output
from rlhf_jax.utils.strict_json import json_text
from tests.helpers.control_characters import EVIL, obeyed
from tests.helpers.made_data import make_prompts, write_jsonl
from tests.helpers.tensorboard import events
from tests.helpers.user_files import POSTS, arguments, config_with, mentions

MEGABYTE = 1_000_000


# --- control characters


def test_tables_and_errors_show_escape_sequences_as_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    stream = io.StringIO()
    tables.show([{f"prompt{EVIL}": f"a {EVIL}", "n": 1.0}], f"title {EVIL}", stream=stream)
    shown = stream.getvalue()
    assert not obeyed(shown) and shown.count("\\x1b]0;owned") == 3
    assert not obeyed(tables.markdown([{f"prompt{EVIL}": EVIL}]))
    assert not obeyed(str(UserError(f"column {EVIL}"))) and len(str(UserError("x" * 10**7))) < 30_000


def test_json_lines_hold_any_text_and_are_harmless_to_look_at(tmp_path):
    path = tmp_path / "3.jsonl"
    rows = [{f"k{EVIL}": EVIL + "\x7f \ud800 \udfff\ud83d"}, {"b": "caf\xe9 \U0001f600"}]
    path.write_text("".join(json_text(row) + "\n" for row in rows), encoding="utf-8")
    assert not obeyed(path.read_text(encoding="utf-8")) and "caf\xe9 \U0001f600" in path.read_text(encoding="utf-8")
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == rows


def test_a_run_on_control_characters_ends_well_and_shows_none(user_files, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def reward(completions, note, log_extra, **_):\n"
        "    log_extra('note \\x1b[31m', note)\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    evil = [{"prompt": f"met anna {EVIL} {i}", "note": f"{EVIL} \ud800"} for i in range(4)]
    options = {
        "dataset_name": write_jsonl(tmp_path / "posts.jsonl", evil),
        "reward_funcs": f"{tmp_path}/mine.py:reward",
    }
    options |= {"reward_model_path": None, "value_model": "shared_backbone", "log_completions": True}
    options |= {"num_sample_generations": 1, "report_to": "tensorboard"}
    run = tmp_path / "run"
    assert train.main(arguments(user_files, "ppo", run, **options)) == 0
    said = capsys.readouterr()
    assert not obeyed(said.out + said.err) and "\\x1b[2J" in said.out
    found = [json.loads(line) for line in (run / "completions" / "training_1.jsonl").read_text().splitlines()]
    assert len(found) == 4 and found[0]["note \x1b[31m"].endswith("\ud800")
    written = [value for event in events(run / "tensorboard") if event.summary for value in event.summary.value]
    shown = [value.tensor.string_val[0].decode() for value in written if value.tensor.string_val]
    assert len(shown) == 2 and not any(map(obeyed, shown))


def test_a_terminal_of_another_encoding_does_not_end_a_run(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with guarded_output():
        print("caf\xe9 \U0001f600", flush=True)
    assert raw.getvalue() == b"caf\\xe9 \\U0001f600\n"


def test_a_run_from_python_prints_any_character_in_any_terminal(monkeypatch):
    def stage(config, **_):
        print("caf\xe9", flush=True)
        return train.Result(config.run_dir, {}, {})

    raw = io.BytesIO()
    monkeypatch.setattr(train, "train_stage", stage)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    train.run(SFTConfig(model_name_or_path=None, scratch_model="1x16x2", tokenizer_name_or_path="synthetic"))
    assert raw.getvalue() == b"caf\\xe9\n"


class Unprintable:
    def __repr__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("problem", ["a value without a text", "a folder that cannot be written"])
def test_a_table_of_samples_never_ends_a_run(tmp_path, capsys, problem):
    folder = run_folder.RunFolder(str(tmp_path / "run"))
    value = 1.0
    if problem == "a value without a text":
        value = Unprintable()
    else:
        (tmp_path / "run").write_text("a file")
    stage, options = (
        types.SimpleNamespace(name="ppo"),
        types.SimpleNamespace(log_unique_prompts=False, num_completions_to_print=None),
    )
    seen = []
    callback = types.SimpleNamespace(on_completions=lambda *given: seen.append(given))
    run = types.SimpleNamespace(config=options, folder=folder, callbacks=[callback], step=3, stage=stage)
    run.logger = types.SimpleNamespace(text=lambda *_: None)
    rows = [{"prompt": "a", "note": value}]
    loop.Loop.show(run, (rows, []), "samples")
    warning = capsys.readouterr().err
    assert "warning: " in warning and "The run continues" in warning and seen == [(3, rows, "samples")]
    if problem == "a value without a text":
        assert (
            tmp_path / "run" / "completions" / "3.jsonl"
        ).read_text() == '{"prompt": "a", "note": "<Unprintable>"}\n'


def test_what_a_policy_of_nan_draws_is_left_out_of_texts():
    tokenizer = data.load_tokenizer("synthetic")
    assert tokenizer.decode([-1, *tokenizer.encode(" met anna"), -(2**31)]) == " met anna"


# --- prompts of a megabyte

LONG = {
    "words": "met anna " * (MEGABYTE // 9),
    "one word": "a" * (MEGABYTE // 4),
    "a post": tldr.format_post("a", "b", "met anna " * (MEGABYTE // 9)),
    "titles without a post": "SUBREDDIT: r/" + "\n\nTITLE: x" * (MEGABYTE // 10) + "\n\nTL;DR:",
    "posts without an end": "SUBREDDIT: r/" + "\n\nTITLE: \n\nPOST: x" * (MEGABYTE // 18),
}


@pytest.mark.parametrize("name", LONG)
def test_a_prompt_of_a_megabyte_is_cut_or_dropped_as_any_long_prompt_in_seconds(name):
    tokenizer = data.load_tokenizer("synthetic")
    rows = data.load_rows([{"prompt": LONG[name]}, {"prompt": "met anna"}])
    start = time.monotonic()
    cut = make_prompts(rows, tokenizer, query_length=16)
    dropped = make_prompts(rows, tokenizer, query_length=16, query_overflow="drop")
    assert time.monotonic() - start < 60
    long = name != "one word"  # which the built-in words have no token for: it is one [UNK]
    assert (len(cut), cut.report.truncated, cut.report.longest) == (2, long, 16 if long else 2)
    assert (len(dropped), dropped.report.dropped) == (2 - long, long)


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("SUBREDDIT: r/a\n\nTITLE: b\n\nPOST: c\n\nTL;DR:", ("a", "b", "c")),
        ("SUBREDDIT: r/\n\nTITLE: \n\nPOST: \n\nTL;DR:", ("", "", "")),
        ("SUBREDDIT: r/\n\nPOST: a\n\nTITLE: b\n\nTITLE: c\n\nPOST: d\n\nPOST: e\n\nTL;DR:\n\nTL;DR:", None),
        ("SUBREDDIT: r/a\n\nPOST: b\n\nTITLE: c\n\nTL;DR:", ()),
        ("SUBREDDIT: r/a\n\nTITLE: b\n\nPOST: c\n\nTL;DR: d", ()),
        (" SUBREDDIT: r/a\n\nTITLE: b\n\nPOST: c\n\nTL;DR:", ()),
        ("", ()),
    ],
)
def test_posts_are_parsed_to_what_formats_to_them_again(prompt, parts):
    found = tldr.parse_post(prompt)
    if parts == ():
        assert found is None
        return
    assert tldr.format_post(*found) == prompt and (parts is None or found == parts)


# --- data files


def test_links_and_pipes_in_the_place_of_data_are_named_and_a_link_to_data_is_read(user_files, refusal, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "nowhere.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle.jsonl").symlink_to(tmp_path / "circle.jsonl")
    for name in ("pipe.jsonl", "nowhere.jsonl", "circle.jsonl"):
        mentions(refusal(dataset_name=tmp_path / name), tmp_path / name, "no such file")
    (tmp_path / "linked.jsonl").symlink_to(user_files.posts)
    assert len(data.load_rows(str(tmp_path / "linked.jsonl"))) == POSTS


# --- run folders


def test_a_run_dir_that_cannot_be_is_named_before_any_model_is_opened(refusal, tmp_path, monkeypatch):
    (tmp_path / "nowhere").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    monkeypatch.setattr(train, "open_stage", None)
    for run_dir, part in (
        ("a\0b", "NUL"),
        ("~nobody_of_this_name/x", "no user of that name"),
        (tmp_path / "nowhere", f"is a link to {tmp_path / 'nothing'}"),
        (tmp_path / "circle", "is a link to"),
    ):
        with pytest.raises(UserError, match="--run_dir"):
            run_folder.check(str(run_dir), {"stage": "ppo"})
        if "\0" not in str(run_dir):
            mentions(refusal(run_dir=run_dir), "--run_dir", part)


@pytest.mark.parametrize("run_dir", ["/proc/no/run", "x" * 300, "\ud800"])
def test_a_run_dir_that_cannot_be_written_is_named(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--run_dir .* cannot be written: "):
        run_folder.RunFolder.open(run_dir, {"stage": "ppo"})


def test_a_link_in_the_place_of_the_final_model_is_refused(user_files, refusal, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"stage": "sft"}')
    (run / "policy").symlink_to(user_files.sft)
    before = {path: path.read_bytes() for path in user_files.sft.iterdir()}
    mentions(refusal("sft", run_dir=run), run / "policy", f"a link to {user_files.sft}", "would overwrite")
    assert {path: path.read_bytes() for path in user_files.sft.iterdir()} == before


# --- configs


def float_fields():
    for name, stage in STAGES.items():
        for field, hint in field_types(stage).items():
            kinds = {kind for part in (hint, *typing.get_args(hint)) for kind in (part, *typing.get_args(part))}
            if float in kinds:
                yield name, field, hint


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "1e-300"])
def test_every_option_with_a_number_refuses_what_is_none_by_name(value):
    fields = list(float_fields())
    assert len({field for _, field, _ in fields}) > 30
    for name, field, hint in fields:
        with pytest.raises(UserError, match=f"^--{field} = .*: it must be (a finite number|0 or between)"):
            command_line.value_from_words(f"--{field}", hint, [value])
        number = (float(value),) if "tuple" in str(hint) else float(value)
        with pytest.raises(UserError, match=f"^{field} = "):
            checked_types(dataclasses.replace(STAGES[name](), **{field: number}))
        with pytest.raises(UserError, match=rf"here.json: {field} = "):
            said = json.dumps({"stage": name, field: list(number) if isinstance(number, tuple) else number})
            config_files.from_json(said, "here.json")


def test_numbers_beyond_what_is_counted_in_are_refused_at_once():
    start = time.monotonic()
    for field in ("batch_size", "total_episodes", "response_length", "query_length", "save_steps"):
        with pytest.raises(UserError, match=rf"{field} is {2**31}.*; it must be .*below 2\^31"):
            check(PPOConfig(**{field: 2**31}))
    with pytest.raises(UserError, match="batch_size.*bits"):
        config_files.from_json('{"stage": "ppo", "batch_size": 1' + "0" * 400 + "}")
    with pytest.raises(UserError, match=r"micro_batch_size 7 .*micro_batch_size 3 or 9"):
        check(PPOConfig(batch_size=2**31 - 11, micro_batch_size=7, num_mini_batches=1))
    assert time.monotonic() - start < 5


def test_divisors_are_those_on_both_sides():
    assert divisors(360, 7) == "6 or 8" and divisors(7, 3) == "1 or 7"
    assert divisors(36, 6) == "4 or 9" and divisors(8, 3, 2) == "4 or 8"


PREFIX = "from rlhf_jax.config import *\n"
CONFIGS = {
    "raises": ("def get_config(v=None):\n    raise ValueError('no \\x1b[31m')", ["line 3: ValueError: no \\x1b[31m"]),
    "ends Python": ("import sys\ndef get_config(v=None): sys.exit('bye')", ["line 3: SystemExit: bye"]),
    "ends Python at once": ("raise SystemExit(0)", ["line 2: SystemExit: 0"]),
    "raises no Exception": ("class B(BaseException): pass\nraise B('x')", ["line 3: B: x"]),
    "raises what cannot be told": (
        "class E(Exception):\n    def __str__(self): raise self\nraise E",
        ["line 4: E: "],
    ),
    "calls itself": ("def get_config(v=None): return get_config(v)", ["line 2: RecursionError"]),
    "holds NUL": ("a = 1\0", ["null bytes"]),
    "returns a coroutine": ("async def get_config(v=None): return SFTConfig()", ["returned coroutine"]),
    "is no function": ("get_config = 5", ["TypeError: 'int' object is not callable"]),
    "odd variants": ("VARIANTS = 5\ndef get_config(v=None): return SFTConfig()", ["VARIANTS is of type int"]),
    "array for a choice": (
        "import numpy\ndef get_config(v=None): return SFTConfig(lr_scheduler_type=numpy.zeros(3))",
        ["lr_scheduler_type = array([0., 0., 0.])", "one of linear, cosine, constant"],
    ),
    "no repr": (
        "class R:\n    def __repr__(self): raise self\ndef get_config(v=None): return SFTConfig(batch_size=R())",
        ["batch_size = <R>: it must be a whole number"],
    ),
    "a long value": (
        "def get_config(v=None): return SFTConfig(batch_size='x' * 10**7)",
        ["size = 'xxx", " ... "],
    ),
    "a dict in itself": (
        "d = {}\nd['a'] = d\ndef get_config(v=None): return PPOConfig(generation_kwargs=d)",
        ["generation_kwargs", "50 deep"],
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_file_that_raises_or_returns_anything_is_told_by_file_and_line(tmp_path, capsys, case):
    source, parts = CONFIGS[case]
    path = tmp_path / "mine.py"
    path.write_text(PREFIX + source)
    assert train.main(["--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said and not obeyed(said) and len(said) < 10_000
    mentions(said, path, *parts)


@pytest.mark.parametrize("spec", ["a\0b", "x" * 300, "x" * 5000, "\u6f22" * 100, "\ud800", "/dev/zero", "CIRCLE"])
def test_a_config_that_cannot_be_a_file_is_named(tmp_path, capsys, spec):
    if spec == "CIRCLE":
        (tmp_path / "circle.py").symlink_to(tmp_path / "circle.py")
        spec = str(tmp_path / "circle.py")
    assert train.main(["--config", spec]) == 2
    assert capsys.readouterr().err.startswith("error: --config ")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('{"stage": []}', "'stage' must be one of"),
        ('{"a": ' * 50_000, "is not JSON: Nested too deep"),
        ('{"stage": "sft", "batch_size": ' + "9" * 5000 + "}", "is not JSON: A number with too many digits"),
        ('{"stage": "sft", "learning_rate": 1' + "0" * 400 + "}", "learning_rate = inf"),
    ],
)
def test_a_config_json_of_impossible_json_is_named(tmp_path, content, part):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError) as error:
        config_files.load_config(str(tmp_path))
    mentions(str(error.value), tmp_path / "config.json", part)


# --- tokenizers


def test_a_tokenizer_made_for_another_model_is_refused_and_a_few_other_names_are_not(
    user_files, refusal, tokenizer_folder
):
    path = tokenizer_folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    words = sorted(whole["model"]["vocab"], key=whole["model"]["vocab"].get)
    ordinary = [word for word in words if word.strip().isalpha()]
    renamed = {ordinary[-1]: "renamed"}
    spoil(path, whole, renamed)
    tokenizer = data.load_tokenizer(str(tokenizer_folder))
    with pytest.warns(
        UserWarning, match=f"1 of .* ids mean something else to {user_files.sft}; id .* and 'renamed' here"
    ):
        data.check_tokenizer_fits_model(tokenizer, str(user_files.sft))
    spoil(path, whole, {word: f"other{i}" for i, word in enumerate(ordinary)})
    message = refusal(tokenizer_name_or_path=tokenizer_folder)
    mentions(message, tokenizer_folder, user_files.sft, "ids mean something else", "'other", "use a model trained with")


def spoil(path: pathlib.Path, whole: dict, renamed: dict[str, str]) -> None:
    vocab = {renamed.get(word, word): i for word, i in whole["model"]["vocab"].items()}
    path.write_text(json.dumps({**whole, "model": {**whole["model"], "vocab": vocab}}))


def test_a_tokenizer_with_gaps_whose_last_id_has_no_row_is_refused(user_files, refusal, tokenizer_folder):
    path = tokenizer_folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    word = max(whole["model"]["vocab"], key=whole["model"]["vocab"].get)
    whole["model"]["vocab"][word] = 99_999
    path.write_text(json.dumps(whole))
    message = refusal(tokenizer_name_or_path=tokenizer_folder)
    mentions(message, tokenizer_folder, "id 99999", f"{user_files.rows} rows")


def test_a_model_config_of_a_billion_layers_is_refused_at_once(user_files, refusal, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(user_files.sft, path)
    config_with(num_hidden_layers=10**9)(path)
    start = time.monotonic()
    mentions(refusal(sft_model_path=path), path / "config.json", "num_hidden_layers is 1000000000")
    assert time.monotonic() - start < 10
    message = refusal(sft_model_path=None, tokenizer_name_or_path="synthetic", scratch_model="1000000000x8x1")
    mentions(message, "model shape 1000000000x8x1", "num_hidden_layers")

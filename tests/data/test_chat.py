"""Conversations as prompts, and the text that a reward model with a tokenizer of its own reads."""

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys
import types

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import data
from rlhf_jax.data import batches
from rlhf_jax.data.chat import ChatTemplate
from rlhf_jax.errors import UserError
from tests.helpers.chat_tokenizer import CHATML, MARKED, assistant, bytes_tokenizer, system, user
from tests.helpers.hub import Hub
from tests.helpers.made_data import make_demonstrations, make_pairs, make_prompts, write_jsonl

# Every piece is in the synthetic vocabulary, so a wrong order of pieces cannot hide behind [UNK].
POSTS = (
    "{% if title %}TITLE: {{ title }}\n\n{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}POST: {{ m['content'] }}\n\n"
    "{% elif m['role'] == 'assistant' %}TL;DR: {{ m['content'] }}{{ eos_token }}\n"
    "{% elif m['role'] == 'system' and loop.first %}SUBREDDIT: {{ m['content'] }}\n\n"
    "{% else %}{{ raise_exception('no role ' ~ m['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}TL;DR:{% endif %}"
)


CHATS = [
    [user("i met anna.")],
    [system("r/advice"), user("i lost keys.")],
    [user("i met anna."), assistant("met anna"), user("i visited rome.")],
]
ROWS = [{"prompt": chat, "id": i} for i, chat in enumerate(CHATS)]


def synthetic_tokenizer(template=POSTS):
    tokenizer = data.load_tokenizer("synthetic")
    tokenizer.hf.chat_template = template
    return tokenizer


def make(rows, tokenizer=None, **options):
    return make_prompts(data.load_rows(rows), tokenizer or synthetic_tokenizer(), **options)


def expected_ids(tokenizer, chat, **kwargs):
    return tokenizer.hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **kwargs)


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
turns = st.lists(st.tuples(words, words), max_size=3)


@st.composite
def chats(draw):
    chat = [system(draw(words))] if draw(st.booleans()) else []
    for question, answer in draw(turns):
        chat += [user(question), assistant(answer)]
    return [*chat, user(draw(words.filter(str.strip)))]


# --- as prompts


@settings(max_examples=40, deadline=None)
@given(st.lists(chats(), min_size=1, max_size=4))
def test_ids_are_those_of_transformers(conversations):
    for tokenizer in (bytes_tokenizer(), synthetic_tokenizer()):
        made = make([{"prompt": chat} for chat in conversations], tokenizer, query_length=4096)
        assert [ids.tolist() for ids in made.tokens] == [expected_ids(tokenizer, chat) for chat in conversations]
        assert made.texts(range(len(made))) == conversations


def test_a_saved_tokenizer_keeps_its_template(tmp_path):
    data.save_tokenizer(synthetic_tokenizer(), str(tmp_path))
    assert make(ROWS, data.load_tokenizer(str(tmp_path))).fingerprint == make(ROWS).fingerprint


def test_a_template_on_the_hub_is_fetched(tmp_path):
    data.save_tokenizer(synthetic_tokenizer(), str(tmp_path / "saved"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert "chat_template.jinja" in files
    code = "from rlhf_jax import data; print(data.load_tokenizer('you/chat').hf.chat_template)"
    with Hub() as hub:
        hub.add("you/chat", files)
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        environment.pop("HF_HUB_OFFLINE", None)
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.rstrip("\n") == POSTS, found.stderr


def test_template_arguments_reach_the_template():
    tokenizer = synthetic_tokenizer()
    made = make(ROWS, tokenizer, chat_template_kwargs={"title": "help"})
    assert made.tokens[0].tolist() == expected_ids(tokenizer, CHATS[0], title="help")
    assert made.display_texts([0]) == ["TITLE: help\n\nPOST: i met anna.\n\nTL;DR:"]
    other = make(ROWS, tokenizer, chat_template_kwargs={"chat_template": CHATML})
    assert other.display_texts([0]) == ["<|im_start|>user\ni met anna.<|im_end|>\n<|im_start|>assistant\n"]
    with pytest.raises(UserError, match="chat_template_kwargs.*padding, tokenize"):
        make(ROWS, tokenizer, chat_template_kwargs={"tokenize": True, "padding": True})


def test_reward_functions_get_messages_and_people_get_text():
    made = make(ROWS)
    assert made.conversational and made.conversations == CHATS
    assert made.texts([2, 0]) == [CHATS[2], CHATS[0]]
    assert made.display_texts([1]) == ["SUBREDDIT: r/advice\n\nPOST: i lost keys.\n\nTL;DR:"]
    assert made.as_completions([" a", "b"]) == [[assistant(" a")], [assistant("b")]]
    assert made.columns([2, 0]) == {"id": [2, 0]}
    texts = make([{"prompt": "POST: i met anna."}])
    assert not texts.conversational and texts.conversations is None
    assert texts.texts([0]) == texts.display_texts([0]) == ["POST: i met anna."]
    assert texts.as_completions([" a"]) == [" a"]


def test_a_reward_function_cannot_change_the_data():
    made = make(ROWS)
    given_away = made.texts([0])
    given_away[0][0]["content"] = "gone"
    given_away[0].append(assistant("more"))
    assert made.texts([0]) == [CHATS[0]] and ROWS[0]["prompt"] == CHATS[0]


def test_rows_of_every_format_hold_the_same_conversations(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "b.parquet"))
    table.save_to_disk(str(tmp_path / "c"))
    expected = make(ROWS)
    for source in (table, *(str(tmp_path / name) for name in ("a.jsonl", "b.parquet", "c"))):
        made = make(source)
        assert made.fingerprint == expected.fingerprint and made.texts([0, 1, 2]) == CHATS


def test_keys_that_a_table_fills_with_nothing_are_left_out():
    template = "{% for m in messages %}{{ m.name | default('POST:') }} {{ m.content }}{% endfor %}"
    rows = datasets.Dataset.from_list([{"prompt": [{**user("i met anna."), "name": "TITLE:"}, user("i lost keys.")]}])
    assert rows[0]["prompt"][1]["name"] is None
    assert make(rows, synthetic_tokenizer(template)).display_texts([0]) == ["TITLE: i met anna.POST: i lost keys."]


def test_conversations_that_are_too_long_are_dropped_and_counted_either_way():
    tokenizer = synthetic_tokenizer()
    limit = len(expected_ids(tokenizer, CHATS[0]))
    for overflow in ("truncate", "drop"):
        made = make(ROWS, tokenizer, query_length=limit, query_overflow=overflow)
        assert made.texts(range(len(made))) == [CHATS[0]]
        assert (made.report.kept, made.report.dropped, made.report.truncated) == (1, 2, 0)
        assert "2 too long, dropped" in str(made.report)
        assert ("conversations are dropped, not truncated" in str(made.report)) == (overflow == "truncate")
    assert "not truncated" not in str(make(ROWS, tokenizer).report)
    with pytest.raises(UserError, match="3 rows.*query_length = 2"):
        make(ROWS, tokenizer, query_length=2)


FAULTS = [
    ("hello", "'prompt' is text, but the prompts of this data set are conversations"),
    (None, "'prompt' is null"),
    (7, "'prompt' is an int, not a list of messages"),
    ([], "'prompt' is an empty list"),
    (["hello"], "'prompt', message 1: is a str, not an object with 'role' and 'content'"),
    ([user("a"), {"content": "b"}], "'prompt', message 2: 'role' is missing"),
    ([{"role": 3, "content": "b"}], "'prompt', message 1: 'role' is an int, not text"),
    ([{"role": " ", "content": "b"}], "'prompt', message 1: 'role' is empty"),
    ([{"role": "user"}], "'prompt', message 1: 'content' is missing"),
    ([user(None)], "'prompt', message 1: 'content' is null"),
    ([user([{"type": "image_url"}])], "'content', block 1: 'type' is 'image_url'; blocks of type 'text' are read here"),
    ([user(["a"])], "'prompt', message 1: 'content', block 1: is a str, not an object with 'type' and 'text'"),
    ([user([{"type": "text", "text": None}])], "'prompt', message 1: 'content', block 1: 'text' is null"),
    ([user([{"type": "text", "text": " "}])], "'prompt' ends with an empty message"),
    ([{"role": "user", "tool_calls": [{}]}], "'prompt', message 1: 'content' is missing"),
    ([{**assistant(None), "tool_calls": "[]"}], "'prompt', message 1: 'tool_calls' is a str, not a list of objects"),
    ([user("\ud83d")], r"'content' holds \ud83d at character 1, a lone surrogate"),
    ([user(" \n")], "'prompt' ends with an empty message"),
    ([user("a"), assistant("b")], "'prompt' ends with a message of the assistant"),
    ([{"role": "wizard", "content": "a"}], "the chat template of 'synthetic' failed: no role wizard"),
]


@pytest.mark.parametrize(("bad", "message"), FAULTS)
def test_bad_conversations_are_named_or_skipped_and_counted(bad, message):
    rows = [ROWS[0], {"prompt": bad, "id": 9}, ROWS[1]]
    with pytest.raises(UserError) as error:
        make(rows)
    assert "row 2: " in str(error.value) and message in str(error.value) and "1 of 3 rows is bad" in str(error.value)
    made = make(rows, on_bad_row="skip")
    assert made.texts([0, 1]) == CHATS[:2] and made.columns([0, 1]) == {"id": [0, 1]} and made.report.bad == 1
    assert message in str(made.report)


def test_a_conversation_among_texts_is_a_bad_row():
    rows = [{"prompt": None}, {"prompt": "POST: i met anna."}, ROWS[0]]
    with pytest.raises(UserError, match="row 2: 'prompt'.*2 of 4 rows"):
        make(rows[1:] + rows[1:])
    made = make(rows, on_bad_row="skip")
    assert not made.conversational and (len(made), made.report.bad) == (1, 2)


def test_missing_templates_are_named_with_what_to_do():
    with pytest.raises(UserError, match="'synthetic'.*chat_template.jinja.*chat_temp"):
        make(ROWS, synthetic_tokenizer(None))
    several = synthetic_tokenizer({"tool": CHATML, "rag": POSTS})
    with pytest.raises(UserError, match="tool, rag"):
        make(ROWS, several)
    assert make(ROWS, several, chat_template_kwargs={"chat_template": "rag"}).fingerprint == make(ROWS).fingerprint
    assert len(make([{"prompt": "POST: i met anna."}], synthetic_tokenizer(None))) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "failed: "),
        ("{{ messages[5].content.upper() }}", "failed: "),
        ("{{ messages.__class__.__mro__ }}", "failed: "),
        (" \n", "rendered an empty text"),
    ],
)
def test_templates_that_fail_leave_no_row(template, message):
    with pytest.raises(UserError, match=rf"row 1: 'prompt': .*'synthetic' {message}"):
        make(ROWS, synthetic_tokenizer(template), on_bad_row="skip")


def test_torch_is_not_imported_for_templates(tmp_path):
    data.save_tokenizer(synthetic_tokenizer(), str(tmp_path))
    code = (
        "import sys; from rlhf_jax import data; from rlhf_jax.data.options import PromptOptions\n"
        "rows = data.load_rows([{'prompt': [{'role': 'user', 'content': 'a'}]}])\n"
        f"data.from_rows(data.PromptData, rows, PromptOptions(), data.load_tokenizer({str(tmp_path)!r}))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- today's date

LLAMA = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today Date: {{ date_string }}\n{{ messages[0].content }}"
)
GPT_OSS = 'Current date: {{ strftime_now( "%Y-%m-%d" ) }}\n{{ messages[0].content }}'


def dated(template, date="2026-01-31"):
    return dataclasses.replace(bytes_tokenizer(template), template_date=date)


@pytest.mark.parametrize(
    ("template", "text"), [(LLAMA, "Today Date: 31 Jan 2026"), (GPT_OSS, "Current date: 2026-01-31")]
)
def test_a_template_prints_the_tokenizers_date_in_its_own_format(template, text):
    made = make(ROWS, dated(template))
    assert made.display_texts([0]) == [f"{text}\ni met anna."]
    assert made.report.template_date == "2026-01-31"
    assert "the chat template prints 2026-01-31" in str(made.report)
    assert make(ROWS, dated(template, "2026-02-01")).fingerprint != made.fingerprint
    today = make(ROWS, bytes_tokenizer(template))
    assert today.report.template_date is None and "prints" not in str(today.report)
    named = dated({"default": CHATML, "dated": template})
    assert make(ROWS, named, chat_template_kwargs={"chat_template": "dated"}).fingerprint == made.fingerprint


def test_a_date_string_of_the_user_wins():
    made = make(ROWS, dated(LLAMA), chat_template_kwargs={"date_string": "1 May 2025"})
    assert made.display_texts([0]) == ["Today Date: 1 May 2025\ni met anna."]
    assert made.report.template_date is None
    deaf = make(ROWS, dated(GPT_OSS), chat_template_kwargs={"date_string": "1 May 2025"})
    assert deaf.report.template_date == "2026-01-31"


def test_a_template_without_a_date_is_left_alone():
    template = ChatTemplate(dated(POSTS))
    assert template.date is None and template.kwargs == {}
    default = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}"
    assert make(ROWS, dated(default)).display_texts([0]) == ["26 Jul 2024"]  # Llama 3.1's


@pytest.mark.parametrize("name", ["llama3_2", "gptoss_training"])
def test_published_templates_are_pinned(name):
    trl = importlib.util.find_spec("trl")
    if trl is None:
        pytest.skip("needs trl")
    text = (pathlib.Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = dated(text)
    shown = "31 Jan 2026" if name == "llama3_2" else "2026-01-31"
    template = ChatTemplate(tokenizer)
    assert template.date == "2026-01-31" and shown in template.render(CHATS[0], generation_prompt=True)
    if name == "llama3_2":
        expected = tokenizer.hf.apply_chat_template(CHATS[0], tokenize=False, date_string=shown)
        assert template.render(CHATS[0], generation_prompt=False) == expected
    else:
        ids, mask = template.encode_with_assistant_mask([*CHATS[0], assistant("met anna")])
        assert shown in tokenizer.decode(ids) and "met anna" in tokenizer.decode(np.array(ids)[mask])


# --- bos


def test_a_template_that_writes_bos_gives_one():
    tokenizer = bytes_tokenizer(MARKED)
    assert tokenizer.hf("a")["input_ids"][0] == tokenizer.hf.bos_token_id  # the tokenizer would add another
    prompts = make(ROWS, tokenizer).tokens
    scored, lengths = data.reward_tokens(
        tokenizer, CHATS, [[assistant("x")]] * 3, [True] * 3, text_eos=True, max_length=400
    )
    for ids in (*prompts, *(row[:length] for row, length in zip(scored, lengths, strict=True))):
        assert ids[0] == tokenizer.hf.bos_token_id and ids.tolist().count(ids[0]) == 1


def test_texts_begin_with_what_the_tokenizer_puts_before_them():
    """A bos, as TRL's `processing_class(text=prompts)` and its SFT and reward trainers give."""
    tokenizer, text = bytes_tokenizer(), "i met anna"
    row = {"prompt": text, "completion": " keys", "chosen": " keys", "rejected": " bread"}
    whole, end = tokenizer.hf(text + " keys")["input_ids"], [tokenizer.eos_id]
    assert (
        make([row], tokenizer).tokens[0].tolist()
        == tokenizer.hf(text)["input_ids"]
        == [*tokenizer.start_ids(), *tokenizer.encode(text)]
    )
    demonstrations, pairs = (f(data.load_rows([row]), tokenizer) for f in (make_demonstrations, make_pairs))
    assert demonstrations.tokens[0].tolist() == pairs.chosen[0].tolist() == [*whole, *end]
    cut = make([row], tokenizer, query_length=5)
    assert cut.tokens[0].tolist() == [*tokenizer.start_ids(), *tokenizer.encode("anna")] and cut.texts([0]) == ["anna"]
    assert len(make([row], tokenizer, query_length=11, query_overflow="drop")) == 1
    with pytest.raises(UserError, match="longer than"):
        make([row], tokenizer, query_length=10, query_overflow="drop")
    assert synthetic_tokenizer().start_ids() == []


# --- the order of rows


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3), st.integers(0, 30))
def test_unshuffled_rows_come_in_order_pass_after_pass(rows, batch_size, seed, step):
    if rows >= batch_size:
        start = step % (rows // batch_size) * batch_size
        expected = list(range(start, start + batch_size))
        assert batches.rows_of_step(rows, batch_size, seed, step, shuffle=False).tolist() == expected


def test_the_config_says_whether_to_shuffle_and_what_the_template_gets():
    options = {
        "dataset_train_split": "train", "dataset_config": None, "dataset_revision": None,
        "max_train_samples": None, "prompt_column": "prompt", "on_bad_row": "raise", "query_length": 99,
        "query_overflow": "drop", "length_buckets": None, "shuffle_dataset": False,
        "chat_template_kwargs": {"title": "help"}, "datasets": None, "dataset_num_proc": None,
        "environment_factory": (),
    }  # fmt: skip
    tokenizer = synthetic_tokenizer()
    made = data.load(data.PromptData, types.SimpleNamespace(**options), tokenizer, ROWS)
    assert [made.batch(7, step, 1).rows.tolist() for step in range(4)] == [[0], [1], [2], [0]]
    assert made.display_texts([0])[0].startswith("TITLE: help")
    shuffled = data.load(
        data.PromptData, types.SimpleNamespace(**{**options, "shuffle_dataset": True}), tokenizer, ROWS
    )
    order = [shuffled.batch(7, step, 1).rows.tolist() for step in range(3)]
    assert order == [[i] for i in np.random.default_rng([7, 0]).permutation(3)]


# --- what a reward model reads


def rows_of(tokens, lengths):
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(words.filter(len), words, st.booleans()), min_size=1, max_size=4), st.booleans())
def test_texts_are_read_as_one_and_end_with_eos(batch, text_eos):
    tokenizer = bytes_tokenizer()
    prompts, completions, ended = zip(*batch, strict=True)
    tokens, lengths = data.reward_tokens(
        tokenizer, prompts, completions, np.array(ended), text_eos=text_eos, max_length=200
    )
    assert tokens.dtype == lengths.dtype == np.int32 and tokens.shape[1] in (56, 104, 152, 200)
    assert rows_of(tokens, lengths) == [
        tokenizer.hf(prompt + completion, add_special_tokens=False)["input_ids"] + [1] * (text_eos and end)
        for prompt, completion, end in batch
    ]
    assert all((row[length:] == tokenizer.pad_id).all() for row, length in zip(tokens, lengths, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(chats(), words, st.booleans()), min_size=1, max_size=3), st.booleans())
def test_conversations_are_read_by_the_reward_models_own_template(batch, text_eos):
    prompts, answers, ended = zip(*batch, strict=True)
    completions = [[assistant(answer)] for answer in answers]
    for tokenizer, ends_itself in ((bytes_tokenizer(), True), (bytes_tokenizer(eos="<end>"), False)):
        tokens, lengths = data.reward_tokens(tokenizer, prompts, completions, ended, text_eos=text_eos, max_length=4096)
        assert rows_of(tokens, lengths) == [
            tokenizer.hf.apply_chat_template([*prompt, *completion], return_dict=False)
            + [tokenizer.eos_id] * (text_eos and end and not ends_itself)
            for prompt, completion, end in zip(prompts, completions, ended, strict=True)
        ]


def test_an_eos_in_the_text_is_not_doubled():
    tokenizer = synthetic_tokenizer()
    tokens, lengths = data.reward_tokens(
        tokenizer, ["POST: i met anna."], [" met anna<|endoftext|>"], [True], text_eos=True, max_length=32
    )
    assert rows_of(tokens, lengths)[0].count(tokenizer.eos_id) == 1


def test_few_widths_are_compiled_and_none_is_beyond_the_context():
    tokenizer = bytes_tokenizer()

    def width(length, **options):
        found = data.reward_tokens(tokenizer, ["x"], ["y" * (length - 1)], [False], text_eos=True, **options)
        assert found[1].tolist() == [length]
        return found[0].shape[1]

    assert {width(n, max_length=50) for n in range(1, 51)} == {16, 32, 40, 50}
    assert {width(n, max_length=50, buckets=(20, 64)) for n in range(1, 51)} == {20, 50}


def test_a_text_beyond_the_context_is_named_with_what_to_lower():
    tokenizer = bytes_tokenizer()
    message = r"row 1 .*has 9 tokens in .*\(bytes\), but the model's context has 8: 'abcd.*query_length or response_len"
    with pytest.raises(UserError, match=message):
        data.reward_tokens(tokenizer, ["a", "abcd"], ["b", "efgh"], [True, True], text_eos=True, max_length=8)


def test_a_row_that_the_reward_models_template_refuses_is_named():
    prompts = [CHATS[0], [user("a"), system("b"), user("c")]]
    options = {"text_eos": False, "max_length": 64}
    with pytest.raises(UserError, match="row 1.*no role system.*'content': 'a'"):
        data.reward_tokens(synthetic_tokenizer(), prompts, [[assistant("x")]] * 2, [True] * 2, **options)
    with pytest.raises(UserError, match="chat template.*'synthetic'"):
        data.reward_tokens(synthetic_tokenizer(None), prompts, [[assistant("x")]] * 2, [True] * 2, **options)


def test_whether_a_model_has_the_same_tokenizer(tmp_path):
    ours = data.load_tokenizer("synthetic")
    data.save_tokenizer(ours, str(tmp_path / "same"))
    bytes_tokenizer().hf.save_pretrained(str(tmp_path / "other"))
    (tmp_path / "none").mkdir()
    assert data.same_tokenizer(ours, str(tmp_path / "same"))
    assert not data.same_tokenizer(ours, str(tmp_path / "other"))
    assert data.same_tokenizer(ours, str(tmp_path / "none"))
    with pytest.raises(UserError, match="id 0 is '<.im_start.>' there and '<.endoftext.>' here"):
        data.check_same_tokenizer(ours, str(tmp_path / "other"))


def test_the_synthetic_vocabulary_has_every_piece_of_the_template():
    tokenizer = synthetic_tokenizer()
    assert all(tokenizer.hf.unk_token_id not in ids for ids in make(ROWS, tokenizer).tokens)

"""Conversations in the forms in which data sets have them give the tokens that transformers makes of their messages."""

import json

import datasets
import numpy as np
import pytest

from rlhf_jax import data
from rlhf_jax.data import arrow_cache, conversation_forms
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate.answers import reference_texts
from tests.helpers.chat_tokenizer import CHATML, assistant, bytes_tokenizer, system, user
from tests.helpers.made_data import make_demonstrations, make_pairs, make_prompts

TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{{ greeting | default('') }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{% if m.content is defined %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tool(name, **properties):
    properties = {key: {"type": kind} for key, kind in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def calls(name, **arguments):
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


TOOLS = [tool("weather", city="string"), tool("add", a="number", b="number")]
CHAT = [
    user("Weather in Rome?"),
    calls("weather", city="Rome"),
    {"role": "tool", "content": "sunny"},
    assistant("Sunny."),
]
KWARGS = {"greeting": "hello"}


def expected(messages, tools=None, template=TOOL_TEMPLATE, **options):
    return bytes_tokenizer(template).hf.apply_chat_template(messages, tools=tools, return_dict=False, **options)


def demonstrations(rows, template=TOOL_TEMPLATE, **options):
    return make_demonstrations(
        data.load_rows(rows), bytes_tokenizer(template), max_length=4096, query_length=4096, **options
    )


def pairs(rows, template=TOOL_TEMPLATE, **options):
    return make_pairs(data.load_rows(rows), bytes_tokenizer(template), max_length=4096, query_length=4096, **options)


def prompts(rows, template=TOOL_TEMPLATE, **options):
    return make_prompts(data.load_rows(rows), bytes_tokenizer(template), query_length=4096, **options)


def ids(sequences):
    return [list(map(int, one)) for one in sequences]


# --- tools, and arguments of a row


@pytest.mark.parametrize("form", ["list", "text", "texts"])
def test_tools_and_template_arguments_of_a_row_are_rendered_in_every_stage(form):
    tools = {"list": TOOLS, "text": json.dumps(TOOLS), "texts": [json.dumps(one) for one in TOOLS]}[form]
    kwargs = KWARGS if form == "list" else json.dumps(KWARGS)
    row = {"tools": tools, "chat_template_kwargs": kwargs}
    plain = {"tools": None, "chat_template_kwargs": None}
    whole, bare = expected(CHAT, TOOLS, **KWARGS), expected(CHAT)
    made = demonstrations([{"messages": CHAT, **row}, {"messages": CHAT, **plain}])
    assert ids(made.tokens) == [whole, bare]
    made = demonstrations([{"prompt": CHAT[:1], "completion": CHAT[1:], **row}], completion_only_loss=True)
    start = expected(CHAT[:1], TOOLS, add_generation_prompt=True, **KWARGS)
    assert ids(made.tokens) == [whole] and made.prompt_lengths.tolist() == [len(start)]
    made = pairs([{"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [assistant("No.")], **row}])
    assert ids(made.chosen) == [whole]
    assert ids(made.rejected) == [expected([CHAT[0], assistant("No.")], TOOLS, **KWARGS)]
    made = prompts([{"prompt": CHAT[:3], **row}, {"prompt": CHAT[:3], **plain}])
    start = expected(CHAT[:3], TOOLS, add_generation_prompt=True, **KWARGS)
    assert ids(made.tokens) == [start, expected(CHAT[:3], add_generation_prompt=True)]
    assert made.columns([0]) == {"tools": [tools], "chat_template_kwargs": [kwargs]}  # of reward functions, as given


@pytest.mark.runs  # TRL is slow to import
def test_tools_and_template_arguments_are_rendered_as_by_trl():
    trl = pytest.importorskip("trl.data_utils")
    row = {"prompt": CHAT[:1], "completion": CHAT[1:], "chat_template_kwargs": KWARGS}
    theirs = trl.apply_chat_template(row, bytes_tokenizer(TOOL_TEMPLATE).hf, tools=TOOLS)
    made = demonstrations([{**row, "tools": TOOLS}])
    assert bytes_tokenizer().decode(made.tokens[0]) == theirs["prompt"] + theirs["completion"]
    row = {"chosen": CHAT, "rejected": CHAT[:2], "chat_template_kwargs": KWARGS}
    theirs = trl.apply_chat_template(row, bytes_tokenizer(TOOL_TEMPLATE).hf, tools=TOOLS)
    made = pairs([{**row, "tools": TOOLS}])
    assert [bytes_tokenizer().decode(one[0]) for one in (made.chosen, made.rejected)] == list(theirs.values())


def test_arguments_of_a_row_come_before_those_of_the_config_and_empty_tools_are_none():
    rows = [{"prompt": CHAT[:1], "chat_template_kwargs": {"greeting": "a"}}, {"prompt": CHAT[:1], "tools": []}]
    made = prompts(rows, chat_template_kwargs={"greeting": "b"})
    assert ids(made.tokens) == [expected(CHAT[:1], add_generation_prompt=True, greeting=text) for text in "ab"]
    rows = [{"prompt": CHAT[:1], "chat_template_kwargs": {"chat_template": CHATML}}]
    assert ids(prompts(rows).tokens) == [expected(CHAT[:1], template=CHATML, add_generation_prompt=True)]
    several = {"default": CHATML, "tool_use": TOOL_TEMPLATE}
    made = prompts([{"prompt": CHAT[:1], "tools": TOOLS}, {"prompt": CHAT[:1]}], several)
    assert ids(made.tokens) == [
        expected(CHAT[:1], TOOLS, add_generation_prompt=True),
        expected(CHAT[:1], template=CHATML, add_generation_prompt=True),
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tools": "hammer"}, "'tools' is text, but no JSON of a list of tools"),
        ({"tools": {"a": 1}}, "'tools' is a dict, not a list of tools"),
        ({"tools": [3]}, "'tools' is an int, not a list of tools"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' is a list, not an object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs: tokenize cannot be set"),
    ],
)
def test_bad_arguments_of_a_row_are_named_or_skipped(columns, message):
    rows = [{"messages": CHAT, "tools": None}, {"messages": CHAT, **columns}]
    with pytest.raises(UserError, match=f"row 2: .*{message}"):
        demonstrations(rows)
    assert demonstrations(rows, on_bad_row="skip").report.bad == 1


def test_the_assistants_mask_follows_what_is_rendered():
    made = demonstrations(
        [{"messages": CHAT, "tools": TOOLS, "chat_template_kwargs": KWARGS}], assistant_only_loss=True
    )
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    theirs = bytes_tokenizer(TOOL_TEMPLATE).hf.apply_chat_template(CHAT, tools=TOOLS, **options, **KWARGS)
    np.testing.assert_array_equal(made.tokens[0], theirs["input_ids"])
    np.testing.assert_array_equal(made.loss_masks[0], np.asarray(theirs["assistant_masks"], bool))


def test_tokens_of_rows_that_differ_in_their_tools_alone_are_cached_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(arrow_cache, "MINIMUM_BYTES", 1)
    for name, tools in (("a", TOOLS), ("b", TOOLS[:1])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"messages": CHAT, "tools": tools}) + "\n")
        for _ in range(2):  # made, and read from the cache
            assert ids(demonstrations(str(path)).tokens) == [expected(CHAT, tools)]
        path.write_text(json.dumps({"conversations": SHAREGPT, "tools": json.dumps(tools)}) + "\n")
        for _ in range(2):
            assert ids(demonstrations(str(path)).tokens) == [expected(HOUSE, tools)]
            assert ids(prompts(str(path)).tokens) == [expected(HOUSE[:-1], tools, add_generation_prompt=True)]


def test_keys_that_a_table_fills_with_null_are_not_rendered(tmp_path):
    other = [user("1 + 2?"), calls("add", a=1, b=2), {"role": "tool", "content": "3"}, assistant("3")]
    rows = [{"messages": CHAT, "tools": TOOLS}, {"messages": other, "tools": TOOLS[1:]}]
    table = datasets.Dataset.from_list(rows)
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["a"] is None  # the fill
    assert table[0]["messages"][0]["tool_calls"] is None
    table.to_parquet(str(tmp_path / "a.parquet"))
    whole = [expected(CHAT, TOOLS), expected(other, TOOLS[1:])]
    for source in (rows, table, str(tmp_path / "a.parquet")):
        assert ids(demonstrations(source).tokens) == whole


# --- messages


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": ""}])
def test_messages_that_call_tools_need_no_content(empty):
    chat = [CHAT[0], {**CHAT[1], **empty}, *CHAT[2:]]
    assert ids(demonstrations([{"messages": chat}]).tokens) == [expected(chat)] == [expected(CHAT)]
    made = demonstrations([{"prompt": chat[:1], "completion": chat[1:2]}])
    assert ids(made.tokens) == [expected(chat[:2])]
    made = pairs([{"chosen": chat[:2], "rejected": [chat[0], assistant("No.")]}])
    assert ids(made.chosen) == [expected(chat[:2])]
    assert ids(prompts([{"prompt": chat[:3]}]).tokens) == [expected(chat[:3], add_generation_prompt=True)]


def test_blocks_of_text_are_joined():
    blocks = [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Rome?", "image": None}]
    row = {"prompt": [user(blocks)], "completion": [assistant([{"type": "text", "text": "Sunny."}])]}
    plain = [user("Weather in Rome?"), assistant("Sunny.")]
    made = demonstrations([row], CHATML)
    assert ids(made.tokens) == [expected(plain, template=CHATML)]
    made = prompts([row], CHATML)
    assert made.display_texts([0]) == ["<|im_start|>user\nWeather in Rome?<|im_end|>\n<|im_start|>assistant\n"]
    assert made.texts([0]) == [row["prompt"]]  # of reward functions, as given
    assert reference_texts(made, "completion") == ["Sunny."]
    made = pairs([{"prompt": row["prompt"], "chosen": row["completion"], "rejected": [assistant("No.")]}], CHATML)
    assert ids(made.chosen) == [expected(plain, template=CHATML)]


def test_what_a_template_does_not_read_is_said_once():
    row = {"messages": CHAT, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
    report = str(demonstrations([row, row], CHATML).report)
    for what in ("'tools' of the data", "'enable_thinking' of the data", "'tool_calls' of messages"):
        assert report.count(f"the chat template does not read {what}; give one that does") == 1
    assert "does not read" not in str(demonstrations([{"messages": CHAT, "tools": TOOLS}]).report)
    weighed = [user("a"), {**assistant("b"), "weight": 0}]
    assert "'weight' of messages is not read" in str(demonstrations([{"messages": weighed}], CHATML).report)
    report = prompts([{"prompt": "hello", "tools": TOOLS}]).report
    assert "column 'tools' is not read: prompts are texts" in str(report)


# --- ShareGPT

SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Weather in Rome?"},
    {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Rome"}})},
    {"from": "observation", "value": "sunny"},
    {"from": "gpt", "value": "Sunny."},
]
HOUSE = [system("Be brief."), *CHAT]


def test_sharegpt_has_the_roles_of_its_speakers_in_every_stage_and_says_so():
    row, bad = {"conversations": SHAREGPT, "id": 3}, [{"from": "gpt", "value": "No."}]
    line = "'conversations': ShareGPT's human and gpt are the roles user and assistant"
    made = demonstrations([row, row])
    assert ids(made.tokens) == [expected(HOUSE)] * 2
    assert str(made.report).count(line) == 1 and "'conversations' is read as 'messages'" in str(made.report)
    made = prompts([row])
    assert ids(made.tokens) == [expected(HOUSE[:-1], add_generation_prompt=True)] and made.texts([0]) == [HOUSE[:-1]]
    assert made.columns([0])["completion"] == [[assistant("Sunny.")]] and made.columns([0])["id"] == [3]
    assert reference_texts(made, "completion") == ["Sunny."]
    assert "'conversations' is read as 'prompt', up to the assistant's last answer" in str(made.report)
    made = pairs([{"chosen": SHAREGPT, "rejected": [*SHAREGPT[:-1], *bad]}])
    assert ids(made.chosen) == [expected(HOUSE)]
    assert ids(made.rejected) == [expected([*HOUSE[:-1], assistant("No.")])]
    for chosen, rejected in ((SHAREGPT[-1:], bad), (SHAREGPT[-1], bad[0])):  # what follows, or one message
        made = pairs([{"conversations": SHAREGPT[:-1], "chosen": chosen, "rejected": rejected}])
        assert ids(made.chosen) == [expected(HOUSE)] and line.partition(": ")[2] in str(made.report)
        made = pairs([{"prompt": SHAREGPT[:-1], "chosen": chosen, "rejected": rejected}])
        assert ids(made.chosen) == [expected(HOUSE)]
    made = demonstrations([{"prompt": SHAREGPT[:-1], "completion": SHAREGPT[-1:]}])
    assert ids(made.tokens) == [expected(HOUSE)]


def test_sharegpt_masks_and_tables_are_as_those_of_messages():
    table = datasets.Dataset.from_list([{"conversations": SHAREGPT}, {"conversations": SHAREGPT[1:2] + SHAREGPT[-1:]}])
    made = demonstrations(table, assistant_only_loss=True)
    theirs = demonstrations([{"messages": HOUSE}, {"messages": [HOUSE[1], HOUSE[-1]]}], assistant_only_loss=True)
    assert ids(made.tokens) == ids(theirs.tokens) and ids(made.loss_masks) == ids(theirs.loss_masks)


def test_conversations_with_role_and_content_are_messages():
    made = demonstrations([{"conversations": HOUSE}])
    assert ids(made.tokens) == [expected(HOUSE)] and "ShareGPT" not in str(made.report)
    both = demonstrations([{"conversations": [user("x"), assistant("y")], "messages": HOUSE}])
    assert ids(both.tokens) == [expected(HOUSE)]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"from": "narrator", "value": "a"}, "'conversations', message 2: 'from' is 'narrator'"),
        ({"from": "function_call", "value": "weather"}, "message 2: the value of the function_call is not the JSON"),
        ({"from": "gpt", "value": None}, "'messages', message 2: 'content' is null"),
    ],
)
def test_bad_messages_of_sharegpt_are_named(message, reason):
    rows = [{"conversations": SHAREGPT}, {"conversations": [SHAREGPT[1], message]}]
    with pytest.raises(UserError, match=f"row 2: .*{reason}"):
        demonstrations(rows)
    assert demonstrations(rows, on_bad_row="skip").report.bad == 1


def test_a_prompt_of_sharegpt_with_nothing_to_respond_to_is_bad():
    with pytest.raises(UserError, match="row 1: 'prompt' is an empty list"):
        prompts([{"conversations": [{"from": "gpt", "value": "Hello."}]}])


# --- JSON text


def test_json_text_of_messages_is_a_conversation_in_every_stage():
    text = json.dumps
    made = demonstrations([{"messages": text(CHAT)}, {"messages": text(HOUSE)}])
    assert ids(made.tokens) == [expected(CHAT), expected(HOUSE)]
    assert str(made.report).count("'messages': JSON text is read as conversations") == 1
    made = demonstrations([{"prompt": text(CHAT[:1]), "completion": text(CHAT[1:])}])
    assert ids(made.tokens) == [expected(CHAT)]
    assert "'prompt', 'completion': JSON text is read as conversations" in str(made.report)
    made = prompts([{"prompt": text(CHAT[:1]), "id": 1}])
    assert ids(made.tokens) == [expected(CHAT[:1], add_generation_prompt=True)] and made.texts([0]) == [CHAT[:1]]
    made = pairs([{"chosen": text(CHAT), "rejected": text([CHAT[0], assistant("No.")])}])
    assert ids(made.chosen) == [expected(CHAT)]
    assert ids(demonstrations([{"conversations": text(SHAREGPT)}]).tokens) == [expected(HOUSE)]


TEXTS = ["[1, 2]", "[]", "[", '["a"]', '[{"role": "admin"}]', '[{"a": 1}]', '{"role": "user", "content": "a"}', "[a]"]


def test_text_that_is_no_json_of_messages_stays_text():
    made = prompts([{"prompt": text} for text in TEXTS])
    assert not made.conversational and made.display_texts(range(len(TEXTS))) == TEXTS
    assert "JSON" not in str(made.report)
    row = {"prompt": "Write a chat as JSON.", "completion": json.dumps(CHAT)}  # a completion that is about JSON
    made = demonstrations([row])
    assert bytes_tokenizer().decode(made.tokens[0][made.prompt_lengths[0] :]).startswith('[{"role"')


def test_text_among_json_text_is_a_bad_row():
    with pytest.raises(UserError, match="row 2: 'prompt' is text, but the prompts of this data set are conversations"):
        prompts([{"prompt": json.dumps(CHAT[:1])}, {"prompt": "hello"}])


def test_pythons_text_of_messages_is_named_with_what_to_do():
    made = prompts([{"prompt": str(CHAT[:1])}])
    assert not made.conversational
    assert "'prompt' looks like Python's text of messages and stays text: write it as JSON" in str(made.report)


# --- mixtures and evaluation


def test_mixtures_and_evaluation_sets_take_every_form(tmp_path):
    from rlhf_jax.config import SFTConfig

    forms = {"a": {"messages": CHAT}, "b": {"conversations": SHAREGPT}, "c": {"messages": json.dumps(CHAT)}}
    paths = {}
    for name, row in forms.items():
        paths[name] = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**row, "tools": TOOLS}) + "\n")
    config = SFTConfig(
        datasets=tuple({"path": path} for path in paths.values()),
        max_length=4096,
        query_length=4096,
        length_buckets=None,
    )
    tokenizer, whole = bytes_tokenizer(TOOL_TEMPLATE), [expected(chat, TOOLS) for chat in (CHAT, HOUSE, CHAT)]
    made = data.load(data.DemoData, config, tokenizer)
    assert ids(made.tokens) == whole and "ShareGPT" in str(made.report) and "JSON text" in str(made.report)
    sets = data.load_eval(data.DemoData, config, tokenizer, paths)
    assert [ids(sets[name].tokens)[0] for name in forms] == whole


def test_forms_can_be_read_by_worker_processes(tmp_path):
    import pickle

    rows = conversation_forms.house_form(data.load_rows([{"conversations": SHAREGPT}]), (), whole="messages")
    assert pickle.loads(pickle.dumps(rows.table))[0]["messages"] == HOUSE

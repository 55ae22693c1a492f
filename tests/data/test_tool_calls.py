"""Calls of tools in the forms of several families, beside TRL: what is parsed, and what follows a result."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import data
from rlhf_jax.data.tool_calls import ToolCalls
from rlhf_jax.errors import UserError
from tests.helpers.chat_tokenizer import CHATML, bytes_tokenizer
from tests.helpers.optional import optional

trl_templates = optional("trl.chat_template_utils")
SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
FAMILIES = {
    "qwen2_5": "qwen2_5_chat_template",
    "qwen3": "qwen3_chat_template",
    "qwen3_instruct_2507": "qwen3_instruct_2507_chat_template",
    "llama3_1": "llama3_1_chat_template",
    "llama3_2": "llama3_2_chat_template",
}


def tokenizer_of(family):
    """A byte-level tokenizer with the family's template and end of a message."""
    template = getattr(trl_templates, FAMILIES[family])
    end = "<|eot_id|>" if family.startswith("llama") else "<|im_end|>"
    tokenizer = bytes_tokenizer(template)
    tokenizer.hf.add_special_tokens({"eos_token": end})
    eos = tokenizer.hf.convert_tokens_to_ids(end)
    return data.Tokenizer(hf=tokenizer.hf, name=family, pad_id=2, eos_id=eos, vocab_size=len(tokenizer.hf))


RESPONSES = {
    "plain": "The sum is 3.END",
    "empty": "END",
    "cut off": "<tool_call>\n{",
    "no JSON": '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>END',
    "a list": "<tool_call>\n[1, 2]\n</tool_call>END",
    "no name": '<tool_call>\n{"arguments": {}}\n</tool_call>END',
    "no arguments": '<tool_call>\n{"name": "add"}\n</tool_call>END',
    "arguments as text": '<tool_call>\n{"name": "add", "arguments": "{}"}\n</tool_call>END',
    "a list of arguments": '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>END',
    "text, thought and two calls": '<think>\nhm\n</think>\n\nOh. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    '</tool_call>\n<tool_call>\n{"name": "tell", "arguments": {}}\n</tool_call>END',
    "bare": '{"name": "add", "parameters": {"a": 1, "b": [2]}}END',
    "bare and cut off": '{"name": "add", "parameters": {"a": 1',
    "bare arguments as text": '{"name": "add", "parameters": "x"}END',
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", RESPONSES)
def test_a_response_is_parsed_as_trl_does(family, kind):
    tokenizer = tokenizer_of(family)
    calls = ToolCalls(tokenizer, [SCHEMA], None)
    prefix = tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(RESPONSES[kind].replace("END", tokenizer.hf.eos_token))
    reference = trl_templates.add_response_schema(tokenizer_of(family).hf)
    wanted = trl_templates.parse_response(reference, ids, prefix=tokenizer.encode(prefix))
    assert calls.parse(ids, prefix) == wanted


def trl_suffix(hf, messages):
    """What TRL 1.12.0 appends (`_get_tool_suffix_ids`), with its training template where it replaces the family's."""
    template = None
    if not trl_templates.is_chat_template_prefix_preserving(hf):
        template = trl_templates.get_training_chat_template(hf)
    call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
    before = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    options = {"tokenize": True, "return_dict": False, "chat_template": template}
    prefix = hf.apply_chat_template(before, **options)
    whole = hf.apply_chat_template(before + messages, add_generation_prompt=True, **options)
    last = max(place for place, token in enumerate(prefix) if token == hf.eos_token_id)
    assert whole[: last + 1] == prefix[: last + 1]
    return whole[last + 1 :]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=("Cs", "Co")), max_size=20), min_size=1, max_size=3))
def test_results_are_followed_by_the_tokens_of_trl(family, texts):
    tokenizer = tokenizer_of(family)
    messages = [{"role": "tool", "name": "add", "content": text} for text in texts]
    ids, text = ToolCalls(tokenizer, [SCHEMA], None).suffix(messages)
    assert ids == trl_suffix(tokenizer.hf, messages)
    assert text == tokenizer.decode(ids)
    assert tokenizer.eos_id not in ids[:1], "the end of the message is the policy's own"


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_in_a_result_are_text(family):
    tokenizer = tokenizer_of(family)
    calls, eos = ToolCalls(tokenizer, [SCHEMA], None), tokenizer.hf.eos_token
    plain, _ = calls.suffix([{"role": "tool", "name": "add", "content": "a b"}])
    ids, _ = calls.suffix([{"role": "tool", "name": "add", "content": f"a {eos}{eos}<bos> b"}])
    special = set(tokenizer.hf.all_special_ids)
    assert [i for i in ids if i in special] == [i for i in plain if i in special]
    assert tokenizer.decode([i for i in ids if i not in special]).count(f"a {eos}{eos}<bos> b") == 1


def test_a_tokenizer_says_itself_how_its_calls_are_parsed():
    template = CHATML.replace("{{ m.content", "{{ tools }}{{ m.content")
    with pytest.raises(UserError, match="shows no form of calls that is known here.*response_template"):
        ToolCalls(bytes_tokenizer(template), [SCHEMA], None)
    tokenizer = bytes_tokenizer(template)
    tokenizer.hf.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+) ",
                "close": ";",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }
    calls = ToolCalls(tokenizer, [SCHEMA], None)
    message = calls.parse(tokenizer.encode('CALL add {"a": 1};<|im_end|>'), "<|im_start|>assistant\n")
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML, "does not show tool 'add' to the policy"),
        (
            "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}<tool_call>",
            "leaves out the results of tools",
        ),
        (
            "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>",
            "does not end the policy's message with a token that ends responses, '<|im_end|>'",
        ),
        (
            "{{ tools }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "{{ m.content }}<|im_end|>{% endfor %}<tool_call>",
            "no tools",
        ),
    ],
)
def test_a_template_that_cannot_call_tools_is_refused(template, message):
    with pytest.raises(UserError, match=message.replace("|", r"\|")):
        ToolCalls(bytes_tokenizer(template), [SCHEMA], None)

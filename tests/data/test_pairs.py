"""Conversations as preference pairs: TRL's tokens, errors that name the row."""

import types

import datasets
import pytest

from rlhf_jax import data
from rlhf_jax.errors import UserError
from tests.helpers.chat_tokenizer import MARKED, assistant, bytes_tokenizer, system, user
from tests.helpers.made_data import make_pairs

PROMPTS = [[user("i met anna.")], [system("be brief"), user("i lost keys."), assistant("where?"), user("in rome.")]]
EXPLICIT = [
    {"prompt": PROMPTS[0], "chosen": [assistant("met anna")], "rejected": [assistant("met omar")], "margin": 1.5},
    {"prompt": PROMPTS[1], "chosen": [assistant("lost keys")], "rejected": [assistant("no")], "margin": 0.5},
]
IMPLICIT = [{name: [*row["prompt"], *row[name]] for name in ("chosen", "rejected")} for row in EXPLICIT]


def make(rows, tokenizer=None, **options):
    return make_pairs(data.load_rows(rows), tokenizer or bytes_tokenizer(MARKED), **options)


@pytest.mark.parametrize("rows", [EXPLICIT, IMPLICIT])
def test_tokens_are_those_of_trl(rows):
    trainer = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer
    tokenizer = bytes_tokenizer(MARKED)
    theirs = trainer._prepare_dataset(
        types.SimpleNamespace(),
        datasets.Dataset.from_list(rows),
        tokenizer.hf,
        types.SimpleNamespace(dataset_num_proc=None, max_length=512),
        "train",
    )
    made = make(rows, tokenizer)
    assert [ids.tolist() for ids in made.chosen] == theirs["chosen_ids"][:]
    assert [ids.tolist() for ids in made.rejected] == theirs["rejected_ids"][:]
    for ids in (*made.chosen, *made.rejected):
        assert ids[0] == tokenizer.hf.bos_token_id and ids.tolist().count(ids[0]) == 1


def test_a_prompt_may_stand_apart_or_in_both_conversations():
    explicit, implicit = make(EXPLICIT, margin_column="margin"), make(IMPLICIT)
    assert explicit.fingerprint == implicit.fingerprint and explicit.margin.tolist() == [1.5, 0.5]
    tokenizer = bytes_tokenizer(MARKED)
    rendered = tokenizer.hf.apply_chat_template(PROMPTS[0], tokenize=False, add_generation_prompt=True)
    prompt = len(tokenizer.encode(rendered))
    short = make(EXPLICIT, query_length=prompt)
    assert (short.report.kept, short.report.dropped) == (1, 1)
    longest = max(map(len, implicit.chosen))
    assert make(IMPLICIT, max_length=longest - 1).report.dropped == 1
    with pytest.raises(UserError, match="all 2 rows are longer than max_length = 9"):
        make(IMPLICIT, max_length=9)


def test_texts_as_prompts_of_conversations_are_refused_with_what_to_do():
    rows = [{"prompt": "i met anna.", **row} for row in IMPLICIT]
    with pytest.raises(UserError, match="'prompt' does not. Make it lists of messages, or remove it if"):
        make(rows)


FAULTS = [
    ({"chosen": "hello"}, "'chosen' is text, but the pairs of this data set are conversations"),
    ({"rejected": None}, "'rejected' is null"),
    ({"rejected": [{"role": "assistant", "content": 3}]}, "'rejected', message 1: 'content' is an int, not text"),
    ({"prompt": [user(" ")]}, "'prompt' ends with an empty message"),
    ({"rejected": EXPLICIT[1]["chosen"]}, "'chosen' and 'rejected' are the same"),
    ({"margin": "much"}, "'margin' is 'much', not a number"),
    ({"prompt": [{"role": "wizard", "content": "a"}]}, "'prompt': the chat template of 'bytes' failed: no wizards"),
    ({"rejected": [{"role": "wizard", "content": "a"}]}, "'rejected': the chat template of 'bytes' failed: no wizards"),
]


@pytest.mark.parametrize(("bad", "message"), FAULTS)
def test_bad_pairs_are_named_or_skipped_and_counted(bad, message):
    template = "{% for m in messages if m.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endfor %}" + MARKED
    rows, options = [EXPLICIT[0], {**EXPLICIT[1], **bad}], {"margin_column": "margin"}
    with pytest.raises(UserError) as error:
        make(rows, bytes_tokenizer(template), **options)
    assert f"row 2: {message}" in str(error.value) and "1 of 2 rows is bad" in str(error.value)
    made = make(rows, bytes_tokenizer(template), on_bad_row="skip", **options)
    assert (len(made), made.report.bad) == (1, 1)

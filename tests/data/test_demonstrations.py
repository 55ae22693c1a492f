"""Conversations as demonstrations: TRL's tokens and labels, the template's bos alone, errors that name the row."""

import dataclasses
import types

import datasets
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import data
from rlhf_jax.algorithms import sft
from rlhf_jax.config import SFTConfig
from rlhf_jax.errors import UserError
from tests.helpers.chat_tokenizer import CHATML, MARKED, assistant, bytes_tokenizer, system, user
from tests.helpers.made_data import make_demonstrations

PROMPTS = [
    [user("i met anna.")],
    [system("be brief"), user("i lost keys."), assistant("where?"), user("in rome.")],
    [user("i visited rome.")],
]
COMPLETIONS = [[assistant("met anna")], [assistant("lost keys")], [assistant("was in rome, which was long ago")]]
SPLIT = [{"prompt": p, "completion": c} for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
WHOLE = [{"messages": [*row["prompt"], *row["completion"]]} for row in SPLIT]


def make(rows, tokenizer=None, **options):
    tokenizer = tokenizer or bytes_tokenizer(MARKED)
    return make_demonstrations(data.load_rows(rows), tokenizer, **{"max_length": 400, **options})


def labels(made, completion_only=False):
    """For each row the ids, and which of them are labels: the first one never is."""
    batch = made.in_order(0, len(made))
    mask = sft.label_mask(
        jnp.asarray(batch.lengths),
        jnp.asarray(batch.prompt_lengths),
        batch.tokens.shape[1],
        completion_only,
        None if batch.loss_mask is None else jnp.asarray(batch.loss_mask),
    )
    return [
        (row[:length].tolist(), own[: length - 1].tolist())
        for row, own, length in zip(batch.tokens, np.asarray(mask), batch.lengths, strict=True)
    ]


@pytest.mark.parametrize("max_length", [400, 60])
@pytest.mark.parametrize("assistant_only", [False, True])
@pytest.mark.parametrize(("rows", "completion_only"), [(WHOLE, False), (SPLIT, False), (SPLIT, True)])
def test_tokens_and_labels_are_those_of_trl(rows, completion_only, assistant_only, max_length):
    trainer = pytest.importorskip("trl.trainer.sft_trainer").SFTTrainer
    tokenizer = bytes_tokenizer(MARKED)
    theirs = trainer._prepare_dataset(
        types.SimpleNamespace(_tokenizer=tokenizer.hf, completion_only_loss=completion_only, chat_template=None),
        datasets.Dataset.from_list(rows),
        tokenizer.hf,
        types.SimpleNamespace(
            dataset_num_proc=None,
            use_liger_kernel=False,
            shuffle_dataset=False,
            dataset_text_field="text",
            assistant_only_loss=assistant_only,
            max_length=max_length,
            truncation_mode="keep_start",
        ),
        False,
        None,
        "train",
    )
    expected = [(row["input_ids"], [label != -100 for label in row["labels"]][1:]) for row in theirs]
    made = make(
        rows,
        tokenizer,
        max_length=max_length,
        assistant_only_loss=assistant_only,
        completion_only_loss=completion_only,
    )
    found = labels(made, completion_only)
    if rows is SPLIT and not completion_only and max_length == 60:  # a prompt that fills max_length is dropped here
        expected = [row for row in expected if row[0] in [ids for ids, _ in found]]
    assert found == expected and len(found) >= 2


def test_the_assistants_tokens_are_what_the_template_marks():
    tokenizer = bytes_tokenizer(MARKED)
    (ids, in_loss), *_ = labels(make(WHOLE[1:2], tokenizer, assistant_only_loss=True))
    trained = [i for i, own in zip(ids[1:], in_loss, strict=True) if own]
    assert tokenizer.decode(trained) == "where?<|im_end|>lost keys<|im_end|>"
    (ids, in_loss), *_ = labels(
        make(SPLIT[1:2], tokenizer, assistant_only_loss=True, completion_only_loss=True), completion_only=True
    )
    assert tokenizer.decode([i for i, own in zip(ids[1:], in_loss, strict=True) if own]) == "lost keys<|im_end|>"


def test_a_template_that_writes_bos_gives_one_and_no_eos_is_added():
    tokenizer = bytes_tokenizer(MARKED)
    assert tokenizer.hf("a")["input_ids"][0] == tokenizer.hf.bos_token_id  # the tokenizer would add another
    for rows in (WHOLE, SPLIT):
        for ids in make(rows, tokenizer).tokens:
            assert ids[0] == 2 and ids.tolist().count(2) == 1
            assert tokenizer.decode(ids).endswith("<|im_end|>\n")


def test_the_columns_say_which_form_demonstrations_have():
    text = {"prompt": "i met anna.", "completion": " met anna"}
    assert make([{**text, "messages": WHOLE[0]["messages"]}]).fingerprint == make([text]).fingerprint
    extra = [{"prompt": "i met anna.", **row} for row in WHOLE]  # a prompt without a completion, as UltraChat has
    assert make(extra).fingerprint == make(WHOLE).fingerprint
    named = [{"question": row["prompt"], "answer": row["completion"]} for row in SPLIT]
    made = make(named, prompt_column="question", completion_column="answer")
    assert made.fingerprint == make(SPLIT).fingerprint
    with pytest.raises(UserError, match="has no column 'prompt'"):
        make(WHOLE, completion_column="answer")


def test_masks_belong_to_the_batches_and_the_fingerprint():
    made, plain = make(WHOLE, assistant_only_loss=True), make(WHOLE)
    batch = made.in_order(1, 4)
    assert batch.loss_mask.shape == batch.tokens.shape and batch.loss_mask.dtype == bool
    assert batch.lengths[2:].tolist() == [0, 0]
    share = made.batch(0, 0, 3, np.array([2]))
    np.testing.assert_array_equal(share.loss_mask, made.batch(0, 0, 3).loss_mask[[2]])
    assert plain.in_order(0, 2).loss_mask is None and plain.fingerprint != made.fingerprint
    np.testing.assert_array_equal(np.concatenate(made.tokens), np.concatenate(plain.tokens))


def test_options_of_a_config_reach_conversations():
    config = SFTConfig(query_length=300, max_length=400, assistant_only_loss=True, dataset_test_split=None)
    tokenizer = bytes_tokenizer(None)
    config = dataclasses.replace(config, chat_template_kwargs={"chat_template": MARKED})
    found = data.load(data.DemoData, config, tokenizer, WHOLE)
    assert found.fingerprint == make(WHOLE, assistant_only_loss=True).fingerprint


def test_long_prompts_are_dropped_and_long_conversations_are_cut_or_dropped():
    tokenizer = bytes_tokenizer(MARKED)
    lengths = [len(ids) for ids in make(SPLIT, tokenizer).tokens]
    prompts = make(SPLIT, tokenizer).prompt_lengths
    short = make(SPLIT, tokenizer, query_length=int(min(prompts)))
    assert (short.report.kept, short.report.dropped, short.report.truncated) == (1, 2, 0)
    cut = make(WHOLE, tokenizer, max_length=min(lengths))
    assert [len(ids) for ids in cut.tokens] == [min(lengths)] * 3 and cut.report.truncated == 2
    dropped = make(WHOLE, tokenizer, max_length=min(lengths), query_overflow="drop")
    assert (dropped.report.kept, dropped.report.dropped) == (1, 2)
    with pytest.raises(UserError, match="all 3 rows are longer than max_length = 9"):
        make(WHOLE, tokenizer, max_length=9, assistant_only_loss=True)


def test_a_prompt_whose_tokens_the_conversation_does_not_begin_with_is_counted():
    thinking = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    made = make(SPLIT, bytes_tokenizer(thinking), completion_only_loss=True)
    assert "3 rows do not begin with the tokens of the prompt" in str(made.report)
    assert "do not begin" not in str(make(SPLIT, bytes_tokenizer(thinking)).report)
    assert "do not begin" not in str(make(SPLIT, completion_only_loss=True).report)


def test_options_that_do_not_apply_are_refused_with_what_to_do():
    with pytest.raises(UserError, match=r"tokenizer 'bytes' does not mark.*generation %.*chat_template_kwargs"):
        make(WHOLE, bytes_tokenizer(CHATML), assistant_only_loss=True)
    with pytest.raises(UserError, match="assistant_only_loss needs conversations.*'messages'"):
        make([{"prompt": "i met anna.", "completion": " met anna"}], assistant_only_loss=True)
    with pytest.raises(UserError, match="completion_only_loss needs.*assistant_only_loss"):
        make(WHOLE, completion_only_loss=True)
    with pytest.raises(UserError, match="chat template, but tokenizer 'bytes' has none"):
        make(WHOLE, bytes_tokenizer(None))


FAULTS = [
    (WHOLE, {"messages": "hello"}, "'messages' is text, but the demonstrations of this data set are conversations"),
    (WHOLE, {"messages": None}, "'messages' is null"),
    (WHOLE, {"messages": [user("a"), {"role": "assistant"}]}, "'messages', message 2: 'content' is missing"),
    (WHOLE, {"messages": [user("a"), assistant(" ")]}, "'messages' ends with an empty message"),
    (WHOLE, {"messages": [user("a"), user("b")]}, "'messages': the chat template of 'bytes' marks no token as the as"),
    (SPLIT, {"completion": "hello"}, "'completion' is text, but the demonstrations"),
    (SPLIT, {"completion": []}, "'completion' is an empty list"),
    (SPLIT, {"prompt": [["a"]]}, "'prompt', message 1: is a list, not an object"),
    (SPLIT, {"prompt": [{"role": "a", "content": "a", "name": {}}], "completion": None}, "'completion' is null"),
]


@pytest.mark.parametrize(("rows", "bad", "message"), FAULTS)
def test_bad_conversations_are_named_or_skipped_and_counted(rows, bad, message):
    given = [rows[0], {**rows[1], **bad}, rows[2]]
    with pytest.raises(UserError) as error:
        make(given, assistant_only_loss=True)
    assert f"row 2: {message}" in str(error.value) and "1 of 3 rows is bad" in str(error.value)
    made = make(given, assistant_only_loss=True, on_bad_row="skip")
    assert (len(made), made.report.bad) == (2, 1)

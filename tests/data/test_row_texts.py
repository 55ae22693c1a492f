"""Tokens of prompts and completions: those of the joined text, as in TRL, with one bos; the rows that are counted."""

import types

import datasets
import pytest

from rlhf_jax import data
from rlhf_jax.data import arithmetic, synthetic, tldr
from rlhf_jax.evaluate.answers import reference_answers
from tests.helpers.made_data import make_demonstrations, make_pairs, make_prompts
from tests.helpers.text_tokenizers import byte_level, space_before

TOKENIZERS = {
    "legacy": space_before("legacy"),
    "first": space_before("first"),
    "always": space_before("always"),
    "without bos": space_before("legacy", bos=False),
    "bytes": byte_level(),
    "bytes with bos": byte_level(bos=True),
    "bytes without words": byte_level(use_regex=False),
}
ROWS = [
    {"prompt": "Q: is it red? A:", "completion": " no", "rejected": " yes"},
    {"prompt": "Q: is it red? A: ", "completion": "no", "rejected": "yes"},
    {"prompt": "Q: is it red? A:\n", "completion": "no", "rejected": "\nyes"},
    {"prompt": "Q: is it red? not", "completion": "hing", "rejected": "h"},
    {"prompt": "is it", "completion": " </s>", "rejected": "no"},
    {"prompt": "no", "completion": "t</s>", "rejected": "thing"},
    {"prompt": "xz", "completion": "q", "rejected": "z"},
]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["rejected"]} for row in ROWS]


def demonstrations(tokenizer, rows=ROWS, **options):
    return make_demonstrations(data.load_rows(rows), tokenizer, **options)


def pairs(tokenizer, rows=PAIRS, **options):
    return make_pairs(data.load_rows(rows), tokenizer, **options)


def lists(sequences):
    return [[int(i) for i in ids] for ids in sequences]


@pytest.mark.parametrize("max_length", [400, 16])
@pytest.mark.parametrize("completion_only", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_demonstrations_are_the_tokens_and_labels_of_trl(name, completion_only, max_length):
    trainer = pytest.importorskip("trl.trainer.sft_trainer").SFTTrainer
    tokenizer = TOKENIZERS[name]
    options = {"dataset_num_proc": None, "use_liger_kernel": False, "shuffle_dataset": False, "max_length": max_length}
    options |= {"dataset_text_field": "text", "assistant_only_loss": False, "truncation_mode": "keep_start"}
    given = types.SimpleNamespace(_tokenizer=tokenizer.hf, completion_only_loss=completion_only, chat_template=None)
    rows = datasets.Dataset.from_list([{k: row[k] for k in ("prompt", "completion")} for row in ROWS])
    found = trainer._prepare_dataset(given, rows, tokenizer.hf, types.SimpleNamespace(**options), False, None, "train")
    made = demonstrations(tokenizer, max_length=max_length, completion_only_loss=completion_only)
    ours = []
    for ids, prompt in zip(lists(made.tokens), made.prompt_lengths, strict=True):
        first = prompt if completion_only else 0
        ours.append((ids, [i if place >= first else -100 for place, i in enumerate(ids)]))
    theirs = [(row["input_ids"], row["labels"]) for row in found]
    if max_length == 16:  # a prompt that fills max_length is dropped here
        theirs = [row for row in theirs if row[0] in [ids for ids, _ in ours]]
    assert ours == theirs and len(ours) >= 2


@pytest.mark.parametrize("columns", ["prompt", "full texts"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pairs_are_the_tokens_of_trl(name, columns):
    trainer = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer
    tokenizer, rows = TOKENIZERS[name], PAIRS
    if columns == "full texts":
        rows = [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in PAIRS]
    options = types.SimpleNamespace(dataset_num_proc=None, max_length=512)
    theirs = trainer._prepare_dataset(
        types.SimpleNamespace(), datasets.Dataset.from_list(rows), tokenizer.hf, options, "train"
    )
    made = pairs(tokenizer, rows)
    assert lists(made.chosen) == theirs["chosen_ids"][:]
    assert lists(made.rejected) == theirs["rejected_ids"][:]


def test_no_space_is_put_between_prompt_and_completion():
    row = [{"prompt": "Q: is it red? A:", "completion": " no", "chosen": " no", "rejected": " yes"}]
    for form in ("legacy", "first", "always"):
        tokenizer = space_before(form)
        (ids,), pair = demonstrations(tokenizer, row).tokens, pairs(tokenizer, row)
        assert tokenizer.decode(ids[1:-1]) == "Q: is it red? A: no"
        assert pair.chosen[0].tolist() == ids.tolist() and ids[-2] == tokenizer.hf.convert_tokens_to_ids("▁no")


def test_rows_that_do_not_begin_with_the_tokens_of_their_prompt_are_counted():
    tokenizer, rows = byte_level(), [*ROWS[:4], {"prompt": "nothi", "completion": "ng"}]
    told = "2 rows do not begin with the tokens of the prompt"
    made = demonstrations(tokenizer, rows)
    assert str(made.report).endswith(told)
    made = demonstrations(tokenizer, rows, completion_only_loss=True)
    assert str(made.report).endswith(f"{told}, so the loss may begin at a wrong one")
    made = demonstrations(tokenizer, rows[:2])
    assert str(made.report).endswith("1 row does not begin with the tokens of the prompt")
    assert "not begin" not in str(demonstrations(tokenizer, [ROWS[0], ROWS[2]]).report)
    assert "not begin" not in str(demonstrations(space_before("legacy"), ROWS[:1]).report)


def test_a_completion_that_merges_into_its_prompt_leaves_no_loss_and_the_row_is_dropped():
    rows = [ROWS[0], {"prompt": "xz", "completion": "q"}]
    made = demonstrations(byte_level(), rows, completion_only_loss=True)
    assert (len(made), made.report.dropped) == (1, 1)
    assert len(demonstrations(byte_level(), rows)) == 2


def test_a_post_is_joined_after_its_cut_and_another_prompt_as_its_last_tokens():
    tokenizer = space_before("legacy")
    post = tldr.format_post("a", "b", "is it no\nis it yes is it yes is it yes")
    short = tldr.format_post("a", "b", "is it no")
    limit = len(tokenizer.encode(short)) + 1
    made = demonstrations(tokenizer, [{"prompt": post, "completion": " no"}], query_length=limit)
    expected = [1, *tokenizer.encode(f"{short} no"), 2]
    assert made.tokens[0].tolist() == expected and made.report.truncated == 1
    pair = pairs(tokenizer, [{"prompt": post, "chosen": " no", "rejected": " yes"}], query_length=limit)
    assert pair.chosen[0].tolist() == expected
    other = "Q: is it red? A:"
    made = demonstrations(tokenizer, [{"prompt": other, "completion": " no"}], query_length=5)
    assert made.tokens[0].tolist() == [1, *tokenizer.encode(other)[-4:], *tokenizer.encode(" no"), 2]


@pytest.mark.parametrize("task", [synthetic, arithmetic], ids=["synthetic", "arithmetic"])
def test_rows_of_the_built_in_tasks_are_the_tokens_of_their_parts(task):
    tokenizer = data.load_tokenizer(task.__name__.rsplit(".")[-1])
    rows = task.demonstrations(100)
    made = demonstrations(tokenizer, rows)
    for row, ids in zip(rows, lists(made.tokens), strict=True):
        assert ids == [*tokenizer.encode(row["prompt"]), *tokenizer.encode(row["completion"]), tokenizer.eos_id]
    assert "not begin" not in str(made.report)


@pytest.mark.parametrize("name", ["legacy", "first", "always", "bytes with bos"])
def test_a_text_that_begins_with_bos_gets_no_second_one(name):
    tokenizer = TOKENIZERS[name]
    texts = [f"<s>{ROWS[0]['prompt']}", ROWS[0]["prompt"]]
    told = "1 row begins with '<s>', which is not added again"
    prompts = make_prompts(data.load_rows([{"prompt": text} for text in texts]), tokenizer)
    assert lists(prompts.tokens) == [tokenizer.encode(texts[0]), [1, *tokenizer.encode(texts[1])]]
    assert prompts.tokens[0].tolist().count(1) == 1 and told in str(prompts.report)
    rows = [{"prompt": text, "completion": " no", "chosen": " no", "rejected": " yes"} for text in texts]
    whole = [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in rows]
    answers = {"tokens": " no", "chosen": " no", "rejected": " yes"}
    for made in (demonstrations(tokenizer, rows), pairs(tokenizer, rows), pairs(tokenizer, whole)):
        for column in answers.keys() & vars(made).keys():
            joined = [tokenizer.encode(text + answers[column]) for text in texts]
            assert lists(getattr(made, column)) == [[*joined[0], 2], [1, *joined[1], 2]]
        assert str(made.report).count(told) == 1
    cut = make_prompts(data.load_rows([{"prompt": texts[0]}]), tokenizer, query_length=5)
    assert lists(cut.tokens) == [[1, *tokenizer.encode(texts[0])[-4:]]]


def test_nothing_is_said_where_no_text_begins_with_bos():
    for tokenizer in TOKENIZERS.values():
        assert "begins with" not in str(demonstrations(tokenizer, ROWS[:1]).report)
    assert "begins with" not in str(demonstrations(byte_level(), [{**ROWS[0], "prompt": "<s>a"}]).report)


def test_reference_answers_are_the_tokens_of_the_joined_text():
    texts, prompts = [" no", "no", "hing"], ["Q: is it red? A:", "Q: is it red? A: ", "Q: is it red? not"]
    for tokenizer in TOKENIZERS.values():
        source = make_prompts(data.load_rows([{"prompt": prompt} for prompt in prompts]), tokenizer)
        answers, _ = reference_answers(texts, source, tokenizer, batch_size=4, shards=1, max_tokens=50)
        ((rollout, _, rows, real, _),) = answers.batches
        width = rollout.prompt_tokens.shape[1]
        for row in range(real):
            prompt = rollout.prompt_tokens[row, width - rollout.prompt_lengths[row] :].tolist()
            answer = rollout.response[row, : rollout.lengths[row]].tolist()
            whole = tokenizer.start_ids() + tokenizer.encode(prompts[rows[row]] + texts[rows[row]]) + [2]
            assert prompt + answer == whole
            assert len(prompt) == min(len(source.tokens[row]), len(whole) - 1)


def test_reference_answers_of_a_prompt_that_was_cut_follow_its_tokens():
    tokenizer = space_before("legacy")
    source = make_prompts(data.load_rows([{"prompt": "Q: is it red? A:"}]), tokenizer, query_length=6)
    answers, _ = reference_answers([" no"], source, tokenizer, batch_size=1, shards=1, max_tokens=50)
    rollout = answers.batches[0].rollout
    assert rollout.prompt_tokens[0, -rollout.prompt_lengths[0] :].tolist() == source.tokens[0].tolist()
    assert rollout.response[0, : rollout.lengths[0]].tolist() == [*tokenizer.encode(" no"), 2]

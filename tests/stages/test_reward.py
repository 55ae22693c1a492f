"""Training reads a reward model's score at the token where transformers reads that of the exported model."""

import copy
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import data
from rlhf_jax.algorithms import reward_model
from rlhf_jax.config import RewardConfig, resolve
from rlhf_jax.data import batches
from rlhf_jax.models import custom_shape
from rlhf_jax.models.io import hf
from rlhf_jax.rewards import scorer
from rlhf_jax.stages import open_stage
from rlhf_jax.types import Rollout
from tests.helpers.chat_tokenizer import assistant, user
from tests.helpers.made_data import make_pairs
from tests.helpers.optional import optional
from tests.helpers.text_tokenizers import byte_level

torch = optional("torch")

ENDS_WITH_EOS = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
ENDS_WITH_LINE = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\n' }}{% endfor %}"
PROMPTS = ("is it red?", "no</s> or yes?", "x")
TEXTS = [{"prompt": p, "chosen": " yes, it is", "rejected": " no</s>"} for p in PROMPTS]
CHATS = [
    {"prompt": [user(row["prompt"])], "chosen": [assistant(row["chosen"])], "rejected": [assistant("no")]}
    for row in TEXTS
]
FORMS = {"texts": (TEXTS, None), "chats": (CHATS, ENDS_WITH_EOS), "chats with a line feed": (CHATS, ENDS_WITH_LINE)}
PADS = {  # the pad token, and the rows of the embedding beyond the tokenizer's
    "own": ("<pad>", 0),
    "unk": ("<unk>", 0),
    "eos": ("</s>", 3),
    "eos without a free row": ("</s>", 0),
    "none": (None, 3),
    "none without a free row": (None, 0),
}
MODEL_OPTIONS = {
    "max_length": 96,
    "query_length": 64,
    "batch_size": 4,
    "max_steps": 1,
    "report_to": (),
    "save_steps": 0,
}


def write_base(folder, pad, free, template):
    """A causal checkpoint."""
    tokenizer = copy.deepcopy(byte_level().hf)
    tokenizer.pad_token, tokenizer.chat_template = pad, template
    tokenizer.save_pretrained(folder)
    model = custom_shape("1x16x2", len(tokenizer) + free)
    hf.save(folder, model, model.init(jax.random.key(0)), kind="causal", extra_config={"eos_token_id": 2})


def transformers_scores(path, texts):
    """Of texts, by the exported model and tokenizer."""
    transformers = optional("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    batch = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return tokenizer, scores[:, 0].numpy()


def by_ids(model, params, texts, tokenizer):
    """Scores of the tokens of texts as prompts and responses that ended, with and without a shared prompt."""
    rows = [tokenizer.encode(text) for text in texts]
    tokens, answers = zip(*[(row[:2], row[2:]) for row in rows], strict=True)
    shared = {
        "prompt_tokens": batches.pad_left([np.asarray(row, np.int32) for row in tokens], 4, tokenizer.pad_id),
        "prompt_lengths": batches.lengths_of(tokens),
        "response": batches.pad_right([np.asarray(row, np.int32) for row in answers], 72, tokenizer.eos_id),
        "lengths": batches.lengths_of(answers),
        "ended": np.ones(len(rows), bool),
    }
    rollout = Rollout(**{**dict.fromkeys(Rollout.__dataclass_fields__), **shared})
    alone = reward_model.score_rollout(model, params, rollout, dtype=jnp.float32)
    twice = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), rollout)
    grouped = reward_model.score_rollout(model, params, twice, dtype=jnp.float32, group_size=2)
    np.testing.assert_allclose(grouped[::2], alone, rtol=1e-5, atol=1e-6)
    return alone


@pytest.mark.filterwarnings("ignore:.*pads with its eos")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pad", PADS)
def test_scores_are_those_of_the_exported_model_in_transformers(tmp_path, pad, form):
    rows, template = FORMS[form]
    write_base(str(tmp_path / "base"), *PADS[pad], template)
    config = RewardConfig(model_name_or_path=str(tmp_path / "base"), **MODEL_OPTIONS)
    stage = open_stage(resolve(config), train_dataset=rows, eval_dataset=rows)
    exported = stage.export(stage.state, str(tmp_path / "out"))["reward_model"]
    auto, _ = transformers_scores(exported, ["a"])

    def text(row, name):
        if template is not None:
            return auto.apply_chat_template([*row["prompt"], *row[name]], tokenize=False)
        whole = row["prompt"] + row[name]
        return whole if whole.endswith("</s>") else f"{whole}</s>"

    texts = [text(row, name) for name in ("chosen", "rejected") for row in rows]
    _, expected = transformers_scores(exported, texts)
    close = {"rtol": 1e-5, "atol": 1e-6}
    # in training
    params = stage.state.params["model"]
    batch = stage.train_data.in_order(0, len(rows))
    trained = np.concatenate(reward_model.pair_scores(stage.network.model, params, batch, dtype=jnp.float32))
    np.testing.assert_allclose(trained, expected, **close)
    metrics = stage.evaluate(stage.state)
    np.testing.assert_allclose(metrics["eval/mean_reward"], expected.mean(), **close)
    # as it is read again: pairs, texts, ids
    own = data.load_tokenizer(exported, vocab_size=stage.network.model.config.vocab_size)
    model, (_, params) = scorer.open_model(exported, None), hf.load(exported, kind="scalar")
    batch = make_pairs(data.load_rows(rows), own).in_order(0, len(rows))
    again = np.concatenate(reward_model.pair_scores(model, params, batch, dtype=jnp.float32))
    np.testing.assert_allclose(again, expected, **close)
    answers = [row[name] for name in ("chosen", "rejected") for row in rows]
    prompts = [row["prompt"] for row in rows] * 2
    given = data.reward_tokens(own, prompts, answers, [True] * len(answers), text_eos=True, max_length=96)
    read = reward_model.score_texts(model, params, *given, dtype=jnp.float32)
    np.testing.assert_allclose(read, expected, **close)
    np.testing.assert_allclose(by_ids(model, params, texts, own), expected, **close)


@pytest.mark.filterwarnings("ignore:.*pads with its eos")
def test_the_pad_of_a_reward_model_is_its_tokenizers_or_that_of_its_config(tmp_path):
    for pad, config, expected in (("</s>", 3, 2), (None, 3, 3), (None, None, None), ("<unk>", None, 0)):
        tokenizer = copy.deepcopy(byte_level().hf)
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(tmp_path)
        model = custom_shape("1x16x2", 300)
        params = model.init(jax.random.key(0), heads=("scalar",))
        hf.save(tmp_path, model, params, kind="scalar", extra_config={"pad_token_id": config})
        own = data.load_tokenizer(str(tmp_path), vocab_size=300)
        for read in ("ids", "text"):
            options = {"reward_model_path": str(tmp_path), "reward_model_revision": "main", "more_reward_models": ()}
            options = types.SimpleNamespace(**options, reward_input=read)
            (opened,) = scorer.open_models(options, own, False)
            assert opened.model.pad_id == expected and (opened.tokenizer is None) == (read == "ids")


def test_a_sampled_pad_of_a_response_that_did_not_end_is_scored_as_any_token():
    model = types.SimpleNamespace(pad_id=2)
    tokens, lengths = np.asarray([[5, 2, 2], [2, 2, 2], [2, 5, 2]]), np.asarray([3, 2, 1])
    assert reward_model.scored_lengths(model, tokens, lengths).tolist() == [1, 0, 0]
    assert reward_model.scored_lengths(types.SimpleNamespace(pad_id=None), tokens, lengths).tolist() == [3, 2, 1]
    model = custom_shape("1x16x2", 8)
    params = model.init(jax.random.key(0), heads=("scalar",))
    fields = {
        "prompt_tokens": np.asarray([[3, 4]] * 3, np.int32),
        "prompt_lengths": np.asarray([2] * 3, np.int32),
        "response": np.asarray([[5, 2], [5, 2], [2, 2]], np.int32),
        "lengths": np.asarray([2, 2, 1], np.int32),
        "ended": np.asarray([True, False, True]),
    }
    rollout = Rollout(**{**dict.fromkeys(Rollout.__dataclass_fields__), **fields})
    shorter = rollout.replace(lengths=np.asarray([1, 2, 0], np.int32))
    expected = reward_model.score_rollout(model, params, shorter, dtype=jnp.float32)
    padded = dataclasses.replace(model, pad_id=2)
    found = reward_model.score_rollout(padded, params, rollout, dtype=jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-6)

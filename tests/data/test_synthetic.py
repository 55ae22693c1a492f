"""The built-in task: an exact reward, stated error rates, disjoint splits."""

import numpy as np
import pytest

from rlhf_jax.data import synthetic
from rlhf_jax.data.tldr import format_post
from rlhf_jax.errors import UserError

POST = format_post("work", "help", "it was a long day. i met anna. nobody said a word. i lost keys. i felt sad.")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" met anna; lost keys; felt sad", 3.0),
        (" felt sad; met anna", 2.0),  # order is free
        (" met anna", 1.0),
        ("", 0.0),
        (" met omar", -1.0 - 0.25 * 2),  # another detail: invented
        (" ate soup", -1.0 - 0.25 * 2),  # a deed that is not in the post
        (" met anna; ate soup", 0.0 - 0.25 * 2),
        (" met anna; met anna", 1.0 - 0.25 * 2),  # once is enough
        (" met anna; met anna; met anna", 1.0 - 0.25 * 4),
        (" ate soup; ate soup", -1.0 - 0.25 * 4),
        (" met keys", -0.25 * 2),  # malformed: only words
        (" met anna lost keys", -0.25 * 4),
        (" met; anna", -0.25 * 2),
        (" met anna; lost", 1.0 - 0.25),
        ("met anna;lost keys", 2.0),
    ],
)
def test_gold_reward_by_hand(completion, reward):
    assert synthetic.gold_reward([POST], [completion]) == [pytest.approx(reward, abs=1e-12)]


def test_gold_reward_reads_facts_from_the_post():
    assert synthetic.parse_facts(POST) == (("met", "anna"), ("lost", "keys"), ("felt", "sad"))
    for row in range(20):
        post = synthetic.make_post(np.random.default_rng(row), "train")
        assert synthetic.parse_facts(post.prompt) == post.facts
    with pytest.raises(UserError, match="TL;DR template"):
        synthetic.gold_reward(["something else"], [" met anna"])
    with pytest.raises(UserError, match="2 prompts but 1 completions"):
        synthetic.gold_reward([POST, POST], [" met anna"])


def test_demonstrations_drop_and_invent_at_the_stated_rates():
    rows = synthetic.demonstrations(3000)
    facts = told = invented = dropped = 0
    for row in rows:
        found = synthetic.count_facts(**row)
        n = len(synthetic.parse_facts(row["prompt"]))
        facts += n
        # One fact is always told: where all n would go, one stays.
        dropped += n * synthetic.DROP_RATE - synthetic.DROP_RATE**n
        told += found.kept + found.invented
        invented += found.invented
        assert found.excess_words == 2 * found.invented and found.kept + found.invented >= 1
    assert 1 - told / facts == pytest.approx(dropped / facts, abs=0.02)
    assert invented / told == pytest.approx(synthetic.INVENT_RATE, abs=0.02)


def test_there_is_much_to_gain_over_demonstrations():
    rows = synthetic.demonstrations(1000)
    rewards = np.array(synthetic.gold_reward([row["prompt"] for row in rows], [row["completion"] for row in rows]))
    best = np.array([len(synthetic.parse_facts(row["prompt"])) for row in rows])
    assert (best - rewards).mean() > 1.5 * rewards.std()


def test_preference_labels_follow_the_gold_reward_with_noise(monkeypatch):
    rows = synthetic.preference_pairs(2000)
    gold = [
        np.array(synthetic.gold_reward([row["prompt"] for row in rows], [row[side] for row in rows]))
        for side in ("chosen", "rejected")
    ]
    agree = np.mean((gold[0] > gold[1]) + 0.5 * (gold[0] == gold[1]))
    assert 0.90 < agree < 0.98
    assert all(row["chosen"] != row["rejected"] for row in rows)
    monkeypatch.setattr(synthetic, "LABEL_SHARPNESS", 1e6)
    sure = synthetic.preference_pairs(300)
    prompts = [row["prompt"] for row in sure]
    assert np.all(
        np.array(synthetic.gold_reward(prompts, [row["chosen"] for row in sure]))
        >= np.array(synthetic.gold_reward(prompts, [row["rejected"] for row in sure]))
    )


def test_splits_are_disjoint_over_kinds_and_seeds():
    seen = {}
    for split in synthetic.SIZES:
        rows = synthetic.prompts(300, split=split) + synthetic.preference_pairs(300, split=split, seed=7)
        seen[split] = {frozenset(synthetic.parse_facts(row["prompt"])) for row in rows}
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not seen[one] & seen[other]


def test_rows_are_a_function_of_kind_split_and_seed():
    assert synthetic.demonstrations(20, seed=3) == synthetic.demonstrations(30, seed=3)[:20]
    assert synthetic.demonstrations(20, seed=3) != synthetic.demonstrations(20, seed=4)
    assert [row["prompt"] for row in synthetic.demonstrations(20)] == [row["prompt"] for row in synthetic.prompts(20)]


def test_load_synthetic_gives_data_sets_and_names_what_it_has():
    pairs = synthetic.load_synthetic("pairs", "test", size=5, seed=1)
    assert pairs.column_names == ["prompt", "chosen", "rejected"] and len(pairs) == 5
    assert synthetic.load_synthetic("prompts", size=3).column_names == ["prompt"]
    with pytest.raises(UserError, match="'dev'.*train, validation, test"):
        synthetic.load_synthetic("prompts", "dev")
    with pytest.raises(UserError, match="'summaries'.*prompts, demonstrations, pairs"):
        synthetic.load_synthetic("summaries")


def test_posts_and_summaries_are_short():
    tokenizer = synthetic.build_tokenizer()
    rows = synthetic.demonstrations(500)
    assert max(len(tokenizer(row["prompt"])["input_ids"]) for row in rows) <= 64
    assert max(len(tokenizer(row["completion"])["input_ids"]) for row in rows) + 1 <= 24

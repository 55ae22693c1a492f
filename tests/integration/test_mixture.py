"""Stages train on the rows of `datasets`, and on no others."""

import datasets
import pytest

import rlhf_jax
from rlhf_jax.config import GRPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.data import synthetic
from rlhf_jax.errors import UserError
from rlhf_jax.stages import open_stage
from tests.helpers import vision
from tests.helpers.made_data import write_jsonl

MESSAGE = [{"role": "user", "content": "w1 w2"}]
SHARED = {
    "scratch_model": "1x16x2",
    "tokenizer_name_or_path": "synthetic",
    "dataset_test_split": None,
    "query_length": 44,
    "batch_size": 8,
    "report_to": (),
}
ROLLOUT = {**SHARED, "sft_model_path": None, "reward_model_path": None, "response_length": 4, "total_episodes": 16}
ROLLOUT |= {"reward_funcs": ("rlhf_jax.data.synthetic:gold_reward",), "num_sample_generations": 0}
SUPERVISED = {**SHARED, "model_name_or_path": None, "max_length": 64, "max_steps": 2}
CONFIGS = [
    (SFTConfig, SUPERVISED),
    (RewardConfig, SUPERVISED),
    *((c, ROLLOUT) for c in (PPOConfig, RLOOConfig, GRPOConfig)),
]


def sets_of(tmp_path, kind, counts=(6, 5)):
    make = synthetic.preference_pairs if kind is RewardConfig else synthetic.demonstrations
    return [write_jsonl(tmp_path / f"{i}.jsonl", make(count, seed=i)) for i, count in enumerate(counts)]


@pytest.mark.parametrize(("kind", "options"), CONFIGS, ids=[kind.__name__ for kind, _ in CONFIGS])
def test_a_stage_trains_on_the_rows_of_its_data_sets_alone(kind, options, tmp_path):
    paths = sets_of(tmp_path, kind)
    options = {**options, "run_dir": str(tmp_path / "run"), "dataset_name": "nowhere/nothing"}
    stage = open_stage(kind(datasets=tuple({"path": path} for path in paths), **options))
    assert stage.rows == 11 and sum("mixture of 2 data sets" in line for line in stage.messages) == 1
    for number, path in enumerate(paths):
        one = open_stage(kind(**{**options, "dataset_name": path})).train_data
        own = range(len(one))
        both = [index + number * 6 for index in own]
        assert stage.train_data.fingerprint != one.fingerprint
        name = next(name for name in ("tokens", "chosen") if hasattr(one, name))
        ours, theirs = getattr(stage.train_data, name), getattr(one, name)
        assert all(list(ours[i]) == list(theirs[j]) for i, j in zip(both, own, strict=True))


def test_rewards_see_the_columns_and_weights_hold_in_a_run(tmp_path):
    rows = [[{**row, "of": i} for row in synthetic.demonstrations(8, seed=i)] for i in range(2)]
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", rows[i]) for i in range(2)]
    seen = []

    def count(prompts, completions, of, **_):
        seen.extend(of)
        return [0.0] * len(prompts)

    options = {**ROLLOUT, "reward_funcs": (), "num_generations": 2, "total_episodes": 32, "eval_steps": 0}
    sets = tuple({"path": path, "weight": weight} for path, weight in zip(paths, (3, 1)))
    rlhf_jax.run(RLOOConfig(datasets=sets, run_dir=str(tmp_path / "run"), **options), reward_funcs=[count])
    assert (seen.count(0), seen.count(1)) == (24, 8)  # an epoch of 16 prompts, two responses to each


@pytest.mark.parametrize("kind", [RLOOConfig, SFTConfig])
def test_a_stage_refuses_images_of_several_data_sets(kind, tmp_path):
    model = vision.checkpoint(tmp_path / "model")
    rows = [{"prompt": MESSAGE, "completion": MESSAGE, "images": [vision.picture(0, 20, 12)]}] * 4
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "images"))
    sets = ({"path": write_jsonl(tmp_path / "texts.jsonl", [{"prompt": MESSAGE, "completion": MESSAGE}] * 4)},)
    sets += ({"path": str(tmp_path / "images")},)
    options = {"model_name_or_path": model, "max_length": 64}
    if kind is RLOOConfig:
        options = {**ROLLOUT, "scratch_model": None, "sft_model_path": model, "tokenizer_name_or_path": None}
    options |= {"dataset_test_split": None, "query_length": 32}
    with pytest.raises(UserError, match="datasets: images are read from one data set"):
        open_stage(kind(datasets=sets, **options))

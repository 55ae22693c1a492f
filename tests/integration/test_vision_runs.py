"""Runs on prompts with images: killed and resumed, with a frozen tower, with groups; and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import runpy

import datasets
import numpy as np
import pytest
from safetensors.numpy import load_file

import rlhf_jax
from rlhf_jax.config import GRPOConfig, PPOConfig, RLOOConfig, SFTConfig
from rlhf_jax.errors import UserError
from rlhf_jax.runtime.callbacks import Callback
from rlhf_jax.stages import open_stage
from tests.helpers import vision as tiny
from tests.helpers.arrays import distance, same_bits
from tests.helpers.paths import ROOT

USER = [{"role": "user", "content": "w1 w2"}]
TEXT = {"type": "text", "text": "w1"}
ROWS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("smolvlm"))


def rows(count=ROWS, **columns):
    """Prompts with 0, 1 and 2 images."""
    pictures = [[tiny.picture(i, 20, 12)] * (i % 3) for i in range(count)]
    return [{"prompt": USER, "images": images, **columns} for images in pictures]


def brightness(completions, images, **kwargs):
    """The mean of the first image, and a little for length."""
    means = [np.asarray(own[0].convert("L")).mean() / 255 if own else 0.0 for own in images]
    return [mean + len(one[0]["content"]) / 50 for mean, one in zip(means, completions, strict=True)]


def options(folder, tmp_path, **changes):
    return {
        "sft_model_path": folder,
        "reward_model_path": None,
        "query_length": 32,
        "response_length": 4,
        "batch_size": 4,
        "num_generations": 2,
        "total_episodes": 8,
        "learning_rate": 1e-2,
        "num_sample_generations": 0,
        "dataset_test_split": None,
        "run_dir": str(tmp_path / "run"),
        **changes,
    }


def changed_parts(first, last) -> set[str]:
    before, after = (load_file(f"{path}/model.safetensors") for path in (first, last))
    assert before.keys() == after.keys()
    return {name.split(".")[1] for name in before if not same_bits(before[name], after[name])} - {"weight"}


def test_what_does_not_read_images_is_refused_by_name(folder, tmp_path):
    given = options(folder, tmp_path)
    ppo = {name: value for name, value in given.items() if name != "num_generations"}
    with pytest.raises(UserError, match="ppo.*rloo or grpo"):
        open_stage(PPOConfig(**ppo, value_model="shared_backbone"), train_dataset=rows(), reward_funcs=[brightness])
    with pytest.raises(UserError, match="reward_model_path EleutherAI/x reads text"):
        open_stage(RLOOConfig(**{**given, "reward_model_path": "EleutherAI/x"}), train_dataset=rows())
    with pytest.raises(UserError, match="reward_server.*images"):
        open_stage(RLOOConfig(**given, reward_server="http://localhost:1"), train_dataset=rows())
    with pytest.raises(UserError, match="freeze_vision_tower"):
        open_stage(
            RLOOConfig(**given, freeze_vision_tower=True),
            train_dataset=[{"prompt": USER}] * 4,
            reward_funcs=[brightness],
        )
    other = json.loads((tiny.Path(folder) / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**other, "model_type": "llava", "architectures": None}))
    with pytest.raises(UserError, match="'llava'.*smolvlm, idefics3"):
        open_stage(
            GRPOConfig(**{**given, "sft_model_path": str(tmp_path / "other")}),
            train_dataset=rows(),
            reward_funcs=[brightness],
        )
    answer = [{"role": "assistant", "content": "w3"}]
    with pytest.raises(UserError, match="packing with images"):
        config = SFTConfig(model_name_or_path=folder, packing=True, max_length=48)
        open_stage(config, train_dataset=rows(completion=answer))


def test_a_text_model_refuses_images_but_not_a_column_of_their_name(tmp_path):
    from rlhf_jax.data import files
    from rlhf_jax.stages.open_models import Source, wants_images

    source = Source(None, shape="2x64x4")
    with pytest.raises(UserError, match="reads text alone"):
        wants_images(source, files.from_list(rows(), "rows"), ("prompt",))
    named = files.from_list([{"prompt": "a", "image": "a.png"}], "rows")
    assert not wants_images(source, named, ("prompt",))


@pytest.mark.runs
@pytest.mark.parametrize("config", [RLOOConfig, GRPOConfig])
def test_a_run_learns_from_images_and_resumes_bit_for_bit(folder, tmp_path, config):
    """Killed at its second update of three, and not; rewards get PIL images."""

    class Kill(Callback):
        def on_step_end(self, step, metrics, control):
            raise MemoryError(f"update {step}")

    for name, callbacks in (("whole", ()), ("parts", (Kill(),)), ("parts", ())):
        given = options(folder, tmp_path, run_dir=str(tmp_path / name), save_steps=1, total_episodes=12)
        run = functools.partial(rlhf_jax.run, reward_funcs=[brightness], train_dataset=rows(), callbacks=callbacks)
        if callbacks:
            with pytest.raises(MemoryError):
                run(config(**given))
        else:
            run(config(**given))
    whole, parts = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "parts"))
    assert same_bits(whole, parts)
    assert changed_parts(folder, tmp_path / "whole" / "policy") == {"vision_model", "connector", "text_model"}


@pytest.mark.runs
def test_a_frozen_tower_stays_as_it_is(folder, tmp_path):
    given = options(folder, tmp_path, freeze_vision_tower=True, sync_ref_model=True, ref_model_sync_steps=1)
    rlhf_jax.run(RLOOConfig(**given), reward_funcs=[brightness], train_dataset=rows())
    assert changed_parts(folder, tmp_path / "run" / "policy") == {"connector", "text_model"}
    answer = [{"role": "assistant", "content": "w3 w4"}]
    sft = SFTConfig(
        model_name_or_path=folder,
        batch_size=2,
        query_length=32,
        max_length=48,
        dataset_test_split=None,
        freeze_vision_tower=True,
        run_dir=str(tmp_path / "sft"),
    )
    rlhf_jax.run(sft, train_dataset=rows(completion=answer))
    assert changed_parts(folder, tmp_path / "sft" / "policy") == {"connector", "text_model"}


@pytest.mark.runs
def test_groups_computed_once_equal_rows_side_by_side(folder, tmp_path):
    """shared_prompts computes a prompt's features once for its responses."""
    finals = []
    for shared in (True, False):
        given = options(folder, tmp_path, run_dir=str(tmp_path / str(shared)), shared_prompts=shared)
        rlhf_jax.run(RLOOConfig(**given), reward_funcs=[brightness], train_dataset=rows())
        finals.append(load_file(tmp_path / str(shared) / "policy" / "model.safetensors"))
    assert distance(*finals) < 1e-4


@pytest.mark.runs
def test_a_policy_answers_about_images(folder):
    """Equal to the same prompt in a batch of others, and another picture gives other logits."""
    policy = rlhf_jax.load_policy(folder, images=True)
    asked = [
        [{"role": "user", "content": [{"type": "image", "image": tiny.picture(seed, 20, 12)}, TEXT]}] for seed in (1, 2)
    ]
    options = {"max_new_tokens": 4, "temperature": 0.0}
    both = policy.generate([*asked, USER], **options)
    assert both[:1] == policy.generate(asked[:1], **options) and len(both) == 3
    with pytest.raises(UserError, match="text 1: .*too few"):
        policy.generate([asked[0], [{"role": "user", "content": [{"type": "image"}, TEXT]}]], **options)


@pytest.mark.runs
def test_completions_have_thumbnails_in_files_alone(folder, tmp_path, capsys):
    given = options(folder, tmp_path, total_episodes=4, log_completions=True, logging_steps=1, num_sample_generations=1)
    rlhf_jax.run(RLOOConfig(**given), reward_funcs=[brightness], train_dataset=rows(), eval_dataset=rows())
    for name, count in (("training_1", 4), ("1", len(rows()))):
        written = (tmp_path / "run" / "completions" / f"{name}.jsonl").read_text().splitlines()
        counts = [len(json.loads(line)["thumbnails"]) for line in written]
        assert 0 < len(counts) <= count and max(counts) > 0, name
        first = json.loads(written[counts.index(max(counts))])["thumbnails"]
        assert all(image.startswith("data:image/png;base64,") for image in first)
    assert "base64" not in capsys.readouterr().out


@pytest.mark.runs
def test_the_shipped_config_prepares_its_data_and_trains(folder, tmp_path, monkeypatch):
    """Rows as of the hub's data set, from its own preparation to an adapter; a tiny model, short responses."""
    monkeypatch.chdir(tmp_path)
    module = runpy.run_path(str(ROOT / "configs" / "rloo_smolvlm.py"))
    hub = [
        {"image": tiny.picture(i, 20, 12), "problem": f"w{1 + i % 5} w2", "solution": "$3$", "original": str(i)}
        for i in range(108)
    ]
    table = datasets.Dataset.from_list(hub).cast_column("image", datasets.Image())
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: table)
    module["main"]()
    config = dataclasses.replace(
        module["get_config"](),
        sft_model_path=folder,
        query_length=64,
        response_length=4,
        batch_size=4,
        micro_batch_size=4,
        rollout_batch_size=4,
        max_eval_samples=4,
        logging_steps=1,
    )
    result = rlhf_jax.run(config)
    assert result.metrics["episode"] == 16 and "rewards/accuracy_reward/mean" in result.metrics
    written = [json.loads(line) for line in (tmp_path / config.run_dir / "completions" / "training_1.jsonl").open()]
    assert all(row["prompt"].startswith("<|im_start|>system: ") and len(row["thumbnails"]) == 1 for row in written)
    assert rlhf_jax.load_policy(result.paths["policy"], images=True).generate(
        [[{"role": "user", "content": [{"type": "image", "image": hub[0]["image"]}, TEXT]}]], max_new_tokens=2
    )

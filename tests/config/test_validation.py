"""What cannot work is refused before any model is loaded, with the arithmetic."""

import pytest

from rlhf_jax.config import (
    Pipeline,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    validation,
    values,
)
from rlhf_jax.errors import UserError

IMPOSSIBLE = [
    (PPOConfig(num_mini_batches=3), r"batch_size 512.*num_mini_batches 3.*170\.7.*batch_size 510.*513"),
    (PPOConfig(batch_size=2, num_mini_batches=4), "num_mini_batches 4.*batch_size 2"),
    (PPOConfig(num_mini_batches=2, micro_batch_size=100), r"256.*micro_batch_size 100.*2\.56.*64.*128"),
    (SFTConfig(batch_size=64, micro_batch_size=48), "64.*micro_batch_size 48.*32.*64"),
    (PPOConfig(rollout_batch_size=100), r"rollout_batch_size 100.*5\.12.*64.*128"),
    (PPOConfig(rollout_batch_size=1024), r"rollout_batch_size 1024.*0\.5.*rollout_batch_size 512"),
    (PPOConfig(response_length=0), "response_length.*0"),
    (PPOConfig(query_length=0), "query_length.*0"),
    (PPOConfig(stop_token_id=0), "stop_token 'eos'.*stop_token_id 0"),
    (PPOConfig(batch_size=16, num_mini_batches=4, whiten_rewards=True), "whiten_rewards.*8 rows.* = 4"),
    (PPOConfig(temperature=0.0), r"\btemperature.*0\.0"),
    (PPOConfig(top_p=0.0), r"top_p.*0\.0"),
    (PPOConfig(top_p=1.5), r"top_p.*1\.5"),
    (PPOConfig(min_p=2.0), r"min_p.*2\.0"),
    (PPOConfig(top_k=-1), "top_k.*-1"),
    (PPOConfig(repetition_penalty=0.0), r"repetition_penalty.*0\.0"),
    (PPOConfig(kl_target=6.0, kl_horizon=0), "kl_horizon.*0"),
    (PPOConfig(kl_target=6.0, kl_coef=0.0), r"kl_target 6\.0.*kl_coef 0"),
    (PPOConfig(kl_coef=-0.1), r"kl_coef.*-0\.1"),
    (PPOConfig(total_episodes=0), "total_episodes.*0"),
    (PPOConfig(gamma=1.1), r"\bgamma.*1\.1"),
    (PPOConfig(lam=-0.5), r"\blam.*-0\.5"),
    (PPOConfig(cliprange=0.0), r"cliprange.*0\.0"),
    (PPOConfig(num_ppo_epochs=0), "num_ppo_epochs.*0"),
    (PPOConfig(missing_eos_penalty=-1.0), r"missing_eos_penalty.*-1\.0"),
    (PPOConfig(eos_penalty_mode="replace"), "eos_penalty_mode 'replace'.*missing_eos_penalty"),
    (PPOConfig(value_model="shared_backbone", value_model_path="x"), "value_model_path 'x'"),
    (PPOConfig(reward_model_path=None), "reward_model_path.*None"),
    (PPOConfig(sft_model_path=None), "sft_model_path.*scratch_model"),
    (SFTConfig(model_name_or_path=None, scratch_model="14m"), "tokenizer_name_or_path"),
    (SFTConfig(scratch_model="2x10x3"), "2 layers of width 10 with 3 heads"),
    (SFTConfig(learning_rate=-1e-3), r"learning_rate.*-0\.001"),
    (SFTConfig(warmup_steps=-1), "warmup_steps.*-1"),
    (SFTConfig(adam_beta2=1.0), r"adam_beta2.*1\.0"),
    (SFTConfig(max_grad_norm=0.0), r"max_grad_norm.*0\.0"),
    (SFTConfig(max_steps=0), "max_steps.*0.*-1.*num_train_epochs"),
    (
        SFTConfig(save_steps=-1),
        "save_steps.*-1",
    ),
    (SFTConfig(seed=-1), r"\bseed.*-1"),
    (SFTConfig(mesh_data=0), "mesh_data.*0.*-1"),
    (SFTConfig(mesh_tensor=0), "mesh_tensor.*0"),
    (SFTConfig(query_length=562), "max_length 562.*query_length 562.*0"),
    (SFTConfig(early_stopping_patience=2), "early_stopping_patience 2.*eval_steps.*0"),
    (SFTConfig(eval_steps=5, dataset_test_split=None), "eval_steps.*5"),
    (SFTConfig(length_buckets=(64, 64)), "length_buckets.*64, 64"),
    (SFTConfig(report_to=("mlflow",)), "report_to.*mlflow"),
    (SFTConfig(dataset_streaming=True), "dataset_streaming"),
    (RewardConfig(center_rewards_coefficient=-0.1), r"center_rewards_coefficient.*-0\.1"),
    (RewardConfig(score_init_std=0.0), r"score_init_std.*0\.0"),
    (Pipeline(reward=RewardConfig(seed=-1)), "reward: seed.*-1"),
    (SFTConfig(eval_steps=1.5), r"eval_steps.*1\.5"),
    (SFTConfig(eval_steps=-0.5), r"eval_steps.*-0\.5"),
    # groups
    (RLOOConfig(num_generations=1), "num_generations.*1.*leave-one-out"),
    (RLOOConfig(num_generations_eval=0), "num_generations_eval.*0"),
    (RLOOConfig(num_generations=3), r"64.*num_generations 3.*21\.33.*batch_size 63.*66"),
    (RLOOConfig(batch_size=2, num_generations=4), r"0\.5 prompts.*batch_size 4"),
    (
        RLOOConfig(num_generations=4, num_mini_batches=32),
        r"2 rows.*num_generations 4.*0\.5.*num_mini_batches 16",
    ),
    (RLOOConfig(num_mini_batches=3), r"batch_size 64.*num_mini_batches 3.*21\.33"),
    (
        RLOOConfig(batch_size=96, num_generations=4, micro_batch_size=6),
        r"micro_batch_size 6.*num_generations 4.*1\.5.*micro_batch_size 4.*8.*--shared_prompts",
    ),
    (
        RLOOConfig(batch_size=96, num_generations=4, rollout_batch_size=6),
        r"rollout_batch_size 6.*num_generations 4.*1\.5.*rollout_batch_size 4.*8.*--shared_prompts",
    ),
    # RLOO's numbers
    (RLOOConfig(num_iterations=0), "num_iterations.*0"),
    (RLOOConfig(epsilon=0.0), r"\bepsilon.*0\.0"),
    (RLOOConfig(epsilon_high=0.0), r"epsilon_high.*0\.0"),
    (RLOOConfig(beta=-0.1), r"\bbeta.*-0\.1"),
    (RLOOConfig(advantage_epsilon=-1e-4), r"advantage_epsilon.*-0\.0001"),
    (RLOOConfig(ref_model_mixup_alpha=1.5), r"ref_model_mixup_alpha.*1\.5"),
    (RLOOConfig(ref_model_sync_steps=0), "ref_model_sync_steps.*0"),
    (RLOOConfig(sync_ref_model=True, beta=0.0), "sync_ref_model.*beta 0"),
    (RLOOConfig(baseline_excludes_truncated=True), "baseline_excludes_truncated.*mask_truncated_completions"),
    (RLOOConfig(reward_clip_range=(1.0, 1.0)), "reward_clip_range.*1 1"),
    (RLOOConfig(reward_clip_range=(-3.0,)), "reward_clip_range.*-3"),
    (RLOOConfig(reward_clip_range=(1.0, 2.0, 3.0)), "reward_clip_range.*1 2 3"),
    (RLOOConfig(reward_clip_range=()), "reward_clip_range"),
    (RLOOConfig(stop_token_id=0), "stop_token 'eos'.*stop_token_id 0"),
    (RLOOConfig(eos_penalty_mode="replace"), "eos_penalty_mode 'replace'.*missing_eos_penalty"),
    (RLOOConfig(num_completions_to_print=0), "num_completions_to_print.*0"),
    # rewards
    (RLOOConfig(reward_timeout=0.0), r"reward_timeout.*0\.0"),
    (RLOOConfig(reward_server_timeout=0.0), r"reward_server_timeout.*0\.0"),
    (RLOOConfig(reward_server_total_timeout=-1.0), r"reward_server_total_timeout.*-1\.0"),
    (RLOOConfig(reward_server_retries=-1), "reward_server_retries.*-1"),
    (RLOOConfig(reward_server_batch_size=0), "reward_server_batch_size.*0"),
    (RLOOConfig(reward_server_concurrency=0), "reward_server_concurrency.*0"),
    (RLOOConfig(reward_server="localhost:8000"), "reward_server.*'localhost:8000'.*http://"),
    (PPOConfig(reward_ensemble="min"), "reward_ensemble 'min'.*more_reward_models"),
    (RLOOConfig(more_reward_models=("a",), reward_model_path=None), "more_reward_models.*reward_model_path"),
    (RLOOConfig(reward_ensemble_std_coef=-1.0), r"reward_ensemble_std_coef.*-1\.0"),
    (RLOOConfig(reward_funcs=("length",)), "reward_funcs: 'length'.*'module:function'.*'file.py:function'"),
    (
        RLOOConfig(reward_weights=(1.0,), more_reward_models=("a",), reward_funcs=("m:f",)),
        "reward_weights.*1.*3",
    ),
    # generation_kwargs
    (RLOOConfig(generation_kwargs={"top_p": 1.5}), r"generation_kwargs\['top_p'\].*1\.5"),
    (RLOOConfig(generation_kwargs={"top_k": 0.5}), r"generation_kwargs\['top_k'\].*0\.5"),
    (RLOOConfig(generation_kwargs={"temperature": None}), r"generation_kwargs\['temperature'\].*None"),
    (RLOOConfig(generation_kwargs={"do_sample": False}), "do_sample.*False"),
    (RLOOConfig(generation_kwargs={"max_new_tokens": 64}), "64.*response_length.*512"),
    (RLOOConfig(generation_kwargs={"eos_token_id": 0}), "'eos_token_id'.*stop_token_id"),
    (PPOConfig(generation_kwargs={"stop_strings": "a"}), "stop_strings.*stop_token.*stop_token_id"),
    (RLOOConfig(generation_kwargs={"num_beams": 4}), "'num_beams'.*temperature, top_k"),
    (RLOOConfig(generation_kwargs={"temprature": 1.0}), "'temprature'.*temperature"),
]


POSSIBLE = [
    RLOOConfig(token_level_kl=True, beta=0.0),
    RLOOConfig(old_logprobs="sampler", top_k=50, min_p=0.1, repetition_penalty=1.1, generation_kwargs={"top_p": 0.9}),
    RLOOConfig(policy_loss="reinforce", num_iterations=2),
    RLOOConfig(reward_model_path=None),  # a reward function may come as an object
    RLOOConfig(reward_clip_range=(10.0,)),
    RLOOConfig(reward_clip_range=(-1.0, 3.0), reward_weights=(1.0, 2.0)),
    RLOOConfig(reward_ensemble="min", more_reward_models=("a", "b"), reward_weights=(1.0,)),
    RLOOConfig(mask_truncated_completions=True, baseline_excludes_truncated=True, eval_steps=0.1),
    RLOOConfig(batch_size=96, num_generations=4, micro_batch_size=6, rollout_batch_size=6, shared_prompts=False),
    RLOOConfig(generation_kwargs={"max_new_tokens": 512, "do_sample": True, "min_p": None, "temperature": 1}),
    RLOOConfig(reward_model_path=None, reward_funcs=("my/rewards.py:length",), reward_server="https://x/score"),
]


@pytest.mark.parametrize("config", POSSIBLE)
def test_unusual_configs_are_possible(config):
    validation.check(values.checked_types(config))


@pytest.mark.parametrize(("config", "message"), IMPOSSIBLE, ids=[message[:40] for _, message in IMPOSSIBLE])
def test_impossible_configs_are_refused_with_the_arithmetic(config, message):
    with pytest.raises(UserError, match=message):
        validation.check(config)


@pytest.mark.parametrize("config", [SFTConfig(), RewardConfig(), PPOConfig(), RLOOConfig(), Pipeline()])
def test_the_defaults_are_possible(config):
    validation.check(config)


def test_all_problems_are_told_at_once():
    with pytest.raises(UserError) as error:
        validation.check(PPOConfig(num_mini_batches=3, stop_token_id=5, dataset_streaming=True))
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize("config", [PPOConfig(run_dir="gs://b/run"), Pipeline(run_dir="s3://b/run")])
def test_a_bucket_is_no_run_folder_and_the_way_to_one_is_told_once(config):
    with pytest.raises(UserError, match="^run_dir.*'(gs|s3)://b/run'.*path.$"):
        validation.check(config)


def test_stop_token_id_0_is_a_token_like_any_other():
    validation.check(PPOConfig(stop_token=None, stop_token_id=0))

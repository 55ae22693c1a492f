"""A config that cannot work is refused before any model is loaded, with the arithmetic."""

import pytest

from rlhf_jax.config import GRPOConfig, Pipeline, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.config.check import check
from rlhf_jax.errors import UserError
from rlhf_jax.option import checked_types

IMPOSSIBLE = [
    (PPOConfig(num_mini_batches=3), "batch_size 512 / num_mini_batches 3 = 170.7 rows.*batch_size 510 or 513"),
    (PPOConfig(batch_size=2, num_mini_batches=4), "num_mini_batches 4 .* batch_size 2"),
    (PPOConfig(num_mini_batches=2, micro_batch_size=100), "= 256 rows .* micro_batch_size 100 = 2.56.*64 or 128"),
    (
        SFTConfig(batch_size=64, micro_batch_size=48),
        "batch_size 64 rows .* / micro_batch_size 48 = 1.333.*micro_batch_size 32 or 64",
    ),
    (
        PPOConfig(micro_batch_tokens=4096, micro_batch_size=8),
        "micro_batch_tokens 4096 and micro_batch_size 8 both .* none",
    ),
    (
        PPOConfig(micro_batch_tokens=4096, loss_aggregation="token_mean_micro"),
        "micro_batch_tokens with loss_aggregation 'token_mean_micro': .* which rows share a micro-batch",
    ),
    (PPOConfig(rollout_batch_size=100), "rollout_batch_size 100 = 5.12 rounds.*64 or 128"),
    (PPOConfig(rollout_batch_size=1024), "rollout_batch_size 1024 = 0.5 rounds.*rollout_batch_size 512"),
    (PPOConfig(response_length=0), "response_length is 0; it must be at least 1"),
    (PPOConfig(query_length=0), "query_length is 0; it must be at least 1"),
    (PPOConfig(stop_token_ids=(3, -1)), "stop_token_ids is .3, -1.; .* at least 0"),
    (PPOConfig(stop_token_ids=()), "stop_token_ids is ..; .* at least one"),
    (RLOOConfig(stop_token=None, stop_token_id=4, stop_token_ids=(3,)), "stop_token_ids .3,. and stop_token_id 4"),
    (PPOConfig(stop_token_ids="generation_config", scratch_model="2x32x4"), "stop_token_ids .* scratch_model"),
    (PPOConfig(stop_token_id=0), "stop_token 'eos' and stop_token_id 0 exclude each other"),
    (PPOConfig(batch_size=16, num_mini_batches=4, whiten_rewards=True), "whiten_rewards .* 8 rows .* = 4"),
    (PPOConfig(temperature=0.0), "temperature is 0.0; it must be above 0"),
    (PPOConfig(top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
    (PPOConfig(top_p=1.5), "top_p is 1.5"),
    (PPOConfig(min_p=2.0), "min_p is 2.0; it must be between 0 and 1"),
    (PPOConfig(top_k=-1), "top_k is -1; it must be at least 0"),
    (PPOConfig(repetition_penalty=0.0), "repetition_penalty is 0.0"),
    (PPOConfig(kl_target=6.0, kl_horizon=0), "kl_horizon is 0; it must be at least 1"),
    (PPOConfig(kl_target=6.0, kl_coef=0.0), "kl_target 6.0 with kl_coef 0"),
    (PPOConfig(kl_coef=-0.1), "kl_coef is -0.1; it must be at least 0"),
    (PPOConfig(total_episodes=0), "total_episodes is 0; it must be at least 1"),
    (PPOConfig(gamma=1.1), "gamma is 1.1; it must be between 0 and 1"),
    (PPOConfig(lam=-0.5), "lam is -0.5; it must be between 0 and 1"),
    (PPOConfig(cliprange=0.0), "cliprange is 0.0; it must be above 0"),
    (PPOConfig(num_ppo_epochs=0), "num_ppo_epochs is 0; it must be at least 1"),
    (PPOConfig(missing_eos_penalty=-1.0), "missing_eos_penalty is -1.0; it must be at least 0"),
    (PPOConfig(eos_penalty_mode="replace"), "eos_penalty_mode 'replace' needs missing_eos_penalty"),
    (PPOConfig(value_model="shared_backbone", value_model_path="x"), "value_model_path 'x' would not be used"),
    (PPOConfig(sft_model_path=None), "sft_model_path and scratch_model"),
    (GRPOConfig(baseline="none"), "baseline 'none' with scale_rewards 'group'.* batch or none"),
    (SFTConfig(model_name_or_path=None, scratch_model="14m"), "model_name_or_path and tokenizer_name_or_path"),
    (SFTConfig(scratch_model="2x10x3"), "2 layers of width 10 with 3 heads"),
    (SFTConfig(learning_rate=-1e-3), "learning_rate is -0.001; it must be at least 0"),
    (SFTConfig(warmup_steps=-1), "warmup_steps is -1; it must be at least 0"),
    (SFTConfig(adam_beta2=1.0), "adam_beta2 is 1.0; it must be at least 0 and below 1"),
    (SFTConfig(max_grad_norm=0.0), "max_grad_norm is 0.0; it must be above 0"),
    (SFTConfig(max_steps=0), r"max_steps is 0; it must be -1 .* or at least 1"),
    (
        SFTConfig(save_steps=-1),
        "save_steps is -1.* it must be 0 .*, between 0 and 1 .* or a whole number of updates",
    ),
    (SFTConfig(seed=-1), "seed is -1"),
    (SFTConfig(mesh_data=0), "mesh_data is 0; it must be -1"),
    (SFTConfig(mesh_tensor=0), "mesh_tensor is 0; it must be at least 1"),
    (SFTConfig(query_length=562), "max_length 562 - query_length 562 = 0 tokens left for the completion"),
    (SFTConfig(early_stopping_patience=2), "early_stopping_patience 2 needs eval_steps above 0"),
    (SFTConfig(eval_steps=5, dataset_test_split=None), "eval_steps is 5, but dataset_test_split is None"),
    (SFTConfig(length_buckets=(64, 64)), "length_buckets is .64, 64.; lengths must be .* increasing"),
    (SFTConfig(report_to=("mlflow",)), "report_to: mlflow is not supported"),
    (RewardConfig(center_rewards_coefficient=-0.1), "center_rewards_coefficient is -0.1"),
    (RewardConfig(score_init_std=0.0), "score_init_std is 0.0; it must be above 0"),
    (Pipeline(reward=RewardConfig(seed=-1)), "reward: seed is -1"),
    (SFTConfig(eval_steps=1.5), "eval_steps is 1.5; it must be 0 .*, between 0 and 1 .* or a whole number of updates"),
    (SFTConfig(eval_steps=-0.5), "eval_steps is -0.5; it must be 0"),
    # PPO's choices
    (PPOConfig(epsilon_high=0.0), "epsilon_high is 0.0; it must be above 0"),
    (PPOConfig(dual_clip=1.0), "dual_clip is 1.0; it must be above 1"),
    (PPOConfig(entropy_coef=-0.1), "entropy_coef is -0.1; it must be at least 0"),
    (PPOConfig(kl_loss_coef=-0.1), "kl_loss_coef is -0.1; it must be at least 0"),
    (PPOConfig(value_lam=1.5), "value_lam is 1.5; it must be between 0 and 1"),
    (PPOConfig(adaptive_lam_alpha=0.0), "adaptive_lam_alpha is 0.0; it must be above 0"),
    (
        PPOConfig(adaptive_lam_alpha=0.05, response_length=20),
        r"adaptive_lam_alpha 0.05 x response_length 20 = 1: lambda .* 0 for every response; increase",
    ),
    (PPOConfig(value_learning_rate=-1e-6), "value_learning_rate is -1e-06; it must be at least 0"),
    (PPOConfig(critic_warmup_steps=-1), "critic_warmup_steps is -1; it must be at least 0"),
    (PPOConfig(critic_warmup_steps=5, vf_coef=0.0), "critic_warmup_steps 5 with vf_coef 0: .* nothing would learn"),
    (PPOConfig(critic_warmup_steps=5, value_learning_rate=0.0), "critic_warmup_steps 5 with value_learning_rate 0"),
    (PPOConfig(value_learning_rate=1e-5, vf_coef=0.0), "value_learning_rate 1e-05 with vf_coef 0"),
    # schedules
    (
        SFTConfig(lr_scheduler_kwargs={"num_cycles": 1.0}),
        r"kwargs\['num_cycles'\] is not a parameter of lr_scheduler_type linear: it has no parameters but warmup_steps",
    ),
    (
        SFTConfig(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_ratio": 0.1}),
        r"kwargs\['min_lr_ratio'\] is not .* cosine_with_min_lr: Did you mean min_lr_rate",
    ),
    (RLOOConfig(lr_scheduler_type="cosine_with_min_lr"), "needs one of min_lr .* and min_lr_rate .* not none"),
    (
        SFTConfig(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-7, "min_lr_rate": 0.1}),
        "needs one of min_lr .* and min_lr_rate .* not both",
    ),
    (
        SFTConfig(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1.0}),
        r"kwargs\['min_lr'\] 1 exceeds learning_rate 3e-06",
    ),
    (
        SFTConfig(learning_rate=0.0, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.0}),
        r"kwargs\['min_lr'\] with learning_rate 0: give min_lr_rate",
    ),
    (
        SFTConfig(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 1.5}),
        r"kwargs\['min_lr_rate'\] is 1.5; it must be between 0 and 1",
    ),
    (PPOConfig(lr_scheduler_type="warmup_stable_decay"), "warmup_stable_decay needs .* {'num_decay_steps': N}"),
    (
        PPOConfig(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 0.5}),
        r"kwargs\['num_decay_steps'\] = 0.5: it must be a whole number",
    ),
    (
        PPOConfig(
            lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 5, "decay_type": "sqrt"}
        ),
        r"kwargs\['decay_type'\] = 'sqrt': it must be one of linear, cosine, 1-sqrt",
    ),
    # groups
    (RLOOConfig(num_generations=1), "num_generations is 1; .*baseline needs at least 2"),
    (RLOOConfig(num_generations_eval=0), "num_generations_eval is 0; it must be at least 1"),
    (RLOOConfig(num_generations=3), "64 / num_generations 3 = 21.33 prompts.*counts responses.*batch_size 63 or 66"),
    (RLOOConfig(batch_size=2, num_generations=4), r"= 0.5 prompts.* \(try batch_size 4\)"),
    (
        RLOOConfig(num_generations=4, num_mini_batches=32),
        r"= 2 rows .* / num_generations 4 = 0.5 prompts: .*\(num_mini_batches 16\)",
    ),
    (RLOOConfig(num_mini_batches=3), "batch_size 64 / num_mini_batches 3 = 21.33 rows"),
    (
        RLOOConfig(batch_size=96, num_generations=4, micro_batch_size=6),
        r"micro_batch_size 6 / num_generations 4 = 1.5 prompts: .*micro_batch_size 4 or 8, or --shared_prompts false",
    ),
    (
        RLOOConfig(batch_size=96, num_generations=4, rollout_batch_size=6),
        r"rollout_batch_size 6 / num_generations 4 = 1.5 prompts: .*rollout_batch_size 4 or 8, or --shared_prompts f",
    ),
    # RLOO's numbers
    (RLOOConfig(num_iterations=0), "num_iterations is 0; it must be at least 1"),
    (RLOOConfig(epsilon=0.0), "epsilon is 0.0; it must be above 0"),
    (RLOOConfig(epsilon_high=0.0), "epsilon_high is 0.0; it must be above 0"),
    (RLOOConfig(beta=-0.1), "beta is -0.1; it must be at least 0"),
    (RLOOConfig(advantage_epsilon=-1e-4), "advantage_epsilon is -0.0001; it must be at least 0"),
    (RLOOConfig(ref_model_mixup_alpha=1.5), "ref_model_mixup_alpha is 1.5; it must be between 0 and 1"),
    (RLOOConfig(ref_model_sync_steps=0), "ref_model_sync_steps is 0; it must be at least 1"),
    (RLOOConfig(sync_ref_model=True, beta=0.0), "sync_ref_model with beta 0: .* no reference model"),
    (RLOOConfig(baseline_excludes_truncated=True), "baseline_excludes_truncated needs mask_truncated_completions"),
    (RLOOConfig(reward_clip_range=(1.0, 1.0)), "reward_clip_range is 1 1; it must be LOW HIGH"),
    (RLOOConfig(reward_clip_range=(-3.0,)), "reward_clip_range is -3; .* or one number above 0"),
    (RLOOConfig(reward_clip_range=(1.0, 2.0, 3.0)), "reward_clip_range is 1 2 3"),
    (RLOOConfig(reward_clip_range=()), "reward_clip_range is empty"),
    (RLOOConfig(stop_token_id=0), "stop_token 'eos' and stop_token_id 0 exclude each other"),
    (RLOOConfig(eos_penalty_mode="replace"), "eos_penalty_mode 'replace' needs missing_eos_penalty"),
    (RLOOConfig(num_completions_to_print=0), "num_completions_to_print is 0; it must be at least 1"),
    # rewards
    (RLOOConfig(reward_timeout=0.0), "reward_timeout is 0.0; it must be above 0"),
    (RLOOConfig(reward_server_timeout=0.0), "reward_server_timeout is 0.0; it must be above 0"),
    (RLOOConfig(reward_server_total_timeout=-1.0), "reward_server_total_timeout is -1.0; it must be above 0"),
    (RLOOConfig(reward_server_retries=-1), "reward_server_retries is -1; it must be at least 0"),
    (RLOOConfig(reward_server_batch_size=0), "reward_server_batch_size is 0; it must be at least 1"),
    (RLOOConfig(reward_server_concurrency=0), "reward_server_concurrency is 0; it must be at least 1"),
    (RLOOConfig(reward_server="localhost:8000"), "reward_server is 'localhost:8000'; it must start with http://"),
    (PPOConfig(reward_ensemble="min"), "reward_ensemble 'min' needs more_reward_models"),
    (RLOOConfig(more_reward_models=("a",)), "more_reward_models needs reward_model_path"),
    (RLOOConfig(reward_ensemble_std_coef=-1.0), "reward_ensemble_std_coef is -1.0; it must be at least 0"),
    (RLOOConfig(reward_funcs=("length",)), "reward_funcs: 'length' must be 'module:function'.*accuracy_reward"),
    (RLOOConfig(reward_funcs=("rewards.py",)), "reward_funcs: 'rewards.py' must be 'module:function'"),
    (
        RLOOConfig(reward_weights=(1.0,), reward_model_path="a", more_reward_models=("b",), reward_funcs=("m:f",)),
        "reward_weights has 1 weights, .* 3 rewards",
    ),
    # generation_kwargs
    (RLOOConfig(generation_kwargs={"top_p": 1.5}), r"generation_kwargs\['top_p'\] is 1.5; it must be above 0 and at"),
    (RLOOConfig(generation_kwargs={"top_k": 0.5}), r"generation_kwargs\['top_k'\] = 0.5: it must be a whole number"),
    (RLOOConfig(generation_kwargs={"temperature": None}), r"generation_kwargs\['temperature'\] = None: it must be a"),
    (RLOOConfig(generation_kwargs={"do_sample": False}), "do_sample.* is False"),
    (RLOOConfig(generation_kwargs={"max_new_tokens": 64}), "is 64, but response_length is 512: give response_length"),
    (RLOOConfig(generation_kwargs={"eos_token_id": 0}), r"'eos_token_id'\] .*stop_token_id"),
    (PPOConfig(generation_kwargs={"stop_strings": "a"}), "'stop_strings'.*stop_token or stop_token_id"),
    (RLOOConfig(generation_kwargs={"num_beams": 4}), r"'num_beams'\] .*temperature, top_k"),
    (RLOOConfig(generation_kwargs={"temprature": 1.0}), r"'temprature'\] .*Did you mean temperature"),
]


POSSIBLE = [
    PPOConfig(
        value_learning_rate=1e-5,
        critic_warmup_steps=50,
        epsilon_high=0.28,
        dual_clip=3.0,
        entropy_coef=0.001,
        kl_coef=0.0,
        kl_loss_coef=0.001,
        adaptive_lam_alpha=0.05,
        value_lam=1.0,
    ),
    PPOConfig(value_learning_rate=1e-5, critic_warmup_steps=50, value_model="shared_backbone"),
    PPOConfig(value_learning_rate=1e-5, critic_warmup_steps=50, use_peft=True, lora_value="shared"),
    SFTConfig(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": None, "min_lr_rate": 0.1}),
    RLOOConfig(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 5}),
    RewardConfig(lr_scheduler_type="constant_with_warmup", warmup_steps=5),
    RLOOConfig(token_level_kl=True, beta=0.0),
    RLOOConfig(old_logprobs="sampler", top_k=50, min_p=0.1, repetition_penalty=1.1, generation_kwargs={"top_p": 0.9}),
    RLOOConfig(policy_loss="reinforce", num_iterations=2),
    RLOOConfig(),  # a reward function may come as an object
    RLOOConfig(reward_clip_range=(10.0,)),
    RLOOConfig(reward_clip_range=(-1.0, 3.0), reward_weights=(1.0, 2.0)),
    RLOOConfig(reward_ensemble="min", reward_model_path="a", more_reward_models=("b",), reward_weights=(1.0,)),
    RLOOConfig(mask_truncated_completions=True, baseline_excludes_truncated=True, eval_steps=0.1),
    RLOOConfig(batch_size=96, num_generations=4, micro_batch_size=6, rollout_batch_size=6, shared_prompts=False),
    RLOOConfig(generation_kwargs={"max_new_tokens": 512, "do_sample": True, "min_p": None, "temperature": 1}),
    RLOOConfig(reward_funcs=("my/rewards.py:length",), reward_server="https://x/score"),
    RLOOConfig(reward_funcs=("accuracy_reward", "package.module.function")),
]


@pytest.mark.parametrize("config", POSSIBLE)
def test_unusual_configs_are_possible(config):
    check(checked_types(config))


@pytest.mark.parametrize(("config", "message"), IMPOSSIBLE, ids=[message[:40] for _, message in IMPOSSIBLE])
def test_impossible_configs_are_refused_with_the_arithmetic(config, message):
    with pytest.raises(UserError, match=message):
        check(config)


@pytest.mark.parametrize("config", [SFTConfig(), RewardConfig(), PPOConfig(), RLOOConfig(), Pipeline()])
def test_the_defaults_are_possible(config):
    check(config)


def test_all_problems_are_told_at_once():
    with pytest.raises(UserError) as error:
        check(PPOConfig(num_mini_batches=3, stop_token_id=5, report_to=("mlflow",)))
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    "folder", ["hdfs://b/run", "gs://", "s3:///run", "s3://b/run?x=1", "https://s3.amazonaws.com/b"]
)
def test_a_url_that_is_no_folder_of_a_bucket_is_refused_once(folder):
    for config in (PPOConfig(run_dir=folder), Pipeline(run_dir=folder)):
        with pytest.raises(UserError, match=r"^run_dir is .*; it must be a folder, s3://BUCKET/FOLDER or gs://"):
            check(config)


def test_a_folder_of_a_bucket_is_a_run_folder():
    for folder in ("gs://b", "gs://b/run", "s3://b/deep/run/"):
        check(PPOConfig(run_dir=folder))


def test_stop_token_ids_need_no_other_option():
    for given in ((0,), (1, 106), "generation_config"):
        check(PPOConfig(stop_token_ids=given))
        check(RLOOConfig(stop_token=None, stop_token_ids=given))


def test_stop_token_id_0_is_a_token_like_any_other():
    check(PPOConfig(stop_token=None, stop_token_id=0))

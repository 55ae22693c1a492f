"""What cannot work is refused before any model is loaded, with the arithmetic."""

import dataclasses

import pytest

from rlhf_jax.config import (
    Pipeline,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    batch_sizes,
    sampling_options,
    validation,
    values,
)
from rlhf_jax.errors import UserError

IMPOSSIBLE = [
    (PPOConfig(num_mini_batches=3), "batch_size 512 / num_mini_batches 3 = 170.7 rows.*batch_size 510 or 513"),
    (PPOConfig(batch_size=2, num_mini_batches=4), "num_mini_batches 4 .* batch_size 2"),
    (PPOConfig(num_mini_batches=2, micro_batch_size=100), "= 256 rows .* micro_batch_size 100 = 2.56.*64 or 128"),
    (
        SFTConfig(batch_size=64, micro_batch_size=48),
        "batch_size 64 rows .* / micro_batch_size 48 = 1.333.*micro_batch_size 32 or 64",
    ),
    (PPOConfig(rollout_batch_size=100), "rollout_batch_size 100 = 5.12 rounds.*64 or 128"),
    (PPOConfig(rollout_batch_size=1024), "rollout_batch_size 1024 = 0.5 rounds.*rollout_batch_size 512"),
    (PPOConfig(response_length=0), "response_length is 0; it must be at least 1"),
    (PPOConfig(query_length=0), "query_length is 0; it must be at least 1"),
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
    (PPOConfig(reward_model_path=None), "reward_model_path is None.*give value_model_path"),
    (PPOConfig(sft_model_path=None), "sft_model_path and scratch_model"),
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
    (SFTConfig(dataset_streaming=True), "dataset_streaming is not supported"),
    (RewardConfig(center_rewards_coefficient=-0.1), "center_rewards_coefficient is -0.1"),
    (RewardConfig(score_init_std=0.0), "score_init_std is 0.0; it must be above 0"),
    (Pipeline(reward=RewardConfig(seed=-1)), "reward: seed is -1"),
    (SFTConfig(eval_steps=1.5), "eval_steps is 1.5; it must be 0 .*, between 0 and 1 .* or a whole number of updates"),
    (SFTConfig(eval_steps=-0.5), "eval_steps is -0.5; it must be 0"),
    # groups
    (RLOOConfig(num_generations=1), "num_generations is 1; .*leave-one-out needs at least 2"),
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
    (RLOOConfig(more_reward_models=("a",), reward_model_path=None), "more_reward_models needs reward_model_path"),
    (RLOOConfig(reward_ensemble_std_coef=-1.0), "reward_ensemble_std_coef is -1.0; it must be at least 0"),
    (RLOOConfig(reward_funcs=("length",)), "reward_funcs: 'length' must be 'module:function' or 'file.py:function'"),
    (
        RLOOConfig(reward_weights=(1.0,), more_reward_models=("a",), reward_funcs=("m:f",)),
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
    with pytest.raises(
        UserError, match="^run_dir is '(gs|s3)://b/run'; it must be a folder. Mount the bucket .*path.$"
    ):
        validation.check(config)


def test_stop_token_id_0_is_a_token_like_any_other():
    validation.check(PPOConfig(stop_token=None, stop_token_id=0))


def test_the_mesh_must_use_all_devices_and_divide_the_rows():
    batch_sizes.check_devices(PPOConfig(mesh_fsdp=2, mesh_tensor=2), 8)
    with pytest.raises(UserError, match="mesh_data 1 x mesh_fsdp 3 x mesh_tensor 1 = 3 devices, but there are 4"):
        batch_sizes.check_devices(PPOConfig(mesh_fsdp=3), 4)
    with pytest.raises(UserError, match=r"micro_batch_size: 4 rows / \(mesh_data 4 x mesh_fsdp 2\) = 0.5 rows"):
        batch_sizes.check_devices(PPOConfig(mesh_fsdp=2, micro_batch_size=4), 8)
    with pytest.raises(UserError, match="rollout_batch_size: 4 rows"):
        batch_sizes.check_devices(PPOConfig(rollout_batch_size=4), 8)
    with pytest.raises(UserError, match="sft: micro_batch_size: 64 rows"):
        batch_sizes.check_devices_of(Pipeline(), 3)


def test_with_shared_prompts_the_mesh_divides_prompts_and_without_it_rows():
    batch_sizes.check_devices(RLOOConfig(batch_size=32, num_generations=4), 8)
    with pytest.raises(
        UserError, match=r"16 rows / num_generations 4 / \(mesh_data 8 .*= 0.5 prompts .*shared_prompts f"
    ):
        batch_sizes.check_devices(RLOOConfig(batch_size=16, num_generations=4), 8)
    batch_sizes.check_devices(RLOOConfig(batch_size=16, num_generations=4, shared_prompts=False), 8)
    with pytest.raises(UserError, match=r"micro_batch_size: 16 rows / \(mesh_data 3 x mesh_fsdp 1\) = 5.333 rows"):
        batch_sizes.check_devices(RLOOConfig(batch_size=16, num_generations=4, shared_prompts=False), 3)
    with pytest.raises(UserError, match="rollout_batch_size: 8 rows / num_generations 4"):
        batch_sizes.check_devices(RLOOConfig(num_generations=4, rollout_batch_size=8), 4)


def test_generation_kwargs_come_over_the_sampling_options():
    assert sampling_options(PPOConfig()) == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
    }
    config = RLOOConfig(top_k=5, min_p=0.1, generation_kwargs={"top_k": 50, "min_p": None, "do_sample": True})
    sampling = sampling_options(config)
    assert sampling == {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
    assert type(sampling_options(RLOOConfig(generation_kwargs={"temperature": 2}))["temperature"]) is float


@pytest.mark.parametrize(
    ("eval_steps", "total", "updates"),
    [(0, 100, 0), (5, 100, 5), (0.1, 100, 10), (0.25, 10, 3), (0.01, 10, 1), (1, 10, 1)],
)
def test_steps_below_1_are_a_share_of_the_run(eval_steps, total, updates):
    found = batch_sizes.updates_between(eval_steps, total)
    assert found == updates and type(found) is int


def test_rows_of_rloo_are_prompts_and_batches_are_responses():
    sums = batch_sizes.batch_arithmetic(RLOOConfig(batch_size=8, num_generations=4, num_train_epochs=1.0), n_rows=11)
    assert (sums.prompts, sums.requested, sums.updates, sums.rows) == (2, 44, 6, 48)  # ceil(1 * 11 * 4 / 8)
    config = RLOOConfig(batch_size=64, num_iterations=3, num_mini_batches=4, total_episodes=100)
    sums = batch_sizes.batch_arithmetic(config)
    assert (sums.epochs, sums.minibatch, sums.micro_batch, sums.updates, sums.optimizer_steps) == (3, 16, 16, 2, 24)


def test_the_arithmetic_of_rloo_is_told_in_words():
    config = RLOOConfig(num_iterations=2, num_mini_batches=4, micro_batch_size=8, total_episodes=640)
    assert batch_sizes.batch_lines(config, 100) == [
        "update: 64 episodes = 32 prompts x 2 responses",
        "rollout: 1 x 64 episodes generated and scored at a time",
        "optimizer: 2 iterations x 4 minibatches of 16 = 8 steps per update",
        "gradient: 2 micro-batches of 8 rows per step",
        "run: 640 episodes / 64 = 10 updates, 80 optimizer steps, 640 episodes",
        "data: 100 prompts, 3.2 epochs",
    ]


def test_updates_of_ppo_round_up_as_in_trl_and_those_of_an_epoch_down():
    sums = batch_sizes.batch_arithmetic(PPOConfig(total_episodes=1_000_000, micro_batch_size=128))
    assert (sums.updates, sums.optimizer_steps, sums.rows) == (1954, 7816, 1_000_448)
    assert batch_sizes.batch_arithmetic(PPOConfig(batch_size=8), n_rows=11).updates == 5  # ceil(3 * 11 / 8)
    assert batch_sizes.batch_arithmetic(SFTConfig(), n_rows=None).updates is None
    assert batch_sizes.batch_arithmetic(SFTConfig(max_steps=7), n_rows=None).updates == 7
    epochs = SFTConfig(batch_size=8, num_train_epochs=2.5)
    assert [batch_sizes.batch_arithmetic(epochs, rows).updates for rows in (8, 15, 16, 100)] == [3, 3, 5, 30]


def test_the_arithmetic_is_told_in_words():
    lines = batch_sizes.batch_lines(PPOConfig(total_episodes=1_000_000, micro_batch_size=128, rollout_batch_size=64))
    assert lines == [
        "update: 512 episodes",
        "rollout: 8 x 64 episodes generated and scored at a time",
        "optimizer: 4 epochs x 1 minibatches of 512 = 4 steps per update",
        "gradient: 4 micro-batches of 128 rows per step",
        "run: 1,000,000 episodes / 512 = 1,954 updates, 7,816 optimizer steps, 1,000,448 episodes (rounded up)",
    ]
    assert batch_sizes.batch_lines(SFTConfig(), 100)[-2:] == [
        "run: 100 rows / 64 = 1 updates per epoch, num_train_epochs 1 = 1 updates, 1 optimizer steps, 64 rows",
        "data: 100 rows, 0.64 epochs",
    ]
    assert "not read yet" in batch_sizes.batch_lines(SFTConfig())[-1]


def test_no_row_is_refused_and_too_long_a_warm_up_is_remarked_on():
    with pytest.raises(UserError, match="num_train_epochs 1 x 0 rows"):
        batch_sizes.check_rows(SFTConfig(), 0)
    assert batch_sizes.check_rows(SFTConfig(warmup_steps=2), 200) == []
    (warning,) = batch_sizes.check_rows(SFTConfig(warmup_steps=3), 200)
    assert warning.startswith("warning: warmup_steps 3 >= 3 updates: the learning rate never reaches ")


def test_a_warm_up_of_rloo_counts_what_its_schedule_counts():
    config = RLOOConfig(warmup_steps=8, num_mini_batches=4, total_episodes=128)
    (warning,) = batch_sizes.check_rows(config, 10)
    assert warning.startswith("warning: warmup_steps 8 >= 8 optimizer steps")
    config = RLOOConfig(warmup_steps=2, num_mini_batches=4, total_episodes=128, lr_scheduler_unit="update")
    (warning,) = batch_sizes.check_rows(config, 10)
    assert warning.startswith("warning: warmup_steps 2 >= 2 updates")


def test_reinforce_with_several_steps_an_update_is_remarked_on():
    for config in (RLOOConfig(num_iterations=2), RLOOConfig(policy_loss="reinforce")):
        assert batch_sizes.check_rows(config, 1000) == []
    for more in ({"num_iterations": 2}, {"num_mini_batches": 2}):
        (warning,) = batch_sizes.check_rows(RLOOConfig(policy_loss="reinforce", **more), 1000)
        assert "2 optimizer steps" in warning and "without a ratio later steps are off-policy" in warning


def micro(config, devices=1, platform="cpu"):
    return batch_sizes.with_micro_batch(config, devices, platform).micro_batch_size


def test_a_micro_batch_has_as_many_rows_as_its_tokens_allow():
    ppo = PPOConfig(batch_size=64, query_length=512, response_length=53)
    assert micro(ppo) == 2  # 2,048 / 565 = 3 rows at most, and 3 does not divide 64
    assert micro(ppo, platform="gpu") == 16  # 16,384 / 565 = 28
    assert micro(ppo, devices=4) == 8  # 2 a device
    assert micro(dataclasses.replace(ppo, num_mini_batches=64)) == 1
    assert micro(dataclasses.replace(ppo, query_length=4096)) == 1  # a row at least
    assert micro(dataclasses.replace(ppo, query_length=4096), devices=4) == 4  # a row a device at least
    assert micro(dataclasses.replace(ppo, micro_batch_size=32)) == 32
    for options in ({"loss_aggregation": "token_mean_micro"}, {"metrics": "trl"}):
        assert micro(dataclasses.replace(ppo, **options)) is None


def test_a_micro_batch_of_rloo_has_whole_groups_and_one_of_pairs_counts_both():
    assert micro(RLOOConfig(batch_size=64, num_generations=4, query_length=512, response_length=53)) == 4
    assert micro(RLOOConfig(batch_size=64, num_generations=4, query_length=100, response_length=28)) == 16
    assert micro(SFTConfig(batch_size=64, max_length=256)) == 8
    assert micro(RewardConfig(batch_size=64, max_length=256)) == 4
    assert micro(SFTConfig(batch_size=7, max_length=256)) == 7

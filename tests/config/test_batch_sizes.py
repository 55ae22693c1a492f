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
    (PPOConfig(num_mini_batches=3), r"batch_size 512.*num_mini_batches 3.*170\.7.*batch_size 510.*513"),
    (PPOConfig(batch_size=2, num_mini_batches=4), "num_mini_batches 4.*batch_size 2"),
    (PPOConfig(num_mini_batches=2, micro_batch_size=100), r"256.*micro_batch_size 100.*2\.56.*64.*128"),
    (SFTConfig(batch_size=64, micro_batch_size=48), "64.*micro_batch_size 48.*32.*64"),
    (PPOConfig(rollout_batch_size=100), r"rollout_batch_size 100.*5\.12.*64.*128"),
    (PPOConfig(rollout_batch_size=1024), r"rollout_batch_size 1024.*0\.5.*rollout_batch_size 512"),
    (PPOConfig(response_length=0), "response_length.*0"),
    (PPOConfig(query_length=0), "query_length.*0"),
    (PPOConfig(stop_token_id=0), "stop_token 'eos'.*stop_token_id 0"),
    (PPOConfig(batch_size=16, num_mini_batches=4, whiten_rewards=True), "8 rows a minibatch.* = 4"),
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


def test_the_mesh_must_use_all_devices_and_divide_the_rows():
    batch_sizes.check_devices(PPOConfig(mesh_fsdp=2, mesh_tensor=2), 8)
    with pytest.raises(UserError, match="mesh_data 1.*mesh_fsdp 3.*mesh_tensor 1.*3.*4"):
        batch_sizes.check_devices(PPOConfig(mesh_fsdp=3), 4)
    with pytest.raises(UserError, match=r"micro_batch_size: 4.*\(mesh_data 4.*mesh_fsdp 2\).*0\.5"):
        batch_sizes.check_devices(PPOConfig(mesh_fsdp=2, micro_batch_size=4), 8)
    with pytest.raises(UserError, match="rollout_batch_size: 4"):
        batch_sizes.check_devices(PPOConfig(rollout_batch_size=4), 8)
    with pytest.raises(UserError, match="sft: micro_batch_size: 64"):
        batch_sizes.check_devices_of(Pipeline(), 3)


def test_with_shared_prompts_the_mesh_divides_prompts_and_without_it_rows():
    batch_sizes.check_devices(RLOOConfig(batch_size=32, num_generations=4), 8)
    with pytest.raises(UserError, match=r"16.*num_generations 4.*\(mesh_data 8 .*0\.5.*shared_prompts"):
        batch_sizes.check_devices(RLOOConfig(batch_size=16, num_generations=4), 8)
    batch_sizes.check_devices(RLOOConfig(batch_size=16, num_generations=4, shared_prompts=False), 8)
    with pytest.raises(UserError, match=r"micro_batch_size: 16.*\(mesh_data 3.*mesh_fsdp 1\).*5\.333"):
        batch_sizes.check_devices(RLOOConfig(batch_size=16, num_generations=4, shared_prompts=False), 3)
    with pytest.raises(UserError, match="rollout_batch_size: 8.*num_generations 4"):
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
    with pytest.raises(UserError, match="num_train_epochs 1.*0 rows"):
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

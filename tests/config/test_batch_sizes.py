"""Batches, meshes and updates of a config: the arithmetic, in numbers and in words."""

import dataclasses

import pytest

from rlhf_jax.config import Pipeline, PPOConfig, RewardConfig, RLOOConfig, SFTConfig, batch_sizes
from rlhf_jax.errors import UserError


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
    assert PPOConfig().sampling() == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
    }
    config = RLOOConfig(top_k=5, min_p=0.1, generation_kwargs={"top_k": 50, "min_p": None, "do_sample": True})
    sampling = config.sampling()
    assert sampling == {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
    assert type(RLOOConfig(generation_kwargs={"temperature": 2}).sampling()["temperature"]) is float


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


def test_a_schedule_or_a_critics_warm_up_longer_than_the_run_is_remarked_on():
    kwargs = {"num_decay_steps": 2, "num_stable_steps": 1}
    config = SFTConfig(warmup_steps=1, lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=kwargs)
    assert batch_sizes.check_rows(config, 256) == []
    (warning,) = batch_sizes.check_rows(config, 200)
    assert "warmup_steps 1 + num_stable_steps 1 + num_decay_steps 2 = 4 > 3 updates: the schedule is longer" in warning
    assert batch_sizes.check_rows(PPOConfig(critic_warmup_steps=1, total_episodes=1024), 10) == []
    (warning,) = batch_sizes.check_rows(PPOConfig(critic_warmup_steps=2, total_episodes=1024), 10)
    assert warning == "warning: critic_warmup_steps 2 >= 2 updates: the policy never learns"


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
    return batch_sizes.for_devices(config, devices, platform).micro_batch_size


def test_a_micro_batch_has_as_many_rows_as_its_tokens_allow():
    ppo = PPOConfig(batch_size=64, query_length=512, response_length=53)
    assert micro(ppo) == 2  # 2,048 / 565 = 3 rows at most, and 3 does not divide 64
    assert micro(ppo, platform="gpu") == 16  # 16,384 / 565 = 28
    assert micro(ppo, devices=4) == 8  # 2 a device
    assert micro(dataclasses.replace(ppo, num_mini_batches=64)) == 1
    assert micro(dataclasses.replace(ppo, query_length=4096)) == 1  # a row at least
    assert micro(dataclasses.replace(ppo, query_length=4096), devices=4) == 4  # a row a device at least
    assert micro(dataclasses.replace(ppo, micro_batch_size=32)) == 32
    assert micro(dataclasses.replace(ppo, loss_aggregation="token_mean_micro")) is None


@pytest.mark.parametrize(
    ("options", "cpu", "gpu"),
    [
        ({}, "none", "dots"),
        ({"gradient_checkpointing": False}, "none", "none"),
        ({"gradient_checkpointing": True}, "full", "full"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_policy": "dots"}, "dots", "dots"),
        ({"gradient_checkpointing_policy": "full"}, "none", "full"),
    ],
)
def test_gpus_alone_recompute_what_is_no_product_unless_told(options, cpu, gpu):
    found = {name: batch_sizes.for_devices(PPOConfig(**options), 1, name).remat for name in ("cpu", "gpu", "tpu")}
    assert found == {"cpu": cpu, "gpu": gpu, "tpu": cpu}


def test_a_micro_batch_of_rloo_has_whole_groups_and_one_of_pairs_counts_both():
    assert micro(RLOOConfig(batch_size=64, num_generations=4, query_length=512, response_length=53)) == 4
    assert micro(RLOOConfig(batch_size=64, num_generations=4, query_length=100, response_length=28)) == 16
    assert micro(SFTConfig(batch_size=64, max_length=256)) == 8
    assert micro(RewardConfig(batch_size=64, max_length=256)) == 4
    assert micro(SFTConfig(batch_size=7, max_length=256)) == 7


@pytest.mark.parametrize(
    ("config", "devices", "needed"),
    [
        (PPOConfig(query_length=512, response_length=8192), 1, 8704),
        (PPOConfig(query_length=512, response_length=53), 8, 8 * 565),
        (RLOOConfig(query_length=512, num_generations=4, response_length=512), 2, 2 * 5 * 512),
        # Responses that may be longer than their prompts are in micro-batches one by one.
        (RLOOConfig(query_length=64, num_generations=4, response_length=512), 2, 2 * 576),
    ],
)
def test_micro_batch_tokens_are_at_least_a_row_of_each_device(config, devices, needed):
    with pytest.raises(
        UserError, match=rf"micro_batch_tokens {needed - 1} is less than .* = {needed}: give at least that"
    ):
        batch_sizes.check_devices(dataclasses.replace(config, micro_batch_tokens=needed - 1), devices)
    batch_sizes.check_devices(dataclasses.replace(config, micro_batch_tokens=needed), devices)


def test_micro_batch_tokens_stand_in_place_of_a_micro_batch_size():
    config = PPOConfig(micro_batch_tokens=8192)
    assert micro(config) is None
    assert "gradient: micro-batches of at most 8,192 tokens, as many as a step needs" in batch_sizes.batch_lines(config)

"""PPO of Llama 3.2 against a reward model of conversations, on UltraFeedback's prompts."""

from rlhf_jax.config import PPOConfig

# Size: rows a micro-batch, rows generated at a time, mesh (data, fsdp, tensor), for 8 devices of 80 GB
VARIANTS = {
    "1b": (32, 128, (-1, 1, 1)),
    "3b": (16, 128, (-1, 8, 1)),
}


def get_config(variant: str | None = None) -> PPOConfig:
    """The config of one size (default 1b)."""
    size = variant or "1b"
    micro_batch_size, rollout_batch_size, (data, fsdp, tensor) = VARIANTS[size]
    return PPOConfig(
        run_dir=f"runs/ppo_llama_{size}",  # folder
        sft_model_path=f"meta-llama/Llama-3.2-{size.upper()}-Instruct",  # hub name or folder
        reward_model_path=f"Skywork/Skywork-Reward-V2-Llama-3.2-{size.upper()}",  # also initialises the value model
        dataset_name="trl-lib/ultrafeedback-prompt",  # hub name; prompts as conversations
        dataset_test_split="test",  # 5 % of the prompts
        max_eval_samples=64,  # held-out rows
        query_length=512,  # tokens
        query_overflow="drop",  # drop longer prompts
        total_episodes=100_000,  # responses; 390 updates
        batch_size=256,  # responses an update
        micro_batch_size=micro_batch_size,  # rows a micro-batch
        rollout_batch_size=rollout_batch_size,  # rows generated and scored at a time
        num_ppo_epochs=4,  # epochs over each batch
        num_mini_batches=1,  # optimizer steps an epoch
        learning_rate=3e-6,  # linear decay to 0
        response_length=256,  # tokens
        temperature=0.7,  # for sampling and log-probabilities
        stop_token="eos",  # the tokenizer's eos, which ends a turn of the chat template
        missing_eos_penalty=1.0,  # subtracted from the score of a response without eos
        kl_coef=0.05,  # reward units per nat of KL
        dtype="bfloat16",  # compute dtype; weights stay float32
        gradient_checkpointing=True,  # less memory, a third slower
        mesh_data=data,  # devices that split rows
        mesh_fsdp=fsdp,  # devices that split rows and shard params
        mesh_tensor=tensor,  # devices that split heads
        save_steps=100,  # updates
    )

"""TL;DR, stage 3: PPO against the reward model, with the settings of TRL's docs/source/ppo_trainer.md."""

from rlhf_jax.config import PPOConfig

ADAPTERS = {
    "use_peft": True,
    "lora_target_modules": ("all-linear",),  # every linear layer except the head
    "lora_value": "shared",  # the value model is an adapter on the policy's base
    "learning_rate": 1e-5,  # linear decay to 0
}
# Size: rows a micro-batch, rows a rollout, mesh (data, fsdp, tensor), other options. The first four are for 8 devices
# of 80 GB (12b: 16), the others for one GPU of the named memory; data takes the remaining devices.
VARIANTS = {
    "1b": (64, 512, (-1, 1, 1), {}),
    "2.8b": (32, 256, (-1, 8, 1), {}),
    "6.9b": (8, 32, (-1, 8, 1), {}),
    "12b": (8, 32, (-1, 8, 2), {}),
    "410m_24gb": (4, 16, (1, 1, 1), {}),
    "1b_lora_24gb": (4, 16, (1, 1, 1), ADAPTERS),
    "2.8b_lora_4bit_24gb": (4, 16, (1, 1, 1), {**ADAPTERS, "load_in_4bit": True}),  # as QLoRA
    "2.8b_lora_48gb": (4, 16, (1, 1, 1), ADAPTERS),
    "6.9b_lora_4bit_48gb": (4, 16, (1, 1, 1), {**ADAPTERS, "load_in_4bit": True}),
    "6.9b_lora_80gb": (4, 16, (1, 1, 1), ADAPTERS),
}


def get_config(variant: str | None = None) -> PPOConfig:
    """The config of one size (default 1b)."""
    variant = variant or "1b"
    size = variant.split("_")[0]
    micro_batch_size, rollout_batch_size, (data, fsdp, tensor), options = VARIANTS[variant]
    hub = f"cleanrl/EleutherAI_pythia-{size}-deduped"
    sft, reward = f"{hub}__sft__tldr", f"{hub}__reward__tldr"
    if size in ("410m", "12b"):  # not on the hub: train them by tldr_sft.py and tldr_reward.py, same variant
        sft, reward = f"runs/tldr_sft_{variant}/policy", f"runs/tldr_reward_{variant}/reward_model"
    return PPOConfig(
        run_dir=f"runs/tldr_ppo_{variant}",  # folder
        sft_model_path=sft,  # hub name; or tldr_sft's RUN/policy
        reward_model_path=reward,  # hub name; also initialises the value model
        dataset_name="trl-lib/tldr",  # hub name; 116,722 posts
        query_length=512,  # tokens
        query_overflow="drop",  # drop longer prompts, as TRL does
        total_episodes=1_000_000,  # responses; 1,954 updates
        batch_size=512,  # responses an update
        micro_batch_size=micro_batch_size,  # rows a micro-batch
        rollout_batch_size=rollout_batch_size,  # rows generated and scored at a time
        num_ppo_epochs=4,  # epochs over each batch
        num_mini_batches=1,  # optimizer steps an epoch
        **{"learning_rate": 3e-6, **options},  # linear decay to 0
        response_length=53,  # tokens
        temperature=0.7,  # for sampling and log-probabilities
        stop_token="eos",  # the tokenizer's eos
        missing_eos_penalty=1.0,  # subtracted from the score of a response without eos
        kl_coef=0.05,  # reward units per nat of KL
        dtype="bfloat16",  # compute dtype; weights stay float32
        gradient_checkpointing=variant != "1b",  # less memory, a third slower
        mesh_data=data,  # devices that split rows
        mesh_fsdp=fsdp,  # devices that split rows and shard params
        mesh_tensor=tensor,  # devices that split heads
        save_steps=200,  # updates
    )

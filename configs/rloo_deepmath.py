"""RLOO on mathematics: TRL's documented example (Qwen2.5-0.5B-Instruct, DeepMath-103K, accuracy_reward)."""

from rlhf_jax.config import RLOOConfig

ADAPTERS = {"use_peft": True, "learning_rate": 1e-5}
# Qwen2.5's size: rows a micro-batch, rows generated at a time, mesh (data, fsdp, tensor), other options. The first four
# are for devices of 80 GB, the others for one GPU of the named memory.
VARIANTS = {
    "0.5b": (8, 64, (-1, 1, 1), {}),
    "1.5b": (8, 64, (-1, 1, 1), {}),
    "7b": (8, 64, (-1, 8, 1), {}),
    "lora": (8, 64, (-1, 1, 1), ADAPTERS),  # 7B, adapters only
    "0.5b_24gb": (4, 16, (1, 1, 1), {}),
    "1.5b_lora_24gb": (4, 16, (1, 1, 1), ADAPTERS),
    "1.5b_48gb": (4, 16, (1, 1, 1), {}),
    "7b_lora_48gb": (4, 16, (1, 1, 1), ADAPTERS),
}


def get_config(variant: str | None = None) -> RLOOConfig:
    """The config of one variant (default 0.5b)."""
    variant = variant or "0.5b"
    micro_batch_size, rollout_batch_size, (data, fsdp, tensor), options = VARIANTS[variant]
    size = "7B" if variant == "lora" else variant.split("_")[0].upper()
    return RLOOConfig(
        run_dir=f"runs/rloo_deepmath_{variant}",  # folder
        sft_model_path=f"Qwen/Qwen2.5-{size}-Instruct",  # hub name or folder
        dataset_name="trl-lib/DeepMath-103K",  # hub name; questions as conversations, and their solutions
        dataset_test_split="test",  # 5 % of the questions
        max_eval_samples=64,  # held-out rows
        reward_funcs=("accuracy_reward",),  # 1 for a correct answer; needs the extra [math]
        query_length=512,  # tokens
        query_overflow="drop",  # drop longer prompts; TRL keeps them
        num_train_epochs=3.0,  # epochs over the prompts
        batch_size=64,  # responses an update: 8 a device
        micro_batch_size=micro_batch_size,  # rows a micro-batch
        rollout_batch_size=rollout_batch_size,  # rows generated and scored at a time
        num_generations=2,  # responses to each prompt
        num_iterations=1,  # epochs over each batch
        num_mini_batches=1,  # optimizer steps an epoch
        policy_loss="clipped",  # ratio of the whole response, clipped to 1 - epsilon .. 1 + epsilon
        epsilon=0.2,  # clip range of that ratio
        kl_estimator="k1",  # summed over the response, subtracted from its score
        beta=0.05,  # reward units per nat of KL
        **{"learning_rate": 1e-6, **options},  # linear decay to 0
        lr_scheduler_unit="optimizer_step",  # unit of a schedule step
        max_grad_norm=1.0,  # gradient clipping
        response_length=256,  # tokens
        temperature=1.0,  # for sampling and log-probabilities
        stop_token="eos",  # the tokenizer's eos, which ends a turn of the chat template
        dtype="bfloat16",  # compute dtype; weights stay float32
        gradient_checkpointing=variant != "0.5b",  # less memory, a third slower
        mesh_data=data,  # devices that split rows
        mesh_fsdp=fsdp,  # devices that split rows and shard params
        mesh_tensor=tensor,  # devices that split heads
        save_steps=200,  # updates
    )

"""GRPO on mathematics: TRL's documented example (Qwen2.5-0.5B-Instruct, DeepMath-103K, accuracy_reward)."""

from rlhf_jax.config import GRPOConfig

# Qwen2.5's size: rows a micro-batch, rows generated at a time, mesh (data, fsdp, tensor) of devices with 80 GB
VARIANTS = {
    "0.5b": (8, 64, (-1, 1, 1)),
    "1.5b": (8, 64, (-1, 1, 1)),
    "7b": (8, 64, (-1, 8, 1)),
    "lora": (8, 64, (-1, 1, 1)),  # 7B, adapters only
}


def get_config(variant: str | None = None) -> GRPOConfig:
    """The config of one variant (default 0.5b)."""
    variant = variant or "0.5b"
    micro_batch_size, rollout_batch_size, (data, fsdp, tensor) = VARIANTS[variant]
    size, adapters = ("7B", {"use_peft": True, "learning_rate": 1e-5}) if variant == "lora" else (variant.upper(), {})
    return GRPOConfig(
        run_dir=f"runs/grpo_deepmath_{variant}",  # folder
        sft_model_path=f"Qwen/Qwen2.5-{size}-Instruct",  # hub name or folder
        dataset_name="trl-lib/DeepMath-103K",  # hub name; questions as conversations, and their solutions
        dataset_test_split="test",  # 5 % of the questions
        max_eval_samples=64,  # held-out rows
        reward_funcs=("accuracy_reward",),  # 1 for a correct answer; needs the extra [math]
        query_length=512,  # tokens
        query_overflow="drop",  # drop longer prompts; TRL keeps them
        num_train_epochs=3.0,  # epochs over the prompts
        batch_size=64,  # responses an update
        micro_batch_size=micro_batch_size,  # rows a micro-batch
        rollout_batch_size=rollout_batch_size,  # rows generated and scored at a time
        num_generations=8,  # responses to each prompt
        num_iterations=1,  # epochs over each batch
        num_mini_batches=1,  # optimizer steps an epoch
        loss_type="dapo",  # mean over the tokens of the batch; --preset dapo, gspo, cispo ... for more
        scale_rewards="group",  # rewards are divided by the standard deviation of their group
        epsilon=0.2,  # clip range of the ratio of a token
        beta=0.0,  # no KL penalty, no reference model
        **{"learning_rate": 1e-6, **adapters},  # linear decay to 0
        max_grad_norm=1.0,  # gradient clipping
        response_length=512,  # tokens
        temperature=1.0,  # for sampling and log-probabilities
        stop_token="eos",  # the tokenizer's eos, which ends a turn of the chat template
        dtype="bfloat16",  # compute dtype; weights stay float32
        importance_sampling_correction=True,  # sampler and learner differ in bfloat16
        gradient_checkpointing=variant != "0.5b",  # less memory, a third slower
        mesh_data=data,  # devices that split rows
        mesh_fsdp=fsdp,  # devices that split rows and shard params
        mesh_tensor=tensor,  # devices that split heads
        save_steps=200,  # updates
    )

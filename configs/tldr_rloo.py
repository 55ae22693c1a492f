"""TL;DR, stage 3 with RLOO: TRL's documented 1B run (its RLOO trainer up to 0.21), and TRL 1.12's defaults."""

from rlhf_jax.config import RLOOConfig

# TRL 0.21's documented run, TRL 1.12's defaults, other sizes: rows a micro-batch, rows a rollout, mesh (80 GB devices)
VARIANTS = {
    "docs": (128, 128, (-1, 1, 1)),
    "current": (None, None, (-1, 1, 1)),
    "2.8b": (64, 128, (-1, 8, 1)),
    "6.9b": (16, 64, (-1, 8, 1)),
    "12b": (16, 32, (-1, 8, 2)),
}


def get_config(variant: str | None = None) -> RLOOConfig:
    """The config of a variant (default docs)."""
    variant = variant or "docs"
    micro_batch_size, rollout_batch_size, mesh = VARIANTS[variant]
    size = variant if variant.endswith("b") else "1b"
    hub = f"cleanrl/EleutherAI_pythia-{size}-deduped"
    sft, reward = f"{hub}__sft__tldr", f"{hub}__reward__tldr"
    if size == "12b":  # not on the hub: train it by tldr_sft.py:12b and tldr_reward.py:12b
        sft, reward = "runs/tldr_sft_12b/policy", "runs/tldr_reward_12b/reward_model"
    shared = {
        "sft_model_path": sft,  # hub name; or tldr_sft's RUN/policy
        "reward_model_path": reward,  # hub name; or tldr_reward's RUN/reward_model
        "dataset_name": "trl-lib/tldr",  # hub name; 116,722 posts
        "query_length": 512,  # tokens
        "num_generations": 2,  # responses to each prompt
        "policy_loss": "clipped",  # ratio of the whole response, clipped to 1 - epsilon .. 1 + epsilon
        "epsilon": 0.2,  # clip range of that ratio
        "kl_estimator": "k1",  # summed over the response, subtracted from its score
        "dtype": "bfloat16",  # compute dtype; weights stay float32
        **dict(zip(("mesh_data", "mesh_fsdp", "mesh_tensor"), mesh)),
        "save_steps": 50,  # updates
    }
    if variant == "current":
        return RLOOConfig(
            **shared,
            run_dir="runs/tldr_rloo_current",  # folder
            query_overflow="truncate",  # drop trailing paragraphs of longer posts; TRL keeps them
            num_train_epochs=3.0,  # epochs over the prompts
            batch_size=64,  # responses an update: 8 a device
            num_iterations=1,  # epochs over each batch
            num_mini_batches=1,  # optimizer steps an epoch
            learning_rate=1e-6,  # linear decay to 0
            lr_scheduler_unit="optimizer_step",  # unit of a schedule step
            max_grad_norm=1.0,  # gradient clipping
            response_length=512,  # tokens
            temperature=1.0,  # for sampling and log-probabilities
            beta=0.05,  # reward units per nat of KL
        )
    return RLOOConfig(
        **shared,
        run_dir=f"runs/tldr_rloo_{variant}",  # folder
        query_overflow="drop",  # drop longer prompts, as TRL's script does
        total_episodes=1_000_000,  # responses; 245 updates
        batch_size=4096,  # responses an update: 16 x 16 x 2 minibatches x 8 devices, 2,048 prompts
        micro_batch_size=micro_batch_size,  # rows a micro-batch
        rollout_batch_size=rollout_batch_size,  # rows generated and scored at a time
        num_iterations=2,  # epochs over each batch
        num_mini_batches=2,  # optimizer steps an epoch
        gradient_checkpointing=size != "1b",  # less memory, a third slower
        reshuffle="per_epoch",  # shuffle again each epoch
        learning_rate=3e-6,  # linear decay to 0
        lr_scheduler_unit="update",  # unit of a schedule step
        adam_epsilon=1e-8,  # added to the square root
        max_grad_norm=None,  # no gradient clipping
        disable_dropout=True,  # as in that trainer (Pythia has no dropout)
        response_length=53,  # tokens
        temperature=0.7,  # for sampling and log-probabilities
        stop_token="eos",  # the tokenizer's eos
        missing_eos_penalty=1.0,  # subtracted from the score of a response without eos
        beta=0.03,  # reward units per nat of KL
    )

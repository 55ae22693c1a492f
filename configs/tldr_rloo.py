"""TL;DR, stage 3 by RLOO: TRL's documented 1B run (its RLOO trainer until 0.21), and its present defaults."""

from rlhf_jax.config import RLOOConfig

# TRL 0.21's documented run, TRL 1.12's defaults, other sizes: rows a pass, rows a rollout, mesh over devices of 80 GB
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
    if size == "12b":  # the hub has none: train it by tldr_sft.py:12b and tldr_reward.py:12b
        sft, reward = "runs/tldr_sft_12b/policy", "runs/tldr_reward_12b/reward_model"
    shared = {
        "sft_model_path": sft,  # hub name; or tldr_sft's RUN/policy
        "reward_model_path": reward,  # hub name; or tldr_reward's RUN/reward_model
        "dataset_name": "trl-lib/tldr",  # hub name; 116,722 posts
        "query_length": 512,  # tokens
        "num_generations": 2,  # responses to each prompt
        "policy_loss": "clipped",  # the sequence's ratio, within 1 - epsilon .. 1 + epsilon
        "epsilon": 0.2,  # clip of that ratio
        "kl_estimator": "k1",  # summed over the response, taken off its score
        "dtype": "bfloat16",  # compute; weights stay float32
        **dict(zip(("mesh_data", "mesh_fsdp", "mesh_tensor"), mesh)),
        "save_steps": 50,  # updates
    }
    if variant == "current":
        return RLOOConfig(
            **shared,
            run_dir="runs/tldr_rloo_current",  # folder
            query_overflow="truncate",  # TRL keeps longer prompts whole
            num_train_epochs=3.0,  # passes over the prompts
            batch_size=64,  # responses an update: 8 a device
            num_iterations=1,  # passes over each batch
            num_mini_batches=1,  # optimizer steps a pass
            learning_rate=1e-6,  # falls to 0 in a line
            lr_scheduler_unit="optimizer_step",  # a step of the schedule
            max_grad_norm=1.0,  # clip
            response_length=512,  # tokens
            temperature=1.0,  # of sampling and of log-probabilities
            beta=0.05,  # reward units a nat
        )
    return RLOOConfig(
        **shared,
        run_dir=f"runs/tldr_rloo_{variant}",  # folder
        query_overflow="drop",  # longer prompts are left out, as TRL's script does
        total_episodes=1_000_000,  # responses; 245 updates
        batch_size=4096,  # responses an update: 16 x 16 x 2 minibatches x 8 devices, 2,048 prompts
        micro_batch_size=micro_batch_size,  # rows a pass
        rollout_batch_size=rollout_batch_size,  # rows generated and scored at a time
        num_iterations=2,  # passes over each batch
        num_mini_batches=2,  # optimizer steps a pass
        gradient_checkpointing=size != "1b",  # less memory, a third slower
        reshuffle="per_epoch",  # a new order each pass
        learning_rate=3e-6,  # falls to 0 in a line
        lr_scheduler_unit="update",  # a step of the schedule
        adam_epsilon=1e-8,  # added to the root
        max_grad_norm=None,  # no clip
        disable_dropout=True,  # as that trainer did (Pythia has none)
        response_length=53,  # tokens
        temperature=0.7,  # of sampling and of log-probabilities
        stop_token="eos",  # the tokenizer's
        missing_eos_penalty=1.0,  # reward units, off the score of a response without eos
        beta=0.03,  # reward units a nat
    )

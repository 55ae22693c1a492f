"""TL;DR, stage 3: PPO against the reward model, with TRL's numbers (docs/source/ppo_trainer.md)."""

from rlhf_jax.config import PPOConfig

VARIANTS = {"1b": (128, 512), "2.8b": (32, 256), "6.9b": (8, 32)}  # size: rows a pass, rows a rollout, over 8 devices


def get_config(variant: str | None = None) -> PPOConfig:
    """The config of one size (default 1b)."""
    size = variant or "1b"
    micro_batch_size, rollout_batch_size = VARIANTS[size]
    return PPOConfig(
        run_dir=f"runs/tldr_ppo_{size}",  # folder
        sft_model_path=f"cleanrl/EleutherAI_pythia-{size}-deduped__sft__tldr",  # hub name; or tldr_sft's RUN/policy
        reward_model_path=f"cleanrl/EleutherAI_pythia-{size}-deduped__reward__tldr",  # hub name; values start here too
        dataset_name="trl-lib/tldr",  # hub name; 116,722 posts
        query_length=512,  # tokens
        query_overflow="drop",  # longer prompts are left out, as TRL does
        total_episodes=1_000_000,  # responses; 1,954 updates
        batch_size=512,  # responses an update
        micro_batch_size=micro_batch_size,  # rows a pass
        rollout_batch_size=rollout_batch_size,  # rows generated and scored at a time
        num_ppo_epochs=4,  # passes over each batch
        num_mini_batches=1,  # optimizer steps an epoch
        learning_rate=3e-6,  # falls to 0 in a line
        response_length=53,  # tokens
        temperature=0.7,  # of sampling and of log-probabilities
        stop_token="eos",  # the tokenizer's
        missing_eos_penalty=1.0,  # reward units, off the score of a response without eos
        kl_coef=0.05,  # reward units a nat
        dtype="bfloat16",  # compute; weights stay float32
        gradient_checkpointing=size != "1b",  # less memory, a third slower
        save_steps=200,  # updates
    )

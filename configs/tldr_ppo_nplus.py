"""TL;DR, stage 3: PPO as in the N+ implementation details paper (arXiv 2403.17031), its 1B run of seed 44413."""

from rlhf_jax.config import PPOConfig

# Only 1B: the penalty of -1 presumes scores centred on 0, as these checkpoints' are (they carry the offset).
MODELS = "vwxyzjn/EleutherAI_pythia-1b-deduped"


def get_config(variant: str | None = None) -> PPOConfig:
    """The config; there are no variants."""
    return PPOConfig(
        run_dir="runs/tldr_ppo_nplus",  # folder
        seed=44413,  # the first of the paper's four
        sft_model_path=f"{MODELS}__sft__tldr",  # hub name
        model_revision="sft__44413__1708611267",  # branch
        reward_model_path=f"{MODELS}__reward__tldr",  # hub name; values start here too
        reward_model_revision="reward__44413__1708628552",  # branch
        dataset_name="trl-lib/tldr",  # hub name; 116,722 posts
        query_length=512,  # tokens
        query_overflow="truncate",  # longer posts lose paragraphs from their end, as OpenAI's
        total_episodes=1_000_000,  # responses
        batch_size=512,  # responses an update
        micro_batch_size=128,  # rows a pass
        rollout_batch_size=512,  # rows generated and scored at a time
        num_ppo_epochs=4,  # passes over each batch
        num_mini_batches=1,  # optimizer steps an epoch
        learning_rate=3e-6,  # falls to 0 in a line
        adam_epsilon=1e-5,  # added to the root (TRL: 1e-8)
        weight_decay=0.01,  # torch's AdamW default (TRL: 0)
        weight_decay_on="all",  # as torch's AdamW
        response_length=53,  # tokens
        temperature=0.7,  # of sampling and of log-probabilities
        stop_token="eos",  # the tokenizer's
        missing_eos_penalty=1.0,  # reward units
        eos_penalty_mode="replace",  # a response without eos scores -1 (TRL: score - 1)
        kl_coef=0.05,  # reward units a nat
        whiten_rewards=False,  # as in the paper's final runs
        whiten_ddof=0,  # variance over n (TRL: n - 1)
        dtype="bfloat16",  # compute; weights stay float32
        save_steps=200,  # updates
    )

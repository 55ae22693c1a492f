"""TL;DR, stage 3: PPO as in the N+ implementation details paper (arXiv 2403.17031), its 1B run with seed 44413."""

from rlhf_jax.config import PPOConfig

# Only 1B: the penalty of -1 assumes scores centred on 0, which holds for these checkpoints (they include the offset).
MODELS = "vwxyzjn/EleutherAI_pythia-1b-deduped"


def get_config(variant: str | None = None) -> PPOConfig:
    """The config; there are no variants."""
    return PPOConfig(
        run_dir="runs/tldr_ppo_nplus",  # folder
        seed=44413,  # the first of the paper's four seeds
        sft_model_path=f"{MODELS}__sft__tldr",  # hub name
        model_revision="sft__44413__1708611267",  # branch
        reward_model_path=f"{MODELS}__reward__tldr",  # hub name; also initialises the value model
        reward_model_revision="reward__44413__1708628552",  # branch
        dataset_name="trl-lib/tldr",  # hub name; 116,722 posts
        query_length=512,  # tokens
        query_overflow="truncate",  # drop trailing paragraphs of longer posts, as OpenAI does
        total_episodes=1_000_000,  # responses
        batch_size=512,  # responses an update
        micro_batch_size=64,  # rows a micro-batch
        rollout_batch_size=512,  # rows generated and scored at a time
        num_ppo_epochs=4,  # epochs over each batch
        num_mini_batches=1,  # optimizer steps an epoch
        learning_rate=3e-6,  # linear decay to 0
        adam_epsilon=1e-5,  # added to the square root (TRL: 1e-8)
        weight_decay=0.01,  # torch's AdamW default (TRL: 0)
        weight_decay_on="all",  # as torch's AdamW
        response_length=53,  # tokens
        temperature=0.7,  # for sampling and log-probabilities
        stop_token="eos",  # the tokenizer's eos
        missing_eos_penalty=1.0,  # reward units
        eos_penalty_mode="replace",  # a response without eos scores -1 (TRL: score - 1)
        kl_coef=0.05,  # reward units per nat of KL
        whiten_rewards=False,  # as in the paper's final runs
        whiten_ddof=0,  # divide the variance by n (TRL: n - 1)
        dtype="bfloat16",  # compute dtype; weights stay float32
        save_steps=200,  # updates
    )

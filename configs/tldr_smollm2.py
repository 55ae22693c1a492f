"""TL;DR, all three stages with SmolLM2-135M-Instruct: for one GPU, or cut down, with LoRA, for two cores."""

from rlhf_jax.config import REWARD_EXPORT, SFT_EXPORT, Pipeline, PPOConfig, RewardConfig, RLOOConfig, SFTConfig

POSTS, PAIRS = "trl-lib/tldr", "trl-lib/tldr-preference"  # hub names
VARIANTS = ("ppo", "rloo", "ppo_cpu", "rloo_cpu")
GPU = {"dtype": "bfloat16", "micro_batch_size": 4}  # rows a micro-batch, for 24 GB
ADAPTERS = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
CRITIC = {"num_ppo_epochs": 1, "value_model": "shared_backbone", "value_learning_rate": 2e-3, "lam": 1.0}
# Tokens of post and summary; rows an update, updates and learning rates of the three stages; options of every stage.
SIZES = {
    "gpu": (512, 53, (32, 64, 64), (300, 300, 150), (5e-5, 2e-5, 1e-5), GPU),
    "cpu": (256, 32, (8, 8, 32), (100, 98, 24), (3e-4, 3e-4, 2e-4), ADAPTERS),
}


def get_config(variant: str | None = None) -> Pipeline:
    """The config of one variant (default ppo)."""
    algorithm, _, cpu = (variant or "ppo").partition("_")
    query, response, rows, updates, rates, options = SIZES[cpu or "gpu"]
    shared = {
        **options,
        "query_length": query,  # tokens of the post
        "max_eval_samples": 176,  # held-out rows
        "save_steps": 10,  # updates
        "max_grad_norm": 1.0,  # gradient clipping
    }
    supervised = {
        "max_length": query + response,  # tokens of post and summary
        "lr_scheduler_type": "cosine",  # decay to 0
        "warmup_steps": 10,  # updates
        "eval_steps": 50,  # updates
    }
    policy = {
        **shared,
        "sft_model_path": SFT_EXPORT,  # the SFT stage's policy
        "reward_model_path": REWARD_EXPORT,  # the reward stage's model; also initialises PPO's value model
        "dataset_name": POSTS,  # posts; hub name or file
        "total_episodes": rows[2] * updates[2],  # responses
        "batch_size": rows[2],  # responses an update
        "learning_rate": rates[2],  # linear decay to 0
        "response_length": response,  # tokens
        "temperature": 0.7,  # for sampling and log-probabilities
        "stop_token": "eos",  # the tokenizer's eos
        "missing_eos_penalty": 1.0,  # subtracted from the score of a response without eos
        "eval_steps": updates[2] // 2,  # updates
        "num_sample_generations": 4,  # tables of responses
    }
    ppo = {"num_ppo_epochs": 2, "kl_coef": 0.05, **(CRITIC if cpu else {})}
    rloo = {"num_generations": 4, "num_generations_eval": 1, "num_iterations": 1 if cpu else 2, "beta": 0.05}
    return Pipeline(
        run_dir=f"runs/tldr_smollm2_{variant or algorithm}",  # folder, with sft, reward and ppo or rloo in it
        sft=SFTConfig(
            **shared,
            **supervised,
            model_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct",  # hub name or folder
            dataset_name=POSTS,  # posts with their authors' summaries; hub name or file
            completion_only_loss=True,  # loss on the summary only
            batch_size=rows[0],  # rows an update
            max_steps=updates[0],  # updates
            learning_rate=rates[0],  # at the peak
        ),
        reward=RewardConfig(
            **shared,
            **supervised,
            model_name_or_path=SFT_EXPORT,  # the SFT stage's policy, with a fresh head
            dataset_name=PAIRS,  # hub name or file
            batch_size=rows[1],  # pairs an update
            max_steps=updates[1],  # updates
            learning_rate=rates[1],  # at the peak
            normalize_dataset_name=POSTS,  # shift scores to a mean of 0 on these summaries
        ),
        ppo=PPOConfig(**policy, **ppo) if algorithm == "ppo" else None,
        rloo=RLOOConfig(**policy, **rloo) if algorithm == "rloo" else None,
    )

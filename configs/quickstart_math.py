"""Verifiable rewards: SFT on imperfect worked sums, then GRPO: minutes on a CPU, no reward model, no network."""

from rlhf_jax.config import SFT_EXPORT, GRPOConfig, Pipeline, PPOConfig, RLOOConfig, SFTConfig

VARIANTS = ("grpo", "dapo", "rloo", "ppo")


def get_config(variant: str | None = None) -> Pipeline:
    """The config of one variant (default grpo)."""
    variant = variant or "grpo"
    shared = {
        "dataset_name": "arithmetic",  # built-in sums with worked solutions
        "tokenizer_name_or_path": "arithmetic",  # built-in: one token for each number
        "query_length": 20,  # tokens of the sum
        "adam_beta2": 0.98,  # faster second moment for a short run
        "max_grad_norm": 1.0,  # gradient clipping
        "save_steps": 200,  # updates
    }
    policy = {
        **shared,
        "sft_model_path": SFT_EXPORT,  # the SFT stage's policy
        "reward_model_path": None,  # rewards are functions
        "reward_funcs": ("exact_match_reward", "boxed_format_reward"),  # 1 or 0 each, summed
        "length_buckets": (20,),  # a single padded length
        "total_episodes": 12_800,  # responses
        "batch_size": 128,  # responses an update
        "num_mini_batches": 2,  # optimizer steps an epoch
        "learning_rate": 3e-4,  # linear decay to 0
        "response_length": 48,  # tokens; the longest right answer has 47
        "temperature": 1.0,  # for sampling and log-probabilities
        "max_eval_samples": 2048,  # held-out rows
        "logging_steps": 10,  # updates
    }
    groups = {
        **policy,
        "num_generations": 8,  # responses to each prompt: 16 prompts an update
        "num_generations_eval": 1,  # responses to each held-out prompt
        "num_iterations": 2,  # epochs over each batch
        "lr_scheduler_unit": "update",  # unit of a schedule step
        "beta": 0.0,  # no KL penalty: exact rewards cannot be exploited
    }
    higher = {"epsilon_high": 0.28, "mask_truncated_completions": True}  # DAPO's clip range and overlong filtering
    stages = {
        "grpo": {"grpo": GRPOConfig(**groups, loss_type="grpo")},
        "dapo": {"grpo": GRPOConfig(**groups, loss_type="dapo", **higher)},
        "rloo": {"rloo": RLOOConfig(**groups)},
        "ppo": {"ppo": PPOConfig(**policy, num_ppo_epochs=2, kl_coef=0.0)},  # its value model starts from SFT's policy
    }
    return Pipeline(
        run_dir=f"runs/quickstart_math_{variant}",  # folder, with sft and the policy stage in it
        sft=SFTConfig(
            **shared,
            max_length=66,  # tokens of sum and solution
            length_buckets=(66,),  # a single padded length
            model_name_or_path=None,  # no checkpoint: random initial weights
            scratch_model="qwen2:2x128x4x2",  # layers x width x heads x heads of keys and values
            completion_only_loss=True,  # loss on the solution only
            batch_size=32,  # rows an update
            max_steps=1000,  # updates
            learning_rate=2e-3,  # at the peak
            lr_scheduler_type="cosine",  # decay to 0
            warmup_steps=30,  # updates
            eval_steps=200,  # updates
            max_eval_samples=512,  # held-out rows
            logging_steps=50,  # updates
        ),
        reward=None,  # no reward model
        **{"ppo": None, **stages[variant]},
    )

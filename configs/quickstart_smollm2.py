"""A chat model learns sums: SmolLM2-135M-Instruct with GRPO and adapters, a quarter of an hour on two cores."""

from rlhf_jax.config import GRPOConfig, Pipeline, PPOConfig, RLOOConfig

# Sums of two numbers of one or two digits; the last number of a response is its answer.
TASK = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&max_digits=2&answer_format=number"
VARIANTS = ("lora", "full", "rloo", "ppo")


def get_config(variant: str | None = None) -> Pipeline:
    """The config of one variant (default lora: GRPO with adapters)."""
    variant = variant or "lora"
    policy = {
        "sft_model_path": "HuggingFaceTB/SmolLM2-135M-Instruct",  # from the hub; or a folder
        "reward_model_path": None,  # rewards are functions
        "dataset_name": TASK,  # needs '.[reasoning-gym]'
        "reward_funcs": ("reasoning_gym_reward",),  # 1 for the right answer
        "query_length": 56,  # tokens of system prompt and question
        "length_buckets": (56,),  # a single padded length
        "response_length": 24,  # tokens
        "temperature": 0.7,  # for sampling and log-probabilities
        "total_episodes": 3072,  # responses
        "batch_size": 64,  # responses an update
        "learning_rate": 2e-4 if variant in ("lora", "ppo") else 5e-6,  # linear decay to 0
        "max_eval_samples": 256,  # held-out rows
        "eval_steps": 24,  # updates
        "save_steps": 24,  # updates
    }
    adapters = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
    groups = {
        **policy,
        "num_generations": 8,  # responses to each prompt: 8 prompts an update
        "num_generations_eval": 1,  # responses to each held-out prompt
        "beta": 0.0,  # no KL penalty: a verifier cannot be exploited
    }
    critic = {
        "value_model": "shared_backbone",  # a head on the policy
        "value_learning_rate": 2e-3,  # of that head
        "num_ppo_epochs": 1,  # passes over an update's responses
        "lam": 1.0,  # of GAE: returns are the rewards
        "kl_coef": 0.0,  # as beta
    }
    stages = {
        "lora": {"grpo": GRPOConfig(**groups, **adapters)},
        "full": {"grpo": GRPOConfig(**groups)},
        "rloo": {"rloo": RLOOConfig(**groups)},
        "ppo": {"ppo": PPOConfig(**policy, **critic, **adapters)},
    }
    return Pipeline(
        run_dir=f"runs/quickstart_smollm2_{variant}",  # folder, with the stage in it
        sft=None,  # the model is a chat model already
        reward=None,  # no reward model
        **{"ppo": None, **stages[variant]},
    )

"""Prompts with pictures: SFT on imperfect answers, then GRPO, from random weights: minutes on a CPU, no network."""

from rlhf_jax.config import SFT_EXPORT, GRPOConfig, Pipeline, RLOOConfig, SFTConfig

VARIANTS = ("grpo", "rloo")


def get_config(variant: str | None = None) -> Pipeline:
    """The config of one variant (default grpo)."""
    variant = variant or "grpo"
    shared = {
        "dataset_name": "shapes",  # built-in pictures with questions and answers
        "tokenizer_name_or_path": "shapes",  # built-in: one token for each word
        "query_length": 16,  # tokens of the question, those of its picture included
        "adam_beta2": 0.98,  # faster second moment for a short run
        "max_grad_norm": 1.0,  # gradient clipping
        "save_steps": 200,  # updates
        "max_eval_samples": 512,  # held-out rows
    }
    policy = {
        **shared,
        "sft_model_path": SFT_EXPORT,  # the SFT stage's policy
        "reward_model_path": None,  # rewards are functions
        "reward_funcs": ("exact_match_reward",),  # 1 for the right answer in \\boxed{}, else 0
        "length_buckets": (16,),  # a single padded length
        "total_episodes": 7_680,  # responses
        "batch_size": 128,  # responses an update
        "num_generations": 8,  # responses to each prompt: 16 prompts an update
        "num_generations_eval": 1,  # responses to each held-out prompt
        "learning_rate": 5e-4,  # linear decay to 0
        "response_length": 6,  # tokens; a right answer has 4
        "temperature": 1.0,  # for sampling and log-probabilities
        "beta": 0.0,  # no KL penalty: exact rewards cannot be exploited
        "logging_steps": 10,  # updates
        "eval_steps": 20,  # updates
    }
    stages = {"grpo": {"grpo": GRPOConfig(**policy)}, "rloo": {"rloo": RLOOConfig(**policy)}}
    return Pipeline(
        run_dir=f"runs/quickstart_vision_{variant}",  # folder, with sft and the policy stage in it
        sft=SFTConfig(
            **shared,
            max_length=24,  # tokens of question and answer
            length_buckets=(24,),  # a single padded length
            model_name_or_path=None,  # no checkpoint: random initial weights
            scratch_model="smolvlm:2x64x4",  # layers x width x heads, of the vision tower and of the text model
            completion_only_loss=True,  # loss on the answer only
            batch_size=64,  # rows an update
            max_steps=400,  # updates
            learning_rate=2e-3,  # at the peak
            lr_scheduler_type="cosine",  # decay to 0
            warmup_steps=30,  # updates
            eval_steps=200,  # updates
            logging_steps=50,  # updates
        ),
        reward=None,  # no reward model
        **{"ppo": None, **stages[variant]},
    )

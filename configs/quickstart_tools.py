"""Tools over several turns: SFT on imperfect play, then GRPO, RLOO or PPO; minutes on a CPU, no network."""

from rlhf_jax.config import SFT_EXPORT, GRPOConfig, Pipeline, PPOConfig, RLOOConfig, SFTConfig

VARIANTS = ("boxes", "boxes_rloo", "boxes_ppo", "guess", "guess_rloo", "guess_ppo")
TASKS = {
    "boxes": {  # the answer is the sum of amounts that only the tool can tell
        "dataset_name": "boxes",  # built-in
        "tools": ("rlhf_jax.tools.tasks.open_box",),
        "reward_funcs": ("exact_match_reward",),  # 1 for the right answer
        "response_length": 48,  # tokens, results included
    },
    "guess": {  # the environment says higher, lower or right, and gives the reward
        "dataset_name": "guess_number",  # built-in
        "environment_factory": ("rlhf_jax.tools.tasks:GuessNumber",),
        "max_tool_calling_iterations": 5,  # guesses; halving needs no more
        "response_length": 64,  # tokens, results included
    },
}


def get_config(variant: str | None = None) -> Pipeline:
    """The config of one variant (default boxes: GRPO)."""
    variant = variant or "boxes"
    task, _, algorithm = variant.partition("_")
    tool = {"type": "function", "function": {"name": "open_box" if task == "boxes" else "guess"}}
    shared = {
        "tokenizer_name_or_path": "tool_tasks",  # built-in, with a chat template
        "query_length": 16,  # tokens of the prompt
        "adam_beta2": 0.98,  # faster second moment for a short run
        "max_grad_norm": 1.0,  # gradient clipping
    }
    policy = {
        **shared,
        **TASKS[task],
        "sft_model_path": SFT_EXPORT,  # the SFT stage's policy
        "reward_model_path": None,  # rewards are functions
        "length_buckets": (16,),  # a single padded length
        "total_episodes": 7_680,  # responses
        "batch_size": 128,  # responses an update
        "num_mini_batches": 2,  # optimizer steps an epoch
        "learning_rate": 3e-4,  # linear decay to 0
        "temperature": 1.0,  # for sampling and log-probabilities
        "max_eval_samples": 1024,  # held-out rows
        "logging_steps": 10,  # updates
    }
    groups = {
        "num_generations": 8,  # responses to each prompt: 16 prompts an update
        "num_generations_eval": 1,  # responses to each held-out prompt
        "num_iterations": 2,  # epochs over each batch
        "beta": 0.0,  # no KL penalty: these rewards cannot be exploited
    }
    critic = {"num_ppo_epochs": 2, "kl_coef": 0.0, "gae_unit": "turn"}  # gamma and lam apply once a turn
    stages = {"": ("grpo", GRPOConfig, groups), "rloo": ("rloo", RLOOConfig, groups), "ppo": ("ppo", PPOConfig, critic)}
    stage, kind, options = stages[algorithm]
    return Pipeline(
        run_dir=f"runs/quickstart_tools_{variant}",  # folder, with sft and the policy stage in it
        sft=SFTConfig(
            **shared,
            dataset_name=policy["dataset_name"],
            chat_template_kwargs={"tools": [tool]},  # as the policy stage shows its tools
            max_length=16 + policy["response_length"] + 32,  # tokens of a whole conversation
            model_name_or_path=None,  # no checkpoint: random initial weights
            scratch_model="qwen2:2x128x4x2",  # layers x width x heads x heads of keys and values
            assistant_only_loss=True,  # no loss on the results of tools
            batch_size=32,  # rows an update
            max_steps=1000,  # updates
            learning_rate=2e-3,  # at the peak
            lr_scheduler_type="cosine",  # decay to 0
            warmup_steps=30,  # updates
            logging_steps=50,  # updates
        ),
        reward=None,  # no reward model
        **{"ppo": None, stage: kind(**policy, **options)},
    )

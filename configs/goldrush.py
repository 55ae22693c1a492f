"""Over-optimisation: PPO against learned reward models of several sizes, and ensembles, scored by the gold reward.

Each variant is a stage; scripts/goldrush.py runs them in order. After Gao, Schulman and Hilton 2022 (arXiv 2210.10760),
ensembles after Coste et al. 2023 (arXiv 2310.02743).
"""

from rlhf_jax.config import PPOConfig, RewardConfig, SFTConfig, StageConfig

RUNS = "runs/goldrush"
SIZES = {"small": "1x32x2", "medium": "1x64x4", "large": "2x128x4"}  # layers x width x heads of a reward model
SEEDS = (0, 1, 2)  # of the medium reward model: an ensemble's members
REWARDS = [*(f"reward_{size}" for size in SIZES), *(f"reward_medium_{seed}" for seed in SEEDS[1:])]
POLICIES = {  # the reward models of each policy, and what becomes of their scores
    **{f"ppo_{size}": ([f"reward_{size}"], "sum") for size in SIZES},
    "ppo_mean": (["reward_medium", "reward_medium_1", "reward_medium_2"], "mean"),
    "ppo_worst": (["reward_medium", "reward_medium_1", "reward_medium_2"], "min"),
}
VARIANTS = ["sft", *REWARDS, *POLICIES]  # in the order in which they need each other


def get_config(variant: str | None = None) -> StageConfig:
    """The stage of a variant: sft, reward_SIZE, reward_medium_SEED, ppo_SIZE, ppo_mean, ppo_worst (ppo_medium)."""
    name = variant or "ppo_medium"
    if name not in VARIANTS:
        raise ValueError(f"variant {name!r} is none of {', '.join(VARIANTS)}")
    shared = {
        "run_dir": f"{RUNS}/{name}",  # folder
        "dataset_name": "synthetic",  # built-in posts, summaries and preferences
        "tokenizer_name_or_path": "synthetic",  # built-in words
        "query_length": 44,  # tokens of the post
        "adam_beta2": 0.98,  # a short run's second moment
        "max_grad_norm": 1.0,  # clip
        "logging_steps": 20,  # updates
        "save_steps": 200,  # updates
    }
    if name == "sft":
        return SFTConfig(
            **shared,
            max_length=56,  # tokens of post and summary
            length_buckets=(56,),  # one padded length
            model_name_or_path=None,  # no checkpoint: the weights start at random
            scratch_model="2x128x4",  # layers x width x heads
            completion_only_loss=True,  # learn the summary, not the post
            batch_size=32,  # rows an update
            max_steps=800,  # updates
            learning_rate=2e-3,  # at the peak
            lr_scheduler_type="cosine",  # to 0
            warmup_steps=30,  # updates
            max_eval_samples=512,  # held-out rows
        )
    if name.startswith("reward"):
        _, size, *seed = name.split("_")
        return RewardConfig(
            **shared,
            seed=42 + int(seed[0] if seed else 0),  # weights and order; the pairs are the same
            max_train_samples=2048,  # pairs: few, so that there is something to exploit
            max_length=64,  # tokens of post and summary
            length_buckets=(64,),  # one padded length
            model_name_or_path=None,  # sizes differ, so each starts at random
            scratch_model=SIZES[size],  # layers x width x heads
            batch_size=64,  # pairs an update
            max_steps=400,  # updates
            learning_rate=2e-3,  # at the peak
            lr_scheduler_type="cosine",  # to 0
            warmup_steps=20,  # updates
            max_eval_samples=1024,  # held-out pairs
            normalize_dataset_name="synthetic",  # summaries that score 0 on average afterwards
        )
    models, together = POLICIES[name]
    first, *others = [f"{RUNS}/{model}/reward_model" for model in models]
    return PPOConfig(
        **shared,
        sft_model_path=f"{RUNS}/sft/policy",  # the variant sft's
        reward_model_path=first,  # what is learned from
        more_reward_models=tuple(others),  # its ensemble's other members
        reward_ensemble=together,  # one score of theirs
        reward_funcs=("rlhf_jax.data.synthetic:gold_reward",),  # what is only measured:
        reward_weights=(1.0, 0.0),  # the gold reward weighs nothing
        value_model_path=f"{RUNS}/reward_large/reward_model",  # one critic for all: reward models' sizes differ
        length_buckets=(44,),  # one padded length
        total_episodes=19_200,  # responses; 150 updates
        batch_size=128,  # responses an update
        num_ppo_epochs=2,  # passes over each batch
        num_mini_batches=2,  # optimizer steps an epoch
        learning_rate=1e-3,  # falls to 0 in a line
        kl_coef=0.01,  # reward units a nat: little, so that it goes far
        response_length=16,  # tokens
        temperature=1.0,  # of sampling and of log-probabilities
        missing_eos_penalty=1.0,  # reward units
        max_eval_samples=512,  # held-out posts
        eval_steps=25,  # updates
        num_sample_generations=3,  # tables of samples in a run
    )

"""Over-optimisation: PPO against learned reward models of several sizes, and ensembles, scored by the gold reward."""

from rlhf_jax.config import PPOConfig, RewardConfig, SFTConfig, StageConfig

RUNS = "runs/goldrush"
SIZES = {"small": "1x32x2", "medium": "1x64x4", "large": "2x128x4"}  # reward models: layers x width x heads
MEMBERS = ("reward_medium", "reward_medium_1", "reward_medium_2")  # of an ensemble: other seeds, the same pairs
REWARDS = [*(f"reward_{size}" for size in SIZES), *MEMBERS[1:]]
POLICIES = {  # whose scores each learns from, and how they become one
    **{f"ppo_{size}": ([f"reward_{size}"], "sum") for size in SIZES},
    **{"ppo_mean": (MEMBERS, "mean"), "ppo_worst": (MEMBERS, "min")},
}
VARIANTS = ["sft", *REWARDS, *POLICIES]  # each a stage, in the order in which they need each other


def get_config(variant: str | None = None) -> StageConfig:
    """The stage of a variant (default ppo_medium); scripts/goldrush.py runs them all."""
    name = variant or "ppo_medium"
    shared = {
        "run_dir": f"{RUNS}/{name}",  # folder
        "dataset_name": "synthetic",  # built-in posts, summaries and preferences
        "tokenizer_name_or_path": "synthetic",  # built-in words
        "query_length": 44,  # tokens of the post
        "adam_beta2": 0.98,  # a short run's second moment
        "max_grad_norm": 1.0,  # clip
        "logging_steps": 20,  # updates
        "max_eval_samples": 512,  # held-out rows
    }
    supervised = {"model_name_or_path": None, "lr_scheduler_type": "cosine", "warmup_steps": 20, "learning_rate": 2e-3}
    if name == "sft":
        return SFTConfig(
            **shared,
            **supervised,  # from random weights; at the peak, to 0
            scratch_model="2x128x4",  # layers x width x heads
            max_length=56,  # tokens of post and summary
            length_buckets=(56,),  # one padded length
            completion_only_loss=True,  # learn the summary, not the post
            batch_size=32,  # rows an update
            max_steps=800,  # updates
        )
    if name.startswith("reward"):
        return RewardConfig(
            **shared,
            **supervised,
            scratch_model=SIZES[name.split("_")[1]],  # sizes differ, so each starts at random
            seed=42 + (MEMBERS.index(name) if name in MEMBERS else 0),  # weights and order
            max_train_samples=2048,  # pairs: few, so that there is something to exploit
            max_length=64,  # tokens of post and summary
            length_buckets=(64,),  # one padded length
            batch_size=64,  # pairs an update
            max_steps=400,  # updates
            normalize_dataset_name="synthetic",  # summaries that score 0 on average afterwards
        )
    first, *others = [f"{RUNS}/{model}/reward_model" for model in POLICIES[name][0]]
    return PPOConfig(
        **shared,
        sft_model_path=f"{RUNS}/sft/policy",  # the variant sft's
        reward_model_path=first,  # what is learned from
        more_reward_models=tuple(others),  # its ensemble's other members
        reward_ensemble=POLICIES[name][1],  # one score of theirs
        reward_funcs=("rlhf_jax.data.synthetic:gold_reward",),  # what is measured
        reward_weights=(1.0, 0.0),  # and weighs nothing
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
        eval_steps=25,  # updates
    )

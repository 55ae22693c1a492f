"""Over-optimisation: PPO against learned reward models of several sizes, and ensembles, scored by the gold reward."""

from rlhf_jax.config import PPOConfig, RewardConfig, SFTConfig, StageConfig

RUNS = "runs/goldrush"
SIZES = {"small": "1x32x2", "medium": "1x64x4", "large": "2x128x4"}  # reward models: layers x width x heads
MEMBERS = ("reward_medium", "reward_medium_1", "reward_medium_2")  # an ensemble: different seeds, the same pairs
REWARDS = [*(f"reward_{size}" for size in SIZES), *MEMBERS[1:]]
POLICIES = {  # reward models of each policy, and how their scores are combined
    **{f"ppo_{size}": ([f"reward_{size}"], "sum") for size in SIZES},
    **{"ppo_mean": (MEMBERS, "mean"), "ppo_worst": (MEMBERS, "min")},
}
VARIANTS = ["sft", *REWARDS, *POLICIES]  # one stage each, in order of dependency


def get_config(variant: str | None = None) -> StageConfig:
    """The stage of a variant (default ppo_medium); scripts/goldrush.py runs all of them."""
    name = variant or "ppo_medium"
    shared = {
        "run_dir": f"{RUNS}/{name}",  # folder
        "dataset_name": "synthetic",  # built-in posts, summaries and preferences
        "tokenizer_name_or_path": "synthetic",  # built-in words
        "query_length": 44,  # tokens of the post
        "adam_beta2": 0.98,  # faster second moment for a short run
        "max_grad_norm": 1.0,  # gradient clipping
        "logging_steps": 20,  # updates
        "max_eval_samples": 512,  # held-out rows
    }
    supervised = {"model_name_or_path": None, "lr_scheduler_type": "cosine", "warmup_steps": 20, "learning_rate": 2e-3}
    if name == "sft":
        return SFTConfig(
            **shared,
            **supervised,  # random weights; cosine decay to 0 from the peak
            scratch_model="2x128x4",  # layers x width x heads
            max_length=56,  # tokens of post and summary
            length_buckets=(56,),  # a single padded length
            completion_only_loss=True,  # loss on the summary only
            batch_size=32,  # rows an update
            max_steps=800,  # updates
        )
    if name.startswith("reward"):
        return RewardConfig(
            **shared,
            **supervised,
            scratch_model=SIZES[name.split("_")[1]],  # sizes differ, so each starts from random weights
            seed=42 + (MEMBERS.index(name) if name in MEMBERS else 0),  # initial weights and data order
            max_train_samples=2048,  # pairs: few, so that the reward model has errors to exploit
            max_length=64,  # tokens of post and summary
            length_buckets=(64,),  # a single padded length
            batch_size=64,  # pairs an update
            max_steps=400,  # updates
            normalize_dataset_name="synthetic",  # shift scores to a mean of 0 on these summaries
        )
    first, *others = [f"{RUNS}/{model}/reward_model" for model in POLICIES[name][0]]
    return PPOConfig(
        **shared,
        sft_model_path=f"{RUNS}/sft/policy",  # of the variant sft
        reward_model_path=first,  # trained on
        more_reward_models=tuple(others),  # other members of the ensemble
        reward_ensemble=POLICIES[name][1],  # how their scores are combined
        reward_funcs=("rlhf_jax.data.synthetic:gold_reward",),  # only measured
        reward_weights=(1.0, 0.0),  # weight 0
        value_model_path=f"{RUNS}/reward_large/reward_model",  # one critic for all: reward models differ in size
        length_buckets=(44,),  # a single padded length
        total_episodes=19_200,  # responses; 150 updates
        batch_size=128,  # responses an update
        num_ppo_epochs=2,  # epochs over each batch
        num_mini_batches=2,  # optimizer steps an epoch
        learning_rate=1e-3,  # linear decay to 0
        kl_coef=0.01,  # reward units per nat of KL: small, so that the policy moves far
        response_length=16,  # tokens
        temperature=1.0,  # for sampling and log-probabilities
        missing_eos_penalty=1.0,  # reward units
        eval_steps=25,  # updates
    )

"""The quickstart with LoRA adapters for reward model, policy and value model: minutes on a CPU, no network."""

from rlhf_jax.config import REWARD_EXPORT, SFT_EXPORT, Pipeline, PPOConfig, RewardConfig, SFTConfig


def get_config(variant: str | None = None) -> Pipeline:
    """The config; there are no variants."""
    shared = {
        "dataset_name": "synthetic",  # built-in posts, summaries and preferences
        "tokenizer_name_or_path": "synthetic",  # built-in words
        "query_length": 44,  # tokens of the post
        "adam_beta2": 0.98,  # faster second moment for a short run
        "max_grad_norm": 1.0,  # gradient clipping
        "logging_steps": 50,  # updates
        "save_steps": 200,  # updates
        "max_eval_samples": 512,  # held-out rows
    }
    adapters = {
        "use_peft": True,  # LoRA; SFT starts from random weights and trains all of them
        "lora_target_modules": ("all-linear",),  # every linear layer except the head
        "lora_dropout": 0.0,  # dropout on adapter inputs
    }
    return Pipeline(
        run_dir="runs/quickstart_lora",  # folder, with sft, reward and ppo in it
        sft=SFTConfig(
            **shared,
            max_length=56,  # tokens of post and summary
            length_buckets=(56,),  # a single padded length
            model_name_or_path=None,  # no checkpoint: random initial weights
            scratch_model="2x128x4",  # layers x width x heads
            completion_only_loss=True,  # loss on the summary only
            batch_size=32,  # rows an update
            max_steps=800,  # updates
            learning_rate=2e-3,  # at the peak
            lr_scheduler_type="cosine",  # decay to 0
            warmup_steps=30,  # updates
            eval_steps=100,  # updates
        ),
        reward=RewardConfig(
            **shared,
            **adapters,
            max_length=64,  # tokens of post and summary
            length_buckets=(64,),  # a single padded length
            model_name_or_path=SFT_EXPORT,  # the SFT stage's policy, with a fresh head
            batch_size=64,  # pairs an update
            max_steps=200,  # updates
            learning_rate=1e-3,  # at the peak
            lr_scheduler_type="cosine",  # decay to 0
            warmup_steps=20,  # updates
            eval_steps=100,  # updates
            normalize_dataset_name="synthetic",  # shift scores to a mean of 0 on these summaries
        ),
        ppo=PPOConfig(
            **adapters,
            lora_value="own",  # an adapter on the reward model's params
            **{**shared, "logging_steps": 4, "max_eval_samples": 2048},
            sft_model_path=SFT_EXPORT,  # the SFT stage's policy
            reward_model_path=REWARD_EXPORT,  # the reward stage's model; also initialises the value model
            length_buckets=(44,),  # a single padded length
            total_episodes=6_144,  # responses
            batch_size=128,  # responses an update
            num_ppo_epochs=2,  # epochs over each batch
            num_mini_batches=2,  # optimizer steps an epoch
            learning_rate=1e-3,  # linear decay to 0
            kl_coef=0.1,  # reward units per nat of KL
            response_length=16,  # tokens
            temperature=1.0,  # for sampling and log-probabilities
            missing_eos_penalty=1.0,  # reward units
        ),
    )

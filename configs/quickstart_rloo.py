"""The quickstart with RLOO in place of PPO: three stages on built-in posts, minutes on a laptop's CPU, no network."""

import dataclasses

from rlhf_jax.config import REWARD_EXPORT, SFT_EXPORT, Pipeline, RLOOConfig
from rlhf_jax.config.files import load_shipped


def get_config(variant: str | None = None) -> Pipeline:
    """The config; there are no variants."""
    return dataclasses.replace(
        load_shipped("quickstart.py"),  # SFT and reward model are its
        run_dir="runs/quickstart_rloo",  # folder, with sft, reward and rloo in it
        ppo=None,  # RLOO instead
        rloo=RLOOConfig(
            sft_model_path=SFT_EXPORT,  # the SFT stage's policy
            reward_model_path=REWARD_EXPORT,  # the reward stage's model
            dataset_name="synthetic",  # built-in posts
            tokenizer_name_or_path="synthetic",  # built-in words
            query_length=44,  # tokens of the post
            length_buckets=(44,),  # a single padded length
            total_episodes=6_144,  # responses
            batch_size=128,  # responses an update
            num_generations=4,  # responses to each prompt: 32 prompts an update
            num_iterations=2,  # epochs over each batch
            num_mini_batches=2,  # optimizer steps an epoch
            learning_rate=6e-4,  # linear decay to 0
            lr_scheduler_unit="update",  # unit of a schedule step
            adam_beta2=0.98,  # faster second moment for a short run
            max_grad_norm=1.0,  # gradient clipping
            beta=0.1,  # reward units per nat of KL
            response_length=16,  # tokens
            temperature=1.0,  # for sampling and log-probabilities
            missing_eos_penalty=1.0,  # reward units
            logging_steps=4,  # updates
            save_steps=200,  # updates
            max_eval_samples=2048,  # held-out posts
        ),
    )

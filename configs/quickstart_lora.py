"""The quickstart with LoRA adapters for reward model, policy and value model: minutes on a CPU, no network."""

import dataclasses

from rlhf_jax.config import Pipeline
from rlhf_jax.config.files import load_shipped


def get_config(variant: str | None = None) -> Pipeline:
    """The config; there are no variants."""
    full = load_shipped("quickstart.py")  # SFT is its: it starts from random weights and trains all of them
    adapters = {
        "use_peft": True,  # LoRA
        "lora_target_modules": ("all-linear",),  # every linear layer except the head
        "lora_dropout": 0.0,  # dropout on adapter inputs
    }
    return dataclasses.replace(
        full,
        run_dir="runs/quickstart_lora",  # folder, with sft, reward and ppo in it
        reward=dataclasses.replace(full.reward, **adapters),
        ppo=dataclasses.replace(
            full.ppo,
            **adapters,
            lora_value="own",  # an adapter on the reward model's params
            learning_rate=1e-3,  # linear decay to 0
        ),
    )

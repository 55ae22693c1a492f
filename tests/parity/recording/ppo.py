"""Records a PPO run of TRL 1.12.0 (CPU, float32)."""

from __future__ import annotations

import tempfile

import numpy as np
from datasets import Dataset
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from tests.parity.recording import onpolicy, peft, tiny

NAMES = ("policy", "ref", "value", "reward")


def record(setting: tiny.Setting) -> None:
    """Runs TRL and writes the record to setting.folder."""
    options = {"response_length": 8, "num_ppo_epochs": 2, **tiny.LEARNING, "stop_token": "eos", **setting.options}
    if options.get("stop_token_id") is not None:
        options.pop("stop_token")  # they exclude each other
    lora, own = peft.asked_for(options)
    tokenizer, models = tiny.start(setting, tuple(name for name in NAMES if lora is None or name != "ref"))
    policy = models["policy"]
    if lora is not None and own.get("ref_adapter_name"):
        # TRL takes several adapters only of a model that has them.
        policy, lora = peft.with_two(policy, lora, own["ref_adapter_name"]), None
    adapted = policy is not models["policy"] or lora is not None
    prompts, batch = tiny.make_prompts(setting), setting.micro * setting.accum
    trace, logged = {}, []
    tiny.reset_accelerate()
    with (
        tempfile.TemporaryDirectory() as scratch,
        onpolicy.listening(ppo_trainer, trace, setting, batch, stops=own.get("stop_token") == "eos"),
    ):
        config = PPOConfig(
            **tiny.quiet(setting, scratch),
            num_sample_generations=0,
            total_episodes=batch * setting.updates,
            **own,
        )
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=policy,
            ref_model=None if adapted else models["ref"],
            reward_model=models["reward"],
            value_model=models["value"],
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
            eval_dataset=Dataset.from_dict({"input_ids": prompts[: config.per_device_eval_batch_size]}),
            peft_config=lora,
        )
        if adapted:
            peft.fill(trainer.policy_model)
            peft.keep(trainer.policy_model, setting.folder / "adapter")
        onpolicy.keep_log(trainer, logged)
        np.random.seed(setting.seed)
        trainer.train()
    if adapted:
        peft.keep(trainer.policy_model, setting.folder / "final_policy")
    else:
        models["policy"].save_pretrained(setting.folder / "final_policy")
    models["value"].save_pretrained(setting.folder / "final_value")
    tiny.finish(setting, config, options, logged, trace, batch)

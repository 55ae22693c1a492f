"""Records a PPO run of TRL 1.12.0 (CPU, float32)."""

from __future__ import annotations

import tempfile

import numpy as np
from datasets import Dataset
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from tests.parity.recording import onpolicy, tiny

NAMES = ("policy", "ref", "value", "reward")


def record(setting: tiny.Setting) -> None:
    """Runs TRL and writes the record to setting.folder."""
    options = {"response_length": 8, "num_ppo_epochs": 2, **tiny.LEARNING, "stop_token": "eos", **setting.options}
    if options.get("stop_token_id") is not None:
        options.pop("stop_token")  # they exclude each other
    tokenizer, models = tiny.start(setting, NAMES)
    prompts, batch = tiny.make_prompts(setting), setting.micro * setting.accum
    trace, logged = {}, []
    tiny.reset_accelerate()
    with (
        tempfile.TemporaryDirectory() as scratch,
        onpolicy.listening(ppo_trainer, trace, setting, batch, stops=options.get("stop_token") == "eos"),
    ):
        config = PPOConfig(
            **tiny.quiet(setting, scratch),
            num_sample_generations=0,
            total_episodes=batch * setting.updates,
            **options,
        )
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=models["policy"],
            ref_model=models["ref"],
            reward_model=models["reward"],
            value_model=models["value"],
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
            eval_dataset=Dataset.from_dict({"input_ids": prompts[: config.per_device_eval_batch_size]}),
        )
        onpolicy.keep_log(trainer, logged)
        np.random.seed(setting.seed)
        trainer.train()
    for name in ("policy", "value"):
        models[name].save_pretrained(setting.folder / f"final_{name}")
    tiny.finish(setting, config, options, logged, trace, batch)

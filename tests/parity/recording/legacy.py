"""Records a run of TRL 0.17.0's RLOOTrainer (CPU, float32), in an environment with that TRL.

It ran until 0.21: eos never stops its sampler, and rows are tiled, row i and row i + B / k sharing a prompt.
"""

from __future__ import annotations

import tempfile

import numpy as np
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer
from trl.trainer import rloo_trainer

from tests.parity.recording import onpolicy, tiny

NAMES = ("policy", "ref", "reward")


def record(setting: tiny.Setting) -> None:
    """Runs TRL and writes the record to setting.folder."""
    options = {"response_length": 8, "num_ppo_epochs": 2, **tiny.LEARNING, "rloo_k": 2, "stop_token": "eos"}
    options |= setting.options
    if options.get("stop_token_id") is not None:
        options.pop("stop_token")  # they exclude each other
    tokenizer, models = tiny.start(setting, NAMES)
    prompts, batch = tiny.make_prompts(setting), setting.micro * setting.accum * options.get("num_mini_batches", 1)
    trace, logged = {}, []
    tiny.reset_accelerate()
    with (
        tempfile.TemporaryDirectory() as scratch,
        onpolicy.listening(rloo_trainer, trace, setting, batch, stops=False),
    ):
        config = RLOOConfig(
            **tiny.quiet(setting, scratch),
            num_sample_generations=0,
            total_episodes=batch * setting.updates,
            **options,
        )
        trainer = RLOOTrainer(
            config=config,
            processing_class=tokenizer,
            policy=models["policy"],
            ref_policy=models["ref"],
            reward_model=models["reward"],
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
            eval_dataset=Dataset.from_dict({"input_ids": prompts[: config.per_device_eval_batch_size]}),
        )
        onpolicy.keep_log(trainer, logged)
        np.random.seed(setting.seed)
        trainer.train()
    models["policy"].save_pretrained(setting.folder / "final_policy")
    tiny.finish(setting, config, options, logged, trace, batch)

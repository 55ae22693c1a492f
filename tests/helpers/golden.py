"""A finished run of each stage, made once in a session of pytest by the worker that asks first.

The tests of all workers read them; a test that changes files of a run copies its folder.
"""

import functools
import pathlib

import filelock

import rlhf_jax
from rlhf_jax.config import GRPOConfig, RewardConfig
from rlhf_jax.train import Result
from tests.helpers import reward_runs
from tests.helpers.runs import OPTIONS, RLOO_OPTIONS, TEXTS, ppo_config, sft_config

PPO = {"reward_funcs": ("tests.helpers.runs:wordiness",), "log_completions": True, "num_completions_to_print": 1}
"""Options of the PPO run beside those of `ppo_config`."""


class Golden:
    """The runs, each made when it is asked for.

    Args:
      folder: one that all workers of a session share.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def _run(self, config, **objects) -> Result:
        """What the run left. A finished run is not run again."""
        with filelock.FileLock(f"{config.run_dir}.lock"):
            return rlhf_jax.run(config, **objects)

    @functools.cached_property
    def sft(self) -> Result:
        """4 updates of a model of one layer, with a checkpoint of each."""
        return self._run(sft_config(self.folder / "sft"))

    @functools.cached_property
    def reward(self) -> Result:
        """2 updates of a reward model that starts from the SFT policy."""
        options = {**OPTIONS, **TEXTS, "model_name_or_path": self.sft.paths["policy"], "max_steps": 2}
        return self._run(RewardConfig(run_dir=str(self.folder / "reward"), **options))

    @functools.cached_property
    def ppo(self) -> Result:
        """4 updates of the SFT policy, with a checkpoint, tables and samples of each second one."""
        return self._run(ppo_config(self.folder / "ppo", self.sft.run_dir, **PPO))

    @functools.cached_property
    def rloo(self) -> Result:
        """3 updates of random weights by `reward_runs.judge`, with tables of all."""
        return self._run(reward_runs.rloo(self.folder / "rloo"), reward_funcs=reward_runs.judge)

    @functools.cached_property
    def grpo(self) -> Result:
        """2 updates of random weights, with a bonus on entropy that adapts itself."""
        options = {**RLOO_OPTIONS, "batch_size": 4, "total_episodes": 8, "num_generations": 2}
        options |= {"scratch_model": "1x16x2", "reward_funcs": PPO["reward_funcs"]}
        options |= {"loss_type": "dapo", "use_adaptive_entropy": True, "entropy_target": 3.0, "beta": 0.1}
        return self._run(GRPOConfig(run_dir=str(self.folder / "grpo"), **options))

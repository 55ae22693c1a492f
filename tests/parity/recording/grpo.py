"""Records a run of TRL 1.12.0's GRPOTrainer (CPU, float32).

See `groups`; besides num_items_in_batch_G, old_per_token_logps_G (absent where TRL takes the policy's own
log-probabilities at the first step) and ref_per_token_logps_G [B, T] (absent for beta 0).
"""

from __future__ import annotations

from trl import GRPOConfig, GRPOTrainer

from tests.parity.recording import groups, tiny


class Recorder(groups.Recording, GRPOTrainer):
    """TRL's trainer, recorded."""

    kept = (*groups.Recording.kept, "num_items_in_batch", "old_per_token_logps", "ref_per_token_logps")

    def _generate_single_turn(self, prompt_ids, *args):
        if not self.setting.crafted:
            return super()._generate_single_turn(prompt_ids, *args)
        return self.crafted(prompt_ids), None  # no log-probabilities of the sampler


def record(setting: tiny.Setting) -> None:
    """Runs TRL and writes the record to setting.folder."""
    groups.record(setting, Recorder, GRPOConfig, {"algorithm": "grpo"})

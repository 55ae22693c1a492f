"""Records a run of TRL 1.12.0's RLOOTrainer (CPU, float32). See `groups`; besides old_logps_G [B]."""

from __future__ import annotations

from trl import RLOOConfig, RLOOTrainer

from tests.parity.recording import groups, tiny


class Recorder(groups.Recording, RLOOTrainer):
    """TRL's trainer, recorded."""

    kept = (*groups.Recording.kept, "old_logps")

    def _generate_single_turn(self, prompt_ids, *args):
        return self.crafted(prompt_ids) if self.setting.crafted else super()._generate_single_turn(prompt_ids, *args)


def record(setting: tiny.Setting) -> None:
    """Runs TRL and writes the record to setting.folder."""
    groups.record(setting, Recorder, RLOOConfig, {})

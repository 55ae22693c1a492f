"""Calls the programs of a stage that samples with prompts from the host, a policy and the train state."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlhf_jax.algorithms.response_logprobs import Models
from rlhf_jax.config import sampling_options
from rlhf_jax.parallel import multihost, sharding
from rlhf_jax.rewards.interface import TrainerState
from rlhf_jax.rewards.scorer import Scored
from rlhf_jax.stages.build_programs import Programs
from rlhf_jax.stages.context import StageContext
from rlhf_jax.types import Array, Images, Params, PromptBatch, Rollout, RolloutState, ScoredRollout, TrainState


@dataclasses.dataclass(frozen=True)
class Runner:
    """What training and evaluation share.

    Attributes:
      context, programs: of the stage.
      models: with frozen params.
      eos_ids: `Tokenizer.eos_ids`.
      total_steps: updates of the run.
      episodes_per_epoch: responses in one pass over the prompts.
    """

    context: StageContext
    programs: Programs
    models: Models
    eos_ids: tuple[int, ...]
    total_steps: int
    episodes_per_epoch: int

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference policy."""
        return self.models.reference is not None

    def reference_params(self, state: TrainState | None = None) -> Params | None:
        """The reference's params on the device: the state's where updates move it, else those of the start."""
        if state is not None and state.ref_params is not None:
            return state.ref_params
        return None if self.models.reference is None else sharding.resident(self.models.reference.params)

    def generate_rollout(
        self,
        policy: Params,
        prompts: PromptBatch,
        *,
        seed: Array,
        step: Array,
        temperature: float | None = None,
        group_size: int = 1,
        kept: RolloutState | None = None,
    ) -> tuple[Rollout, RolloutState | None]:
        """Responses of a policy to a batch of prompts from the host, of which this process has its share; and what is
        kept for the next rollout of training, where `kept` is of the one before. Images may be on the mesh already."""
        context, count = self.context, len(prompts.rows)
        share = PromptBatch(prompts.tokens, prompts.lengths, prompts.rows[context.local_rows(count)])
        placed = context.place_share(share, count).replace(images=self.place_images(prompts))
        if temperature == sampling_options(context.config)["temperature"]:
            temperature = None  # the same program as in training
        return self.programs.generate(policy, self.models.base, placed, seed, step, temperature, group_size, kept)

    def place_images(self, prompts: PromptBatch) -> Images | None:
        """The images of a batch of prompts on the mesh, for generation, experience and update; None without images."""
        images = prompts.images
        if images is None or isinstance(images.pixels, Array):
            return images
        return self.context.place_share(images, len(prompts.rows))

    def make_experience(
        self, state: TrainState, rollout: Rollout, scored: Scored, group_size: int, images: Images | None = None
    ):
        """(experience, metrics) of a scored rollout; `images`: of its prompts, on the mesh."""
        batch = self.scored_rollout(
            rollout,
            scores=scored.scores,
            scorable=scored.scorable,
            token_rewards=scored.token_rewards,
            each_reward=scored.each_reward,
            reward_weights=scored.weights,
            group_size=group_size,
            images=images,
        )
        return self.programs.experience(
            state.params, self.models.base, self.reference_params(state), batch, state.kl_coef
        )

    def scored_rollout(self, rollout: Rollout, **scores: Any) -> ScoredRollout:
        """What an algorithm makes experience of; `scores` are fields of ScoredRollout."""
        return ScoredRollout(rollout, eos_ids=self.eos_ids, **scores)

    def token_kl(
        self, policy: Params, rollout: Rollout, state: TrainState | None = None, images: Images | None = None
    ) -> Array:
        """KL of each response token to the reference: [B, T]; `images`: of the rows' prompts, one a row."""
        reference = self.reference_params(state)
        return self.programs.token_kl({"policy": policy}, self.models.base, reference, rollout, images)

    def trainer_state(self, step: int, is_eval: bool = False) -> TrainerState:
        """The progress that reward functions may read, before update `step` (0-based)."""
        config: Any = self.context.config
        episodes = step * config.batch_size
        return TrainerState(
            global_step=step,
            max_steps=self.total_steps,
            epoch=episodes / self.episodes_per_epoch,
            num_train_epochs=config.num_train_epochs,
            episode=episodes,
            is_eval=is_eval,
            is_world_process_zero=multihost.is_main(),
        )

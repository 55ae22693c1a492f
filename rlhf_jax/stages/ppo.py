"""The PPO stage: a critic beside the policy, one response a prompt."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

from rlhf_jax.models import hf
from rlhf_jax.stages import base
from rlhf_jax.stages.policy import PolicyStage
from rlhf_jax.trainers import forward, ppo
from rlhf_jax.types import UserError


class PPOStage(PolicyStage):
    """Proximal policy optimisation."""

    name = "ppo"
    progress = (
        "objective/scores",
        "objective/rlhf_reward",
        "objective/kl",
        "val/response_length",
        "policy/approxkl_avg",
    )
    rate_names = ("lr",)

    def _open_networks(self):
        c, value = self.config, None
        if c.value_model == "separate":
            first = self.scorer.models[0] if self.scorer.models else None
            if c.value_model_path is not None:
                value = self.lay(hf.load_model(c.value_model_path, revision=c.value_model_revision), "scalar")
            elif first is not None and first.tokenizer is not None:
                raise UserError(
                    f"the value model starts from the reward model {first.path}, which reads text by a tokenizer of "
                    "its own, and values are of the policy's ids: give value_model_path, or value_model "
                    "'shared_backbone'"
                )
            else:
                value = self.policy if first is None else first.model
            self._check_same_ids(value, "value_model_path")
        self.nets = forward.Networks(self.policy, self.ref, value, self.mesh)

    def _load_weights(self):
        c = self.config
        policy, value = self.load_policy(), self.nets.value
        self.ref_params = self.load_reference(policy, self.frozen_dtype)
        trained = {"policy": policy}
        if value is None:
            trained["policy"] = {**policy, "score": self.new_score(self.policy, None)}
        elif c.value_model_path is not None:
            trained["value"] = self.weights.load(value, c.value_model_path, "scalar", c.value_model_revision)
        elif self.scorer.models:
            trained["value"] = self.weights.copy(value, self.scorer.models[0].params)
        else:
            backbone = self.weights.copy(value, {"backbone": policy["backbone"]})
            trained["value"] = {**backbone, "score": self.new_score(value, None)}
        models = {"policy": self.policy, "value": value or self.policy}
        self.state = self.initial_state(trained, base.state_rules(models), c.seed)

    def experience(self, params, ref, rollout, scores, scorable, token_rewards, kl_coef, group):
        """`ppo.make_experience`."""
        eos = self.tokenizer.eos_id
        return ppo.make_experience(
            self.nets, params, ref, rollout, scores, kl_coef, self.config, eos, token_rewards, scorable
        )

    def learn(self, state, experience, found):
        """`ppo.update`, then the KL controller."""
        c = self.config
        key = jax.random.fold_in(self.key(state.seed, state.step), 1)
        b = experience.lengths.shape[0]
        shuffles = ppo.permutations(key, c.num_ppo_epochs, b)
        rate = self.rate(state.step)
        causes = found["nonfinite/causes"]
        state, metrics = ppo.update(self.nets, self.optimizer, state, experience, shuffles, rate, c, causes)
        return ppo.control_kl(state, found["objective/kl"], c, b), metrics

    def look(self, params, experience):
        """`ppo.look`."""
        return ppo.look(self.nets, params, experience, self.config)

    def shown_rate(self, step):
        """The learning rate of update `step`."""
        return jnp.asarray(self.rate(step))

    def export(self, state, folder):
        """policy/ and value/ as Hugging Face checkpoints with the tokenizer, by the first process."""
        paths = {"policy": self.export_policy(state, folder), "value": os.path.join(folder, "value")}
        if self.nets.value is None:
            self.save(paths["value"], self.policy, state.params["policy"], "scalar")
        else:
            self.save(paths["value"], self.nets.value, state.params["value"], "scalar")
        return paths

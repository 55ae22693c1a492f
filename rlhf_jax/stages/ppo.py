"""The PPO stage: a critic beside the policy, one response a prompt."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import actor_critic, ppo
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.stages import adapters, base
from rlhf_jax.stages.policy import PolicyStage


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
    token_advantages = True

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
            if c.lora_value == "shared":
                value = self.policy
            form = None if c.lora_value == "full" else adapters.form_of(c, value, "scalar")
            value = dataclasses.replace(value, lora=form)
            self._check_same_ids(value, "value_model_path")
        self.nets = actor_critic.Networks(self.policy, self.ref, value, self.mesh)

    def copied(self):
        """As `PolicyStage.copied`: a value model in full, or modules of it, may start from either."""
        c, found, value = self.config, super().copied(), self.nets.value
        whole = value is not None and (value.lora is None or value.lora.modules_to_save)
        if not whole or c.value_model_path is not None:
            return found
        return found | {"reward" if self.scorer.models and c.lora_value != "shared" else "policy"}

    def _load_weights(self):
        c = self.config
        policy, value = self.load_policy(), self.nets.value
        self.ref_params = self.load_reference(policy, self.frozen_dtype)
        trained = {"policy": self.adapt(policy)}
        if value is None:
            trained["policy"] = {**trained["policy"], "score": self.new_score(self.policy, None)}
        elif value.lora is not None:
            trained["value"] = self._adapted_value(value, policy)
        elif c.value_model_path is not None:
            trained["value"] = self.weights.load(value, c.value_model_path, "scalar", c.value_model_revision)
        elif self.scorer.models:
            trained["value"] = self.weights.copy(value, self.scorer.models[0].params)
        else:
            backbone = self.weights.copy(value, {"backbone": policy["backbone"]})
            trained["value"] = {**backbone, "score": self.new_score(value, None)}
        del policy
        models = {"policy": self.policy, "value": value or self.policy}
        self.state = self.initial_state(trained, base.state_rules(models), c.seed)

    def _adapted_value(self, value, policy):
        """A new adapter and the head of the value model; sets its base, which is not copied where it is the policy's or
        the reward model's."""
        c = self.config
        if c.lora_value == "shared":
            return {**adapters.fresh(self, value, policy, 1), "score": self.new_score(value, None)}
        if c.value_model_path is not None:
            as_read = None if value.lora.modules_to_save else adapters.as_base(self, value)
            read = self.weights.load(value, c.value_model_path, "scalar", c.value_model_revision, as_read)
            self.base["value"] = adapters.beneath(self, value, read)
        else:
            first = self.scorer.models[0]
            read = first.params
            self.base["value"] = first.params = self.rounded(first.model, read)
        head = self.weights.copy(value, {"score": read["score"]})
        return {**adapters.fresh(self, value, read, 1), **head}

    def experience(self, params, ref, rollout, scores, scorable, token_rewards, kl_coef, group):
        """`ppo.make_experience`."""
        eos = self.tokenizer.eos_id
        return ppo.make_experience(
            self.nets, params, ref, rollout, scores, kl_coef, self.config, eos, token_rewards, scorable
        )

    def learn(self, state, base, experience, found):
        """`ppo.update`, then the KL controller."""
        c = self.config
        key = jax.random.fold_in(self.key(state.seed, state.step), 1)
        b = experience.lengths.shape[0]
        shuffles = ppo.permutations(key, c.num_ppo_epochs, b)
        rate = self.rate(state.step)
        causes = found["nonfinite/causes"]
        state, metrics = ppo.update(self.nets, self.optimizer, state, experience, shuffles, rate, c, causes, base)
        return ppo.control_kl(state, found["objective/kl"], c, b), metrics

    def look(self, params, experience):
        """`ppo.look`."""
        return ppo.look(self.nets, params, experience, self.config)

    def shown_rate(self, step):
        """The learning rate of update `step`."""
        return jnp.asarray(self.rate(step))

    def export(self, state, folder):
        """policy/ and value/ as Hugging Face checkpoints with the tokenizer, by the first process."""
        c, model, path = self.config, self.nets.value or self.policy, os.path.join(folder, "value")
        paths = self.export_policy(state, folder)
        params = state.params["policy" if self.nets.value is None else "value"]
        if model.lora is None:
            self.save(path, model, params, "scalar")
            return {**paths, "value": path}
        if "value" in self.base:
            beneath = self.base["value"]
            first = (c.reward_model_path, c.reward_model_revision)
            start = first if c.value_model_path is None else (c.value_model_path, c.value_model_revision)
        else:
            beneath, start = self.base["policy"], (self.start.path, self.start.revision)
        origin = adapters.origin_of(*start)
        return paths | adapters.write(self, folder, "value", model, params, "scalar", beneath, origin)

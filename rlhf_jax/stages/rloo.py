"""The RLOO stage: several responses a prompt, no critic."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import actor_critic, microbatch, rloo
from rlhf_jax.config.batch_sizes import batch_arithmetic
from rlhf_jax.stages import base
from rlhf_jax.stages.policy import PolicyStage


class RLOOStage(PolicyStage):
    """REINFORCE with a leave-one-out baseline."""

    name = "rloo"
    progress = ("reward", "objective/rlhf_reward", "objective/kl", "completions/mean_length", "policy/approxkl_avg")
    rate_names = ("learning_rate", "lr")
    trains_on = True

    def _open_networks(self):
        c = self.config
        self.group = c.num_generations
        self.eval_group = c.num_generations_eval or c.num_generations
        rates, form = self.policy.config, self.policy.lora
        rates = (rates.hidden_dropout, rates.attention_dropout, 0.0 if form is None else form.dropout)
        self.dropout = not c.disable_dropout and max(rates) > 0
        # A dropout mask belongs to a row, and a shared prompt to none.
        self.shared_prompts = c.shared_prompts and not self.dropout
        if self.dropout and c.shared_prompts:
            self.report.append(
                "the policy has dropout (lora_dropout counts), so updates compute each prompt once a response"
            )
        self.nets = actor_critic.Networks(self.policy, self.ref, None, self.mesh)

    def _load_weights(self):
        c = self.config
        policy = self.load_policy()
        self.ref_params = self.load_reference(policy, self.frozen_dtype) if c.beta else None
        self.state = self.initial_state(
            {"policy": self.adapt(policy)}, base.state_rules({"policy": self.policy}), c.seed
        )
        if c.sync_ref_model:
            # A copy of its own: the update gives the state's buffers away, and samples are held to the first reference.
            self.state = self.state.replace(ref_params=self.load_reference(policy, jnp.dtype(jnp.float32)))

    def experience(self, params, ref, rollout, scores, scorable, token_rewards, kl_coef, group):
        """`rloo.make_experience`."""
        eos = self.tokenizer.eos_id
        return rloo.make_experience(
            self.nets, params, ref, rollout, scores, scorable, self.config, eos, token_rewards, group=group
        )

    def rates(self, step):
        """The learning rate of each optimizer step of update `step`, [steps] float32."""
        c, steps = self.config, rloo.steps_of(self.config)
        if self.custom_optimizer or c.lr_scheduler_unit == "update":
            return jnp.broadcast_to(self.rate(step), (steps,))
        total = batch_arithmetic(c, self.rows).optimizer_steps
        return jax.vmap(lambda i: microbatch.learning_rate(c, step * steps + i, total))(jnp.arange(steps))

    def shown_rate(self, step):
        """The learning rate of the first optimizer step of update `step`."""
        return self.rates(step)[0]

    def learn(self, state, base, experience, found):
        """`rloo.update`; groups are shuffled whole."""
        c = self.config
        key = jax.random.fold_in(self.key(state.seed, state.step), 1)
        groups, size = experience.lengths.shape
        shuffles = rloo.permutations(key, c.num_iterations, groups, c.reshuffle)
        if not self.shared_prompts:
            experience = rloo.apart(experience)
            shuffles = (shuffles[:, :, None] * size + jnp.arange(size)[None, None]).reshape(c.num_iterations, -1)
        dropout = jax.random.fold_in(key, 1) if self.dropout else None
        rates, causes = self.rates(state.step), found["nonfinite/causes"]
        state, stats = rloo.update(
            self.nets, self.optimizer, state, experience, shuffles, rates, c, dropout, causes, base
        )
        return state, rloo.averaged(stats, c)

    def look(self, params, experience):
        """`rloo.look`."""
        experience = experience if self.shared_prompts else rloo.apart(experience)
        return rloo.look(self.nets, params, experience, self.config)

    def export(self, state, folder):
        """policy/ as a Hugging Face checkpoint with the tokenizer."""
        return self.export_policy(state, folder)

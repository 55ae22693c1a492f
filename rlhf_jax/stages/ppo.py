"""The PPO stage: rollout, score, experience, update, each one compiled program."""

from __future__ import annotations

import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data, rewards, sharding
from rlhf_jax.arithmetic import batch_arithmetic
from rlhf_jax.generate import Sampling, generate, in_chunks
from rlhf_jax.models import hf
from rlhf_jax.stages import base
from rlhf_jax.trainers import forward, ppo, reward
from rlhf_jax.types import PromptBatch, UserError


class PPOStage(base.Stage):
    """Policy optimisation against a reward model or reward functions."""

    name = "ppo"
    progress = (
        "objective/scores",
        "objective/rlhf_reward",
        "objective/kl",
        "val/response_length",
        "policy/approxkl_avg",
    )

    def __init__(self, config, *, train_dataset=None, eval_dataset=None, reward_funcs=None, optimizer=None):
        super().__init__(config, optimizer=optimizer)
        self.reward_funcs = list(reward_funcs or ())
        if config.reward_model_path is None and not self.reward_funcs:
            raise UserError("no reward: set --reward_model_path, or give reward_funcs to rlhf_jax.run")
        self._open_models()
        self.train_data = data.load_prompts(config, self.tokenizer, train_dataset)
        self.eval_prompts = data.load_prompts(config, self.tokenizer, eval_dataset, evaluation=True)
        self.report = [str(self.train_data.report)]
        self.total_steps = batch_arithmetic(config, self.rows).updates
        # Evaluation draws from a seed of its own, the same every time, so that two evaluations differ by the policy.
        # On the mesh like the state's seed and step: elsewhere they would compile the rollout a second time.
        self._eval_seed = self.place_batch(np.uint32(config.seed ^ 0x5EED))
        self._load_weights()
        self._compile()

    @property
    def base_model(self):
        """The SFT model; None: random weights."""
        return None if self.config.scratch_model else self.config.sft_model_path

    # --- models

    def _open_models(self):
        """Configs and tokenizers only: everything that can be refused is, before a weight is read."""
        c = self.config
        if c.scratch_model:
            self.tokenizer = base.open_tokenizer(c, None, None)
            policy = base.scratch_model(c, self.tokenizer.vocab_size, c.query_length + c.response_length)
        else:
            policy = hf.load_model(c.sft_model_path, revision=c.model_revision)
            self.tokenizer = base.open_tokenizer(c, c.sft_model_path, policy.config.vocab_size)
        rows = policy.config.vocab_size
        if c.stop_token_id is not None and c.stop_token_id >= rows:
            raise UserError(
                f"--stop_token_id {c.stop_token_id} is beyond the vocabulary of {c.sft_model_path or c.scratch_model}: "
                f"its ids are 0 to {rows - 1}. No response could end by it"
            )
        needed = c.query_length + c.response_length
        ref = policy if c.ref_model_path is None else hf.load_model(c.ref_model_path, revision=c.ref_model_revision)
        self.reward_model = None
        value = None
        if c.reward_model_path is not None:
            self.reward_model = hf.load_model(c.reward_model_path, revision=c.reward_model_revision)
        if c.value_model == "separate":
            if c.value_model_path is not None:
                value = hf.load_model(c.value_model_path, revision=c.value_model_revision)
            else:
                value = self.reward_model or policy
        self.nets = forward.Networks(policy, ref, value)
        roles = {
            "sft_model_path": policy,
            "ref_model_path": ref,
            "reward_model_path": self.reward_model,
            "value_model_path": value,
        }
        for option, model in roles.items():
            if model is None:
                continue
            path = getattr(c, option) or c.sft_model_path or c.scratch_model
            base.check_context(model, needed, "--query_length + --response_length", path)
            if model.config.vocab_size <= max(self.tokenizer.pad_id, self.tokenizer.eos_id):
                raise UserError(
                    f"--{option} {path} has {model.config.vocab_size} embedding rows, but the policy's tokenizer uses "
                    f"id {max(self.tokenizer.pad_id, self.tokenizer.eos_id)}: they were not made for one tokenizer"
                )
        if c.reward_model_path is not None:
            data.check_same_tokenizer(self.tokenizer, c.reward_model_path, c.reward_model_revision)

    def _load_weights(self):
        c = self.config
        nets = self.nets
        if c.scratch_model:
            policy = nets.policy.init(jax.random.key(c.seed), heads=("causal",))
        else:
            _, policy = hf.load(c.sft_model_path, kind="causal", revision=c.model_revision)
        if c.ref_model_path is None:
            ref = policy
        else:
            _, ref = hf.load(c.ref_model_path, kind="causal", revision=c.ref_model_revision)
        self.ref_params = self.place_params(nets.ref, jax.tree.map(np.array, ref))
        self.reward_params = None
        if c.reward_model_path is not None:
            _, loaded = hf.load(c.reward_model_path, kind="scalar", revision=c.reward_model_revision)
            self.reward_params = self.place_params(self.reward_model, loaded)
        trained = {"policy": policy}
        if c.value_model == "shared_backbone":
            head = base.with_scalar_head(policy, nets.policy.config.hidden_size, c.seed, None)["score"]
            trained["policy"] = {**policy, "score": head}
        elif c.value_model_path is not None:
            _, trained["value"] = hf.load(c.value_model_path, kind="scalar", revision=c.value_model_revision)
        elif self.reward_model is not None:
            trained["value"] = loaded
        else:
            trained["value"] = base.with_scalar_head(policy, nets.policy.config.hidden_size, c.seed, None)
        placed = {"policy": self.place_params(nets.policy, jax.tree.map(np.array, trained["policy"]))}
        rules = nets.policy.param_rules
        if "value" in trained:
            placed["value"] = self.place_params(nets.value, jax.tree.map(np.array, trained["value"]))
        self.state = self.initial_state(placed, rules, c.seed)

    # --- programs

    def sampling(self, temperature: float) -> Sampling:
        """How responses are drawn at `temperature`."""
        c = self.config
        stop = self.tokenizer.eos_id if c.stop_token == "eos" else c.stop_token_id
        return Sampling(
            max_new_tokens=c.response_length,
            temperature=temperature,
            top_k=c.top_k,
            top_p=c.top_p,
            min_p=c.min_p,
            repetition_penalty=c.repetition_penalty,
            stop_id=stop,
            fill_id=self.tokenizer.eos_id,
        )

    def _compile(self):
        c = self.config
        nets = self.nets
        dtype = jnp.dtype(c.dtype)

        def rollout(policy, batch, seed, step, temperature):
            key = jax.random.fold_in(self.key(seed, step), 0)
            sampling = self.sampling(temperature)

            def some(part):
                prompts, rows = part
                return generate(nets.policy, policy, prompts, key, sampling, rows=rows, dtype=dtype)

            rows = jnp.arange(batch.lengths.shape[0])
            return in_chunks(some, (batch, rows), c.rollout_batch_size)

        def score(params, rollout):
            return in_chunks(
                lambda part: reward.score_rollout(self.reward_model, params, part, dtype=dtype),
                rollout,
                c.rollout_batch_size,
            )

        def experience(params, ref, rollout, scores, kl_coef):
            return ppo.make_experience(nets, params, ref, rollout, scores, kl_coef, c, self.tokenizer.eos_id)

        def update(state, experience, kl):
            key = jax.random.fold_in(self.key(state.seed, state.step), 1)
            b = experience.lengths.shape[0]
            shuffles = ppo.permutations(key, c.num_ppo_epochs, b)
            rate = self.rate(state.step)
            state, metrics = ppo.update(nets, self.optimizer, state, experience, shuffles, rate, c)
            return ppo.control_kl(state, kl, c, b), {**metrics, **self.clock_metrics(state, rate)}

        def kl_of(params, ref, rollout):
            return in_chunks(
                lambda part: forward.sequence_kl(nets, params, ref, part, c), rollout, c.rollout_batch_size
            )

        self._rollout = jax.jit(rollout, static_argnums=4)
        self._kl = jax.jit(kl_of)
        self._score = jax.jit(score)
        self._experience = jax.jit(experience)
        self._update = jax.jit(update, donate_argnums=0, out_shardings=(self.state_shardings(), None))

    # --- an update

    def train_step(self, state, step):
        """Prompts, rollout, scores, experience, update; seconds of each."""
        clock = Clock()
        prompts = self.train_data.batch(self.config.seed, step, self.config.batch_size)
        batch = self.place_batch(PromptBatch(prompts.tokens, prompts.lengths, prompts.rows))
        rollout = clock.wait(
            "generate", self._rollout(state.params["policy"], batch, state.seed, state.step, self.config.temperature)
        )
        scores = clock.wait("score", self.score(rollout, self.train_data, prompts.rows))
        experience, found = clock.wait(
            "experience", self._experience(state.params, self.ref_params, rollout, scores, state.kl_coef)
        )
        state, metrics = clock.wait("update", self._update(state, experience, found["objective/kl"]))
        return state, {**found, **metrics}, clock.seconds

    def score(self, rollout, source, rows):
        """Scores [B]: the reward model's, plus those of the reward functions on the host."""
        scores = 0.0
        if self.reward_model is not None:
            scores = self._score(self.reward_params, rollout)
        if not self.reward_funcs:
            return scores
        response, lengths = jax.device_get((rollout.response, rollout.lengths))
        ids = rewards.completion_ids(response, lengths)
        texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        found = rewards.call(self.reward_funcs, source.texts(rows), texts, ids, source.columns(rows))
        return scores + self.place_batch(found)

    # --- looking at it

    def complete(self, params, source, limit: int, temperature: float) -> dict:
        """Responses of a policy to the first `limit` prompts of `source`, in order.

        Returns:
          {"prompts", "completions", "columns": lists; "lengths", "ended", "scores", "kl": numpy [N]}
        """
        params = {"policy": params}
        # Whole rollout batches: they divide into chunks and over the devices as those of training do.
        part = self.config.rollout_batch_size or sharding.row_shards(self.mesh)
        size = min(self.config.batch_size, -(-limit // part) * part)
        parts = []
        for start in range(0, limit, size):
            real = min(size, limit - start)
            prompts = source.in_order(start, size)
            batch, first = self.place_batch(
                (PromptBatch(prompts.tokens, prompts.lengths, prompts.rows), np.int32(start))
            )
            rollout = self._rollout(params["policy"], batch, self._eval_seed, first, temperature)
            scores = self.score(rollout, source, prompts.rows)
            found = (
                rollout.response,
                rollout.lengths,
                rollout.ended,
                scores,
                self._kl(params, self.ref_params, rollout),
            )
            host = jax.device_get(found)
            parts.append([x[:real] for x in (*host, prompts.rows)])
        response, lengths, ended, scores, kl, rows = (np.concatenate(x) for x in zip(*parts))
        ids = rewards.completion_ids(response, lengths)
        return {
            "prompts": source.texts(rows),
            "completions": [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids],
            "columns": source.columns(rows),
            "lengths": lengths,
            "ended": ended,
            "scores": scores,
            "kl": kl,
        }

    def evaluate(self, state):
        """Score, KL to the reference, length and eos rate on the evaluation prompts, at the training temperature."""
        if self.eval_prompts is None:
            return {}
        policy = state.params["policy"]
        found = self.complete(policy, self.eval_prompts, len(self.eval_prompts), self.config.temperature)
        return {
            "eval/scores": float(np.mean(found["scores"])),
            "eval/scores_se": float(np.std(found["scores"], ddof=1) / np.sqrt(len(found["scores"]))),
            "eval/kl": float(np.mean(found["kl"])),
            "eval/response_length": float(np.mean(found["lengths"])),
            "eval/eos_rate": float(np.mean(found["ended"])),
        }

    def samples(self, state):
        """The table of TRL's generate_completions: one batch of evaluation prompts, nearly greedy (T = 0.01)."""
        source = self.eval_prompts if self.eval_prompts is not None else self.train_data
        limit = min(len(source), self.config.batch_size, 64)
        found = self.complete(state.params["policy"], source, limit, 0.01)
        return [
            {"query": query, "model response": text, "score": float(score), "length": int(length), "ended": bool(ended)}
            for query, text, score, length, ended in zip(
                found["prompts"], found["completions"], found["scores"], found["lengths"], found["ended"]
            )
        ]

    def export(self, state, folder):
        """policy/ and value/ as Hugging Face checkpoints with the tokenizer."""
        ids = {"pad_token_id": self.tokenizer.pad_id, "eos_token_id": self.tokenizer.eos_id}
        paths = {"policy": os.path.join(folder, "policy"), "value": os.path.join(folder, "value")}
        policy = sharding.fetch(state.params["policy"])
        if self.nets.value is None:
            value_model, value = self.nets.policy, {"backbone": policy["backbone"], "score": policy["score"]}
        else:
            value_model, value = self.nets.value, sharding.fetch(state.params["value"])
        hf.save(paths["policy"], self.nets.policy, policy, kind="causal", extra_config=ids)
        hf.save(paths["value"], value_model, value, kind="scalar", extra_config=ids)
        for path in paths.values():
            data.save_tokenizer(self.tokenizer, path)
        return paths


class Clock:
    """Seconds of each phase: waits for its results, so that a phase pays for its own work."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def wait(self, phase: str, result):
        """Blocks on `result`, books the time since the last call under `phase`, hands the result on."""
        result = jax.block_until_ready(result)
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
        return result

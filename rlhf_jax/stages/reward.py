"""The reward-model stage."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data, sharding
from rlhf_jax.arithmetic import batch_arithmetic
from rlhf_jax.models import hf
from rlhf_jax.stages import base
from rlhf_jax.trainers import reward


class RewardStage(base.Stage):
    """Trains a scalar head and its backbone on preference pairs."""

    name = "reward"
    progress = ("loss", "accuracy", "eval/accuracy", "margin", "learning_rate")

    def __init__(self, config, *, train_dataset=None, eval_dataset=None, optimizer=None):
        super().__init__(config, optimizer=optimizer)
        source = config.model_name_or_path
        if config.scratch_model:
            self.tokenizer = base.open_tokenizer(config, None, None)
            self.model = base.scratch_model(config, self.tokenizer.vocab_size, config.max_length)
        else:
            self.model = hf.load_model(source, revision=config.model_revision)
            base.check_context(self.model, config.max_length, "--max_length", source)
            self.tokenizer = base.open_tokenizer(config, source, self.model.config.vocab_size)
        self.train_data = data.load_pairs(config, self.tokenizer, train_dataset)
        self.eval_data = data.load_pairs(config, self.tokenizer, eval_dataset, evaluation=True)
        self.normalizing = data.load_normalizing(config, self.tokenizer)
        self.report = [str(self.train_data.report)]
        self.total_steps = batch_arithmetic(config, self.rows).updates
        if config.scratch_model:
            params = self.model.init(jax.random.key(config.seed), heads=("scalar",))
        else:
            _, params = hf.load(source, kind="backbone", revision=config.model_revision)
        params = base.with_scalar_head(params, self.model.config.hidden_size, config.seed, config.score_init_std)
        self.state = self.initial_state(
            {"model": self.place_params(self.model, params)}, self.model.param_rules, config.seed
        )
        self._update = jax.jit(self._pure_update, donate_argnums=0, out_shardings=(self.state_shardings(), None))
        dtype = jnp.dtype(config.dtype)
        self._pairs = jax.jit(lambda params, batch: reward.pair_scores(self.model, params, batch, dtype=dtype))
        self._texts = jax.jit(
            lambda params, tokens, lengths: reward.score_texts(self.model, params, tokens, lengths, dtype=dtype)
        )

    def _pure_update(self, state, batch):
        rate = self.rate(state.step)
        key = self.key(state.seed, state.step)
        state, metrics = reward.update(self.model, self.optimizer, state, batch, key, rate, self.config)
        return state, {**metrics, **self.clock_metrics(state, rate)}

    def train_step(self, state, step):
        """One batch of pairs."""
        batch = self.train_data.batch(self.config.seed, step, self.config.batch_size)
        state, metrics = self._update(state, self.place_batch(batch))
        return state, metrics, {}

    def _accuracy(self, params, pairs) -> dict[str, float]:
        chosen, rejected = [], []
        part = sharding.row_shards(self.mesh)
        size = min(self.config.batch_size, -(-max(8, len(pairs)) // part) * part)
        for start in range(0, len(pairs), size):
            real = min(size, len(pairs) - start)
            c, r = jax.device_get(self._pairs(params, self.place_batch(pairs.in_order(start, size))))
            chosen.append(c[:real])
            rejected.append(r[:real])
        chosen, rejected = np.concatenate(chosen), np.concatenate(rejected)
        margin = chosen - rejected
        return {
            "accuracy": float(np.mean(margin > 0)),
            "margin": float(np.mean(margin)),
            "loss": float(np.mean(np.logaddexp(0.0, -margin))),
            "mean_reward": float(np.mean(np.concatenate([chosen, rejected]))),
            "min_reward": float(min(chosen.min(), rejected.min())),
            "max_reward": float(max(chosen.max(), rejected.max())),
        }

    def evaluate(self, state):
        """Accuracy, margin, loss and mean reward on the held-out pairs."""
        if self.eval_data is None:
            return {}
        found = self._accuracy(state.params["model"], self.eval_data)
        return {f"eval/{name}": value for name, value in found.items()}

    def final_metrics(self, state):
        """Accuracy on the training pairs: how well the model fits them."""
        return {
            f"train/{name}": value for name, value in self._accuracy(state.params["model"], self.train_data).items()
        }

    def _offset(self, params) -> float:
        """Mean score of the demonstrations, which the exported model takes off."""
        scores = []
        part = sharding.row_shards(self.mesh)
        size = min(self.config.batch_size, -(-max(8, len(self.normalizing)) // part) * part)
        for start in range(0, len(self.normalizing), size):
            batch = self.normalizing.in_order(start, size)
            real = min(size, len(self.normalizing) - start)
            placed = self.place_batch((batch.tokens, batch.lengths))
            scores.append(jax.device_get(self._texts(params, *placed))[:real])
        return float(np.mean(np.concatenate(scores)))

    def export(self, state, folder):
        """reward_model/: GPTNeoXForSequenceClassification with its tokenizer, the offset folded in."""
        path = os.path.join(folder, "reward_model")
        params = sharding.fetch(state.params["model"])
        if self.normalizing is not None:
            params = jax.device_get(reward.subtract_offset(params, self._offset(state.params["model"])))
        ids = {"pad_token_id": self.tokenizer.pad_id, "eos_token_id": self.tokenizer.eos_id}
        hf.save(path, self.model, params, kind="scalar", extra_config=ids)
        data.save_tokenizer(self.tokenizer, path)
        return {"reward_model": path}

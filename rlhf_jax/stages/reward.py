"""The reward-model stage."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.algorithms import reward_model
from rlhf_jax.metrics import calibration
from rlhf_jax.parallel import sharding
from rlhf_jax.stages.supervised import SupervisedStage


class RewardStage(SupervisedStage):
    """Trains a scalar head and its backbone on preference pairs."""

    name = "reward"
    progress = ("loss", "accuracy", "eval/accuracy", "margin", "learning_rate")
    head = "scalar"

    def _load_data(self, train_dataset, eval_dataset):
        self.train_data = data.load_pairs(self.config, self.tokenizer, train_dataset)
        self.eval_sets = data.load_eval_pairs(self.config, self.tokenizer, eval_dataset)
        self.normalizing = data.load_normalization_data(self.config, self.tokenizer)

    def _starting_params(self):
        backbone = self._load_params("backbone")["backbone"]
        trained = self._adapt({"backbone": backbone})
        return {**trained, "score": self.new_score(self.model, self.config.score_init_std)}

    def _compile(self):
        dtype = jnp.dtype(self.config.dtype)

        def pairs(beneath, params, batch):
            return reward_model.pair_scores(self.model, self.model.with_lora(beneath, params), batch, dtype=dtype)

        def texts(beneath, params, tokens, lengths):
            whole = self.model.with_lora(beneath, params)
            return reward_model.score_texts(self.model, whole, tokens, lengths, dtype=dtype)

        self._pairs, self._texts = jax.jit(pairs), jax.jit(texts)

    def learn(self, state, beneath, batch, key, rate):
        """`reward.update`."""
        return reward_model.update(self.model, self.optimizer, state, batch, key, rate, self.config, beneath)

    def shown(self, batch, row):
        """{"chosen", "rejected", "margin"}: both texts with their prompt."""
        texts = {
            "chosen": batch.chosen_tokens[row, : batch.chosen_lengths[row]],
            "rejected": batch.rejected_tokens[row, : batch.rejected_lengths[row]],
        }
        decoded = {name: self.tokenizer.decode(tokens) for name, tokens in texts.items()}
        return {**decoded, "margin": float(batch.margin[row])}

    def measure(self, params, source):
        """Accuracy, margin, loss and rewards on a set of pairs."""
        parts = []
        for batch, real in self.in_batches(source):
            scores = sharding.fetch(self._pairs(self.beneath, params, batch))
            parts.append([x[:real] for x in scores])
        chosen, rejected = map(np.concatenate, zip(*parts, strict=True))
        margin = self.margins = chosen - rejected
        return {
            "accuracy": float(np.mean(margin > 0)),
            "margin": float(np.mean(margin)),
            "calibration_error": calibration.calibration_error(calibration.reliability(margin)),
            "loss": float(np.mean(np.logaddexp(0.0, -margin))),
            "mean_reward": float(np.mean(np.concatenate([chosen, rejected]))),
            "min_reward": float(min(chosen.min(), rejected.min())),
            "max_reward": float(max(chosen.max(), rejected.max())),
        }

    def final_metrics(self, state):
        """The same on the training pairs: how well the model fits them."""
        values = self.measure(state.params["model"], self.train_data)
        return {f"train/{name}": value for name, value in values.items()}

    def _offset(self, params) -> float:
        """Mean score of the demonstrations, which the exported model takes off."""
        scores = []
        for batch, real in self.in_batches(self.normalizing):
            scores.append(sharding.fetch(self._texts(self.beneath, params, batch.tokens, batch.lengths))[:real])
        return float(np.mean(np.concatenate(scores)))

    def export(self, state, folder):
        """reward_model/: GPTNeoXForSequenceClassification with its tokenizer, the offset folded in."""
        params, path = state.params["model"], os.path.join(folder, "reward_model")
        if self.normalizing is not None:
            params = reward_model.subtract_offset(params, self._offset(params))
        if self.base is not None:
            return self._write_adapted(folder, "reward_model", params, "scalar")
        self.save(path, self.model, params, "scalar")
        return {"reward_model": path}

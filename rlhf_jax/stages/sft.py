"""The supervised stage."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.algorithms import sft
from rlhf_jax.stages.supervised import SupervisedStage, eval_name


class SFTStage(SupervisedStage):
    """Fine-tunes a causal model on demonstrations."""

    name = "sft"
    progress = ("loss", "eval/loss", "learning_rate", "grad_norm")
    head = "causal"

    def _load_data(self, train_dataset, eval_dataset):
        self.train_data = data.load_demonstrations(self.config, self.tokenizer, train_dataset)
        self.eval_sets = data.load_eval_demonstrations(self.config, self.tokenizer, eval_dataset)
        self.watched = eval_name(next(iter(self.eval_sets), ""), "loss")

    def _starting_params(self):
        return self._adapt(self._load_params("causal"))

    def _compile(self):
        def evaluate(beneath, params, batch):
            return sft.evaluate(self.model, self.model.with_lora(beneath, params), batch, self.config)

        self._evaluate = jax.jit(evaluate)

    def learn(self, state, beneath, batch, key, rate):
        """`sft.update`."""
        return sft.update(self.model, self.optimizer, state, batch, key, rate, self.config, beneath)

    def shown(self, batch, row):
        """{"text"}: prompt and completion."""
        return {"text": self.tokenizer.decode(batch.tokens[row, : batch.lengths[row]])}

    def measure(self, params, source):
        """Mean loss over the tokens of a data set."""
        total = count = jnp.float32(0)
        for batch, _ in self.in_batches(source):
            loss, tokens = self._evaluate(self.beneath, params, batch)
            total, count = total + loss, count + tokens
        loss = float(total) / max(float(count), 1.0)
        return {"loss": loss, "perplexity": float(np.exp(min(loss, 50.0)))}

    def export(self, state, folder):
        """policy/: the model with its tokenizer, as Hugging Face wants it."""
        path, params = os.path.join(folder, "policy"), state.params["model"]
        if self.base is not None:
            return self._write_adapted(folder, "policy", params, "causal")
        self.save(path, self.model, params, "causal")
        return {"policy": path}

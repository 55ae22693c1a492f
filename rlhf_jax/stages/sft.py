"""The supervised stage."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.stages.supervised import SupervisedStage, eval_name
from rlhf_jax.trainers import sft


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
        return self._load_params("causal")

    def _compile(self):
        self._evaluate = jax.jit(functools.partial(sft.evaluate, self.model, config=self.config))

    def learn(self, state, batch, key, rate):
        """`sft.update`."""
        return sft.update(self.model, self.optimizer, state, batch, key, rate, self.config)

    def shown(self, batch, row):
        """{"text"}: prompt and completion."""
        return {"text": self.tokenizer.decode(batch.tokens[row, : batch.lengths[row]])}

    def measure(self, params, source):
        """Mean loss over the tokens of a data set."""
        total = count = jnp.float32(0)
        for batch, _ in self.in_batches(source):
            loss, tokens = self._evaluate(params, batch)
            total, count = total + loss, count + tokens
        loss = float(total) / max(float(count), 1.0)
        return {"loss": loss, "perplexity": float(np.exp(min(loss, 50.0)))}

    def export(self, state, folder):
        """policy/: the model with its tokenizer, as Hugging Face wants it."""
        path = os.path.join(folder, "policy")
        self.save(path, self.model, state.params["model"], "causal")
        return {"policy": path}

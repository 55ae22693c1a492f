"""The supervised stage."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data, sharding
from rlhf_jax.arithmetic import batch_arithmetic
from rlhf_jax.models import hf
from rlhf_jax.stages import base
from rlhf_jax.trainers import sft


class SFTStage(base.Stage):
    """Fine-tunes a causal model on demonstrations."""

    name = "sft"
    progress = ("loss", "eval/loss", "learning_rate", "grad_norm")
    watched = "eval/loss"

    def __init__(self, config, *, train_dataset=None, eval_dataset=None, optimizer=None):
        super().__init__(config, optimizer=optimizer)
        source = config.model_name_or_path
        if config.scratch_model:
            self.tokenizer = base.open_tokenizer(config, None, None)
            self.model = base.scratch_model(config, self.tokenizer.vocab_size, config.max_length)
            params = None
        else:
            self.model = hf.load_model(source, revision=config.model_revision)
            base.check_context(self.model, config.max_length, "--max_length", source)
            self.tokenizer = base.open_tokenizer(config, source, self.model.config.vocab_size)
        self.train_data = data.load_demonstrations(config, self.tokenizer, train_dataset)
        self.eval_data = data.load_demonstrations(config, self.tokenizer, eval_dataset, evaluation=True)
        self.report = [str(self.train_data.report)]
        self.total_steps = batch_arithmetic(config, self.rows).updates
        if config.scratch_model:
            params = self.model.init(jax.random.key(config.seed), heads=("causal",))
        else:
            _, params = hf.load(source, kind="causal", revision=config.model_revision)
        self.state = self.initial_state(
            {"model": self.place_params(self.model, params)}, self.model.param_rules, config.seed
        )
        self._update = jax.jit(self._pure_update, donate_argnums=0, out_shardings=(self.state_shardings(), None))
        self._evaluate = jax.jit(functools.partial(sft.evaluate, self.model, config=config))

    def _pure_update(self, state, batch):
        rate = self.rate(state.step)
        key = self.key(state.seed, state.step)
        state, metrics = sft.update(self.model, self.optimizer, state, batch, key, rate, self.config)
        return state, {**metrics, **self.clock_metrics(state, rate)}

    def train_step(self, state, step):
        """One batch of demonstrations."""
        batch = self.train_data.batch(self.config.seed, step, self.config.batch_size)
        state, metrics = self._update(state, self.place_batch(batch))
        return state, metrics, {}

    def evaluate(self, state):
        """Mean loss over the tokens of the evaluation split."""
        if self.eval_data is None:
            return {}
        total = count = jnp.float32(0)
        part = sharding.row_shards(self.mesh)
        size = min(self.config.batch_size, -(-max(8, len(self.eval_data)) // part) * part)
        for start in range(0, len(self.eval_data), size):
            batch = self.eval_data.in_order(start, size)
            loss, tokens = self._evaluate(state.params["model"], self.place_batch(batch))
            total, count = total + loss, count + tokens
        loss = float(total) / max(float(count), 1.0)
        return {"eval/loss": loss, "eval/perplexity": float(np.exp(min(loss, 50.0)))}

    def export(self, state, folder):
        """policy/: the model with its tokenizer, as Hugging Face wants it."""
        path = os.path.join(folder, "policy")
        ids = {"pad_token_id": self.tokenizer.pad_id, "eos_token_id": self.tokenizer.eos_id}
        hf.save(path, self.model, sharding.fetch(state.params["model"]), kind="causal", extra_config=ids)
        data.save_tokenizer(self.tokenizer, path)
        return {"policy": path}

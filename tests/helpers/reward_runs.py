"""Tiny runs for the tests of rewards: their configs, what they left, and what moved in them."""

import json
import os

import jax
import numpy as np

from rlhf_jax.config import PPOConfig, RLOOConfig
from rlhf_jax.runtime.callbacks import Callback
from tests.helpers.runs import lines

B, G, T = 8, 4, 8
SHARED = {
    "sft_model_path": None,
    "scratch_model": "2x32x2",
    "tokenizer_name_or_path": "synthetic",
    "reward_model_path": None,
    "dataset_name": "synthetic",
    "dataset_test_split": None,
    "max_train_samples": 64,
    "query_length": 44,
    "length_buckets": (44,),
    "response_length": T,
    "batch_size": B,
    "total_episodes": 3 * B,
    "learning_rate": 1e-3,
    "save_steps": 0,
    "report_to": (),
    "num_sample_generations": 0,
    "log_completions": True,
    "num_completions_to_print": 1,
}


def rloo(folder, **options):
    """The config of an RLOO run of 3 updates in `folder`."""
    # Without a KL penalty the advantages of a table are the leave-one-out of its scores.
    return RLOOConfig(run_dir=str(folder), **{**SHARED, "num_generations": G, "beta": 0.0, **options})


def ppo(folder, **options):
    """The same for PPO."""
    return PPOConfig(run_dir=str(folder), **{**SHARED, "num_ppo_epochs": 2, **options})


def bytes_of(folder, name="metrics.jsonl"):
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


def table(folder, step):
    """{column: values} of an update's training responses."""
    rows = [json.loads(line) for line in bytes_of(folder, f"completions/training_{step}.jsonl").splitlines()]
    return {name: [float("nan") if row[name] == "NaN" else row[name] for row in rows] for name in rows[0]}


def leave_one_out(scores):
    """By hand: minus the mean of the others of the group; NaN is nobody's baseline and has advantage 0."""
    out = np.zeros(B)
    for i in np.flatnonzero(~np.isnan(scores)):
        others = [scores[j] for j in range(B) if j // G == i // G and j != i and not np.isnan(scores[j])]
        out[i] = scores[i] - np.mean(others) if others else 0.0
    return out


def assert_learned_from(result, scores_of):
    """The advantages of every update are those of the scores that `scores_of` makes of its table."""
    for step in (1, 2, 3):
        rows = table(result.run_dir, step)
        np.testing.assert_allclose(rows["advantage"], leave_one_out(scores_of(rows)), rtol=1e-4, atol=1e-5)


def judge(prompts, completions, **_):
    return [0.1 * len(c.split()) + 0.5 * len(set(c.split()) & set(p.split())) for p, c in zip(prompts, completions)]


def means(result, name):
    return [line[f"rewards/{name}/mean"] for line in lines(result.run_dir)]


def copied(params):
    return jax.tree.map(np.array, params)  # not a view: the next update gives the buffers away


class Watch(Callback):
    """Keeps the params before the first update and after each; `before` is told the step that comes."""

    def __init__(self, before=lambda step: None):
        self.before, self.params = before, []

    def on_train_begin(self, stage, control):
        learn = stage.train_step
        self.params.append(copied(stage.state.params))

        def train_step(state, step, *tick):
            self.before(step)
            state, *others = learn(state, step, *tick)
            self.params.append(copied(state.params))
            return state, *others

        stage.train_step = train_step

    @property
    def moved(self):
        """For each update, whether any bit of the params changed in it."""
        same = lambda a, b: jax.tree.all(jax.tree.map(np.array_equal, a, b))  # noqa: E731
        return [not same(a, b) for a, b in zip(self.params, self.params[1:])]

"""Small runs on a file of prompts and a file of a reward function, for what differs between two of them."""

import json

from rlhf_jax import train
from rlhf_jax.config import GRPOConfig, PPOConfig
from tests.helpers.runs import RLOO_OPTIONS

WORDS = ("tom", "ann", "found", "a", "key", "the", "dog", "lost", "house", "garden")
REWARD = """
def wordiness(completions, **_):
    return [float(len(text.split())){} for text in completions]
"""


def prepare(folder, *, changed_row=None, reward=""):
    """Writes prompts.jsonl and wordiness.py. `changed_row`: a row with another prompt; `reward`: added to each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{WORDS[i % 10]} {WORDS[i // 10]} {WORDS[i * 7 % 10]}" for i in range(32)]
    if changed_row is not None:
        rows[changed_row] = "the garden the garden"
    text = "".join(json.dumps({"prompt": row}) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(text)
    (folder / "wordiness.py").write_text(REWARD.replace("{}", reward))
    return folder


def config(folder, *, kind=GRPOConfig, **options):
    """Of seven updates, with checkpoints after updates 3 and 6."""
    fixed = {
        **RLOO_OPTIONS,
        "dataset_name": str(folder / "prompts.jsonl"),
        "reward_funcs": (f"{folder / 'wordiness.py'}:wordiness",),
        "total_episodes": 56,
        "save_steps": 3,
        "logging_steps": 100,
        **({} if kind is PPOConfig else {"num_generations": 2}),
        **options,
    }
    return kind(run_dir=str(folder / "run"), **fixed)


def run(folder, *, changed_row=None, reward="", **options):
    """A finished run in FOLDER/run; its folder."""
    prepare(folder, changed_row=changed_row, reward=reward)
    return train.run(config(folder, **options)).run_dir

"""Run folders for tests of the report: written as a run writes them, their numbers made up."""

import dataclasses
import json
import math
import os
import pathlib
import random

from rlhf_jax.config import PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.config import files as config_files
from rlhf_jax.metrics import calibration
from rlhf_jax.runtime.run_folder import RunFolder
from rlhf_jax.train import saved_options
from rlhf_jax.utils.strict_json import json_text

HOSTILE = (
    '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">&amp;\u202eabc\x1b[31m\ud800 "\'`'
)


def lines(path, rows):
    with open(path, "w", encoding="utf-8") as file:
        file.write("".join(json_text(row) + "\n" for row in rows))


def policy_metrics(step, total, seed, algorithm="ppo"):
    """An update's, of a run that learns."""
    noise, done = random.Random(1000 * seed + step), step / total
    score = 2 * (1 - math.exp(-4 * done)) - 0.4 + noise.gauss(0, 0.12) + 0.1 * seed
    kl = 12 * done**0.8 + abs(noise.gauss(0, 0.3))
    found = {
        "step": step,
        "episode": 64 * step,
        "epoch": step / total,
        "num_tokens": 6400 * step,
        "objective/scores": score,
        "objective/scores_std": 0.9 - 0.3 * done,
        "objective/kl": kl,
        "objective/kl_coef": 0.05,
        "objective/non_score_reward": -0.05 * kl,
        "objective/rlhf_reward": score - 0.05 * kl,
        "objective/entropy": 60 - 20 * done + noise.gauss(0, 1),
        "policy/entropy_avg": 4.2 - 1.8 * done + noise.gauss(0, 0.05),
        "policy/approxkl_avg": 0.003 * math.exp(noise.gauss(0, 0.5)),
        "policy/clipfrac_avg": 0.06 + 0.02 * noise.random(),
        "policy/first_approxkl": 1e-13 * noise.random(),
        "val/first_ratio_error": 1e-6 * (0.5 + noise.random()),
        "val/ratio": 1 + noise.gauss(0, 0.004),
        "val/ratio_var": 1e-5 * noise.random(),
        "val/response_length": 28 + 14 * done + noise.gauss(0, 1),
        "val/num_eos_tokens": round(64 * (0.7 + 0.25 * done)),
        "completions/mean_length": 28 + 14 * done,
        "completions/min_length": 2.0,
        "completions/max_length": 53.0,
        "completions/clipped_ratio": max(0.3 - 0.25 * done + noise.gauss(0, 0.02), 0),
        "loss/policy_avg": noise.gauss(0, 0.02),
        "rewards/reward_model/mean": score + 0.1,
        "rewards/reward_model/std": 0.9,
        "grad_norm": math.exp(noise.gauss(0, 0.3)),
        "lr": 3e-6 * (1 - done),
    }
    if algorithm == "ppo":
        found |= {"loss/value_avg": 0.6 * math.exp(-3 * done) + 0.1, "val/clipfrac_avg": 0.1}
        found |= {"val/explained_variance": 0.8 - 1.2 * math.exp(-5 * done) + noise.gauss(0, 0.03)}
    if step % max(total // 10, 1) == 0:
        found |= {"eval/scores": score - 0.1, "eval/scores_se": 0.05, "eval/kl": kl, "eval/eos_rate": 0.9}
        found |= {"eval/response_length": 28 + 14 * done, "eval_objective/kl": kl}
    return found


def timings(step, seed=0):
    noise = random.Random(step + 7 * seed)
    found = {"time/generate": 2.1, "time/score": 0.4, "time/experience": 0.6, "time/update": 3.2, "time/compile": 0.0}
    found = {name: value * (1 + 0.1 * noise.random()) for name, value in found.items()}
    found["time/compile"] = 21.0 if step == 1 else 0.0
    whole = sum(found.values())
    return {"step": step, "wall_time": 1.7e9 + 7 * step, "step_time": whole, "time/step": whole + 0.2, **found} | {
        "eps": 64 / whole,
        "memory/peak_rss_mib": 1400.0 + min(step, 20),
    }


WORDS = (
    "the a cat dog told my friend that we should not have gone to paris without lena 日本 héllo 🙂 sorry money".split()
)


def samples(step, rows, seed=0, advantages=True):
    """(rows, tokens) of an update: the same prompts at each."""
    found, tokens = [], []
    for row in range(rows):
        noise = random.Random(100 * step + row + 7919 * seed)
        words = [" " + noise.choice(WORDS) for _ in range(noise.randint(3, 30))]
        ended = noise.random() < 0.8
        prompt = f"SUBREDDIT: r/advice\n\nTITLE: question {row}\n\nPOST: " + " ".join(WORDS[row % 7 :]) + "\n\nTL;DR:"
        of_row = {"query": prompt, "model response": "".join(words), "score": noise.gauss(step / 100, 1)}
        pieces = [*words, "<|endoftext|>"] if ended else words
        found.append({**of_row, "length": len(pieces), "ended": ended})
        tokens.append({"tokens": pieces, "kl": [round(noise.gauss(0.1, 0.4), 4) for _ in pieces]})
        if advantages:
            tokens[-1]["advantages"] = [round(noise.gauss(0, 1), 4) for _ in pieces]
    return found, tokens


def make(folder, config, updates=40, total=None, seed=0, sample_rows=12, finished=True, recipe=None, done=None):
    """A folder of a run of PPO or RLOO, of `updates` of `total`; gives its RunFolder."""
    total = updates if total is None else total
    algorithm = "ppo" if isinstance(config, PPOConfig) else "rloo"
    config = dataclasses.replace(config, run_dir=str(folder), seed=seed, batch_size=64, total_episodes=64 * total)
    run = RunFolder(str(folder))
    os.makedirs(folder)
    (pathlib.Path(folder) / "config.json").write_text(json_text({"stage": algorithm, **saved_options(config)}))
    if recipe is not None:
        run.write_recipe(
            recipe, saved_options(dataclasses.replace(config, kl_coef=0.05) if algorithm == "ppo" else config)
        )
    lines(run.metrics, [policy_metrics(step, total, seed, algorithm) for step in range(1, updates + 1)])
    lines(run.timings, [timings(step, seed) for step in range(1, updates + 1)])
    for step in range(max(updates // 5, 1), updates + 1, max(updates // 5, 1)):
        rows, tokens = samples(step, sample_rows, seed, algorithm == "ppo")
        run.write_completions(step, rows, "samples", tokens)
    if finished:
        run.finish(updates, {"objective/scores": 1.0}, {})
    return run


def make_rloo(folder, **options):
    """RLOO with rows of its training batches, whose advantages are of whole responses."""
    run = make(folder, RLOOConfig(), **options)
    rows, tokens = samples(5, 8, advantages=False)
    rows = [
        {"prompt": r["query"], "completion": r["model response"], "brevity": 1.5, "advantage": r["score"]} for r in rows
    ]
    run.write_completions(5, rows, "training", tokens)
    return run


def make_reward(folder, updates=30, calibrated=True):
    """A folder of a reward model's run."""
    run = RunFolder(str(folder))
    os.makedirs(folder)
    config = RewardConfig(run_dir=str(folder), max_steps=updates)
    (pathlib.Path(folder) / "config.json").write_text(config_files.to_json(config))
    found = []
    for step in range(1, updates + 1):
        noise, done = random.Random(step), step / updates
        line = {
            "step": step,
            "loss": 0.69 - 0.3 * done,
            "accuracy": 0.5 + 0.3 * done + noise.gauss(0, 0.02),
            "margin": done,
        }
        line |= {"mean_reward": 0.1, "min_reward": -2.0, "max_reward": 2.0, "learning_rate": 1e-4, "grad_norm": 1.0}
        if step % 10 == 0:
            line |= {"eval/accuracy": 0.5 + 0.25 * done, "eval/loss": 0.6, "eval/margin": done}
            if calibrated:
                margins = [noise.gauss(2 * done, 2.5) for _ in range(400)]
                run.write_calibration(
                    step, [{"set": "", **row} for row in calibration.reliability(margins) if row["pairs"]]
                )
        found.append(line)
    lines(run.metrics, found)
    lines(run.timings, [timings(step) for step in range(1, updates + 1)])
    run.finish(updates, {}, {})
    return run


def make_sft(folder, updates=20):
    """A folder of an SFT run, which was stopped while it wrote a line."""
    run = RunFolder(str(folder))
    os.makedirs(folder)
    (pathlib.Path(folder) / "config.json").write_text(
        config_files.to_json(SFTConfig(run_dir=str(folder), max_steps=99))
    )
    lines(
        run.metrics,
        [{"step": s, "loss": 5 - s / 10, "learning_rate": 1e-3, "grad_norm": 1} for s in range(1, updates + 1)],
    )
    with open(run.metrics, "a") as file:
        file.write('{"step": 21, "lo')
    return run


def read_lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]

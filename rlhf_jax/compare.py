"""What a pipeline ends with: SFT against PPO on held-out prompts."""

from __future__ import annotations

import dataclasses
import os

from rlhf_jax import evaluate, folder, metrics
from rlhf_jax.config import Pipeline, stages_of
from rlhf_jax.data import synthetic
from rlhf_jax.models import hf
from rlhf_jax.stages import PPOStage


def after_pipeline(config: Pipeline) -> dict:
    """Samples both policies on the held-out prompts at the training temperature, prints and writes the comparison.

    The built-in task has a gold reward; there the win rate is by it, elsewhere by the reward model.

    Args:
      config: the resolved pipeline, its stages finished.

    Returns:
      What comparison.json holds: {"policies": [...], "samples": [...]}.
    """
    path = os.path.join(config.run_dir, "comparison.json")
    stage_config = dataclasses.replace(stages_of(config)["ppo"], dataset_train_split=_heldout(config))
    stage = PPOStage(stage_config)
    prompts = stage.eval_prompts if stage.eval_prompts is not None else stage.prompts
    _, trained = hf.load(os.path.join(config.run_dir, "ppo", "policy"), kind="causal")
    policies = {"SFT": stage.state.params["policy"], "PPO": stage.place_params(stage.nets.policy, trained)}
    found = {
        name: stage.complete(params, prompts, len(prompts), stage_config.temperature)
        for name, params in policies.items()
    }

    texts = found["SFT"]["prompts"]
    gold = {}
    if stage_config.dataset_name == "synthetic":
        gold = {name: synthetic.gold_reward(texts, answers["completions"]) for name, answers in found.items()}
    judged = gold or {name: answers["scores"] for name, answers in found.items()}
    rows = []
    if "completion" in found["SFT"]["columns"] and gold:
        references = found["SFT"]["columns"]["completion"]
        gold["demonstrations"] = synthetic.gold_reward(texts, references)
        rows.append(evaluate.summarize("demonstrations", gold=gold["demonstrations"]))
    for name, answers in found.items():
        rows.append(
            evaluate.summarize(
                name,
                gold=gold.get(name),
                score=answers["scores"],
                kl=answers["kl"],
                lengths=answers["lengths"],
                ended=answers["ended"],
                against=judged["SFT"] if name == "PPO" else None,
            )
        )
    samples = [
        {
            "post": texts[i],
            "responses": [
                {"name": name, "text": found[name]["completions"][i], "gold": float(judged[name][i])} for name in found
            ],
        }
        for i in range(min(3, len(texts)))
    ]
    print(f"\n{len(texts)} held-out prompts, temperature {stage_config.temperature}")
    print(evaluate.comparison_table(rows))
    print()
    print(evaluate.side_by_side(samples))
    report = {"policies": rows, "samples": samples}
    folder.write_atomically(path, metrics.json_text(report, indent=2) + "\n")
    print(f"\nwritten: {path}; the policy: {os.path.join(config.run_dir, 'ppo', 'policy')}")
    return report


def _heldout(config: Pipeline) -> str:
    # The stage's own training prompts are not needed here: the held-out split serves as both.
    return config.ppo.dataset_test_split or config.ppo.dataset_train_split

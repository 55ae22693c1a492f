"""What a pipeline ends with: SFT against the trained policy on held-out prompts."""

from __future__ import annotations

import os

from rlhf_jax import evaluate
from rlhf_jax.config import StageConfig
from rlhf_jax.data import synthetic
from rlhf_jax.parallel import multihost
from rlhf_jax.stages import open_stage


def after_pipeline(stages: dict[str, StageConfig]) -> dict:
    """Samples both policies on the held-out prompts at the training temperature, prints and writes the comparison.

    Every process must call it; the first one prints and writes.

    The built-in task has a gold reward; there the win rate is by it, elsewhere by the reward model.

    Args:
      stages: configs of the pipeline's finished stages by name, resolved; the last one trained the policy.

    Returns:
      {"rows", "samples", "gain", "gain_se"}: the table, three samples, and the mean gain with its standard error.
    """
    stage_name, config = list(stages.items())[-1]
    path = os.path.join(config.run_dir, "comparison.json")  # beside the policy that is compared
    stage, label = open_stage(config), stage_name.upper()
    prompts = stage.evaluator.held_out
    limit = min(len(prompts), config.max_eval_samples or len(prompts))
    trained = stage.weights.load(stage.opened.policy, os.path.join(config.run_dir, "policy"), "causal", None)
    policies = {"SFT": stage.state.params["policy"], label: trained}
    try:
        found = {
            name: stage.evaluator.complete(params, prompts, limit, config.temperature)
            for name, params in policies.items()
        }
    finally:
        stage.close()

    texts = found["SFT"]["prompts"]
    gold = {}
    if config.dataset_name == "synthetic":
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
                against=judged["SFT"] if name == label else None,
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
    what = "held-out prompts" if stage.eval_sets else "training prompts (there is no evaluation split)"
    gain, error = evaluate.paired_difference(judged[label], judged["SFT"])
    if multihost.is_main():
        print()
        evaluate.print_comparison(rows, samples, title=f"{limit} {what}, temperature {config.temperature}")
        by = "gold reward" if gold else "reward-model score"
        print(f"{label} - SFT in {by}, prompt by prompt: {gain:+.3f} ± {error:.3f}")
        evaluate.write_comparison(path, rows, samples, gain=gain, gain_se=error, judged_by=by)
        print(f"written: {path}; the policy: {os.path.join(config.run_dir, 'policy')}")
    return {"rows": rows, "samples": samples, "gain": gain, "gain_se": error}

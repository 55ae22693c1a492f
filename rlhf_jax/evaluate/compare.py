"""The comparison at the end of a pipeline: the policy before and after its last stage on held-out prompts."""

from __future__ import annotations

import os
from typing import Any

from rlhf_jax import evaluate
from rlhf_jax.config import StageConfig
from rlhf_jax.data import synthetic
from rlhf_jax.parallel import multihost
from rlhf_jax.runtime.run_folder import template_date
from rlhf_jax.stages import open_stage


def after_pipeline(stages: dict[str, StageConfig]) -> dict[str, Any]:
    """Samples both policies on the held-out prompts at the training temperature; prints and writes the comparison.

    The gain is in the gold reward on the built-in summaries, otherwise in the score. Without a reward model the table
    has each reward by name and the entropy. Every process must call this; the main process prints and writes.

    Args:
      stages: resolved configs of the pipeline's finished stages by name; the last one trained the policy. The policy
        before it is called SFT, or 'before' without that stage.

    Returns:
      {"rows", "samples", "gain", "gain_se"}: the table, three samples, and the mean gain with its standard error.
    """
    stage_name, config = list(stages.items())[-1]
    date = multihost.from_first(lambda: template_date(config.run_dir))
    stage, label = open_stage(config, template_date=date), stage_name.upper()
    before = "SFT" if "sft" in stages else "before"
    prompts = stage.evaluator.held_out
    limit = min(len(prompts), config.max_eval_samples or len(prompts))
    trained = stage.weights.load(stage.opened.policy, os.path.join(config.run_dir, "policy"), "causal", None)
    policies = {before: stage.state.params["policy"], label: trained}
    try:
        outputs = {
            name: stage.evaluator.complete(params, prompts, limit, config.temperature)
            for name, params in policies.items()
        }
    finally:
        stage.close()

    texts = outputs[before]["prompts"]
    gold = {}
    if config.dataset_name == "synthetic":
        gold = {name: synthetic.gold_reward(texts, output["completions"]) for name, output in outputs.items()}
    scores = gold or {name: output["scores"] for name, output in outputs.items()}
    by_name = config.reward_model_path is None
    rows = _rows(outputs, gold, by_name, opponent_scores={label: scores[before]})

    def response(name: str, output: dict[str, Any], i: int) -> dict[str, Any]:
        shown = {"name": name, "text": output["completions"][i], "gold": float(scores[name][i])}
        if by_name and not gold:
            shown["note"] = ", ".join(f"{reward} {values[i]:g}" for reward, values in output["rewards"].items())
        return shown

    samples = [
        {"post": texts[i], "responses": [response(name, output, i) for name, output in outputs.items()]}
        for i in range(min(3, len(texts)))
    ]
    gain, error = evaluate.paired_difference(scores[label], scores[before])
    if multihost.is_main():
        source = "held-out prompts" if stage.eval_sets else "training prompts (there is no evaluation split)"
        print()
        intervals = ", means with 95 % intervals" if by_name else ""
        title = f"{limit} {source}, temperature {config.temperature}{intervals}"
        evaluate.print_comparison(rows, samples, title=title)
        by = "gold reward" if gold else "score" if by_name else "reward-model score"
        print(f"{label} - {before} in {by}, mean over prompts: {gain:+.3f} ± {error:.3f}")
        path = os.path.join(config.run_dir, "comparison.json")  # with the policy of this stage
        evaluate.write_comparison(path, rows, samples, gain=gain, gain_se=error, judged_by=by)
        print(f"written: {path}; the policy: {os.path.join(config.run_dir, 'policy')}")
    return {"rows": rows, "samples": samples, "gain": gain, "gain_se": error}


def _rows(
    outputs: dict[str, dict[str, Any]], gold: dict[str, Any], by_name: bool, opponent_scores: dict[str, Any]
) -> list[dict]:
    """The rows of the table, starting with the gold reward of the demonstrations where it is known; `by_name`: with
    each reward and the entropy in place of the score."""
    rows = []
    first = next(iter(outputs.values()))
    if "completion" in first["columns"] and gold:
        demonstrations = synthetic.gold_reward(first["prompts"], first["columns"]["completion"])
        rows.append(evaluate.summarize("demonstrations", gold=demonstrations))
    for name, output in outputs.items():
        rows.append(
            evaluate.summarize(
                name,
                gold=gold.get(name),
                score=None if by_name else output["scores"],
                rewards=output["rewards"] if by_name else None,
                kl=output["kl"],
                lengths=output["lengths"],
                entropy=output["entropy"] if by_name else None,
                ended=output["ended"],
                against=opponent_scores.get(name),
            )
        )
    return rows

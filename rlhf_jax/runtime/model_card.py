"""The README.md (model card) of an exported model: its origin, options, metrics and citations."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import huggingface_hub
import numpy as np

from rlhf_jax import storage
from rlhf_jax.data.loading import BUILT_IN
from rlhf_jax.runtime.config_diff import may_change
from rlhf_jax.runtime.environment import versions
from rlhf_jax.storage import write_atomically
from rlhf_jax.utils.text import printable, redact_queries, short_number

_METHODS = {
    "sft": "supervised fine-tuning",
    "reward": "pairwise preference learning",
    "ppo": "PPO",
    "rloo": "RLOO",
    "grpo": "GRPO",
}
_BARS, _WIDTH = "▁▂▃▄▅▆▇█", 40
_ROLES = {"policy": "Policy", "value": "Value model", "reward_model": "Reward model"}

_CITATIONS = {
    "ppo": """\
@article{schulman2017proximal,
  title   = {Proximal Policy Optimization Algorithms},
  author  = {Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg},
  journal = {arXiv preprint arXiv:1707.06347},
  year    = {2017}
}
@article{ziegler2019finetuning,
  title   = {Fine-Tuning Language Models from Human Preferences},
  author  = {Ziegler, Daniel M. and Stiennon, Nisan and Wu, Jeffrey and Brown, Tom B. and Radford, Alec
             and Amodei, Dario and Christiano, Paul and Irving, Geoffrey},
  journal = {arXiv preprint arXiv:1909.08593},
  year    = {2019}
}""",
    "rloo": """\
@article{ahmadian2024back,
  title   = {Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs},
  author  = {Ahmadian, Arash and Cremer, Chris and Gall{\\'e}, Matthias and Fadaee, Marzieh and Kreutzer, Julia
             and Pietquin, Olivier and {\\"U}st{\\"u}n, Ahmet and Hooker, Sara},
  journal = {arXiv preprint arXiv:2402.14740},
  year    = {2024}
}""",
    "grpo": """\
@article{shao2024deepseekmath,
  title   = {DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models},
  author  = {Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and Song, Junxiao and Bi, Xiao
             and Zhang, Haowei and Zhang, Mingchuan and Li, Y. K. and Wu, Y. and Guo, Daya},
  journal = {arXiv preprint arXiv:2402.03300},
  year    = {2024}
}""",
    "summarize": """\
@article{stiennon2020learning,
  title   = {Learning to summarize from human feedback},
  author  = {Stiennon, Nisan and Ouyang, Long and Wu, Jeff and Ziegler, Daniel M. and Lowe, Ryan and Voss, Chelsea
             and Radford, Alec and Amodei, Dario and Christiano, Paul},
  journal = {arXiv preprint arXiv:2009.01325},
  year    = {2020}
}""",
}


def model_card(
    role: str,
    stage: str,
    config: dict[str, Any],
    metrics: dict[str, Any],
    *,
    base_model: str | None = None,
    adapter: bool = False,
    recipe: str | None = None,
    curves: Mapping[str, Sequence[float]] | None = None,
    objects: Sequence[str] = (),
) -> str:
    """A Hugging Face model card: YAML metadata for the hub, then Markdown.

    Args:
      role: of the exported model: 'policy', 'value' or 'reward_model'.
      stage: 'sft', 'reward', 'ppo', 'rloo' or 'grpo'.
      config: the stage's resolved options.
      metrics: scalars, of the last update and the final evaluations.
      base_model: the initial model, a hub name or a folder; None for random weights.
      adapter: whether it is a PEFT adapter.
      recipe: the value of `--config`.
      curves: values of metrics over the run, by name.
      objects: arguments of `rlhf_jax.run` that took the place of options, such as train_dataset and reward_funcs.

    Returns:
      The text of README.md.
    """
    if "train_dataset" in objects:
        config = {k: v for k, v in config.items() if k not in ("dataset_name", "datasets", "dataset_test_split")}
    names = [entry["path"] for entry in config.get("datasets") or ()] or [config.get("dataset_name")]
    origin = f"`{base_model}`" if base_model else f"random weights ({config.get('scratch_model')})"
    data = ", ".join(f"the built-in {name} task" if name in BUILT_IN else f"`{name}`" for name in names)
    repeat = "`rlhf-jax train --config RUN/config.json`, with the `config.json` of its folder."
    if objects:
        arguments = ", ".join(f"{name}=..." for name in objects)
        repeat = f"`rlhf_jax.run(config, {arguments})` in Python; what was given there is not in its folder."
    if "train_dataset" in objects:
        data = "the data given to `rlhf_jax.run`"
    library = "peft" if adapter else "transformers"
    metadata = huggingface_hub.ModelCardData(
        library_name=library,
        tags=["rlhf_jax", stage, *(["lora"] if adapter else [])],
        base_model=base_model if _on_hub(base_model) else None,
        datasets=[name for name in names if _on_hub(name)] or None,
    )
    changeable = may_change()  # they do not affect the model (folders, logging)
    chosen = {k: v for k, v in config.items() if v is not None and k != "stage" and k not in changeable}
    options = [f"| {k} | `{_cell(v)}` |" for k, v in chosen.items()]
    numbers = [f"| {k} | {short_number(v)} |" for k, v in metrics.items() if isinstance(v, (int, float))]
    curve_rows = [
        f"| {k} | {short_number(v[0])} | {sparkline(v)} | {short_number(v[-1])} |"
        for k, v in (curves or {}).items()
        if len(v) > 1
    ]
    method = _METHODS.get(stage, stage)
    if config.get("loss_type"):
        method += f" (`loss_type` {config['loss_type']})"
    citations = [_CITATIONS[key] for key in (stage, "summarize") if key in _CITATIONS]
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {_ROLES[role]} by {_METHODS.get(stage, stage)}" + (", as an adapter" if adapter else ""),
        f"The {_ROLES[role].lower()} of a run of {method} with rlhf_jax, from {origin}, on {data}."
        + (f" Recipe: `{_cell(os.path.basename(recipe))}`, with the options below." if recipe else ""),
        _loading(role, adapter),
        f"To repeat the run: {repeat}",
        "\n".join(["## Final metrics\n", "| metric | value |", "|---|---|", *numbers]) if numbers else "",
        "\n".join(["## Curves\n", "| metric | first | over the run | last |", "|---|---|---|---|", *curve_rows])
        if curve_rows
        else "",
        "\n".join(["## Options\n", "| option | value |", "|---|---|", *options]),
        "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in versions().items()),
        "## Citation\n\n```bibtex\n" + "\n".join(citations) + "\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def sparkline(values: Sequence[float]) -> str:
    """A curve as one line of text between its minimum and maximum: a character per interval, for the mean of its finite
    values, or a dot without any."""
    edges = np.linspace(0, len(values), min(len(values), _WIDTH) + 1).astype(int)
    parts = [np.asarray(values[a:b], float) for a, b in zip(edges[:-1], edges[1:])]
    means = [part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts]
    low, high = np.nanmin([*means, np.inf]), np.nanmax([*means, -np.inf])
    top = len(_BARS) - 1
    levels = [0.5 if high <= low else (mean - low) / (high - low) for mean in means]
    return "".join("·" if np.isnan(mean) else _BARS[round(level * top)] for mean, level in zip(means, levels))


def _loading(role: str, adapter: bool) -> str:
    """Python code that loads the model."""
    kind = "CausalLM" if role == "policy" else "SequenceClassification"
    loader, library = (f"AutoPeftModelFor{kind}", "peft") if adapter else (f"AutoModelFor{kind}", "transformers")
    more = "" if role == "policy" or not adapter else ", num_labels=1"
    imports = f"from {library} import {loader}" + ("\nfrom transformers import" if adapter else ",") + " AutoTokenizer"
    return (
        f'```python\n{imports}\n\nmodel = {loader}.from_pretrained("PATH"{more})\n'
        'tokenizer = AutoTokenizer.from_pretrained("PATH")\n```'
    )


def _on_hub(name: str | None) -> bool:
    """Whether a name may be a repository: the hub validates names in the metadata, so local paths must be left out."""
    return bool(name) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not storage.exists(name)


def _cell(value: Any) -> str:
    text = redact_queries(str(value))
    return printable(text).replace("|", "\\|").replace("\n", " ")


def write_model_card(folder: str, stage: str, config: dict[str, Any], metrics: dict[str, Any], **more: Any) -> None:
    """Writes README.md into the folder of an exported model.

    Args:
      folder: named policy, value or reward_model, or one of these with the suffix _adapter or _base.
      stage, config, metrics, **more: as `model_card`.
    """
    role = re.sub(r"_(adapter|base)$", "", os.path.basename(os.path.normpath(folder)))
    if role not in _ROLES:
        raise ValueError(f"{folder} must be named after one of {', '.join(_ROLES)}")
    adapter = os.path.exists(os.path.join(folder, "adapter_config.json"))
    text = model_card(role, stage, config, metrics, adapter=adapter, **more)
    write_atomically(os.path.join(folder, "README.md"), text)

"""Records a small run of TRL (CPU, float32) for tests/parity/replay.py.

    python scripts/parity/record_trl.py ppo FOLDER --options '{"kl_estimator": "k3", "whiten_rewards": true}'
    python scripts/parity/record_trl.py rloo FOLDER --functions even_share low_ids --options '{"num_iterations": 2}'
    python scripts/parity/record_trl.py grpo FOLDER --options '{"loss_type": "cispo", "epsilon_high": 5}'
    python scripts/parity/record_trl.py rloo_legacy FOLDER --options '{"rloo_k": 4}'
    python scripts/parity/record_trl.py ppo FOLDER --options '{"use_peft": true, "lora_r": 4, "use_rslora": true}'
    python scripts/parity/record_trl.py vision FOLDER --options '{"trainer": "grpo", "image_splitting": true}'

vision is RLOO or GRPO, by the option trainer, on a tiny SmolVLM. It, ppo, rloo and grpo need trl==1.12.0 and, with
use_peft, peft, which `pip install '.[test]'` installs. rloo_legacy is the RLOOTrainer of TRL up to 0.21, which needs
its own environment: `pip install trl==0.17.0 transformers==4.51.3 torch==2.13.0 rich requests`.

A tiny model with random weights, by default a GPT-NeoX, is trained on random prompts. FOLDER gets the initial weights,
a tokenizer, case.json (options, logged metrics), trace.npz (samples, permutations, scores, whitened rewards, losses)
and the final weights. With --crafted the responses are not sampled, but end in the ways that are easy to get wrong: eos
first, eos last, no eos, a pad sampled first, before eos or last.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

MODULES = {"ppo": "ppo", "rloo": "rloo", "grpo": "grpo", "rloo_legacy": "legacy", "vision": "vision"}
VERSIONS = {**dict.fromkeys(("ppo", "rloo", "grpo", "vision"), "1.12.0"), "rloo_legacy": "0.17.0"}


def parse(arguments: list[str] | None = None):
    """(trainer, Setting) of a command line."""
    from tests.parity.recording.tiny import Setting

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=list(MODULES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--options", type=json.loads, default={}, help="TRL's options as JSON")
    parser.add_argument("--functions", nargs="+", default=["even_share"], help="names of reward functions (rloo, grpo)")
    for name, what in (("updates", "rloo, grpo: optimizer steps"), ("micro", "rows"), ("accum", ""), ("prompts", "")):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setting, name), help=what)
    for name in ("seed", "layers", "width", "heads", "vocab"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setting, name))
    parser.add_argument("--family", default=Setting.family, help="model_type: gpt_neox, or of recording/families.py")
    parser.add_argument("--init_std", type=float, default=Setting.init_std)
    parser.add_argument("--sequential", action="store_true", help="no parallel residual")
    parser.add_argument("--eos_fill", action="store_true", help="no pad token in the policy's config")
    parser.add_argument("--crafted", action="store_true", help="crafted instead of sampled responses")
    given = vars(parser.parse_args(arguments))
    given["functions"] = tuple(given["functions"])
    trainer = given.pop("trainer")
    return trainer, Setting(**{field.name: given[field.name] for field in dataclasses.fields(Setting)})


def main() -> None:
    """The command."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # TRL's PPO uses a GPU if there is one
    import trl

    trainer, setting = parse()
    if trl.__version__ != VERSIONS[trainer]:
        sys.exit(f"{trainer} needs trl=={VERSIONS[trainer]}; this environment has {trl.__version__}")
    importlib.import_module(f"tests.parity.recording.{MODULES[trainer]}").record(setting)


if __name__ == "__main__":
    main()

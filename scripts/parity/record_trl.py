"""Records a small run of the real TRL (CPU, float32) for tests/parity/replay.py.

    python scripts/parity/record_trl.py ppo FOLDER --options '{"kl_estimator": "k3", "whiten_rewards": true}'
    python scripts/parity/record_trl.py rloo FOLDER --functions even_share low_ids --options '{"num_iterations": 2}'
    python scripts/parity/record_trl.py rloo_legacy FOLDER --options '{"rloo_k": 4}'
    python scripts/parity/record_trl.py ppo FOLDER --options '{"use_peft": true, "lora_r": 4, "use_rslora": true}'

ppo and rloo need trl==1.12.0 and, with use_peft, peft, which `pip install '.[test]'` brings. rloo_legacy is the
RLOOTrainer that TRL had until 0.21, and needs an environment of its own: `pip install trl==0.17.0 transformers==4.51.3
torch==2.13.0 rich requests`.

A tiny GPT-NeoX with random weights learns from random prompts. FOLDER gets the starting weights, a tokenizer,
case.json (options, logged metrics), trace.npz (what was sampled, shuffled, scored, whitened and lost) and the final
weights. With --crafted the responses are not sampled but made to end in the ways that are easy to get wrong: eos first,
eos last, no eos, a pad that was sampled first, before eos or last.
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

MODULES = {"ppo": "ppo", "rloo": "rloo", "rloo_legacy": "legacy"}
VERSIONS = {"ppo": "1.12.0", "rloo": "1.12.0", "rloo_legacy": "0.17.0"}


def parse(arguments: list[str] | None = None):
    """(trainer, Setting) of a command line."""
    from tests.parity.recording.tiny import Setting

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=list(MODULES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--options", type=json.loads, default={}, help="TRL's own options, as JSON")
    parser.add_argument("--functions", nargs="+", default=["even_share"], help="reward functions of rloo, by name")
    for name, what in (("updates", "optimizer steps for rloo"), ("micro", "rows"), ("accum", ""), ("prompts", "")):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setting, name), help=what)
    for name in ("seed", "layers", "width", "heads", "vocab"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setting, name))
    parser.add_argument("--init_std", type=float, default=Setting.init_std)
    parser.add_argument("--sequential", action="store_true", help="no parallel residual")
    parser.add_argument("--eos_fill", action="store_true", help="no pad in the policy's config")
    parser.add_argument("--crafted", action="store_true", help="crafted responses instead of sampled ones")
    given = vars(parser.parse_args(arguments))
    given["functions"] = tuple(given["functions"])
    trainer = given.pop("trainer")
    return trainer, Setting(**{field.name: given[field.name] for field in dataclasses.fields(Setting)})


def main() -> None:
    """Checks TRL's version and records."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # TRL's PPO takes a GPU where there is one
    import trl

    trainer, setting = parse()
    if trl.__version__ != VERSIONS[trainer]:
        sys.exit(f"{trainer} is recorded with trl=={VERSIONS[trainer]}; this environment has {trl.__version__}")
    importlib.import_module(f"tests.parity.recording.{MODULES[trainer]}").record(setting)


if __name__ == "__main__":
    main()

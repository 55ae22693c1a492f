"""Runs the over-optimisation study: all stages of configs/goldrush.py in order, then a report of its policies.

    python scripts/goldrush.py                      # half an hour on two cores; rerun to resume
    python scripts/goldrush.py --folder runs/short --short        # a few updates of each, as a test

Each policy is trained on a reward model or an ensemble of them; the gold reward is measured but not used for training.
The report (FOLDER/report.html) plots both against the square root of the KL, with the fit of Gao et al. 2022.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import runpy
import sys

from rlhf_jax import UserError, report, train
from rlhf_jax.config import files as config_files
from rlhf_jax.runtime import compile_cache

SHORT = {"max_steps": 4, "total_episodes": 512, "max_eval_samples": 64, "max_train_samples": 256, "eval_steps": 2}


def main(argv: list[str] | None = None) -> int:
    """The command. Exit code 2: wrong options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/goldrush"), help="folder of all runs")
    parser.add_argument("--only", nargs="+", default=[], help="variants of the config; default: all")
    parser.add_argument("--short", action="store_true", help="a few updates per run")
    options = parser.parse_args(argv)
    compile_cache.enable()
    scope = runpy.run_path(str(config_files.config_folder() / "goldrush.py"))
    try:
        if unknown := [name for name in options.only if name not in scope["VARIANTS"]]:
            raise UserError(f"--only {unknown[0]}: choose among {', '.join(scope['VARIANTS'])}")
        for name in options.only or scope["VARIANTS"]:
            print(f"== {name}", flush=True)
            train.run(placed(config_files.load_config(f"goldrush.py:{name}"), scope["RUNS"], options))
        policies = [str(options.folder / name) for name in scope["POLICIES"] if (options.folder / name).exists()]
        if policies:
            print("\n".join(report.write(policies, str(options.folder / "report.html"))))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def placed(config, runs: str, options: argparse.Namespace):
    """The config with --folder instead of the default folder; with --short, a few updates."""
    changed = {} if not options.short else {name: v for name, v in SHORT.items() if hasattr(config, name)}
    for name, value in vars(config).items():
        if isinstance(value, str) and value.startswith(f"{runs}/"):
            changed[name] = str(options.folder) + value.removeprefix(runs)
        elif name == "more_reward_models":
            changed[name] = tuple(str(options.folder) + path.removeprefix(runs) for path in value)
    return dataclasses.replace(config, **changed)


if __name__ == "__main__":
    sys.exit(main())

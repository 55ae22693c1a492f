"""Runs the commands of README and docs/ as they stand, where a CPU without network can, and tells why of each other.

    python scripts/try_docs.py                     # in a temporary folder; some ten minutes on two cores
    python scripts/try_docs.py --only tutorial     # the pages whose names begin so

Runs of the quickstart are cut to a few updates by further flags; what a page has the reader write (my_rewards.py,
posts.jsonl) is written first. Exit status 1 when a command failed; its output is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from docs_commands import ROOT, STANDS_FOR, commands

from rlhf_jax.data import synthetic

SHORT = {
    "quickstart.py": "--sft.max_steps 8 --reward.max_steps 8 --ppo.total_episodes 512 --ppo.max_eval_samples 64",
    "quickstart_lora.py": "--sft.max_steps 8 --reward.max_steps 8 --ppo.total_episodes 512 --ppo.max_eval_samples 64",
    "quickstart_rloo.py": "--sft.max_steps 8 --reward.max_steps 8 --rloo.total_episodes 512 --rloo.max_eval_samples 64",
}
SHORT_SCRIPTS = {
    "chaos.py": "--short --kills 2",
    "goldrush.py": "--folder goldrush --short",
    "fuzz.py": "--examples 50",
}
TINY = "--model_name_or_path none --scratch_model 1x16x2 --tokenizer_name_or_path synthetic --max_steps 4"
REASONS = (  # what a command's words hold, and why it is not run
    (("real/sft", "real/ppo", "real/rloo", "XDG_CACHE_HOME"), "measures on real posts, or compiling: its page"),
    (("EleutherAI", "MODEL", "NAME", "REWARD_MODEL", "runs/tldr"), "needs a model or a judge of the reader's"),
    (("tldr_ppo", "tldr_reward", "tldr_rloo", "tldr_sft", "my_ppo.py"), "needs the hub"),
    (("sbatch", "srun", "kubectl", "mpirun"), "needs a cluster, or scripts/launch/*_one_machine.sh"),
    (("JAX_LOCAL_DEVICE_IDS=$OMPI_COMM_WORLD_LOCAL_RANK", "FIRST_MACHINE:12345"), "needs several machines"),
    (
        ("scripts/bench/", "PYTHIA"),
        "measures: docs/benchmarks.md",
    ),
    (
        ("scripts/scaling/", "scripts/parity/"),
        "hours, or TRL: docs/ has its result",
    ),
    (("venv", "scripts/newest_python.sh"), "the page's own tests: .ci/run"),
)


def why_not(words: list[str]) -> str | None:
    """Why a command is not run; None: it is."""
    if "posts.jsonl" in words:
        return None
    for parts, reason in REASONS:
        if any(part in word for word in words for part in parts):
            return reason
    return None


def runnable(words: list[str]) -> list[str]:
    """The command with this Python, few updates and absolute paths of scripts."""
    words = [STANDS_FOR.get(word, word) for word in words if STANDS_FOR.get(word, word) and "=" not in word[:20]]
    found = [sys.executable if word in ("python", "python3") else word for word in words]
    found = [str(ROOT / word) if word.startswith("scripts/") else word for word in found]
    config = found[found.index("--config") + 1] if "--config" in found else None
    if config in SHORT:
        given = found[: found.index("--config") + 2]
        found = [*given, *SHORT[config].split(), *found[len(given) :]]
    if any(word.endswith("launch_local.py") for word in found):
        found += ["--run_dir", "runs/two"]
    if "posts.jsonl" in found:
        at = found.index("--model_name_or_path")
        found = [*found[:at], *TINY.split(), *found[at + 2 :]]
    for name, flags in SHORT_SCRIPTS.items():
        if any(pathlib.PurePath(word).name == name for word in found):
            found = [*found[:2], *flags.split()]
    return found


def write_what_readers_write(folder: pathlib.Path) -> None:
    """The files that pages ask for."""
    reward = (
        "def brevity(prompts, completions, **columns):\n    return [-0.1 * len(text.split()) for text in completions]\n"
    )
    (folder / "my_rewards.py").write_text(reward)
    judge = "def prefer(prompts, completions):\n    return [int(len(b) < len(a)) for a, b in completions]\n"
    (folder / "my_judge.py").write_text(judge)
    for name in ("posts.jsonl", "held_out.jsonl"):
        rows = synthetic.demonstrations(64)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: list[str] | None = None) -> int:
    """The command: 0 when all that was run did not fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="pages whose names begin so")
    options = parser.parse_args(argv)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = failed = left = 0
    with tempfile.TemporaryDirectory() as room:
        folder = pathlib.Path(room)
        write_what_readers_write(folder)
        known = set()
        for page, words in [(".", ["python", "-m", "rlhf_jax.train", "--config", "quickstart.py"]), *commands()]:
            if not page.startswith((".", options.only)) or tuple(words) in known:
                continue
            known.add(tuple(words))
            shown = f"{page}: {' '.join(words)}"[:150]
            if reason := why_not(words):
                left += 1
                print(f"-    {shown}  ({reason})", flush=True)
                continue
            began = time.monotonic()
            text = "SUBREDDIT: r/advice\n\nPOST: i met anna.\n\nTL;DR:\n"
            run = subprocess.run(
                runnable(words), cwd=folder, env=environment, input=text, capture_output=True, text=True
            )
            done, failed = done + 1, failed + (run.returncode != 0)
            print(f"{'ok ' if run.returncode == 0 else 'BAD'} {time.monotonic() - began:4.0f} s  {shown}", flush=True)
            if run.returncode:
                print(run.stdout[-2000:] + run.stderr[-4000:], flush=True)
    print(f"{done} commands were run, {failed} failed; {left} were not run")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

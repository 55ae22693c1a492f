"""Runs the documented commands that need only a CPU and no network, and gives the reason for each skipped one.

    python scripts/try_docs.py                     # in a temporary folder; ten minutes on two cores
    python scripts/try_docs.py --only tutorial     # pages whose names start with this

Extra flags cut the quickstart to a few updates. Files that a page asks the reader to write (my_rewards.py, posts.jsonl)
are written first. Prints the output of failing commands. Exit code 1: a command failed.
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rlhf_jax.data import synthetic  # noqa: E402
from tests.helpers.docs_commands import STANDS_FOR, commands, programs  # noqa: E402

SHORT = {
    "quickstart.py": "--sft.max_steps 8 --reward.max_steps 8 --ppo.total_episodes 512 --ppo.max_eval_samples 64",
    "quickstart_lora.py": "--sft.max_steps 8 --reward.max_steps 8 --ppo.total_episodes 512 --ppo.max_eval_samples 64",
    "quickstart_math.py": "--sft.max_steps 8 --grpo.total_episodes 512 --grpo.max_eval_samples 64",
    "quickstart_rloo.py": "--sft.max_steps 8 --reward.max_steps 8 --rloo.total_episodes 512 --rloo.max_eval_samples 64",
    "quickstart_tools.py": "--sft.max_steps 8 --grpo.total_episodes 512 --grpo.max_eval_samples 64",
    "quickstart_vision.py": "--sft.max_steps 8 --grpo.total_episodes 512 --grpo.max_eval_samples 64",
}
SHORT_SCRIPTS = {
    "chaos.py": "--short --kills 2",
    "goldrush.py": "--folder goldrush --short",
}
TINY = "--model_name_or_path none --scratch_model 1x16x2 --tokenizer_name_or_path synthetic --max_steps 4"
REASONS = (  # (parts of words of a command, why it is skipped)
    (("real/sft", "real/ppo", "real/rloo", "XDG_CACHE_HOME"), "a measurement; see its page"),
    (("EleutherAI", "MODEL", "NAME", "REWARD_MODEL", "runs/tldr"), "needs the reader's model or judge"),
    (("tldr_ppo", "tldr_reward", "tldr_rloo", "tldr_sft", "my_ppo.py", "deepmath", "smolvlm"), "needs the hub"),
    (("s3://BUCKET",), "needs a bucket"),
    (("sbatch", "srun", "kubectl", "mpirun"), "needs a cluster, or scripts/launch/*_one_machine.sh"),
    (("JAX_LOCAL_DEVICE_IDS=$OMPI_COMM_WORLD_LOCAL_RANK", "FIRST_MACHINE:12345"), "needs several machines"),
    (("scripts/bench/", "PYTHIA"), "a measurement; see docs/benchmarks.md"),
    (("scripts/scaling/", "scripts/parity/"), "takes hours, or needs TRL"),
    (("venv", "scripts/newest_python.sh"), "covered by .ci/run"),
)


def why_not(words: list[str]) -> str | None:
    """Why a command is skipped; None: it runs."""
    if "posts.jsonl" in words:
        return None
    for parts, reason in REASONS:
        if any(part in word for word in words for part in parts):
            return reason
    return None


def runnable(words: list[str]) -> list[str]:
    """The command with this Python, few updates and absolute paths of scripts."""
    words = [STANDS_FOR.get(word, word) for word in words if STANDS_FOR.get(word, word) and "=" not in word[:20]]
    words = [sys.executable if word in ("python", "python3") else word for word in words]
    words = [str(ROOT / word) if word.startswith("scripts/") else word for word in words]
    config = words[words.index("--config") + 1].partition(":")[0] if "--config" in words else None
    if config in SHORT:
        given = words[: words.index("--config") + 2]
        words = [*given, *SHORT[config].split(), *words[len(given) :]]
    if any(word.endswith("launch_local.py") for word in words):
        words += ["--run_dir", "runs/two"]
    if "posts.jsonl" in words:
        at = words.index("--model_name_or_path")
        words = [*words[:at], *TINY.split(), *words[at + 2 :]]
    for name, flags in SHORT_SCRIPTS.items():
        if any(pathlib.PurePath(word).name == name for word in words):
            words = [*words[:2], *flags.split()]
    return words


def write_what_readers_write(folder: pathlib.Path) -> None:
    """Files that pages ask the reader to write."""
    reward = (
        "def brevity(prompts, completions, **columns):\n    return [-0.1 * len(text.split()) for text in completions]\n"
    )
    (folder / "my_rewards.py").write_text(reward)
    for name, text in programs().items():
        (folder / name).write_text(text)
    judge = "def prefer(prompts, completions):\n    return [int(len(b) < len(a)) for a, b in completions]\n"
    (folder / "my_judge.py").write_text(judge)
    for name in ("posts.jsonl", "held_out.jsonl"):
        rows = synthetic.demonstrations(64)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: list[str] | None = None) -> int:
    """The command. Exit code 1: a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="pages whose names start with this")
    options = parser.parse_args(argv)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = failed = skipped = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_what_readers_write(folder)
        known = set()
        for page, words in [(".", ["python", "-m", "rlhf_jax.train", "--config", "quickstart.py"]), *commands()]:
            if not page.startswith((".", options.only)) or tuple(words) in known:
                continue
            known.add(tuple(words))
            shown = f"{page}: {' '.join(words)}"[:150]
            if reason := why_not(words):
                skipped += 1
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
    print(f"{done} commands ran, {failed} of them failed; {skipped} were skipped")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Times RLOO updates with prompts computed once a group against once a response, paired in one run.

    python scripts/bench/bench_shared_prompts.py --tokenizer PYTHIA --dataset PROMPTS.jsonl

Same weights, same prompts, same keys: the two stages take turns, so that what else runs on the machine hits both. An
update is generation, reward model, reference, and `--iterations` passes of learning. Peak memory is that of a process
of its own for each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from rlhf_jax import RLOOConfig, data
from rlhf_jax.metrics import logger
from rlhf_jax.models.io import hf
from rlhf_jax.stages import RLOOStage, base


def make_stage(args, reward_model: str, shared: bool) -> RLOOStage:
    config = RLOOConfig(
        sft_model_path=None,
        scratch_model=args.model,
        tokenizer_name_or_path=args.tokenizer,
        reward_model_path=reward_model,
        dataset_name=args.dataset,
        query_length=512,
        length_buckets=tuple(args.buckets),
        response_length=53,
        stop_token=None,
        temperature=0.7,
        batch_size=args.batch,
        num_generations=args.generations,
        num_iterations=args.iterations,
        total_episodes=args.batch * (args.updates + 1),
        shared_prompts=shared,
        learning_rate=1e-5,
    )
    return RLOOStage(config)


def make_reward_model(args, folder: str) -> str:
    tokenizer = data.load_tokenizer(args.tokenizer)
    model = base.scratch_model(argparse.Namespace(scratch_model=args.model), tokenizer.vocab_size, 565)
    params = jax.device_get(model.init(jax.random.key(1), heads=("scalar",)))
    hf.save(folder, model, params, kind="scalar")
    data.save_tokenizer(tokenizer, folder)
    return folder


def peak(args, reward_model: str, shared: bool) -> float:
    """Peak memory in MiB of a process that makes two updates."""
    words = [sys.executable, __file__, "--one", str(int(shared)), "--reward_model", reward_model]
    for name in ("tokenizer", "dataset", "model", "batch", "generations", "iterations"):
        words += [f"--{name}", str(getattr(args, name))]
    words += ["--buckets", *map(str, args.buckets)]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])["peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--model", default="14m")
    parser.add_argument("--batch", type=int, default=16, help="responses an update")
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--buckets", type=int, nargs="+", default=[512])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--reward_model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        args.updates = 2
        stage = make_stage(args, args.reward_model, bool(args.one))
        state = stage.state
        for step in range(args.updates):
            state, _, _ = stage.train_step(state, step)
        print(json.dumps({"peak": logger.peak_memory()["memory/peak_rss_mib"]}))
        return
    with tempfile.TemporaryDirectory() as folder:
        reward_model = make_reward_model(args, folder)
        peaks = {shared: peak(args, reward_model, shared) for shared in (False, True)}
        stages = {shared: make_stage(args, reward_model, shared) for shared in (False, True)}
        states = {shared: stage.state for shared, stage in stages.items()}
        times: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        first = {}
        for step in range(args.updates + 1):
            for shared, stage in stages.items():
                states[shared], found, seconds = stage.train_step(states[shared], step)
                if step:  # the first compiles
                    times[shared].append(seconds)
                else:
                    first[shared] = {name: float(x) for name, x in found.items()}
    phases = ("generate", "score", "experience", "update")
    print(f"{'':12} {'each':>8} {'shared':>8} {'times':>6}   (median seconds of {args.updates} updates)")
    totals = {shared: [sum(s[p] for p in phases) for s in times[shared]] for shared in times}
    for phase in phases:
        each, once = (statistics.median(s[phase] for s in times[shared]) for shared in (False, True))
        print(f"{phase:12} {each:8.3f} {once:8.3f} {each / once:6.2f}")
    each, once = (statistics.median(totals[shared]) for shared in (False, True))
    pairs = [a / b for a, b in zip(totals[False], totals[True])]
    spread = f"pairs {min(pairs):.2f} to {max(pairs):.2f}"
    print(f"{'together':12} {each:8.3f} {once:8.3f} {statistics.median(pairs):6.2f}   {spread}")
    print(f"peak memory  {peaks[False]:8.0f} {peaks[True]:8.0f} MiB")
    for name in ("objective/entropy", "loss", "grad_norm"):
        print(f"first update, {name}: {first[False][name]:.7g} and {first[True][name]:.7g}")


if __name__ == "__main__":
    main()

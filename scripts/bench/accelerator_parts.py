"""The parts of scripts/accelerator_day.py that are not other commands: writes and prints JSON.

python scripts/bench/accelerator_parts.py NAME --folder DIR [--json FILE] [--small]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/chaos"))


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Devices, versions, and the rates that shares of the peak refer to."""
    import benchmark_ours
    import jax
    import jax.numpy as jnp

    from rlhf_jax.parallel import peaks
    from rlhf_jax.runtime import environment

    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    installed = {module: importlib.util.find_spec(module) for module in ("torch", "trl")}
    others = {module: importlib.metadata.version(module) for module, spec in installed.items() if spec}
    words = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        gpu = None
    rates = {"bandwidth": peaks.copy_rate()}
    sizes = (256,) if args.small else benchmark_ours.matrix_sizes("cpu" if device.platform == "cpu" else "gpu")
    products = {"bfloat16": (jnp.bfloat16, None), "float32": (jnp.float32, None)}
    products["float32_highest"] = (jnp.float32, "highest")
    for name, (dtype, precision) in products.items():
        # Not ones: they multiply faster on some devices.
        matrices = (jax.random.normal(jax.random.key(n), (n, n), dtype) for n in sizes)
        rates[name] = max(peaks.product_rate(matrix, precision, calls=10) for matrix in matrices)
    return {
        "devices": [str(d) for d in jax.devices()],
        "kind": device.device_kind,
        "bytes_limit": memory.get("bytes_limit"),
        "nvidia_smi": gpu,
        "versions": environment.versions() | others,
        "flops_per_second": rates,
    }


def shape_of(args: argparse.Namespace) -> tuple[Any, int, int]:
    """Model, rows and tokens of a row."""
    from rlhf_jax import models

    return (models.custom_shape("2x64x4", 256), 4, 32) if args.small else (models.pythia("160m"), 8, 256)


def random_rows(model: Any, rows: int, length: int) -> tuple[Any, Any]:
    """Left-padded rows of random tokens, and their mask."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(1, model.config.vocab_size - 256 if model.config.vocab_size > 512 else 200, (rows, length))
    pad = rng.integers(0, length // 2, (rows, 1))
    mask = np.arange(length)[None, :] >= pad
    return np.where(mask, tokens, 0).astype(np.int32), mask


def numbers(args: argparse.Namespace) -> dict[str, Any]:
    """Relative differences ||ours - torch|| / ||torch||, torch in float32 on the CPU."""
    import jax
    import jax.numpy as jnp
    import torch
    import transformers

    from rlhf_jax import losses
    from rlhf_jax.models.io import hf
    from tests.parity.report import distance

    model, rows, length = shape_of(args)
    params = model.init(jax.random.key(0), heads=("causal",))
    folder = Path(args.folder) / "numbers"
    hf.save(folder, model, jax.device_get(params), kind="causal")
    tokens, mask = random_rows(model, rows, length)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids, keep = torch.tensor(tokens, dtype=torch.long), torch.tensor(mask)
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    logits = theirs(input_ids=ids, attention_mask=keep.long(), position_ids=positions).logits
    real = keep[:, :-1] & keep[:, 1:]
    chosen = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    (chosen * real).sum().div(real.sum()).backward()
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
    gradient = dict(theirs.named_parameters())[name].grad.numpy().T
    assert torch.isfinite(logits).all()
    reference = {"logits": logits.detach().numpy()[mask], "log-probabilities": chosen.detach().numpy()[real.numpy()]}

    def ours(params: Any, dtype: Any) -> tuple[Any, Any, Any]:
        def mean(params: Any) -> tuple[Any, tuple[Any, Any]]:
            out = model.logits(params, model.hidden(params, tokens, mask, dtype=dtype))
            logprobs = losses.logprobs_from_logits(out[:, :-1], tokens[:, 1:])
            return jnp.sum(jnp.where(real_mask, logprobs, 0.0)) / real_mask.sum(), (out, logprobs)

        (_, (out, logprobs)), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return out, logprobs, grads

    real_mask = real.numpy()
    result: dict[str, Any] = {"shape": f"{rows} rows of {length} tokens", "params": count(params)}
    for label, dtype, precision in (
        ("float32, highest", jnp.float32, "highest"),
        ("float32, default", jnp.float32, None),
        ("bfloat16", jnp.bfloat16, None),
    ):
        with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
            out, logprobs, grads = jax.device_get(jax.jit(ours, static_argnums=1)(params, dtype))
        outputs = {"logits": out[mask], "log-probabilities": logprobs[real_mask]}
        errors = {key: distance(outputs[key], reference[key]) for key in reference}
        result[label] = errors | {"gradient of the first MLP kernel": distance(first_mlp_kernel(grads), gradient)}
    return result


def first_mlp_kernel(grads: Any) -> Any:
    """The gradient of layer 0's first MLP kernel [D, 4D]."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(grads)
    (kernel,) = [x for path, x in leaves if "dense_h_to_4h" in str(path) and "kernel" in str(path)]
    return kernel[0]


def count(params: Any) -> int:
    """Numbers in a tree."""
    import jax

    return sum(x.size for x in jax.tree.leaves(params))


def greedy(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens of the accelerator and of the CPU, float32 in the highest precision."""
    import jax
    import numpy as np

    from rlhf_jax.generate import Sampling, generate
    from rlhf_jax.types import PromptBatch
    from tests.parity.report import distance

    model, rows, length = shape_of(args)
    tokens, mask = random_rows(model, rows, length)
    prompts = PromptBatch(tokens=tokens, lengths=mask.sum(1).astype(np.int32), rows=np.arange(rows, dtype=np.int32))
    params = jax.device_get(model.init(jax.random.key(0), heads=("causal",)))
    new = 8 if args.small else 64
    result: dict[str, Any] = {"tokens": rows * new}
    for label, temperature in (("greedy", 0.0), ("sampled at temperature 1", 1.0)):
        sampling = Sampling(max_new_tokens=new, temperature=temperature)
        outs = {}
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            with jax.default_device(device), jax.default_matmul_precision("highest"):
                run = jax.jit(generate, static_argnums=(0, 4))
                outs[device.platform] = jax.device_get(run(model, params, prompts, jax.random.key(7), sampling))
        first, *rest = outs.values()
        second = rest[0] if rest else first
        result[label] = {
            "devices": list(outs),
            "equal tokens": float((first.response == second.response).mean()),
            "equal rows": float((first.response == second.response).all(1).mean()),
            "log-probabilities": distance(first.logprobs, second.logprobs),
        }
    return result


def resume(args: argparse.Namespace, deterministic: bool = False) -> dict[str, Any]:
    """Whether a killed and continued run leaves the bytes of one that was not killed."""
    import chaos_compare

    from rlhf_jax.config import PPOConfig, files

    config = PPOConfig(
        sft_model_path=None,
        scratch_model="1x32x2" if args.small else "2x128x4",
        value_model="shared_backbone",
        dataset_name="synthetic",
        tokenizer_name_or_path="synthetic",
        query_length=44,
        length_buckets=(44,),
        response_length=16,
        reward_model_path=None,
        reward_funcs=("rlhf_jax.data.synthetic:gold_reward",),
        batch_size=64,
        total_episodes=64 * 8,
        num_sample_generations=0,
        save_steps=2,
        report_to=(),
        learning_rate=1e-3,
        deterministic=deterministic,
    )
    base = Path(args.folder).resolve() / ("resume_deterministic" if deterministic else "resume")
    base.mkdir(parents=True, exist_ok=True)
    (base / "tiny_ppo.json").write_text(files.to_json(config), encoding="utf-8")
    words = [sys.executable, "-m", "rlhf_jax.train", "--config", str(base / "tiny_ppo.json"), "--run_dir", "run"]
    seconds, updates = {}, 0
    # Each in a working directory of its own, so that both have the same options.
    whole, killed = base / "whole/run", base / "killed/run"
    for name, folder in (("whole", whole), ("killed", killed), ("continued", killed)):
        began, log = time.monotonic(), base.with_suffix(".train.log")
        folder.parent.mkdir(exist_ok=True)
        with log.open("a") as file:
            process = subprocess.Popen(words, cwd=folder.parent, stdout=file, stderr=file)
            while name == "killed" and process.poll() is None and updates < 4:
                time.sleep(0.05)
                updates = len(chaos_compare.lines_of(folder / "metrics.jsonl"))
            if name == "killed":
                process.kill()
            if process.wait() and name != "killed":
                raise RuntimeError(log.read_text()[-3000:])
        seconds[name] = round(time.monotonic() - began, 1)
    different = chaos_compare.differences(whole, killed)
    return {"killed after updates": updates, "different": different, "seconds": seconds}


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a policy's gradient for one micro-batch, and of attention alone, by variant of attention and by
    what the backward pass recomputes."""
    import jax
    import jax.numpy as jnp

    from rlhf_jax import models
    from rlhf_jax.algorithms.response_logprobs import logprobs_from_hidden
    from rlhf_jax.models.attention_kernels import PLATFORMS, row_attention
    from rlhf_jax.models.decoder_context import Context

    model, rows, length, new = shape_of(args)[0], 2, 40, 8
    if not args.small:
        model, rows, length, new = models.pythia(args.shape), 16, 565, 53
    tokens, mask = random_rows(model, rows, length)
    heads, size = model.config.num_attention_heads, model.config.head_dim
    params = model.init(jax.random.key(0), heads=("causal",))
    qkv = [jax.random.normal(jax.random.key(i), (rows, length, heads, size), jnp.bfloat16) for i in range(4)]
    result: dict[str, Any] = {"rows": rows, "tokens": length, "heads": heads, "head size": size}
    kernels = [name for name, platform in PLATFORMS.items() if platform == jax.devices()[0].platform]
    for name, remat in itertools.product(args.variants or ("blocked", *kernels), args.remat):
        variant = dataclasses.replace(model, attn_implementation=name)
        context = Context(variant.family.decoder_config(variant.config), attn_implementation=name)

        def loss(params: Any, model: Any = variant, remat: str = remat) -> Any:
            options = {"dtype": jnp.dtype("bfloat16"), "remat": remat}
            hidden = model.hidden(params, tokens, mask, last=new + 1, **options)[:, :-1]
            return logprobs_from_hidden(model, params, hidden, tokens[:, -new:], 0.7)[0].mean()

        def alone(q: Any, k: Any, v: Any, d: Any, context: Any = context) -> Any:
            out, pull = jax.vjp(lambda q, k, v: row_attention(context, q, k, v, jnp.asarray(mask)), q, k, v)
            return out, pull(d)

        gradient = jax.jit(jax.value_and_grad(loss))
        label = name if remat == "none" else f"{name}, {remat}"
        try:
            result[label] = {"attention and its gradient": timed_calls(jax.jit(alone), *qkv)}
            result[label]["policy's gradient"] = timed_calls(gradient, params)
        except Exception as error:  # a variant that this device does not have
            result[label] = {"error": str(error)[:500]}
        if label == "blocked":
            with jax.profiler.trace(str(Path(args.folder) / "trace")):
                jax.block_until_ready(gradient(params))
    return result


def difference(args: argparse.Namespace) -> dict[str, Any]:
    """Log-probabilities of sampler and learner in half precision, by part (see `difference`)."""
    import difference

    model, rows, length = shape_of(args)
    return difference.measure(difference.random_case(model, rows, length // 2, 4 if args.small else 53))


def timed_calls(function: Any, *args: Any) -> dict[str, float]:
    """Seconds of the first call, and milliseconds of one of ten calls in a row, the better of three."""
    import jax

    began = time.perf_counter()
    jax.block_until_ready(function(*args))
    first, best = time.perf_counter() - began, float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(10):
            out = function(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - began) / 10)
    temporary = function.lower(*args).compile().memory_analysis().temp_size_in_bytes
    return {"first s": round(first, 2), "ms": round(1e3 * best, 3), "temporary MiB": temporary / 2**20}


PARTS = {
    "environment": machine,
    "numbers": numbers,
    "greedy": greedy,
    "attention": attention,
    "difference": difference,
    "resume": resume,
    "resume_deterministic": functools.partial(resume, deterministic=True),
}


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--folder", required=True, help="for what it writes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--shape", default="410m", help="of attention: a Pythia size")
    parser.add_argument("--variants", nargs="+", help="of attention: blocked, cudnn, ...; default: all")
    parser.add_argument("--remat", nargs="+", default=["none"], help="of attention: none, dots, full")
    args = parser.parse_args()
    from rlhf_jax.parallel import xla_flags

    xla_flags.add_those_of_run()
    text = json.dumps(PARTS[args.name](args), indent=1)
    print(text, flush=True)
    if args.json is not None:
        args.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

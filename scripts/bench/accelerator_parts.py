"""The parts of scripts/accelerator_day.py that are not other commands: prints one line of JSON.

python scripts/bench/accelerator_parts.py NAME --folder DIR [--small] [--case NAME]
python scripts/bench/accelerator_parts.py attention --folder DIR --topology h100:1    # without a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/chaos"))


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """Devices, versions, and the rates that shares of the peak refer to."""
    import benchmark_ours
    import jax
    import jax.numpy as jnp

    from rlhf_jax.parallel import peaks

    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "torch", "transformers", "trl", "datasets")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
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
        "versions": versions,
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


TINY_PPO = '''"""PPO of a small model from random weights, rewarded for short words."""

from rlhf_jax.config import PPOConfig


def brevity(completions, **_):
    return [-len(text) / max(1, len(text.split())) for text in completions]


def get_config(variant=None):
    return PPOConfig(
        sft_model_path=None,
        scratch_model="2x128x4",
        value_model="shared_backbone",
        dataset_name="synthetic",
        tokenizer_name_or_path="synthetic",
        query_length=44,
        length_buckets=(44,),
        response_length=16,
        reward_model_path=None,
        reward_funcs=(f"{__file__}:brevity",),
        batch_size=64,
        total_episodes=64 * 8,
        num_sample_generations=0,
        save_steps=2,
        report_to=(),
        learning_rate=1e-3,
    )
'''


def resume(args: argparse.Namespace, deterministic: bool = False) -> dict[str, Any]:
    """Whether a killed and continued run leaves the bytes of one that was not killed."""
    import chaos_compare

    base = Path(args.folder) / ("resume_deterministic" if deterministic else "resume")
    base.mkdir(parents=True, exist_ok=True)
    recipe = base.resolve() / "tiny_ppo.py"
    recipe.write_text(TINY_PPO, encoding="utf-8")
    words = [sys.executable, "-m", "rlhf_jax.train", "--config", str(recipe)]
    words += ["--deterministic"] if deterministic else []
    seconds = {}
    # Each in a working directory of its own, so that both have the same options.
    whole, killed = base / "whole/run", base / "killed/run"
    for folder, kill in ((whole, False), (killed, True), (killed, False)):
        began = time.monotonic()
        log = (base.parent / f"{base.name}.train.log").open("a")
        folder.parent.mkdir(exist_ok=True)
        process = subprocess.Popen([*words, "--run_dir", "run"], cwd=folder.parent, stdout=log, stderr=log)
        if kill:
            checkpoints = folder / "checkpoints"
            while process.poll() is None and not (checkpoints.is_dir() and len(lines(folder)) >= 4):
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
        if process.wait() and not kill:
            raise RuntimeError(Path(log.name).read_text()[-3000:])
        name = "killed" if kill else "whole" if folder == whole else "continued"
        seconds[name] = round(time.monotonic() - began, 1)
        if kill:
            at = len(lines(folder))
    different = chaos_compare.differences(whole, killed)
    return {"killed after updates": at, "different": different, "seconds": seconds}


def lines(folder: Path) -> list[str]:
    """Lines of PPO's metrics so far."""
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@contextlib.contextmanager
def attention_as(name: str) -> Iterator[None]:
    """Replaces blocked attention by a variant that no option names while programs are traced."""
    from rlhf_jax.models import attention, attention_kernels

    ours, block = attention._causal, attention.QUERY_BLOCK

    def library(score: Any, query: Any, key: Any, value: Any, mask: Any, window: Any, segment_ids: Any) -> Any:
        options = {"window": window, "segment_ids": segment_ids, "implementation": "xla"}
        return attention_kernels.cudnn_attention(query, key, value, mask, score, **options)

    try:
        if name == "xla":
            attention._causal = library
        elif name == "one block":
            attention.QUERY_BLOCK = 4096
        yield
    finally:
        attention._causal, attention.QUERY_BLOCK = ours, block


@contextlib.contextmanager
def layers_unrolled(unrolled: bool) -> Iterator[None]:
    """While programs are traced, layers are not scanned, which no option can say."""
    import jax
    import jax.numpy as jnp

    from rlhf_jax.models import decoder, scan_layers

    def one_by_one(layer: Any, x: Any, stack: Any, remat: str, *, first: bool = False, last: bool = False) -> Any:
        count = jax.tree.leaves(stack)[0].shape[0]
        for i in range(count):
            one = functools.partial(layer, index=jnp.int32(i), is_last=last and i == count - 1)
            if remat != "none":
                one = jax.checkpoint(one, policy=scan_layers._SAVED[remat])
            x = one(x, jax.tree.map(lambda leaf, i=i: leaf[i], stack))
        return x

    ours = decoder.scan_layers
    try:
        decoder.scan_layers = one_by_one if unrolled else ours
        yield
    finally:
        decoder.scan_layers = ours


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a policy's gradient for one micro-batch by variant of attention, by what the backward pass
    recomputes and by whether layers are scanned, and of attention alone; with --topology predicted ones, from the
    compiled programs."""
    import jax
    import jax.numpy as jnp

    from rlhf_jax import models
    from rlhf_jax.algorithms.response_logprobs import logprobs_from_hidden
    from rlhf_jax.dry_run import topologies
    from rlhf_jax.models.attention_kernels import PLATFORMS, row_attention
    from rlhf_jax.models.decoder_context import Context

    small, device = args.small, jax.devices()[0]
    if args.topology is not None:
        device = topologies.topology_devices(args.topology)[0]
    model, rows, length, new = shape_of(args)[0], 2, 40, 8
    if not small:
        model, rows, length, new = models.pythia(args.shape), 16, 565, 53
    tokens, mask = random_rows(model, rows, length)
    heads, size = model.config.num_attention_heads, model.config.head_dim
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), heads=("causal",)))
    qkv = [jax.ShapeDtypeStruct((rows, length, heads, size), jnp.bfloat16)] * 4
    measure = predicted_call(device)
    if args.topology is None:
        params = model.init(jax.random.key(0), heads=("causal",))
        qkv = [jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(qkv)]
        measure = timed_calls
    result: dict[str, Any] = {"rows": rows, "tokens": length, "heads": heads, "head size": size}
    kernels = [name for name, platform in PLATFORMS.items() if platform == device.platform]
    variants = args.variants or ("ours", "one block", "xla", *kernels)
    for name, remat, layers in itertools.product(variants, args.remat, args.layers):
        variant = dataclasses.replace(model, attn_implementation=name if name in kernels else "blocked")
        decoder = variant.family.decoder_config(variant.config)
        context = Context(decoder, attn_implementation=variant.attn_implementation)

        def loss(params: Any, model: Any = variant, remat: str = remat) -> Any:
            options = {"dtype": jnp.dtype("bfloat16"), "remat": remat}
            hidden = model.hidden(params, tokens, mask, last=new + 1, **options)[:, :-1]
            return logprobs_from_hidden(model, params, hidden, tokens[:, -new:], 0.7)[0].mean()

        def alone(q: Any, k: Any, v: Any, d: Any, context: Any = context) -> Any:
            out, pull = jax.vjp(lambda q, k, v: row_attention(context, q, k, v, jnp.asarray(mask)), q, k, v)
            return out, pull(d)

        gradient = jax.jit(jax.value_and_grad(loss))
        with attention_as(name), layers_unrolled(layers == "unrolled"):
            try:
                timings = {"attention and its gradient": measure(jax.jit(alone), *qkv)}
                timings["policy's gradient"] = measure(gradient, params)
            except Exception as error:  # a variant that this device does not have
                timings = {"error": str(error)[:500]}
        label = ", ".join([name, *([] if remat == "none" else [remat]), *([] if layers == "scanned" else [layers])])
        result[label] = timings
        if label == "ours" and args.topology is None:
            with jax.profiler.trace(str(Path(args.folder) / "trace")):
                jax.block_until_ready(gradient(params))
        print(json.dumps({label: timings}), flush=True)
    return result


def predicted_call(device: Any) -> Callable[..., dict[str, float]]:
    """`timed_calls` of arrays that are only described, for a described GPU: predicted milliseconds."""
    import jax

    from rlhf_jax.dry_run import compiling, roofline

    def predicted(function: Any, *args: Any) -> dict[str, float]:
        placed = jax.sharding.SingleDeviceSharding(device)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), args)
        program = compiling.compile_for(device)("call", function.trace(*shapes), 0)
        time = roofline.predict(program.text, roofline.rates(device, "bfloat16"), 1)
        parts = {name: round(1e3 * seconds, 3) for name, seconds in time.parts.items()}
        return {"ms": round(1e3 * time.seconds, 3), **parts, "temporary MiB": program.temporary / 2**20}

    return predicted


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


def measured_case(args: argparse.Namespace) -> tuple[Path, Any, dict[str, Any]]:
    """(work folder, case, our result) of a benchmark that an earlier part ran."""
    from benchmark_case import Case

    work = Path(args.folder) / args.case
    if not (work / "ours-0.json").exists():
        raise SystemExit(f"{work} has no result of ours: run the part {args.case} first")
    return work, Case.read(work), json.loads((work / "ours-0.json").read_text())


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak of the compiled programs beside the measured peak."""
    import benchmark_ours
    import jax
    from benchmark_case import rows_of

    from rlhf_jax.dry_run import memory as compiled
    from rlhf_jax.stages import open_stage

    work, case, result_of_case = measured_case(args)
    config = benchmark_ours.config_of(case, work, result_of_case["micro"], str(Path(args.folder) / "memory"))
    stage = open_stage(config, train_dataset=rows_of(work, 0))
    result: dict[str, Any] = {"programs": {}}
    try:
        abstract = compiled.abstract_stage(config, stage.mesh)
        for program in compiled.programs(abstract):
            names = ("seconds", "arguments", "outputs", "temporary", "aliased", "other_resident", "peak")
            result["programs"][program.name] = {name: getattr(program, name) for name in names}
        abstract.close()
        state, _, _ = stage.train_step(stage.state, 0)
        state, metrics, _ = stage.train_step(state, 1)
        jax.block_until_ready((state, metrics))
    finally:
        stage.close()
    return result | {"measured": benchmark_ours.memory()}


def deterministic(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of our updates with the flags of --deterministic, of the case that was measured without them."""
    import benchmark

    from rlhf_jax.parallel import xla_flags

    work, case, without = measured_case(args)
    xla_flags.add(xla_flags.DETERMINISTIC)  # the child inherits them
    with_flags = benchmark.run_child("ours", case, work, 0, without["micro"], "deterministic")
    return {"without": without["updates"], "with": with_flags["updates"], "flags": os.environ["XLA_FLAGS"].split()}


PARTS = {
    "environment": environment,
    "numbers": numbers,
    "greedy": greedy,
    "attention": attention,
    "resume": resume,
    "resume_deterministic": functools.partial(resume, deterministic=True),
    "memory": memory,
    "deterministic": deterministic,
}


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--case", default="ppo_410m")
    parser.add_argument("--shape", default="410m", help="of attention: a Pythia size")
    parser.add_argument("--variants", nargs="+", help="of attention; default: all")
    parser.add_argument("--remat", nargs="+", default=["none"], help="of attention: none, dots, full")
    parser.add_argument("--layers", nargs="+", default=["scanned"], help="of attention: scanned, unrolled")
    parser.add_argument("--topology", help="of attention: predict for this GPU in place of timing, as h100:1")
    args = parser.parse_args()
    from rlhf_jax.parallel import xla_flags

    xla_flags.add_those_of_gpus()
    print(json.dumps(PARTS[args.name](args)), flush=True)


if __name__ == "__main__":
    main()

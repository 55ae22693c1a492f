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
import shutil
import subprocess
import sys
import time
import typing
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
    result: dict[str, Any] = {"shape": f"{rows} rows of {length} tokens"}
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
    shutil.rmtree(base, ignore_errors=True)  # of a part that was cut off
    base.mkdir(parents=True)
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
    """Each implementation of attention in one layer alone and in the policy's gradient of one micro-batch, for whole
    rows (PPO) and after shared prompts (RLOO, k = 4), by what the backward pass recomputes.

    Writes --json after each measurement, and measures nothing again that it has.
    """
    import jax

    from rlhf_jax import models
    from rlhf_jax.algorithms.networks import Network
    from rlhf_jax.algorithms.response_logprobs import response_logprobs
    from rlhf_jax.config import PPOConfig

    model, rows, prompt, new = shape_of(args)[0], 4, 40, 8
    if not args.small:
        model, rows, prompt, new = models.pythia(args.shape), 16, 512, 53
    heads, size = model.config.num_attention_heads, model.config.head_dim
    case = f"{'small' if args.small else args.shape}, {heads} heads of {size}, {rows} rows of {prompt} + {new} tokens"
    result: dict[str, Any] = {"case": case, "measured": {}}
    if args.json is not None and args.json.exists():
        result = json.loads(args.json.read_text(encoding="utf-8"))
    params = model.init(jax.random.key(0), heads=("causal",))

    def measure(label: str, function: Any, *inputs: Any) -> None:
        if label not in result["measured"]:
            try:
                result["measured"][label] = timed_calls(function, *inputs)
            except jax.errors.JaxRuntimeError as error:  # out of memory, or refused by the compiler
                result["measured"][label] = {"error": str(error).splitlines()[0][:80]}
            write_json(args.json, result)

    # What needs less memory comes first: the peak of a process only rises.
    for group, form in ((4, "shared prompts"), (1, "whole rows")):
        batch = experience(model, rows, group, prompt, new)
        for remat, name in itertools.product(("dots", "none"), args.variants or implementations(model)):
            variant = dataclasses.replace(model, attn_implementation=name)
            recompute = {"gradient_checkpointing": remat != "none", "gradient_checkpointing_policy": "dots"}
            config = PPOConfig(dtype="bfloat16", response_length=new, **recompute)

            def loss(params: Any, batch: Any, model: Any = variant, config: Any = config) -> Any:
                return response_logprobs(Network(model, params), batch, config)[0].mean()

            measure(f"{form}, {name}, alone", *attention_alone(variant, batch))
            measure(f"{form}, {name}, {remat}", jax.value_and_grad(loss), params, batch)
    return result


def implementations(model: Any) -> list[str]:
    """The implementations of attention that this device has for a model in bfloat16; blocked is the last."""
    import jax

    from rlhf_jax.models.attention_kernels import unsupported
    from rlhf_jax.models.options import ComputeOptions

    model = model.family.decoder_config(model.config), "bfloat16", jax.devices()[0]
    names = typing.get_args(typing.get_type_hints(ComputeOptions)["attn_implementation"])
    return [name for name in reversed(names) if name != "auto" and unsupported(name, *model) is None]


def experience(model: Any, rows: int, group: int, prompt: int, new: int) -> Any:
    """A micro-batch of random tokens: `group` responses of `new` tokens to each prompt of up to `prompt`."""
    import numpy as np

    from rlhf_jax.types import Experience

    prompts, mask = random_rows(model, rows // group, prompt)
    response = random_rows(model, rows, new)[0].reshape(-1, group, new)
    keep = np.ones(response.shape, bool)
    return Experience(prompts, mask.sum(1), response, keep, keep, keep.sum(2), None)


def attention_alone(model: Any, batch: Any) -> tuple[Any, Any, Any]:
    """One layer's attention of a micro-batch and its gradient; random queries, keys and values of its rows, and of the
    responses after shared prompts."""
    import jax
    import jax.numpy as jnp

    from rlhf_jax.models.attention import Keys
    from rlhf_jax.models.attention_kernels import row_attention
    from rlhf_jax.models.decoder_context import Context

    config = model.family.decoder_config(model.config)
    context = Context(config, attn_implementation=model.attn_implementation)
    prompts, group, new = batch.response.shape
    in_rows = new if group == 1 else 0
    # As in the layers of an update, rows begin at column 0.
    mask = jnp.arange(batch.prompt_tokens.shape[1] + in_rows) < (batch.prompt_lengths + in_rows)[:, None]

    def attend(rows: Any, responses: Any) -> Any:
        query, *pair = rows
        keys = Keys(*pair, mask)
        out = row_attention(context, query, keys, start_at_0=True)
        if in_rows:
            return out
        query, *pair = responses
        suffix = Keys(*pair, jnp.ones((prompts * group, new), bool))
        return out, row_attention(context, query, suffix, prefix=keys, start_at_0=True)

    def both(*parts: Any) -> Any:
        out, pull = jax.vjp(attend, *parts)
        return out, pull(out)

    def normal(rows: int, length: int) -> list[Any]:
        heads = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
        shapes = [(rows, length, n, config.head_dim) for n in heads]
        return [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)]

    return both, normal(*mask.shape), normal(prompts * group, new)


def timed_calls(function: Any, *args: Any) -> dict[str, Any]:
    """Milliseconds of a call (of five in a row, the best of three), seconds of compilation, and MiB beside the
    arguments: as compiled, and as measured if the peak of the process rose."""
    import jax

    from rlhf_jax.parallel import peaks

    def memory(name: str) -> int:
        return (jax.devices()[0].memory_stats() or {}).get(name, 0)

    times, compiled = [time.perf_counter()], jax.jit(function)
    for step in (lambda f: f.trace(*args), lambda traced: traced.lower(), lambda lowered: lowered.compile()):
        compiled = step(compiled)
        times.append(time.perf_counter())
    peak, used, sizes = memory("peak_bytes_in_use"), memory("bytes_in_use"), compiled.memory_analysis()
    jax.block_until_ready(compiled(*args))
    risen = memory("peak_bytes_in_use")
    return {
        "ms": 200 * peaks.fastest(lambda: [compiled(*args) for _ in range(5)]),
        "trace, lower, XLA s": [after - before for before, after in itertools.pairwise(times)],
        "MiB": (sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes) / 2**20,
        "measured MiB": (risen - used) / 2**20 if risen > peak else None,
    }


def write_json(path: Path | None, result: Any) -> None:
    """Writes a result whole, if there is a path."""
    from rlhf_jax.runtime.run_folder import write_atomically

    if path is not None:
        write_atomically(str(path), json.dumps(result, indent=1))


PARTS = {
    "environment": machine,
    "numbers": numbers,
    "greedy": greedy,
    "attention": attention,
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
    parser.add_argument("--variants", nargs="+", help="of attention: blocked, cudnn, ...; default: all of the device")
    args = parser.parse_args()
    from rlhf_jax.parallel import xla_flags

    xla_flags.add_those_of_run()
    result = PARTS[args.name](args)
    print(json.dumps(result, indent=1), flush=True)
    write_json(args.json, result)


if __name__ == "__main__":
    main()

"""Where sampler and learner differ in half precision: log-probabilities of the same tokens, part by part.

    python scripts/bench/difference.py --model pythia-70m --rows 8 --prompt 64 --response 48
    python scripts/bench/difference.py --model FOLDER --rows 8 --response 48

The sampler draws responses in bfloat16. All other log-probabilities are of these tokens, from the same weights rounded
to bfloat16. Both tables have the largest and the mean |difference| over the tokens.

Forms: what the sampler does is replaced by what the learner does, one thing after another: tokens one by one or all in
one step, kernels transposed or as stored (CPUs), the head, attention over the cache or over rows, prompts alone or in
whole rows, kernels of attention. Each is compared with the sampler, with the learner (whole rows, as PPO computes
them) and with the learner in float32.

Precision: a part of the model is computed in float32, in sampler and learner alike, and what remains is measured.
Seconds are those of all tokens by the sampler's steps and by the learner's forward pass, without compilation.

A FOLDER is a checkpoint with a chat template; its prompts are questions. Other models have random weights and prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerator_parts
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import losses, models
from rlhf_jax.generate import Sampling, generate
from rlhf_jax.models import decoder, layers
from rlhf_jax.models.io import hf
from rlhf_jax.models.linear import TransposedKernel
from rlhf_jax.parallel import xla_flags
from rlhf_jax.types import Array, Params, PromptBatch

QUESTIONS = (
    "Write a short story about a fox.",
    "Explain gravity to a child.",
    "What is 17 times 23? Show your steps.",
    "Name five rivers in Europe and describe each.",
    "Summarise the plot of Hamlet.",
    "Write a poem on rain.",
    "How do I bake bread at home?",
    "What causes inflation?",
)
TEMPERATURE = 1.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its weights and the prompts of B rows."""

    model: models.Model
    params: Params
    prompts: PromptBatch
    response_length: int

    @property
    def prompt_mask(self) -> Array:
        """[B, C] bool."""
        width = self.prompts.tokens.shape[1]
        return jnp.arange(width)[None] >= width - self.prompts.lengths[:, None]


# --- forms: (case, params, response [B, T], dtype) -> log-probabilities [B, T] float32


def token_logprobs(logits: Array, response: Array) -> Array:
    """[B, T, V] float32, [B, T] -> [B, T]."""
    return losses.logprobs_from_logits(logits / (TEMPERATURE + 1e-7), response)


def by_steps(
    case: Case,
    params: Params,
    response: Array,
    dtype: Any,
    *,
    together: bool = False,
    transposed: bool = True,
    learner_head: bool = False,
) -> Array:
    """By the sampler's prefill and decode steps.

    Args:
      together: all tokens in one step.
      transposed: kernels as the sampler has them on CPUs.
      learner_head: logits by `Model.logits`.
    """
    model, prompts, (rows, columns) = case.model, case.prompts, response.shape
    unstacked = model.unstack(params, dtype)
    if not transposed:
        transposes = {"is_leaf": lambda node: isinstance(node, TransposedKernel)}
        as_stored = lambda node: node.kernel_FxD.T if isinstance(node, TransposedKernel) else node  # noqa: E731
        unstacked = jax.tree.map(as_stored, unstacked, **transposes)
    first, prefix = model.prefill(unstacked, prompts.tokens, case.prompt_mask, dtype)
    cache = model.empty_cache(rows, columns, dtype, queries=columns if together else 1)
    if together:
        positions = prompts.lengths[:, None] + jnp.arange(columns - 1)[None]
        hidden, _ = model.decode(unstacked, prefix, cache, response[:, :-1], positions, jnp.int32(0), dtype)
    else:

        def step(cache: Any, t: Array) -> tuple[Any, Array]:
            tokens, positions = response[:, t][:, None], (prompts.lengths + t)[:, None]
            hidden, cache = model.decode(unstacked, prefix, cache, tokens, positions, t, dtype)
            return cache, hidden[:, 0]

        hidden = jax.lax.scan(step, cache, jnp.arange(columns - 1))[1].swapaxes(0, 1)
    hidden = jnp.concatenate([first[:, None], hidden], axis=1)
    if learner_head:
        logits = model.logits(params, hidden)
    else:
        logits = model.next_logits(unstacked, hidden.reshape(rows * columns, -1)).reshape(rows, columns, -1)
    return token_logprobs(logits, response)


def by_rows(
    case: Case, params: Params, response: Array, dtype: Any, *, shared: bool = False, attention: str = "blocked"
) -> Array:
    """By the learner's forward pass.

    Args:
      shared: prompts apart from responses, as RLOO and GRPO compute them; else in one row.
      attention: of whole rows.
    """
    model, prompts = dataclasses.replace(case.model, attn_implementation=attention), case.prompts
    mask = jnp.ones(response.shape, bool)
    if shared:
        rows = (prompts.tokens, case.prompt_mask, response, mask)
        last, hidden = model.hidden_after_prompts(params, *rows, dtype=dtype)
        hidden = jnp.concatenate([last[:, None], hidden[:, :-1]], axis=1)
    else:
        tokens = jnp.concatenate([prompts.tokens, response], axis=1)
        mask = jnp.concatenate([case.prompt_mask, mask], axis=1)
        hidden = model.hidden(params, tokens, mask, dtype=dtype, last=response.shape[1] + 1)[:, :-1]
    return token_logprobs(model.logits(params, hidden), response)


def forms(model: models.Model) -> dict[str, Callable]:
    """From the sampler's to the learner's."""
    out = {"sampler: one token a step": by_steps, "all tokens in one step": partial(by_steps, together=True)}
    if jax.default_backend() == "cpu":
        out["one token a step, kernels as stored"] = partial(by_steps, transposed=False)
    out["one token a step, the learner's head"] = partial(by_steps, learner_head=True)
    out["rows after their prompts"] = partial(by_rows, shared=True)
    *kernels, _ = accelerator_parts.implementations(model)
    out |= {f"whole rows, {name}": partial(by_rows, attention=name) for name in kernels}
    return out | {"learner: whole rows": by_rows}


# --- precision


@contextlib.contextmanager
def in_float32(*parts: str) -> Iterator[None]:
    """Programs that are traced here compute `parts` in float32, whatever their dtype: 'residual', the sums over layers;
    'products', outputs of matrix products, to which bfloat16 is only their factors' dtype; 'head', the last norm and
    the logits."""
    float32, embed, final_norm = jnp.dtype(jnp.float32), decoder._embed, decoder._final_norm

    def wide_product(product: Callable) -> Callable:
        return lambda layout, names, _, *arrays: product(layout, names, float32, *arrays)

    def attention(self: Any, x: Array, rope: Any, attend_fn: Callable, call: Callable = decoder.Attention.__call__):
        return call(self, x, rope, lambda *qkv: attend_fn(*(part.astype(self.context.dtype) for part in qkv)))

    def last_norm(context: Any, backbone: Params, x: Array) -> Array:
        return final_norm(dataclasses.replace(context, dtype=jnp.float32), backbone, x)

    patches = {
        "residual": [(decoder, "_embed", lambda *args, **options: embed(*args, **options).astype(float32))],
        "products": [(layers, name, wide_product(getattr(layers, name))) for name in ("product", "transposed_product")],
        "head": [(decoder, "_final_norm", last_norm)],
    }
    patches["products"] += [(decoder.Attention, "__call__", attention)]
    jax.clear_caches()  # layers are traced once for all programs
    with contextlib.ExitStack() as stack:
        for part in parts:
            for patch in patches[part]:
                stack.enter_context(mock.patch.object(*patch))
        yield
    jax.clear_caches()


PRECISIONS = {
    "bfloat16": ("bfloat16",),
    "bfloat16, float32 residual stream": ("bfloat16", "residual"),
    "and outputs of products": ("bfloat16", "residual", "products"),
    "and head": ("bfloat16", "residual", "products", "head"),
    "float16": ("float16",),
    "float32": ("float32",),
}
"""Names in the table -> dtype and parts of `in_float32`."""


# --- measurement


def distances(a: Any, b: Any) -> dict[str, float]:
    """Largest and mean |difference| of log-probabilities."""
    difference = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
    return {"max": float(difference.max()), "mean": float(difference.mean())}


def compute(form: Callable, case: Case, response: Array, dtype: str) -> tuple[np.ndarray, float]:
    """(log-probabilities [B, T], seconds of the faster of two runs after one that compiles)."""
    program = jax.jit(lambda params, response: form(case, params, response, jnp.dtype(dtype)))
    out, seconds = jax.block_until_ready(program(case.params, response)), []
    for _ in range(2):
        began = time.perf_counter()
        out = jax.block_until_ready(program(case.params, response))
        seconds.append(time.perf_counter() - began)
    return jax.device_get(out), min(seconds)


def measure(case: Case) -> dict[str, Any]:
    """{"tokens", "forms": by name {"sampler", "learner", "float32": distances to each}, "precisions": by name
    {"difference": of sampler and learner, "sampler", "learner": distances to float32, "seconds": of each}}."""
    model, dtype = case.model, "bfloat16"
    rounded = jax.tree.map(lambda x, y: x.astype(y.dtype), model.cast_params(case.params, dtype), case.params)
    case = dataclasses.replace(case, params=rounded)
    sampling = Sampling(case.response_length, temperature=TEMPERATURE)
    key, options = jax.random.key(3), {"dtype": jnp.dtype(dtype)}
    rollout = jax.jit(lambda params: generate(model, params, case.prompts, key, sampling, **options))(case.params)
    response = rollout.response
    exact, _ = compute(by_rows, case, response, "float32")
    each = {name: compute(form, case, response, dtype)[0] for name, form in forms(model).items()}
    learner = each["learner: whole rows"]
    result: dict[str, Any] = {"tokens": response.size, "forms": {}, "precisions": {}}
    for name, logprobs in each.items():
        others = {"sampler": rollout.logprobs, "learner": learner, "float32": exact}
        result["forms"][name] = {other: distances(logprobs, values) for other, values in others.items()}
    for name, (dtype, *parts) in PRECISIONS.items():
        with in_float32(*parts):
            sampler, steps_seconds = compute(by_steps, case, response, dtype)
            learner, rows_seconds = compute(by_rows, case, response, dtype)
        row = {
            "difference": distances(sampler, learner),
            "seconds": {"sampler": steps_seconds, "learner": rows_seconds},
        }
        row |= {"sampler": distances(sampler, exact), "learner": distances(learner, exact)}
        result["precisions"][name] = row
    return result


def tables(result: dict[str, Any]) -> str:
    """Markdown of `measure`."""

    def shown(values: dict[str, float]) -> str:
        return f"{values['max']:.4f}, {values['mean']:.5f}"

    lines = [f"| {result['tokens']} tokens, bfloat16: largest, mean | to the sampler | to the learner | to float32 |"]
    lines += ["|---|---|---|---|"]
    for name, row in result["forms"].items():
        lines.append(f"| {name} | {' | '.join(shown(row[other]) for other in ('sampler', 'learner', 'float32'))} |")
    head = ("precision", "sampler to learner", "sampler to float32", "learner to float32", "s: sampler, learner")
    lines += ["", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in result["precisions"].items():
        cells = [shown(row[other]) for other in ("difference", "sampler", "learner")]
        seconds = ", ".join(f"{row['seconds'][side]:.2f}" for side in ("sampler", "learner"))
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds} |")
    return "\n".join(lines)


# --- command


def random_case(model: models.Model, rows: int, columns: int, response_length: int) -> Case:
    """Random weights, and left-padded prompts of columns / 2 to all of them."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, model.config.vocab_size, (rows, columns))
    lengths = random.integers(columns // 2, columns + 1, rows)
    return Case(model, model.init(jax.random.key(0)), prompt_batch(tokens, lengths), response_length)


def checkpoint_case(folder: str, rows: int, response_length: int) -> Case:
    """A checkpoint with a chat template, and `QUESTIONS`."""
    from transformers import AutoTokenizer

    model, params = hf.load(folder)
    tokenizer, texts = AutoTokenizer.from_pretrained(folder), itertools.islice(itertools.cycle(QUESTIONS), rows)
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    ids = [tokenizer.apply_chat_template([{"role": "user", "content": x}], **options)["input_ids"] for x in texts]
    lengths = np.array(list(map(len, ids)))
    tokens = np.array([[0] * (lengths.max() - len(row)) + row for row in ids])
    return Case(model, jax.tree.map(jnp.asarray, params), prompt_batch(tokens, lengths), response_length)


def prompt_batch(tokens: np.ndarray, lengths: np.ndarray) -> PromptBatch:
    """Prompts from left-padded tokens [B, C] and their numbers of tokens [B]."""
    rows = jnp.arange(len(tokens), dtype=jnp.int32)
    return PromptBatch(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32), rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-70m", help="pythia-SIZE, LAYERSxWIDTHxHEADS, or a checkpoint")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="most tokens of a random prompt")
    parser.add_argument("--response", type=int, default=48, help="tokens of a response")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = parser.parse_args()
    xla_flags.add_those_of_run()
    if Path(args.model).is_dir():
        case = checkpoint_case(args.model, args.rows, args.response)
    else:
        size = args.model.removeprefix("pythia-")
        model = models.pythia(size) if size != args.model else models.custom_shape(size, 512)
        case = random_case(model, args.rows, args.prompt, args.response)
    result = measure(case)
    print(tables(result), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

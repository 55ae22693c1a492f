"""Tiny models of every family, built by transformers with every vector random, as the reference for ours.

Head sizes of 16 have several rotary frequencies, the texts of the tests are longer than the windows and than the
original contexts of scaled rotary embeddings, soft caps are small, and no size divides another: each switch shows.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import transformers

from rlhf_jax.models.io import hf
from tests.helpers.models_common import reference_inputs
from tests.helpers.optional import optional

torch = optional("torch")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e3,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.02,
    "pad_token_id": 60,
    "eos_token_id": 59,
    "bos_token_id": 58,
}
NO_HEAD_DIM = {**SIZES, "hidden_size": 64}
NO_HEAD_DIM.pop("head_dim")
# (transformers' classes without suffix, the arguments of its config)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {**SIZES, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 8, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2": (
        "Qwen2",
        {
            **NO_HEAD_DIM,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e6},
        },
    ),
    "qwen3": ("Qwen3", {**SIZES, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {**NO_HEAD_DIM, "num_hidden_layers": 4, "rope_parameters": {"rope_theta": 5e3}}),
    "olmo2": ("Olmo2", {**NO_HEAD_DIM, "rope_parameters": {"rope_theta": 5e3}}),
    "gemma2": (
        "Gemma2",
        {
            **SIZES,
            "sliding_window": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3_text": (
        "Gemma3",
        {
            **SIZES,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {**NO_HEAD_DIM, "sliding_window": 8, "rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 0.75}},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 61,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 53,
            "n_positions": 256,
            "layer_norm_epsilon": 0.02,
            "eos_token_id": 59,
            "bos_token_id": 58,
            "pad_token_id": 60,
        },
    ),
}
CONFIG_CLASSES = {"gemma3_text": "Gemma3TextConfig", "gpt2": "GPT2Config"}


def config_of(family: str, settings: dict | None = None):
    """transformers' config of the tiny model; `settings` in place of the family's."""
    name, tiny = FAMILIES[family]
    config_class = getattr(transformers, CONFIG_CLASSES.get(family, f"{name}Config"))
    return config_class(**copy.deepcopy(tiny if settings is None else settings))


def reference(family: str, kind: str = "causal", seed: int = 0, settings: dict | None = None):
    """A transformers model with every weight random, norms and biases too; `settings` in place of the family's."""
    generator = torch.Generator().manual_seed(seed)
    name, config = FAMILIES[family][0], config_of(family, settings)
    if kind == "scalar":
        config.num_labels = 1
        classes = {"gemma3_text": "Gemma3TextForSequenceClassification"}
        name = classes.get(family, f"{name}ForSequenceClassification")
    else:
        name = {"gpt2": "GPT2LMHeadModel"}.get(family, f"{name}ForCausalLM")
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and parameter_name.endswith("weight") and not family.startswith("gemma")
            # Wide matrices of the same size would make scores at which float32 itself loses the fifth digit.
            std = 0.2 if parameter.ndim == 1 else min(0.2, 1.6 / max(parameter.shape) ** 0.5)
            parameter.copy_(1.0 + 0.2 * noise if is_norm else std * noise)
    return model.eval()


def scalar_of(family: str, causal, settings: dict | None = None):
    """A transformers model of scores on the backbone of a causal one."""
    scalar = reference(family, "scalar", settings=settings)
    scalar.base_model.load_state_dict(causal.base_model.state_dict())
    return scalar


class Text(NamedTuple):
    """Rows in every way that padding can lie.

    Rows 0 to 3 continue the prompts 0, 0, 1, 1; prompt 1 is padded on the left; rows 1 to 3 end early. Rows
    4 to 6 are the first `short` tokens of row 0, padded on the right, on both sides and on the left.
    """

    tokens: np.ndarray  # [7, S]
    mask: np.ndarray
    context: int  # columns of the prompts
    short: int
    weights: np.ndarray  # of a sum of logits, [7, S, V]


def text(vocab: int, pad: int, context: int, total: int, seed: int = 0) -> Text:
    """Random rows; the pad's id is among the inputs once."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, pad, (7, total)).astype(np.int32)
    tokens[0, 5] = pad
    tokens[1, :context], tokens[3, :context] = tokens[0, :context], tokens[2, :context]
    response, left = total - context, context // 4
    starts = [0, 0, left, left]
    ends = [total, total - response // 4, total - 1, context + 3]
    short = total // 2
    for row, start in zip((4, 5, 6), (0, (total - short) // 3, total - short), strict=True):
        tokens[row, start : start + short] = tokens[0, :short]
        starts, ends = [*starts, start], [*ends, start + short]
    columns = np.arange(total)[None]
    mask = (columns >= np.array(starts)[:, None]) & (columns < np.array(ends)[:, None])
    weights = rng.standard_normal((*mask.shape, vocab)).astype(np.float32) * mask[..., None] / 100
    return Text(tokens, mask, context, short, weights)


class Outputs(NamedTuple):
    """Of a causal model on a `Text`, numpy."""

    hidden: np.ndarray
    logits: np.ndarray
    gradients: dict  # of the weighted sum of logits, as params


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, tokens, mask, weights):
    def weighted(params):
        hidden = model.hidden(params, tokens, mask)
        logits = model.logits(params, hidden)
        return jnp.sum(logits * weights), (hidden, logits)

    gradients, out = jax.grad(weighted, has_aux=True)(params)
    return (*out, gradients)


def ours(model, params, rows: Text) -> Outputs:
    """Our outputs, in one program."""
    return Outputs(*jax.device_get(_forward(model, params, rows.tokens, rows.mask, rows.weights)))


def theirs(reference, rows: Text, folder: Path) -> Outputs:
    """Those of transformers; writes a checkpoint of the gradients into `folder`."""
    reference.zero_grad()
    out = reference(**reference_inputs(rows.tokens, rows.mask), output_hidden_states=True)
    (out.logits * torch.tensor(rows.weights)).sum().backward()
    gradients = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter, origin in zip(gradients.parameters(), reference.parameters(), strict=True):
            parameter.copy_(origin.grad)
    gradients.save_pretrained(folder)
    return Outputs(out.hidden_states[-1].detach().numpy(), out.logits.detach().numpy(), hf.load(folder)[1])


def their_scores(scalar, rows: Text) -> np.ndarray:
    """[7], of transformers."""
    with torch.no_grad():
        return scalar(**reference_inputs(rows.tokens, rows.mask)).logits[:, 0].numpy()


def at_last_token(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """values [B, S] at each row's last unmasked column."""
    return np.asarray(values)[np.arange(len(mask)), mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _decoded(model, params, tokens, mask, context):
    unstacked, count = model.unstack(params), tokens.shape[1] - context
    hidden, prefix = model.prefill(unstacked, tokens[::2, :context], mask[::2, :context])
    positions = jnp.cumsum(mask, axis=1) - 1
    cache = model.empty_cache(len(tokens), count)

    def step(cache, slot):
        column = context + slot
        out, cache = model.decode(unstacked, prefix, cache, tokens[:, column, None], positions[:, column, None], slot)
        return cache, out[:, 0]

    _, rest = jax.lax.scan(step, cache, jnp.arange(count))
    return jnp.concatenate([jnp.repeat(hidden, 2, axis=0)[:, None], rest.swapaxes(0, 1)], axis=1)


def decoded(model, params, rows: Text) -> np.ndarray:
    """Hidden states of rows 0 to 3 from the prompts' last column on, decoded token by token."""
    return np.asarray(_decoded(model, params, rows.tokens[:4], rows.mask[:4], rows.context))


@functools.partial(jax.jit, static_argnums=0)
def _after_prompts(model, params, *rows):
    return model.hidden_after_prompts(params, *rows)


def after_prompts(model, params, rows: Text) -> np.ndarray:
    """The same columns as `decoded`, each prompt computed once."""
    prompts = (x[:4:2, : rows.context] for x in (rows.tokens, rows.mask))
    responses = (x[:4, rows.context :] for x in (rows.tokens, rows.mask))
    last, hidden = _after_prompts(model, params, *prompts, *responses)
    return np.concatenate([np.repeat(last, 2, axis=0)[:, None], hidden], axis=1)

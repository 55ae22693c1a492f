"""Tiny GPT-NeoX models of transformers, as the reference for ours."""

from __future__ import annotations

import jax
import numpy as np
import transformers

from tests.helpers.optional import optional

torch = optional("torch")

VOCAB, PAD = 61, 60
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def reference(kind: str = "causal", seed: int = 0, **fields):
    """A transformers model with every weight random, biases and layer norms too: nothing hides behind 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    rope = {
        "rope_type": "default",
        "rope_theta": fields.pop("rotary_emb_base", 10000.0),
        "partial_rotary_factor": fields.pop("rotary_pct", 0.25),
    }
    settings = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": PAD, "rope_parameters": rope}
    config = transformers.GPTNeoXConfig(**(settings | SHAPE | fields))
    if kind == "scalar":
        config.num_labels = 1
        model = transformers.GPTNeoXForSequenceClassification(config)
    else:
        model = transformers.GPTNeoXForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.1 * noise if "norm.weight" in name else 0.15 * noise)
    return model.eval()


def reference_inputs(tokens, mask):
    """What transformers needs to see the same rows: attention mask, positions of unmasked tokens, PAD elsewhere."""
    mask = np.asarray(mask)
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return {
        "input_ids": torch.tensor(np.where(mask, tokens, PAD)),
        "attention_mask": torch.tensor(mask.astype(np.int64)),
        "position_ids": torch.tensor(positions),
    }


def padded_rows(lengths, left, width: int, seed: int = 0):
    """Random tokens [B, width] below PAD and their mask, `lengths` tokens a row after `left` columns of padding."""
    rng = np.random.default_rng(seed)
    columns = np.arange(width)[None, :]
    left, lengths = np.asarray(left)[:, None], np.asarray(lengths)[:, None]
    mask = (columns >= left) & (columns < left + lengths)
    return rng.integers(0, PAD, mask.shape).astype(np.int32), mask


def random_params(model, heads=("causal",), seed: int = 0):
    """Params of a model with every weight random, numpy float32; layer norms near 1."""
    shapes = jax.eval_shape(lambda key: model.init(key, heads=heads), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return (centre + 0.15 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def assert_trees_equal(a, b) -> None:
    """Bit for bit, dtypes too."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

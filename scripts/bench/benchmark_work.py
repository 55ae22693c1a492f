"""The work of an update: FLOPs, tokens and bytes of GPT-NeoX by formula, and FLOPs as counted by XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.models.attention import QUERY_BLOCK

BYTES = {"float32": 4, "bfloat16": 2}


def causal(length: int) -> int:
    """Pairs of query and visible key in a row of `length` tokens."""
    return length * (length + 1) // 2


def blocked(length: int) -> int:
    """Pairs that `attention.causal_attention` multiplies: its blocks extend beyond the diagonal."""
    block = max(QUERY_BLOCK, -(-length // 8))
    stops = [min(start + block, length) for start in range(0, length, block)]
    return sum((stop - start) * stop for start, stop in zip(range(0, length, block), stops))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    width: int
    hidden: int
    vocab: int
    heads: int = 0
    """Entries of all query heads together; 0: the width."""
    key_value: int = 0
    """Entries of all heads of keys; 0: as those of queries."""
    gated: bool = False
    """Whether the MLP has two matrices into its hidden units."""

    @classmethod
    def of(cls, model) -> Shape:
        """From a `models.Model`."""
        config = model.family.decoder_config(model.config)
        sizes = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size)
        heads, own = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        return cls(*sizes, heads, own, config.gated_mlp)

    @property
    def attended(self) -> int:
        """Entries of all query heads together."""
        return self.heads or self.width

    @property
    def kept(self) -> int:
        """Entries of keys and values of a token and layer."""
        return 2 * (self.key_value or self.attended)

    @property
    def qkv(self) -> int:
        """Entries of a layer's matrices for query, key and value."""
        return self.width * (self.attended + self.kept)

    @property
    def matrices(self) -> int:
        """Entries of the layers' matrices: QKV, output projection, MLP."""
        mlp = (3 if self.gated else 2) * self.width * self.hidden
        return self.layers * (self.qkv + self.attended * self.width + mlp)

    def forward(self, tokens: int, pairs: int, logits: int, asked: tuple[int, int]) -> int:
        """FLOPs of a forward pass: 2 per matrix entry and token, 4 H K per layer and pair (scores, weighted values),
        2 D V per row of logits. Norms, softmax and activations are not counted (Chowdhery et al. 2022, appendix B).

        Args:
          tokens: number of input tokens.
          pairs: of query and key.
          logits: positions with logits.
          asked: tokens, and their pairs, whose last hidden states are used. Others need only QKV in the last layer.
        """
        attention = 4 * self.attended * ((self.layers - 1) * pairs + asked[1])
        after_qkv = self.matrices // self.layers - self.qkv
        unused = after_qkv * (tokens - asked[0])
        return 2 * (self.matrices * tokens - unused) + attention + 2 * self.width * self.vocab * logits


class Counted(NamedTuple):
    """The work of a phase."""

    flops: int
    tokens: int  # generate, decode: sampled tokens; else: input tokens, once per model


def work(
    shape: Shape,
    prompts: Sequence[int],
    group: int,
    response: int,
    epochs: int,
    algo: str,
    frozen: Sequence[str] = (),
) -> dict[str, Counted]:
    """The necessary work of each phase of an update, independent of the implementation.

    Not counted: padding, masked keys, repeated prompts of a group, and last-layer outputs that nothing reads.

    Args:
      shape: of policy, reference, value and reward model.
      prompts: their lengths in tokens.
      group: responses to a prompt.
      response: tokens of each response.
      epochs: update epochs.
      algo: 'ppo' or 'rloo'.
      frozen: those of 'policy' and 'value' whose matrices get no gradient; adapters are not counted.
    """
    rows, tokens = len(prompts) * group, sum(prompts)

    def passed(length: int, logits: int, asked: tuple[int, int]) -> int:
        pairs = sum(causal(p) + group * (causal(p + length) - causal(p)) for p in prompts)
        return shape.forward(tokens + rows * length, pairs, logits, asked)

    def ends(length: int) -> tuple[int, int]:
        """A prompt's last token and the first `length` of each response."""
        pairs = sum(p + group * (causal(p + length) - causal(p)) for p in prompts)
        return len(prompts) + rows * length, pairs

    # Values and logits are needed where the response is predicted, a score at its last token.
    predicted = ends(response - 1)
    policy, value = passed(response, rows * response, predicted), passed(response, 0, predicted)
    reward = passed(response, 0, (rows, group * sum(p + response for p in prompts)))
    generate, prefill = passed(response - 1, rows * response, predicted), passed(0, rows, ends(0))
    through = tokens + rows * response
    trained = {"policy": policy} | ({"value": value} if algo == "ppo" else {})
    learned = sum(trained.values())
    # The backward pass costs two forward passes: gradients of the inputs and of the matrices.
    update = sum(flops * (2 if name in frozen else 3) for name, flops in trained.items())
    found = {
        "generate": Counted(generate, rows * response),
        "prefill": Counted(prefill, tokens),
        "decode": Counted(generate - prefill, rows * (response - 1)),
        "reward": Counted(reward, through),
        "reference": Counted(policy, through),
        "experience": Counted(policy + learned, through),
        "update": Counted(epochs * update, epochs * through),
    }
    return found | ({"value": Counted(value, through)} if algo == "ppo" else {})


def decode_bytes(shape: Shape, prompts: Sequence[int], group: int, response: int, dtype: str) -> int:
    """Bytes that decoding reads: all matrices each step, and keys and values, those of a prompt once per group."""
    steps, rows = response - 1, len(prompts) * group
    weights = shape.matrices + shape.width * shape.vocab
    kept = shape.layers * shape.kept  # entries of keys and values per token
    read = steps * (weights + kept * sum(prompts)) + kept * rows * causal(steps)
    return read * BYTES[dtype]


def counted_by_xla(model, rows: int, length: int) -> float:
    """XLA's FLOP count of a forward pass with logits everywhere. Layers are unrolled: it counts a loop body once.

    Args:
      model: a `models.Model` with a causal head.
      rows, length: of the batch.
    """
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))

    def forward(params, tokens, mask):
        params = model.unstack(params)
        hidden, kept = model.prefill(params, tokens, mask)
        # prefill returns the last position only; logits of the others cost the same.
        logits = model.logits(params, jnp.broadcast_to(hidden[:, None], (*tokens.shape, hidden.shape[-1])))
        return logits, kept

    shapes = (jax.ShapeDtypeStruct((rows, length), kind) for kind in (jnp.int32, jnp.bool_))
    return jax.jit(forward).lower(params, *shapes).cost_analysis()["flops"]


def both_counts(model, rows: int, length: int) -> dict[str, float]:
    """FLOPs of that forward pass by formula and by XLA, as a check of the formula."""
    logits, pairs = rows * length, rows * blocked(length)
    formula = Shape.of(model).forward(rows * length, pairs, logits, (rows * length, pairs))
    return {"rows": rows, "length": length, "formula": formula, "xla": counted_by_xla(model, rows, length)}

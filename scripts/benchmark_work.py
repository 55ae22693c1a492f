"""What an update has to compute: FLOPs, tokens and bytes of GPT-NeoX by formula, and what XLA counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.models.attention import QUERY_BLOCK

BYTES = {"float32": 4, "bfloat16": 2}


def causal(length: int) -> int:
    """Pairs of a query and a key that it may see, in a row of `length` tokens."""
    return length * (length + 1) // 2


def blocked(length: int) -> int:
    """Pairs that `attention.causal_attention` multiplies: its blocks end on the diagonal and go a little beyond."""
    block = max(QUERY_BLOCK, -(-length // 8))
    stops = [min(start + block, length) for start in range(0, length, block)]
    return sum((stop - start) * stop for start, stop in zip(range(0, length, block), stops))


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT-NeoX by its sizes."""

    layers: int
    width: int
    hidden: int
    vocab: int

    @classmethod
    def of(cls, config) -> Shape:
        """From a GPTNeoXConfig."""
        return cls(config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size)

    @property
    def matrices(self) -> int:
        """Entries of the layers' matrices: QKV 3 D^2, projection D^2, MLP 2 D F."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.hidden)

    def forward(self, tokens: int, pairs: int, logits: int, asked: tuple[int, int]) -> int:
        """FLOPs of a forward pass: 2 an entry and token, 4 D a layer and pair (scores, weighted values), 2 D V a row of
        logits. Norms, softmax and activations are left out, as MFU does (Chowdhery et al. 2022, appendix B).

        Args:
          tokens: that go through the layers.
          pairs: of query and key.
          logits: positions with logits.
          asked: tokens, and their pairs, whose last hidden states are used: of the others the last layer needs QKV.
        """
        attention = 4 * self.width * ((self.layers - 1) * pairs + asked[1])
        after_qkv = self.matrices // self.layers - 3 * self.width**2
        unused = after_qkv * (tokens - asked[0])
        return 2 * (self.matrices * tokens - unused) + attention + 2 * self.width * self.vocab * logits


class Counted(NamedTuple):
    """The work of a phase."""

    flops: int
    tokens: int  # generate, decode: sampled; else: through a model, each model counted once


def work(
    shape: Shape,
    prompts: Sequence[int],
    group: int,
    response: int,
    epochs: int,
    algo: str,
    frozen: Sequence[str] = (),
) -> dict[str, Counted]:
    """The work of each phase of an update: what has to be done, for whoever does it.

    Padding is no work, nor is a key that a query may not see, nor a prompt computed again for each of its responses,
    nor what the last layer would make of tokens that predict nothing.

    Args:
      shape: of policy, reference, value and reward model.
      prompts: their lengths in tokens.
      group: responses to a prompt.
      response: tokens of each response.
      epochs: passes of learning.
      algo: 'ppo' or 'rloo'.
      frozen: of 'policy' and 'value', those whose matrices get no gradient; adapters themselves are not counted.
    """
    rows, tokens = len(prompts) * group, sum(prompts)

    def passed(length: int, logits: int, asked: tuple[int, int]) -> int:
        pairs = sum(causal(p) + group * (causal(p + length) - causal(p)) for p in prompts)
        return shape.forward(tokens + rows * length, pairs, logits, asked)

    def ends(length: int) -> tuple[int, int]:
        """A prompt's last token and the first `length` of each response."""
        pairs = sum(p + group * (causal(p + length) - causal(p)) for p in prompts)
        return len(prompts) + rows * length, pairs

    # Values and logits are asked of where the response is predicted, a score of its last token.
    predicted = ends(response - 1)
    policy, value = passed(response, rows * response, predicted), passed(response, 0, predicted)
    reward = passed(response, 0, (rows, group * sum(p + response for p in prompts)))
    generate, prefill = passed(response - 1, rows * response, predicted), passed(0, rows, ends(0))
    through = tokens + rows * response
    trained = {"policy": policy} | ({"value": value} if algo == "ppo" else {})
    learned = sum(trained.values())
    # The backward pass is two forward passes, one for the inputs' gradients and one for the matrices'.
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
    """Bytes that decoding has to read: all matrices each step, and keys and values, a prompt's once for its group."""
    steps, rows = response - 1, len(prompts) * group
    weights = shape.matrices + shape.width * shape.vocab
    kept = 2 * shape.layers * shape.width  # entries of a token's keys and values
    read = steps * (weights + kept * sum(prompts)) + kept * rows * causal(steps)
    return read * BYTES[dtype]


def counted_by_xla(model, rows: int, length: int) -> float:
    """FLOPs by XLA's own count of a forward pass with logits everywhere, layers unrolled: of a loop it counts one turn.

    Args:
      model: a `models.Model` with a causal head.
      rows, length: of the batch.
    """
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))

    def forward(params, tokens, mask):
        params = model.unstack(params)
        hidden, kept = model.prefill(params, tokens, mask)
        # prefill hands on the last position only; the others' logits cost the same.
        logits = model.logits(params, jnp.broadcast_to(hidden[:, None], (*tokens.shape, hidden.shape[-1])))
        return logits, kept

    shapes = (jax.ShapeDtypeStruct((rows, length), kind) for kind in (jnp.int32, jnp.bool_))
    return jax.jit(forward).lower(params, *shapes).cost_analysis()["flops"]


def both_counts(model, rows: int, length: int) -> dict[str, float]:
    """FLOPs of that forward pass by formula and by XLA: how far the one may be trusted."""
    logits, pairs = rows * length, rows * blocked(length)
    formula = Shape.of(model.config).forward(rows * length, pairs, logits, (rows * length, pairs))
    return {"rows": rows, "length": length, "formula": formula, "xla": counted_by_xla(model, rows, length)}

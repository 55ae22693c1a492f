"""The necessary work of an update: FLOPs, tokens and bytes of decoders by formula, whatever the implementation does.

Not counted: padding, masked keys, repeated prompts of a group, last-layer outputs that nothing reads, norms, softmax
and activations, recomputation, adapters, vision towers. Divided by seconds and a device's peak it is the model FLOPs
utilisation of the field (MFU; Chowdhery et al. 2022, PaLM, appendix B).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple


def causal(length: float) -> float:
    """Pairs of query and visible key in a row of `length` tokens."""
    return length * (length + 1) / 2


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
        heads, key_value = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        return cls(*sizes, heads, key_value, config.gated_mlp)

    @property
    def attended(self) -> int:
        """Entries of all query heads together."""
        return self.heads or self.width

    @property
    def cached(self) -> int:
        """Entries of keys and values of a token and layer."""
        return 2 * (self.key_value or self.attended)

    @property
    def qkv(self) -> int:
        """Entries of a layer's matrices for query, key and value."""
        return self.width * (self.attended + self.cached)

    @property
    def matrices(self) -> int:
        """Entries of the layers' matrices: QKV, output projection, MLP."""
        mlp = (3 if self.gated else 2) * self.width * self.hidden
        return self.layers * (self.qkv + self.attended * self.width + mlp)

    def forward(self, tokens: float, pairs: float, logits: float, asked: tuple[float, float]) -> float:
        """FLOPs of a forward pass: 2 per matrix entry and token, 4 H K per layer and pair (scores, weighted values),
        2 D V per row of logits.

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


class Work(NamedTuple):
    """The work of a phase."""

    flops: float
    tokens: float  # generate, decode: sampled tokens; else: input tokens, once per model
    bytes: float = 0.0  # that decoding reads


def rollout_work(
    shapes: Mapping[str, Shape],
    prompts: Sequence[int],
    group: int,
    response: float,
    epochs: int,
    *,
    frozen: Sequence[str] = (),
    itemsize: int = 4,
    recomputes: bool = True,
) -> dict[str, Work]:
    """The work of each phase of an update of PPO, RLOO or GRPO.

    Args:
      shapes: of 'policy'; of 'reference' and 'value' if there are; every other one is a reward model.
      prompts: their lengths in tokens.
      group: responses to a prompt.
      response: tokens of each response; of different lengths: their mean.
      epochs: over the responses.
      frozen: those of 'policy' and 'value' whose matrices get no gradient, since adapters are trained.
      itemsize: bytes of an entry of weights and cache.
      recomputes: whether the policy's log-probabilities are computed again before the update.

    Returns:
      by phase: generate (of it prefill and decode), reference, value, score, experience, update
    """
    rows, tokens = len(prompts) * group, float(sum(prompts))
    prompt_pairs = sum(map(causal, prompts))

    def response_pairs(length: float) -> float:
        """Of the first `length` tokens of each response: with its prompt, and among themselves."""
        return group * tokens * length + rows * causal(length)

    def passed(shape: Shape, length: float, logits: float, asked: tuple[float, float]) -> float:
        return shape.forward(tokens + rows * length, prompt_pairs + response_pairs(length), logits, asked)

    def ends(length: float) -> tuple[float, float]:
        """A prompt's last token and the first `length` of each response."""
        return len(prompts) + rows * length, tokens + response_pairs(length)

    # Values and logits are needed where the response is predicted, a score at its last token.
    predicted, last = ends(response - 1), (float(rows), group * tokens + rows * response)
    through = tokens + rows * response
    policy = shapes["policy"]
    generate = passed(policy, response - 1, rows * response, predicted)
    prefill = passed(policy, 0, rows, ends(0))
    forward = {
        role: passed(shape, response, 0 if role == "value" else rows * response, predicted)
        for role, shape in shapes.items()
        if role in ("policy", "reference", "value")
    }
    score = sum(passed(shape, response, 0, last) for role, shape in shapes.items() if role not in forward)
    experience = sum(flops for role, flops in forward.items() if recomputes or role != "policy")
    # The backward pass costs two forward passes: gradients of the inputs and of the matrices.
    trained = {role: (2 if role in frozen else 3) * flops for role, flops in forward.items() if role != "reference"}
    sampled, read = float(rows * response), decode_bytes(policy, prompts, [response] * rows, itemsize)
    phases = {
        "generate": Work(generate, sampled, read),
        "prefill": Work(prefill, tokens),
        "decode": Work(generate - prefill, rows * (response - 1), read),
        "score": Work(score, through),
        "experience": Work(experience, through),
        "update": Work(epochs * sum(trained.values()), epochs * through),
    }
    return phases | {role: Work(flops, through) for role, flops in forward.items() if role != "policy"}


def decode_bytes(
    shape: Shape, prompts: Sequence[int], responses: Sequence[float], itemsize: int, *, steps: float | None = None
) -> float:
    """Bytes that decoding has to read: all matrices in each step, and the keys and values of the rows that have not
    ended, those of a prompt once for its group.

    With W entries of matrices, the head's included, E entries of keys and values of a token in all layers, c tokens of
    a prompt and n of a response, whose first comes from the prompt and whose token i + 1 sees i others:
    itemsize * (steps * W + E * (sum over prompts of c * (largest n of its group - 1) + sum over responses of
    n * (n - 1) / 2)).

    Args:
      prompts: tokens of each of P prompts.
      responses: tokens of each of P * G responses, the G of a prompt side by side.
      itemsize: bytes of an entry.
      steps: decode steps, of all rows together; None: all rows are decoded at once, until the longest ends.
    """
    group = len(responses) // len(prompts)
    longest = [max(responses[i : i + group]) - 1 for i in range(0, len(responses), group)]
    steps = max(longest) if steps is None else steps
    weights = shape.matrices + shape.width * shape.vocab
    tokens = sum(c * n for c, n in zip(prompts, longest, strict=True)) + sum(causal(n - 1) for n in responses)
    return itemsize * (steps * weights + shape.layers * shape.cached * tokens)


def supervised_work(
    shape: Shape, rows: int, tokens: float, *, logits: float | None = None, frozen: bool = False
) -> Work:
    """The work of an update of SFT or of a reward model.

    Args:
      rows: sequences; of a pair two.
      tokens: of all of them; attention counts rows of their mean length.
      logits: positions with logits; None: the model has a score a row.
      frozen: whether adapters are trained in place of the matrices.
    """
    pairs = rows * causal(tokens / rows)
    asked = (float(rows), tokens) if logits is None else (tokens, pairs)
    forward = shape.forward(tokens, pairs, logits or 0.0, asked)
    return Work((2 if frozen else 3) * forward, tokens)

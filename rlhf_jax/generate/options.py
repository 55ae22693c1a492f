"""Options of sampling and decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from rlhf_jax.errors import UserError
from rlhf_jax.generate.regex import compile_regex
from rlhf_jax.option import (
    Fraction,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    TopP,
    checked_value,
    field_ranges,
    field_types,
    nearest,
    option,
)

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Options that generation_kwargs may override."""


@dataclasses.dataclass(frozen=True)
class SamplingOptions(Options):
    """What is sampled, and where a response ends."""

    # --- sampling
    response_length: PositiveInt = 53
    """Maximum number of response tokens."""
    temperature: PositiveFloat = 0.7
    """Sampling temperature; log-probs are computed at it too."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0: all."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens whose total probability reaches top_p; 1: all."""
    min_p: Fraction | None = option(None, rare=True)
    """Exclude tokens less likely than min_p times the most likely one."""
    repetition_penalty: PositiveFloat = option(1.0, rare=True)
    """Divide positive and multiply negative logits of tokens that already occurred by this; 1: off."""
    suppress_unused_ids: bool = option(False, rare=True)
    """Never sample ids that no token has: most checkpoints have more embedding rows than tokens. Log-probs stay those
    of all ids."""
    generation_kwargs: dict[str, Any] | None = option(None, rare=True)
    """Sampling options by their Hugging Face names, which override those above; log-probs keep `temperature`."""
    stop_token: Literal["eos"] | None = "eos"
    """Stop a response at the tokenizer's eos; None without stop_token_id: always response_length tokens."""
    stop_token_id: NonNegativeInt | None = option(None, rare=True)
    """Stop at this token id; not together with stop_token."""
    stop_token_ids: tuple[int, ...] | Literal["generation_config"] | None = None
    """Stop at any of these token ids, which count as eos in place of the tokenizer's; generation_config: those of the
    policy's generation_config.json. None: see stop_token."""
    structured_outputs_regex: str | None = option(None, rare=True)
    """Responses match this regular expression (Python's syntax) from their first to their last character: tokens after
    which they could not are never sampled (docs/guided_decoding.md)."""
    structured_outputs_regex_column: str | None = option(None, rare=True)
    """Column of the data set with the regular expression of each row, in place of structured_outputs_regex; where it is
    empty the response may be any text."""

    def sampling(self) -> dict[str, Any]:
        """temperature, top_k, top_p, min_p and repetition_penalty, with generation_kwargs applied."""
        kwargs, hints = self.generation_kwargs or {}, field_types(type(self))
        return {name: checked_value(name, hints[name], kwargs.get(name, getattr(self, name))) for name in SAMPLING}

    def problems(self) -> Iterator[str]:
        """stop_token, stop_token_id and stop_token_ids together; generation_kwargs that are not sampling options."""
        yield from super().problems()
        if self.stop_token is not None and self.stop_token_id is not None:
            yield (
                f"stop_token {self.stop_token!r} and stop_token_id {self.stop_token_id} exclude each other: "
                "give only one (for an id: --stop_token None --stop_token_id ID)."
            )
        ids = self.stop_token_ids
        if ids is not None and self.stop_token_id is not None:
            yield f"stop_token_ids {ids} and stop_token_id {self.stop_token_id} exclude each other: give only one."
        elif ids is not None and ids != "generation_config" and (not ids or min(ids) < 0):
            yield f"stop_token_ids is {ids}; it must be at least one token id, each at least 0."
        yield from self._structured_outputs_problems()
        for name, value in (self.generation_kwargs or {}).items():
            if (error := self._generation_kwarg_error(name, value)) is not None:
                yield error

    @property
    def guided(self) -> bool:
        """Whether responses match a regular expression."""
        return self.structured_outputs_regex is not None or self.structured_outputs_regex_column is not None

    def _structured_outputs_problems(self) -> Iterator[str]:
        if self.structured_outputs_regex is not None and self.structured_outputs_regex_column is not None:
            yield "structured_outputs_regex and structured_outputs_regex_column exclude each other: give only one."
        if self.guided and self.stop_token is None and self.stop_token_id is None and self.stop_token_ids is None:
            yield "structured_outputs_regex needs a token that ends responses: set stop_token eos."
        if self.structured_outputs_regex is not None:
            try:
                compile_regex(self.structured_outputs_regex)
            except UserError as error:
                yield f"structured_outputs_regex: {error}."

    def _generation_kwarg_error(self, name: str, value: Any) -> str | None:
        option = f"generation_kwargs[{name!r}]"
        if name in SAMPLING:
            try:
                value = checked_value(option, field_types(type(self))[name], value)
            except UserError as error:
                return str(error)
            return field_ranges(type(self))[name].error(option, value)
        if name == "max_new_tokens":
            if value == self.response_length:
                return None
            return f"{option} is {value!r}, but response_length is {self.response_length}: give response_length."
        if name == "do_sample":
            if value is True:
                return None
            return f"{option} is {value!r}: policy gradients need sampled responses, not greedy ones."
        if name in _INSTEAD_OF_GENERATION_KWARG:
            return f"{option} is not supported: {_INSTEAD_OF_GENERATION_KWARG[name]}."
        allowed = (*SAMPLING, "max_new_tokens", "do_sample")
        return f"{option} is not supported:{nearest(name, allowed) or ' choose from ' + ', '.join(SAMPLING) + '.'}"


_INSTEAD_OF_GENERATION_KWARG = {
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "stop_token_id"), "give stop_token_ids"),
    **dict.fromkeys(("stop_strings", "stop"), "responses stop at tokens: stop_token or stop_token_ids"),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), "special tokens are the tokenizer's"),
    **dict.fromkeys(("max_length", "max_tokens"), "give response_length"),
    **dict.fromkeys(("num_return_sequences", "n"), "give num_generations, an option of rloo and grpo"),
    **dict.fromkeys(("seed", "generator"), "give seed"),
}


@dataclasses.dataclass(frozen=True)
class DecodingOptions(Options):
    """How responses are decoded."""

    # --- decoding
    decode_slots: PositiveInt | None = option(None, rare=True, lowers={"generate": 2})
    """Rows decoded at a time, over all devices: a response that ends makes room for the next one of the batch
    (continuous batching). None: all rows of rollout_batch_size, which wait for the longest."""
    decode_longest_first: bool = option(True, rare=True)
    """With decode_slots: decode the prompts first whose responses were longest at their last visit."""
    decode_shrink: bool | None = option(None, rare=True, resume="rounding")
    """Go on with half of the rows when the other half have ended; each size is compiled. None: on CPUs, for responses
    of 128 tokens and more."""
    draft: Literal["ngram"] | None = option(None, rare=True, resume="rounding")
    """ngram: speculative decoding by prompt lookup, without a draft model. It proposes the tokens that followed an
    earlier occurrence of the last two tokens, in the prompt, the response or other responses to the prompt, and
    verifies them in one step. It does not change what is sampled."""
    draft_tokens: PositiveInt = option(4, rare=True, resume="rounding")
    """Tokens that draft proposes in a step."""
    kv_cache_dtype: Literal["auto", "int8"] = option("auto", rare=True)
    """Keys and values of responses during generation: in dtype, or in int8, which samples from another distribution
    (GRPO, with importance_sampling_correction)."""
    rollout_max_steps: PositiveInt | None = option(None, rare=True)
    """Maximum decode steps of a rollout, or with tools of each turn. Unfinished responses continue in the next update
    (partial rollouts, Kimi k1.5). Needs old_logprobs sampler. None: no limit."""

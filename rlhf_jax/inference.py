"""Inference with a trained policy: `load_policy(path).generate(texts)`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import storage
from rlhf_jax.config import PolicyConfig
from rlhf_jax.data import batches
from rlhf_jax.data.chat import ChatTemplate, conversation_fault, text_messages
from rlhf_jax.data.images import ImageProcessor, read_row
from rlhf_jax.data.row_texts import string_fault
from rlhf_jax.data.token_bytes import token_bytes
from rlhf_jax.errors import UserError
from rlhf_jax.generate import Sampling, generate_unstacked
from rlhf_jax.generate.guided import Automaton, Guide, token_automaton
from rlhf_jax.models.io import hf, peft
from rlhf_jax.models.io.generation_config import resolve_stop_ids
from rlhf_jax.models.options import Dtype
from rlhf_jax.models.placement import Weights
from rlhf_jax.option import field_ranges
from rlhf_jax.parallel import jax_settings, platforms, sharding, xla_flags
from rlhf_jax.rewards.interface import completion_ids
from rlhf_jax.runtime import compile_cache
from rlhf_jax.stages import open_models
from rlhf_jax.stages.open_models import Source
from rlhf_jax.types import Params, PartialResponses, PromptBatch, Rollout

POLICY_STAGES = ("ppo", "rloo", "grpo", "sft")
_MIN_WIDTH = 32  # columns of the shortest padded prompt
_MIN_LENGTH = 64  # columns of the shortest responses that are compiled for
_STOP_IDS = 4  # that are compiled for; more compile anew


def policy_folder(path: str) -> str:
    """The folder of a run's policy: RUN/policy, or that of the last stage of a pipeline. Other paths (a checkpoint, a
    hub name) are returned unchanged."""
    for part in ("", *POLICY_STAGES):
        folder = os.path.join(path, part, "policy")
        if any(storage.is_file(os.path.join(folder, name)) for name in (hf.CONFIG, peft.CONFIG)):
            return folder
    return path


def load_policy(
    path: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    dtype: str = "float32",
    images: bool = False,
) -> Policy:
    """Loads a policy; its batches are sharded over all devices.

    Args:
      path: a run's folder, a checkpoint's folder or a hub name; folders may be in a bucket.
      revision: of the hub.
      tokenizer: a folder or hub name, if the checkpoint has no tokenizer; 'synthetic' and 'arithmetic' are built in.
      dtype: compute dtype, 'float32', 'bfloat16' or 'float16'.
      images: read a checkpoint of images and text with its vision tower; else as its text model.

    Returns:
      Policy, with its weights.

    Raises:
      UserError: the policy cannot be loaded; names the file or tensor.
    """
    xla_flags.add_those_of_run()
    platforms.check()
    compile_cache.enable()
    policy = Policy(path, revision=revision, tokenizer=tokenizer, dtype=dtype, images=images)
    policy.load()
    return policy


class Policy:
    """A causal model with its tokenizer. The constructor reads only its config and tokenizer; `load` reads its weights.

    Attributes:
      path, revision: of the checkpoint.
      model: the models.Model, on `mesh`.
      tokenizer: data.Tokenizer.
      params: stacked, on the mesh; None before `load` and after `release`.
      processor: of images; None: it reads text.
    """

    def __init__(
        self,
        path: str,
        *,
        revision: str | None = None,
        tokenizer: str | None = None,
        dtype: str = "float32",
        weights: Weights | None = None,
        images: bool = False,
    ):
        """`images` as `load_policy`. `weights`: loads them and has the mesh; default: a new mesh of all devices, on its
        axis `data`."""
        if dtype not in get_args(Dtype):
            raise UserError(f"dtype is {dtype!r}; it must be 'float32', 'bfloat16' or 'float16'")
        self.path, self.revision = policy_folder(str(path)), revision
        self.weights = weights or Weights(sharding.make_mesh())
        self.mesh, self.dtype = self.weights.mesh, jnp.dtype(dtype)
        source = Source(self.path, revision)
        model, self.tokenizer, _ = open_models.open_model(source, tokenizer=tokenizer, with_images=images)
        self.model = open_models.on_mesh(model, self.weights, "causal", self.path, dtype=dtype)
        self.processor: ImageProcessor | None = None
        if images:
            self.processor = open_models.open_processor(self.model, self.tokenizer, source)
        self._params: Params | None = None
        self._unstacked: Params | None = None
        self._sample = jax.jit(
            self._pure_sample, static_argnames=("length", "greedy", "top_k", "suppress_ids", "group")
        )

    @jax_settings.pinned()
    def load(self) -> None:
        """Reads the weights."""
        if self._params is not None or self._unstacked is not None:
            return
        if self.mesh.size == 1:
            self._unstacked = self.weights.load_unstacked(self.model, self.path, self.revision, self.dtype)
        else:
            self._params = self.weights.load(self.model, self.path, "causal", self.revision)

    def release(self) -> None:
        """Frees the weights."""
        self._params = self._unstacked = None

    @property
    def params(self) -> Params | None:
        """Stacked, as functions of the model take them. Texts are sampled by layer: on one device the first use of
        `params` stacks the layers that were loaded, in their place."""
        if self._params is None and self._unstacked is not None:
            self._params = self.weights.run(self.model.stack, self._unstacked)
            self._unstacked = None
        return self._params

    # --- tokens

    def _layers(self) -> Params:
        """The params by layer, kept until `release`. On one device they are sliced outside of a program, which is
        then compiled faster."""
        if self._unstacked is None:
            assert self._params is not None
            unstack = partial(self.model.unstack, dtype=self.dtype)
            self._unstacked = (unstack if self.mesh.size == 1 else jax.jit(unstack))(self._params)
        return self._unstacked

    def _pure_sample(
        self,
        layers,
        prompts,
        *,
        seed,
        rows,
        limit,
        numbers,
        begun,
        automaton,
        length,
        greedy,
        top_k,
        suppress_ids,
        group,
    ):
        options = {"group": group, "rows": rows, "dtype": self.dtype, "limits": jnp.full(rows.shape, limit)}
        options["begun"] = begun
        if automaton is not None:
            options["guide"] = Guide(automaton, jnp.repeat(prompts.start, group))
        numbers = {name: value for name, value in numbers.items() if value is not None}
        numbers |= {"temperature": 0.0} if greedy else {}
        suppress_ids = (*self.model.suppress_ids, *suppress_ids)
        sampling = Sampling(length, top_k=top_k, suppress_ids=suppress_ids, **numbers)
        rollout = generate_unstacked(self.model, layers, prompts, jax.random.key(seed), sampling, **options)
        return sharding.spread_rows(rollout, self.mesh)

    @jax_settings.pinned()
    def sample(
        self,
        prompts: PromptBatch,
        seed: int,
        sampling: Sampling,
        group: int = 1,
        rows: np.ndarray | None = None,
        length: int | None = None,
        *,
        automaton: Automaton | None = None,
        begun: PartialResponses | None = None,
    ) -> Rollout:
        """`group` responses to each prompt of a batch.

        Args:
          prompts: arrays of numpy or on the mesh, tokens [P, C] left-padded, lengths [P], images, with an automaton
            start [P]; P divides over the devices.
          seed: together with a row's number, it determines the response.
          sampling: options.
          group: responses per prompt, G.
          rows: [P * G] int32, row numbers; default: 0, 1, ...
          length: columns of the responses, at least `sampling.max_new_tokens`, which is the default. The program is
            compiled for it; numbers that are not 0 or off are arguments of the program.
          automaton: of the texts that responses may have; None: any.
          begun: what the P * G responses have already; None: nothing.

        Returns:
          Rollout of P * G rows on the devices.
        """
        rows = np.arange(len(prompts.lengths) * group, dtype=np.int32) if rows is None else rows
        prompts, rows = sharding.shard_batch((prompts, rows), self.mesh)
        off = {"temperature": 0.0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
        values = {name: getattr(sampling, name) for name in off}
        numbers: dict[str, Any] = {
            name: None if values[name] == off[name] else np.float32(values[name]) for name in off
        }
        stop_ids = [*sampling.stop_ids, *[-1] * (_STOP_IDS - len(sampling.stop_ids))]  # -1 is no token
        numbers |= {"stop_ids": tuple(map(np.int32, stop_ids)), "fill_id": np.int32(sampling.fill_id)}
        return self._sample(
            self._layers(),
            prompts,
            seed=np.uint32(seed),
            rows=rows,
            limit=np.int32(sampling.max_new_tokens),
            numbers=numbers,
            begun=begun,
            automaton=automaton,
            length=length or sampling.max_new_tokens,
            greedy=sampling.temperature == 0,
            top_k=sampling.top_k,
            suppress_ids=sampling.suppress_ids,
            group=group,
        )

    # --- texts

    def generate(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
        *,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | str | None = None,
        regex: str | None = None,
        seed: int = 0,
        batch_size: int = 32,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str] | str:
        """A response to each text. Equal texts, options and seed give equal responses, whatever the batch size.

        Args:
          texts: texts to continue; or conversations, lists of {"role", "content"}, rendered by the tokenizer's chat
            template. A single text gives a single response. With images contents may be lists of blocks, as
            {"type": "image", "image": PIL image, bytes or path} and {"type": "text", "text"}.
          max_new_tokens: of a response, including eos.
          temperature: divides the logits; 0 is greedy decoding.
          top_k: sample from the k most likely tokens; 0: all.
          top_p: sample from the most likely tokens whose total probability reaches top_p; 1: all.
          min_p: exclude tokens less likely than min_p times the most likely one; None: none.
          repetition_penalty: divides positive and multiplies negative logits of tokens that occurred; 1: off.
          stop: texts that end a response, in addition to the tokenizer's eos; the response is cut before them.
          stop_token_ids: ids that end a response in place of the tokenizer's eos, or 'generation_config': those of the
            checkpoint's generation_config.json.
          regex: responses match this regular expression (Python's syntax) from their first to their last character;
            `max_new_tokens` must leave room for a match.
          seed: 0 to 2^32 - 1.
          batch_size: responses at a time.
          chat_template_kwargs: for conversations.

        Returns:
          Responses in the order of `texts`, without prompt, special tokens or stop text.

        Raises:
          UserError: an option is out of range, a text is empty or too long for the model's context, or no response of
            max_new_tokens tokens matches `regex`.
        """
        single = isinstance(texts, str)
        options: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        options["repetition_penalty"] = repetition_penalty
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        self._check(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, batch_size=batch_size, **options)
        if not all(isinstance(text, str) and text for text in stops):
            raise UserError(f"stop is {stop!r}; it must be a non-empty text or a list of them")
        ids, sources = self._encode([texts] if single else texts, max_new_tokens, chat_template_kwargs)
        tiles = max((count for _, count in sources), default=0)
        rows = self.model.config.vocab_size
        stop_ids = resolve_stop_ids(stop_token_ids, path=self.path, revision=self.revision, rows=rows)
        stop_ids = stop_ids or self.tokenizer.eos_ids
        sampling = Sampling(max_new_tokens, temperature=temperature, stop_ids=stop_ids, fill_id=stop_ids[0], **options)
        automaton = None if regex is None else self._automaton(regex, stop_ids, max_new_tokens)
        # One program for all of a class of lengths.
        length = min(_MIN_LENGTH * _next_power_of_2(-(-max_new_tokens // _MIN_LENGTH)), self._context)
        responses: list[str] = [""] * len(ids)
        order, shards = sorted(range(len(ids)), key=lambda i: len(ids[i])), sharding.row_shards(self.mesh)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            # Rows and columns double, so that few shapes are compiled.
            padded = shards * _next_power_of_2(-(-len(chosen) // shards))
            rows = np.asarray(chosen + chosen[-1:] * (padded - len(chosen)))
            longest = max(len(ids[i]) for i in chosen)
            width = min(_MIN_WIDTH * _next_power_of_2(-(-longest // _MIN_WIDTH)), self._context - max_new_tokens)
            tokens = [np.asarray(ids[i], np.int32) for i in rows]
            lengths, rows = batches.lengths_of(tokens), rows.astype(np.int32)
            left: Any = batches.pad_left(tokens, width, self.tokenizer.pad_id)
            images = None
            if tiles and self.processor is not None:
                images = self.processor.batch([sources[i][0] for i in rows], tiles)
            states: Any = None if automaton is None else np.zeros_like(rows)  # one expression starts in state 0
            prompts = PromptBatch(left, lengths, rows, images, states)  # type: ignore[arg-type]  # until it is sharded
            rollout = self.sample(prompts, seed, sampling, rows=rows, length=length, automaton=automaton)
            response, lengths = sharding.fetch((rollout.response, rollout.lengths))
            for i, token_ids in zip(chosen, completion_ids(response, lengths)):
                responses[i] = _cut_at_stop(self.tokenizer.decode(token_ids, skip_special_tokens=True), stops)
        return responses[0] if single else responses

    def _automaton(self, regex: str, stop_ids: tuple[int, ...], most_tokens: int) -> Automaton:
        options: dict[str, Any] = {"excluded_ids": self.model.suppress_ids, "most_tokens": most_tokens}
        return token_automaton([regex], self._token_bytes, stop_ids=stop_ids, **options)[0]

    @cached_property
    def _token_bytes(self) -> list[bytes | None]:
        return token_bytes(self.tokenizer, self.model.config.vocab_size)

    @property
    def _context(self) -> int:
        return self.model.config.max_position_embeddings

    def _check(self, **options: Any) -> None:
        if self._params is None and self._unstacked is None:
            raise UserError(f"policy {self.path} has no weights; call load() first")
        at_least = {"max_new_tokens": 1, "batch_size": 1, "temperature": 0}
        for name, value in options.items():
            is_int = name in ("max_new_tokens", "batch_size", "top_k", "seed")
            if value is None and name == "min_p":
                continue
            if isinstance(value, bool) or not isinstance(value, int | (int if is_int else float)) or value != value:
                raise UserError(f"{name} is {value!r}; it must be a {'whole ' if is_int else ''}number")
            if name in at_least and value < at_least[name]:
                raise UserError(f"{name} is {value}; it must be at least {at_least[name]}")
            if name not in at_least and (error := field_ranges(PolicyConfig)[name].error(name, value)):
                raise UserError(error)

    def _encode(self, texts, max_new_tokens: int, chat_template_kwargs) -> tuple[list[list[int]], list[Any]]:
        """(token ids of each text or conversation, with images each one's (sources, number of tiles))."""
        prompts, sources = list(texts), []
        for i, prompt in enumerate(prompts):
            conversation = isinstance(prompt, list | tuple) and all(isinstance(message, Mapping) for message in prompt)
            if not conversation and (fault := string_fault({"text": prompt}, "text")) is not None:
                raise UserError(
                    f"text {i}: {fault.replace(repr('text'), 'it', 1)}. Give a text, or a conversation: a list of "
                    '{"role", "content"} messages'
                )
        if self.processor is not None and not all(isinstance(text, str) for text in prompts):
            template = ChatTemplate(self.tokenizer, chat_template_kwargs)
            ids = []
            for i, messages in enumerate(prompts):
                row, read, tiles = self._encode_images(template, i, messages)
                ids.append(row)
                sources.append((read, tiles))
            return self._checked(ids, max_new_tokens), sources
        is_text = [isinstance(text, str) for text in prompts]
        if not all(is_text):
            template = ChatTemplate(self.tokenizer, chat_template_kwargs)
            for i, messages in enumerate(prompts):
                if (fault := conversation_fault({"text": messages}, "text")) is not None:
                    raise UserError(f"text {i}: {fault.replace(repr('text'), 'it', 1)}")
                prompts[i] = template.render(text_messages(messages), generation_prompt=True)
        ids = self.tokenizer.encode_batch(prompts) if prompts else []
        start, (stripped, begun) = self.tokenizer.start_ids(), self.tokenizer.without_start(ids)
        ids = [[*start, *rest] if text and row else row for row, rest, text in zip(ids, stripped, is_text, strict=True)]
        if doubled := sum(text and has for text, has in zip(is_text, begun, strict=True)):
            mark = self.tokenizer.decode(start)
            which = "begins" if doubled == 1 else "begin"
            warnings.warn(f"{doubled} of the texts {which} with {mark!r}, which is not added again", stacklevel=3)
        return self._checked(ids, max_new_tokens), sources

    def _encode_images(self, template: ChatTemplate, number: int, messages: Any):
        """(ids, image sources, number of tiles) of a conversation, by the policy's processor."""
        processor: Any = self.processor

        def fault(plain: Mapping[str, Any]) -> str | None:
            return conversation_fault(plain, "text")

        try:
            read = read_row({"text": messages}, ("text",), processor, None, fault)
            text = template.render(read.messages["text"], generation_prompt=True)
            ids, tiles = processor.encode(text, read.sources, self.tokenizer)
        except UserError as error:
            raise UserError(f"text {number}: {error}") from None
        return ids, read.sources, tiles

    def _checked(self, ids: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """The same; UserError for a text that is empty or too long."""
        for i, token_ids in enumerate(ids):
            if not token_ids:
                raise UserError(f"text {i} is empty")
            if len(token_ids) + max_new_tokens > self._context:
                raise UserError(
                    f"text {i} has {len(token_ids)} tokens, {len(token_ids) + max_new_tokens} with max_new_tokens "
                    f"{max_new_tokens}; the model's context has {self._context}"
                )
        return ids


def _next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]

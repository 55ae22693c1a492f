"""Reading config.json key by key, and writing it back in the forms of transformers 4 and 5.

A key that no family's reader asks for is refused where transformers would compute with it, since a model that is
computed differently than its config says would train without any sign of it. One line names the other keys.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Sequence
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.declared_keys import NO_DEFAULT, declared_keys
from rlhf_jax.models.rope import Rope, yarn_attention_factor

MOST_LAYERS = 10_000  # the tensor table has rows for each, made before any file is opened
# Keys that the config classes declare or take and that say nothing about the function of a decoder.
HARMLESS = frozenset(
    "architectures auto_map bad_words_ids begin_suppress_tokens bos_token_id "
    "cache_implementation chunk_size_feed_forward classifier_dropout cls_token_id diversity_penalty do_sample dtype "
    "early_stopping eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id "
    "forced_eos_token_id id2label is_decoder keys_to_ignore_at_inference label2id length_penalty mask_token_id "
    "max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences "
    "output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type "
    "repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params "
    "temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers_version typical_p unk_token_id use_bfloat16 use_cache".split()
)
# Keys that transformers' masks, caches, rotary embeddings and loading of weights read from any config, and all that
# begin with "rope_".
READ_FROM_ANY_CONFIG = frozenset(
    "attention_chunk_size head_dim is_causal is_encoder_decoder kv_sharing_modes layer_types num_kv_shared_layers "
    "original_max_position_embeddings partial_rotary_factor per_layer_config sliding_window "
    "transformers_weights".split()
)
ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_NUMBERS += ("beta_fast", "beta_slow")


class Reader:
    """The keys of one config.json. Every method names the key, the value and the file in its UserError."""

    def __init__(self, hf: dict[str, Any], where: str):
        self.hf, self.where = hf, where
        self._read: set[str] = set()

    def refuse(self, key: str, why: str) -> None:
        """Raises the UserError."""
        raise UserError(f"{self.where}: {key} is {self.hf.get(key)!r}; {why}")

    def value(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is absent; null is None."""
        self._read.add(key)
        return self.hf.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number. null means the default; without a default the key is required."""
        value = self.value(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.where}: {key} is missing.")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "it must be a positive whole number.")
        if value > (MOST_LAYERS if key in ("num_hidden_layers", "n_layer") else 2**31 - 1):
            self.refuse(key, "more than any model has.")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number; null is the default."""
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(key, "it must be a number.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false; null is the default."""
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false.")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """A key of which only `allowed` values are supported; it may be absent."""
        if self.value(key, allowed[0]) not in allowed:
            self.refuse(key, f"only {', '.join(map(repr, allowed))} is supported.")

    def choice(self, key: str, default: str, names: dict[str, str]) -> str:
        """The name that stands for the value."""
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in names:
            self.refuse(key, f"supported: {', '.join(names)}.")
        return names[value]

    def by_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with an entry for each layer, or None where absent or null."""
        value = self.value(key)
        if value is not None and (not isinstance(value, list) or len(value) != layers):
            self.refuse(key, f"it must be a list of {layers} entries, one for each layer.")
        return value

    def windows(self, layers: int, window: int | None, types: Sequence[str]) -> tuple[int | None, ...]:
        """`DecoderConfig.layer_window` from layer_types, or from `types` where config.json has none."""
        types = self.by_layer("layer_types", layers) or types
        window_by_type = {"full_attention": None, "sliding_attention": window}
        if unknown := [kind for kind in types if kind not in window_by_type]:
            raise UserError(f"{self.where}: layer_types has {unknown[0]!r}; supported: {', '.join(window_by_type)}.")
        windows = tuple(window_by_type[kind] for kind in types)
        return () if set(windows) == {None} else windows

    def rope(self, head_dim: int, theta: float, positions: int) -> Rope:
        """The rotary embedding, from rope_parameters or rope_scaling with rope_theta and partial_rotary_factor.

        Args:
          head_dim: K.
          theta: of the class, where config.json has none.
          positions: max_position_embeddings.
        """
        values = {"rope_theta": self.value("rope_theta"), "partial_rotary_factor": self.value("partial_rotary_factor")}
        for key in ("rope_scaling", "rope_parameters"):
            parameters = self.value(key) or {}
            if not isinstance(parameters, dict):
                self.refuse(key, "it must be an object.")
            values.update({name: value for name, value in parameters.items() if value is not None})
        where = Reader(values, f"{self.where}: rope_parameters")
        name = values.get("rope_type", values.get("type", "default"))
        allowed = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_NUMBERS}
        allowed |= {"truncate", "attention_factor", "mscale", "mscale_all_dim"} if name == "yarn" else set()
        if name not in ("default", "linear", "llama3", "yarn"):
            raise UserError(
                f"{self.where}: a rotary embedding of type {name!r} is not supported; supported: default, linear, "
                "llama3, yarn."
            )
        if unknown := sorted(key for key, value in values.items() if key not in allowed and value is not None):
            raise UserError(f"{self.where}: rope_parameters: {unknown[0]} is not supported for type {name!r}.")
        ndims = int(head_dim * where.number("partial_rotary_factor", 1.0))
        if ndims % 2 or not 0 < ndims <= head_dim:
            where.refuse("partial_rotary_factor", f"it rotates {ndims} of {head_dim} dimensions of a head.")
        rope = Rope(ndims, where.number("rope_theta", theta), name)
        if name == "default":
            return rope
        original = values.get("original_max_position_embeddings") or positions
        factor = where.number("factor", positions / original)
        numbers: dict[str, Any] = {"factor": factor}
        if name == "llama3":
            numbers |= {key: where.number(key, 0.0) for key in ("low_freq_factor", "high_freq_factor")}
            if not numbers["low_freq_factor"] < numbers["high_freq_factor"]:
                where.refuse("high_freq_factor", "it must be more than low_freq_factor.")
        if name == "yarn":
            scales = [values.get("mscale"), values.get("mscale_all_dim")]
            attention = where.number("attention_factor", yarn_attention_factor(factor, *scales))
            numbers |= {"beta_fast": where.number("beta_fast", 32.0), "beta_slow": where.number("beta_slow", 1.0)}
            numbers |= {"truncate": where.flag("truncate", True), "attention_factor": attention}
        if name != "linear":
            numbers["original_max_position_embeddings"] = int(original)
        return Rope(ndims, rope.theta, name, **numbers)

    def mark(self, other: Reader) -> None:
        """Counts what another reader of the same config.json read."""
        self._read |= other._read

    def finish(self, fields: dict[str, Any], model_type: str | None = None) -> None:
        """Judges the keys that were not read, see `judge_others`."""
        if self.hf.get("quantization_config"):
            raise UserError(f"{self.where}: quantization_config is not supported; use the unquantized checkpoint.")
        unread_keys = {key: value for key, value in self.hf.items() if key not in self._read}
        judge_others(unread_keys, str(model_type or self.hf.get("model_type")), fields, self.where)


def judge_others(unread_keys: dict[str, Any], model_type: str, fields: dict[str, Any], where: str) -> None:
    """Refuses keys of config.json that were not read and that transformers would compute with; a warning names those
    that its config class does not know, which change nothing.

    Args:
      unread_keys: the keys that were not read.
      model_type: of transformers' config class.
      fields: of the `DecoderConfig`; a key that repeats one of them is accepted.
      where: config.json, for messages.

    Raises:
      UserError: names the key, the value and the model_type.
    """
    unknown = []
    for key, value in sorted(unread_keys.items()):
        # With null as with false transformers attends to later tokens.
        empty = value is True if key == "is_causal" else value is None or value is False or value in ({}, [])
        repeated = key in fields and fields[key] == value
        if empty or repeated or key in HARMLESS or key.startswith("_"):
            continue
        declared = declared_keys(model_type)
        if declared is not None and declared.get(key, NO_DEFAULT) == value:
            continue
        if declared is None or key in declared or key in READ_FROM_ANY_CONFIG or key.startswith("rope_"):
            raise UserError(
                f"{where}: {key} is {value!r}, which model_type {model_type!r} does not support here; it could change "
                "what the model computes."
            )
        unknown.append(key)
    if unknown:
        warn_once(
            f"{where}: transformers' config class of model_type {model_type!r} has no {', '.join(unknown)}: ignored"
        )


@functools.cache
def warn_once(text: str) -> None:
    """A warning that is given once, although a stage opens its models several times."""
    warnings.warn(text, stacklevel=3)


def sizes(reader: Reader, *, kv_default: int | None = None) -> dict[str, Any]:
    """Fields of `DecoderConfig` that nearly all families name alike."""
    heads = reader.size("num_attention_heads")
    fields = {
        name: reader.size(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    }
    kv_heads = reader.size("num_key_value_heads", kv_default or heads)
    if heads % kv_heads:
        reader.refuse("num_key_value_heads", f"it must divide num_attention_heads, {heads}.")
    if reader.hf.get("head_dim") is None and fields["hidden_size"] % heads:
        reader.refuse("hidden_size", f"it is not divisible by num_attention_heads, {heads}.")
    return {**fields, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def finish(
    reader: Reader, fields: dict[str, Any], *, pad: int | None = None, model_type: str | None = None
) -> DecoderConfig:
    """The config of the fields, once every key of config.json is accounted for.

    Args:
      reader: that read them.
      fields: of the `DecoderConfig`.
      pad: of the class, where config.json has no pad_token_id.
      model_type: of transformers' config class, where it is not config.json's.
    """
    reader.finish(fields, model_type)
    rows, pad = fields["vocab_size"], reader.hf.get("pad_token_id", pad)
    if "padding_idx" not in fields and isinstance(pad, int) and 0 <= pad < rows:
        fields["padding_idx"] = pad
    if not 0 <= fields.get("attention_dropout", 0.0) < 1:
        reader.refuse("attention_dropout", "it must be at least 0 and less than 1.")
    return DecoderConfig(**fields, source=json.dumps(reader.hf, sort_keys=True))


def to_hf(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """config.json as it was read, with rotary embeddings in the forms of transformers 4 and 5."""
    hf = json.loads(config.source)
    hf = {key: value for key, value in hf.items() if key not in ("_name_or_path", "transformers_version", "auto_map")}
    hf |= {"architectures": [architecture], "initializer_range": config.initializer_range}
    if architecture.endswith("SequenceClassification"):
        hf |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    else:
        hf = {key: value for key, value in hf.items() if key not in ("id2label", "label2id", "num_labels")}
    rope = hf.get("rope_parameters")
    if isinstance(rope, dict) and rope and not any(isinstance(value, dict) for value in rope.values()):
        hf.setdefault("rope_theta", rope.get("rope_theta"))
        if rope.get("rope_type", "default") != "default":
            hf.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    elif not rope and config.ropes and len(config.ropes) == 1:
        scaling = hf.get("rope_scaling") or {}
        scaling = {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
        hf["rope_parameters"] = {"rope_type": "default", **scaling, "rope_theta": config.ropes[0].theta}
        if hf.get("partial_rotary_factor") is not None:
            hf["rope_parameters"]["partial_rotary_factor"] = hf["partial_rotary_factor"]
    return hf

"""What shapes a GPT-NeoX (Pythia): its config, how its params may be split, the published sizes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GPTNeoXConfig:
    """Everything that shapes the function; names are transformers' (rotary_* as in transformers 4)."""

    vocab_size: int = 50304
    hidden_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    intermediate_size: int = 512
    max_position_embeddings: int = 2048
    rotary_pct: float = 0.25
    rotary_emb_base: float = 10000.0
    use_parallel_residual: bool = True
    attention_bias: bool = True
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False

    @property
    def head_size(self) -> int:
        """K."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_ndims(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return int(self.head_size * self.rotary_pct)


# The names of every param's axes (see `sharding.Layout`), by its path. QKV's last axis is head-major (H, 3, K), so
# "tensor" splits whole heads there. The first axis of a layer's params is L and is never split: the scan slices it.
# Logits are split by columns however the model is: their kernel is never gathered, as it is larger than a layer.
PARAM_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(^|/)backbone/embed_in/embedding$", ("tensor", "fsdp")),
    (r"(^|/)backbone/layers/attention/query_key_value/kernel(/qvalue)?$", (None, "fsdp", "tensor")),
    (r"(^|/)backbone/layers/attention/query_key_value/bias$", (None, "tensor")),
    (r"(^|/)backbone/layers/attention/dense/kernel(/qvalue)?$", (None, "tensor", "fsdp")),
    (r"(^|/)backbone/layers/attention/dense/bias$", ()),
    (r"(^|/)backbone/layers/mlp/dense_h_to_4h/kernel(/qvalue)?$", (None, "fsdp", "tensor")),
    (r"(^|/)backbone/layers/mlp/dense_h_to_4h/bias$", (None, "tensor")),
    (r"(^|/)backbone/layers/mlp/dense_4h_to_h/kernel(/qvalue)?$", (None, "tensor", "fsdp")),
    (r"(^|/)backbone/layers/mlp/dense_4h_to_h/bias$", ()),
    (r"(^|/)backbone/layers/(attention/query_key_value|mlp/dense_h_to_4h)/lora_a$", (None, "fsdp", None)),
    (r"(^|/)backbone/layers/(attention/query_key_value|mlp/dense_h_to_4h)/lora_b$", (None, None, "tensor")),
    (r"(^|/)backbone/layers/(attention/dense|mlp/dense_4h_to_h)/lora_a$", (None, "tensor", None)),
    (r"(^|/)backbone/layers/(attention/dense|mlp/dense_4h_to_h)/lora_b$", (None, None, "fsdp")),
    (r"(^|/)backbone/layers/(attention/query_key_value|mlp/dense_h_to_4h)/kernel/scale$", (None, None, "tensor")),
    (r"(^|/)backbone/layers/(attention/dense|mlp/dense_4h_to_h)/kernel/scale$", (None, None, "fsdp")),
    (r"(^|/)backbone/layers/(input|post_attention)_layernorm/(scale|bias)$", ()),
    (r"(^|/)backbone/final_layer_norm/(scale|bias)$", ()),
    (r"(^|/)embed_out/kernel$", (None, "vocabulary")),
    (r"(^|/)score/(kernel|bias)$", ()),
)


# A layer's linear layers by the checkpoint's names, and what else adapters may stand beside.
LINEARS: dict[str, tuple[str, ...]] = {
    "query_key_value": ("layers", "attention", "query_key_value"),
    "dense": ("layers", "attention", "dense"),
    "dense_h_to_4h": ("layers", "mlp", "dense_h_to_4h"),
    "dense_4h_to_h": ("layers", "mlp", "dense_4h_to_h"),
}
MODULES: dict[str, tuple[str, ...]] = {
    "embed_in": ("backbone", "embed_in"),
    "final_layer_norm": ("backbone", "final_layer_norm"),
    "embed_out": ("embed_out",),
    "score": ("score",),
}


# Layers, width, heads, vocabulary rows. Biderman et al. 2023, arXiv:2304.01373, table 1; rows of the published files.
PYTHIA_SHAPES: dict[str, tuple[int, int, int, int]] = {
    "14m": (6, 128, 4, 50304),
    "31m": (6, 256, 8, 50304),
    "70m": (6, 512, 8, 50304),
    "160m": (12, 768, 12, 50304),
    "410m": (24, 1024, 16, 50304),
    "1b": (16, 2048, 8, 50304),
    "1.4b": (24, 2048, 16, 50304),
    "2.8b": (32, 2560, 32, 50304),
    "6.9b": (32, 4096, 32, 50432),
    "12b": (36, 5120, 40, 50688),
}

"""What a family's tensor table is made of: the tensors of its checkpoints, and the sharding rules of their params."""

from __future__ import annotations

import dataclasses

from rlhf_jax.models.linear import COLUMN_PARALLEL, ROW_PARALLEL
from rlhf_jax.models.lora import A, B

ParamRule = tuple[str, tuple[str | None, ...]]
"""A regular expression on the '/'-joined path of a param, and the names of its axes (see `sharding.Layout`)."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a checkpoint's tensor goes: shape as in the file; `layer` is its index in the stacked [L, ...] param."""

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    layer: int | None = None
    transpose: bool = False


def linear_rules(path: str, names: tuple[str, str]) -> tuple[ParamRule, ...]:
    """Rules of a layer's linear layer: kernel (float or quantized), its scale, bias and adapter, stacked over layers.

    Args:
      names: of the kernel's axes, `linear.COLUMN_PARALLEL` or `linear.ROW_PARALLEL`.
    """
    rows, columns = names
    return (
        (rf"(^|/){path}/kernel(/qvalue)?$", (None, rows, columns)),
        (rf"(^|/){path}/kernel/scale$", (None, rows, columns)),
        (rf"(^|/){path}/kernel/scale$", (None, None, columns)),  # where the blocks of a column do not divide
        (rf"(^|/){path}/bias$", (None, "tensor") if columns == "tensor" else ()),
        (rf"(^|/){path}/{A}$", (None, rows, None)),
        (rf"(^|/){path}/{B}$", (None, None, columns)),
    )


# The axis of heads or units is last on the way in and first on the way out, so "tensor" splits between them. The first
# axis of a layer's params is L and is never split: the scan slices it. Logits are split by columns: their kernel is
# larger than a layer, so it is never gathered. The first rule is the embedding's: see `Model._param_names`.
PARAM_RULES: tuple[ParamRule, ...] = (
    (r"(^|/)backbone/embed_in/embedding$", ("tensor", "fsdp")),
    (r"(^|/)backbone/embed_positions/embedding$", (None, "fsdp")),
    *linear_rules("backbone/(vision/)?layers/attention/(query_key_value|query|key|value)", COLUMN_PARALLEL),
    *linear_rules("backbone/(vision/)?layers/attention/dense", ROW_PARALLEL),
    *linear_rules("backbone/(vision/)?layers/mlp/(dense_h_to_4h|gate|gate_up)", COLUMN_PARALLEL),
    *linear_rules("backbone/(vision/)?layers/mlp/dense_4h_to_h", ROW_PARALLEL),
    (r"(^|/)backbone/(vision/)?layers/(\w+_layernorm|attention/(query|key)_norm)/(scale|bias)$", ()),
    (r"(^|/)backbone/(vision/)?final_layer_norm/(scale|bias)$", ()),
    (r"(^|/)backbone/vision/patch_embedding/kernel$", ("fsdp", None, None, None)),
    (r"(^|/)backbone/vision/patch_embedding/bias$", ()),
    (r"(^|/)backbone/vision/position_embedding/embedding$", (None, "fsdp")),
    *linear_rules("backbone/connector/proj", ("fsdp", None)),
    (r"(^|/)embed_out/kernel$", (None, "vocabulary")),
    (r"(^|/)score/(kernel|bias)$", ()),
)

"""Options of models and adapters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

from rlhf_jax.option import Decay, Options, PositiveFloat, PositiveInt, option

Dtype = Literal["float32", "bfloat16", "float16"]
"""Of a forward pass."""


@dataclasses.dataclass(frozen=True)
class ComputeOptions(Options):
    """How a model computes."""

    # --- precision and memory
    dtype: Dtype = option(
        "float32", lowers={"loading": 3, "generate": 6, "score": 5, "experience": 5, "update": 5, "evaluation": 5}
    )
    """Compute dtype; master weights and reductions stay float32. float16 has the bytes and FLOPs of bfloat16, and a
    tenth of its difference between sampler and learner; numbers above 65,504 overflow; not on TPUs."""
    attn_implementation: Literal["auto", "blocked", "cudnn", "tokamax", "splash"] = option(
        "auto", rare=True, resume="rounding"
    )
    """Attention over whole rows: blocked: in blocks of queries, compiled by XLA, on every device; cudnn: cuDNN's flash
    attention, on NVIDIA GPUs in half precision; tokamax: Tokamax's kernel, on Hopper GPUs in half precision, soft caps
    too; splash: jax's Pallas kernel, on TPUs; auto: cudnn on an A100 and on Hopper (H100, H200) where it supports the
    model, else blocked. Decoding is the same with all."""
    gradient_checkpointing: bool | None = option(None, resume="rounding", lowers={"update": 3})
    """Recompute activations in the backward pass to save memory. Default: on GPUs, with policy dots."""
    gradient_checkpointing_policy: Literal["full", "dots"] | None = option(None, rare=True, resume="rounding")
    """What gradient_checkpointing recomputes: full (default where it is true): everything within a layer; dots:
    everything but the outputs of matrix multiplications and of attention, which is faster and uses more memory."""

    @property
    def remat(self) -> str:
        """What the backward pass recomputes: 'none', 'dots' or 'full'."""
        return (self.gradient_checkpointing_policy or "full") if self.gradient_checkpointing else "none"


@dataclasses.dataclass(frozen=True)
class ModelOptions(Options):
    """The starting model."""

    # --- model and tokenizer
    model_revision: str = option("main", rare=True)
    """Hub revision of the starting model."""
    scratch_model: str | None = None
    """Start from random weights of this shape: a Pythia size ('14m'), 'LAYERSxWIDTHxHEADS' of GPT-NeoX ('4x128x4'), or
    'FAMILY:LAYERSxWIDTHxHEADS[xKV]' ('qwen2:4x128x4x2')."""
    tokenizer_name_or_path: str | None = option(None, path=True)
    """Tokenizer, if not the model's own; 'synthetic', 'arithmetic', 'shapes' and 'tool_tasks' are those of the built-in
    tasks."""
    freeze_vision_tower: bool = False
    """Of a model that reads images, without use_peft: train its connector and its text model, not its vision
    transformer."""

    @property
    def starting_model(self) -> str | None:
        """The checkpoint that training starts from, where it is not scratch_model."""
        return None

    def problems(self) -> Iterator[str]:
        """Shapes that no model has."""
        yield from super().problems()
        shape = re.fullmatch(r"(?:\w+:)?(\d+)x(\d+)x(\d+)(?:x\d+)?", self.scratch_model or "")
        if shape:
            layers, width, heads = map(int, shape.groups())
            if min(layers, width, heads) < 1 or width % heads:
                yield (
                    f"scratch_model {self.scratch_model}: {layers} layers of width {width} with {heads} heads; "
                    "all must be at least 1, and the width divisible by the number of heads."
                )


@dataclasses.dataclass(frozen=True)
class AdapterOptions(Options):
    """Low-rank adapters."""

    # --- adapters
    use_peft: bool = False
    """Train low-rank adapters (LoRA) and freeze the base params."""
    lora_r: PositiveInt = 16
    """Rank of a new adapter."""
    lora_alpha: PositiveFloat = 32
    """A new adapter's output is scaled by lora_alpha / lora_r."""
    use_rslora: bool = option(False, rare=True)
    """Scale by lora_alpha / sqrt(lora_r) instead."""
    lora_dropout: Decay = option(0.05, rare=True)
    """Dropout on adapter inputs (PPO: none, since it trains without dropout)."""
    lora_target_modules: tuple[str, ...] | None = None
    """Layers that get an adapter, by the checkpoint's names (q_proj v_proj); or all-linear; or one regular expression
    of whole module names ('.*[qv]_proj'). Default: PEFT's for the family."""
    modules_to_save: tuple[str, ...] | None = option(None, rare=True)
    """Modules to train in full besides the adapters, by the checkpoint's names: embed_tokens, norm, lm_head (Pythia:
    embed_in, final_layer_norm, embed_out); score heads always are."""
    load_in_8bit: bool = option(False, lowers={"loading": 6, "generate": 7, "update": 9})
    """With use_peft: keep the layers' frozen kernels in int8, with one scale per column (needs the extra int8)."""
    load_in_4bit: bool = option(False, lowers={"loading": 7, "generate": 8, "update": 10})
    """With use_peft: keep the layers' frozen kernels in 4 bits (NF4, as QLoRA), with one scale per 64 rows of a
    column."""
    export_merged: bool = option(True, rare=True)
    """Also export the model with its adapter merged, as a checkpoint that needs no PEFT."""

    # Where a stage has no options of these names.
    start_adapter, lora_value = "auto", "full"

    def problems(self) -> Iterator[str]:
        """Options of adapters without use_peft; two forms of the frozen kernels."""
        yield from super().problems()
        if self.use_peft:
            if self.load_in_8bit and self.load_in_4bit:
                yield "load_in_8bit and load_in_4bit are both set: frozen kernels have one form. Remove one of them."
            return
        unused = ("adapters", "model_adapter_name", "ref_adapter_name", "lora_target_modules", "modules_to_save")
        names = [name for name in (*unused, "load_in_8bit", "load_in_4bit") if vars(self).get(name)]
        names += ["start_adapter"] if self.start_adapter != "auto" else []
        names += ["lora_value"] if self.lora_value != "full" else []
        if names:
            yield f"{names[0]} {vars(self)[names[0]]!r} needs use_peft: without it there are no adapters."

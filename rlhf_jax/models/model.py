"""`Model`: the interface through which algorithms and stages use a decoder of any family."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlhf_jax.errors import UserError
from rlhf_jax.models import decoder, lora, quantization, vision
from rlhf_jax.models.decoder_context import Context
from rlhf_jax.models.families import image_text, llama
from rlhf_jax.models.initializers import normal
from rlhf_jax.models.linear import TransposedKernel, product, transposed_product
from rlhf_jax.models.registry import FAMILIES, IMAGE_FAMILIES, Family
from rlhf_jax.models.tensor_table import PARAM_RULES, ParamRule
from rlhf_jax.parallel.sharding import Layout, constrain, partition_rules, row_axes, shardings
from rlhf_jax.types import Array, Images, Params

HEADS = ("causal", "scalar")
BY_DATA = "embed_out_by_data"


@dataclasses.dataclass(frozen=True)
class Model:
    """A family and a shape, without weights: hashable, static under jit. Params are an argument of every method.

    Params: {"backbone": ..., "embed_out": {"kernel" [D, V]}, "score": {"kernel" [D, 1], optional "bias" [1]}}, with
    the heads that the model has; without "embed_out" logits come from the tied embedding.
    """

    family: Family
    config: Any
    layout: Layout | None = None
    """How its arrays are split over the mesh; None: one device."""
    lora: lora.Lora | None = None
    """Its adapters: kernels are frozen, and its params are those of `with_lora`. None: trained in full."""
    attn_implementation: str = "blocked"
    """Of attention over whole rows: see `attention_kernels`."""
    frozen_vision: bool = False
    """Whether its vision transformer is not trained: `with_lora`'s base holds it."""
    pad_id: int | None = None
    """The id that transformers takes for padding where it reads a text's score: it is that of the last other token."""

    def _context(self, dtype: Any) -> Context:
        config = self.family.decoder_config(self.config)
        return Context(config, dtype, self.layout, self.lora, attn_implementation=self.attn_implementation)

    def with_lora(self, base: Params, adapters: Params) -> Params:
        """`base` with `adapters` put into it, see `lora.with_lora`. A model without `lora` has no base: its full params
        are `adapters`; with `frozen_vision` they are those of `split_frozen`."""
        if self.lora is None and self.frozen_vision:
            tower = {"vision": base["backbone"]["vision"]}
            return {**adapters, "backbone": {**adapters["backbone"], **tower}}
        return adapters if self.lora is None else lora.with_lora(self.lora, base, adapters)

    def split_frozen(self, params: Params) -> tuple[Params, Params | None]:
        """(params that are trained in full, the frozen ones or None)."""
        if not self.frozen_vision:
            return params, None
        backbone = {name: part for name, part in params["backbone"].items() if name != "vision"}
        return {**params, "backbone": backbone}, {"backbone": {"vision": params["backbone"].get("vision")}}

    @property
    def reads_images(self) -> bool:
        """Whether it has the parts that read images."""
        return self.family.reads_images

    @property
    def suppress_ids(self) -> tuple[int, ...]:
        """Tokens that are never sampled: the placeholder of images."""
        return (self.config.image_token_id,) if self.reads_images else ()

    def on(self, mesh: Mesh) -> Model:
        """The model on a mesh. Where its heads do not divide by the axis `tensor`, that axis is folded into `fsdp`, so
        that a small model does not limit the mesh of a large one."""
        heads = [self.config.num_attention_heads]
        heads += [self.config.vision.tower.num_attention_heads] if self.reads_images else []
        folded = any(count % mesh.shape["tensor"] for count in heads)
        return dataclasses.replace(self, layout=Layout(mesh, folded))

    @classmethod
    def from_hf_config(cls, config: dict[str, Any], where: str = "config.json", *, images: bool = False) -> Model:
        """The model of a config.json; of a model of images and text only the text model, or with `images` all of it. A
        UserError names the key, the value and `where` of what is not supported."""
        if images:
            family = IMAGE_FAMILIES.get(str(config.get("model_type")))
            if family is None:
                raise UserError(
                    f"{where}: the data has images, which model_type {config.get('model_type')!r} does not read here; "
                    f"families that do: {', '.join(IMAGE_FAMILIES)}. Without the images it is trained on text."
                )
            return cls(family, family.config_from_hf(config, where))
        if image_text.is_image_text(config):
            families = [family for family in FAMILIES.values() if family.prefix == llama.PREFIX]
            defaults = {family.name: family.nested_defaults for family in families if family.nested_defaults}
            config = image_text.text_config(config, where, defaults)
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise UserError(
                f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}."
            )
        family, pad = FAMILIES[model_type], config.get("pad_token_id")
        return cls(family, family.config_from_hf(config, where), pad_id=pad if isinstance(pad, int) else None)

    def to_hf_config(self, kind: str = "causal", **extra: Any) -> dict[str, Any]:
        """config.json for transformers 4 and 5; kind 'causal' or 'scalar'; `extra` (token ids, say) overrides."""
        if kind not in HEADS:
            raise UserError(f"kind={kind!r} has no Hugging Face form; use 'causal' or 'scalar'.")
        return {**self.family.config_to_hf(self.config, kind), **extra}

    def init(
        self,
        key: Array,
        *,
        heads: Sequence[str] = ("causal",),
        dtype: Any = jnp.float32,
        score_std: float | None = None,
    ) -> Params:
        """Random params with transformers' initialisation; heads from 'causal' and 'scalar'.

        `score_std` is the standard deviation of the scalar head (default initializer_range, as transformers; N+ uses
        1/sqrt(D + 1)); it starts without a bias. A tied model has no causal head of its own.
        """
        if unknown := [head for head in heads if head not in HEADS]:
            raise UserError(f"head {unknown[0]!r} is not supported; supported: {', '.join(HEADS)}.")
        config = self.config
        backbone_key, out_key, score_key = jax.random.split(key, 3)
        params = {"backbone": decoder.init_backbone(self.family.decoder_config(config), backbone_key)}
        if self.reads_images:
            params["backbone"] |= vision.init(config, jax.random.fold_in(backbone_key, 2))
        if "causal" in heads and not config.tie_word_embeddings:
            shape = (config.hidden_size, config.vocab_size)
            params["embed_out"] = {"kernel": normal(out_key, shape, std=config.initializer_range)}
        if "scalar" in heads:
            params["score"] = self.init_score(score_key, score_std)
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def init_score(self, key: Array, std: float | None = None) -> Params:
        """A fresh scalar head, {"kernel": [D, 1] float32}; std defaults to initializer_range."""
        std = self.config.initializer_range if std is None else std
        return {"kernel": normal(key, (self.config.hidden_size, 1), std=std)}

    def hidden(
        self,
        params: Params,
        tokens: Array,
        mask: Array,
        *,
        dtype: Any = jnp.float32,
        remat: str = "none",
        dropout_key: Array | None = None,
        last: int | None = None,
        segment_ids: Array | None = None,
        images: Images | None = None,
    ) -> Array:
        """Hidden states after the final layer norm: tokens [B, S] int32, mask [B, S] bool -> [B, S, D] in `dtype`.

        Masked tokens count as id 0 and are never attended; positions count unmasked tokens, so padding on either side
        changes nothing. `dropout_key`: one key (each row's index is folded in), or [B] keys, one a row. `remat`: what
        the backward pass recomputes, as `scan_layers`. `last`: return only this many last columns, [B, last, D]; on one
        device the last layer computes no more than they need. `segment_ids` [B, S] int32: sequences packed into a row,
        next to each other; positions and attention restart where the id changes. `images`: of the rows.
        """
        options = {"remat": remat, "dropout_key": dropout_key, "last": last, "segment_ids": segment_ids}
        options["features"] = self.image_features(params, images, dtype, remat=remat, dropout_key=dropout_key)
        return decoder.hidden(self._context(dtype), params["backbone"], tokens, mask, **options)

    def image_features(
        self, params: Params, images: Images | None, dtype: Any = jnp.float32, **options: Any
    ) -> Array | None:
        """What replaces the embeddings of image tokens, see `vision.features`; None without images."""
        if images is None:
            return None
        return vision.features(self._context(dtype), params["backbone"], images, **options)

    def hidden_after_prompts(
        self,
        params: Params,
        prompts: Array,
        prompt_mask: Array,
        responses: Array,
        mask: Array,
        *,
        dtype: Any = jnp.float32,
        remat: str = "none",
        images: Images | None = None,
    ) -> tuple[Array, Array]:
        """As `hidden` on prompt and response side by side, each prompt computed once: prompts [P, C] left-padded,
        responses [B, T], row i answering prompt i // (B / P) -> (the prompts' last column [P, D], [B, T, D]).
        `images`: of the prompts."""
        rows = (prompts, prompt_mask, responses, mask)
        options = {"remat": remat, "features": self.image_features(params, images, dtype, remat=remat)}
        return decoder.hidden_after_prompts(self._context(dtype), params["backbone"], *rows, **options)

    def logits(self, params: Params, hidden: Array) -> Array:
        """Next-token logits: hidden [..., D] -> float32 [..., V], accumulated in float32. `params` may be those of
        `head_by_data`."""
        # Each device computes its columns of the logits for all rows: rows are small, the kernel is not.
        hidden = constrain(self.layout, hidden, "data")
        names = (None, "vocabulary")
        if BY_DATA in params:
            kernel = params[BY_DATA]
            parts = constrain(self.layout, hidden.reshape(len(kernel), -1, *hidden.shape[1:]), "data")
            logits = jax.vmap(partial(product, None, names, jnp.dtype(jnp.float32)))(parts, kernel, None)
            logits = self._cap(logits.reshape(*hidden.shape[:-1], -1))
            return constrain(self.layout, logits, "data", *[None] * (logits.ndim - 2), "vocabulary")
        kernel = constrain(self.layout, self._causal_kernel(params), *names)
        logits = self._cap(product(self.layout, names, jnp.dtype(jnp.float32), hidden, kernel, None))
        return constrain(self.layout, logits, "data", *[None] * (logits.ndim - 2), "vocabulary")

    def head_by_data(self, params: Params, rows: int) -> Params:
        """For `logits` of many blocks of `rows` rows: the kernel once for each shard of the axis `data`, so that the
        blocks' gradients are added where they are and summed over `data` once. Without that axis `params` themselves.
        """
        shards = 1 if self.layout is None else self.layout.mesh.shape["data"]
        if shards == 1 or rows % shards:
            return params
        kernel = constrain(self.layout, self._causal_kernel(params), None, "vocabulary")
        kernel = jnp.broadcast_to(kernel, (shards, *kernel.shape))
        return {BY_DATA: constrain(self.layout, kernel, "data", None, "vocabulary")}

    @jax.named_scope("logits")
    def next_logits(self, unstacked: Params, hidden: Array) -> Array:
        """`logits` of one position a row, from `unstack`ed params: [B, D] -> float32 [B, V], each row on one device."""
        kernel = unstacked["embed_out"]["kernel"] if "embed_out" in unstacked else None
        if isinstance(kernel, TransposedKernel):
            logits = transposed_product(None, (), jnp.dtype(jnp.float32), hidden, kernel.kernel_FxD)
        else:
            kernel = self._causal_kernel(unstacked)
            logits = jnp.einsum("bd,dv->bv", hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
        logits = self._cap(logits)
        return constrain(self.layout, constrain(self.layout, logits, "rows", "tensor"), "draws")

    @property
    def linear_logits(self) -> bool:
        """Whether logits are a linear function of the hidden states: no soft cap."""
        return self.family.decoder_config(self.config).logit_softcap is None

    def _cap(self, logits: Array) -> Array:
        cap = self.family.decoder_config(self.config).logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _causal_kernel(self, params: Params) -> Array:
        if "embed_out" not in params:
            return params["backbone"]["embed_in"]["embedding"].T
        kernel = params["embed_out"]["kernel"]
        return kernel.kernel_FxD.T if isinstance(kernel, TransposedKernel) else kernel

    def scalars(self, params: Params, hidden: Array) -> Array:
        """Scores or values: hidden [..., D] -> float32 [...], computed in float32."""
        score = params["score"]
        out = jnp.einsum("...d,do->...o", hidden.astype(jnp.float32), score["kernel"].astype(jnp.float32))[..., 0]
        return out + score["bias"][0].astype(jnp.float32) if "bias" in score else out

    def cast_params(self, params: Params, dtype: Any) -> Params:
        """Params with matrices in `dtype`: what a forward pass in `dtype` casts them to in any case.

        Norms and the scalar head keep their dtype: the forward pass uses them in float32. So do adapters, which are
        small and are added to their kernels in float32, and quantized kernels.
        """

        def cast(path: tuple, leaf: Array) -> Array:
            names = [getattr(entry, "key", "") for entry in path]
            keep = "score" in names or any("norm" in name or name in (lora.A, lora.B) for name in names)
            return leaf if keep or quantization.is_quantized(leaf) else leaf.astype(dtype)

        return jax.tree_util.tree_map_with_path(cast, params, is_leaf=quantization.is_quantized)

    def quantize(self, params: Params, dtype: Any, kind: quantization.Kind) -> Params:
        """`cast_params` with the layers' kernels in int8 or NF4, as the frozen base of adapters."""
        paths = [("backbone", *path) for path in self.family.linears.values()]
        return self.cast_params(quantization.quantize(params, paths, kind), dtype)

    def unstack(self, params: Params, dtype: Any = jnp.float32) -> Params:
        """`cast_params` with "layers" a list of L dicts, for prefill and decode (inside jit). What `fsdp` splits is
        gathered once; only `tensor` splits the weights of decoding. Adapters are merged one layer at a time. On CPUs
        kernels are transposed: see `linear.transposed_product`."""
        params = self.cast_params(params, dtype)
        layers = params["backbone"]["layers"]
        count = self.config.num_hidden_layers
        layers = [jax.tree.map(lambda leaf, index=index: leaf[index], layers) for index in range(count)]
        if self.layout is not None and self.layout.mesh.size > 1:
            params, layers = self._gathered(params, layers, dtype)
        layers = [lora.merge_lora(layer, dtype) for layer in layers]
        parts = {name: part for name, part in params["backbone"].items() if name != "layers"}
        params = {**params, "backbone": {**lora.merge_lora(parts, dtype), "layers": self._transposed(layers)}}
        if self._platform != "cpu":
            return params
        return {**params, "embed_out": self._transposed({"kernel": self._causal_kernel(params)})}

    def read_unstacked(self, leaves: Params, put: Callable[[Any], Array], dtype: Any = jnp.float32) -> Params:
        """`unstack` of params that lie in files: each tensor goes from its file to its place.

        Args:
          leaves: of `hf.open_params`.
          put: a numpy array to a device.
          dtype: as `unstack`.
        """

        def read(part: Params, layer: int | None = None) -> Params:
            return jax.tree.map(lambda leaf: leaf.view(layer), part)

        def placed(part: Params) -> Params:
            return self.cast_params(jax.tree.map(put, part), dtype)

        parts = {name: part for name, part in leaves["backbone"].items() if name != "layers"}
        backbone, count = placed(read(parts)), self.config.num_hidden_layers
        layers = [placed(self._transposed(read(leaves["backbone"]["layers"], index))) for index in range(count)]
        params = {"backbone": {**backbone, "layers": layers}}
        if "embed_out" in leaves:
            return {**params, "embed_out": placed(self._transposed(read(leaves["embed_out"])))}
        tied = TransposedKernel(backbone["embed_in"]["embedding"])
        return {**params, "embed_out": {"kernel": tied}} if self._platform == "cpu" else params

    def stack(self, unstacked: Params) -> Params:
        """The params that `unstack` was given, matrices in its dtype; on one device."""

        def kernel(node: Any) -> Any:
            return node.kernel_FxD.T if isinstance(node, TransposedKernel) else node

        params = jax.tree.map(kernel, unstacked, is_leaf=lambda node: isinstance(node, TransposedKernel))
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["backbone"]["layers"])
        if self.config.tie_word_embeddings:
            params = {name: part for name, part in params.items() if name != "embed_out"}
        return {**params, "backbone": {**params["backbone"], "layers": layers}}

    def _gathered(self, params: Params, layers: list[Params], dtype: Any) -> tuple[Params, list[Params]]:
        """(params, L layers) with what `fsdp` splits gathered.

        One layer at a time, since XLA holds a gathered stack beside the layers that are taken from it. Adapters are
        merged before, or the gathered base is held too; quantized kernels are merged afterwards, since their codes are
        fewer bytes to send.
        """
        quantized = any(map(quantization.is_quantized, jax.tree.leaves(layers, is_leaf=quantization.is_quantized)))
        if self.lora is not None and not quantized:
            layers = [lora.merge_lora(layer, dtype) for layer in layers]
        params = {**params, "backbone": {name: part for name, part in params["backbone"].items() if name != "layers"}}
        stacked = jax.eval_shape(lambda layer: jax.tree.map(lambda leaf: leaf[None], layer), layers[0])
        shapes = {**params, "backbone": {**params["backbone"], "layers": stacked}}

        def param_and_layer_shardings(rules):
            specs = shardings(shapes, rules, self.layout.mesh)
            stacked_shardings = specs["backbone"].pop("layers")
            return specs, jax.tree.map(lambda x: NamedSharding(x.mesh, P(*x.spec[1:])), stacked_shardings)

        def gather(tree, split, gathered_sharding):
            tree = jax.lax.with_sharding_constraint(tree, split)
            # Or XLA for GPUs moves casts and sums behind the gather, which then sends twice the bytes.
            return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(tree), gathered_sharding)

        without_fsdp = {"fsdp": None, "vocabulary": "tensor"}
        rules = [(path, tuple(without_fsdp.get(name, name) for name in row)) for path, row in self._param_names]
        rules = partition_rules(rules, self.layout.folded)
        param_shardings, layer_shardings = zip(
            param_and_layer_shardings(self.param_rules), param_and_layer_shardings(rules)
        )
        return gather(params, *param_shardings), [gather(layer, *layer_shardings) for layer in layers]

    @property
    def _platform(self) -> str:
        return jax.default_backend() if self.layout is None else self.layout.platform

    def _transposed(self, part: Any) -> Any:
        """A part of unstacked params; on CPUs with its kernels as `linear.TransposedKernel`."""

        def transpose(path: tuple, leaf: Array) -> Any:
            return TransposedKernel(leaf.T) if path[-1].key == "kernel" else leaf

        return jax.tree_util.tree_map_with_path(transpose, part) if self._platform == "cpu" else part

    def prefill(
        self, unstacked: Params, tokens: Array, mask: Array, dtype: Any = jnp.float32, images: Images | None = None
    ) -> tuple[Array, decoder.Prefix]:
        """Runs prompts [P, C] and `images`: last column's hidden states [P, D], and the prompts' keys and values."""
        features = self.image_features(unstacked, images, dtype)
        return decoder.prefill(self._context(dtype), unstacked["backbone"], tokens, mask, features)

    @property
    def held_heads(self) -> int:
        """Heads of keys and values in a cache, copies included: see `Context.held_heads`."""
        return self._context(jnp.float32).held_heads

    def empty_cache(self, rows: int, columns: int, dtype: Any = jnp.float32, **options: Any) -> decoder.Cache:
        """Room for `columns` tokens of each of `rows` responses; `options` are those of `decoder.empty_cache`."""
        return decoder.empty_cache(self._context(dtype), rows, columns, **options)

    def decode(
        self,
        unstacked: Params,
        prefix: decoder.Prefix,
        cache: decoder.Cache,
        tokens: Array,
        positions: Array,
        index: Array,
        dtype: Any = jnp.float32,
        **options: Any,
    ) -> tuple[Array, decoder.Cache]:
        """Q tokens a row into the cache from place `index` on: tokens, positions [B, Q], index [] or [B] -> [B, Q, D],
        cache. B is a multiple of P: row i answers prompt i // (B / P). `options` are those of `decoder.decode`."""
        step = (prefix, cache, tokens, positions, index)
        return decoder.decode(self._context(dtype), unstacked["backbone"], *step, **options)

    def map_row_shards(self, function: Callable, params: Params, rows: Any, *, units: int) -> Any:
        """`function(model, params, rows)` on each shard of the rows by itself: no collective but those of the axis
        `tensor`, and loops that end when the shard's own rows have ended.

        Args:
          function: (Model, params, pytree of [b, ...]) -> pytree of [b, ...].
          params: of `unstack`.
          rows: pytree of [B, ...].
          units: a number that every leading dimension of `rows` is a multiple of; where it does not divide by the
            devices that rows are split over, `function` is called once for all rows.
        """
        layout = self.layout
        if layout is None or layout.mesh.size == 1:
            return function(self, params, rows)
        axes = row_axes(layout)
        shards = math.prod(layout.mesh.shape[axis] for axis in axes)
        if shards == 1 or units % shards:
            return function(self, params, rows)
        local = dataclasses.replace(self, layout=dataclasses.replace(layout, manual=True))
        return jax.shard_map(
            lambda params, rows: function(local, params, rows),
            mesh=layout.mesh,
            in_specs=(P(), P(axes)),
            out_specs=P(axes),
            axis_names=set(axes),
            check_vma=False,
        )(params, rows)

    @property
    def param_rules(self) -> tuple[tuple[str, P], ...]:
        """(regular expression on the '/'-joined path, PartitionSpec over 'fsdp' and 'tensor'), one for every param."""
        return partition_rules(self._param_names, self.layout is not None and self.layout.folded)

    @property
    def _param_names(self) -> tuple[ParamRule, ...]:
        """PARAM_RULES; the rows of an embedding that do not divide by `tensor`, as GPT-2's 50,257, are not split."""
        if self.layout is None or self.layout.folded or self.config.vocab_size % self.layout.mesh.shape["tensor"] == 0:
            return PARAM_RULES
        (pattern, (_, columns)), *rest = PARAM_RULES
        return ((pattern, (None, columns)), *rest)

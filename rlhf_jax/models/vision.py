"""Image features of vision-language models of Idefics3's form: SigLIP's vision transformer, pixel shuffle, one matrix.

Zhai et al. 2023, arXiv:2303.15343; Laurençon et al. 2024, arXiv:2408.12637; Marafioti et al. 2025, arXiv:2504.05299.
An image is one tile or several, each of the same size. The features of a prompt's tiles take the place of the
embeddings of its image tokens, in order; those of tiles that pad a prompt have no image token and are never read.

Shape letters: P prompts, I tiles of a prompt, A = P * I tiles, N patches of a tile, M = N / scale_factor^2 its image
tokens, W width of the vision transformer, D width of the decoder.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models.decoder import Block
from rlhf_jax.models.decoder_context import Context, DecoderConfig, Dropout, DropoutSite
from rlhf_jax.models.initializers import normal
from rlhf_jax.models.layers import Dense, norm
from rlhf_jax.models.scan_layers import scan_layers
from rlhf_jax.parallel.sharding import constrain
from rlhf_jax.types import Array, Images, Params

CONNECTOR = ("fsdp", None)
"""Names of the axes of the connector's kernel."""
MAX_QUERIES = 256


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision transformer and the connector. Hashable: static under jit.

    Attributes:
      tower: the transformer's sizes and switches.
      image_size, patch_size: pixels on a side of a tile and of a patch.
      scale_factor: patches on a side of the square that becomes one image token.
    """

    tower: DecoderConfig
    image_size: int
    patch_size: int
    scale_factor: int

    @property
    def patches(self) -> int:
        """Patches on a side of a tile; pixels past the last whole patch are not read."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """M."""
        return (self.patches // self.scale_factor) ** 2


@dataclasses.dataclass(frozen=True)
class VisionDecoderConfig(DecoderConfig):
    """A decoder that reads images."""

    vision: VisionConfig | None = None
    image_token_id: int = -1


def init(config: VisionDecoderConfig, key: Array) -> dict[str, Params]:
    """Random float32 {"vision", "connector"} as transformers draws them: normal(initializer_range), biases 0, norms 1
    and 0."""
    vision, tower = config.vision, config.vision.tower
    patch_key, position_key, layers_key, connector_key = jax.random.split(key, 4)
    std, width, context = tower.initializer_range, tower.hidden_size, Context(tower)
    x = jnp.zeros((1, 1, width))

    def init_layer(key: Array) -> Params:
        return Block(context).init(key, x, None, lambda q, k, v: (q, None))["params"]

    kernel = normal(patch_key, (width, 3, vision.patch_size, vision.patch_size), std=std)
    inputs = width * vision.scale_factor**2
    return {
        "vision": {
            "patch_embedding": {"kernel": kernel, "bias": jnp.zeros(width)},
            "position_embedding": {"embedding": normal(position_key, (vision.patches**2, width), std=std)},
            "layers": jax.vmap(init_layer)(jax.random.split(layers_key, tower.num_hidden_layers)),
            "final_layer_norm": norm(context).init(layers_key, x)["params"],
        },
        # Stacked over one layer, so that adapters, checkpoints and sharding rules treat it as any other linear layer.
        "connector": {
            "proj": {"kernel": normal(connector_key, (1, inputs, config.hidden_size), std=config.initializer_range)}
        },
    }


def normalized(images: Images, dtype: Any) -> Array:
    """Pixels as the model reads them: [P, I, 3, S, S] in `dtype`, computed in float32."""
    pixels = images.pixels
    if not jnp.issubdtype(pixels.dtype, jnp.integer):
        return pixels.astype(dtype)
    mean, std = (jnp.array(x, jnp.float32).reshape(1, 1, 3, 1, 1) for x in (images.mean, images.std))
    return ((pixels.astype(jnp.float32) * jnp.float32(images.rescale_factor) - mean) / std).astype(dtype)


def features(
    context: Context, backbone: Params, images: Images, *, remat: str = "none", dropout_key: Array | None = None
) -> Array:
    """What the decoder reads in place of the embeddings of image tokens.

    Args:
      context: of the decoder, whose config is a VisionDecoderConfig.
      backbone: with "vision" and "connector".
      images: of P prompts.
      remat: as `scan_layers`.
      dropout_key: as `decoder.hidden`; for the inputs of adapters.

    Returns:
      [P, I * M, D] in the context's dtype.
    """
    config = context.config
    vision = config.vision
    prompts, tiles = images.pixels.shape[:2]
    pixels = normalized(images, context.dtype)
    pixels = pixels.reshape(prompts * tiles, *pixels.shape[2:])
    of_tower = dataclasses.replace(context, config=vision.tower)
    if dropout_key is not None and context.lora is not None:
        dropout = Dropout.create(vision.tower, context.lora, dropout_key, prompts)
        keys = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(tiles)))(dropout.keys)
        of_tower = dataclasses.replace(of_tower, dropout=dataclasses.replace(dropout, keys=keys.reshape(-1)))
    patches = _vision_transformer(of_tower, vision, backbone["vision"], pixels, remat)
    shuffled = pixel_shuffle(patches, vision.patches, vision.scale_factor)
    of_connector = of_tower.at_layer(vision.tower.num_hidden_layers)
    proj = jax.tree.map(lambda leaf: leaf[0], backbone["connector"]["proj"])
    dense = Dense(of_connector, config.hidden_size, CONNECTOR, False, DropoutSite.LORA_CONNECTOR)
    tokens = dense.apply({"params": proj}, shuffled)
    return constrain(context.layout, tokens.reshape(prompts, -1, config.hidden_size), "rows")


def _vision_transformer(context: Context, vision: VisionConfig, params: Params, pixels: Array, remat: str) -> Array:
    """Pixels [A, 3, S, S] -> [A, N, W] after the last norm."""
    count, size = vision.patches, vision.patch_size
    pixels = constrain(context.layout, pixels[..., : count * size, : count * size], "rows")
    pixels = pixels.reshape(-1, 3, count, size, count, size)
    kernel = constrain(context.layout, params["patch_embedding"]["kernel"].astype(context.dtype), *[None] * 4)
    x = jnp.einsum("acipjq,wcpq->aijw", pixels, kernel, preferred_element_type=context.dtype)
    x = x.reshape(x.shape[0], count**2, -1)
    table = params["position_embedding"]["embedding"].astype(context.dtype)
    x = x + params["patch_embedding"]["bias"].astype(context.dtype).reshape(1, 1, -1)
    # transformers looks a patch's row up by its place in the tile, in float32: the same for whole tiles, but for grids
    # in which its rounding, which differs from CPU to CPU, takes a neighbour's. No published model has such a grid.
    x = x + table[None]

    queries = attention_block(vision.patches)

    def attend_all(query: Array, key: Array, value: Array) -> tuple[Array, None]:
        return attention(query, key, value, queries), None

    def layer(x: Array, params: Params, index: Array, is_last: bool) -> Array:
        del is_last
        return Block(context.at_layer(index)).apply({"params": params}, x, None, attend_all)[0]

    x = scan_layers(layer, x, params["layers"], remat)
    return norm(context).apply({"params": params["final_layer_norm"]}, x)


def attention_block(side: int) -> int:
    """Queries whose scores are held at a time: whole rows of a tile of side^2 patches, at most MAX_QUERIES if a row
    allows it."""
    rows = [count for count in range(1, side + 1) if side % count == 0 and count * side <= MAX_QUERIES]
    return side * max(rows, default=1)


def attention(query: Array, key: Array, value: Array, block: int) -> Array:
    """Attention of all patches of a tile to all of them, [A, N, heads, W / heads] -> the same shape.

    The weights of `block` queries are held at a time, N a query and head; the backward pass recomputes them.
    """
    attend = jax.checkpoint(jax.nn.dot_product_attention)
    tiles, patches = query.shape[:2]
    if patches == block:
        return attend(query, key, value)
    blocks = query.reshape(tiles, patches // block, block, *query.shape[2:]).swapaxes(0, 1)
    return jax.lax.map(lambda part: attend(part, key, value), blocks).swapaxes(0, 1).reshape(query.shape)


def pixel_shuffle(x: Array, side: int, scale: int) -> Array:
    """Each square of scale x scale patches as one vector: [A, side^2, W] -> [A, (side / scale)^2, scale^2 W].

    Its parts are the square's rows from the top, each from the left.
    """
    count, width = side // scale, x.shape[-1]
    x = x.reshape(-1, count, scale, count, scale, width).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, count**2, scale**2 * width)

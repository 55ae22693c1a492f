"""Params of a stage: initialized or loaded in their shards, so that no host and no device holds a full model; and the
same as shapes alone, for a dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rlhf_jax.models import Model, lora
from rlhf_jax.models.io import hf
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, Params


class Weights:
    """Params on a mesh, sharded by the rules of their family."""

    def __init__(self, mesh: Mesh):
        """`mesh`: of the stage."""
        self.mesh = mesh
        self.loaded: dict[tuple[str, str | None], None] = {}  # (path, revision) of each checkpoint, in order

    def shardings(self, model: Model, shapes: Any) -> Any:
        """A NamedSharding for each param of a model; UserError as `sharding.shardings`."""
        return sharding.shardings(shapes, model.param_rules, self.mesh)

    def load(
        self,
        model: Model,
        path: str,
        kind: str,
        revision: str | None,
        cast_on_load: Callable[[Params], Params] | None = None,
    ) -> Params:
        """A checkpoint's params, float32 or as cast by `cast_on_load`. Each process reads only what its devices hold.

        Args:
          path: folder or hub name.
          kind: as `hf.load`.
          cast_on_load: a pure function of params, applied to each param before the next one is read, so that a model
            that is kept in a smaller dtype is never held in float32.

        Returns:
          Params of jax.Arrays, buffers of their own.

        Raises:
          UserError: as `hf.load`.
        """
        self.loaded[path, revision] = None

        def shardings(_: Model, shapes: Params) -> Any:
            return self.shardings(model, shapes)

        def cast(names: tuple[str, ...], leaf: Array) -> Any:
            tree: Params = {}
            lora.set_path(tree, names, leaf)
            return lora.get_path(self.transform_placed(model, cast_on_load, tree), names)

        options = {"shardings": shardings, "cast_on_load": cast if cast_on_load else None, "images": model.reads_images}
        return hf.load(path, kind=kind, revision=revision, **options)[1]

    def load_unstacked(self, model: Model, path: str, revision: str | None, dtype: Any) -> Params:
        """A checkpoint's params as `Model.unstack` gives them, on a mesh of one device; UserError as `hf.load`."""
        self.loaded[path, revision] = None
        leaves = hf.open_params(path, revision=revision, images=model.reads_images)[1]
        put = partial(jax.device_put, device=sharding.replicated(self.mesh))
        return model.read_unstacked(leaves, put, dtype)

    def has_scalar_head(self, path: str, revision: str | None) -> bool:
        """`hf.has_scalar_head`."""
        return hf.has_scalar_head(path, revision)

    def transform_placed(self, model: Model, function: Callable[[Any], Params], params: Any) -> Params:
        """function(params), sharded by the model's rules; `params` itself where the function changes no shape and no
        dtype. `params` is a pytree or a tuple of them."""
        shapes = jax.eval_shape(function, params)
        if shapes == jax.eval_shape(lambda params: params, params):
            return params
        return self.run(function, params, where=self.shardings(model, shapes))

    def init(self, model: Model, key: Array, heads: Sequence[str]) -> Params:
        """Random params: `model.init(key, heads=heads)`, the same numbers on any mesh."""
        return self._initialize(model, key, lambda key: model.init(key, heads=heads))

    def init_lora(self, model: Model, key: Array, base: Params) -> Params:
        """A new adapter: `lora.init`, the same numbers on any mesh."""
        return self._initialize(model, key, lambda key, base: lora.init(model, key, base), base)

    def _initialize(self, model: Model, key: Array, function: Callable, *trees: Any) -> Params:
        """function(key, *trees), which returns params of the model, in their shards."""
        # As numpy: a key on the device of one process cannot be an argument of a program of all processes.
        data, kind = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)
        from_data = lambda data, *trees: function(jax.random.wrap_key_data(data, impl=kind), *trees)  # noqa: E731
        shapes = jax.eval_shape(from_data, data, *trees)
        return self.run(from_data, data, *trees, where=self.shardings(model, shapes))

    def place(self, tree: Any, where: Any) -> Any:
        """Puts small host arrays on the mesh, as `sharding.place`."""
        return sharding.place(tree, where)

    def copy(self, model: Model, params: Params, dtype: Any = jnp.float32) -> Params:
        """`model.cast_params` of sharded params, in the same shards and in new buffers."""
        where = jax.tree.map(lambda x: x.sharding, params)
        return self.run(lambda params: model.cast_params(params, dtype), params, where=where)

    def run(self, function: Callable, *trees: Any, where: Any = None) -> Any:
        """function(*trees) under jit, in new buffers even where the function returns its arguments.

        Args:
          function: pure.
          *trees: sharded params.
          where: a pytree of NamedShardings, or one for all leaves; None: the compiler's choice.

        Returns:
          A pytree of jax.Arrays.
        """
        # Without the copy jit returns an argument as it is, and an update would donate both.
        copied = lambda *trees: jax.tree.map(jnp.copy, function(*trees))  # noqa: E731
        return jax.jit(copied, out_shardings=where)(*trees)


class AbstractWeights(Weights):
    """The same on shapes: every result is a pytree of jax.ShapeDtypeStructs with shardings.

    Of a checkpoint only config.json is read.
    """

    def load(self, model, path, kind, revision, cast_on_load=None):
        """As `Weights.load`."""
        shapes = hf.load_shapes(path, kind=kind, revision=revision, images=model.reads_images)[1]
        shapes = jax.eval_shape(cast_on_load, shapes) if cast_on_load else shapes
        return self.place(shapes, self.shardings(model, shapes))

    def has_scalar_head(self, path, revision):
        """As `Weights.has_scalar_head`, by its config alone."""
        return hf.has_scalar_head(path, revision, weights=False)

    def place(self, tree, where):
        """As `Weights.place`."""
        abstract = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)  # noqa: E731
        if isinstance(where, NamedSharding):
            return jax.tree.map(lambda x: abstract(x, where), tree)
        return jax.tree.map(abstract, tree, where)

    def run(self, function, *trees, where=None):
        """As `Weights.run`; without `where` the program is compiled to find the shardings of its results."""
        if where is None:
            where = jax.jit(function).lower(*trees).compile().output_shardings
        return self.place(jax.eval_shape(function, *trees), where)

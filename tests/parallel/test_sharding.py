"""Where arrays lie: rules that name what is wrong, and real placement on eight devices."""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from rlhf_jax import models
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import sharding
from tests.helpers.paths import ROOT

RULES = ((r"dense/kernel$", P(None, "fsdp", "tensor")), (r"^embed/", P("tensor", "fsdp")), (r"bias$", P()))


def mesh_of(data, fsdp, tensor):
    """A mesh without devices, for rules alone."""
    return AbstractMesh((data, fsdp, tensor), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def params():
    return {"layers": {"dense": {"kernel": shape(3, 8, 4), "bias": shape(3, 4)}}, "embed": {"embedding": shape(6, 8)}}


# --- the mesh


def test_a_laptop_has_a_mesh_of_one():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((-1, 2, 1), "mesh_data=-1 x mesh_fsdp=2 x mesh_tensor=1: 1 devices do not divide by 2"),
        ((2, 2, 1), "mesh_data=2 x mesh_fsdp=2 x mesh_tensor=1 = 4, but there are 1 devices"),
        ((1, 0, 1), "must be at least 1"),
        ((-1, -1, 1), "one of them may be -1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_numbers(sizes, message):
    with pytest.raises(UserError, match="mesh_data") as error:
        sharding.make_mesh(*sizes, devices=jax.devices()[:1])
    assert message in str(error.value)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What jax reads of a chip to lay a mesh on a slice."""

    id: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0


@pytest.mark.parametrize("sizes", [(4, 32, 1), (2, 64, 1), (16, 8, 1), (64, 1, 2)])
def test_every_mesh_that_multiplies_to_a_slice_lies_on_it(sizes):
    # 64 of 4x4x8 is no product of whole sides of it, which jax.make_mesh refuses.
    chips = [Chip(i, (x, y, z)) for i, (z, y, x) in enumerate(np.ndindex(8, 4, 4))]
    mesh = sharding.make_mesh(*sizes, devices=chips)
    assert mesh.devices.shape == sizes and {chip.id for chip in mesh.devices.flat} == set(range(128))
    assert mesh.axis_names == sharding.AXES and set(mesh.axis_types) == {AxisType.Auto}


# --- rules


def test_the_first_matching_rule_wins():
    rules = ((r"dense/kernel", P(None, "tensor")), *RULES)
    specs = sharding.param_specs(params(), rules, mesh_of(1, 2, 2))
    assert specs["layers"]["dense"] == {"kernel": P(None, "tensor"), "bias": P()}
    assert specs["embed"]["embedding"] == P("tensor", "fsdp")


def test_an_unmatched_param_is_named():
    with pytest.raises(UserError, match=r"policy/embed/embedding \(6, 8\)"):
        sharding.param_specs({"policy": params()}, RULES[:1] + RULES[2:], mesh_of(1, 1, 1))


def test_a_colliding_axis_is_named():
    rules = ((r"kernel", P(None, "fsdp", ("tensor", "fsdp"))), *RULES)
    with pytest.raises(UserError, match="layers/dense/kernel.*'fsdp' twice"):
        sharding.param_specs(params(), rules, mesh_of(1, 1, 1))


def test_an_axis_that_the_mesh_lacks_is_named():
    with pytest.raises(UserError, match="layers/dense/kernel.*names axis 'model'"):
        sharding.param_specs(params(), ((r"kernel", P("model")), *RULES), mesh_of(1, 1, 1))


def test_an_indivisible_size_is_named_with_its_numbers():
    with pytest.raises(UserError) as error:
        sharding.param_specs(params(), RULES, mesh_of(1, 2, 4))
    assert str(error.value) == ("embed/embedding (6, 8): dimension 0 of size 6 does not divide by 4 (mesh_tensor=4)")


def test_a_rule_with_too_many_axes_is_named():
    with pytest.raises(UserError, match=r"embed/embedding \(6, 8\) has 2 axes.*names 3"):
        sharding.param_specs(params(), ((r"embedding", P(None, None, "fsdp")), *RULES), mesh_of(1, 1, 1))


def test_optimizer_state_lies_as_its_params_and_counters_everywhere():
    shapes = jax.eval_shape(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init, {"policy": params()})
    specs = sharding.param_specs(shapes, RULES, mesh_of(1, 2, 2))
    adam = specs[1][0]
    expected = sharding.param_specs({"policy": params()}, RULES, mesh_of(1, 2, 2))
    assert adam.mu == expected and adam.nu == expected
    assert adam.count == P()


def test_factored_optimizer_state_is_replicated_when_asked():
    shapes = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=2).init, params())
    specs = sharding.param_specs(shapes, RULES, mesh_of(1, 1, 1), strict=False)
    assert specs.v_row["layers"]["dense"]["kernel"] == P()
    with pytest.raises(UserError, match="v_row"):
        sharding.param_specs(shapes, RULES, mesh_of(1, 1, 1))


@pytest.mark.parametrize("size", ["14m", "1b", "12b"])
def test_every_pythia_param_has_a_rule_and_divides_over_eight(size):
    model = models.pythia(size)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), heads=("causal", "scalar")))
    specs = jax.tree.leaves(sharding.param_specs(shapes, model.param_rules, mesh_of(1, 4, 2)))
    assert any("fsdp" in spec for spec in specs) and any("tensor" in spec for spec in specs)


# --- layouts


def test_names_of_axes_become_mesh_axes():
    rules = sharding.partition_rules(
        (("kernel", (None, "fsdp", "tensor")), ("head", (None, "vocabulary")), ("bias", ()))
    )
    expected = (("kernel", P(None, "fsdp", "tensor")), ("head", P(None, ("fsdp", "tensor"))), ("bias", P()))
    assert rules == expected
    folded = sharding.partition_rules(
        (("kernel", (None, "fsdp", "tensor")), ("head", (None, "vocabulary"))), folded=True
    )
    assert folded == (("kernel", P(None, ("fsdp", "tensor"), None)), ("head", P(None, ("fsdp", "tensor"))))


@pytest.mark.parametrize(("tensor", "folded"), [(1, False), (2, False), (4, False), (8, True), (3, True)])
def test_a_model_whose_heads_do_not_divide_is_folded(tensor, folded):
    model = models.custom_shape("2x32x4", vocab_size=128).on(mesh_of(1, 2, tensor))
    assert model.layout.folded == folded
    # Split both ways or one way, by as many devices: 32 columns by 2 and `tensor`.
    kernel = "backbone/layers/mlp/dense_h_to_4h/kernel"
    spec = next(spec for rule, spec in model.param_rules if re.search(rule, kernel))
    assert spec == (P(None, ("fsdp", "tensor"), None) if folded else P(None, "fsdp", "tensor"))


def test_a_folded_model_that_does_not_divide_either_is_refused_with_its_numbers():
    model = models.custom_shape("1x48x3", vocab_size=128).on(mesh_of(1, 1, 32))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    with pytest.raises(UserError, match="48.*32.*mesh_fsdp=1.*mesh_tensor=32"):
        sharding.param_specs(shapes, model.param_rules, mesh_of(1, 1, 32))


# --- placement


def test_a_batch_that_does_not_divide_is_refused_with_its_numbers():
    class FourRows:
        shape = {"data": 2, "fsdp": 2, "tensor": 1}

    with pytest.raises(UserError, match=r"tokens has 6 rows, .* 4 devices \(mesh_data=2 x mesh_fsdp=2\)"):
        sharding.shard_batch({"tokens": np.zeros((6, 3), np.int32)}, FourRows())


def test_a_placed_tree_survives_the_donation_of_its_copy():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    first = sharding.place({"w": np.arange(4096, dtype=np.float32)}, sharding.replicated(mesh))
    second = sharding.place(first, sharding.replicated(mesh))
    jax.block_until_ready(jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(second))
    assert second["w"].is_deleted()
    np.testing.assert_array_equal(first["w"], np.arange(4096))


def test_params_wait_in_host_memory_and_come_back(monkeypatch):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    params = sharding.place({"w": np.arange(8, dtype=np.float32)}, sharding.replicated(mesh))
    away = sharding.to_host_memory(params, "offload_frozen pinned_host")
    assert away["w"].sharding.memory_kind == "pinned_host"
    here = sharding.resident(away)
    assert here["w"].sharding == params["w"].sharding and sharding.resident(params)["w"] is params["w"]
    np.testing.assert_array_equal(here["w"], np.arange(8))
    monkeypatch.setattr(sharding, "PINNED", "nowhere")
    with pytest.raises(UserError, match=r"--offload_frozen nowhere: .* has no nowhere memory \(.*device.*\)"):
        sharding.to_host_memory(params, "offload_frozen nowhere")


def test_a_step_on_one_device_compiles_once():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    where = sharding.shardings({"bias": shape(4)}, RULES, mesh)
    tree = sharding.place({"bias": np.ones(4, np.float32)}, where)
    step = jax.jit(lambda t: jax.tree.map(lambda x: 2 * x, t), donate_argnums=0, out_shardings=where)
    for _ in range(3):
        tree = step(tree)
    assert step._cache_size() == 1


ON_EIGHT = """
    import jax, jax.numpy as jnp, numpy as np, optax, sys
    from rlhf_jax.parallel import sharding
    from rlhf_jax.runtime.checkpoint import Checkpoints
    from jax.sharding import NamedSharding, PartitionSpec as P

    mesh = sharding.make_mesh(-1, 2, 2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    rules = ((r"kernel$", P("fsdp", "tensor")), (r"bias$", P("tensor")))
    host = {"kernel": np.arange(32, dtype=np.float32).reshape(8, 4), "bias": np.ones(4, np.float32)}
    where = sharding.shardings(host, rules, mesh)
    params = sharding.place(host, where)
    assert {s.data.shape for s in params["kernel"].addressable_shards} == {(4, 2)}

    # The same placement again is a copy: donating it leaves the first one alone.
    again = sharding.place(params, where)
    double = jax.jit(lambda t: jax.tree.map(lambda x: 2 * x, t), donate_argnums=0, out_shardings=where)
    doubled = double(again)
    np.testing.assert_array_equal(sharding.fetch(params)["kernel"], host["kernel"])
    np.testing.assert_array_equal(sharding.fetch(doubled)["kernel"], 2 * host["kernel"])

    # A step of SGD on sharded rows is the step on one device.
    batch = {"x": np.ones((8, 8), np.float32) * np.arange(8, dtype=np.float32)[:, None], "scale": np.float32(0.5)}
    placed = sharding.shard_batch(batch, mesh)
    assert placed["x"].sharding.spec == sharding.ROWS and placed["scale"].sharding.is_fully_replicated
    def loss(p, b):
        y = b["x"] @ p["kernel"] + p["bias"][None, :]
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(("data", "fsdp"), "tensor")))
        return b["scale"] * jnp.mean(y**2)
    tx = optax.adam(1e-2)
    opt_where = sharding.shardings(jax.eval_shape(tx.init, params), rules, mesh)
    opt = jax.jit(tx.init, out_shardings=opt_where)(params)
    assert {s.data.shape for s in opt[0].mu["kernel"].addressable_shards} == {(4, 2)}
    grads = sharding.fetch(jax.jit(jax.grad(loss))(params, placed))
    y = batch["x"] @ host["kernel"] + host["bias"][None, :]
    expected = 0.5 * 2 / y.size * batch["x"].T @ y
    np.testing.assert_allclose(grads["kernel"], expected, rtol=1e-5)

    # A checkpoint of eight devices is restored on one, bit for bit.
    with Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(1, params)
        checkpoints.wait()
        one = sharding.make_mesh(devices=jax.devices()[:1])
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(one)), host)
        restored, _ = checkpoints.restore(1, like)
    assert len(restored["kernel"].sharding.device_set) == 1
    np.testing.assert_array_equal(restored["kernel"], host["kernel"])

    try:
        sharding.make_mesh(-1, 3, 1)
    except sharding.UserError as error:
        assert "8 devices do not divide by 3" in str(error)
    print("placed")
"""


def test_placement_on_two_by_two_by_two_devices(tmp_path):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ON_EIGHT), str(tmp_path / "checkpoints")],
        env=env,
        cwd=str(ROOT),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("placed")
    assert done.stderr == ""

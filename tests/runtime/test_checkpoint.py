"""Checkpoints: bit for bit, whole or absent, and clear about what does not fit."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.parallel import sharding
from rlhf_jax.runtime import checkpoint
from rlhf_jax.runtime.checkpoint import Checkpoints
from rlhf_jax.types import TrainState

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.add_decayed_weights(0.1))


def make_state(width=8):
    params = {
        "policy": {
            "kernel": jax.random.normal(jax.random.key(0), (3, width)),
            "half": jnp.asarray([1.5, -0.0, jnp.nan, jnp.inf], jnp.bfloat16),
            # The smallest subnormal, which a flush to zero would lose.
            "bias": jnp.asarray(np.array([1, 2**31 + 1, 0x7FC00001], np.uint32).view(np.float32)),
        }
    }
    state = TrainState(
        params=params,
        opt_state=OPTIMIZER.init(params),
        step=jnp.int32(3),
        episodes=jnp.int32(2**31 - 1),
        seed=jnp.uint32(2**32 - 1),
        kl_coef=jnp.float32(0.05),
        tokens=jnp.uint32(2**32 - 1),
    )
    return sharding.place(state, sharding.replicated(sharding.make_mesh(devices=jax.devices()[:1])))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def bits(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def test_a_train_state_comes_back_bit_for_bit(tmp_path):
    state = make_state()
    with Checkpoints(str(tmp_path / "c")) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.save(3, state, {"note": "é", "numbers": [1, 2.5, None]})
    with Checkpoints(str(tmp_path / "c")) as checkpoints:
        assert checkpoints.latest() == 3
        restored, extra = checkpoints.restore(3, abstract(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert extra == {"note": "é", "numbers": [1, 2.5, None]}
    assert all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state)))


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    state = make_state(width=1 << 18)
    before = bits(state)
    like = abstract(state)
    scramble = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
    with Checkpoints(str(tmp_path / "c")) as checkpoints:
        checkpoints.save(1, state)
        jax.block_until_ready(scramble(state))
        checkpoints.wait()
        restored, _ = checkpoints.restore(1, like)
    assert bits(restored) == before


def test_only_the_newest_are_kept(tmp_path):
    state = make_state()
    with Checkpoints(str(tmp_path / "c"), keep=2) as checkpoints:
        for step in (1, 5, 9):
            checkpoints.save(step, state)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 9]
    assert sorted(name for name in os.listdir(tmp_path / "c") if name.isdigit()) == ["5", "9"]
    with pytest.raises(UserError, match="--save_total_limit 0"):
        Checkpoints(str(tmp_path / "c"), keep=0)


def test_all_are_kept_without_a_limit_and_a_step_is_saved_once(tmp_path):
    state = make_state()
    with Checkpoints(str(tmp_path / "c")) as checkpoints:
        assert [checkpoints.save(step, state) for step in (1, 2, 3, 3)] == [True, True, True, False]
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3]


def test_an_interrupted_save_is_no_checkpoint(tmp_path):
    state = make_state()
    with Checkpoints(str(tmp_path / "c")) as checkpoints:
        checkpoints.save(2, state)
    (tmp_path / "c" / "4.orbax-checkpoint-tmp-123").mkdir()
    (tmp_path / "c" / "4.orbax-checkpoint-tmp-123" / "state").write_text("half")
    with Checkpoints(str(tmp_path / "c")) as checkpoints:
        assert checkpoints.latest() == 2
        assert checkpoints.save(4, state)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4]
    assert not [name for name in os.listdir(tmp_path / "c") if "tmp" in name]


def test_a_tensor_that_does_not_fit_is_named(tmp_path):
    state = make_state()
    with Checkpoints(str(tmp_path / "c")) as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(UserError) as error:
            checkpoints.restore(1, abstract(make_state(width=16)))
        message = str(error.value)
        assert "params/policy/kernel is float32[3, 8] in the checkpoint, but float32[3, 16] in this run" in message
        assert "opt_state/1/mu/policy/kernel" in message

        other = state.replace(params={"policy": {**state.params["policy"], "extra": state.kl_coef}})
        with pytest.raises(UserError, match="params/policy/extra.*missing"):
            checkpoints.restore(1, abstract(other))

        fewer = {name: value for name, value in state.params["policy"].items() if name != "half"}
        with pytest.raises(UserError, match="params/policy/half"):
            checkpoints.restore(1, abstract(state.replace(params={"policy": fewer})))

        with pytest.raises(UserError, match="episodes is int32.* but float32"):
            checkpoints.restore(1, abstract(state.replace(episodes=state.kl_coef)))


def test_a_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    state = make_state()
    with Checkpoints(str(tmp_path)) as checkpoints:
        monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT - 1)
        assert checkpoints.save(1, state)
        checkpoints.wait()
        monkeypatch.undo()
        with pytest.raises(UserError, match="checkpoint .*another version.*--run_dir"):
            checkpoints.restore_newest(abstract(state))


def test_a_missing_step_names_those_that_are_there(tmp_path):
    with Checkpoints(str(tmp_path / "c")) as checkpoints:
        checkpoints.save(1, make_state())
        with pytest.raises(UserError, match=r"no checkpoint .*/c/7; existing steps: \[1\]"):
            checkpoints.restore(7, abstract(make_state()))


def test_saving_and_restoring_print_nothing(tmp_path, capfd):
    state = make_state()
    with Checkpoints(str(tmp_path / "c")) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        checkpoints.restore(1, abstract(state))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")

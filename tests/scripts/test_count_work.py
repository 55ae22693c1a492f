"""scripts/bench/count_work.py: products count as often as they run; an update computes little beyond the floor."""

import sys

import jax
import jax.numpy as jnp
import pytest

from tests.helpers.paths import ROOT

SCRIPTS = ROOT / "scripts" / "bench"
sys.path.insert(0, str(SCRIPTS))

import count_work  # noqa: E402

A, B = jnp.zeros((4, 8)), jnp.zeros((8, 16))
ONE = 2 * 4 * 8 * 16


def flops(function, *arguments, shares=(1.0,), turns=1):
    return count_work.count(jax.make_jaxpr(function)(*arguments).jaxpr, shares, turns).flops


def test_products_are_counted_as_often_as_they_run():
    assert flops(jnp.matmul, A, B) == ONE
    assert flops(jax.jit(lambda a, b: a @ b + a @ b), A, B) == 2 * ONE
    assert (
        flops(lambda a, b: jax.lax.scan(lambda c, _: (c + (a @ b).sum(), None), 0.0, None, length=5)[0], A, B)
        == 5 * ONE
    )
    assert (
        flops(lambda a, b: jax.lax.while_loop(lambda c: c < 9, lambda c: c + (a @ b).sum(), 0.0), A, B, turns=7)
        == 7 * ONE
    )
    assert flops(jax.grad(lambda a, b: (a @ b).sum(), argnums=(0, 1)), A, B) == 3 * ONE
    bytes_read = count_work.count(jax.make_jaxpr(jnp.matmul)(A, B).jaxpr, (1.0,), 1).bytes
    assert bytes_read == 4 * (4 * 8 + 8 * 16)


def test_a_switch_counts_by_the_branches_taken():
    def program(a, b):
        return jax.lax.switch(1, [lambda a, b: (a[:2] @ b).sum(), lambda a, b: (a @ b).sum()], a, b)

    assert flops(program, A, B, shares=(0.25, 0.75)) == pytest.approx(0.25 * ONE / 2 + 0.75 * ONE)
    assert count_work.shares_of([1, 9, 3, 4], 2, (4, 9)) == [0.5, 0.5]


@pytest.mark.parametrize("algo", ["ppo", "rloo"])
def test_an_update_computes_at_most_45_percent_more_than_it_must(algo, capsys):
    """What is over: padding to one width, and the blocks of attention on the diagonal."""
    words = ["--algo", algo, "--shape", "2x64x2", "--batch", "8", "--micro", "4", "--query_length", "128"]
    assert count_work.main([*words, "--response_length", "32", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    times = {line.split()[0]: float(line.split()[3]) for line in out.splitlines()[2:]}
    assert set(times) == {"generate", "experience", "update", "decode"}
    assert 1 <= times["update"] < 1.45 and 1 <= times["experience"] < 1.45
    assert count_work.main(["--batch", "9", "--micro", "4"]) == 2
    assert "a multiple of 4" in capsys.readouterr().err

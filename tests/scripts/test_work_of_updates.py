"""Products count as often as they run; an update computes little beyond `rlhf_jax.stages.work`."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import data
from rlhf_jax.algorithms import microbatch
from rlhf_jax.config import STAGES
from rlhf_jax.dry_run import memory
from rlhf_jax.parallel import compile_ahead, sharding
from rlhf_jax.stages.work import Shape
from tests.helpers import matrix_products
from tests.helpers.paths import SCRIPTS

sys.path.insert(0, str(SCRIPTS / "bench"))

import benchmark  # noqa: E402
import benchmark_case  # noqa: E402
import benchmark_report  # noqa: E402

A, B = jnp.zeros((4, 8)), jnp.zeros((8, 16))
ONE = 2 * 4 * 8 * 16


def flops(function, *arguments, shares=(1.0,), turns=1):
    return matrix_products.count(jax.make_jaxpr(function)(*arguments).jaxpr, shares, turns).flops


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
    bytes_read = matrix_products.count(jax.make_jaxpr(jnp.matmul)(A, B).jaxpr, (1.0,), 1).bytes
    assert bytes_read == 4 * (4 * 8 + 8 * 16)


def test_a_switch_counts_by_the_branches_taken():
    def program(a, b):
        return jax.lax.switch(1, [lambda a, b: (a[:2] @ b).sum(), lambda a, b: (a @ b).sum()], a, b)

    assert flops(program, A, B, shares=(0.25, 0.75)) == pytest.approx(0.25 * ONE / 2 + 0.75 * ONE)
    assert matrix_products.shares_of([1, 9, 3, 4], 2, (4, 9)) == [0.5, 0.5]


def programs(case, model, tokenizer, micro, folder):
    """{phase: jaxpr} of generate, experience and update at the case's shapes, and their config."""
    jaxprs, mesh = {}, sharding.make_mesh(1, 1, 1)

    def build(name, program, *args, resident, **arguments):
        jaxprs[name] = program.trace(*args, **arguments).jaxpr.jaxpr
        return compile_ahead.result_shapes(program.eval_shape(*args, **arguments), mesh)

    # config.json and tokenizer are all that a planned stage reads.
    (folder / "config.json").write_text(json.dumps(model.to_hf_config("scalar")))
    data.save_tokenizer(tokenizer, str(folder))
    options = benchmark_case.our_options(case, folder, micro, "none")
    paths = {"sft_model_path": str(folder), "reward_model_path": str(folder)}
    config = STAGES[case.algo](**{**options, **paths})
    memory.abstract_stage(config, mesh).trace_programs(build)
    return jaxprs, config


@pytest.mark.parametrize("algo", ["ppo", "rloo"])
def test_an_update_computes_at_most_45_percent_more_than_it_must(algo, tmp_path):
    """What is over: padding to one width, and the blocks of attention on the diagonal."""
    case = benchmark_case.Case(algo=algo, shape="2x64x2", batch=8, query_length=128, response_length=32)
    tokenizer = data.load_tokenizer(case.tokenizer)
    model, texts = benchmark.model_of(case.shape, tokenizer), benchmark.texts_of(case, tokenizer)
    lengths = [len(ids) for ids in tokenizer.encode_batch(texts[: case.prompts_per_update])]
    jaxprs, config = programs(case, model, tokenizer, 4, tmp_path)
    widths = microbatch.prompt_widths(config, case.query_length)
    shares = matrix_products.shares_of(lengths, 4 // case.group, widths)
    least = benchmark_report.case_work(case, Shape.of(model), lengths)
    for phase in ("experience", "update"):
        flops = matrix_products.count(jaxprs[phase], shares, case.response_length - 1).flops
        assert 1 <= flops / least[phase].flops < 1.45, phase
    # Decoding reads the operands of its products once a step: beyond the weights and the filled cache, room for more.
    steps = [matrix_products.count(jaxprs["generate"], shares, turns).bytes for turns in (0, case.response_length - 1)]
    assert 1 <= np.diff(steps)[0] / least["decode"].bytes < 3

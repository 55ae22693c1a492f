import collections
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import GRPOConfig, RewardConfig, RLOOConfig
from rlhf_jax.parallel import compile_ahead, sharding
from rlhf_jax.stages import open_stage
from tests.helpers import runs
from tests.helpers.paths import ROOT

MESH = sharding.make_mesh(1, 1, 1)


@pytest.fixture
def compiled():
    """{name of a compiled function: names of the threads that compiled it}"""
    found = collections.defaultdict(list)

    def listen(event, seconds, fun_name=None, **_):
        if event.endswith("backend_compile_duration"):
            found[fun_name].append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding.replicated(MESH))


def test_a_call_finds_what_threads_have_compiled(compiled):
    def plus_one(x):
        return x + 1

    def twice(x):
        return x * 2

    first, second = jax.jit(plus_one), jax.jit(twice)
    ahead = compile_ahead.CompileAhead(lambda build: build("second", second, build("first", first, shape(3))), MESH)
    x = sharding.place(jnp.arange(3.0), sharding.replicated(MESH))
    y = ahead.run("second", second, ahead.run("first", first, x))
    np.testing.assert_array_equal(y, [2, 4, 6])
    assert [name[:7] for name in compiled["jit(plus_one)"] + compiled["jit(twice)"]] == ["compile"] * 2
    assert set(ahead.seconds) == {"first", "second"} and ahead.pending == []
    ahead.close()


def test_other_shapes_and_errors_are_left_to_the_call(compiled):
    def checked(x):
        if x.shape[0] == 3:
            raise ValueError("three")
        return x + 1

    program = jax.jit(checked)
    ahead = compile_ahead.CompileAhead(lambda build: build("checked", program, shape(3)), MESH)
    with pytest.raises(ValueError, match="three"):
        ahead.run("checked", program, jnp.ones(3))
    np.testing.assert_array_equal(ahead.run("checked", program, jnp.ones(4)), 2)
    assert compiled["jit(checked)"] == [threading.current_thread().name] and ahead.seconds == {}
    with pytest.raises(ValueError, match="three"):
        ahead.finish()
    ahead.close()


def test_what_is_closed_compiles_nothing_more():
    may_go_on, program = threading.Event(), jax.jit(lambda x: x)

    def trace(build):
        assert may_go_on.wait(10)
        build("program", program, shape(3))

    ahead = compile_ahead.CompileAhead(trace, MESH)
    ahead.close()
    may_go_on.set()
    ahead.run("program", program, 1)
    assert ahead.seconds == {}


def test_a_process_that_ends_while_it_traces_ends_well():
    """Python ends daemon threads at its exit, which aborts the process where jax's C++ is on their stack."""
    code = """if True:
        import time, jax, jax.numpy as jnp
        from rlhf_jax.parallel import compile_ahead, sharding

        @jax.jit
        def program(x):
            end = time.time() + 0.5
            while time.time() < end:
                sum(range(100))
            print("traced", flush=True)
            return x

        trace = lambda build: build("program", jax.jit(lambda x: program(x)), jnp.zeros(2))
        ahead = compile_ahead.CompileAhead(trace, sharding.make_mesh())
        time.sleep(0.2)
        ahead.close()"""
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (child.returncode, child.stdout, child.stderr) == (0, "traced\n", "")


def sampled(config, **options):
    return config(
        run_dir="",
        **{**runs.RLOO_OPTIONS, "num_generations": 2, **options},
    )


STAGES = {
    "sft": lambda sft: (runs.sft_config("", max_steps=2), {}),
    "reward": lambda sft: (
        RewardConfig(run_dir="", **{**runs.OPTIONS, "max_length": 72, "length_buckets": (72,)}, scratch_model="1x16x2"),
        {},
    ),
    "ppo": lambda sft: (runs.ppo_config("", sft), {"reward_funcs": [runs.wordiness]}),
    "ppo with a value model and adapters": lambda sft: (
        runs.ppo_config("", sft, value_model="separate", use_peft=True, lora_r=2),
        {"reward_funcs": [runs.wordiness]},
    ),
    "rloo with an array's reward": lambda sft: (
        sampled(RLOOConfig),
        {"reward_funcs": [rlhf_jax.jax_reward(lambda ids, lengths: (ids % 7 == 0).astype(jnp.float32))]},
    ),
    "grpo whose responses go on": lambda sft: (
        sampled(GRPOConfig, decode_slots=4, rollout_max_steps=4),
        {"reward_funcs": [runs.wordiness]},
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_first_update_of_a_stage_compiles_nothing_that_was_compiled_ahead(name, golden_sft, compiled):
    config, objects = STAGES[name](golden_sft.run_dir)
    stage = open_stage(config, **objects, compile_ahead=True)
    state = stage.state
    for step in range(2):
        state, *_ = stage.train_step(state, step)
    stage.close()
    expected = {"update"} if name in ("sft", "reward") else {"generate", "experience", "update"}
    assert expected <= set(stage.compiling.seconds)
    programs = {"jit(update_step)", "jit(_generate)", "jit(_experience)", "jit(_update)", "jit(_pure_device)"}
    counts = {program: len(threads) for program, threads in compiled.items() if program in programs}
    assert set(counts.values()) == {1}, counts
    ahead = [threads[0] for program, threads in compiled.items() if program in programs - {"jit(_pure_device)"}]
    assert all(thread.startswith("compile") for thread in ahead)

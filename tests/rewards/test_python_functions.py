"""Python reward functions on the host: how they are found, called, timed, and what happens when they misbehave."""

import asyncio
import fractions
import functools
import re
import signal
import sys
import threading
import time
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.rewards import builtin, interface, python_functions
from rlhf_jax.rewards.python_functions import HostRewards, RewardFailure, TrainerState
from tests.helpers.optional import optional

torch = optional("torch")
PROMPTS = ["first " + "p" * 500 + " question", "second question", "third question"]
COMPLETIONS = [" one", " two", " three"]
IDS = [[1], [2, 0], [3, 4, 0]]
COLUMNS = {"answer": ["1", "2", "3"], "level": [10, 20, 30]}


def call(*given, failure="raise", timeout=20.0, columns=COLUMNS, state=None, rows=3):
    host = HostRewards(given, failure=failure, timeout=timeout)
    try:
        columns = {name: values[:rows] for name, values in columns.items()}
        return host.call(PROMPTS[:rows], COMPLETIONS[:rows], IDS[:rows], columns, state or TrainerState())
    finally:
        host.close()


def fixed(value):
    """A reward function that returns `value`, whatever it is asked."""

    def fixed_reward(**_):
        return value

    return fixed_reward


def length(completions, **_):
    return [float(len(text)) for text in completions]


# --- what a function gets


def test_a_function_gets_trls_keywords_and_every_column_as_lists():
    seen = {}

    def reward(**given):
        seen.update(given)
        return [0.0] * 3

    state = TrainerState(global_step=3, max_steps=10, epoch=0.5)
    call(reward, state=state)
    assert set(seen) == {*python_functions.KEYWORDS, "answer", "level"}
    assert seen["prompts"] == PROMPTS and seen["completions"] == COMPLETIONS and seen["completion_ids"] == IDS
    assert seen["answer"] == ["1", "2", "3"] and seen["level"] == [10, 20, 30]
    assert seen["trainer_state"] is state
    assert all(type(seen[name]) is list for name in ("prompts", "completions", "completion_ids", "answer"))


def test_a_function_without_kwargs_gets_only_what_it_names():
    def reward(completions, level, missing_has_default=7):
        return [n + missing_has_default for n in level]

    assert call(reward).rewards[:, 0].tolist() == [17.0, 27.0, 37.0]


def test_a_keyword_only_and_a_bound_partial_are_called_by_name():
    def reward(*, completions, scale, trainer_state):
        return [scale * len(text) + trainer_state.global_step for text in completions]

    found = call(functools.partial(reward, scale=2), state=TrainerState(global_step=100))
    assert found.rewards[:, 0].tolist() == [108.0, 108.0, 112.0]


def test_messages_are_handed_on_as_they_are():
    prompts = [[{"role": "user", "content": "hi"}]]
    completions = [[{"role": "assistant", "content": "ho"}]]
    host = HostRewards([lambda prompts, completions: [len(prompts[0]) + len(completions[0][0]["content"])]])
    assert host.call(prompts, completions, [[1]], {}, TrainerState()).rewards.tolist() == [[3.0]]
    host.close()


@pytest.mark.parametrize("column", python_functions.KEYWORDS)
def test_a_column_named_like_a_keyword_gives_way_to_it(column):
    def reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
        assert (prompts, completions, completion_ids) == (PROMPTS, COMPLETIONS, IDS)
        assert isinstance(trainer_state, TrainerState) and callable(log_extra) and callable(log_metric)
        return [1, 1, 1]

    assert call(reward, columns={column: ["x", "y", "z"]}).rewards[:, 0].tolist() == [1.0, 1.0, 1.0]


def test_a_column_whose_name_is_no_identifier_reaches_a_function_with_kwargs():
    assert call(lambda **columns: columns["how good"], columns={"how good": [1, 2, 3]}).rewards.sum() == 6


def test_a_function_that_changes_its_lists_changes_nobody_elses():
    def spoils(prompts, completions, completion_ids, level):
        completions.sort(reverse=True)
        prompts.clear()
        level[0] = 1000
        completion_ids[0].append(99)
        return [0, 0, 0]

    def reads(prompts, completions, completion_ids, level):
        assert (prompts, completions, completion_ids) == (PROMPTS, COMPLETIONS, [[1], [2, 0], [3, 4, 0]])
        return level

    assert call(spoils, reads).rewards[:, 1].tolist() == [10.0, 20.0, 30.0]


def test_a_keyword_that_is_no_column_is_named_with_the_nearest():
    def reward(completions, anwser):
        return [0] * len(completions)

    for failure in ("raise", "drop"):  # dropping every row of every batch helps nobody
        with pytest.raises(UserError, match="reward.*'anwser'.*answer"):
            call(reward, failure=failure)
    host = HostRewards([reward])
    with pytest.raises(UserError, match="There are completion_ids, completions, difficulty"):
        host.check_columns(["difficulty"])
    host.check_columns(["anwser"])


def texts_and_numbers(completions: list[str], answer: Sequence[str], level: "list[float | None]", other=None, **_):
    return [0.0] * len(completions)


class Scores:
    def __call__(self, completions, answer: list[int], **_):
        return [0.0] * len(completions)


def test_a_column_of_another_type_than_a_function_expects_is_named_with_its_value():
    functions = [texts_and_numbers, functools.partial(texts_and_numbers, other=1), Scores(), builtin.exact_match_reward]
    host = HostRewards(functions)
    right = {"answer": "7", "level": 3, "solution": "7"}
    missing = {"answer": None, "level": None}
    assert host.type_notes([right, missing])[0].startswith(
        "column 'answer' holds a str, '7', but reward function Scores"
    )
    host = HostRewards([functions[0], functions[1], functions[3]])
    assert host.type_notes([right, missing, {**right, "level": 2.5}]) == []
    first, second, third = host.type_notes([right, {"answer": 7, "level": 1}, {"solution": 7.5}])
    expects = "column 'answer' holds an int, 7, but reward function {} expects str: it gets the value as it is"
    assert first == expects.format("texts_and_numbers") and second == expects.format("texts_and_numbers_2")
    expects = "column 'solution' holds a float, 7.5, but reward function exact_match_reward expects str"
    assert third == f"{expects}: its text is compared"
    assert "'level' holds a str, '3'" in host.type_notes([{**right, "level": "3"}])[0]


def test_annotations_that_name_no_type_of_values_say_nothing():
    def free(completions, answer: "list[Unknown]", **_):  # noqa: F821
        return [0.0] * len(completions)

    def loose(completions, answer: list, level: "list[typing.Any]", **_):
        return [0.0] * len(completions)

    assert HostRewards([free, loose, length, len_of := fixed(0)]).type_notes([{"answer": 7, "level": 7}]) == []
    assert interface.column_types(len_of) == {}


def positional(prompts, completions, /):
    return [0] * len(prompts)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (positional, "reward function positional takes prompts, completions by position only"),
        (len, "reward function len takes obj by position only"),
        (max, "reward function max:"),
        (3, "reward function int of type int"),
        (TrainerState, r"TrainerState is a class.*TrainerState\(\)"),
    ],
)
def test_what_keywords_cannot_reach_is_refused_at_once(function, said):
    with pytest.raises(UserError, match=said):
        HostRewards([length, function])


# --- the kinds of functions


class Judge:
    """An object with a name of its own, and a state."""

    def __init__(self, name="judge"):
        self.name, self.calls = name, 0

    def __call__(self, completions, **_):
        self.calls += 1
        return [self.calls] * len(completions)


class AsyncJudge:
    async def __call__(self, completions):
        await asyncio.sleep(0.01)
        return [5] * len(completions)


async def async_level(level, **_):
    await asyncio.sleep(0.01)
    return level


def test_functions_objects_and_partials_sync_and_async_keep_their_columns():
    host = HostRewards([length, async_level, Judge(), AsyncJudge(), functools.partial(async_level), Judge().__call__])
    found = host.call(PROMPTS, COMPLETIONS, IDS, COLUMNS, TrainerState())
    assert found.rewards.dtype == np.float32 and found.rewards.shape == (3, 6)
    assert found.rewards.tolist() == [[4, 10, 1, 5, 10, 1], [4, 20, 1, 5, 20, 1], [6, 30, 1, 5, 30, 1]]
    assert not found.failed.any() and not found.problems and not found.extra and not found.metrics
    assert list(found.seconds) == list(host.names)
    assert host.call(PROMPTS, COMPLETIONS, IDS, COLUMNS, TrainerState()).rewards[:, 2].tolist() == [2, 2, 2]
    host.close()
    host.close()
    assert host.call(PROMPTS, COMPLETIONS, IDS, COLUMNS, TrainerState()).rewards[:, 2].tolist() == [3, 3, 3]
    host.close()


def test_no_functions_and_no_rows_are_fine():
    assert call().rewards.shape == (3, 0)
    assert call(length, rows=0).rewards.shape == (0, 1)


def test_async_functions_overlap_each_other_and_the_plain_ones():
    together = threading.Barrier(2, timeout=10)  # each waits for the others
    three = asyncio.Barrier(3)

    async def waits(**_):
        await three.wait()
        await asyncio.sleep(0.1)
        return [1, 1, 1]

    async def meets(**_):
        await asyncio.to_thread(together.wait)
        return [1, 1, 1]

    def plain(**_):
        together.wait()
        return [1, 1, 1]

    found = call(waits, waits, waits, meets, plain)
    assert all(found.seconds[name] >= 0.09 for name in ("waits", "waits_2", "waits_3"))
    assert (found.rewards == 1).all()


def test_seconds_of_plain_functions_are_their_own():
    def slow(**_):
        time.sleep(0.3)
        return [1, 1, 1]

    found = call(length, slow)
    assert 0.29 <= found.seconds["slow"] < 10 and found.seconds["length"] < 0.29


def test_plain_functions_share_a_thread_and_async_ones_a_loop_from_call_to_call():
    threads, loops = set(), set()

    def plain(**_):
        threads.add(threading.get_ident())
        return [0, 0, 0]

    async def later(**_):
        loops.add(id(asyncio.get_running_loop()))
        return [0, 0, 0]

    host = HostRewards([plain, plain, later, later])
    for _ in range(3):
        host.call(PROMPTS, COMPLETIONS, IDS, {}, TrainerState())
    host.close()
    assert len(threads) == 1 and len(loops) == 1 and threading.get_ident() not in threads


def test_close_ends_the_threads():
    before = set(threading.enumerate())
    host = HostRewards([length, async_level])
    host.call(PROMPTS, COMPLETIONS, IDS, COLUMNS, TrainerState())
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2 and all(thread.daemon for thread in mine)
    host.close()
    for thread in mine:
        thread.join(5)
        assert not thread.is_alive()


# --- what they return


@pytest.mark.parametrize(
    "value",
    [
        [1, 2.5, -3],
        (1, 2.5, -3),
        np.array([1, 2.5, -3]),
        np.array([1, 2.5, -3], np.float16),
        jnp.array([1, 2.5, -3]),
        jnp.array([1, 2.5, -3], jnp.bfloat16),
        [np.float32(1), jnp.float32(2.5), np.array(-3)],
        [True, fractions.Fraction(5, 2), np.int64(-3)],
        [np.bool_(True), jnp.bfloat16(2.5), np.array(-3.0)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_sequences_and_arrays_of_numbers_are_rewards(value):
    assert call(fixed(value)).rewards[:, 0].tolist() == [1.0, 2.5, -3.0]


def test_tensors_of_torch_are_rewards():
    for value in (torch.tensor([1, 2.5, -3]), [np.float32(1), jnp.float32(2.5), torch.tensor(-3)]):
        assert call(fixed(value)).rewards[:, 0].tolist() == [1.0, 2.5, -3.0]


def test_none_is_not_applicable_and_no_failure():
    found = call(fixed([None, 1, None]), fixed([None, None, 2]))
    np.testing.assert_array_equal(found.rewards, [[np.nan, np.nan], [1, np.nan], [np.nan, 2]])
    assert not found.failed.any() and not found.problems


BAD_ENTRIES = {
    "text": "0.5",
    "nan": float("nan"),
    "numpy nan": np.float32("nan"),
    "infinity": float("inf"),
    "more than float32": 1e39,
    "a huge int": 10**400,
    "complex": 1j,
    "list": [0.5],
    "array": np.array([0.5]),
    "dict": {"reward": 1},
    "object": object(),
    "numpy text": np.str_("1"),
    "jax nan": jnp.float32(jnp.nan),
}


@pytest.mark.parametrize("bad", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_bad_entry_fails_by_function_row_value_prompt_and_completion(bad):
    with pytest.raises(RewardFailure) as failure:
        call(length, fixed([1.0, bad, 2.0]))
    said = str(failure.value)
    assert "reward function fixed_reward returned" in said and "for row 1" in said
    assert interface.quoted(bad) in said and "'second question'" in said and "' two'" in said
    assert "finite number" in said


@pytest.mark.parametrize("bad", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_with_drop_a_bad_entry_costs_its_row_alone(bad):
    found = call(length, fixed([1.0, bad, None]), failure="drop")
    np.testing.assert_array_equal(found.rewards, [[4, 1], [4, np.nan], [6, np.nan]])
    assert found.failed.tolist() == [False, True, False]
    assert len(found.problems) == 1 and "for row 1" in found.problems[0]


def test_several_bad_entries_are_one_message_with_their_number():
    found = call(fixed(["a", 1, "b"]), failure="drop")
    assert found.failed.tolist() == [True, False, True] and len(found.problems) == 1
    assert "returned 'a' for row 0 (and 1 more bad values)" in found.problems[0]


BAD_ANSWERS = {
    "two": ([1.0, 2.0], "returned 2 rewards for 3 rows"),
    "four": ((1, 2, 3, 4), "returned 4 rewards for 3 rows"),
    "none at all": (None, "returned None for 3 rows"),
    "a number": (1.5, "returned 1.5 of type float for 3 rows"),
    "text": ("abc", "returned 'abc' of type str for 3 rows"),
    "bytes": (b"abc", "of type bytes"),
    "a dict": ({0: 1, 1: 2, 2: 3}, "of type dict"),
    "a set": ({1, 2, 3}, "of type set"),
    "a column": (np.ones((3, 1)), r"an array of shape \[3, 1\]"),
    "a jax column": (jnp.ones((3, 1)), r"an array of shape \[3, 1\]"),
    "a scalar array": (np.float32(3), r"an array of shape \[\]"),
    "a short array": (np.ones(2), "returned 2 rewards"),
}


@pytest.mark.parametrize(("bad", "said"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_answer_that_is_not_one_entry_a_row_fails_or_drops_all_rows(bad, said):
    fails_or_drops_all_rows(bad, said)


def test_a_tensor_with_a_gradient_fails_or_drops_all_rows():
    fails_or_drops_all_rows(torch.ones(3, requires_grad=True), "requires grad")


def fails_or_drops_all_rows(bad, said):
    with pytest.raises(
        RewardFailure, match=f"reward function fixed_reward returned .*{said.removeprefix('returned ')}"
    ):
        call(fixed(bad))
    found = call(length, fixed(bad), failure="drop")
    assert found.failed.all() and len(found.problems) == 1
    np.testing.assert_array_equal(found.rewards, [[4, np.nan], [4, np.nan], [6, np.nan]])


def test_a_long_prompt_is_shortened_in_the_message_and_the_completion_is_whole():
    with pytest.raises(RewardFailure) as failure:
        call(fixed([None, 1, "x"][::-1]))
    said = str(failure.value)
    assert "'first ppp" in said and "ppp question'" in said and " ... " in said
    assert len(said) < 500 and "' one'" in said


# --- exceptions


def raises(**_):
    return {}["no such key"]  # the line that messages name


async def async_raises(**_):
    await asyncio.sleep(0)
    raise ValueError("async trouble")


def test_an_exception_fails_with_its_type_message_file_and_line():
    line = raises.__code__.co_firstlineno + 1
    with pytest.raises(RewardFailure) as failure:
        call(raises)
    assert f"reward function raises raised KeyError: 'no such key' ({__file__}, line {line})" in str(failure.value)
    assert isinstance(failure.value.__cause__, KeyError)
    line = async_raises.__code__.co_firstlineno + 2
    with pytest.raises(RewardFailure) as failure:
        call(async_raises)
    assert f"async_raises raised ValueError: async trouble ({__file__}, line {line})" in str(failure.value)


def test_the_line_is_the_users_even_where_a_library_raises():
    def through_a_library(**_):
        return np.linalg.inv(np.zeros((2, 3)))

    line = through_a_library.__code__.co_firstlineno + 1
    with pytest.raises(RewardFailure, match=f"LinAlgError: .*line {line}"):
        call(through_a_library)


def test_with_drop_exceptions_cost_all_rows_and_nothing_is_raised():
    found = call(raises, length, async_raises, failure="drop")
    assert found.failed.all() and len(found.problems) == 2
    assert found.rewards[:, 1].tolist() == [4, 4, 6] and np.isnan(found.rewards[:, [0, 2]]).all()
    assert list(found.seconds) == ["raises", "length", "async_raises"]


def test_sys_exit_in_a_function_is_a_failure_like_any():
    def leaves(**_):
        raise SystemExit(3)

    with pytest.raises(RewardFailure, match="leaves raised SystemExit: 3"):
        call(leaves)


@pytest.mark.parametrize("failure", ["raise", "drop"])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_keyboard_interrupt_passes_through(kind, failure):
    def plain(**_):
        raise KeyboardInterrupt

    async def later(**_):
        raise KeyboardInterrupt

    host = HostRewards([plain if kind == "plain" else later, length], failure=failure)
    with pytest.raises(KeyboardInterrupt):
        host.call(PROMPTS, COMPLETIONS, IDS, {}, TrainerState())
    host.close()


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_ctrl_c_ends_the_wait_for_a_function(kind):
    free, started = threading.Event(), threading.Event()

    def plain(**_):
        started.set()
        free.wait(30)
        return [0, 0, 0]

    async def later(**_):
        started.set()
        await asyncio.sleep(30)

    def press():
        started.wait(30)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    host = HostRewards([plain if kind == "plain" else later], failure="drop")
    # A job in the background is started with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=press, daemon=True).start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            host.call(PROMPTS, COMPLETIONS, IDS, {}, TrainerState())
        assert time.perf_counter() - start < 10
    finally:
        signal.signal(signal.SIGINT, before)
        free.set()
    host.close()


def test_a_plain_function_that_hands_out_a_coroutine_is_told_to_be_async():
    def forgot(**columns):
        return async_level(**columns)

    with pytest.raises(RewardFailure, match="forgot.*coroutine.*async def"):
        call(forgot)


def test_the_first_failure_cancels_what_still_runs():
    ends = []

    async def long(**_):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    for failing in (async_raises, raises):
        start = time.perf_counter()
        with pytest.raises(RewardFailure, match=failing.__name__):
            call(long, failing)
        assert time.perf_counter() - start < 10
    assert ends == ["cancelled"] * 2


# --- time


@pytest.mark.parametrize("failure", ["raise", "drop"])
def test_a_plain_function_that_hangs_is_named_with_the_first_row(failure):
    free = threading.Event()

    def hangs(**_):
        free.wait(30)
        return [0, 0, 0]

    start = time.perf_counter()
    host = HostRewards([hangs, length], failure=failure, timeout=0.3)
    if failure == "raise":
        with pytest.raises(RewardFailure) as error:
            host.call(PROMPTS, COMPLETIONS, IDS, {}, TrainerState())
        said = str(error.value)
    else:
        found = host.call(PROMPTS, COMPLETIONS, IDS, {}, TrainerState())
        assert found.failed.all() and found.rewards[:, 1].tolist() == [4, 4, 6]  # others go on, in a new thread
        assert found.seconds["hangs"] == pytest.approx(0.3)
        said = found.problems[0]
    assert time.perf_counter() - start < 10
    assert re.search("hangs .*0.3 s.*Row 0: prompt 'first ppp.*' one'", said)
    free.set()
    host.close()


@pytest.mark.parametrize("failure", ["raise", "drop"])
def test_async_functions_that_hang_are_cancelled_and_named(failure):
    cancelled = []

    async def hangs(**_):
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.append(True)

    async def stubborn(**_):
        for _ in range(100):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)

    start = time.perf_counter()
    if failure == "raise":
        with pytest.raises(RewardFailure, match=r"hangs.*0\.3 s.*Row 0: prompt 'first"):
            call(hangs, async_level, timeout=0.3)
    else:
        found = call(hangs, async_level, stubborn, failure="drop", timeout=0.3)
        assert found.failed.all() and len(found.problems) == 2
        assert found.rewards[:, 1].tolist() == [10, 20, 30]
        assert 0.29 <= found.seconds["hangs"] < 10
    assert cancelled and time.perf_counter() - start < 15


def test_an_async_function_that_blocks_the_loop_ends_in_an_error_too():
    async def blocks(**_):
        time.sleep(20)
        return [0, 0, 0]

    start = time.perf_counter()
    found = call(blocks, length, failure="drop", timeout=0.2)
    assert time.perf_counter() - start < 15
    assert found.failed.all() and found.rewards[:, 1].tolist() == [4, 4, 6]
    assert "function blocks did not return within 0.2 s and the event loop is blocked" in found.problems[0]


def test_a_function_that_bounds_itself_has_its_own_time():
    class Patient:
        own_timeout = 20.0

        async def __call__(self, **_):
            await asyncio.sleep(0.4)
            return [1, 1, 1]

    assert (call(Patient(), timeout=0.1).rewards == 1).all()


# --- logging


def test_log_extra_and_log_metric_reach_the_caller():
    def reward(completions, log_extra, log_metric):
        log_extra("words", np.array([1, 2, 3]))
        log_metric("accuracy", 0.25)
        log_metric("accuracy", np.float32(0.75))
        return [0] * 3

    async def other(log_extra, log_metric, **_):
        log_extra("verdict", ("good", None, {"why": 1}))
        log_metric("accuracy", True)
        log_metric("other", 7)
        return [0] * 3

    found = call(reward, other)
    assert found.extra == {"words": [1, 2, 3], "verdict": ["good", None, {"why": 1}]}
    assert found.metrics == {"accuracy": pytest.approx(2 / 3), "other": 7.0}


@pytest.mark.parametrize("values", [[1, 2], "abc", 5, None, np.ones(4), {1: 1, 2: 2, 3: 3}], ids=repr)
def test_log_extra_wants_a_value_a_row(values):
    def reward(log_extra, **_):
        log_extra("notes", values)
        return [0] * 3

    with pytest.raises(RewardFailure, match=r"reward: log_extra\('notes'\).*3 rows"):
        call(reward)
    assert call(reward, failure="drop").failed.all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, [1.0], 1j], ids=repr)
def test_log_metric_wants_a_finite_number(value):
    async def reward(log_metric, **_):
        log_metric("accuracy", value)
        return [0] * 3

    with pytest.raises(RewardFailure, match=r"reward: log_metric\('accuracy'\).*finite"):
        call(reward)


def test_rows_that_every_function_left_out_are_told_with_the_first():
    found = call(fixed([None, 1, None]), fixed([None, None, None]))
    said = python_functions.unscored_warning(found, PROMPTS, COMPLETIONS, COLUMNS)
    assert "returned None for 2 of 3 rows" in said and "Row 0: prompt 'first" in said
    assert "' one'" in said and "answer '1'" in said and "level 10" in said
    assert python_functions.unscored_warning(call(fixed([1, 1, None]), length), PROMPTS, COMPLETIONS, COLUMNS) == ""
    assert python_functions.unscored_warning(call(), PROMPTS, COMPLETIONS, COLUMNS) == ""
    failed = call(fixed(["x", 1, 1]), failure="drop")  # a failed row has its own message
    assert python_functions.unscored_warning(failed, PROMPTS, COMPLETIONS, COLUMNS) == ""


# --- names and marks


def test_names_are_functions_objects_and_classes_and_unique():
    class Nameless:
        name = 5

        def __call__(self, **_):
            return []

    given = [length, functools.partial(functools.partial(length, x=1), y=2), Judge("style"), Nameless(), length]
    assert python_functions.unique_names(given) == ("length", "length_2", "style", "Nameless", "length_3")

    def length_2(**_):
        return []

    assert python_functions.unique_names([length, length, length_2]) == ("length", "length_2", "length_2_2")
    assert interface.function_name(length) == "length"


def test_marks_of_jax_rewards_survive_jit_and_partial():
    @python_functions.jax_reward
    def dense(tokens, lengths, scale=1.0):
        return scale * jnp.ones_like(tokens, jnp.float32)

    class Model:
        def score(self, tokens, lengths):
            return lengths

    method = python_functions.jax_reward(Model().score)
    assert python_functions.is_jax_reward(dense) and python_functions.is_jax_reward(jax.jit(dense))
    assert python_functions.is_jax_reward(functools.partial(dense, scale=2.0)) and python_functions.is_jax_reward(
        method
    )
    assert method(1, 2) == 2 and dense(jnp.zeros((2, 3)), None).shape == (2, 3)
    assert python_functions.is_jax_reward(python_functions.jax_reward(jax.jit(lambda tokens, lengths: lengths)))
    assert not python_functions.is_jax_reward(length) and not python_functions.is_jax_reward(Judge())


# --- functions by name


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in [name for name in sys.modules if name.startswith(("my_rewards", "reward_package"))]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "helper_of_rewards.py").write_text("VALUE = 3\n")
    (tmp_path / "my_rewards.py").write_text(
        "import dataclasses\n"
        "from helper_of_rewards import VALUE\n"
        "def brevity(completions, **_):\n    return [-len(text) for text in completions]\n"
        "@dataclasses.dataclass\n"
        "class Style:\n    scale: float = 2.0\n    def __call__(self, completions):\n        return [self.scale]\n"
        "class Broken:\n    def __init__(self):\n        raise RuntimeError('no weights')\n"
        "class Hungry:\n    def __init__(self, path):\n        pass\n"
        "style = Style()\nNUMBER = 3\n"
    )
    package = tmp_path / "reward_package" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "scores.py").write_text("def good(**_):\n    return [1]\n")
    return tmp_path


def test_modules_files_and_trls_dotted_names_are_found(folder):
    assert python_functions.resolve("my_rewards:brevity")(completions=["ab"]) == [-2]
    assert python_functions.resolve("my_rewards.py:brevity")(completions=["ab"]) == [-2]
    assert python_functions.resolve(f"{folder}/my_rewards.py:brevity").__name__ == "brevity"
    assert python_functions.resolve("./my_rewards.py:style.__call__")([""]) == [2.0]
    assert python_functions.resolve("reward_package.inner.scores.good")() == [1]
    assert python_functions.resolve("reward_package.inner.scores:good")() == [1]
    assert python_functions.resolve("rlhf_jax.data.synthetic:gold_reward").__name__ == "gold_reward"


def test_a_class_becomes_an_object_and_two_functions_of_a_file_share_it(folder):
    style = python_functions.resolve("my_rewards.py:Style")
    assert style(["x"]) == [2.0] and python_functions.unique_names([style]) == ("Style",)
    assert type(style) is type(python_functions.resolve("my_rewards.py:style"))
    (folder / "my_rewards.py").write_text("def brevity(**_):\n    return 'new'\n")
    assert python_functions.resolve("my_rewards.py:brevity")() == "new"  # an edited file is read again


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("brevity", "does not name a function in a module. Give 'module:function'"),
        ("my_rewards.py", "does not name a function in a module"),
        ("my_rewards:", "does not name a function"),
        (":brevity", "does not name a function"),
        ("", "does not name a function"),
        ("my_rewards.py:brevty", r"my_rewards.py has no 'brevty'. Did you mean brevity\?"),
        ("my_rewards:brevty", r"my_rewards has no 'brevty'. Did you mean brevity\?"),
        ("my_rewards:zzz", "has no 'zzz'. It has .*brevity"),
        ("my_rewrads:brevity", r"there is no module 'my_rewrads'. Did you mean my_rewards\?"),
        ("my_rewrads.py:brevity", r"there is no file .*my_rewrads.py. Did you mean my_rewards.py"),
        ("no/such/folder/r.py:f", "there is no file .*no/such/folder/r.py"),
        ("./my_rewards:brevity", r"there is no module './my_rewards'. Did you mean ./my_rewards.py:brevity\?"),
        ("reward_package.iner.scores.good", "there is no module 'reward_package.iner.scores'"),
        ("reward_package.inner.scors.good", r"no module 'reward_package.inner.scors'. Did you mean scores\?"),
        ("my_rewards.brevity.more", "there is no module 'my_rewards.brevity'"),
        ("my_rewards:NUMBER", "NUMBER is of type int"),
        ("my_rewards:Broken", r"Broken\(\) failed: RuntimeError: no weights \(.*my_rewards.py, line 12\)"),
        ("my_rewards:Hungry", r"Hungry\(\) failed: TypeError: .*missing 1 required positional argument: 'path'"),
    ],
)
def test_a_name_that_leads_nowhere_says_where_it_ended(folder, spec, said):
    with pytest.raises(UserError, match=said):
        python_functions.resolve(spec)


@pytest.mark.parametrize("form", ["{}.py:f", "{}:f", "{}.f"])
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\ny = x / 0\n", r"importing .* failed: ZeroDivisionError: division by zero \(.*{}.py, line 2\)"),
        ("import no_such_module_at_all\n", r"No module named 'no_such_module_at_all' \(.*{}.py, line 1\)"),
        ("def f(:\n", "{}.py, line 1: invalid syntax"),
        ("raise SystemExit(2)\n", r"importing .* failed: SystemExit: 2 \(.*{}.py, line 1\)"),
    ],
)
def test_a_module_that_fails_says_its_line(folder, form, code, said):
    stem = folder.name  # of this test alone: Python keeps what it imported
    (folder / f"{stem}.py").write_text(code)
    with pytest.raises(UserError, match=said.format(stem)):
        python_functions.resolve(form.format(stem))


def test_ids_of_completions_are_cut_at_their_lengths():
    assert interface.completion_ids(np.array([[1, 2, 0], [3, 0, 0]]), np.array([3, 0])) == [[1, 2, 0], []]

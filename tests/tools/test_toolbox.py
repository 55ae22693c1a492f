"""Calls of tools: results and errors as the policy reads them."""

import asyncio
import sys
import threading
import time

import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.tools.toolbox import Toolbox, open_toolbox


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow_double(a: int, seconds: float = 0.0) -> int:
    """Doubles a number.

    Args:
        a: The number.
        seconds: Before the result.
    """
    await asyncio.sleep(seconds)
    return 2 * a


def returns(value: str):
    """Returns what RESULTS has.

    Args:
        value: Its name.
    """
    return RESULTS[value]


def raises(kind: str) -> str:
    """Raises an exception.

    Args:
        kind: Which.
    """
    raise {"value": ValueError("no <|im_end|> here"), "exit": SystemExit("gone"), "key": KeyError("zoe")}[kind]


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


RESULTS = {
    "bytes": b"\xff\x00",
    "none": None,
    "surrogate": "a\ud800b",
    "list": [1, 2],
    "empty": [],
    "blocks": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
    "image": [{"type": "image", "image": "a picture"}],
    "unprintable": Unprintable(),
    "large": "x" * 10_000_000,
}
MODULE = __name__


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture
def toolbox():
    toolbox = Toolbox([add, slow_double, returns, raises], timeout=5.0)
    yield toolbox
    toolbox.close()


@pytest.mark.parametrize(
    ("name", "arguments", "content", "failed"),
    [
        ("add", {"a": 17, "b": 25}, "42", False),
        ("add", {"a": "x", "b": "y"}, "xy", False),
        ("add", {"a": 17}, str({"error": "add() missing 1 required positional argument: 'b'"}), True),
        ("add", {"a": 1, "b": 2, "c": 3}, str({"error": "add() got an unexpected keyword argument 'c'"}), True),
        ("add", [17, 25], str({"error": f"{MODULE}.add() argument after ** must be a mapping, not list"}), True),
        ("add", '{"a": 1}', str({"error": f"{MODULE}.add() argument after ** must be a mapping, not str"}), True),
        ("slow_double", {"a": 4}, "8", False),
        ("slow_double", {}, str({"error": "slow_double() missing 1 required positional argument: 'a'"}), True),
        (
            "slow_double",
            [4],
            str({"error": f"{MODULE}.slow_double() argument after ** must be a mapping, not list"}),
            True,
        ),
        ("none", {"x": 1}, str({"error": "Tool none not found."}), True),
        ("raises", {"kind": "value"}, str({"error": "no <|im_end|> here"}), True),
        ("raises", {"kind": "key"}, str({"error": "'zoe'"}), True),
        ("raises", {"kind": "exit"}, str({"error": "gone"}), True),
        ("returns", {"value": "bytes"}, str(b"\xff\x00"), False),
        ("returns", {"value": "none"}, "None", False),
        ("returns", {"value": "surrogate"}, "a?b", False),
        ("returns", {"value": "list"}, "[1, 2]", False),
        ("returns", {"value": "empty"}, "[]", False),
        ("returns", {"value": "blocks"}, "one two", False),
        ("returns", {"value": "unprintable"}, str({"error": "no text"}), True),
        ("returns", {"value": "large"}, "x" * 10_000_000, False),
    ],
)
def test_a_result_or_an_error_is_text_that_the_policy_reads(toolbox, name, arguments, content, failed):
    results = toolbox.call([[call(name, arguments)]])
    assert results.messages == [[{"role": "tool", "name": name, "content": content}]]
    assert ([len(row) for row in results.calls], results.failures) == ([1], int(failed))


def test_an_image_is_refused_with_the_name_of_the_tool(toolbox):
    with pytest.raises(UserError, match="tool returns returned a block of type 'image'"):
        toolbox.call([[call("returns", {"value": "image"})]])


def test_plain_calls_run_in_order_and_async_ones_together_after_them(toolbox):
    waiting = [call("slow_double", {"a": n, "seconds": 0.4}) for n in range(6)]
    began = time.monotonic()
    results = toolbox.call([[waiting[0], call("add", {"a": 1, "b": 1}), waiting[1]], [], waiting[2:]])
    assert time.monotonic() - began < 1.2  # six of 0.4 s one after another take 2.4 s
    contents = [[message["content"] for message in row] for row in results.messages]
    assert contents == [["2", "0", "2"], [], ["4", "6", "8", "10"]]
    assert ([len(row) for row in results.calls], results.failures) == ([3, 0, 4], 0)


def test_a_call_that_hangs_is_an_error_and_the_others_are_made():
    release = threading.Event()

    def hang() -> str:
        """Waits."""
        release.wait()
        return "late"

    async def hang_too() -> str:
        """Waits."""
        await asyncio.sleep(60)
        return "late"

    toolbox = Toolbox([hang, hang_too, add], timeout=0.2)
    results = toolbox.call([[call("hang", {}), call("hang_too", {}), call("add", {"a": 1, "b": 2})]])
    release.set()
    late = [str({"error": f"{name} did not return within 0.2 s"}) for name in ("hang", "hang_too")]
    assert [message["content"] for message in results.messages[0]] == [late[0], "3", late[1]]
    assert results.failures == 2
    toolbox.close()


def test_arguments_that_a_tool_changes_are_a_copy(toolbox):
    def clear(items: list) -> str:
        """Empties a list.

        Args:
            items: The list.
        """
        items.clear()
        return "empty"

    made = call("clear", {"items": [1, 2]})
    box = Toolbox([clear], timeout=5.0)
    box.call([[made]])
    box.close()
    assert made["function"]["arguments"] == {"items": [1, 2]}


def no_hints(a):
    """Has none."""


def no_description(a: int) -> int:
    """Adds.

    Args:
        b: Another.
    """


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([no_hints], "tool no_hints: .*type hint.*Google docstring"),
        ([no_description], "tool no_description: .*a.*"),
        ([add, add], "two functions have the name 'add'"),
        ([7], "tool 7 is of type int"),
    ],
)
def test_what_is_no_tool_is_refused(functions, message):
    with pytest.raises(UserError, match=message):
        Toolbox(functions, timeout=1.0)


def test_tools_of_a_file_have_no_hash_of_its_path_in_their_errors(tmp_path):
    source = "def one(a: int) -> int:\n    '''One.\n\n    Args:\n        a: It.\n    '''\n    return a\n"
    (tmp_path / "my_tools.py").write_text(source)
    toolbox = open_toolbox([f"{tmp_path}/my_tools.py:one"], [], 5.0)
    results = toolbox.call([[call("one", [1])]])
    toolbox.close()
    text = str({"error": "my_tools.one() argument after ** must be a mapping, not list"})
    assert results.messages[0][0]["content"] == text
    with pytest.raises(UserError, match=r"tool '.*my_tools.py:two': .* has no 'two'. It has one"):
        open_toolbox([f"{tmp_path}/my_tools.py:two"], [], 5.0)
    assert open_toolbox([], [], 5.0).schemas == []
    sys.modules.pop("my_tools", None)

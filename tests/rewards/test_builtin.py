"""Reward functions by name: TRL's with the same numbers as TRL's, in every thread; exact match and format by hand."""

import pickle
import random
import subprocess
import sys

import pytest

from rlhf_jax import rewards
from rlhf_jax.config import command_line
from rlhf_jax.config.check import check
from rlhf_jax.data import arithmetic
from rlhf_jax.errors import UserError
from rlhf_jax.rewards import interface, math_verification
from rlhf_jax.rewards.python_functions import HostRewards, TrainerState
from tests.helpers.paths import ROOT

SOLUTIONS = [
    r"\frac{1}{3}",
    r"$\frac{1}{3}$",
    "$x^2 + 2x + 1$",
    "$(3, 4)$",
    r"$\{1, 2\}$",
    "42",
    "$12$",
    r"$50\%$",
    "no mathematics at all",
    "",
    "$\\text{Yes}$",
]
ANSWERS = [
    r"My answer is \boxed{\frac{1}{3}}",
    r"\boxed{\frac{1}{2}} or rather \boxed{\frac{2}{6}}",
    r"The final answer is $\frac{1}{3}$. I hope it is correct.",
    r"I get $\frac{1}{3}$",
    r"\boxed{(x+1)^2}",
    r"$$\boxed{x^2 + 2x + 2}$$",
    r"\boxed{(3,4)}",
    r"\boxed{\{2, 1\}}",
    r"\boxed{42\text{ cm}}",
    "The answer is 42.",
    r"Answer: $12.0$",
    r"\boxed{0.5}",
    r"\boxed{\text{Yes}}",
    r"\boxed{\frac{1}{",
    "",
    "I do not know.",
]

TRLS = [
    *("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "exact_match_reward"),
    *("boxed_format_reward", "get_soft_overlong_punishment"),
]
"""Names that `reward_funcs` takes, of TRL's scripts and beside them, that need a solution or nothing."""


@pytest.fixture(scope="module", autouse=True)
def one_process():
    yield
    math_verification.shared.close()


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl.rewards")


def messages(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def ids(*lengths):
    return [[7] * length for length in lengths]


# --- format, length and repetition


def test_the_think_format_by_hand():
    good = ["<think>a</think>b", "<think></think>", "<think>\n</think>\n</think>"]
    bad = ["", "a", "<think>a", "a</think>", " <think>a</think>", "<think><think></think>", "<think></think><think>"]
    assert rewards.think_format_reward(good) == [1.0] * 3 and rewards.think_format_reward(bad) == [0.0] * 7
    assert rewards.think_format_reward(messages(good + bad), answer=["ignored"] * 10) == [1.0] * 3 + [0.0] * 7


def test_the_think_format_is_trls(trl):
    draw = random.Random(0)
    pieces = ["<think>", "<think>", "</think>", "</think>", "<think", "think>", "\n", "a", " ", "<", "</think"]
    texts = ["".join(draw.choices(pieces, k=draw.randint(0, 6))) for _ in range(3000)]
    ours = rewards.think_format_reward(texts)
    assert ours == trl.think_format_reward(messages(texts)) and {0.0, 1.0} == set(ours)


def test_the_overlong_punishment_by_hand():
    punishment = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert punishment(ids(0, 80, 81, 90, 100, 101, 500)) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]
    assert rewards.get_soft_overlong_punishment(10, 0)(ids(10, 11)) == [0.0, -1.0]


@pytest.mark.parametrize(("longest", "cache"), [(1280, 256), (20, 7), (20, 0), (20, 20), (5, 9)])
def test_the_overlong_punishment_is_trls(trl, longest, cache):
    lengths = ids(*range(0, longest + 3))
    assert rewards.get_soft_overlong_punishment(longest, cache)(completion_ids=lengths, prompts=[]) == (
        trl.get_soft_overlong_punishment(longest, cache)(completion_ids=lengths)
    )


def test_the_repetition_penalty_by_hand():
    penalty = rewards.get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    assert penalty([[1, 2, 3, 4], [5, 5, 5, 5, 5], [1], [], [1, 2, 1, 2]]) == (
        pytest.approx([0.0, -0.75, 0.0, 0.0, -1 / 3])
    )


def test_the_repetition_penalty_is_trls(trl):
    draw = random.Random(0)
    rows = [[draw.randint(0, draw.choice([1, 5])) for _ in range(draw.randint(0, 12))] for _ in range(500)]
    for arguments in ({}, {"ngram_size": 1}, {"ngram_size": 4, "max_penalty": -0.3}, {"max_penalty": 0.0}):
        ours = rewards.get_repetition_penalty_reward(**arguments)(completion_ids=rows, prompts=[])
        assert ours == trl.get_repetition_penalty_reward(**arguments)(completion_ids=rows)


@pytest.mark.parametrize(
    ("factory", "arguments", "named"),
    [
        (rewards.get_repetition_penalty_reward, {"max_penalty": 0.5}, "max_penalty is 0.5"),
        (rewards.get_repetition_penalty_reward, {"ngram_size": 0}, "ngram_size is 0"),
        (rewards.get_cosine_scaled_reward, {"max_len": 0}, "max_len is 0"),
        (rewards.get_soft_overlong_punishment, {"max_completion_len": 5, "soft_punish_cache": -1}, "soft_punish_cache"),
    ],
)
def test_impossible_arguments_are_refused(factory, arguments, named):
    with pytest.raises(UserError, match=named):
        factory(**arguments)


# --- correctness


def test_accuracy_by_hand():
    pytest.importorskip("math_verify")
    completions = [r"\boxed{\frac{2}{6}}", r"\boxed{0.3}", "a third", r"\boxed{1}"]
    assert rewards.accuracy_reward(completions, [r"\frac{1}{3}"] * 3 + ["none"]) == [1.0, 0.0, 0.0, None]
    assert rewards.accuracy_reward(messages(completions[:2]), ["1/3", "1/3"], level=[1, 2]) == [1.0, 0.0]
    assert rewards.accuracy_reward([], []) == []
    with pytest.raises(ValueError):
        rewards.accuracy_reward(["a"], ["1", "2"])


def test_accuracy_is_trls(trl):
    pytest.importorskip("math_verify")
    pairs = [(answer, solution) for answer in ANSWERS for solution in SOLUTIONS]
    completions, solutions = messages([answer for answer, _ in pairs]), [solution for _, solution in pairs]
    ours, theirs = {}, {}
    found = rewards.accuracy_reward(completions, solutions, log_extra=ours.__setitem__)
    assert found == trl.accuracy_reward(completions, solutions, log_extra=theirs.__setitem__)
    assert ours == theirs and set(found) == {None, 0.0, 1.0}


@pytest.mark.parametrize("delimiters", [None, ["</think>"], ["</reason>", "</think>"]])
def test_accuracy_after_reasoning_is_trls(trl, delimiters):
    pytest.importorskip("math_verify")
    draw = random.Random(0)
    pieces = [r"\boxed{\frac{1}{3}}", r"\boxed{7}", "</think>", "</reason>", "<think>", " so "]
    texts = ["".join(draw.choices(pieces, k=draw.randint(0, 4))) + draw.choice(pieces[:4]) for _ in range(100)]
    completions = messages([text + draw.choice(pieces) for text in texts])
    solutions = draw.choices(["$\\frac{1}{3}$", "7", "nothing"], k=100)
    ours, theirs = {}, {}
    arguments = {"reasoning_delimiters": delimiters}
    found = rewards.reasoning_accuracy_reward(completions, solutions, log_extra=ours.__setitem__, **arguments)
    assert found == trl.reasoning_accuracy_reward(completions, solutions, log_extra=theirs.__setitem__, **arguments)
    assert ours == theirs and set(found) == {None, 0.0, 1.0}


RIGHT = "<think>3+4=7\n7+5=12</think>\\boxed{12}"
FORMS = {  # completion: (exact_match_reward of the solution 12, boxed_format_reward)
    RIGHT: (1, 1),
    "<think>3+4=7\n7+5=13</think>\\boxed{13}": (0, 1),  # a wrong answer
    "<think></think>\n \\boxed{12}\n": (1, 1),  # white space around the box
    "<think>3+4=7</think>\\boxed{ 12}": (0, 1),  # character by character
    "<think>3+4=7</think>\\boxed{012}": (0, 1),
    "3+4=7\n7+5=12\n\\boxed{12}": (1, 0),  # no tags
    "<think>3+4=7\\boxed{12}": (1, 0),  # one tag
    "3+4=7</think>\\boxed{12}": (1, 0),
    "<think>3+4=7</think>12": (0, 0),  # no box
    "<think>3+4=7</think>\\boxed{}": (0, 0),
    "<think>3+4=7</think>\\boxed{12": (0, 0),
    "<think>3+4=7</think>\\boxed{12}\\boxed{12}": (0, 0),  # two boxes
    "<think>3+4=7\\boxed{12}</think>\\boxed{12}": (0, 0),
    "<think>3+4=7\\boxed{7</think>\\boxed{12}": (1, 0),  # a box that is not closed
    "<think>3+4=7</think></think>\\boxed{12}": (1, 0),  # two tags
    "<think><think>3+4=7</think>\\boxed{12}": (1, 0),
    RIGHT + " is it": (1, 0),  # trailing text
    "so " + RIGHT: (1, 0),
    "<think>3+4=7</think>so \\boxed{12}": (1, 0),
    "": (0, 0),
}


def test_exact_match_and_format_by_hand():
    texts = list(FORMS)
    for completions in (texts, messages(texts)):
        matched = rewards.exact_match_reward(completions=completions, solution=["12"] * len(texts), prompts=[])
        formatted = rewards.boxed_format_reward(completions=completions, prompts=[])
        assert dict(zip(texts, zip(matched, formatted))) == FORMS
    with pytest.raises(ValueError):
        rewards.exact_match_reward(texts, ["12"])


@pytest.mark.parametrize(
    ("solution", "right", "wrong"),
    [
        (7, ["7"], ["7.0", "07", "8"]),
        (7.0, ["7", "7.0"], ["7.00"]),
        (2.5, ["2.5"], ["2.50", "2"]),
        (-12, ["-12"], ["12"]),
        (10**20, [str(10**20)], ["1e20"]),
        (True, ["True", "true"], ["1", "TRUE"]),
        ("007", ["007"], ["7"]),
    ],
)
def test_an_exact_match_is_one_of_texts(solution, right, wrong):
    texts = [f"\\boxed{{{text}}}" for text in right + wrong]
    assert rewards.exact_match_reward(texts, [solution] * len(texts)) == [1.0] * len(right) + [0.0] * len(wrong)


def test_without_a_solution_an_exact_match_does_not_apply():
    assert rewards.exact_match_reward(["\\boxed{}", "\\boxed{7}"], [None, 7]) == [None, 1.0]


def test_accuracy_gets_numbers_as_text():
    pytest.importorskip("math_verify")
    solutions = [7, 7.0, 0.5, "7", None]
    logged = {}
    found = rewards.accuracy_reward([r"\boxed{7}"] * 5, solutions, log_extra=logged.__setitem__)
    assert found == [1.0, 1.0, 0.0, 1.0, None] and logged["solution"] == ["7", "7", "0.5", "7", ""]
    assert rewards.reasoning_accuracy_reward([r"so</think>\boxed{\frac{1}{2}}"], [0.5]) == [1.0]
    cosine = rewards.get_cosine_scaled_reward(100)
    assert cosine([r"\boxed{7}"], [7], ids(10)) == cosine([r"\boxed{7}"], ["7"], ids(10))


def test_the_format_is_also_that_of_think_format_reward():
    for text, (_, boxed) in FORMS.items():
        assert rewards.think_format_reward([text])[0] >= boxed, text


def test_on_the_arithmetic_task_an_exact_match_is_correct_as_mathematics():
    pytest.importorskip("math_verify")
    rows = arithmetic.demonstrations(40)
    texts, solutions = [row["completion"] for row in rows], [row["solution"] for row in rows]
    boxed = [i for i, text in enumerate(texts) if "boxed" in text]
    exact, correct = rewards.exact_match_reward(texts, solutions), rewards.accuracy_reward(texts, solutions)
    assert [exact[i] for i in boxed] == [correct[i] for i in boxed] and 0 < sum(exact) < len(exact)


def test_the_cosine_by_hand_and_as_trls(trl):
    pytest.importorskip("math_verify")
    completions = messages([r"\boxed{3}"] * 4 + [r"\boxed{4}"] * 4 + [r"\boxed{3}"])
    arguments = {"solution": ["3"] * 8 + ["nothing"], "completion_ids": ids(0, 50, 100, 250, 0, 50, 100, 250, 50)}
    found = rewards.get_cosine_scaled_reward(max_len=100)(completions, **arguments)
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.75, -0.5, -0.5, None])
    for bounds in ({}, {"min_value_wrong": -3.0, "max_value_wrong": -2.0, "max_value_correct": 0.7}):
        ours = rewards.get_cosine_scaled_reward(70, **bounds)(completions=completions, prompts=[], **arguments)
        assert ours == trl.get_cosine_scaled_reward(70, **bounds)(completions=completions, **arguments)


def test_a_run_calls_them_in_its_thread_and_logs_what_they_log():
    pytest.importorskip("math_verify")
    functions = [*map(interface.resolve, TRLS), rewards.get_cosine_scaled_reward(10)]
    host = HostRewards(functions, timeout=60.0)
    completions = [r"<think>1 or 2?</think> \boxed{2}", r"\boxed{2}"]
    columns = {"solution": ["2", "none"]}
    host.check_columns(columns)
    found = host.call(["a", "b"], completions, [[1] * 10, [1] * 1281], columns, TrainerState())
    assert host.names[5:] == ("soft_overlong_punishment_reward", "cosine_scaled_reward")
    assert found.rewards[0].tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.5]
    second = [value if value == value else None for value in found.rewards[1].tolist()]
    assert second == [None, 0.0, 0.0, 0.0, 0.0, -1.0, None]
    assert found.extra["gold_parsed"][1] == "[incomplete reasoning]"
    assert math_verification.shared._process is not None
    host.close()
    assert math_verification.shared._process is None
    with pytest.raises(UserError, match="accuracy_reward requires 'solution'"):
        host.check_columns(["answer"])


# --- by name


def test_names_on_the_command_line_are_trls_functions(trl, monkeypatch):
    monkeypatch.setattr(math_verification, "find_spec", lambda name: True)
    flags = ["--reward_funcs", *TRLS, "rlhf_jax.rewards.think_format_reward", "--reward_model_path", "none"]
    config = command_line.parse(["--config", "tldr_rloo.py", *flags])
    check(config)
    functions = [interface.resolve(spec) for spec in config.reward_funcs]
    assert functions[:5] == [getattr(rewards, name) for name in TRLS[:5]]
    assert functions[5] == rewards.get_soft_overlong_punishment(1280, 256)
    assert functions[6] is rewards.think_format_reward
    assert [interface.function_name(function) for function in functions[:6]] == [
        *TRLS[:5],
        trl.get_soft_overlong_punishment(1280, 256).__name__,
    ]


@pytest.mark.parametrize("name", ["acuracy_reward", "get_cosine_scaled_reward"])
def test_an_unknown_name_lists_those_that_are_known(name):
    for resolved in (
        lambda: interface.resolve(name),
        lambda: check(command_line.parse(["--config", "tldr_rloo.py", "--reward_funcs", name])),
    ):
        with pytest.raises(UserError) as failure:
            resolved()
        assert all(known in str(failure.value) for known in interface.BY_NAME) and repr(name) in str(failure.value)


def test_without_math_verify_the_accuracy_functions_name_the_extra_and_the_others_work(monkeypatch):
    monkeypatch.setattr(math_verification, "find_spec", lambda name: None)
    for name in ("accuracy_reward", "reasoning_accuracy_reward"):
        for use in (lambda name=name: interface.resolve(name), lambda name=name: interface.BY_NAME[name](["1"], ["1"])):
            with pytest.raises(UserError, match=rf"^{name} needs .*'\.\[math\]'"):
                use()
    with pytest.raises(UserError, match="^cosine_scaled_reward needs"):
        rewards.get_cosine_scaled_reward(5)(["1"], ["1"], [[1]])
    assert interface.resolve("think_format_reward")(["a"]) == [0.0]


def test_factories_have_trls_names_and_can_be_pickled(trl):
    for name, arguments in (
        ("get_soft_overlong_punishment", (100, 20)),
        ("get_cosine_scaled_reward", (100,)),
        ("get_repetition_penalty_reward", ()),
    ):
        function = getattr(rewards, name)(*arguments)
        assert interface.function_name(function) == getattr(trl, name)(*arguments).__name__
        assert pickle.loads(pickle.dumps(function)) == function


def test_importing_them_is_cheap():
    code = (
        "import sys, rlhf_jax.rewards; "
        "print({'jax', 'sympy', 'math_verify', 'torch', 'trl', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "set()", done

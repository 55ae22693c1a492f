"""Judges: what is asked, what counts as a verdict, what is tried again, counted, or ends it. Servers on loopback."""

import json
import time

import numpy as np
import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import judge as judges
from rlhf_jax.evaluate.judge import FunctionJudge, JudgeFailure, RemoteJudge, parse_verdict
from tests.helpers.judge_server import chat, question
from tests.helpers.reward_server import Sleeps, answers, closes, hangs, send

SECRET = "sk-9f8e7d"
PROMPTS, MINE, OTHERS = ["p0", "p1", "p2"], ["good 0", "bad 1", "good 2"], ["bad 0", "good 1", "good too"]


def fair(handler):
    """Prefers what begins with 'good', whatever its place."""
    text = question(handler)
    first, second = ("good" in text.split(f"[Answer {name}]")[1].split("[End")[0] for name in "AB")
    send(handler, 200, chat(f"I looked. [[{'C' if first == second else 'A' if first else 'B'}]]"))


@pytest.fixture
def server(server):
    server.forever = fair
    return server


def remote(server, **options):
    given = {"timeout": 5.0, "sleep": Sleeps(), "retries": 2, **options}
    return RemoteJudge(server.url.replace("/score", "/v1"), "small", **given)


def test_both_orders_are_asked_and_a_fair_judge_says_the_same_in_both(server):
    found = remote(server, options={"temperature": 0, "max_tokens": None}).compare(PROMPTS, MINE, OTHERS)
    np.testing.assert_array_equal(found.verdicts, [[1, 1], [0, 0], [0.5, 0.5]])
    np.testing.assert_array_equal(found.preference, [1, 0, 0.5])
    assert found.summary() == {
        "questions": 6,
        "unparsable": 0,
        "unanswered": 0,
        "prompts_without_verdict": 0,
        "orders_agree": 1.0,
        "first_place": 0.5,
    }
    assert {path for path, _ in server.requests} == {"/v1/chat/completions"}
    bodies = [body for _, body in server.requests]
    assert all(body.keys() == {"model", "messages", "temperature"} and body["model"] == "small" for body in bodies)
    texts = [body["messages"][0]["content"] for body in bodies]
    one = judges.PROMPT.format(prompt="p1", answer_a="bad 1", answer_b="good 1")
    assert one in texts and judges.PROMPT.format(prompt="p1", answer_a="good 1", answer_b="bad 1") in texts
    assert found.replies[1] == ["I looked. [[B]]", "I looked. [[A]]"]


def test_a_judge_that_likes_the_first_place_gives_ties_and_is_found_out(server):
    server.forever = answers(200, chat("[[A]]"))
    found = remote(server).compare(PROMPTS, MINE, OTHERS)
    np.testing.assert_array_equal(found.preference, [0.5] * 3)
    assert found.summary()["orders_agree"] == 0.0 and found.summary()["first_place"] == 1.0


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Both fine, [[A]]", 1.0),
        ("[[b]]", 0.0),
        ("so: [[ C ]]. Again: [[C]]", 0.5),
        ("[[tie]]", 0.5),
        ("A", 1.0),
        (" **B**.\n", 0.0),
        ("Tie", 0.5),
        ("", None),
        ("A is better", None),
        ("[[A]] or [[B]]", None),
        ("[A]", 1.0),
        ("A, not B", None),
        ("[[D]]", None),
    ],
)
def test_a_verdict_is_marked_or_stands_alone(text, verdict):
    assert parse_verdict(text) == verdict


def test_what_names_no_verdict_is_counted_and_leaves_the_prompt_out(server):
    server.forever = lambda handler: (
        send(handler, 200, chat("I cannot say")) if "[Answer A]\nbad 1" in question(handler) else fair(handler)
    )
    found = remote(server).compare(PROMPTS, MINE, OTHERS)
    np.testing.assert_array_equal(found.preference, [1, np.nan, 0.5])
    assert found.unparsable == 1 and found.summary()["prompts_without_verdict"] == 1
    assert found.problems == ["no verdict in 'I cannot say'"] and found.replies[1] == [
        "I cannot say",
        "I looked. [[A]]",
    ]


def test_an_answer_without_words_is_no_verdict(server):
    server.forever = answers(200, {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]})
    assert remote(server).compare(PROMPTS, MINE, OTHERS).unparsable == 6


def test_lost_connections_and_busy_servers_are_asked_again(server):
    server.script.extend([closes, answers(503, {"error": "busy"}), answers(429, {"error": "slow down"}, Retry_After=3)])
    judge = remote(server, concurrency=1, retries=3)
    np.testing.assert_array_equal(judge.compare(PROMPTS[:1], MINE[:1], OTHERS[:1]).preference, [1])
    assert len(server.requests) == 5 and judge._sleep.asked[2] == 3.0


def test_a_server_may_not_have_us_wait_for_a_day(server):
    server.script.append(answers(429, {}, Retry_After=86_400))
    judge = remote(server)
    judge.compare(PROMPTS[:1], MINE[:1], OTHERS[:1])
    assert max(judge._sleep.asked) <= 10


def test_a_question_that_is_not_answered_is_counted_and_the_others_go_on(server):
    server.forever = lambda handler: (
        send(handler, 400, {"error": "too long"}) if "p1" in question(handler) else fair(handler)
    )
    found = remote(server).compare(PROMPTS, MINE, OTHERS)
    np.testing.assert_array_equal(found.preference, [1, np.nan, 0.5])
    assert found.unanswered == 2 and "status 400" in found.problems[0] and len(server.requests) == 6


def test_a_refused_key_ends_it_at_once_and_is_in_no_message(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    server.forever = lambda handler: send(handler, 401, {"error": f"bad key {handler.headers['Authorization']}"})
    judge = remote(server, token_env="MY_KEY", concurrency=1)
    with pytest.raises(JudgeFailure, match=r"judge http://127.*/v1/chat/completions: status 401 .*\*\*\*") as failure:
        judge.compare(PROMPTS, MINE, OTHERS)
    assert SECRET not in str(failure.value) and len(server.requests) == 1
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"


def test_a_key_that_is_quoted_back_is_in_no_verdicts_words(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    server.forever = answers(200, chat(f"your key is {SECRET} [[A]]"))
    found = remote(server, token_env="MY_KEY").compare(PROMPTS, MINE, OTHERS)
    assert found.replies[0][0] == "your key is *** [[A]]" and SECRET not in json.dumps(found.replies)


def test_a_judge_that_stops_answering_is_not_asked_forever(server):
    server.forever = answers(500, {"error": "gone"})
    with pytest.raises(JudgeFailure, match="12 consecutive questions had no reply. The last: .*status 500"):
        remote(server, retries=0, concurrency=2).compare(["p"] * 60, ["a"] * 60, ["b"] * 60)
    assert len(server.requests) < 20


def test_a_judge_that_hangs_is_given_up_in_time(server):
    server.forever = hangs(server)
    start = time.monotonic()
    found = remote(server, timeout=0.2, retries=1).compare(PROMPTS[:1], MINE[:1], OTHERS[:1])
    assert found.unanswered == 2 and time.monotonic() - start < 3


def test_so_many_questions_at_a_time_and_no_more(server):
    server.forever = lambda handler: time.sleep(0.05) or fair(handler)
    remote(server, concurrency=3).compare(["p"] * 12, ["good"] * 12, ["bad"] * 12)
    assert server.most_active == 3 and len(server.requests) == 24


def test_a_trial_question_finds_what_is_no_chat_endpoint(server):
    server.forever = answers(200, {"scores": [1.0]})
    with pytest.raises(JudgeFailure, match="not a chat completion.*test question"):
        remote(server).probe()
    server.forever = fair
    remote(server).probe()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{prompt} {answer_a}", "must be {prompt}, {answer_a}, {answer_b}.*has {answer_a}, {prompt}"),
        ("{prompt} {answer_a} {answer_b} {more}", "has .*{more}"),
        ("{prompt.__class__} {answer_a} {answer_b}", "prompt.__class__"),
        ("{prompt} {answer_a} {answer_b} {", "Write {{ and }}"),
    ],
)
def test_a_template_of_other_fields_is_refused(template, said):
    with pytest.raises(UserError, match=said):
        judges.check_prompt(template, "--judge_prompt x.txt")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/", "http://u:p@host/v1"])
def test_a_url_that_cannot_be_is_refused(url):
    with pytest.raises(UserError, match="judge"):
        RemoteJudge(url, "m")


# --- Python functions


def longest(prompts, completions, **_):
    return [0.5 if len(a) == len(b) else float(len(b) > len(a)) for a, b in completions]


def test_a_function_is_called_as_trls_judges_in_both_orders():
    found = FunctionJudge(longest).compare(["p"] * 3, ["aaa", "a", "aa"], ["b", "bbb", "bb"])
    np.testing.assert_array_equal(found.verdicts, [[1, 1], [0, 0], [0.5, 0.5]])


def test_a_function_may_have_no_verdict():
    found = FunctionJudge(lambda prompts, completions: [None, -1, 0]).compare(PROMPTS, MINE, OTHERS)
    np.testing.assert_array_equal(found.preference, [np.nan, np.nan, 0.5])
    assert found.unparsable == 4


def test_a_function_that_fails_or_scores_is_named_with_the_row():
    with pytest.raises(JudgeFailure, match="judge .*7.*Row 1: prompt 'p1'"):
        FunctionJudge(lambda prompts, completions: [1, 7, 1]).compare(PROMPTS, MINE, OTHERS)
    with pytest.raises(JudgeFailure, match="judge .* raised ZeroDivisionError"):
        FunctionJudge(lambda prompts, completions: 1 / 0).compare(PROMPTS, MINE, OTHERS)
    with pytest.raises(UserError, match="'scores'"):
        FunctionJudge(lambda prompts, completions, scores: [])

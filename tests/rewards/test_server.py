"""A reward server: what goes over the wire, what is tried again, what ends in an error and when. And our own server."""

import asyncio
import datetime
import email.utils
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import data, models
from rlhf_jax.algorithms import reward_model
from rlhf_jax.data import synthetic
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.rewards.python_functions import HostRewards, RewardFailure, TrainerState
from rlhf_jax.rewards.server import RemoteReward
from tests.helpers.paths import ROOT
from tests.helpers.reward_server import (
    COMPLETIONS,
    PROMPTS,
    Sleeps,
    answers,
    closes,
    cuts_the_body,
    hangs,
    scores,
    serving,
    takes,
    trickles,
)

LENGTHS = [4.0, 6.0, 9.0]
SECRET = "s3cret-token"


def remote(server, **options):
    return RemoteReward(server.url, **{"timeout": 5.0, "total_timeout": 20.0, "sleep": Sleeps(), **options})


# --- what goes out and comes back


def test_texts_go_out_as_json_and_scores_come_back(server):
    assert scores(remote(server)) == LENGTHS
    assert server.requests == [("/score", {"prompts": PROMPTS, "completions": COMPLETIONS})]
    assert server.headers[0]["Content-Type"] == "application/json"


def test_messages_and_any_text_survive_the_way(server):
    prompts = [[{"role": "user", "content": "é\n\u2028\ud800"}]]
    completions = [[{"role": "assistant", "content": "\x00漢"}]]
    assert scores(remote(server), prompts, completions) == [1.0]
    assert server.requests[0][1] == {"prompts": prompts, "completions": completions}


def test_rows_go_in_slices_and_come_back_in_order(server):
    server.script.extend(takes(seconds) for seconds in (0.3, 0.2, 0.1, 0.0))
    completions = ["x" * n for n in range(10)]
    assert scores(remote(server, batch_size=3), ["p"] * 10, completions) == [float(n) for n in range(10)]
    assert sorted(len(body["prompts"]) for _, body in server.requests) == [1, 3, 3, 3]
    assert scores(remote(server), [], []) == []


def test_no_more_requests_at_a_time_than_allowed(server):
    server.forever = takes(0.05)
    completions = ["x" * n for n in range(24)]
    assert scores(remote(server, batch_size=1, concurrency=3), ["p"] * 24, completions) == [*map(float, range(24))]
    assert server.most_active == 3 and len(server.requests) == 24


def test_null_is_none_and_rewards_are_scores(server):
    server.script.append(answers(200, {"rewards": [None, 2, -1.5]}))
    assert scores(remote(server)) == [None, 2, -1.5]
    server.script.append(answers(201, {"scores": [1, 2, 3], "more": "ignored"}))
    assert scores(remote(server)) == [1, 2, 3]


def test_the_token_goes_along_where_it_is_set(server, monkeypatch):
    monkeypatch.delenv("RLHF_JAX_REWARD_TOKEN", raising=False)
    scores(remote(server))
    monkeypatch.setenv("RLHF_JAX_REWARD_TOKEN", f"{SECRET}\n")
    scores(remote(server))
    monkeypatch.setenv("OTHER", "other")
    scores(remote(server, token_env="OTHER"))
    scores(remote(server, token_env=None))
    sent = [headers.get("Authorization") for headers in server.headers]
    assert sent == [None, f"Bearer {SECRET}", "Bearer other", None]


def test_the_token_is_in_no_message(server, monkeypatch):
    monkeypatch.setenv("RLHF_JAX_REWARD_TOKEN", SECRET)
    echo = {"error": f"bad token {SECRET}", "fill": "x" * 85 + SECRET + "y" * 500}
    server.script.append(answers(401, echo))
    server.script.append(answers(200, echo))
    for _ in range(2):
        with pytest.raises(RewardFailure) as failure:
            scores(remote(server))
        assert SECRET not in str(failure.value) and "***" in str(failure.value)
        assert SECRET[:6] not in str(failure.value)
    monkeypatch.setenv("RLHF_JAX_REWARD_TOKEN", f"{SECRET}\r\nX: y")
    with pytest.raises(UserError, match="RLHF_JAX_REWARD_TOKEN.*no HTTP header") as failure:
        remote(server)
    assert SECRET not in str(failure.value)


def test_the_token_and_the_query_are_in_no_log(server, monkeypatch, caplog):
    monkeypatch.setenv("RLHF_JAX_REWARD_TOKEN", SECRET)
    with caplog.at_level("DEBUG"):
        assert scores(RemoteReward(f"{server.url}?key={SECRET}")) == LENGTHS
    assert SECRET not in caplog.text


# --- what is tried again


@pytest.mark.parametrize(
    "trouble",
    [answers(500, "oops"), answers(503, b""), answers(429, {}), closes, cuts_the_body],
    ids=["500", "503", "429", "closed", "cut"],
)
def test_a_passing_trouble_is_tried_again_after_a_wait(server, trouble):
    server.script.extend([trouble, trouble])
    function = remote(server)
    assert scores(function) == LENGTHS
    assert len(server.requests) == 3
    first, second = function._sleep.asked
    assert 0.25 <= first <= 0.5 and 0.5 <= second <= 1.0


def test_waits_double_to_a_bound_and_are_drawn(server):
    server.forever = answers(500, "down")
    asked = []
    for _ in range(2):
        function = remote(server, retries=8, total_timeout=1000)
        with pytest.raises(RewardFailure):
            scores(function)
        asked.append(function._sleep.asked)
    for waits in asked:
        assert all(top / 2 <= wait <= top for wait, top in zip(waits, [0.5, 1, 2, 4, 8, 10, 10, 10], strict=True))
    assert asked[0] != asked[1]


def test_a_server_that_stays_down_is_named_with_its_status_and_the_first_row(server):
    server.forever = answers(500, {"error": "no model " + "z" * 5000})
    with pytest.raises(RewardFailure) as failure:
        scores(remote(server, retries=2))
    said = str(failure.value)
    assert said.startswith(f"reward server {server.url}: status 500 Internal Server Error: ")
    assert "no model zzz" in said and "tried 3 times. Row 0: prompt 'first ppp" in said and "' one'" in said
    assert len(said) < 800 and len(server.requests) == 3
    with pytest.raises(RewardFailure, match="tried once"):
        scores(remote(server, retries=0))


def test_nobody_listening_is_tried_again_and_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    sleeps = Sleeps()
    expected = rf"reward server {url}: no response \(ConnectionRefusedError.*tried 3 times"
    with pytest.raises(RewardFailure, match=expected):
        scores(RemoteReward(url, retries=2, sleep=sleeps))
    assert len(sleeps.asked) == 2


def test_retry_after_is_honoured_where_it_leaves_time(server):
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=15)
    server.script.append(answers(429, {}, Retry_After="7"))
    server.script.append(answers(503, {}, Retry_After=email.utils.format_datetime(soon, usegmt=True)))
    server.script.append(answers(429, {}, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"))
    server.script.append(answers(429, {}, Retry_After="1e9"))
    server.script.append(answers(429, {}, Retry_After="in a while"))
    function = remote(server, total_timeout=60.0)
    assert scores(function) == LENGTHS
    first, second, third, *others = function._sleep.asked
    assert first == 7.0 and 13 < second <= 15 and third == 0.0
    assert 2.0 <= others[0] <= 4.0 and 4.0 <= others[1] <= 8.0  # too long, or nonsense: the usual wait


def test_a_real_wait_takes_its_time(server):
    server.script.append(answers(429, {}, Retry_After="0.3"))
    assert scores(remote(server, sleep=asyncio.sleep)) == LENGTHS
    assert server.times[1] - server.times[0] >= 0.29


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_the_callers_own_fault_is_not_tried_again(server, status):
    server.forever = answers(status, {"error": "that was wrong"})
    with pytest.raises(
        RewardFailure, match=f"{re.escape(server.url)}: status {status} .*that was wrong.*Row 0: prompt"
    ):
        scores(remote(server))
    assert len(server.requests) == 1


def test_a_server_that_refuses_before_it_has_read_all_is_heard():
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse():
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 8\r\n\r\ntoo much")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass

    threading.Thread(target=refuse, daemon=True).start()
    with pytest.raises(RewardFailure, match="status 413.*'too much'"):
        scores(RemoteReward(f"http://127.0.0.1:{listener.getsockname()[1]}/"), ["p" * 5_000_000], ["c"])
    listener.close()


# --- answers that are none

BAD = {
    "too few": ({"scores": [1, 2]}, "2 scores for 3 rows"),
    "too many": ({"scores": [1, 2, 3, 4]}, "4 scores for 3 rows"),
    "no JSON": (b"<html>Welcome to nginx</html>" + b" " * 3000, "not JSON: '<html>Welcome"),
    "empty": (b"", "not JSON: ''"),
    "half": (b'{"scores": [1, 2', "not JSON"),
    "no text": (b"\xff\xfe\x00", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "a list": ([1, 2, 3], r'not {"scores"'),
    "other keys": ({"score": [1, 2, 3]}, r'not {"scores"'),
    "a number": ({"scores": 1}, r'not {"scores"'),
    "null": ({"scores": None}, r'not {"scores"'),
    "NaN": (b'{"scores": [1, NaN, 3]}', "a score of nan.*Row 1: prompt 'second question', completion ' three'"),
    "infinity": (b'{"scores": [1, 2, -Infinity]}', "a score of -inf.*Row 2"),
    "overflow": (b'{"scores": [1e999, 2, 3]}', "a score of inf.*Row 0"),
    "text": ({"scores": [1, "2", 3]}, "a score of '2'.*Row 1"),
    "list": ({"scores": [1, 2, [3]]}, r"a score of \[3\].*Row 2"),
    "bool": ({"scores": [1, 2, True]}, "a score of True.*Row 2"),
}


@pytest.mark.parametrize(("body", "said"), BAD.values(), ids=BAD)
def test_an_answer_without_a_score_a_row_fails_at_once(server, body, said):
    server.forever = answers(200, body)
    with pytest.raises(RewardFailure, match=f"{re.escape(server.url)}: status 200, but .*{said}") as failure:
        scores(remote(server))
    assert "Row " in str(failure.value) and len(str(failure.value)) < 1000
    assert len(server.requests) == 1


def test_rows_are_numbered_through_all_slices(server):
    server.script.extend([takes(0), answers(200, b'{"scores": [NaN]}')])
    with pytest.raises(RewardFailure, match="a score of nan.*Row 2: prompt 'third question'"):
        scores(remote(server, batch_size=2, concurrency=1))


def test_an_endless_answer_is_cut(server, monkeypatch):
    monkeypatch.setattr("rlhf_jax.rewards.server.MAX_RESPONSE", 1 << 20)
    server.forever = answers(200, b" " * (3 << 20))
    with pytest.raises(RewardFailure, match="a response of over 1 MiB"):
        scores(remote(server))


def test_rows_that_are_no_json_are_named(server):
    with pytest.raises(RewardFailure, match="JSON.*ndarray.*Row 0: prompt 'p'"):
        scores(remote(server), ["p"], [np.zeros(2)])
    assert not server.requests


# --- time


@pytest.mark.parametrize("how", ["hangs", "trickles a head", "trickles a body"])
def test_a_request_is_bounded_and_tried_again(server, how):
    step = hangs(server) if how == "hangs" else trickles(server, head=how.endswith("head"))
    server.script.append(step)
    start = time.monotonic()
    assert scores(remote(server, timeout=0.3)) == LENGTHS
    assert 0.29 <= time.monotonic() - start < 10
    server.forever = step
    with pytest.raises(RewardFailure, match=r"0\.3 s.*2 times.*Row 0"):
        scores(remote(server, timeout=0.3, retries=1))


def test_connections_of_requests_that_were_given_up_are_closed(server):
    server.forever = trickles(server, head=False)
    with pytest.raises(RewardFailure):
        scores(remote(server, timeout=0.2, retries=2))
    deadline = time.monotonic() + 5
    while server.active:  # a handler trickles until its client has closed
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_requests_together_are_bounded(server):
    server.forever = takes(0.5)
    start = time.monotonic()
    with pytest.raises(RewardFailure, match=r"[01] of 20 requests.*0\.8 s.*Row 0: prompt 'p'"):
        scores(remote(server, batch_size=1, concurrency=1, total_timeout=0.8), ["p"] * 20, ["c"] * 20)
    assert 0.79 <= time.monotonic() - start < 5


def test_retries_are_bounded_by_the_total_and_the_trouble_is_told(server):
    server.forever = answers(503, {"error": "loading"})
    start = time.monotonic()
    with pytest.raises(RewardFailure, match="status 503 .*loading.*time"):
        scores(remote(server, retries=1000, total_timeout=1.5, sleep=asyncio.sleep))
    assert time.monotonic() - start < 10
    server.script.append(answers(503, {"error": "loading"}))
    server.forever = hangs(server)
    with pytest.raises(RewardFailure, match="0 of 1 requests.*status 503 .*loading"):
        scores(remote(server, timeout=10, total_timeout=1.5))


# --- what cannot be a server


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000/score",
        "ftp://localhost/score",
        "http://",
        "http:///score",
        "/score",
        "",
        "http://host:port/",
        "http://host:99999/",
        "http://[::1/",
        "http://a b/",
        "http://host/a b",
        "http://host/\n",
        f"http://{'a' * 70}.com/",
        "http://user:hunter2@host/",
        "http://host/?q=é",
    ],
)
def test_a_url_that_cannot_be_is_refused_at_once(url):
    with pytest.raises(UserError, match="reward server") as failure:
        RemoteReward(url)
    assert "hunter2" not in str(failure.value)


@pytest.mark.parametrize(
    "options", [{"timeout": 0.0}, {"total_timeout": -1.0}, {"retries": -1}, {"batch_size": 0}, {"concurrency": 0}]
)
def test_numbers_that_cannot_be_are_refused_at_once(options):
    (name, value), *_ = options.items()
    with pytest.raises(UserError, match=f"{name} is {value}"):
        RemoteReward("http://localhost/", **options)


def test_the_path_is_quoted_the_query_sent_and_not_shown(server):
    function = RemoteReward(f"{server.url}/é?key={SECRET}")
    assert scores(function) == LENGTHS
    assert server.requests[0][0] == f"/score/%C3%A9?key={SECRET}"
    server.script.append(answers(404, {}))
    with pytest.raises(RewardFailure) as failure:
        scores(function)
    assert SECRET not in str(failure.value)


# --- beside other functions


def test_a_server_is_scored_beside_other_functions(server):
    meeting = threading.Barrier(2, timeout=20)  # each waits for the other

    async def also(completions):
        await asyncio.to_thread(meeting.wait)
        return [1] * len(completions)

    server.forever = lambda _: meeting.wait() >= 0
    host = HostRewards([remote(server, timeout=20.0), also], timeout=20.0)
    assert host.names == ("server", "also")
    columns = {"answer": ["1", "2", "3"]}
    found = host.call(PROMPTS, COMPLETIONS, [[1]] * 3, columns, TrainerState())
    assert found.rewards.tolist() == [[4, 1], [6, 1], [9, 1]] and found.seconds["server"] > 0
    host.close()


def test_a_failing_server_raises_its_own_message_or_drops_the_rows(server):
    server.forever = answers(404, {"error": "no such page"})
    for failure in ("raise", "drop"):
        host = HostRewards([remote(server)], failure=failure)
        if failure == "raise":
            with pytest.raises(RewardFailure, match=f"^reward server {re.escape(server.url)}: status 404"):
                host.call(PROMPTS, COMPLETIONS, [[1]] * 3, {}, TrainerState())
        else:
            found = host.call(PROMPTS, COMPLETIONS, [[1]] * 3, {}, TrainerState())
            assert found.failed.all() and found.problems[0].startswith(f"reward server {server.url}: status 404")
        host.close()


def test_the_servers_own_total_timeout_stands_over_the_functions(server):
    server.forever = hangs(server)
    host = HostRewards([remote(server, total_timeout=0.5)], timeout=0.1)
    with pytest.raises(RewardFailure, match=r"0 of 1 requests.*0\.5 s"):
        host.call(PROMPTS, COMPLETIONS, [[1]] * 3, {}, TrainerState())
    host.close()


# --- our own server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "reward_model"
    tokenizer = data.load_tokenizer("synthetic")
    tokenizer.hf.chat_template = "{% for m in messages %}{{ ' ' + m['content'] }}{% endfor %}" + synthetic.EOS + "\n"
    model = models.custom_shape("1x16x2", vocab_size=tokenizer.vocab_size, max_positions=96)
    params = jax.device_get(model.init(jax.random.key(0), heads=("scalar",), score_std=1.0))
    hf.save(folder, model, params, kind="scalar")
    data.save_tokenizer(tokenizer, str(folder))
    return folder


@pytest.fixture(scope="module")
def served(checkpoint):
    """The URL of scripts/serve_reward.py, which wants SECRET."""
    with serving(checkpoint, "--max_batch", "4", "--token_env", "THE_TOKEN", THE_TOKEN=SECRET) as url:
        yield url


def in_process(checkpoint, texts):
    model, params = hf.load(checkpoint, kind="scalar")
    tokenizer = data.load_tokenizer(str(checkpoint))
    ids = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    lengths = np.array([len(row) for row in ids], np.int32)
    tokens = np.full((len(ids), lengths.max()), tokenizer.pad_id, np.int32)
    for row, own in enumerate(ids):
        tokens[row, : len(own)] = own
    return np.asarray(reward_model.score_texts(model, params, tokens, lengths, dtype=jnp.float32))


def test_served_scores_are_those_of_score_texts(served, checkpoint, monkeypatch):
    monkeypatch.setenv("RLHF_JAX_REWARD_TOKEN", SECRET)
    rows = synthetic.demonstrations(11, seed=3)
    prompts, completions = ([row[key] for row in rows] for key in ("prompt", "completion"))
    prompts[4], completions[4] = "", ""
    host = HostRewards([RemoteReward(served, batch_size=5)])
    found = host.call(prompts, completions, [[1]] * 11, {}, TrainerState()).rewards[:, 0]
    host.close()
    want = in_process(checkpoint, [a + b for a, b in zip(prompts, completions, strict=True)])
    assert np.ptp(want) > 0.5
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_messages_go_through_the_chat_template_with_one_eos(served, checkpoint, monkeypatch):
    monkeypatch.setenv("RLHF_JAX_REWARD_TOKEN", SECRET)
    prompts = [[{"role": "user", "content": "met anna"}]]
    completions = [[{"role": "assistant", "content": "lost keys"}]]
    found = scores(RemoteReward(served), prompts, completions)
    np.testing.assert_allclose(found, in_process(checkpoint, [" met anna lost keys"]), rtol=1e-5)


def post(url, body, token=SECRET, headers=()):
    """(status, answer) of a request by another client than ours."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}", **dict(headers)}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, raw, headers), timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_health_is_open_and_scores_need_the_token(served):
    with urllib.request.urlopen(served.replace("/score", "/health"), timeout=30) as response:
        assert json.load(response)["status"] == "ok"
    body = {"prompts": ["a"], "completions": ["b"]}
    assert post(served, body)[0] == 200
    status, answer = post(served, body, token="wrong")
    assert status == 401 and "bearer token" in answer["error"] and SECRET not in answer["error"]
    assert post(served.replace("/score", "/other"), body)[0] == 404
    assert post(served, {"prompts": [], "completions": []}) == (200, {"scores": []})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"no json", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (["a"], "the body must be"),
        ({"prompts": ["a"]}, "the body must be"),
        ({"prompts": "a", "completions": "b"}, "the body must be"),
        ({"prompts": ["a"], "completions": ["b", "c"]}, "1 prompts but 2 completions"),
        ({"prompts": ["a", 5], "completions": ["b", "c"]}, "row 1: prompt and completion must both be texts"),
        ({"prompts": [["a"]], "completions": ["b"]}, "row 0: prompt and completion must both"),
        ({"prompts": [["a"]], "completions": [["b"]]}, "row 0: the chat template cannot render"),
        ({"prompts": ["a", "i met anna. " * 60], "completions": ["b", ""]}, "row 1 has .* tokens; the model takes 96"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_the_server_lives_on(served, body, said):
    status, answer = post(served, body)
    assert status == 400 and re.search(said, answer["error"])
    assert post(served, {"prompts": ["a"], "completions": ["b"]})[0] == 200


def test_a_body_that_is_too_large_or_of_unknown_size_is_refused(served):
    status, answer = post(served, b" " * (33 << 20))
    assert status == 413 and "send fewer rows" in answer["error"]
    connection = http.client.HTTPConnection(served.split("/")[2], timeout=30)
    connection.putrequest("POST", "/score")
    connection.endheaders()
    assert connection.getresponse().status == 411
    connection.close()


STARTS = """
import json, sys
import serve_reward
starts = json.loads(sys.argv[1])
print(json.dumps([serve_reward.main() for sys.argv[1:] in starts]))
"""


def test_the_server_says_what_it_cannot_start_with(checkpoint, tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "JAX_PLATFORMS": "cpu"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        starts = {
            "neither a local folder nor": ("--no_token", "--model", str(tmp_path / "nothing")),
            f"--port {port}: .*in use": ("--no_token", "--model", str(checkpoint), "--port", port),
        }
        command = [sys.executable, "-c", STARTS, json.dumps(list(starts.values()))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1]) == [2, 2], done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 2 and "Traceback" not in done.stderr
    for line, pattern in zip(said, starts, strict=True):
        assert re.search(f"^error: .*{pattern}", line), line

"""The server of a live report: who gets an answer, and a page that follows its runs."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib import parse

import pytest

from rlhf_jax import report
from rlhf_jax.config import PPOConfig
from rlhf_jax.errors import UserError
from rlhf_jax.report import __main__ as command
from rlhf_jax.report import page, serve
from tests.helpers import report_runs
from tests.helpers.paths import ROOT


@contextlib.contextmanager
def serving(*run_dirs):
    """A server of these folders, on a free port, in a thread."""
    with serve.Server(serve.LivePage([str(path) for path in run_dirs])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, method="GET", host=None):
    """(status, headers, text) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    headers = {"Host": f"127.0.0.1:{server.server_port}" if host is None else host}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def data(text):
    """The tabs of a page's data, by name."""
    element = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    return {tab["tab"]: tab for tab in json.loads(element[1])["tabs"]}


def curve(text, metric="loss", tab="sft"):
    return data(text)[tab]["curves"][metric]["0"]["y"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sft"
    report_runs.make_sft(folder)
    (folder / "secret.txt").write_text("no page")
    with serving(folder) as server:
        yield server


def test_the_page_and_its_version_are_answered_with_the_token(server):
    status, headers, text = ask(server, f"/{server.token}/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff" and "Python" not in headers["Server"]
    assert len(curve(text)) == 20
    _, _, version = ask(server, f"/{server.token}/version")
    assert f'<body data-version="{version}">' in text
    assert parse.urlsplit(server.address)[:3] == ("http", f"127.0.0.1:{server.server_port}", f"/{server.token}/")
    assert len(server.token) >= 32 and server.server_address[0] == "127.0.0.1"


def test_head_has_the_headers_alone(server):
    status, headers, text = ask(server, f"/{server.token}/", "HEAD")
    assert status == 200 and text == "" and int(headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//",
        "*",
        "/version",
        "/{token}",
        "/{token}x/",
        "/{short}/",
        "/é/",
        "/{token}/metrics.jsonl",
        "/{token}/../",
        "/{token}/version/",
        "/{token}/secret.txt",
        "/{token}/%2e%2e/",
        "/?/{token}/",
        "http://127.0.0.1/{token}/",
    ],
)
def test_other_paths_are_not_found(server, path):
    path = path.format(token=server.token, short=server.token[:-1]).encode().decode("latin-1")
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {server.address[7:].split('/')[0]}\r\n\r\n".encode("latin-1"))
        answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.0 404 ") and answer.endswith("\r\n\r\n") and server.token not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "get"])
def test_other_methods_are_not_found(server, method):
    assert ask(server, f"/{server.token}/", method)[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:{port}", "127.0.0.1", "localhost:1", "", "[::1]:{port}"]
)
def test_other_hosts_are_not_found(server, host):
    """A page of another site, whose name resolves to 127.0.0.1, sends its own name."""
    assert ask(server, f"/{server.token}/", host=host.format(port=server.server_port))[0] == 404
    assert ask(server, f"/{server.token}/version", host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize(
    "request_text", ["GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "\x00\r\n\r\n", "GET /" + "a" * 70_000]
)
def test_malformed_requests_get_nothing_and_do_no_harm(server, request_text, capfd):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(request_text.encode())
        with contextlib.suppress(ConnectionError):
            assert b"200" not in connection.recv(4096)[:20]
    assert ask(server, f"/{server.token}/version")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_two_servers_have_two_tokens_and_a_port_that_is_taken_is_said(server, tmp_path):
    (tmp_path / "run").mkdir()
    with serving(tmp_path / "run") as other:
        assert other.token != server.token and ask(server, f"/{other.token}/")[0] == 404
    with pytest.raises(UserError, match="--port 0 takes a free one"):
        serve.Server(serve.LivePage([str(tmp_path)]), server.server_port)
    with pytest.raises(UserError, match="port 99999"):
        serve.Server(serve.LivePage([str(tmp_path)]), 99999)


def test_the_page_follows_metrics_that_grow_and_runs_that_are_killed_and_resumed(tmp_path):
    run = report_runs.make_sft(tmp_path / "sft")  # its last line is incomplete
    with serving(tmp_path / "sft") as server:
        versions = []

        def shown():
            versions.append(ask(server, f"/{server.token}/version")[2])
            return curve(ask(server, f"/{server.token}/")[2])

        assert len(shown()) == 20
        with open(run.metrics, "a") as file:
            file.write('ss": 2.5}\n')
        assert shown()[-1] == 2.5
        with open(run.metrics, "a") as file:
            file.write('{"step": 22, "loss": 2.25}\n{"step": 23, "loss": 2.0}\n')
        assert shown()[-3:] == [2.5, 2.25, 2.0]
        lines = report_runs.read_lines(run.metrics)[:21]  # a resume from update 21 cuts what follows it
        report_runs.lines(run.metrics, lines)
        assert shown()[-2:] == [3.0, 2.5]
        report_runs.lines(run.metrics, [*lines, {"step": 22, "loss": 7.0}])
        assert shown()[-1] == 7.0
        run.finish(22, {}, {})
        assert '<span class="state finished">' in ask(server, f"/{server.token}/")[2]
        assert len(set(versions)) == len(versions)


def test_an_unchanged_run_is_read_once(tmp_path, monkeypatch):
    run = report_runs.make_sft(tmp_path / "sft")
    run.finish(20, {}, {})
    calls, render = [], page.render_page
    monkeypatch.setattr(page, "render_page", lambda *args, **options: calls.append(1) or render(*args, **options))
    with serving(tmp_path) as server:
        pages = {ask(server, f"/{server.token}/")[2] for _ in range(3)}
    assert len(pages) == len(calls) == 1


def test_a_run_begins_and_a_stage_appears_after_the_server_has_started(tmp_path, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with serving(tmp_path / ".." / tmp_path.name) as server:
        _, _, text = ask(server, f"/{server.token}/")
        assert "No run yet" in text and data(text) == {}
        begun = tmp_path / "sft"
        begun.mkdir()
        report_runs.make_sft(other / "sft")
        shutil.copy(other / "sft" / "config.json", begun)
        _, _, text = ask(server, f"/{server.token}/")
        assert list(data(text)) == ["sft"] and "metrics.jsonl has no update yet" in text
        report_runs.lines(begun / "metrics.jsonl", [{"step": 1, "loss": 4.0}])
        assert curve(ask(server, f"/{server.token}/")[2]) == [4.0]
        report_runs.make(tmp_path / "ppo", PPOConfig(), updates=10, finished=False)
        tabs = data(ask(server, f"/{server.token}/")[2])
        assert list(tabs) == ["policy", "sft"] and len(tabs["policy"]["samples"]["files"]) == 5
        shutil.rmtree(tmp_path)
        assert "No run yet" in ask(server, f"/{server.token}/")[2]


def test_samples_and_time_change_the_version(tmp_path, monkeypatch):
    run = report_runs.make(tmp_path / "ppo", PPOConfig(), updates=10, finished=False)
    monkeypatch.setattr(serve.time, "time", lambda: 6000.0)
    live = serve.LivePage([str(tmp_path)])
    versions = [live.version(), live.version()]
    run.write_completions(10, [{"query": "q", "model response": "r", "score": 1.0}], "samples", [])
    versions.append(live.version())
    monkeypatch.setattr(serve.time, "time", lambda: 6061.0)  # the page says whether a run has stopped
    versions.append(live.version())
    run.finish(10, {}, {})
    versions.append(live.version())
    monkeypatch.setattr(serve.time, "time", lambda: 9000.0)
    versions.append(live.version())
    assert [a == b for a, b in zip(versions, versions[1:], strict=False)] == [True, False, False, False, True]


def test_a_page_without_a_server_connects_to_nothing(tmp_path):
    report_runs.make_sft(tmp_path / "sft")
    _, groups = report.read([str(tmp_path)])
    static, live = page.render_page(groups, "t", 0.0), page.render_page(groups, "t", 0.0, version="v")
    assert "connect-src" not in static and "fetch(" not in static and "<body>" in static
    assert "connect-src &#x27;self&#x27;" in live and 'fetch("version"' in live


def test_wrong_options_are_told(tmp_path, capsys):
    assert command.main([str(tmp_path), "--serve", "--out", "a.html"]) == 2
    assert command.main([str(tmp_path), "--port", "0"]) == 2
    assert command.main(["s3://bucket/run", "--serve"]) == 2
    assert command.main([str(tmp_path / "none"), "--serve"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and "writes no file" in errors[0] and "add --serve" in errors[1]
    assert "is in a bucket" in errors[2] and "no such folder" in errors[3]


def test_the_command_prints_one_line_and_ends_at_ctrl_c_with_status_0(tmp_path):
    report_runs.make_sft(tmp_path / "sft")
    environment = {**os.environ, "JAX_PLATFORMS": "none_such", "PYTHONUNBUFFERED": "1"}
    # A shell starts what runs in the background with SIGINT ignored, which children inherit.
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from rlhf_jax.report.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", program, str(tmp_path), "--serve", "--port", "0"]
    child = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = child.stdout.readline()
        url = parse.urlsplit(re.search(r"http://\S+", line)[0])
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
        connection.request("GET", url.path)
        assert connection.getresponse().status == 200
        connection.close()
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=30)
    finally:
        child.kill()
    assert (child.returncode, out, errors) == (0, "", "")

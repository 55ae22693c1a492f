"""Reward servers on loopback: one that does what a script says, and ours from scripts/ in a process of its own."""

import asyncio
import collections
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.helpers.paths import ROOT

PROMPTS = ["first " + "p" * 500 + " question", "second question", "third question"]
COMPLETIONS = [" one", " three", " fourteen"]


class Server:
    """A reward server that scores by length, unless a script says what to do with the next requests.

    A step of `script` is a function of the handler, which may return True to have the request scored after all.
    """

    def __init__(self):
        self.script = collections.deque()
        self.forever = None  # the step for requests beyond the script
        self.requests, self.headers, self.times = [], [], []
        self.active = self.most_active = 0
        self._lock = threading.Lock()
        self.free = threading.Event()  # ends what hangs
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                self.body = body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append((self.path, body))
                    outer.headers.append(self.headers)
                    outer.times.append(time.monotonic())
                    outer.active += 1
                    outer.most_active = max(outer.active, outer.most_active)
                    step = outer.script.popleft() if outer.script else outer.forever
                self.counted = True
                try:
                    if step is None or step(self):
                        send(self, 200, {"scores": [float(len(completion)) for completion in body["completions"]]})
                finally:
                    self.leaves()

            def leaves(self):
                with outer._lock:
                    outer.active -= self.counted
                    self.counted = False

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass  # the client may have left

        self._server = Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}/score"

    def close(self):
        self.free.set()
        self._server.shutdown()
        self._server.server_close()


def send(handler, status, body, headers=()):
    handler.leaves()  # before the answer goes: whoever has it may ask again at once
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in dict(headers).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(raw)))
    handler.end_headers()
    handler.wfile.write(raw)


def answers(status, body, **headers):
    return lambda handler: send(handler, status, body, {k.replace("_", "-"): v for k, v in headers.items()})


def closes(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def cuts_the_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [1,')


def hangs(server):
    return lambda handler: server.free.wait(30) and None


def trickles(server, head):
    def step(handler):
        if not head:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        with contextlib.suppress(OSError):
            while not server.free.wait(0.02):
                handler.wfile.write(b" " if not head else b"H")

    return step


def takes(seconds):
    return lambda _: time.sleep(seconds) or True


class Sleeps:
    """Takes no time, and notes how long it should have taken."""

    def __init__(self):
        self.asked = []

    async def __call__(self, seconds):
        self.asked.append(seconds)


def scores(function, prompts=PROMPTS, completions=COMPLETIONS):
    return asyncio.run(function(prompts, completions))


@contextlib.contextmanager
def serving(checkpoint, *arguments, **environment):
    """The URL of scripts/serve_reward.py, which serves a checkpoint from a free port until the context ends."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, str(ROOT / "scripts" / "serve_reward.py"), "--model", str(checkpoint), "--port", "0"]
    process = subprocess.Popen([*command, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"serving (.*) on (http://127\.0\.0\.1:\d+/score)\n", line)
        assert found and found.group(1) == str(checkpoint), line
        yield found.group(2)
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()

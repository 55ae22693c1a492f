"""Object stores on this machine: moto's S3 server and gcp-storage-emulator, behind a proxy that fails, delays and
refuses calls on demand.

gcp-storage-emulator knows no preconditions, so the proxy refuses an upload with ifGenerationMatch=0 of an object that
exists, as Google's server does.
"""

import contextlib
import dataclasses
import http.client
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlhf_jax.storage import bucket

BUCKET = "runs-of-tests"


@dataclasses.dataclass
class Faults:
    """What the proxy does to calls.

    Attributes:
      failures: server errors before the next call of the same kind gets through; -1: none does.
      refuse: answers every call with 403.
      delay: seconds before each answer.
      lose_answers: calls that are carried out, but answered with a server error.
      matching: part of the path of the calls that fail.
      calls: (method, path) of the calls so far.
    """

    failures: int = 0
    refuse: bool = False
    delay: float = 0.0
    lose_answers: int = 0
    matching: str = ""
    calls: list = dataclasses.field(default_factory=list)
    tries: dict = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def fails(self, call) -> bool:
        """Whether this call is answered with a server error."""
        with self.lock:
            self.calls.append(call)
            if self.matching not in urllib.parse.unquote(call[1]):
                return False
            if self.failures < 0:
                return True
            tried = self.tries[call] = self.tries.get(call, 0) + 1
            return (tried - 1) % (self.failures + 1) < self.failures


class Proxy(ThreadingHTTPServer):
    """Forwards to the server at `target`, (host, port)."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.faults, self.creating = target, Faults(), threading.Lock()

    def handle_error(self, request, client_address):
        """Says nothing of clients that were killed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length", len(body))
        self.send_header("Content-Length", length if self.command == "HEAD" else len(body))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _forward(self, method, path, body, headers):
        host, port = self.server.target
        connection = http.client.HTTPConnection(host, port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheaders()
        finally:
            connection.close()

    def _names(self, body):
        """The path, with the name of the object that an upload to GCS has in its body."""
        if self.command == "POST" and "uploadType=multipart" in self.path:
            return f"{self.path}&name={_name_in(body)}"
        return self.path

    def _handle(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        faults = self.server.faults
        if faults.delay:
            time.sleep(faults.delay)
        if faults.refuse:
            code = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            return self._answer(403, code, [("Content-Type", "application/xml")])
        if faults.fails((self.command, self._names(body))):
            return self._answer(503, b"")
        headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
        headers["Content-Length"] = str(len(body))
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        if query.get("ifGenerationMatch") == ["0"]:
            with self.server.creating:
                name = query["name"][0] if "name" in query else _name_in(body)
                place = url.path.replace("/upload/", "/") + "/" + urllib.parse.quote(name, safe="")
                if self._forward("GET", place, b"", {})[0] == 200:
                    return self._answer(412, b"{}")
                answer = self._forward(self.command, self.path, body, headers)
        elif self.headers.get("If-None-Match"):  # moto's test and write are not one step
            with self.server.creating:
                answer = self._forward(self.command, self.path, body, headers)
        else:
            answer = self._forward(self.command, self.path, body, headers)
        if faults.lose_answers and self.command in ("PUT", "POST"):
            faults.lose_answers -= 1
            return self._answer(503, b"")
        self._answer(*answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _handle


def _name_in(body: bytes) -> str:
    """The object's name in the metadata of a multipart upload."""
    text = body.split(b"\r\n--")[0] + body
    return text.split(b'"name": "', 1)[1].split(b'"', 1)[0].decode()


@contextlib.contextmanager
def s3():
    """(environment of its users, proxy) of an S3 server with the bucket BUCKET, empty; one at a time."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = _started(server.get_host_and_port())
    environment = {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        _call(proxy, "POST", "/moto-api/reset")  # all servers of a process share their objects
        _call(proxy, "PUT", f"/{BUCKET}")
        yield environment, proxy
    finally:
        proxy.shutdown()
        server.stop()


@contextlib.contextmanager
def gs():
    """(environment of its users, proxy) of a GCS server with the bucket BUCKET."""
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    proxy = _started(server._api._httpd.server_address)
    try:
        yield {"STORAGE_EMULATOR_HOST": proxy.url, "GOOGLE_CLOUD_PROJECT": "testing"}, proxy
    finally:
        proxy.shutdown()
        server.stop()


def _started(target):
    proxy = Proxy(target)
    threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
    return proxy


def _call(proxy, method, path):
    connection = http.client.HTTPConnection(*proxy.target)
    connection.request(method, path)
    assert connection.getresponse().status == 200
    connection.close()


STORES = {"s3": s3, "gs": gs}


@contextlib.contextmanager
def in_use(kind):
    """(proxy, environment) of an empty store of this kind that this process uses."""
    with STORES[kind]() as (environment, proxy), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        bucket.filesystem.cache_clear()
        try:
            yield proxy, environment
        finally:
            bucket.filesystem.cache_clear()


async def at_once(*_, **__):
    """asyncio.sleep without waiting, for the pauses of botocore and gcsfs between tries."""

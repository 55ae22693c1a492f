"""A report that follows its runs: a web server for this machine's browsers alone.

The page lies at http://127.0.0.1:PORT/TOKEN/. Every user of a machine can connect to its loopback address, and every
page open in a browser can send requests there: the token keeps out both, and a check of the Host header keeps out
pages whose name resolves to 127.0.0.1.
"""

from __future__ import annotations

import hashlib
import http.server
import os
import secrets
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.report import page, read_run, series

HOST = "127.0.0.1"
_HOST_NAMES = ("127.0.0.1", "localhost")
_FOLDERS = ("", "completions", "calibration", "nonfinite")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class LivePage:
    """The page of runs that may go on, rendered again when their files have changed."""

    def __init__(self, run_dirs: Sequence[str]):
        """`run_dirs`: existing local folders, which need not hold a run yet.

        Raises:
          UserError: a folder does not exist or is in a bucket.
        """
        for path in run_dirs:
            if storage.is_remote(path):
                raise UserError(f"--serve follows local folders, and {path} is in a bucket. Leave out --serve")
            if not storage.is_dir(path):
                raise UserError(f"{path}: there is no such folder. Pass the --run_dir of a run")
        self._run_dirs = [storage.absolute(path) for path in run_dirs]
        self._title = page.title(run_dirs)
        self._lock = threading.Lock()
        self._version, self._html = "", ""

    def _run_folders(self) -> list[str]:
        present = [path for path in self._run_dirs if os.path.isdir(path)]  # one may be removed, and begin anew
        return list(dict.fromkeys(folder for path in present for folder in read_run.stage_folders(path)))

    def version(self) -> str:
        """Changes with the names, sizes and times of the runs' files; while a run is unfinished, also each minute, as
        the page says whether it has stopped."""
        digest, unfinished = hashlib.sha256(), False
        for folder in self._run_folders():
            digest.update(folder.encode("utf-8", "surrogateescape") + b"\0")
            for entry in _files(folder):
                digest.update(entry.encode("utf-8", "surrogateescape") + b"\0")
            unfinished |= not os.path.exists(os.path.join(folder, "finished.json"))
        if unfinished:
            digest.update(str(int(time.time() // 60)).encode())
        return digest.hexdigest()[:16]

    def render(self) -> str:
        """The page as HTML."""
        with self._lock:  # several browsers share one page
            version = self.version()  # before the files are read: what changes meanwhile is a new version
            if version != self._version or not self._html:
                folders = self._run_folders()
                names = read_run.short_names(folders)
                runs = [read_run.read(path, name) for path, name in zip(folders, names, strict=True)]
                self._html = page.render_page(series.group_by_config(runs), self._title, version=version)
                self._version = version
            return self._html


def _files(folder: str) -> Iterator[str]:
    """Name, size and time of each JSON file of a run that the page reads."""
    for name in _FOLDERS:
        parent = os.path.join(folder, name)
        try:
            entries = sorted(os.scandir(parent), key=lambda entry: entry.name)
        except OSError:  # no such folder yet
            continue
        for entry in entries:
            if entry.name.endswith((".json", ".jsonl")):
                try:
                    status = entry.stat()
                except OSError:  # removed meanwhile
                    continue
                yield f"{name}/{entry.name}:{status.st_size}:{status.st_mtime_ns}"


class Server(http.server.ThreadingHTTPServer):
    """Serves a live page at `address` until `shutdown` is called.

    Attributes:
      address: of the page, with its token.
    """

    def __init__(self, live_page: LivePage, port: int = 0):
        """`port`: 0 takes a free one.

        Raises:
          UserError: the port is taken.
        """
        self.page, self.token = live_page, secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"port {port} cannot be opened ({reason}). --port 0 takes a free one") from error
        self.address = f"http://{HOST}:{self.server_port}/{self.token}/"

    def server_bind(self) -> None:
        """Binds without HTTPServer's look-up of the host's name, which may wait for a network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request, client_address) -> None:
        """A browser that leaves early is no error; others are one line, without the request and its token."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"note: a request failed: {type(error).__name__}: {error}", file=sys.stderr)


class _Handler(http.server.BaseHTTPRequestHandler):
    """GET and HEAD of the page and of its version; everything else is 404."""

    server: Server
    timeout = 30.0  # of a connection that sends nothing
    server_version, sys_version = "rlhf_jax", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        _, token, *rest = self.path.partition("?")[0].split("/", 2) if self.path.startswith("/") else ("", "", "-")
        name = rest[0] if rest else None
        valid = secrets.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        if not (self._is_local_host() and valid) or name not in ("", "version"):
            self.send_error(404)
        elif name == "version":
            self._send(self.server.page.version(), "text/plain", with_body)
        else:
            self._send(self.server.page.render(), "text/html", with_body)

    def _is_local_host(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and hosts[0] in {f"{name}:{self.server.server_port}" for name in _HOST_NAMES}

    def _send(self, text: str, kind: str, with_body: bool, status: int = 200) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **_HEADERS}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """404, also for other methods and malformed requests: an answer tells nothing about the server."""
        self.close_connection = True
        self._send("", "text/plain", with_body=False, status=404)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each poll would fill the terminal, and paths have the token."""


def serve(run_dirs: Sequence[str], port: int = 0) -> None:
    """Serves the page of runs until Ctrl-C, and prints its address.

    Args:
      run_dirs: existing local folders of runs, of one or several stages; a run may begin later.
      port: 0 takes a free one.

    Raises:
      UserError: as `LivePage` and `Server`.
    """
    with Server(LivePage(run_dirs), port) as server:
        try:
            print(f"report at {server.address} (this machine only; Ctrl-C ends it)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            return

"""A small Hugging Face hub on loopback: enough of its HTTP for huggingface_hub, transformers and datasets.

    with Hub() as hub:
        hub.add("owner/name", {"config.json": b"{}"})                               # a model, revision main
        hub.add("owner/posts", {"data/train-00000.parquet": b"..."}, kind="dataset", revision="v1")
        subprocess.run(..., env={**os.environ, "HF_ENDPOINT": hub.endpoint})

Whoever has a token of `users` may write: make a repository (POST /api/repos/create) and commit files to it.

What clients ask: what a revision is (/api/models/REPO/revision/REV), its files (.../tree/COMMIT,
.../paths-info/COMMIT), and the files themselves (/REPO/resolve/REV/PATH by HEAD and GET, with ETag and X-Repo-Commit).
Errors carry X-Error-Code, from which clients make their exceptions.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pathlib
import threading
import urllib.parse
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.paths import ROOT

KINDS = {"models": "model", "datasets": "dataset"}

# Python imports sitecustomize at its start, so neither `import` nor find_spec finds torch.
WITHOUT_TORCH = """
import importlib.machinery

find = importlib.machinery.PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name == "torch" else find(name, path, target)

importlib.machinery.PathFinder.find_spec = find_spec
"""


def environment_without_torch(hub: Hub, folder: pathlib.Path) -> dict[str, str]:
    """Variables of a child process: this hub, a cache in an empty folder, no torch."""
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCH)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "JAX_", "XLA_"))}
    return {
        **kept,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "NO_PROXY": "127.0.0.1",
    }


class Hub:
    """Repositories in memory, served from `endpoint` between `__enter__` and `__exit__`.

    Attributes:
      requests: "METHOD /path" of each request, in order of arrival.
      users: names by their tokens.
      private: repositories that were made as such.
      refused: status that commits are answered with; None: they are taken.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.users: dict[str, str] = {}
        self.private: set[str] = set()
        self.refused: int | None = None
        # (kind, repository) -> revision -> (commit, path -> content)
        self._repositories: dict[tuple[str, str], dict[str, tuple[str, dict[str, bytes]]]] = {}
        self._server: ThreadingHTTPServer | None = None

    def add(self, repository: str, files: Mapping[str, bytes], *, kind: str = "model", revision: str = "main") -> str:
        """Puts files at a revision of a repository; a call for the same revision replaces them. Returns the commit."""
        digest = hashlib.sha1(f"{kind} {repository} {revision}".encode())
        for path, content in sorted(files.items()):
            digest.update(path.encode() + hashlib.sha1(content).digest())
        commit = digest.hexdigest()
        self._repositories.setdefault((kind, repository), {})[revision] = (commit, dict(files))
        return commit

    def commit(self, repository: str, *, kind: str = "model", revision: str = "main") -> str:
        """The commit at a revision."""
        return self._repositories[kind, repository][revision][0]

    def find(self, kind: str, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(commit, files) of a revision: a name or a commit. KeyError: no repository; None: no such revision."""
        revisions = self._repositories[kind, repository]
        by_commit = {commit: (commit, files) for commit, files in revisions.values()}
        return revisions.get(revision) or by_commit.get(revision)

    def downloaded(self, repository: str, *, kind: str = "model") -> set[str]:
        """Paths of a repository that were fetched by GET, whatever the revision."""
        prefix = f"GET {'/datasets' if kind == 'dataset' else ''}/{repository}/resolve/"
        paths = (request.removeprefix(prefix) for request in self.requests if request.startswith(prefix))
        return {path.partition("/")[2] for path in paths}

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT should be."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


def _entries(files: Mapping[str, bytes], under: str, recursive: bool) -> list[dict[str, Any]]:
    """What the tree API says of the files and folders under a folder ("" is the root)."""
    prefix = f"{under}/" if under else ""
    found: dict[str, dict[str, Any]] = {}
    for path, content in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        parts = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            folder = prefix + "/".join(parts[:depth])
            oid = hashlib.sha1(folder.encode()).hexdigest()
            found[folder] = {"type": "directory", "path": folder, "oid": oid, "size": 0}
        if recursive or len(parts) == 1:
            found[path] = {"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
    return list(found.values())


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # clients keep connections open, and ask for HEAD before GET

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            body = self._body()
            path = url.path.strip("/")
            hub.requests.append(f"{self.command} /{urllib.parse.unquote(path)}")
            parts = [urllib.parse.unquote(part) for part in path.split("/")]
            if path == "api/validate-yaml":
                self._json({"errors": [], "warnings": []})  # of a model card
            elif path in ("api/whoami-v2", "api/repos/create") or "preupload" in parts or "commit" in parts:
                self._write(parts, body)
            elif parts[0] == "api" and len(parts) >= 4 and parts[1] in KINDS:
                self._api(KINDS[parts[1]], "/".join(parts[2:4]), parts[4:], urllib.parse.parse_qs(url.query), body)
            elif "resolve" in parts:
                kind = "dataset" if parts[0] == "datasets" else "model"
                at = parts.index("resolve")
                repository = "/".join(parts[kind == "dataset" : at])
                self._file(kind, repository, parts[at + 1], "/".join(parts[at + 2 :]))
            else:
                self._error(404, "", "no such page")

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _write(self, parts: list[str], body: bytes) -> None:
            """What needs a token: who it is of, a new repository, how files are to be sent, and a commit of them."""
            user = hub.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
            if user is None:
                return self._error(401, "", "Invalid username or password.")
            if parts[1] == "whoami-v2":
                return self._json({"name": user, "type": "user", "orgs": []})
            if parts[1] == "repos":
                asked = json.loads(body)
                name = f"{asked.get('organization') or user}/{asked['name']}"
                if name.split("/")[0] != user:
                    return self._error(403, "", "You don't have the rights to create a model under this namespace")
                url = f"{hub.endpoint}/{name}"
                if ("model", name) in hub._repositories:
                    return self._send(409, json.dumps({"url": url}).encode(), {"Content-Type": "application/json"})
                hub.add(name, {})
                if asked.get("private") or asked.get("visibility") == "private":
                    hub.private.add(name)
                return self._json({"url": url, "id": name, "name": name})
            name, what = "/".join(parts[2:4]), parts[4]
            if what == "preupload":
                asked = json.loads(body)["files"]
                files = [{"path": x["path"], "uploadMode": "regular", "shouldIgnore": False} for x in asked]
                return self._json({"files": files})
            if hub.refused is not None:
                return self._error(hub.refused, "", "the hub is tired")
            _, files = hub.find("model", name, "main")
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files = {**files, line["value"]["path"]: base64.b64decode(line["value"]["content"])}
            commit = hub.add(name, files)
            self._json({"commitOid": commit, "commitUrl": f"{hub.endpoint}/{name}/commit/{commit}", "success": True})

        def _json(self, answer: Any) -> None:
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _revision(self, kind: str, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
            """The revision's commit and files; None when the error was already sent."""
            try:
                found = hub.find(kind, repository, revision)
            except KeyError:
                self._error(401, "RepoNotFound", "Repository not found")  # the hub's own status for the anonymous
                return None
            if found is None:
                self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return found

        def _api(self, kind: str, repository: str, rest: list[str], query: dict, body: bytes) -> None:
            what, revision = (rest[0], rest[1]) if len(rest) >= 2 else ("revision", "main")
            found = self._revision(kind, repository, revision)
            if found is None:
                return
            commit, files = found
            if what == "revision":
                siblings = [{"rfilename": path} for path in sorted(files)]
                answer = {"id": repository, "sha": commit, "private": False, "tags": [], "siblings": siblings}
            elif what == "tree":
                under, recursive = "/".join(rest[2:]), query.get("recursive") in (["true"], ["True"], ["1"])
                answer = _entries(files, under, recursive)
                if under and not answer:
                    return self._error(404, "EntryNotFound", f"{under} does not exist")
            elif what == "paths-info":
                asked = self._paths(body)
                answer = [entry for entry in _entries(files, "", True) if entry["path"] in asked]
            else:
                return self._error(404, "", f"no {what} here")
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json", "X-Repo-Commit": commit})

        def _paths(self, body: bytes) -> list[str]:
            if "json" in self.headers.get("Content-Type", ""):
                return json.loads(body)["paths"]
            return urllib.parse.parse_qs(body.decode()).get("paths", [])

        def _file(self, kind: str, repository: str, revision: str, path: str) -> None:
            found = self._revision(kind, repository, revision)
            if found is None:
                return
            commit, files = found
            headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if path not in files:
                return self._error(404, "EntryNotFound", f"{path} does not exist", headers)
            content, status = files[path], 200
            headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Content-Type": "application/octet-stream"}
            span = self.headers.get("Range", "").removeprefix("bytes=")
            if span:
                first, _, last = span.partition("-")
                start, end = int(first), min(int(last or len(content) - 1), len(content) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
                content, status = content[start : end + 1], 206
            self._send(status, content, headers)

        def _error(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
            named = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
            body = json.dumps({"error": message}).encode()
            self._send(status, body, {"Content-Type": "application/json", **named, **(headers or {})})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler

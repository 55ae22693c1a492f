"""Serves a reward model over HTTP, for --reward_server of a run elsewhere.

    export RLHF_JAX_REWARD_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe())")
    python scripts/serve_reward.py --model runs/tldr/reward/reward_model --port 8000

POST /score {"prompts": [...], "completions": [...]} returns {"scores": [...]}, a finite number a row: the model's score
at the eos appended to prompt + completion, tokenised as one text by the model's tokenizer. Lists of messages are
rendered by the tokenizer's chat template. GET /health returns {"status": "ok"}.

It listens on loopback, where other users of the machine can connect too, so it requires a bearer token. The bytes and
rows of a request, the connections at a time and the seconds in which a request must arrive are bounded.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import ipaddress
import json
import math
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.algorithms import reward_model
from rlhf_jax.data import batches
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.rewards.scorer import open_model
from rlhf_jax.utils.output import guarded_output
from rlhf_jax.utils.text import parse_json

MAX_BODY = 32 << 20  # bytes
MAX_ROWS = 65_536  # of a request; an empty row costs a forward pass too
IDLE = 60.0  # seconds without a byte before a connection is closed
ARRIVAL = 120.0  # seconds in which a whole request must arrive, since a client may trickle bytes
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 33\r\nConnection: close\r\n\r\n" + b'{"error": "too many connections"}'
)


class BadRequest(Exception):
    """An HTTP status and its message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Scorer:
    """A reward model and its tokenizer; one batch at a time is on the device.

    Args:
      path, revision: the checkpoint, a folder or a hub name.
      tokenizer: folder or hub name; default: the checkpoint's own.
      max_batch: rows of a forward pass.
      dtype: compute dtype.
    """

    def __init__(self, path: str, revision: str | None, tokenizer: str | None, max_batch: int, dtype: str):
        self._model = open_model(path, revision)
        self._params = jax.device_put(hf.load(path, kind="scalar", revision=revision)[1])
        config = self._model.config
        source = (tokenizer, None) if tokenizer else (path, revision)
        self._tokenizer = data.load_tokenizer(*source, vocab_size=config.vocab_size)
        self._context = config.max_position_embeddings
        # Padded lengths and rows double, so that few shapes are compiled.
        self._lengths = [n for k in range(5, 40) if (n := 1 << k) < self._context] + [self._context]
        self._max_batch = max_batch
        self._lock = threading.Lock()
        self._forward = jax.jit(
            lambda params, tokens, lengths: reward_model.score_texts(
                self._model, params, tokens, lengths, dtype=jnp.dtype(dtype)
            )
        )

    def scores(self, prompts: list, completions: list) -> list[float]:
        """One float a row; BadRequest names the row that cannot be scored."""
        texts = [self._text(row, *pair) for row, pair in enumerate(zip(prompts, completions, strict=True))]
        for row, text in enumerate(texts):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise BadRequest(400, f"row {row} contains an unpaired surrogate")
        ids = [[*row, self._tokenizer.eos_id] for row in self._tokenizer.encode_batch(texts)]
        for row, tokens in enumerate(ids):
            if len(tokens) > self._context:
                raise BadRequest(400, f"row {row} has {len(tokens)} tokens; the model takes {self._context}")
        scores = np.zeros(len(ids), np.float32)
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))  # rows of similar length share a batch
        for start in range(0, len(order), self._max_batch):
            rows = order[start : start + self._max_batch]
            scores[rows] = self._score_batch([ids[row] for row in rows])
        if not np.isfinite(scores).all():
            raise BadRequest(500, f"the model's score of row {int(np.argmin(np.isfinite(scores)))} is not finite")
        return scores.tolist()

    def _score_batch(self, ids: list[list[int]]) -> np.ndarray:
        height = min(1 << math.ceil(math.log2(len(ids))), self._max_batch)
        padded = [*ids, *([[self._tokenizer.pad_id]] * (height - len(ids)))]
        width = batches.bucket(max(map(len, ids)), self._lengths)
        tokens = batches.pad_right(padded, width, self._tokenizer.pad_id)
        with self._lock:
            return np.asarray(self._forward(self._params, tokens, batches.lengths_of(padded)))[: len(ids)]

    def _text(self, row: int, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if isinstance(prompt, list) and isinstance(completion, list):
            if self._tokenizer.hf.chat_template is None:
                raise BadRequest(400, f"row {row} is a list of messages, but the tokenizer has no chat template")
            try:
                text = self._tokenizer.hf.apply_chat_template([*prompt, *completion], tokenize=False)
            except Exception as error:  # a template may fail in its own way
                raise BadRequest(400, f"row {row}: the chat template cannot render its messages: {error}") from error
            eos = self._tokenizer.hf.eos_token  # `scores` appends it; many templates do as well
            return text.rstrip("\n").removesuffix(eos) if text.rstrip("\n").endswith(eos) else text
        raise BadRequest(400, f"row {row}: prompt and completion must both be texts, or both lists of messages")


def make_server(
    scorer: Scorer,
    host: str,
    port: int,
    token: str,
    *,
    max_connections: int = 64,
    arrival: float = ARRIVAL,
) -> ThreadingHTTPServer:
    """A server that is bound and not yet serving.

    Args:
      scorer: see `Scorer`.
      host, port: to listen on.
      token: that requests must carry; empty: none is required.
      max_connections: at a time; further ones get 503.
      arrival: seconds in which a request must arrive.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = IDLE

        def setup(self) -> None:
            super().setup()
            self._deadline = threading.Timer(arrival, self._stop_reading)
            self._deadline.daemon = True
            self._deadline.start()

        def _stop_reading(self) -> None:
            with contextlib.suppress(OSError):  # the client may have left
                self.connection.shutdown(socket.SHUT_RD)

        def finish(self) -> None:
            self._deadline.cancel()
            super().finish()

        def do_GET(self) -> None:
            if self.path.split("?")[0] == "/health":
                self._send(200, {"status": "ok"})
            else:
                self._send(404, {"error": "use GET /health or POST /score"})

        def do_POST(self) -> None:
            try:
                self._send(200, {"scores": self._scores()})
            except BadRequest as error:
                self._send(error.status, {"error": str(error)})
            except Exception as error:
                self._send(500, {"error": f"{type(error).__name__}; see the server's log"})
                raise

        def _scores(self) -> list[float]:
            given = self.headers.get("Authorization", "").encode()
            if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                self._discard_body()
                raise BadRequest(401, "a valid bearer token is required")
            body = self._body()
            if self.path.split("?")[0] != "/score":
                raise BadRequest(404, "use GET /health or POST /score")
            self._deadline.cancel()
            try:
                content = parse_json(body)
            except ValueError as error:
                raise BadRequest(400, f"the body is not JSON: {error}") from None
            content = content if isinstance(content, dict) else {}
            columns = [content.get(key) for key in ("prompts", "completions")]
            if not all(isinstance(column, list) for column in columns):
                raise BadRequest(400, 'the body must be {"prompts": [...], "completions": [...]}')
            if len(columns[0]) != len(columns[1]):
                raise BadRequest(400, f"{len(columns[0])} prompts but {len(columns[1])} completions")
            if len(columns[0]) > MAX_ROWS:
                raise BadRequest(413, f"a request may have {MAX_ROWS} rows; this one has {len(columns[0])}")
            return scorer.scores(*columns)

        def _length(self) -> int:
            length = self.headers.get("Content-Length", "")
            if not (length.isascii() and length.isdecimal() and len(length) < 16):
                raise BadRequest(411, "Content-Length is required")
            return int(length)

        def _body(self) -> bytes:
            length = self._length()
            if length > MAX_BODY:
                self._discard_body()
                raise BadRequest(413, f"a body may have {MAX_BODY} bytes; this one has {length}: send fewer rows")
            body = self.rfile.read(length)
            if len(body) < length:
                raise BadRequest(408, f"only {len(body)} of {length} bytes arrived within {arrival:g} s")
            return body

        def _discard_body(self) -> None:
            """Reads a body without storing it: closing the connection before its end would lose the response."""
            left = min(self._length(), 4 * MAX_BODY)
            while left > 0 and (piece := self.rfile.read(min(left, 1 << 20))):
                left -= len(piece)

        def _send(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            # One request a connection: unread bytes cannot be taken for the next one, and idle clients hold no slot.
            self.send_header("Connection", "close")
            self.close_connection = True
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, *_: Any) -> None:
            """Logs errors only."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128
        slots = threading.BoundedSemaphore(max_connections)

        def process_request(self, request: Any, client_address: Any) -> None:
            if not self.slots.acquire(blocking=False):
                with contextlib.suppress(OSError):
                    request.setblocking(False)
                    request.send(BUSY)
                self.shutdown_request(request)
                return
            try:
                super().process_request(request, client_address)
            except BaseException:  # the thread did not start
                self.slots.release()
                raise

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self.slots.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # the client left early
                super().handle_error(request, client_address)

    return Server((host, port), Handler)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@guarded_output()
def main() -> int:
    """Returns the exit status: 2 for an error of the user."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="reward-model checkpoint: a folder or a hub name")
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument("--tokenizer", help="folder or hub name, where the checkpoint has none of its own")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: any")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port; it is printed")
    parser.add_argument("--max_batch", type=int, default=32, help="rows of a forward pass")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="compute dtype")
    parser.add_argument("--max_connections", type=int, default=64, help="at a time; further ones get status 503")
    parser.add_argument(
        "--token_env",
        default="RLHF_JAX_REWARD_TOKEN",
        help="environment variable with the bearer token that requests must carry",
    )
    parser.add_argument(
        "--no_token", action="store_true", help="let any user of this machine send requests; loopback only"
    )
    args = parser.parse_args()
    try:
        token = "" if args.no_token else os.environ.get(args.token_env, "").strip()
        if args.no_token and not is_loopback(args.host):
            raise UserError(f"--no_token with --host {args.host}: without a token the server listens on loopback only")
        if not args.no_token and not token:
            raise UserError(
                f"--token_env {args.token_env}: this environment variable is not set. Set it here and for the run, or "
                "pass --no_token to let any user of this machine send requests"
            )
        for option in ("max_batch", "max_connections"):
            if getattr(args, option) < 1:
                raise UserError(f"--{option} is {getattr(args, option)}; it must be at least 1")
        scorer = Scorer(args.model, args.revision, args.tokenizer, args.max_batch, args.dtype)
        try:
            server = make_server(scorer, args.host, args.port, token, max_connections=args.max_connections)
        except (OSError, OverflowError) as error:
            raise UserError(f"--host {args.host} --port {args.port}: {error}") from error
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    host, port = server.server_address[:2]
    print(f"serving {args.model} on http://{host}:{port}/score", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

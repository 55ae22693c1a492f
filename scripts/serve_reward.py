"""Serves a reward model over HTTP, for --reward_server of a run elsewhere.

    python scripts/serve_reward.py --model runs/tldr/reward/reward_model --port 8000

POST /score {"prompts": [...], "completions": [...]} answers {"scores": [...]}, a finite number a row: the model's score
at the eos after prompt + completion, tokenised as one text by the model's own tokenizer. Lists of messages in place of
texts go through the tokenizer's chat template. GET /health answers {"status": "ok", ...}.
"""

from __future__ import annotations

import argparse
import hmac
import json
import math
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.models import hf
from rlhf_jax.trainers import reward
from rlhf_jax.types import UserError

MAX_BODY = 32 << 20  # bytes
IDLE = 60.0  # seconds that a connection may stay silent


class BadRequest(Exception):
    """An HTTP status and what to say with it."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Scorer:
    """A reward model and its tokenizer; one request at a time is on the device.

    Args:
      path, revision: the checkpoint, a folder or a hub name.
      tokenizer: of another place; default: the checkpoint's own.
      max_batch: rows of a forward pass.
      dtype: compute dtype.
    """

    def __init__(self, path: str, revision: str | None, tokenizer: str | None, max_batch: int, dtype: str):
        self._model, params = hf.load(path, kind="scalar", revision=revision)
        self._params = jax.device_put(params)
        config = self._model.config
        source = (tokenizer, None) if tokenizer else (path, revision)
        self._tokenizer = data.load_tokenizer(*source, vocab_size=config.vocab_size)
        self._longest = config.max_position_embeddings
        # Few padded shapes, so that few programs are compiled: lengths and rows double.
        self._lengths = [n for k in range(5, 40) if (n := 1 << k) < self._longest] + [self._longest]
        self._max_batch = max_batch
        self._lock = threading.Lock()
        self._forward = jax.jit(
            lambda params, tokens, lengths: reward.score_texts(
                self._model, params, tokens, lengths, dtype=jnp.dtype(dtype)
            )
        )

    def scores(self, prompts: list, completions: list) -> list[float]:
        """One float a row; BadRequest names the row that cannot be scored."""
        texts = [self._text(row, *pair) for row, pair in enumerate(zip(prompts, completions, strict=True))]
        ids = [[*row, self._tokenizer.eos_id] for row in self._tokenizer.encode_batch(texts)]
        for row, tokens in enumerate(ids):
            if len(tokens) > self._longest:
                raise BadRequest(400, f"row {row} has {len(tokens)} tokens; the model takes {self._longest}")
        found = np.zeros(len(ids), np.float32)
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))  # rows of a like length share a batch
        for start in range(0, len(order), self._max_batch):
            rows = order[start : start + self._max_batch]
            found[rows] = self._batch([ids[row] for row in rows])
        if not np.isfinite(found).all():
            raise BadRequest(500, f"the model's score of row {int(np.argmin(np.isfinite(found)))} is not finite")
        return found.tolist()

    def _batch(self, ids: list[list[int]]) -> np.ndarray:
        height = min(1 << math.ceil(math.log2(len(ids))), self._max_batch)
        width = data.bucket(max(map(len, ids)), self._lengths)
        tokens, lengths = np.full((height, width), self._tokenizer.pad_id, np.int32), np.ones(height, np.int32)
        for row, own in enumerate(ids):
            tokens[row, : len(own)], lengths[row] = own, len(own)
        with self._lock:
            return np.asarray(self._forward(self._params, tokens, lengths))[: len(ids)]

    def _text(self, row: int, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if isinstance(prompt, list) and isinstance(completion, list):
            if self._tokenizer.hf.chat_template is None:
                raise BadRequest(400, f"row {row} is a list of messages, but the tokenizer has no chat template")
            try:
                text = self._tokenizer.hf.apply_chat_template([*prompt, *completion], tokenize=False)
            except Exception as error:  # a template may fail in its own way
                raise BadRequest(400, f"row {row}: the chat template cannot write its messages: {error}") from error
            eos = self._tokenizer.hf.eos_token  # many templates end with it, and one is enough
            return text.rstrip("\n").removesuffix(eos) if text.rstrip("\n").endswith(eos) else text
        raise BadRequest(400, f"row {row}: prompt and completion must both be texts, or both lists of messages")


def make_server(scorer: Scorer, name: str, host: str, port: int, token: str) -> ThreadingHTTPServer:
    """A server, bound and not yet serving; an empty token: everybody may ask."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = IDLE

        def do_GET(self) -> None:
            if self.path.split("?")[0] == "/health":
                self._send(200, {"status": "ok", "model": name})
            else:
                self._send(404, {"error": "there are GET /health and POST /score"})

        def do_POST(self) -> None:
            try:
                self._send(200, {"scores": self._scores()})
            except BadRequest as error:
                self._send(error.status, {"error": str(error)})
            except Exception as error:
                self._send(500, {"error": f"{type(error).__name__}: {error}"})
                raise

        def _scores(self) -> list[float]:
            body = self._body()
            if self.path.split("?")[0] != "/score":
                raise BadRequest(404, "there are GET /health and POST /score")
            given = self.headers.get("Authorization", "").encode()
            if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                raise BadRequest(401, "a bearer token is needed, and the right one")
            try:
                asked = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise BadRequest(400, f"the body is no JSON: {error}") from None
            columns = [asked.get(key) if isinstance(asked, dict) else None for key in ("prompts", "completions")]
            if not all(isinstance(column, list) for column in columns):
                raise BadRequest(400, 'the body must be {"prompts": [...], "completions": [...]}')
            if len(columns[0]) != len(columns[1]):
                raise BadRequest(400, f"{len(columns[0])} prompts but {len(columns[1])} completions")
            return scorer.scores(*columns)

        def _body(self) -> bytes:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise BadRequest(411, "Content-Length is needed")
            length = int(length)
            if length <= MAX_BODY:
                return self.rfile.read(length)
            # Read on and forget, within reason: a connection that is closed before would lose the answer too.
            left = min(length, 4 * MAX_BODY)
            while left > 0 and (piece := self.rfile.read(min(left, 1 << 20))):
                left -= len(piece)
            raise BadRequest(413, f"a body may have {MAX_BODY} bytes, this one has {length}: send fewer rows")

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status != 200:  # what is left of the request may not be taken for the next one
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, *_: Any) -> None:
            """One line a request is too much; errors are logged."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # a client may leave early
                super().handle_error(request, client_address)

    return Server((host, port), Handler)


def main() -> int:
    """Exit status 2 for what the user got wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="reward-model checkpoint: a folder or a hub name")
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument("--tokenizer", help="folder or hub name, where the checkpoint has none of its own")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: any, then set --token_env")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed")
    parser.add_argument("--max_batch", type=int, default=32, help="rows of a forward pass")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="compute dtype")
    parser.add_argument("--token_env", help="environment variable with the bearer token that requests must carry")
    args = parser.parse_args()
    try:
        token = os.environ.get(args.token_env, "").strip() if args.token_env else ""
        if args.token_env and not token:
            raise UserError(f"--token_env {args.token_env}: this environment variable is not set")
        if args.max_batch < 1:
            raise UserError(f"--max_batch is {args.max_batch}; it must be at least 1")
        scorer = Scorer(args.model, args.revision, args.tokenizer, args.max_batch, args.dtype)
        try:
            server = make_server(scorer, args.model, args.host, args.port, token)
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

"""A reward server: prompts and completions go out as JSON over HTTP, scores come back.

    POST {"prompts": [...], "completions": [...]}  ->  {"scores": [1.5, null, ...]}

Texts, or lists of messages; null is None, 'not applicable'; "rewards" is read as "scores". scripts/serve_reward.py is
such a server. Redirects are not followed and no proxy is used: the token goes to the named host alone. It comes from
the environment, because a config is written into the run's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import http.client
import ipaddress
import json
import math
import os
import random
import socket
import ssl
import threading
import urllib.parse
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_jax.errors import UserError
from rlhf_jax.rewards.interface import RewardFailure, as_number, show_row, shown
from rlhf_jax.utils.text import parse_json, printable
from rlhf_jax.utils.text import shown as whole

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 10.0
"""Seconds: the wait before the first retry, doubled for each further one up to the second; half of it is drawn."""
MAX_ANSWER = 16 << 20
"""Bytes that an answer may have."""
_OF_ONE_QUESTION = (400, 413, 422)  # statuses that another question may not get
_MARGIN = 5.0  # seconds beyond total_timeout in which the message about it is written


class Server:
    """A server that answers POSTs of JSON; its subclasses say what is asked and what an answer means.

    Args:
      url: of the server, http or https.
      timeout: most seconds of one request, from connecting to the last byte.
      retries: tries again of a request after a lost connection, a timeout, status 429 or 5xx.
      concurrency: requests at a time.
      token_env: environment variable; its value, where it is set, goes along as a bearer token, and into no message.
      sleep: waits between tries.

    Raises:
      UserError: the URL, a number or the token cannot be used.
    """

    what = "reward server"
    """What messages call it."""
    failure: type[UserError] = RewardFailure

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int,
        concurrency: int,
        token_env: str | None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._parts = _checked_url(url, self.what)
        self.url = self._parts._replace(query="", fragment="").geturl()  # for messages; a query may hold a secret
        self._at_least(1e-3, timeout=timeout)
        self._at_least(0, retries=retries)
        self._at_least(1, concurrency=concurrency)
        self._timeout, self._retries, self._concurrency = timeout, retries, concurrency
        self._sleep = sleep
        self._random = random.Random()  # of its own: a run's random numbers are not for the network to disturb
        self._tls = ssl.create_default_context() if self._parts.scheme == "https" else None
        self._token = os.environ.get(token_env, "").strip() if token_env else ""
        if not (self._token.isascii() and self._token.isprintable() and " " not in self._token):
            raise UserError(f"${token_env}, the {self.what}'s token, has characters that no HTTP header may carry")
        # As servers may quote it back: as it is, inside JSON, inside a URL.
        forms = {self._token, json.dumps(self._token)[1:-1], urllib.parse.quote(self._token, safe="")}
        self._secrets = sorted(forms - {""}, key=len, reverse=True)
        if self._token and self._tls is None and not _is_loopback(self._parts.hostname):
            warnings.warn(
                f"the token of {self.what} {self.url} goes over the network in the clear; give an https:// URL",
                stacklevel=3,
            )

    def _at_least(self, low: float, **options: float) -> None:
        for option, value in options.items():
            if not value >= low:
                raise UserError(f"{self.what} {self.url}: {option} is {value}; it must be at least {low:g}")

    def _failure(self, text: str, passing: bool = False) -> UserError:
        """What to raise; `passing`: the trouble is of this question or moment, not of all questions."""
        error = self.failure(f"{self.what} {self.url}: {self._redacted(text)}")
        error.passing = passing
        return error

    def _redacted(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    # --- one question

    async def _ask(self, body: bytes, deadline: float, trouble: list[str], about: str) -> _Answer:
        """The answer of status 2xx to a POST of `body`, tried again where that may help; the failure raised where it
        does not has `passing` set when it might yet, and ends with `about`. Troubles on the way go to `trouble`."""
        for tried in range(1, self._retries + 2):
            answer, problem = await self._request(body)
            if answer is not None and 200 <= answer.status < 300:
                return answer
            trouble.append(problem)
            if answer is not None and answer.status != 429 and answer.status < 500:
                raise self._failure(f"{problem}. {about}", passing=answer.status in _OF_ONE_QUESTION)
            if tried <= self._retries:
                await self._wait(tried, answer, deadline, f"{problem}; no time is left to try again. {about}")
        times = "once" if tried == 1 else f"{tried} times"
        raise self._failure(f"{problem}; tried {times}. {about}", passing=True)

    async def _wait(self, tried: int, answer: _Answer | None, deadline: float, too_late: str) -> None:
        left = deadline - asyncio.get_running_loop().time()
        seconds = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (tried - 1)) * self._random.uniform(0.5, 1.0)
        asked = _retry_after(answer.headers) if answer is not None else None
        if asked is not None and asked < left:
            seconds = asked
        if seconds >= left:
            raise self._failure(too_late, passing=True)
        await self._sleep(seconds)

    # --- one request

    async def _request(self, body: bytes) -> tuple[_Answer | None, str]:
        """(the answer or None, what is wrong with it unless it is a success)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Answer] = loop.create_future()
        exchange = _Exchange(self._parts, self._timeout, self._tls)

        def settle(answer: _Answer | None, error: BaseException | None) -> None:
            if not future.done():
                future.set_exception(error) if error else future.set_result(answer)

        def work() -> None:
            answer = error = None
            try:
                answer = exchange.run(body, self._headers())
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, answer, error)

        # A thread of its own rather than a pool's, which Python would wait for at its exit.
        threading.Thread(target=work, daemon=True, name=self.what).start()
        try:
            answer = await asyncio.wait_for(future, self._timeout)
        except TimeoutError:
            return None, f"no whole answer within {self._timeout:g} s"
        except ssl.SSLCertVerificationError as error:
            raise self._failure(f"its certificate is not trusted: {error.verify_message}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            return None, f"no answer ({type(error).__name__}: {_brief(self._redacted(str(error)))})"
        finally:
            exchange.abort()
        if len(answer.body) > MAX_ANSWER:
            raise self._failure(f"status {answer.status}, and an answer of over {MAX_ANSWER >> 20} MiB")
        said = shown(self._redacted(answer.body.decode(errors="replace")))
        to = _brief(self._redacted(str(answer.headers.get("Location"))))
        to = f" to {to}, which is not followed" if 300 <= answer.status < 400 else ""
        return answer, f"status {answer.status} {_brief(self._redacted(answer.reason))}{to}: {said}"

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        return {**headers, "Authorization": f"Bearer {self._token}"} if self._token else headers


class RemoteReward(Server):
    """Scores of a server, for HostRewards: an object with an async __call__.

    Args:
      total_timeout: most seconds of one call: all requests, waits and retries.
      batch_size: rows a request.
      url, timeout, retries, concurrency, token_env, sleep: as `Server`, and its errors.
    """

    name = "server"

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        total_timeout: float = 600.0,
        retries: int = 5,
        batch_size: int = 64,
        concurrency: int = 4,
        token_env: str | None = "RLHF_JAX_REWARD_TOKEN",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        options = {"timeout": timeout, "retries": retries, "concurrency": concurrency}
        super().__init__(url, **options, token_env=token_env, sleep=sleep)
        self._at_least(1e-3, total_timeout=total_timeout)
        self._at_least(1, batch_size=batch_size)
        self._total_timeout, self._batch_size = total_timeout, batch_size
        self.own_timeout = total_timeout + _MARGIN

    async def __call__(self, prompts: Sequence, completions: Sequence) -> list[float | None]:
        """Scores of B rows.

        Raises:
          RewardFailure: names the URL, what went wrong, and a row.
        """
        deadline = asyncio.get_running_loop().time() + self._total_timeout
        slots = asyncio.Semaphore(self._concurrency)
        trouble: list[str] = []
        slices = [
            asyncio.ensure_future(self._slice(slots, deadline, trouble, start, prompts, completions))
            for start in range(0, len(prompts), self._batch_size)
        ]
        try:
            async with asyncio.timeout_at(deadline):
                parts = await asyncio.gather(*slices)
        except TimeoutError:
            done = sum(task.done() and not task.cancelled() and task.exception() is None for task in slices)
            last = f" The last trouble: {trouble[-1]}." if trouble else ""
            raise self._failure(
                f"{done} of {len(slices)} requests were answered within {self._total_timeout:g} s in all.{last} "
                f"{show_row(0, prompts, completions)}"
            ) from None
        finally:
            for task in slices:
                task.cancel()
            await asyncio.gather(*slices, return_exceptions=True)
        return [score for part in parts for score in part]

    # --- one slice of the rows

    async def _slice(self, slots, deadline: float, trouble: list[str], start: int, prompts, completions) -> list:
        part = slice(start, start + self._batch_size)
        first = show_row(start, prompts, completions)
        try:
            rows = {"prompts": list(prompts[part]), "completions": list(completions[part])}
            body = json.dumps(rows, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise self._failure(f"rows cannot be written as JSON: {error}. {first}") from error
        async with slots:
            answer = await self._ask(body, deadline, trouble, first)
        return self._scores(answer, start, prompts[part], completions[part], first)

    def _scores(self, answer: _Answer, start: int, prompts, completions, first: str) -> list[float | None]:
        got = f"status {answer.status}, but"
        body = shown(self._redacted(answer.body.decode(errors="replace")))
        try:
            found = parse_json(answer.body)
        except ValueError:
            raise self._failure(f"{got} no JSON: {body}. {first}") from None
        scores = found.get("scores", found.get("rewards")) if isinstance(found, dict) else None
        if not isinstance(scores, list):
            raise self._failure(f'{got} not {{"scores": [...]}}: {body}. {first}')
        if len(scores) != len(prompts):
            raise self._failure(f"{got} {len(scores)} scores for {len(prompts)} rows: {body}. {first}")
        for row, score in enumerate(scores):
            try:
                if isinstance(score, bool):
                    raise ValueError
                as_number(score)
            except ValueError:
                here = show_row(row, prompts, completions).replace(f"Row {row}", f"Row {start + row}", 1)
                wanted = "a score is a finite number, or null where it does not apply"
                text = self._redacted(score if isinstance(score, str) else whole(score, MAX_ANSWER))
                said = shown(text) if isinstance(score, str) else _brief(text)
                raise self._failure(f"{got} a score of {said}; {wanted}. {here}") from None
        return scores


class _Answer(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


class _Exchange:
    """A request and its answer on a connection of its own, in one thread; another thread can end it at any point.

    A socket's timeout is for each piece of an answer, so that a server that trickles would never run into it."""

    def __init__(self, parts: urllib.parse.SplitResult, timeout: float, tls: ssl.SSLContext | None):
        self._path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=") + (
            f"?{parts.query}" if parts.query else ""
        )
        if tls is None:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        else:
            self._connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout, context=tls)
        self._socket: socket.socket | None = None
        self._aborted = False

    def run(self, body: bytes, headers: dict[str, str]) -> _Answer:
        """POSTs `body`; OSError or HTTPException when no whole answer comes."""
        with contextlib.closing(self._connection) as connection:
            connection.connect()
            self._socket = connection.sock
            if self._aborted:
                raise ConnectionAbortedError("given up")
            # A server may refuse before it has read the body, so a broken pipe can have an answer to it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", self._path, body, headers)
            with connection.getresponse() as response:
                answer = response.read(MAX_ANSWER + 1)
                if response.length and len(answer) <= MAX_ANSWER:
                    raise http.client.IncompleteRead(answer, response.length)
                return _Answer(response.status, response.reason, response.headers, answer)

    def abort(self) -> None:
        """Ends whatever the exchange waits for."""
        self._aborted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _brief(text: str) -> str:
    """What a server said outside its body, for a message."""
    text = printable(text)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _checked_url(url: str, what: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
        host and host.encode("idna")
    except ValueError as error:
        raise UserError(f"{what} {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        raise UserError(f"{what} {url!r}: give a URL such as http://localhost:8000/score")
    if "@" in parts.netloc:
        raise UserError(f"{what} at {host}: take the user and password out of its URL; a token has an option")
    if not parts.query.isascii():
        raise UserError(f"{what} at {host}: its query must be ASCII, percent-encoded")
    return parts


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or a date; None without one."""
    value = headers.get("Retry-After")
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(seconds := float(value)):
            return max(seconds, 0.0)
    with contextlib.suppress(TypeError, ValueError, OverflowError, IndexError):
        date = email.utils.parsedate_to_datetime(value)
        return max((date - datetime.datetime.now(datetime.UTC)).total_seconds(), 0.0)
    return None

"""A reward server: prompts and completions go out as JSON over HTTP, scores come back.

    POST {"prompts": [...], "completions": [...]}  ->  {"scores": [1.5, null, ...]}

Prompts and completions are texts, or lists of messages; null means 'not applicable', as None does; "rewards" is read as
"scores". scripts/serve_reward.py is such a server. Redirects are not followed and no proxy is used: the token goes to
the named host alone. It comes from the environment, because a config is written into the run's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import ipaddress
import json
import math
import os
import random
import ssl
import urllib.parse
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx2

from rlhf_jax.errors import UserError
from rlhf_jax.rewards.interface import RewardFailure, as_number, describe_row, quoted
from rlhf_jax.utils.text import parse_json, printable, short_repr

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 10.0
"""Seconds before the first retry and at most; each wait doubles the one before and is drawn from its upper half."""
MAX_RESPONSE = 16 << 20
"""Bytes of a response."""
_REQUEST_ERRORS = (400, 413, 422)  # statuses that concern one request: another request may succeed
_MARGIN = 5.0  # seconds beyond total_timeout, for the error message


class Server:
    """A server that answers POSTs of JSON; subclasses define what is sent and how a response is read.

    Args:
      url: of the server, http or https.
      timeout: seconds of one request, from connecting to the last byte.
      retries: of a request after a lost connection, a timeout, status 429 or 5xx.
      concurrency: requests at a time.
      token_env: environment variable; its value, if set, is sent as a bearer token and appears in no message.
      sleep: waits between tries.

    Raises:
      UserError: the URL, a number or the token is invalid.
    """

    what = "reward server"
    """Its name in messages."""
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
        self._check_at_least(1e-3, timeout=timeout)
        self._check_at_least(0, retries=retries)
        self._check_at_least(1, concurrency=concurrency)
        self._timeout, self._retries, self._concurrency = timeout, retries, concurrency
        self._sleep = sleep
        self._random = random.Random()  # its own: retries must not change a run's random numbers
        self._tls = ssl.create_default_context() if self._parts.scheme == "https" else None
        self._token = os.environ.get(token_env, "").strip() if token_env else ""
        if not (self._token.isascii() and self._token.isprintable() and " " not in self._token):
            raise UserError(f"${token_env}, the token of the {self.what}, has characters that no HTTP header may carry")
        # The forms in which a server may quote it: as it is, inside JSON, inside a URL.
        forms = {self._token, json.dumps(self._token)[1:-1], urllib.parse.quote(self._token, safe="")}
        self._secrets = sorted(forms - {""}, key=len, reverse=True)
        if self._token and self._tls is None and not _is_loopback(self._parts.hostname):
            warnings.warn(
                f"the token of {self.what} {self.url} is sent over the network unencrypted; use an https:// URL",
                stacklevel=3,
            )

    def _check_at_least(self, low: float, **options: float) -> None:
        for option, value in options.items():
            if not value >= low:
                raise UserError(f"{self.what} {self.url}: {option} is {value}; it must be at least {low:g}")

    def _failure(self, text: str, transient: bool = False) -> UserError:
        """The error to raise; `transient`: another request, or the same one later, may succeed."""
        error = self.failure(f"{self.what} {self.url}: {self._redact(text)}")
        error.transient = transient
        return error

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    async def _post(self, body: bytes, deadline: float, problems: list[str], about: str) -> _Response:
        """The response with status 2xx to a POST of `body`, retried where that may help.

        Args:
          body: JSON.
          deadline: by the loop's clock; no retry begins after it.
          problems: gets what went wrong on the way.
          about: ends the message of a failure.
        """
        for attempt in range(1, self._retries + 2):
            response, problem = await self._request(body)
            if response is not None and 200 <= response.status < 300:
                return response
            problems.append(problem)
            if response is not None and response.status != 429 and response.status < 500:
                raise self._failure(f"{problem}. {about}", transient=response.status in _REQUEST_ERRORS)
            if attempt <= self._retries:
                await self._wait(attempt, response, deadline, f"{problem}; no time is left for a retry. {about}")
        times = "once" if attempt == 1 else f"{attempt} times"
        raise self._failure(f"{problem}; tried {times}. {about}", transient=True)

    async def _wait(self, attempt: int, response: _Response | None, deadline: float, too_late: str) -> None:
        left = deadline - asyncio.get_running_loop().time()
        seconds = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (attempt - 1)) * self._random.uniform(0.5, 1.0)
        requested = _retry_after(response.headers) if response is not None else None
        if requested is not None and requested < left:
            seconds = requested
        if seconds >= left:
            raise self._failure(too_late, transient=True)
        await self._sleep(seconds)

    async def _request(self, body: bytes) -> tuple[_Response | None, str]:
        """(response or None, the problem with it unless it is a success)."""
        try:
            async with asyncio.timeout(self._timeout):  # httpx has timeouts of single reads only
                response = await self._exchange(body)
        except TimeoutError:
            return None, f"no complete response within {self._timeout:g} s"
        except (httpx2.HTTPError, OSError, ValueError) as error:
            cause = _root_cause(error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise self._failure(f"its certificate is not trusted: {cause.verify_message}") from error
            return None, f"no response ({type(cause).__name__}: {_shorten(self._redact(str(cause)))})"
        if len(response.body) > MAX_RESPONSE:
            raise self._failure(f"status {response.status}, and a response of over {MAX_RESPONSE >> 20} MiB")
        text = quoted(self._redact(response.body.decode(errors="replace")))
        to = _shorten(self._redact(str(response.headers.get("Location"))))
        to = f" to {to}, which is not followed" if 300 <= response.status < 400 else ""
        return response, f"status {response.status} {_shorten(self._redact(response.reason))}{to}: {text}"

    async def _exchange(self, body: bytes) -> _Response:
        """One POST, on its own connection, and up to MAX_RESPONSE + 1 bytes of the response as they were sent."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = httpx2.Request("POST", self._parts.geturl(), headers=headers, content=body)
        # The transport, not a client: a client logs whole URLs, and reads proxies from the environment.
        async with httpx2.AsyncHTTPTransport(verify=self._tls or False) as transport:
            response = await transport.handle_async_request(request)
            async with contextlib.aclosing(response):
                received = bytearray()
                async for chunk in response.aiter_raw():
                    received += chunk[: MAX_RESPONSE + 1 - len(received)]
                    if len(received) > MAX_RESPONSE:
                        break
                return _Response(response.status_code, response.reason_phrase, response.headers, bytes(received))


class RemoteReward(Server):
    """Scores of a server, for HostRewards: an object with an async __call__.

    Args:
      total_timeout: seconds of one call: all requests, waits and retries.
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
        self._check_at_least(1e-3, total_timeout=total_timeout)
        self._check_at_least(1, batch_size=batch_size)
        self._total_timeout, self._batch_size = total_timeout, batch_size
        self.own_timeout = total_timeout + _MARGIN

    async def __call__(self, prompts: Sequence, completions: Sequence) -> list[float | None]:
        """Scores of B rows.

        Raises:
          RewardFailure: names the URL, what went wrong, and a row.
        """
        deadline = asyncio.get_running_loop().time() + self._total_timeout
        slots = asyncio.Semaphore(self._concurrency)
        problems: list[str] = []
        tasks = [
            asyncio.ensure_future(self._score_batch(slots, deadline, problems, start, prompts, completions))
            for start in range(0, len(prompts), self._batch_size)
        ]
        try:
            async with asyncio.timeout_at(deadline):
                parts = await asyncio.gather(*tasks)
        except TimeoutError:
            done = sum(task.done() and not task.cancelled() and task.exception() is None for task in tasks)
            last = f" The last problem: {problems[-1]}." if problems else ""
            raise self._failure(
                f"{done} of {len(tasks)} requests were answered within {self._total_timeout:g} s in all.{last} "
                f"{describe_row(0, prompts, completions)}"
            ) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [score for part in parts for score in part]

    async def _score_batch(self, slots, deadline: float, problems: list[str], start: int, prompts, completions) -> list:
        """Scores of the rows from `start` on that go into one request."""
        batch = slice(start, start + self._batch_size)
        first = describe_row(start, prompts, completions)
        try:
            rows = {"prompts": list(prompts[batch]), "completions": list(completions[batch])}
            body = json.dumps(rows, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise self._failure(f"rows cannot be written as JSON: {error}. {first}") from error
        async with slots:
            response = await self._post(body, deadline, problems, first)
        return self._parse_scores(response, start, prompts[batch], completions[batch], first)

    def _parse_scores(self, response: _Response, start: int, prompts, completions, first: str) -> list[float | None]:
        status = f"status {response.status}, but"
        body = quoted(self._redact(response.body.decode(errors="replace")))
        try:
            content = parse_json(response.body)
        except ValueError:
            raise self._failure(f"{status} the body is not JSON: {body}. {first}") from None
        scores = content.get("scores", content.get("rewards")) if isinstance(content, dict) else None
        if not isinstance(scores, list):
            raise self._failure(f'{status} the body is not {{"scores": [...]}}: {body}. {first}')
        if len(scores) != len(prompts):
            raise self._failure(f"{status} {len(scores)} scores for {len(prompts)} rows: {body}. {first}")
        for row, score in enumerate(scores):
            try:
                if isinstance(score, bool):
                    raise ValueError
                as_number(score)
            except ValueError:
                at = describe_row(row, prompts, completions).replace(f"Row {row}", f"Row {start + row}", 1)
                text = self._redact(score if isinstance(score, str) else short_repr(score, MAX_RESPONSE))
                text = quoted(text) if isinstance(score, str) else _shorten(text)
                expected = "a score must be a finite number, or null where it does not apply"
                raise self._failure(f"{status} a score of {text}; {expected}. {at}") from None
        return scores


class _Response(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


def _root_cause(error: BaseException) -> BaseException:
    """The operating system's or TLS error behind httpx's, which says less ('All connection attempts failed')."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif (cause := error.__cause__ or error.__context__) is not None:
            error = cause
        else:
            return error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _shorten(text: str) -> str:
    """Text of a server, for a message."""
    text = printable(text)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _checked_url(url: str, what: str) -> urllib.parse.SplitResult:
    """The URL in parts; a UserError for one that httpx would accept and then fail to reach, or that holds a secret."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
        host and host.encode("idna")
    except ValueError as error:
        raise UserError(f"{what} {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        raise UserError(f"{what} {url!r}: give a URL such as http://localhost:8000/score")
    if "@" in parts.netloc:
        raise UserError(f"{what} at {host}: remove the user and password from its URL; use a token")
    if not parts.query.isascii():
        raise UserError(f"{what} at {host}: its query must be ASCII, percent-encoded")
    return parts


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    """Seconds that a Retry-After header requests, as a number or a date; None without one."""
    value = headers.get("Retry-After")
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(seconds := float(value)):
            return max(seconds, 0.0)
    with contextlib.suppress(TypeError, ValueError, OverflowError, IndexError):
        date = email.utils.parsedate_to_datetime(value)
        return max((date - datetime.datetime.now(datetime.UTC)).total_seconds(), 0.0)
    return None

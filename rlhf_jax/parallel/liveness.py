"""Watching the other processes of a run: one that dies is named, and the others end instead of waiting for good.

Process 0 listens, and every other process keeps one TCP connection to it, on which nothing is said but goodbye. A
connection that ends without a goodbye is a process that died: the system closes it at once, and where a whole machine
goes, keepalive notices within half a minute. Process 0 tells the others. A collective that waits for the dead process
cannot be called off, so a thread ends the process around it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

GRACE = 3.0  # seconds from the message to the end
SAME_END = 15.0  # a process ended with an error: seconds in which the others may end by themselves
LINGER = 30.0  # who ends with an error waits so long for the others, since process 0 takes jax's coordinator along
REACH = 5.0  # for one attempt to connect
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class PeerMonitor:
    """This process' connections to the others. Made by `start`."""

    def __init__(self, index: int, count: int):
        """Knows of nobody yet.

        Args:
          index: this process.
          count: processes in all.
        """
        self.me = {"process": index, "host": socket.gethostname(), "pid": os.getpid()}
        self._count = count
        self._lock = threading.Lock()
        self._present: dict[int, socket.socket] = {}  # who has not said goodbye
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self._reason: str | None = None
        self._told = threading.Event()

    # --- connections

    def listen(self, token: str) -> int:
        """Process 0: takes connections of who knows the token. Returns the port."""
        if socket.has_dualstack_ipv6():
            self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._listener = socket.create_server(("", 0))
        _in_thread(self._accept, token)
        return self._listener.getsockname()[1]

    def _accept(self, token: str) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            _in_thread(self._welcome, connection, token)

    def _welcome(self, connection: socket.socket, token: str) -> None:
        try:
            _keep_alive(connection)
            connection.settimeout(REACH)
            lines = connection.makefile("r", encoding="utf-8")
            hello = json.loads(lines.readline(1000))
            if hello.pop("token") != token:
                raise ValueError
            _send(connection, self.me)
            lines.readline(1000)[0]  # it has heard: who gave up waiting has closed, and is no member that died
            connection.settimeout(None)
        except (OSError, ValueError, LookupError, AttributeError, TypeError):  # somebody else
            connection.close()
            return
        self._read(hello, connection, lines)

    def connect(self, addresses: list[str], port: int, token: str) -> str | None:
        """Another process: connects to process 0 by the first address that answers. Returns what went wrong."""
        problem = None
        for address in addresses:
            connection = None
            try:
                connection = socket.create_connection((address, port), timeout=REACH)
                _keep_alive(connection)
                _send(connection, {**self.me, "token": token})
                lines = connection.makefile("r", encoding="utf-8")
                first = json.loads(lines.readline())
                _send(connection, {})
                connection.settimeout(None)
            except (OSError, ValueError) as error:
                problem = f"{address}:{port}: {error}"
                if connection is not None:
                    connection.close()
                continue
            _in_thread(self._read, first, connection, lines)
            return None
        return problem

    # --- who is there

    def _read(self, member: dict[str, Any], connection: socket.socket, lines: Any) -> None:
        """Hears one connection to its end."""
        left = False
        with self._lock:
            self._present[member["process"]] = connection
            self._connections.append(connection)
        try:
            for line in lines:
                message = json.loads(line)
                if "bye" in message:
                    left = True
                    self._leave(member)
                    if message["bye"] is not None:
                        self._ended(member, message["bye"])
                elif "go" in message:  # it waits for nobody any more, but lets this process end first
                    self._leave(member)
                else:
                    self._ended(message["member"], message["reason"])
        except (OSError, ValueError):
            pass
        self._leave(member)
        if not left:
            self._ended(member, None)

    def _leave(self, member: dict[str, Any]) -> None:
        with self._lock:
            self._present.pop(member["process"], None)

    def _ended(self, member: dict[str, Any], reason: str | None) -> None:
        """A process ended, with an error, or without a word (None): passes it on, and ends this one."""
        if self.me["process"] == 0:
            self._tell({"member": member, "reason": reason})
        _in_thread(self._follow, member, reason)

    def _follow(self, member: dict[str, Any], reason: str | None) -> None:
        # Most errors end all processes alike, and then each says its own.
        if self._closing.wait(0.0 if reason is None else SAME_END):
            if reason is None and self._reason is not None:
                # This process had an error alone, and the others did not wait: it cannot save or close with them.
                time.sleep(GRACE)
                print(f"error: {self._reason}", file=sys.stderr, flush=True)
                os._exit(1)
            return
        with self._lock:
            if self._told.is_set():
                return
            what = "is gone" if reason is None else f"ended with an error: {reason}"
            who = f"process {member['process']} of {self._count} (host {member['host']}, pid {member['pid']})"
            print(
                f"error: {who} {what}\nerror: process {self.me['process']} ends too; "
                "the same command, for all processes, continues from the newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
            self._told.set()
            if self.me["process"] == 0:
                # The last to go, since jax ends everybody with a stack trace when its coordinator does.
                for connection in self._connections:
                    _send(connection, {"go": True})
        time.sleep(GRACE if self.me["process"] else 2 * GRACE)
        os._exit(1)  # the main thread may be in a collective that never returns

    def _tell(self, message: dict[str, Any]) -> None:
        with self._lock:
            for connection in self._present.values():
                _send(connection, message)

    def lost(self, timeout: float) -> bool:
        """Whether it has been said, within so many seconds, that another process is gone; not after `leave`."""
        return self._told.wait(0.0 if self._closing.is_set() else timeout)

    # --- the end

    def leave(self, reason: str | None) -> None:
        """Says goodbye, once.

        Args:
          reason: the error that this process ends with; the others end too. None: all is done.
        """
        if not self._closing.is_set():
            self._reason = reason
            self._closing.set()
            self._tell({"bye": reason})

    def close(self, reason: str | None = None) -> None:
        """Says goodbye, with a reason as `leave`; then it waits a while for the others to end too. Hangs up."""
        self.leave(reason)
        end = time.monotonic() + (0.0 if reason is None else LINGER)
        while self._present and time.monotonic() < end:
            time.sleep(0.05)
        with self._lock:
            for connection in self._connections:
                _hang_up(connection)
        if self._listener is not None:
            _hang_up(self._listener)


def start(index: int, count: int, from_first: Callable[[Callable[[], Any]], Any]) -> PeerMonitor:
    """Begins to watch the other processes. Every process must call it.

    Args:
      index: this process.
      count: processes in all.
      from_first: gives all processes what a function returns on the first.

    Returns:
      A PeerMonitor. One that cannot reach process 0 says so and watches nobody: then jax itself notices a death, later.
    """
    watch = PeerMonitor(index, count)

    def place() -> dict[str, Any]:
        token = secrets.token_hex(16)
        return {"port": watch.listen(token), "token": token, "addresses": _addresses(), "host": watch.me["host"]}

    place = from_first(place)
    if index:
        here = ["127.0.0.1"] if place["host"] == watch.me["host"] else []
        problem = watch.connect([*here, *place["addresses"]], place["port"], place["token"])
        if problem is not None:
            print(
                f"warning: process {index} cannot watch process 0 ({problem}); if another process dies, it takes a "
                "minute to be noticed. Let the hosts of a run open TCP connections to each other",
                file=sys.stderr,
                flush=True,
            )
    return watch


def _addresses() -> list[str]:
    """By what others may reach this machine, the likeliest first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing: asks which interface leads out
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    found.append(socket.gethostname())
    try:
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError:
        pass
    return list(dict.fromkeys(found))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not all systems have all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # who reads the connection sees that it ended


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()


def _in_thread(function: Callable, *args: Any) -> None:
    threading.Thread(target=function, args=args, daemon=True, name="watching processes").start()

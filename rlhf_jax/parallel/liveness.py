"""Detects that another process of a run died: the others report it and end instead of hanging in a collective.

Process 0 listens, and every other process keeps one TCP connection to it. A process that ends sends a goodbye first; a
connection that closes without one belongs to a process that died. The system closes it at once, and if a whole machine
fails, TCP keepalive detects it within half a minute. Process 0 informs the others. A collective that waits for the dead
process cannot be cancelled, so a thread ends the process.
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

EXIT_DELAY = 3.0  # seconds from the message to the end of the process
ERROR_DELAY = 15.0  # seconds that the others have to end by themselves after one process reported an error
LINGER = 30.0  # seconds that a process with an error waits for the others: jax's coordinator ends with process 0
CONNECT_TIMEOUT = 5.0  # seconds of one attempt
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class PeerMonitor:
    """This process' connections to the others; made by `start`."""

    def __init__(self, index: int, count: int):
        """Not connected yet.

        Args:
          count: of processes.
        """
        self.me = {"process": index, "host": socket.gethostname(), "pid": os.getpid()}
        self._count = count
        self._lock = threading.Lock()
        self._present: dict[int, socket.socket] = {}  # processes that have not said goodbye
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self._reason: str | None = None
        self._verdict: dict[str, Any] | None = None  # process 0: who ended, as it told the others
        self._reported = threading.Event()  # that another process is gone

    # --- connections

    def listen(self, token: str) -> int:
        """Process 0: accepts connections with the token. Returns the port."""
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
            _in_thread(self._handshake, connection, token)

    def _handshake(self, connection: socket.socket, token: str) -> None:
        try:
            _keep_alive(connection)
            connection.settimeout(CONNECT_TIMEOUT)
            lines = connection.makefile("r", encoding="utf-8")
            hello = json.loads(lines.readline(1000))
            if hello.pop("token") != token:
                raise ValueError
            _send(connection, self.me)
            lines.readline(1000)[0]  # confirms: a process that gave up connecting must not count as dead
            connection.settimeout(None)
        except (OSError, ValueError, LookupError, AttributeError, TypeError):  # not a process of this run
            connection.close()
            return
        self._read(hello, connection, lines)

    def connect(self, addresses: list[str], port: int, token: str) -> str | None:
        """Other processes: connects to process 0 at the first address that works. Returns the problem, or None."""
        problem = None
        for address in addresses:
            connection = None
            try:
                connection = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT)
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
        """Reads one connection to its end."""
        said_goodbye = False
        with self._lock:
            self._present[member["process"]] = connection
            self._connections.append(connection)
            if self._verdict is not None:  # another process died while this one connected
                _send(connection, self._verdict)
        try:
            for line in lines:
                message = json.loads(line)
                if "bye" in message:
                    said_goodbye = True
                    self._leave(member)
                    if message["bye"] is not None:
                        self._ended(member, message["bye"])
                elif "go" in message:  # process 0 no longer waits, but lets this process end first
                    self._leave(member)
                else:
                    self._ended(message["member"], message["reason"])
        except (OSError, ValueError):
            pass
        self._leave(member)
        if not said_goodbye:
            self._ended(member, None)

    def _leave(self, member: dict[str, Any]) -> None:
        with self._lock:
            self._present.pop(member["process"], None)

    def _ended(self, member: dict[str, Any], reason: str | None) -> None:
        """A process ended with an error, or died (reason None): informs the others and ends this one."""
        if self.me["process"] == 0:
            verdict = {"member": member, "reason": reason}
            with self._lock:
                self._verdict = self._verdict or verdict
            self._broadcast(verdict)
        _in_thread(self._end_process, member, reason)

    def _end_process(self, member: dict[str, Any], reason: str | None) -> None:
        # Most errors occur on all processes, and then each reports its own.
        if self._closing.wait(0.0 if reason is None else ERROR_DELAY):
            if reason is None and self._reason is not None:
                # Only this process had an error and the others have ended: saving or closing with them would hang.
                time.sleep(EXIT_DELAY)
                print(f"error: {self._reason}", file=sys.stderr, flush=True)
                os._exit(1)
            return
        with self._lock:
            if self._reported.is_set():
                return
            what = "is gone" if reason is None else f"ended with an error: {reason}"
            who = f"process {member['process']} of {self._count} (host {member['host']}, pid {member['pid']})"
            print(
                f"error: {who} {what}\nerror: process {self.me['process']} ends too; "
                "rerun the command on every process to resume from the newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
            self._reported.set()
            if self.me["process"] == 0:
                # Process 0 ends last: when jax's coordinator ends, jax aborts the others with a stack trace.
                for connection in self._connections:
                    _send(connection, {"go": True})
        time.sleep(EXIT_DELAY if self.me["process"] else 2 * EXIT_DELAY)
        os._exit(1)  # the main thread may be in a collective that never returns

    def _broadcast(self, message: dict[str, Any]) -> None:
        with self._lock:
            for connection in self._present.values():
                _send(connection, message)

    def peer_died(self, timeout: float) -> bool:
        """Whether a peer died and was reported, waiting up to `timeout` seconds; False after `leave`."""
        return self._reported.wait(0.0 if self._closing.is_set() else timeout)

    # --- the end

    def leave(self, reason: str | None) -> None:
        """Sends the goodbye, once.

        Args:
          reason: the error of this process; the others end too. None: its work is done.
        """
        if not self._closing.is_set():
            self._reason = reason
            self._closing.set()
            self._broadcast({"bye": reason})

    def close(self, reason: str | None = None) -> None:
        """As `leave`; then waits up to LINGER seconds for the others, if there is a reason, and closes connections."""
        self.leave(reason)
        end = time.monotonic() + (0.0 if reason is None else LINGER)
        while self._present and time.monotonic() < end:
            time.sleep(0.05)
        with self._lock:
            for connection in self._connections:
                _close_socket(connection)
        if self._listener is not None:
            _close_socket(self._listener)


def start(index: int, count: int, from_first: Callable[[Callable[[], Any]], Any]) -> PeerMonitor:
    """Connects the processes of a run. Every process must call it.

    Args:
      count: of processes.
      from_first: returns on all processes what a function returns on the first.

    Returns:
      A PeerMonitor. One that cannot reach process 0 warns and monitors nothing; jax itself then detects a dead process,
      later.
    """
    monitor = PeerMonitor(index, count)

    def listen() -> dict[str, Any]:
        token = secrets.token_hex(16)
        return {"port": monitor.listen(token), "token": token, "addresses": _addresses(), "host": monitor.me["host"]}

    first = from_first(listen)
    if index:
        local = ["127.0.0.1"] if first["host"] == monitor.me["host"] else []
        problem = monitor.connect([*local, *first["addresses"]], first["port"], first["token"])
        if problem is not None:
            print(
                f"warning: process {index} cannot connect to process 0 ({problem}); a dead process will be noticed "
                "only after a minute. Allow TCP connections between the hosts of the run",
                file=sys.stderr,
                flush=True,
            )
    return monitor


def _addresses() -> list[str]:
    """Addresses of this machine for the other processes, the likeliest first."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing; selects the outgoing interface
            addresses.append(probe.getsockname()[0])
        except OSError:
            pass
    addresses.append(socket.gethostname())
    try:
        addresses += socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError:
        pass
    return list(dict.fromkeys(addresses))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # some systems lack some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # the thread that reads this connection notices its end


def _close_socket(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()


def _in_thread(function: Callable, *args: Any) -> None:
    threading.Thread(target=function, args=args, daemon=True, name="peer monitor").start()

"""The replicas of a switch: a stream of each one's state is held open, and its messages go to the router.

A stream that breaks makes its replica suspect at once: nothing new is sent there until another stream is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from math import inf
from time import monotonic
from urllib.parse import urlsplit

import orjson

from penstock.cluster.upstream import Address, Headers, connect, request_bytes
from penstock.gateway.background import end
from penstock.gateway.endpoints.state import PATH, SECRET_HEADER
from penstock.gateway.sessions.owners import tag_of
from penstock.priority.routing.router import Router
from penstock.priority.routing.state import Role, Snapshot, StateError, parse_change, parse_snapshot

log = logging.getLogger("penstock.switch")

AGAIN_S = 0.25
"""The pause before a stream that broke is opened again."""
SILENT_S = 5.0
"""The silence after which a stream is given up."""
_CHECKS = 5
"""The checks in that time. A switch whose own loop is held up makes none, and blames nobody."""
MAX_LINE_BYTES = 256 * 1024 * 1024
MOST_S = 0.5
"""The longest time that counts between two readings: the switch reads the clock four times a second."""


def parse_address(url: str) -> Address:
    """Returns the address in `http://HOST:PORT` or `https://HOST:PORT`.

    Raises:
        ValueError: the text is no such address.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or parts.path not in ("", "/"):
        raise ValueError(f"{url}: not like http://HOST:PORT or https://HOST:PORT")
    return Address(parts.hostname, port, is_tls=parts.scheme == "https")


LACK_S = 5.0
"""Replicas that start together have so much time to come before a role is missed."""
_LACKS = {
    Role.PREFILL: "all replicas have --role prefill: until one with decode or both is there, they serve whole requests",
    Role.DECODE: "all replicas have --role decode: until one with prefill or both is there, they compute prompts, too",
}


class AwakeClock:
    """A clock that stands still while the event loop is held up: what was not read meanwhile is not silence."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._read_s = clock()
        self._held_up_s = 0.0

    def __call__(self) -> float:
        """Returns seconds that never go back."""
        now_s = self._clock()
        self._held_up_s += max(0.0, now_s - self._read_s - MOST_S)
        self._read_s = now_s
        return now_s - self._held_up_s


@dataclass(slots=True)
class Member:
    """A replica whose state is known."""

    name: str
    tag: str
    address: Address
    is_draining: bool


class Members:
    """All replicas of a switch, known or not."""

    def __init__(
        self,
        router: Router,
        switch: str,
        secret: str,
        identity: str,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            switch: the name that tickets go by.
            identity: what every replica has to serve.
            clock: the router's.
        """
        self.live: dict[str, Member] = {}
        """The replicas whose state is known, by name."""
        self._router = router
        self._switch = switch
        self._secret = secret
        self._identity = identity
        self._block_size = block_size
        self._clock = clock
        self._tasks: dict[Address, asyncio.Task[None]] = {}
        self._last_lines: dict[Address, str] = {}
        """The last line of the log about each replica."""
        self._lack = ""
        """What there is to say of a role that nobody has."""
        self._lacked_s = inf
        """The time since which that is so; infinite once it was said."""

    @contextlib.asynccontextmanager
    async def running(self, addresses: Iterable[Address]) -> AsyncIterator[None]:
        await self.set(addresses)
        try:
            yield
        finally:
            await self.set(())

    async def set(self, addresses: Iterable[Address]) -> None:
        """Makes these the addresses of all replicas."""
        wanted = set(addresses)
        for address in wanted - self._tasks.keys():
            self._tasks[address] = asyncio.create_task(self._keep_listening(address))
        for address in self._tasks.keys() - wanted:
            await end(self._tasks.pop(address))

    async def _keep_listening(self, address: Address) -> None:
        while True:
            self._log_news(address, await self._listen(address))
            await asyncio.sleep(AGAIN_S)

    async def _listen(self, address: Address) -> str:
        """Takes the messages of a replica; returns the reason when its stream is over."""
        headers: Headers = [(SECRET_HEADER.encode(), self._secret.encode())]
        target = f"{PATH}?switch={self._switch}".encode()
        stream = _StateStream()
        try:
            upstream = await connect(address, request_bytes("GET", target, address, headers, b""), stream)
        except ssl.SSLCertVerificationError as error:
            return f"its certificate is not to be trusted: {error.verify_message}"
        except ssl.SSLError:
            return "it does not speak TLS"
        except OSError:
            return "nobody listens there"
        name, num_silent = "", 0
        try:
            while num_silent < _CHECKS:
                heard_s = upstream.heard_s
                try:
                    # Not `wait_for`: until Python 3.12 it forgets that it was cancelled if what it waits for has come.
                    async with asyncio.timeout(SILENT_S / _CHECKS):
                        line = await stream.lines.readline()
                except TimeoutError:
                    num_silent = num_silent + 1 if upstream.heard_s == heard_s else 0
                    continue
                except ValueError:
                    return "what it says of itself is too long"
                if not line.endswith(b"\n"):
                    return stream.reason
                num_silent, name = 0, self._take(address, line, name)
            return "it says nothing any more"
        except StateError as error:
            return str(error)
        finally:
            upstream.close()
            if name:
                self.live.pop(name, None)
                self._router.on_gone(name)

    def _take(self, address: Address, line: bytes, name: str) -> str:
        """Takes one message, and returns the replica's name, which is "" before the first one; raises StateError."""
        try:
            message = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise StateError("what it says of itself is no JSON") from None
        if not name:
            return self._enter(address, parse_snapshot(message))
        change = parse_change(message)
        self._router.on_change(name, change, self._clock())
        if change.load is not None:
            self.live[name].is_draining = change.load.is_draining
        return name

    def _enter(self, address: Address, snapshot: Snapshot) -> str:
        """Takes in a replica, and returns its name; raises StateError if it does not fit."""
        name = snapshot.replica
        if snapshot.model != self._identity:
            raise StateError(f"it serves {snapshot.model}, and this switch is for {self._identity}")
        if snapshot.block_size != self._block_size:
            raise StateError(f"its blocks have {snapshot.block_size} tokens, not {self._block_size}")
        if name in self.live:
            raise StateError(f"another replica is called {name}, too; set --replica")
        self._router.on_snapshot(snapshot, self._clock())
        self.live[name] = Member(name, tag_of(name), address, snapshot.load.is_draining)
        self._log_news(address, "")
        return name

    def look_over(self) -> None:
        """Writes a line into the log if nobody has had a role for a while; called now and then."""
        now, roles = self._clock(), {replica.role for replica in self._router.replicas.values()}
        lack = _LACKS.get(roles.pop(), "") if len(roles) == 1 else ""
        if lack != self._lack:
            self._lack, self._lacked_s = lack, now
        if lack and now - self._lacked_s >= LACK_S:
            log.warning("%s", lack)
            self._lacked_s = inf

    def _log_news(self, address: Address, reason: str) -> None:
        """Writes a line into the log if something changed."""
        if self._last_lines.get(address) != reason:
            self._last_lines[address] = reason
            if reason:
                log.warning("replica %s is left out: %s", address, reason)
            else:
                log.info("replica %s is there", address)


class _StateStream:
    """A stream of messages, one a line; a `cluster.upstream.ReplyListener`."""

    def __init__(self) -> None:
        self.lines = asyncio.StreamReader(MAX_LINE_BYTES)
        self._status = 0

    def on_head(self, status: int, headers: Headers) -> None:  # noqa: ARG002
        self._status = status

    def on_body(self, body: bytes) -> None:
        if self._status == 200:
            self.lines.feed_data(body)

    def on_end(self, *, is_whole: bool) -> None:  # noqa: ARG002
        self.lines.feed_eof()

    @property
    def reason(self) -> str:
        """Why the stream has ended."""
        reasons = {
            0: "it hung up",
            200: "it hung up",
            401: "it does not take this switch's secret",
            404: "it was started without a cluster secret",
            503: "it is not ready",
        }
        return reasons.get(self._status, f"it answers with status {self._status}")

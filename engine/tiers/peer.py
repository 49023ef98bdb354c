"""A tier that is other servers: it reads blocks from a replica of the same cluster that was said to hold them.

Nothing is looked for: `expect` says which server has which blocks. A read costs a bounded time, whatever that server
does: it may be silent for `SILENT_S`, or `BUSY_S` while it computes the prompt whose blocks they are, and an answer
takes no longer than `ANSWER_S`. Then, or after an answer that is not the blocks that were asked for, the chain is given
up and the server left alone for `SHUN_S`; whoever wanted the blocks computes them.

A block is checked against the digest of this server's weights and layout, against its own hash and its checksum. That
the keys and values in it are those of its tokens cannot be checked: here the other server is trusted as one that knows
the cluster's secret.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR, socket
from threading import Lock, Timer
from time import monotonic
from urllib.parse import urlsplit

from penstock.engine.tiers.block_file import HEADER_BYTES, BadBlock, BlockKey, Payload, length_of, unpack
from penstock.engine.tiers.rates import ReadRate
from penstock.engine.tiers.tier import TierStats

log = logging.getLogger("penstock.engine")

PATH = "/internal/kv"
"""The path below which a server gives its blocks: `PATH/DIGEST/KEY,KEY,...`."""
SILENT_S = 1.0
"""The longest silence of a server before it has answered, and within its answer."""
BUSY_S = 3.0
"""The same of a server that computes the blocks' prompt meanwhile: it gives blocks between its steps."""
ANSWER_S = 4.0
"""The longest time of one answer, which has a few blocks of a chain."""
EXPECT_S = 60.0
"""The time for which a server is taken to have what it was said to have."""
SHUN_S = 5.0
"""The time for which nothing is expected from a server that failed."""
MAX_KEYS = 128
"""The most blocks of one request."""
_REQUEST_BYTES = 64 << 20
"""The most bytes of them, but for one block."""
NOMINAL_RATE = 125e6
"""Bytes a second that are expected before anything was read: a link of 1 Gbit/s."""
_MAX_EXPECTED = 1 << 17
"""Blocks that may be expected at a time."""
_KEPT = 0.9
"""The part of what was measured before that still counts after another request."""
_PART = 1 << 20


@dataclass(slots=True, eq=False)
class _Pull:
    """A chain of blocks that one server is said to have."""

    source: str
    keys: Sequence[BlockKey]
    until_s: float
    """The time at which it is given up."""
    is_busy: bool
    """The server computes their prompt meanwhile."""
    lock: Lock = field(default_factory=Lock)
    """Held while a request for some of them is on its way."""
    come: dict[BlockKey, Payload] = field(default_factory=dict)
    """The blocks that have come and were not read yet."""


class PeerTier:
    """The blocks of other servers; a `tier.Tier`."""

    name = "peer"
    keeps = False

    def __init__(
        self,
        digest: bytes,
        block_bytes: int,
        headers: Mapping[str, str],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            block_bytes: of the largest payload.
            headers: of every request; they show that this server belongs to the cluster.
        """
        self._digest = digest
        self._block_bytes = block_bytes
        self._most_keys = max(1, min(MAX_KEYS, _REQUEST_BYTES // max(1, block_bytes)))
        self._headers = dict(headers)
        self._clock = clock
        self.read_rate = ReadRate()
        self._lock = Lock()
        self._pulls: dict[BlockKey, _Pull] = {}
        self._shunned: dict[str, float] = {}
        """The times until which servers that failed are left alone."""
        self._recent_bytes = self._recent_s = 0.0
        self._num_hits = self._num_misses = self._num_failures = self._num_bytes = 0
        self._seconds = 0.0

    def expect(self, source: str, keys: Sequence[BlockKey], *, is_busy: bool = False) -> None:
        """Says that a server, at `http://HOST:PORT` or `https://HOST:PORT`, has a chain of blocks; for any thread.

        What is expected from it already goes on as it is. `is_busy` says that it still computes their prompt.
        """
        now = self._clock()
        with self._lock:
            for key in [key for key, pull in self._pulls.items() if pull.until_s <= now]:
                del self._pulls[key]
            if self._shunned.get(source, 0.0) > now or len(self._pulls) + len(keys) > _MAX_EXPECTED:
                return
            self._shunned.pop(source, None)
            new = [key for key in keys if not self._is_from(source, key)]
            pull = _Pull(source, new, now + EXPECT_S, is_busy)
            self._pulls.update(dict.fromkeys(new, pull))

    @property
    def rate(self) -> float:
        """Bytes a second that requests brought lately, one at a time."""
        with self._lock:
            return self._recent_bytes / self._recent_s if self._recent_s else NOMINAL_RATE

    # As a tier

    def has(self, key: BlockKey) -> bool:
        pull, now = self._pulls.get(key), self._clock()
        if pull is None or pull.until_s <= now:
            return False
        return key in pull.come or self._shunned.get(pull.source, 0.0) <= now

    def read(self, key: BlockKey) -> Payload | None:
        pull = self._pulls.get(key)
        if pull is None:
            return None
        with pull.lock:
            if key not in pull.come and self.has(key):
                self._fetch(pull, key)
            payload = pull.come.pop(key, None)
        self.forget(key)
        with self._lock:
            self._num_hits += payload is not None
            self._num_misses += payload is None
        return payload

    def write(self, key: BlockKey, payload: Payload) -> None:
        """Keeps nothing: every server has tiers of its own."""

    def forget(self, key: BlockKey) -> None:
        with self._lock:
            self._pulls.pop(key, None)

    def look_over(self) -> None:
        """Does nothing: what others hold is said by `expect`."""

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                bytes_read=self._num_bytes,
                read_seconds=self._seconds,
                num_failures=self._num_failures,
            )

    def close(self) -> None:
        with self._lock:
            self._pulls.clear()

    # Reading

    def _fetch(self, pull: _Pull, key: BlockKey) -> None:
        """Asks for a block and those after it; if that fails, the whole chain is given up."""
        first = pull.keys.index(key)
        keys = pull.keys[first : first + self._most_keys]
        began_s, num_bytes, num_before = self._clock(), 0, 0
        try:
            for one, payload in self._ask(pull, keys):
                pull.come[one] = payload
                num_bytes += len(payload)
                if pull.is_busy and not num_before:  # until the first block came, the server was in a step
                    began_s, num_before = self._clock(), num_bytes
        except (OSError, HTTPException, ValueError) as error:
            log.warning(
                "no KV from %s, it is computed instead: %s", pull.source, error or type(error).__name__
            )
            self._give_up(pull)
        if not all(map(pull.come.__contains__, keys)):
            self._drop(pull)
        self._note(num_bytes, num_bytes - num_before, self._clock() - began_s)

    def _is_from(self, source: str, key: BlockKey) -> bool:
        pull = self._pulls.get(key)
        return pull is not None and pull.source == source

    def _ask(self, pull: _Pull, keys: Sequence[BlockKey]) -> Iterator[tuple[BlockKey, Payload]]:
        """Yields the blocks that a server has, from the first of these on to the first that it does not have.

        Raises:
            OSError, HTTPException, ValueError: it brings none in time, or others (BadBlock).
        """
        names = ",".join(key.text for key in keys)
        path = f"{PATH}/{self._digest.hex()}/{names}"
        with _answer(pull.source, path, self._headers, BUSY_S if pull.is_busy else SILENT_S) as body:
            for key in keys:
                head = _exactly(body, HEADER_BYTES)
                if not head:
                    return
                size = length_of(head)
                if size > self._block_bytes:
                    raise BadBlock(f"{size} bytes in place of at most {self._block_bytes}")
                yield key, unpack(head + _exactly(body, size), key, self._digest)

    def _give_up(self, pull: _Pull) -> None:
        with self._lock:
            self._num_failures += 1
            self._shunned[pull.source] = self._clock() + SHUN_S

    def _drop(self, pull: _Pull) -> None:
        """Expects nothing more of a chain but what has come."""
        with self._lock:
            for key in pull.keys:
                if self._pulls.get(key) is pull and key not in pull.come:
                    del self._pulls[key]

    def _note(self, num_bytes: int, num_timed: int, seconds: float) -> None:
        """Notes what a request brought, and in how much time the last `num_timed` bytes of it came."""
        with self._lock:
            self._num_bytes += num_bytes
            self._seconds += seconds
            self._recent_bytes = _KEPT * self._recent_bytes + num_timed
            self._recent_s = _KEPT * self._recent_s + seconds
            if num_timed:
                self.read_rate.note(num_timed, seconds, self._clock())


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@contextmanager
def _answer(source: str, path: str, headers: Mapping[str, str], silent_s: float) -> Iterator[HTTPResponse]:
    """Enters the answer to a request, whose connection is cut off after `ANSWER_S`, or a silence of `silent_s`."""
    parts = urlsplit(source)
    assert parts.hostname is not None
    connection = (
        HTTPSConnection(parts.hostname, parts.port, timeout=silent_s, context=_tls())
        if parts.scheme == "https"
        else HTTPConnection(parts.hostname, parts.port, timeout=silent_s)
    )
    connection.connect()
    cut_off = Timer(ANSWER_S, _shut, (connection.sock,))
    cut_off.daemon = True
    cut_off.start()
    try:
        connection.request("GET", path, headers={**headers, "connection": "close"})
        response = connection.getresponse()
        if response.status != 200:
            raise HTTPException(f"status {response.status}")
        if response.length is None:
            raise HTTPException("an answer that does not say its length, or was cut off")
        yield response
    finally:
        cut_off.cancel()
        connection.close()


def _shut(sock: socket) -> None:
    with suppress(OSError):
        sock.shutdown(SHUT_RDWR)


def _exactly(body: HTTPResponse, num_bytes: int) -> bytearray:
    """Returns the next bytes of an answer, or none at its end; raises BadBlock if it ends between."""
    data = bytearray()
    while len(data) < num_bytes:
        part = body.read1(min(_PART, num_bytes - len(data)))
        if not part:
            if data or body.length:
                raise BadBlock("the answer ends before its end")
            break
        data += part
    return data

"""KV that moves between this replica and the others of its cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.engine.planning.request import Request
from penstock.engine.tiers.block_file import BlockKey, Payload

READ_S = 2.0
"""The longest time that another replica waits for blocks from here: an engine that hangs gives none."""


class KvExchange(Protocol):
    """The blocks that this replica gives to others, and takes from them."""

    @property
    def digest(self) -> bytes:
        """What gives the blocks their meaning, see `block_file.digest_of`; empty if none are exchanged."""

    @property
    def tokens_per_s(self) -> float:
        """The rate at which blocks come from other replicas; 0 if none can."""

    async def read(self, keys: Sequence[BlockKey]) -> Sequence[Payload]:
        """Returns the payloads of the first of these blocks, up to the first that is not here."""

    def expect(self, source: str, hashes: Sequence[bytes]) -> None:
        """Says that the replica at an address holds the blocks with these hashes, which a request is about to need."""

    def pull(self, source: str, prompt: Request, first: int, end: int) -> None:
        """Begins to take the blocks from `first` to before `end` of a prompt, from a replica that computes the rest.

        No request for the prompt is here yet; the one that comes finds them as it finds what was computed here.
        """


class ExchangingEngine(Protocol):
    """The part of `engine.engine.Engine` that exchanges blocks."""

    @property
    def kv_digest(self) -> bytes: ...

    @property
    def pull_rate(self) -> float: ...

    def give(self, keys: Sequence[BlockKey], done: Callable[[list[Payload]], object]) -> None: ...

    def expect_from(self, source: str, hashes: Sequence[bytes], *, is_busy: bool = False) -> None: ...

    def expect(self, requests: Sequence[Request]) -> None: ...

    def wake(self) -> None: ...


class EngineExchange:
    """The blocks of an engine; a KvExchange."""

    def __init__(self, engine: ExchangingEngine) -> None:
        self._engine = engine

    @property
    def digest(self) -> bytes:
        return self._engine.kv_digest

    @property
    def tokens_per_s(self) -> float:
        return self._engine.pull_rate

    async def read(self, keys: Sequence[BlockKey]) -> Sequence[Payload]:
        loop = asyncio.get_running_loop()
        given: asyncio.Future[list[Payload]] = loop.create_future()

        def take(payloads: list[Payload]) -> None:
            if not given.done():
                given.set_result(payloads)

        self._engine.give(keys, lambda payloads: loop.call_soon_threadsafe(take, payloads))
        try:
            async with asyncio.timeout(READ_S):
                return await given
        except TimeoutError:
            return []

    def expect(self, source: str, hashes: Sequence[bytes]) -> None:
        self._engine.expect_from(source, hashes)

    def pull(self, source: str, prompt: Request, first: int, end: int) -> None:
        self._engine.expect_from(source, prompt.block_hashes[first:end], is_busy=True)
        self._engine.expect([prompt])
        self._engine.wake()

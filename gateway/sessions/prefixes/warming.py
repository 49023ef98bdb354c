"""Prefixes that were hot before a restart are computed again, for their KV alone, while nobody needs the engine."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.engine.planning.prefix_index import block_hash, chain_start
from penstock.engine.planning.request import Output, Request, SamplingParams
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.reply.generation import Generation
from penstock.gateway.sessions.prefixes.tracker import PrefixTracker
from penstock.gateway.store.interface import Durable, PrefixChange, StoreUnavailable
from penstock.priority.lanes import Lane

log = logging.getLogger("penstock.gateway")

MAX_WARMED_BLOCKS = 4_096
"""The store is asked for so many blocks at most, however many tokens may be computed again."""
TENANT = "warm-up"
"""The tenant that is charged for it in the queue."""


class Warming(Generation):
    """A Warming computes one prompt once; its only output token is thrown away."""

    def __init__(self, token_ids: Sequence[int], salt: bytes, now: float) -> None:
        request = Request(
            request_id=f"warm-up-{secrets.token_hex(8)}",
            prompt_token_ids=tuple(token_ids),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            arrival_s=now,
            lane=Lane.BATCH,
            tenant=TENANT,
            salt=salt,
        )
        super().__init__([request])
        self._over = asyncio.Event()

    async def over(self) -> None:
        """Returns when it has ended; raises its exception if it failed."""
        await self._over.wait()
        if self.error is not None:
            raise self.error

    def receive(self, output: Output) -> None:  # noqa: ARG002
        if self.ended:
            self._over.set()

    def wake(self) -> None:
        self._over.set()

    def look_after(self, now: float, timeouts: Timeouts) -> None:
        """Does nothing, for nobody waits for it."""


@dataclass(frozen=True, slots=True)
class WarmPrefix:
    """A WarmPrefix is a chain that was hot before a restart."""

    blocks: tuple[PrefixChange, ...]
    """The blocks of the chain, from its start on."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt that leaves exactly these blocks in the cache."""
        return [token_id for block in self.blocks for token_id in block.token_ids]

    @property
    def salt(self) -> bytes:
        return self.blocks[0].salt


def choose_prefixes(
    blocks: Sequence[PrefixChange], max_tokens: int, block_size: int
) -> tuple[list[WarmPrefix], int]:
    """Chooses whole chains, the hottest first, and says how many tokens they are together.

    What several chains have in common counts once. Chains that are broken, or of another block size, are left out.
    """
    known = {block.hash: block for block in blocks if _is_sound(block, block_size)}
    chosen: list[WarmPrefix] = []
    taken: set[bytes] = set()
    for end in sorted(_ends(known), key=lambda block: block.hotness, reverse=True):
        chain = _chain(known, end)
        new = [block.hash for block in chain if block.hash not in taken]
        if new and (len(taken) + len(new)) * block_size <= max_tokens:
            chosen.append(WarmPrefix(chain))
            taken.update(new)
    return chosen, len(taken) * block_size


def _ends(known: dict[bytes, PrefixChange]) -> Iterable[PrefixChange]:
    """The blocks at which hits ended: fewer went on to any one child, or there is none."""
    passed_on: dict[bytes, int] = {}
    for block in known.values():
        if block.parent is not None:
            passed_on[block.parent] = max(block.hits, passed_on.get(block.parent, 0))
    return (block for block in known.values() if block.hits > passed_on.get(block.hash, -1))


def _is_sound(block: PrefixChange, block_size: int) -> bool:
    """Returns whether the block's tokens have its hash."""
    parent = chain_start(block.salt) if block.parent is None else block.parent
    return len(block.token_ids) == block_size and block_hash(parent, block.token_ids) == block.hash


def _chain(known: dict[bytes, PrefixChange], end: PrefixChange) -> tuple[PrefixChange, ...]:
    """The chain from its start to `end`; empty if there is a gap."""
    chain = [end]
    while chain[-1].parent is not None:
        parent = known.get(chain[-1].parent)
        if parent is None:
            return ()
        chain.append(parent)
    return tuple(reversed(chain))


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A WarmUp computes the hottest prefixes again after a restart, one at a time, while nobody needs the engine."""

    submit: Callable[[list[int], bytes], Awaitable[None]]
    """Runs a request with this prompt and salt for one token in the last lane, and returns when it has ended.

    It is cancelled when somebody comes, and then has to cancel its request.
    """
    is_idle: Callable[[], bool]
    """Returns False while a request waits or runs that `submit` did not make."""
    block_size: int
    max_tokens: int
    poll_s: float = 0.02
    clock: Callable[[], float] = time.monotonic

    async def run(self, store: Durable, tracker: PrefixTracker) -> None:
        """Computes the prefixes once the engine is ready; logs the result, and raises nothing."""
        limit = min(self.max_tokens // self.block_size, MAX_WARMED_BLOCKS)
        if limit <= 0:
            return
        try:
            blocks = await store.hottest(limit)
        except StoreUnavailable as error:
            log.warning("no prefixes are computed again: %s", error or "the store does not answer")
            return
        prefixes, num_tokens = choose_prefixes(blocks, self.max_tokens, self.block_size)
        if not prefixes:
            return
        tracker.remember(blocks)
        log.info("computing %d prefixes of before again, %d tokens", len(prefixes), num_tokens)
        started = self.clock()
        done = [prefix for prefix in prefixes if await self._compute(prefix)]
        num_done = len({block.hash for prefix in done for block in prefix.blocks}) * self.block_size
        seconds = self.clock() - started
        log.info("computed %d prefixes again, %d tokens in %.1f s", len(done), num_done, seconds)

    async def _compute(self, prefix: WarmPrefix) -> bool:
        """Computes a prefix, again after every interruption: the finished part is found in the cache."""
        while True:
            while not self.is_idle():
                await asyncio.sleep(self.poll_s)
            try:
                if await self._compute_undisturbed(prefix):
                    return True
            except Exception as error:
                log.warning("a prefix of %d tokens is not computed again: %s", len(prefix.token_ids), error)
                return False

    async def _compute_undisturbed(self, prefix: WarmPrefix) -> bool:
        """Computes a prefix; False if somebody came in between."""
        task = asyncio.ensure_future(self.submit(prefix.token_ids, prefix.salt))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self.poll_s)
                if not task.done() and not self.is_idle():
                    return False
            task.result()
            return True
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

"""Shares the cached prefixes of replicas by way of the store, and computes the hottest again after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from penstock.engine.planning.prefix_index import PRIVATE, block_hash, chain_start, prompt_hashes
from penstock.gateway.background import every, meanwhile
from penstock.gateway.errors import invalid
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.reply.prompt_only import PromptOnly
from penstock.gateway.sessions.prefixes.tracker import PrefixTracker
from penstock.gateway.store.interface import Durable, PrefixChange, StoreUnavailable
from penstock.priority.lanes import Lane

log = logging.getLogger("penstock.gateway")

MAX_WARMED_BLOCKS = 4_096
"""The store is asked for so many blocks at most, however many tokens may be computed again."""
TENANT = "warm-up"
"""The tenant that is charged for it in the queue."""


@dataclass(slots=True)
class PrefixWriter:
    """A PrefixWriter tells the store what changed, a batch at a time, whatever state the store is in."""

    tracker: PrefixTracker
    store: Durable
    with_tokens: bool = True
    """Without tokens, replicas see each other's prefixes, but nothing can be recomputed from the store."""
    every_s: float = 0.1
    max_changes: int = 200
    num_losses: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_losses = self.store.num_losses

    def running(self) -> AbstractAsyncContextManager[None]:
        """Writes changes as they come, while it is entered."""
        return meanwhile(every(self.every_s, self.write, "writing what is cached"))

    async def write(self) -> None:
        """Writes one batch. What cannot be written now is kept for later."""
        if self.store.num_losses != self.num_losses:
            self.num_losses = self.store.num_losses
            self.tracker.rewrite()
        changes = self.tracker.changes(self.max_changes)
        if not changes:
            return
        try:
            await self.store.write_prefixes([self._without_secrets(change) for change in changes])
        except BaseException as error:
            self.tracker.failed(changes)
            if not isinstance(error, StoreUnavailable):
                raise

    def _without_secrets(self, change: PrefixChange) -> PrefixChange:
        if self.with_tokens and not change.salt.endswith(PRIVATE):
            return change
        return replace(change, token_ids=())


@dataclass(frozen=True, slots=True)
class PrefixLocator:
    """A PrefixLocator finds the replicas that hold the beginning of a prompt."""

    store: Durable | None
    replica: str
    block_size: int
    find_cached: Callable[[Sequence[bytes], Sequence[int]], tuple[int, int]]
    """The engine's: about itself it knows better than the store."""

    async def locate(self, salt: bytes, token_ids: Sequence[int]) -> dict[str, object]:
        """The part of this prompt that each replica would find, the best replica first; this one is always among them.

        A prompt never finds the block of its last token: its logits are needed.
        """
        hashes = await off_loop(TOKEN_BYTES * len(token_ids), prompt_hashes, token_ids, self.block_size, salt)
        held = await self._held_elsewhere(hashes)
        cached = {replica: count * self.block_size for replica, count in held.items()}
        cached[self.replica] = self.find_cached(hashes, token_ids)[0]
        best_first = sorted(cached, key=lambda name: (-cached[name], name != self.replica, name))
        return {
            "object": "prefix.location",
            "block_size": self.block_size,
            "num_tokens": len(token_ids),
            "replicas": [
                {"replica": name, "num_cached_tokens": cached[name], "this": name == self.replica}
                for name in best_first
            ],
        }

    async def _held_elsewhere(self, hashes: Sequence[bytes]) -> dict[str, int]:
        if self.store is None or not hashes:
            return {}
        try:
            return await self.store.locate(hashes)
        except StoreUnavailable:
            return {}


def parse_token_ids(text: str, field: str = "tokens") -> list[int]:
    """Reads token ids that are separated by commas; raises 400 if it is anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise invalid(f"'{field}' must be token ids separated by commas.", field) from None


# Computed again after a restart, for their KV alone, while nobody needs the engine


class Warming(PromptOnly):
    """A prompt that was hot before a restart."""

    def __init__(self, token_ids: Sequence[int], salt: bytes, now: float) -> None:
        super().__init__(token_ids, salt, now, lane=Lane.BATCH, tenant=TENANT)


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
    by_hash = {block.hash: block for block in blocks if _is_sound(block, block_size)}
    chosen: list[WarmPrefix] = []
    taken: set[bytes] = set()
    for end in sorted(_ends(by_hash), key=lambda block: block.hotness, reverse=True):
        chain = _chain(by_hash, end)
        new = [block.hash for block in chain if block.hash not in taken]
        if new and (len(taken) + len(new)) * block_size <= max_tokens:
            chosen.append(WarmPrefix(chain))
            taken.update(new)
    return chosen, len(taken) * block_size


def _ends(by_hash: dict[bytes, PrefixChange]) -> Iterable[PrefixChange]:
    """The blocks at which hits ended: fewer went on to any one child, or there is none."""
    passed_on: dict[bytes, int] = {}
    for block in by_hash.values():
        if block.parent is not None:
            passed_on[block.parent] = max(block.hits, passed_on.get(block.parent, 0))
    return (block for block in by_hash.values() if block.hits > passed_on.get(block.hash, -1))


def _is_sound(block: PrefixChange, block_size: int) -> bool:
    """Returns whether the block's tokens have its hash."""
    parent = chain_start(block.salt) if block.parent is None else block.parent
    return len(block.token_ids) == block_size and block_hash(parent, block.token_ids) == block.hash


def _chain(by_hash: dict[bytes, PrefixChange], end: PrefixChange) -> tuple[PrefixChange, ...]:
    """The chain from its start to `end`; empty if there is a gap."""
    chain = [end]
    while chain[-1].parent is not None:
        parent = by_hash.get(chain[-1].parent)
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

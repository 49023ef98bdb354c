"""Which prefixes are cached here, told to the store, found again in it, and computed again after a restart.

All of it is a hint: what a request really finds is decided by the engine's index alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import islice
from typing import TypeVar

from engine.planning.prefix_events import Cleared, Dropped, Found, PrefixEvent, Stored
from engine.planning.prefix_index import block_hash, chain_start, extend_hashes
from gateway.http.background import meanwhile
from gateway.http.errors import invalid
from gateway.store.interface import Durable, PrefixChange, StoreUnavailable
from gateway.store.packing import TOKEN_BYTES, pack_tokens, unpack_tokens

log = logging.getLogger("penstock.gateway")

_Counted = TypeVar("_Counted", int, bytes)

PRIVATE = b"\0private"
"""Salts with this end are of prompts whose tokens stay in this process."""
MAX_TRACKED = 100_000
MAX_RECENT = 1_000
"""Of each salt: ends of chains and blocks at which a hit ended, the candidates for the hottest ones."""
PASS_ON_S = 60.0
"""How often a block tells its parent of its hits: the blocks of a long chain are not all looked at with every hit."""
MAX_WARMED_BLOCKS = 4_096
"""Asked of the store at once, however many tokens may be computed again."""


@dataclass(slots=True)
class _Block:
    parent: bytes | None
    depth: int
    token_ids: bytes
    """Packed: a hundred thousand tuples of numbers would be large."""
    salt: bytes
    hits: int
    last_used_s: float
    written: bool = False
    """The store may know it."""
    owed: int = 0
    """Hits that its parent was not told of yet."""
    passed_on_s: float = -math.inf
    """When it told its parent of its hits."""
    is_end: bool = False
    """A hit ended here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """A prefix as the operator sees it, by its last block."""

    leaf: bytes
    salt: bytes
    num_tokens: int
    hits: int
    last_used_s: float
    """In seconds since 1970."""


class BlockChanges:
    """Blocks that came and went since somebody last took them out."""

    def __init__(self, salts: Collection[bytes]) -> None:
        self._salts = salts
        self.stored: dict[bytes, None] = {}
        self.removed: dict[bytes, None] = {}

    def note(self, known: bytes, salt: bytes, *, resident: bool) -> None:
        """What came and went in between is no change."""
        if salt in self._salts:
            of, other = (self.stored, self.removed) if resident else (self.removed, self.stored)
            if other.pop(known, self) is self:
                of[known] = None


class PrefixTracker:
    """Every chain that is resident in this process's cache, as its engine's reports tell it. For the event loop."""

    def __init__(self, *, max_blocks: int = MAX_TRACKED, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970: what it says outlives the process."""
        self.num_hits = 0
        """Sequences that began with blocks that were there."""
        self.num_untracked = 0
        """Blocks that were resident, and were given up here since there were too many."""
        self._max_blocks = max_blocks
        self._clock = clock
        self._blocks: dict[bytes, _Block] = {}
        self._num_children: dict[bytes, int] = {}
        self._leaves: OrderedDict[bytes, None] = OrderedDict()
        """Blocks without a child, the one used longest ago first."""
        self._recent: dict[bytes, OrderedDict[bytes, None]] = {}
        """By salt, the one used longest ago first."""
        self._num_at_depth: dict[int, int] = {}
        self._dirty: dict[bytes, None] = {}
        self._gone: dict[bytes, _Block] = {}
        """No longer resident, which the store does not know yet."""
        self._remembered: dict[bytes, int] = {}
        self._listeners: dict[BlockChanges, None] = {}

    @contextlib.contextmanager
    def listening(self, salts: Collection[bytes]) -> Iterator[BlockChanges]:
        """The blocks of these salts: first those that are there, then, while this is entered, what comes and goes."""
        changes = BlockChanges(salts)
        for known, block in self._blocks.items():
            changes.note(known, block.salt, resident=True)
        self._listeners[changes] = None
        try:
            yield changes
        finally:
            del self._listeners[changes]

    def take(self, events: Iterable[PrefixEvent]) -> None:
        """What a step's report says; to be called with every report, in order."""
        for event in events:
            if isinstance(event, Stored):
                self._add(event)
            elif isinstance(event, Found):
                self._note_hit(event.hash)
            elif isinstance(event, Dropped):
                self._remove(event.hash)
            else:
                assert isinstance(event, Cleared)
                for known in list(self._blocks):
                    self._remove(known)

    def remember(self, blocks: Iterable[PrefixChange]) -> None:
        """Hits from before a restart, for blocks that are about to come back."""
        self._remembered = {block.hash: block.hits for block in blocks}

    # What there is

    @property
    def num_tracked(self) -> int:
        return len(self._blocks)

    @property
    def deepest(self) -> int:
        """Blocks in the longest chain."""
        return max(self._num_at_depth, default=0)

    @property
    def num_unwritten(self) -> int:
        """Changes that the store has not heard of."""
        return len(self._dirty) + len(self._gone)

    def num_resident(self, hashes: Iterable[bytes]) -> int:
        """How many of a chain's first blocks are resident."""
        count = 0
        for known in hashes:
            if known not in self._blocks:
                break
            count += 1
        return count

    def hottest(self, limit: int, salts: Iterable[bytes]) -> list[HotPrefix]:
        """Prefixes of these salts that were found most, and last; chains that were never found come after them."""
        candidates = [known for salt in salts for known in self._recent.get(salt, ())]
        best = nlargest(limit, candidates, key=self._heat)
        return [self._hot(leaf, self._blocks[leaf]) for leaf in best]

    def _heat(self, known: bytes) -> tuple[int, float, int]:
        block = self._blocks[known]
        return block.hits, block.last_used_s, block.depth

    def _hot(self, leaf: bytes, block: _Block) -> HotPrefix:
        num_tokens = block.depth * _num_tokens(block)
        return HotPrefix(
            leaf=leaf, salt=block.salt, num_tokens=num_tokens, hits=block.hits, last_used_s=block.last_used_s
        )

    # What the store does not know yet

    def changes(self, limit: int) -> list[PrefixChange]:
        """Takes out at most so many changes: what is gone first, then what is resident, in order."""
        gone = list(islice(self._gone, limit))
        brought = [_change(known, self._gone.pop(known), resident=False) for known in gone]
        for known in list(islice(self._dirty, limit - len(brought))):
            del self._dirty[known]
            block = self._blocks[known]
            block.written = True
            brought.append(_change(known, block, resident=True))
        return brought

    def failed(self, changes: Iterable[PrefixChange]) -> None:
        """Puts back changes that could not be written, as far as nothing newer is known."""
        for change in changes:
            if change.hash in self._blocks:
                self._dirty[change.hash] = None
            elif change.hash not in self._gone:
                self._note_gone(change.hash, _block(change))

    def rewrite(self) -> None:
        """The store may have lost anything: all that is resident is to be written again."""
        self._dirty = dict.fromkeys(self._blocks)

    def _note_gone(self, known: bytes, block: _Block) -> None:
        self._gone[known] = block
        if len(self._gone) > self._max_blocks:
            del self._gone[next(iter(self._gone))]

    # Events

    def _add(self, event: Stored) -> None:
        known = event.hash
        if known in self._blocks:
            return
        self._blocks[known] = _Block(
            parent=event.parent,
            depth=event.depth,
            token_ids=pack_tokens(event.token_ids),
            salt=event.salt,
            hits=self._remembered.pop(known, 0),
            last_used_s=self._clock(),
            written=self._gone.pop(known, None) is not None,
        )
        self._num_at_depth[event.depth] = self._num_at_depth.get(event.depth, 0) + 1
        self._dirty[known] = None
        for changes in self._listeners:
            changes.note(known, event.salt, resident=True)
        if known not in self._num_children:
            self._leaves[known] = None
            self._note_recent(known, event.salt)
        if event.parent is not None:
            self._num_children[event.parent] = self._num_children.get(event.parent, 0) + 1
            self._leaves.pop(event.parent, None)
            parent = self._blocks.get(event.parent)
            if parent is not None and not parent.is_end:
                self._forget_recent(event.parent, parent.salt)
        if len(self._blocks) > self._max_blocks:
            self.num_untracked += 1
            self._remove(next(iter(self._leaves)))

    def _note_hit(self, known: bytes) -> None:
        self.num_hits += 1
        block = self._blocks.get(known)
        if block is None:
            return
        block.is_end = True
        self._note_recent(known, block.salt)
        if known in self._leaves:
            self._leaves.move_to_end(known)
        now = self._clock()
        self._count_hits(known, block, 1, now)
        while block.parent is not None and now - block.passed_on_s >= PASS_ON_S:
            parent = self._blocks.get(block.parent)
            if parent is None:
                return
            self._count_hits(block.parent, parent, block.owed, now)
            block.owed, block.passed_on_s = 0, now
            block = parent

    def _count_hits(self, known: bytes, block: _Block, hits: int, now: float) -> None:
        block.hits += hits
        block.owed += hits
        block.last_used_s = now
        self._dirty[known] = None

    def _note_recent(self, known: bytes, salt: bytes) -> None:
        recent = self._recent.setdefault(salt, OrderedDict())
        recent[known] = None
        recent.move_to_end(known)
        if len(recent) > MAX_RECENT:
            recent.popitem(last=False)

    def _forget_recent(self, known: bytes, salt: bytes) -> None:
        recent = self._recent.get(salt)
        if recent is not None:
            recent.pop(known, None)
            if not recent:
                del self._recent[salt]

    def _remove(self, known: bytes) -> None:
        block = self._blocks.pop(known, None)
        if block is None:
            return
        self._leaves.pop(known, None)
        for changes in self._listeners:
            changes.note(known, block.salt, resident=False)
        self._forget_recent(known, block.salt)
        self._dirty.pop(known, None)
        if block.written:
            self._note_gone(known, block)
        _count_down(self._num_at_depth, block.depth)
        if block.parent is not None:
            self._release_parent(block.parent, block)

    def _release_parent(self, known: bytes, child: _Block) -> None:
        _count_down(self._num_children, known)
        parent = self._blocks.get(known)
        if parent is None:
            return
        if child.owed:
            self._count_hits(known, parent, child.owed, max(parent.last_used_s, child.last_used_s))
        if known not in self._num_children:
            self._leaves[known] = None
            self._leaves.move_to_end(known, last=parent.last_used_s > child.last_used_s)
            self._note_recent(known, parent.salt)


def _count_down(counts: dict[_Counted, int], name: _Counted) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _num_tokens(block: _Block) -> int:
    return len(block.token_ids) // TOKEN_BYTES


def _change(known: bytes, block: _Block, *, resident: bool) -> PrefixChange:
    return PrefixChange(
        hash=known,
        parent=block.parent,
        depth=block.depth,
        token_ids=unpack_tokens(block.token_ids),
        salt=block.salt,
        hits=block.hits,
        last_used_s=block.last_used_s,
        resident=resident,
    )


def _block(change: PrefixChange) -> _Block:
    packed = pack_tokens(change.token_ids)
    return _Block(change.parent, change.depth, packed, change.salt, change.hits, change.last_used_s, True)


class PrefixWriter:
    """Tells the store what changed, a batch at a time, whatever state the store is in."""

    def __init__(
        self,
        tracker: PrefixTracker,
        store: Durable,
        *,
        with_tokens: bool = True,
        every_s: float = 0.1,
        max_changes: int = 200,
    ) -> None:
        """Without tokens, replicas find out what others hold, but nothing can be computed again from what is kept."""
        self._with_tokens = with_tokens
        self._tracker = tracker
        self._store = store
        self._every_s = every_s
        self._max_changes = max_changes
        self._num_losses = store.num_losses

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this is entered, changes are written as they come."""
        async with meanwhile(self._run()):
            yield

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.write()
            except Exception:
                log.exception("writing what is cached failed; going on")

    async def write(self) -> None:
        """One batch. What cannot be written now is kept for later."""
        if self._store.num_losses != self._num_losses:
            self._num_losses = self._store.num_losses
            self._tracker.rewrite()
        changes = self._tracker.changes(self._max_changes)
        if not changes:
            return
        try:
            await self._store.write_prefixes([self._without_secrets(change) for change in changes])
        except StoreUnavailable:
            self._tracker.failed(changes)
        except BaseException:
            self._tracker.failed(changes)
            raise

    def _without_secrets(self, change: PrefixChange) -> PrefixChange:
        if self._with_tokens and not change.salt.endswith(PRIVATE):
            return change
        return replace(change, token_ids=())


@dataclass(frozen=True, slots=True)
class WarmPrefix:
    """A chain that was hot before a restart."""

    blocks: tuple[PrefixChange, ...]
    """From its start on."""

    @property
    def token_ids(self) -> list[int]:
        """A prompt that leaves exactly these blocks in the cache."""
        return [token_id for block in self.blocks for token_id in block.token_ids]

    @property
    def salt(self) -> bytes:
        return self.blocks[0].salt


def choose_prefixes(
    blocks: Sequence[PrefixChange], max_tokens: int, block_size: int
) -> tuple[list[WarmPrefix], int]:
    """Whole chains, the hottest first, and how many tokens they are together.

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
    """Blocks at which hits ended: fewer went on to any one child, or there is none."""
    passed_on: dict[bytes, int] = {}
    for block in known.values():
        if block.parent is not None:
            passed_on[block.parent] = max(block.hits, passed_on.get(block.parent, 0))
    return (block for block in known.values() if block.hits > passed_on.get(block.hash, -1))


def _is_sound(block: PrefixChange, block_size: int) -> bool:
    """Whether the block's tokens give its hash."""
    parent = chain_start(block.salt) if block.parent is None else block.parent
    return len(block.token_ids) == block_size and block_hash(parent, block.token_ids) == block.hash


def _chain(known: dict[bytes, PrefixChange], end: PrefixChange) -> tuple[PrefixChange, ...]:
    """From its start to `end`; empty if there is a gap."""
    chain = [end]
    while chain[-1].parent is not None:
        parent = known.get(chain[-1].parent)
        if parent is None:
            return ()
        chain.append(parent)
    return tuple(reversed(chain))


class WarmUp:
    """Computes the hottest prefixes again after a restart, one at a time, while nobody needs the engine."""

    def __init__(
        self,
        submit: Callable[[list[int], bytes], Awaitable[None]],
        is_idle: Callable[[], bool],
        *,
        block_size: int,
        max_tokens: int,
        poll_s: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            submit: runs a request with this prompt and salt for one token in the last lane, and returns when it has
                ended. It is cancelled when somebody comes, and then has to cancel its request.
            is_idle: False while a request waits or runs that `submit` did not make.
        """
        self._submit = submit
        self._is_idle = is_idle
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._poll_s = poll_s
        self._clock = clock

    async def run(self, store: Durable, tracker: PrefixTracker) -> None:
        """Once, when the engine is ready; logs what it did, and raises nothing."""
        limit = min(self._max_tokens // self._block_size, MAX_WARMED_BLOCKS)
        if limit <= 0:
            return
        try:
            blocks = await store.hottest(limit)
        except StoreUnavailable as error:
            log.warning("no prefixes are computed again: %s", error or "the store does not answer")
            return
        prefixes, num_tokens = choose_prefixes(blocks, self._max_tokens, self._block_size)
        if not prefixes:
            return
        tracker.remember(blocks)
        log.info("computing %d prefixes of before again, %d tokens", len(prefixes), num_tokens)
        started = self._clock()
        done = [prefix for prefix in prefixes if await self._compute(prefix)]
        num_done = len({block.hash for prefix in done for block in prefix.blocks}) * self._block_size
        seconds = self._clock() - started
        log.info("computed %d prefixes again, %d tokens in %.1f s", len(done), num_done, seconds)

    async def _compute(self, prefix: WarmPrefix) -> bool:
        """Begins anew after every interruption: what was computed by then is found in the cache."""
        while True:
            while not self._is_idle():
                await asyncio.sleep(self._poll_s)
            try:
                if await self._compute_undisturbed(prefix):
                    return True
            except Exception as error:
                log.warning("a prefix of %d tokens is not computed again: %s", len(prefix.token_ids), error)
                return False

    async def _compute_undisturbed(self, prefix: WarmPrefix) -> bool:
        """False if somebody came in between."""
        task = asyncio.ensure_future(self._submit(prefix.token_ids, prefix.salt))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self._poll_s)
                if not task.done() and not self._is_idle():
                    return False
            task.result()
            return True
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class PrefixLocator:
    """Answers which replicas hold the beginning of a prompt."""

    def __init__(
        self,
        store: Durable | None,
        replica: str,
        block_size: int,
        num_cached_tokens: Callable[[Sequence[int], bytes], int],
    ) -> None:
        """`num_cached_tokens` is the engine's: about itself it knows better than the store."""
        self._store = store
        self._replica = replica
        self._block_size = block_size
        self._num_cached_tokens = num_cached_tokens

    async def locate(self, salt: bytes, token_ids: Sequence[int]) -> dict[str, object]:
        """What of this prompt each replica would find, the best one first; this one is always among them.

        A prompt never finds the block of its last token: its logits are needed.
        """
        num_blocks = max(0, len(token_ids) - 1) // self._block_size
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, num_blocks, self._block_size, salt)
        held = await self._held_elsewhere(hashes)
        cached = {replica: count * self._block_size for replica, count in held.items()}
        cached[self._replica] = self._num_cached_tokens(token_ids, salt)
        best_first = sorted(cached, key=lambda name: (-cached[name], name != self._replica, name))
        return {
            "object": "prefix.location",
            "block_size": self._block_size,
            "num_tokens": len(token_ids),
            "replicas": [
                {"replica": name, "num_cached_tokens": cached[name], "this": name == self._replica}
                for name in best_first
            ],
        }

    async def _held_elsewhere(self, hashes: Sequence[bytes]) -> dict[str, int]:
        if self._store is None or not hashes:
            return {}
        try:
            return await self._store.locate(hashes)
        except StoreUnavailable:
            return {}


def parse_token_ids(text: str, field: str = "tokens") -> list[int]:
    """Token ids separated by commas.

    Raises:
        ApiError: 400, if it is anything else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise invalid(f"'{field}' must be token ids separated by commas.", field) from None

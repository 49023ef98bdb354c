"""A tracker knows the chains that are resident in this process, as its engine reports them, and which are hot."""

from __future__ import annotations

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import TypeVar

from penstock.engine.planning.prefix_events import Cleared, Dropped, Found, PrefixEvent, Stored
from penstock.gateway.store.interface import PrefixChange
from penstock.gateway.store.packing import TOKEN_BYTES, pack_tokens, unpack_tokens

_Counted = TypeVar("_Counted", int, bytes)

MAX_TRACKED = 100_000
MAX_RECENT = 1_000
"""For each salt so many candidates for the hottest are known: ends of chains, and blocks at which a hit ended."""
PASS_ON_S = 60.0
"""The interval at which a block reports its hits to its parent, so that a hit does not visit a whole chain."""


@dataclass(slots=True)
class _Block:
    hash: bytes
    parent: bytes | None
    depth: int
    token_ids: bytes
    """The tokens are packed: a hundred thousand tuples of numbers would be large."""
    salt: bytes
    hits: int
    last_used_s: float
    written: bool = False
    """The store may know the block."""
    owed: int = 0
    """Hits that its parent was not told of yet."""
    passed_on_s: float = -math.inf
    """The time at which the block last reported its hits to its parent."""
    is_end: bool = False
    """A hit ended here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """A HotPrefix is a prefix as the operator sees it, named by its last block."""

    leaf: bytes
    salt: bytes
    num_tokens: int
    hits: int
    last_used_s: float
    """The time of the last use, in seconds since 1970."""


class BlockChanges:
    """BlockChanges are the blocks that came and went since somebody last took them out."""

    def __init__(self, salts: Collection[bytes] | None, there: dict[bytes, _Block]) -> None:
        """Blocks that are `there` already come first. Only those of the salts are noted; all, if it is None."""
        self._salts = salts
        self._there = there
        """The blocks from before that were not looked at yet."""
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def note(self, block: _Block, *, resident: bool) -> None:
        """Notes a block that came or went; one that did both is no change."""
        is_noted = self._salts is None or block.salt in self._salts
        if self._there.pop(block.hash, None) is None and is_noted:
            of, other = (self._stored, self._removed) if resident else (self._removed, self._stored)
            if other.pop(block.hash, self) is self:
                of[block.hash] = None

    @property
    def is_behind(self) -> bool:
        """Whether blocks from before are left to look at."""
        return bool(self._there)

    def take(self, most: int) -> tuple[list[bytes], list[bytes]]:
        """Takes out at most so many blocks that came, and that went; so many from before are looked at for it."""
        piece = [self._there.popitem()[1] for _ in range(min(most, len(self._there)))]
        for block in reversed(piece):
            self.note(block, resident=True)
        return _taken(self._stored, most), _taken(self._removed, most)


def _taken(hashes: dict[bytes, None], most: int) -> list[bytes]:
    taken = list(islice(hashes, most))
    for block_hash in taken:
        del hashes[block_hash]
    return taken


class PrefixTracker:
    """A PrefixTracker has every chain that is resident in this process's cache. It is for the event loop's thread."""

    def __init__(self, *, max_blocks: int = MAX_TRACKED, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970: what it says outlives the process."""
        self.num_untracked = 0
        """Blocks that were resident, and were given up here since there were too many."""
        self._max_blocks = max_blocks
        self._clock = clock
        self._blocks: dict[bytes, _Block] = {}
        self._num_children: dict[bytes, int] = {}
        self._leaves: OrderedDict[bytes, None] = OrderedDict()
        """Blocks without a child, the one used longest ago first."""
        self._recent: dict[bytes, OrderedDict[bytes, None]] = {}
        """The candidates for the hottest blocks by salt, least recently used first."""
        self._num_at_depth: dict[int, int] = {}
        self._dirty: dict[bytes, None] = {}
        self._gone: dict[bytes, _Block] = {}
        """Blocks that are no longer resident, which the store does not know yet."""
        self._remembered: dict[bytes, int] = {}
        self._listeners: dict[BlockChanges, None] = {}

    @contextlib.contextmanager
    def listening(self, salts: Collection[bytes] | None) -> Iterator[BlockChanges]:
        """The blocks of these salts, or of all, in changes that grow while it is entered.

        First those that are there, then, while this is entered, what comes and goes.
        """
        changes = BlockChanges(salts, self._blocks.copy())
        self._listeners[changes] = None
        try:
            yield changes
        finally:
            del self._listeners[changes]

    def take(self, events: Iterable[PrefixEvent]) -> None:
        """Takes in what a step's report says; it has to be called with every report, in order."""
        for event in events:
            if isinstance(event, Stored):
                self._add(event)
            elif isinstance(event, Found):
                self._note_hit(event.hash)
            elif isinstance(event, Dropped):
                self._remove(event.hash)
            else:
                assert isinstance(event, Cleared)
                for block_hash in list(self._blocks):
                    self._remove(block_hash)

    def remember(self, blocks: Iterable[PrefixChange]) -> None:
        """Notes hits from before a restart, for blocks that are about to come back."""
        self._remembered = {block.hash: block.hits for block in blocks}

    # What there is

    @property
    def num_tracked(self) -> int:
        return len(self._blocks)

    @property
    def deepest(self) -> int:
        """The number of blocks in the longest chain."""
        return max(self._num_at_depth, default=0)

    @property
    def num_unwritten(self) -> int:
        """The number of changes that the store has not heard of."""
        return len(self._dirty) + len(self._gone)

    def hottest(self, limit: int, salts: Iterable[bytes]) -> list[HotPrefix]:
        """Prefixes of these salts that were found most, and last; chains that were never found come after them."""
        candidates = (self._blocks[block_hash] for salt in salts for block_hash in self._recent.get(salt, ()))
        best = nlargest(limit, candidates, key=lambda block: (block.hits, block.last_used_s, block.depth))
        return [
            HotPrefix(
                leaf=block.hash,
                salt=block.salt,
                num_tokens=block.depth * len(block.token_ids) // TOKEN_BYTES,
                hits=block.hits,
                last_used_s=block.last_used_s,
            )
            for block in best
        ]

    # What the store does not know yet

    def changes(self, limit: int) -> list[PrefixChange]:
        """Takes out at most so many changes: evicted blocks first, then resident ones, in order."""
        gone = [self._gone.pop(block_hash) for block_hash in list(islice(self._gone, limit))]
        dirty = [self._blocks[block_hash] for block_hash in islice(self._dirty, limit - len(gone))]
        for block in dirty:
            del self._dirty[block.hash]
            block.written = True
        return [
            *(_change(block, resident=False) for block in gone),
            *(_change(block, resident=True) for block in dirty),
        ]

    def failed(self, changes: Iterable[PrefixChange]) -> None:
        """Puts back changes that could not be written, as far as nothing newer is known."""
        for change in changes:
            if change.hash in self._blocks:
                self._dirty[change.hash] = None
            elif change.hash not in self._gone:
                self._note_gone(_block(change))

    def rewrite(self) -> None:
        """Marks all that is resident to be written again: the store may have lost anything."""
        self._dirty = dict.fromkeys(self._blocks)

    def _note_gone(self, block: _Block) -> None:
        self._gone[block.hash] = block
        if len(self._gone) > self._max_blocks:
            del self._gone[next(iter(self._gone))]

    # Events

    def _add(self, event: Stored) -> None:
        if event.hash in self._blocks:
            return
        self._blocks[event.hash] = block = _Block(
            hash=event.hash,
            parent=event.parent,
            depth=event.depth,
            token_ids=pack_tokens(event.token_ids),
            salt=event.salt,
            hits=self._remembered.pop(event.hash, 0),
            last_used_s=self._clock(),
            written=self._gone.pop(event.hash, None) is not None,
        )
        self._num_at_depth[event.depth] = self._num_at_depth.get(event.depth, 0) + 1
        self._dirty[event.hash] = None
        for changes in self._listeners:
            changes.note(block, resident=True)
        if event.hash not in self._num_children:
            self._leaves[event.hash] = None
            self._note_recent(block)
        if event.parent is not None:
            self._num_children[event.parent] = self._num_children.get(event.parent, 0) + 1
            self._leaves.pop(event.parent, None)
            parent = self._blocks.get(event.parent)
            if parent is not None and not parent.is_end:
                self._forget_recent(parent)
        if len(self._blocks) > self._max_blocks:
            self.num_untracked += 1
            self._remove(next(iter(self._leaves)))

    def _note_hit(self, block_hash: bytes) -> None:
        block = self._blocks.get(block_hash)
        if block is None:
            return
        block.is_end = True
        self._note_recent(block)
        if block_hash in self._leaves:
            self._leaves.move_to_end(block_hash)
        now = self._clock()
        self._count_hits(block, 1, now)
        while block.parent is not None and now - block.passed_on_s >= PASS_ON_S:
            parent = self._blocks.get(block.parent)
            if parent is None:
                return
            self._count_hits(parent, block.owed, now)
            block.owed, block.passed_on_s = 0, now
            block = parent

    def _count_hits(self, block: _Block, hits: int, now: float) -> None:
        block.hits += hits
        block.owed += hits
        block.last_used_s = now
        self._dirty[block.hash] = None

    def _note_recent(self, block: _Block) -> None:
        recent = self._recent.setdefault(block.salt, OrderedDict())
        recent[block.hash] = None
        recent.move_to_end(block.hash)
        if len(recent) > MAX_RECENT:
            recent.popitem(last=False)

    def _forget_recent(self, block: _Block) -> None:
        recent = self._recent.get(block.salt)
        if recent is not None:
            recent.pop(block.hash, None)
            if not recent:
                del self._recent[block.salt]

    def _remove(self, block_hash: bytes) -> None:
        block = self._blocks.pop(block_hash, None)
        if block is None:
            return
        self._leaves.pop(block_hash, None)
        for changes in self._listeners:
            changes.note(block, resident=False)
        self._forget_recent(block)
        self._dirty.pop(block_hash, None)
        if block.written:
            self._note_gone(block)
        _count_down(self._num_at_depth, block.depth)
        if block.parent is not None:
            self._release_parent(block.parent, block)

    def _release_parent(self, block_hash: bytes, child: _Block) -> None:
        _count_down(self._num_children, block_hash)
        parent = self._blocks.get(block_hash)
        if parent is None:
            return
        if child.owed:
            self._count_hits(parent, child.owed, max(parent.last_used_s, child.last_used_s))
        if block_hash not in self._num_children:
            self._leaves[block_hash] = None
            self._leaves.move_to_end(block_hash, last=parent.last_used_s > child.last_used_s)
            self._note_recent(parent)


def _count_down(counts: dict[_Counted, int], name: _Counted) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _change(block: _Block, *, resident: bool) -> PrefixChange:
    return PrefixChange(
        hash=block.hash,
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
    return _Block(
        change.hash, change.parent, change.depth, packed, change.salt, change.hits, change.last_used_s, True
    )

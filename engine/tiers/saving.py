"""What leaves the device's memory for the tiers: blocks, and states, that are overwritten or were used twice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as ListLike

from penstock.engine.planning.device import DeviceError, PageCarrier
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.outside import STATE
from penstock.engine.tiers.block_file import BlockKey
from penstock.engine.tiers.chain import BlockWriter, TierChain

log = logging.getLogger("penstock.engine")

_FOUND_BYTES = 8 << 20
"""The most that is copied in one turn of blocks which are in no danger; one block at least."""
_MOST_FOUND = 4096


class Saver:
    """Collects blocks and has them copied before they change. For the step thread.

    A block that is about to be overwritten is free, and no step in flight uses it; one that was found again is
    full and confirmed, and nobody writes it. So both can be copied at any time before the next step is launched.
    """

    of_states = False

    def __init__(self, chain: TierChain, writer: BlockWriter, carrier: PageCarrier) -> None:
        self._chain, self._writer, self._carrier = chain, writer, carrier
        self._reused: dict[int, BlockKey] = {}
        self._found: dict[BlockKey, int] = {}
        self._seen: set[int] = set()
        """The blocks that were found, and not overwritten since: nothing is to be done when they are found again."""
        self._most_found = max(1, _FOUND_BYTES // max(1, carrier.num_bytes))
        self.num_lost = 0
        """Blocks that were overwritten while too many waited to be written."""

    def note_reused(self, block: int, key: BlockKey) -> None:
        self._found.pop(key, None)
        self._seen.discard(block)
        if self._is_kept(key):
            return
        if len(self._reused) < self.room:
            self._reused[block] = key
        else:
            self.num_lost += 1

    def note_found(self, hashes: list[bytes], entries: list[int], tables: ListLike[int]) -> None:
        """Notes the blocks that were found for a chain, those of one hash side by side, by table; 0 for none."""
        seen, num_tables = self._seen, len(tables)
        for i, block in enumerate(entries):
            if block and block not in seen and len(self._found) < _MOST_FOUND:
                seen.add(block)
                key = BlockKey(hashes[i // num_tables], tables[i % num_tables])
                if not self._is_kept(key):
                    self._found[key] = block

    def forget(self, key: BlockKey) -> None:
        self._found.pop(key, None)
        self._reused = {block: other for block, other in self._reused.items() if other != key}
        self._writer.forget(key)

    def start_afresh(self) -> None:
        """Forgets all that was noted: the blocks are another memory's now."""
        self._reused.clear()
        self._found.clear()
        self._seen.clear()

    def save(self, memory: SequenceMemory) -> None:
        """Copies what was noted, as much of it as there is room for. Called before a step is launched."""
        if self._reused:
            self.copy(self._reused)
            self._reused = {}
        if self._found and (room := min(self._most_found, self.room)) > 0:
            chosen: dict[int, BlockKey] = {}
            while self._found and len(chosen) < room:
                key = next(iter(self._found))
                block = self._found.pop(key)
                if self._is_there(memory, block, key) and not self._is_kept(key):
                    chosen[block] = key
            self.copy(chosen)

    def unsaved(self, memory: SequenceMemory) -> Iterator[tuple[int, BlockKey]]:
        """The blocks that can be found and are in no tier: those in use, then those that were used last."""
        return ((block, key) for block, key in self._findable(memory) if not self._is_kept(key))

    @property
    def room(self) -> int:
        """The blocks that may be copied."""
        return self._writer.room(of_states=self.of_states)

    def copy(self, chosen: dict[int, BlockKey]) -> None:
        """Copies blocks now; there has to be room for them."""
        if not chosen:
            return
        try:
            staged = self._carrier.copy_out(list(chosen))
        except DeviceError:
            raise
        except Exception as error:
            log.warning("%d KV blocks could not be copied, and are lost: %s", len(chosen), error)
            self.num_lost += len(chosen)
        else:
            self._writer.put(list(chosen.values()), staged)

    def _is_kept(self, key: BlockKey) -> bool:
        return self._writer.has(key) or self._chain.keeps(key)

    def _is_there(self, memory: SequenceMemory, block: int, key: BlockKey) -> bool:
        return memory.index.key_of(block) == key

    def _findable(self, memory: SequenceMemory) -> Iterator[tuple[int, BlockKey]]:
        counts, free = memory.pool.ref_counts, list(memory.pool.free_blocks())
        held = [block for block, is_findable in enumerate(memory.findable) if is_findable and counts[block]]
        for block in (*held, *reversed(free)):
            key = memory.index.key_of(block)
            if key is not None and block not in memory.private:
                yield block, BlockKey(*key)


class StateSaver(Saver):
    """The same for snapshots at the ends of blocks: its "blocks" are their slots.

    Nobody writes the slot of a snapshot that can be found. When it makes way, its slot keeps the state until the next
    step is launched.
    """

    of_states = True

    def _is_there(self, memory: SequenceMemory, block: int, key: BlockKey) -> bool:
        return memory.snapshots.has_state(key.hash, block)

    def _findable(self, memory: SequenceMemory) -> Iterator[tuple[int, BlockKey]]:
        for snapshot in sorted(memory.snapshots, key=lambda snapshot: -snapshot.used):
            if snapshot.kept_as:
                yield snapshot.slot, BlockKey(snapshot.kept_as, STATE)

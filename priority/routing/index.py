"""An index of who holds which block: hashes to sets of replicas, in bounded memory.

A set of replicas is an integer with a bit for each (its slot), so that sets are joined and narrowed in one operation.
A replica that holds a block mostly holds those before it in the chain as well, for blocks are evicted from the ends
of chains; so the longest prefix that somebody holds is found by bisection.

Memory is bounded by keeping only a part of all hashes: those whose first byte is below a limit, which falls by one
each time there are too many. The chain of a request is thinned by the same rule, so bisection still holds; hits are
then known in coarser steps. Entries are in 256 dicts by first byte, each dropped, or swept of replicas that are gone,
at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

DEFAULT_MAX_BLOCKS = 4_000_000
_SHARDS = 256
_MAX_EXPECTED = 1_000_000


class BlockIndex:
    """Hashes of blocks, and the slots of the replicas that hold them."""

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self.num_blocks = 0
        """The number of different hashes."""
        self.limit = _SHARDS
        """The bound of the first bytes of the hashes that are kept."""
        self._max_blocks = max_blocks
        self.shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._expected: dict[bytes, int] = {}
        """Blocks that a request will make resident, and the replica that it was sent to last."""

    def add(self, hashes: Iterable[bytes], bit: int) -> None:
        """Notes that blocks became resident at the replica of a bit."""
        shards, limit = self.shards, self.limit
        for known in hashes:
            first = known[0]
            if first < limit:
                shard = shards[first]
                before = shard.get(known)
                if before is None:
                    shard[known] = bit
                    self.num_blocks += 1
                else:
                    shard[known] = before | bit
        while self.num_blocks > self._max_blocks:
            self.limit -= 1
            self.num_blocks -= len(shards[self.limit])
            shards[self.limit] = {}

    def remove(self, hashes: Iterable[bytes], bit: int) -> None:
        """Notes that blocks were evicted there, some of which may be unknown."""
        for known in hashes:
            shard = self.shards[known[0]]
            left = shard.get(known, 0) & ~bit
            if left:
                shard[known] = left
            elif shard.pop(known, None) is not None:
                self.num_blocks -= 1

    def expect(self, hashes: Iterable[bytes], bit: int) -> None:
        """Notes that a request was sent there which will make these blocks resident; past a bound it does nothing."""
        if len(self._expected) < _MAX_EXPECTED:
            self._expected.update(dict.fromkeys(hashes, bit))

    def expect_no_longer(self, hashes: Iterable[bytes], bit: int) -> None:
        """Notes that the request ended: from here on the replica's own state counts."""
        expected = self._expected
        for known in hashes:
            if expected.get(known) == bit:
                del expected[known]

    @property
    def num_parts(self) -> int:
        return _SHARDS

    def sweep(self, number: int, bits: int) -> None:
        """Takes the replicas of these bits out of one of the 256 parts."""
        shard = self.shards[number]
        kept = {known: left for known, held in shard.items() if (left := held & ~bits)}
        self.num_blocks -= len(shard) - len(kept)
        self.shards[number] = kept

    def match(
        self, hashes: Sequence[bytes], among: int, most: int, *, is_there: bool = False
    ) -> list[tuple[int, int]]:
        """Finds who holds the longest prefixes of a chain.

        Args:
            among: bits of the replicas that count.
            most: different lengths to find.
            is_there: blocks that are only expected do not count.

        Returns:
            (number of blocks, bits of the replicas that hold so many and no more), the longest first.
        """
        places: Sequence[int] = range(len(hashes))
        if self.limit < _SHARDS:
            places = [i for i in places if hashes[i][0] < self.limit]
        expected = {} if is_there else self._expected
        found: list[tuple[int, int]] = []
        high = len(places)
        while high and among and len(found) < most:
            high = self._reach(hashes, places, high, among, expected)
            if not high:
                break
            known = hashes[places[high - 1]]
            holders = (self.shards[known[0]].get(known, 0) | expected.get(known, 0)) & among
            found.append((places[high - 1] + 1, holders))
            among &= ~holders
        return found

    def _reach(
        self,
        hashes: Sequence[bytes],
        places: Sequence[int],
        high: int,
        among: int,
        expected: Mapping[bytes, int],
    ) -> int:
        """Returns how many of the first `high` places somebody among some holds, by bisection."""
        shards, low = self.shards, 0
        while low < high:
            middle = (low + high + 1) // 2
            known = hashes[places[middle - 1]]
            if shards[known[0]].get(known, 0) & among or expected.get(known, 0) & among:
                low = middle
            else:
                high = middle - 1
        return low

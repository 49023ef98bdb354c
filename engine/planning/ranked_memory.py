"""The memories of ranks that have sequences of their own: each sequence's keys and values are on one rank alone.

Every rank has a `SequenceMemory`, and `RankedMemory` stands before them with the methods of one: a call that is about a
sequence goes to the memory of its rank, and one that is about a step goes to all of them. All blocks have numbers of
their own, one rank's after another's, so that a number says which rank has the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import NO_LIMIT, Sequence
from penstock.engine.planning.state_records import Prefix, StateUse
from penstock.engine.planning.step import StepPlan


class RankedMemory:
    """See `SequenceMemory`, whose methods these are.

    A sequence gets its rank when it starts, and keeps it until it gives way; what forks from it has the same. Among the
    ranks with room, it is the one with most blocks that are free or hold a part of its prefix: so a long prefix draws
    a sequence to its rank, and a short one that all prompts have in common does not draw all of them to the same.

    Args:
        make: makes the memory of a rank, given that of the rank before; none has states.
    """

    def __init__(self, num_ranks: int, make: Callable[[SequenceMemory | None], SequenceMemory]) -> None:
        self.parts: list[SequenceMemory] = []
        for _ in range(num_ranks):
            self.parts.append(make(self.parts[-1] if self.parts else None))
        self._first = self.parts[0]
        assert self._first.states is None
        self.block_size = self._first.block_size

    def part_of(self, sequence: Sequence) -> SequenceMemory:
        """The memory that has the sequence, or the one that is the best for it if it has no rank now."""
        if not sequence.block_table:
            self._choose_rank(sequence)
        return self.parts[sequence.rank]

    def beside(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        return [other for other in running if other.rank == sequence.rank]

    def _choose_rank(self, sequence: Sequence) -> None:
        """Chooses the rank where a sequence would start now; its prefix is looked up there last."""

        def fitness(rank: int) -> tuple[bool, int, int]:
            part = self.parts[rank]
            num_found = part.find_prefix(sequence).num_tokens // part.block_size * part.num_tables
            num_free = part.pool.num_free
            return part.num_free_needed(sequence) <= num_free, num_free + num_found, num_found

        sequence.rank = max(range(len(self.parts)), key=fitness)
        self.parts[sequence.rank].find_prefix(sequence)

    # Room

    @property
    def max_chunk(self) -> int:
        return self._first.max_chunk

    def limit_chunks(self, max_tokens: int) -> None:
        for part in self.parts:
            part.limit_chunks(max_tokens)

    @property
    def findable(self) -> bytearray:
        return self._first.findable

    @property
    def ref_counts(self) -> list[int]:
        return self._first.ref_counts

    @property
    def num_blocks(self) -> int:
        return sum(part.num_blocks for part in self.parts)

    @property
    def num_free_blocks(self) -> int:
        return sum(part.num_free_blocks for part in self.parts)

    @property
    def num_cached_blocks(self) -> int:
        return sum(part.num_cached_blocks for part in self.parts)

    @property
    def max_tokens(self) -> int:
        return self._first.max_tokens

    @property
    def max_running(self) -> int:
        return NO_LIMIT

    @property
    def state_use(self) -> StateUse:
        return StateUse()

    @property
    def num_kv_tokens(self) -> int:
        return sum(part.num_kv_tokens for part in self.parts)

    @property
    def num_free_tokens(self) -> int:
        return sum(part.num_free_tokens for part in self.parts)

    def unfilled(self, sequences: Iterable[Sequence]) -> float:
        used = [part.num_blocks - part.num_free_blocks for part in self.parts]
        shares = (part.unfilled(own) for part, own in zip(self.parts, self._by_rank(sequences), strict=True))
        unfilled = sum(share * num for share, num in zip(shares, used, strict=True))
        return unfilled / sum(used) if any(used) else 0.0

    def check(self, sequences: Iterable[Sequence]) -> None:
        for part, own in zip(self.parts, self._by_rank(sequences), strict=True):
            part.check(own)

    def check_idle(self) -> None:
        for part in self.parts:
            part.check_idle()

    def _by_rank(self, sequences: Iterable[Sequence]) -> list[list[Sequence]]:
        everybody = list(sequences)
        return [[s for s in everybody if s.rank == rank] for rank in range(len(self.parts))]

    # Steps in flight

    @property
    def num_in_flight(self) -> int:
        return self._first.num_in_flight

    def begin_step(self, copies: list[tuple[int, int]]) -> int:
        number = 0
        for part in self.parts:
            first, end = part.pool.first, part.pool.first + part.pool.num_blocks
            number = part.begin_step([copy for copy in copies if first <= copy[1] < end])
        return number

    def assign(self, plan: StepPlan) -> None:
        """There are no states."""

    def take_back(self, plan: StepPlan) -> list[Sequence]:  # noqa: ARG002
        return []

    def end_step(self, number: int, *, has_failed: bool = False) -> None:
        for part in self.parts:
            part.end_step(number, has_failed=has_failed)

    # Finding

    def find_prefix(self, sequence: Sequence) -> Prefix:
        return self.part_of(sequence).find_prefix(sequence)

    def find_cached(self, hashes: ListLike[bytes], token_ids: ListLike[int] = ()) -> tuple[int, int]:
        """What is cached on the rank where most is."""
        return max(part.find_cached(hashes, token_ids) for part in self.parts)

    def awaited_hash(self, sequence: Sequence) -> bytes:
        return self.part_of(sequence).awaited_hash(sequence)

    def is_awaited(self, sequence: Sequence) -> bool:
        return self.parts[sequence.rank].is_awaited(sequence)

    def num_free_needed(self, sequence: Sequence) -> int:
        return self.part_of(sequence).num_free_needed(sequence)

    # Sequences

    def start(self, sequence: Sequence) -> None:
        self.part_of(sequence).start(sequence)

    def grow(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        return self.parts[sequence.rank].grow(sequence, num_tokens)

    def will_have_room(self, sequence: Sequence, num_tokens: int) -> bool:
        return self.parts[sequence.rank].will_have_room(sequence, num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        child.rank = parent.rank
        return self.parts[parent.rank].fork(parent, child)

    def hand_over(self, parent: Sequence, heir: Sequence) -> None:
        heir.rank = parent.rank
        self.parts[parent.rank].hand_over(parent, heir)

    def commit(self, sequence: Sequence, num_committed: int) -> None:
        self.parts[sequence.rank].commit(sequence, num_committed)

    def distrust(self, sequence: Sequence) -> None:
        self.parts[sequence.rank].distrust(sequence)

    def release(self, sequence: Sequence) -> None:
        self.parts[sequence.rank].release(sequence)


Memory = SequenceMemory | RankedMemory
"""What a scheduler plans with."""

"""Who follows a block table has it as it is, by the entries that changed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.followed_table import FollowedTable
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import Sequence
from tests.engine.fake_runner import make_request
from tests.few import examples

BLOCK_SIZE = 4


class Follower:
    """A copy of a table, and the entries that were told last."""

    def __init__(self) -> None:
        self.known, self.copy = FollowedTable(), list[int]()
        self.told = 0

    def look(self, sequence: Sequence) -> None:
        places, first = self.known.changes(sequence)
        self.copy = self.copy[:first]
        for place in places:
            self.copy[place] = sequence.block_table[place]
        self.copy += sequence.block_table[first:]
        self.told = len(places) + len(sequence.block_table) - first


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([(0,), (0, 8), (8, 0, 12), (8,)]),
    st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.booleans()), min_size=1, max_size=12),
)
def test_the_copy_is_the_table_after_whatever_was_allocated_shared_and_given_back(
    windows: tuple[int, ...], chunks: list[tuple[int, bool, bool]]
) -> None:
    memory = SequenceMemory(400, BLOCK_SIZE, windows=windows)
    sequence = Sequence(make_request("a", list(range(200))))
    memory.limit_chunks(16)
    memory.start(sequence)
    followers = Follower(), Follower()
    for number, (num_tokens, forks, looks) in enumerate(chunks):
        if forks and sequence.num_committed:
            memory.fork(
                sequence, Sequence(make_request(f"fork {number}", list(range(sequence.num_committed + 1))))
            )
        assert memory.grow(sequence, sequence.num_computed + num_tokens) is not None
        sequence.num_computed += num_tokens
        memory.commit(sequence, sequence.num_computed)
        for follower in followers[: 1 + looks]:
            follower.look(sequence)
        assert followers[0].copy == sequence.block_table
    followers[1].look(sequence)
    assert followers[1].copy == sequence.block_table
    followers[1].look(sequence)
    assert followers[1].told == 0


def test_another_table_of_a_sequence_is_told_as_a_whole() -> None:
    memory, follower = SequenceMemory(40, BLOCK_SIZE, prefix_cache=False), Follower()
    sequence = Sequence(make_request("a", list(range(20))))
    for _ in range(2):
        memory.start(sequence)
        follower.look(sequence)
        assert follower.copy == sequence.block_table
        assert follower.told == 5
        memory.release(sequence)

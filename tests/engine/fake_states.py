"""State slots of a device double: a state is the tokens that it follows from, and a pending row is a token.

It does what a step says of its slots to the letter, and says so if that is not what the contract allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.planning.state_records import ChunkState


@dataclass(frozen=True)
class FakeRows:
    """The rows of a chunk, drafts last."""

    state: ChunkState
    token_ids: list[int]
    num_drafts: int

    @property
    def certain(self) -> list[int]:
        return self.token_ids[: len(self.token_ids) - self.num_drafts]


class FakeStates:
    def __init__(self, num_states: int, num_pending: int) -> None:
        self.num_pending = num_pending
        self.states: list[list[int] | None] = [[], *[None] * (num_states - 1)]
        """None where nobody knows what a slot holds."""
        self.pending: list[list[int]] = [[] for _ in range(num_states)]
        self.num_saves = 0

    def run(self, step: list[FakeRows]) -> list[list[int]]:
        """The tokens that each chunk's state follows from when the chunk begins; its slots are written."""
        self._check(step)
        before = [self._read(rows.state) for rows in step]
        for rows, known in zip(step, before, strict=True):
            certain, drafts = rows.certain, rows.token_ids[len(rows.certain) :]
            for save in rows.state.saves:
                assert 0 <= save.rows <= save.rows + save.num_pending <= len(certain)
                end = save.rows + save.num_pending
                self._write(save.slot, [*known, *certain[: save.rows]], certain[save.rows : end])
                self.num_saves += 1
            self._write(rows.state.target, known + certain, drafts)
        return before

    def break_off(self, step: list[FakeRows]) -> None:
        """A step ends before it is done: what it was to write may be anything."""
        for rows in step:
            for slot in _written(rows.state):
                self.states[slot], self.pending[slot] = None, []

    def _check(self, step: list[FakeRows]) -> None:
        written = [slot for rows in step for slot in _written(rows.state)]
        assert len(set(written)) == len(written), "a slot is written twice in a step"
        assert 0 not in written, "slot 0 is nobody's"
        for rows in step:
            others = [slot for other in step if other is not rows for slot in _written(other.state)]
            own = [save.slot for save in rows.state.saves]
            assert rows.state.source not in [*others, *own], "a slot is read and written by two in a step"

    def _read(self, told: ChunkState) -> list[int]:
        state, pending = self.states[told.source], self.pending[told.source]
        assert state is not None, f"slot {told.source} is read, which nobody wrote"
        assert 0 <= told.replayed <= len(pending), f"{told.replayed} of {len(pending)} rows are replayed"
        return [*state, *pending[: told.replayed]]

    def _write(self, slot: int, state: list[int], pending: list[int]) -> None:
        assert len(pending) <= self.num_pending
        self.states[slot], self.pending[slot] = state, pending


def _written(told: ChunkState) -> list[int]:
    return [told.target, *(save.slot for save in told.saves)]

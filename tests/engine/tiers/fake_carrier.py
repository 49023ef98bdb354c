"""Carries what a fake runner has in its blocks and state slots, and tiers whose threads the test is."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from queue import Empty
from struct import Struct

from penstock.engine.planning.device import Payload
from penstock.engine.tiers.chain import Batch, Read
from penstock.engine.tiers.tier import Tier
from penstock.engine.tiers.tiers import Tiers
from tests.engine.fake_runner import FakeRunner
from tests.engine.fake_states import FakeStates
from tests.engine.queued_runner import QueuedRunner

_SLOT = Struct("<iii")
_NOBODY = (-1, -1, -1)


@dataclass(frozen=True, slots=True)
class FakeStaged:
    payloads: list[Payload]

    def wait(self) -> list[Payload]:
        return self.payloads


class FakeCarrier:
    """A block's content is the table, the position and the token of each of its places."""

    layout = "places"

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.num_bytes = runner.block_size * _SLOT.size
        self.num_in = self.num_out = 0

    def copy_out(self, pages: list[int]) -> FakeStaged:
        self.num_out += len(pages)
        return FakeStaged([self._content(block) for block in pages])

    def copy_in(self, pages: list[int], payloads: list[Payload]) -> None:
        self.num_in += len(pages)
        assert len({*pages}) == len(pages) == len(payloads)
        for block, payload in zip(pages, payloads, strict=True):
            if isinstance(self.runner, QueuedRunner):
                assert not any(block in step.touched for step in self.runner.in_flight)
            slots = [_SLOT.unpack_from(payload, at) for at in range(0, len(payload), _SLOT.size)]
            self.runner._blocks[block] = [
                None if slot == _NOBODY else (slot[0], slot[1], slot[2]) for slot in slots
            ]

    def _content(self, block: int) -> bytes:
        return b"".join(_SLOT.pack(*(slot or _NOBODY)) for slot in self.runner._blocks[block])


class FakeStateCarrier:
    """A slot's content is the tokens that its state follows from."""

    layout = "tokens"
    num_bytes = 4 * 64

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.num_in = self.num_out = 0

    @property
    def states(self) -> FakeStates:
        assert self.runner.states is not None
        return self.runner.states

    def copy_out(self, pages: list[int]) -> FakeStaged:
        self.num_out += len(pages)
        return FakeStaged([self._content(slot) for slot in pages])

    def copy_in(self, pages: list[int], payloads: list[Payload]) -> None:
        self.num_in += len(pages)
        for slot, payload in zip(pages, payloads, strict=True):
            assert slot, "slot 0 is nobody's"
            assert not any(slot in used for used in self._used_in_flight())
            length, *tokens = memoryview(payload).cast("B").cast("i")
            self.states.states[slot], self.states.pending[slot] = tokens[:length], []

    def _used_in_flight(self) -> list[list[int]]:
        steps = self.runner.in_flight if isinstance(self.runner, QueuedRunner) else ()
        told = [chunk.state for step in steps for chunk in step.chunks if chunk.state is not None]
        return [[state.source, state.target, *(save.slot for save in state.saves)] for state in told]

    def _content(self, slot: int) -> bytes:
        tokens = self.states.states[slot]
        assert tokens is not None, f"slot {slot} is kept, which nobody wrote"
        padding = [0] * (self.num_bytes // 4 - 1 - len(tokens))
        return array("i", [len(tokens), *tokens, *padding]).tobytes()


class HandDrivenTiers(Tiers):
    """Tiers without threads: a block is written, or read, when the test says so, reads in any order."""

    def __init__(
        self,
        tiers: ListLike[Tier],
        carrier: FakeCarrier,
        pace: random.Random,
        step_seconds: Callable[[int, int, int, int], float] = lambda *_: 0.0,
        staged_blocks: int = 1_000,
    ) -> None:
        self.now_s = 0.0
        self._pace = pace
        self._open_reads: list[Read] = []
        super().__init__(
            tiers,
            carrier,
            step_seconds,
            lambda: None,
            staged_bytes=staged_blocks * carrier.num_bytes,
            clock=lambda: self.now_s,
            state_carrier=FakeStateCarrier(carrier.runner) if carrier.runner.states else None,
        )

        self.writer.wait_for_room = self._write_one  # type: ignore[method-assign]
        self.writer.close = self._write_the_rest  # type: ignore[method-assign]

    def _write_one(self, timeout_s: float, *, of_states: bool) -> None:  # noqa: ARG002
        self.write_some(1)

    def _write_the_rest(self, timeout_s: float) -> bool:  # noqa: ARG002
        self.write_some()
        return True

    def write_some(self, most: int = 1_000) -> None:
        """Writes batches that were copied, as the writer's thread would."""
        for _ in range(most):
            try:
                batch = self.writer.batches.get_nowait()
            except Empty:
                return
            assert isinstance(batch, Batch)
            self.writer.write(batch)

    def read_some(self, most: int = 1_000) -> None:
        """Reads blocks that were asked for, as the readers' threads would."""
        while True:
            try:
                read = self.reader.reads.get_nowait()
            except Empty:
                break
            assert read is not None
            self._open_reads.append(read)
        self._pace.shuffle(self._open_reads)
        for _ in range(min(most, len(self._open_reads))):
            self.reader.read(self._open_reads.pop())

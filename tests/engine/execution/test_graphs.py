"""The ladder of graphs, on a device whose recordings are lists of what was asked."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.execution import graphs
from engine.execution.graphs import Graph, Ladder, Rung, ladder_sizes, record_all


class Replayed:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class PaperDevice:
    """Every recording takes memory that smaller ones after it need not take again."""

    def __init__(self) -> None:
        self.num_bytes = 100
        self.recordings = 0
        self.is_recording = False
        self.log: list[tuple[str, Rung]] = []
        self.broken: set[Rung] = set()
        self.room = 1 << 30
        """Tokens of the largest rung that there is memory for."""
        self._pool = 0

    def record(self, work: Callable[[], None]) -> Graph:
        self.is_recording = True
        try:
            work()
        finally:
            self.is_recording = False
        rung = self.log[-1][1]
        if rung.num_tokens > self.room:
            self.num_bytes += rung.num_tokens
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if rung in self.broken:
            raise RuntimeError("operation not permitted when stream is capturing\nand a long trace")
        self.num_bytes += max(0, rung.num_sequences * rung.query_len - self._pool)
        self._pool = max(self._pool, rung.num_sequences * rung.query_len)
        return Replayed(lambda: self.log.append(("replay", rung)))

    def synchronize(self) -> None:
        assert not self.is_recording

    def num_bytes_in_use(self) -> int:
        """As on a GPU, it first gives back what nobody uses."""
        self.num_bytes = 100 + self._pool
        return self.num_bytes

    def work(self, rung: Rung) -> None:
        self.log.append(("record" if self.is_recording else "run", rung))


def recorded(device: PaperDevice, *ladders: Ladder) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    record_all(ladders, device, lambda done, total: told.append((done, total)))
    return told


def test_the_sizes_are_one_two_four_and_then_every_eighth() -> None:
    assert ladder_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert ladder_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert [ladder_sizes(n) for n in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]


@given(st.integers(1, 300), st.integers(1, 400))
def test_the_smallest_graph_that_holds_the_batch_is_chosen(most: int, num_sequences: int) -> None:
    device = PaperDevice()
    ladder = Ladder(device.work, most)
    recorded(device, ladder)
    padded = ladder.padded(num_sequences)
    ladder.run(Rung(padded, 1))
    if num_sequences > most:
        assert padded == num_sequences
        assert device.log[-1] == ("run", Rung(padded, 1))
        return
    assert device.log[-1] == ("replay", Rung(padded, 1))
    assert padded == min(size for size in ladder_sizes(most) if size >= num_sequences)
    assert padded < num_sequences + 8


def test_the_largest_is_recorded_first_and_each_runs_once_before() -> None:
    device = PaperDevice()
    told = recorded(device, Ladder(device.work, 16))
    sizes = [16, 8, 4, 2, 1]
    assert device.log == [(what, Rung(size, 1)) for size in sizes for what in ("run", "record")]
    assert told == [(number, 5) for number in range(1, 6)]


def test_several_pieces_of_work_are_told_as_one() -> None:
    device = PaperDevice()
    assert recorded(device, Ladder(device.work, 2), Ladder(device.work, 1)) == [(1, 3), (2, 3), (3, 3)]


def test_memory_is_accounted_for_by_graph() -> None:
    device = PaperDevice()
    ladder = Ladder(device.work, 16)
    recorded(device, ladder)
    assert {rung.num_sequences: r.num_bytes for rung, r in ladder.recorded.items()} == {
        16: 16, 8: 0, 4: 0, 2: 0, 1: 0,
    }  # fmt: skip
    assert ladder.num_bytes == device.num_bytes - 100 == 16


def test_a_size_that_cannot_be_recorded_runs_without_and_is_told_in_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = PaperDevice()
    ladder = Ladder(device.work, 16)
    device.broken = {Rung(8, 1)}
    with caplog.at_level(logging.WARNING):
        told = recorded(device, ladder)
    assert told[-1] == (5, 5)
    assert [ladder.padded(n) for n in (1, 3, 5, 8, 9, 16)] == [1, 4, 5, 8, 16, 16]
    ladder.run(Rung(8, 1))
    assert device.log[-1] == ("run", Rung(8, 1))
    (record,) = caplog.records
    assert record.getMessage() == (
        "no CUDA graph for 8 x 1 tokens, these steps run without: "
        "operation not permitted when stream is capturing"
    )


def test_steps_that_verify_drafts_have_graphs_of_their_own() -> None:
    device = PaperDevice()
    ladder = Ladder(device.work, 4, query_lens=(1, 4))
    recorded(device, ladder)
    order = [(r.num_sequences, r.query_len) for what, r in device.log if what == "record"]
    assert order == [(4, 4), (2, 4), (4, 1), (1, 4), (2, 1), (1, 1)]
    assert ladder.padded(3, 4) == 4
    ladder.run(Rung(4, 4))
    assert device.log[-1] == ("replay", Rung(4, 4))
    assert ladder.padded(3, 2) == 3


def test_without_recording_every_step_runs_without() -> None:
    device = PaperDevice()
    ladder = Ladder(device.work, 64)
    ladder.run(Rung(3, 1))
    assert (ladder.padded(3), ladder.num_bytes, device.log) == (3, 0, [("run", Rung(3, 1))])


@given(st.integers(0, 70))
def test_where_memory_runs_out_half_is_tried_and_one_line_says_so(room: int) -> None:
    device = PaperDevice()
    device.room = room
    passes, choices = Ladder(device.work, 64, query_lens=(1, 2)), Ladder(device.work, 64)
    with pytest.MonkeyPatch.context() as patch:
        warnings: list[tuple[object, ...]] = []
        patch.setattr(graphs.log, "warning", lambda *said: warnings.append(said))
        told = recorded(device, passes, choices)
    assert told[-1] == (len(passes.rungs) + len(choices.rungs),) * 2
    most = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1, 0) if size <= room)
    for ladder in (passes, choices):
        assert set(ladder.recorded) == {rung for rung in ladder.rungs if rung.num_tokens <= most}
    assert [said[1:] for said in warnings] == [(most,)]
    tried = [rung for what, rung in device.log if what == "record" and rung.num_tokens > room]
    assert len(tried) == len(set(tried)) <= 8, "each half as large as the one before"
    assert device.num_bytes == 100 + most, "what was taken in vain was given back"

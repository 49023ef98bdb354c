"""The ladder of graphs, on a device whose recordings are lists of what was asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.execution import graphs
from penstock.engine.execution.graphs import (
    Graph,
    Ladder,
    capture_all,
    choice_shapes,
    decode_shapes,
    mixed_shapes,
    verifying_shapes,
)
from penstock.engine.execution.seats import StepShape


class Replayed:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class FakeDevice:
    """Every recording takes memory that smaller ones after it need not take again."""

    def __init__(self) -> None:
        self.num_bytes = 100
        self.recordings = 0
        self.is_recording = False
        self.log: list[tuple[str, StepShape]] = []
        self.broken: set[StepShape] = set()
        self.room = 1 << 30
        """Tokens of the largest shape that there is memory for."""
        self.slow_host = 1 << 30
        """Tokens of the largest shape that takes longer to launch than to run."""
        self._pool = 0

    def record(self, work: Callable[[], None]) -> Graph:
        self.is_recording = True
        try:
            work()
        finally:
            self.is_recording = False
        shape = self.log[-1][1]
        if shape.num_tokens > self.room:
            self.num_bytes += shape.num_tokens
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if shape in self.broken:
            raise RuntimeError("operation not permitted when stream is capturing\nand a long trace")
        self.num_bytes += max(0, shape.num_tokens - self._pool)
        self._pool = max(self._pool, shape.num_tokens)
        return Replayed(lambda: self.log.append(("replay", shape)))

    def synchronize(self) -> None:
        assert not self.is_recording

    def waits_for_host(self, work: Callable[[], None]) -> bool:
        work()
        return self.log[-1][1].num_tokens <= self.slow_host

    def num_bytes_in_use(self) -> int:
        """As on a GPU, it first gives back what nobody uses."""
        self.num_bytes = 100 + self._pool
        return self.num_bytes

    def work(self, shape: StepShape) -> None:
        self.log.append(("record" if self.is_recording else "run", shape))


def captured(device: FakeDevice, *ladders: Ladder) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Returns the result of `capture_all`, and the progress that it reported."""
    told: list[tuple[int, int]] = []
    return capture_all(ladders, device, lambda done, total: told.append((done, total))), told


def decode(num: int, most: int = 64) -> StepShape:
    return next(shape for shape in decode_shapes(most) if shape.num_sequences == num)


def asked(num_tokens: int, num_sequences: int, max_query_len: int, num_drafts: int = 0) -> StepShape:
    num_rows = num_sequences + num_drafts
    return StepShape(num_tokens, num_sequences, max_query_len, False, num_rows, num_drafts > 0)


def sizes(shapes: list[StepShape]) -> list[int]:
    return sorted(shape.num_sequences for shape in shapes)


def test_decode_sizes_are_one_two_four_and_then_every_eighth() -> None:
    assert sizes(decode_shapes(32)) == [1, 2, 4, 8, 16, 24, 32]
    assert sizes(decode_shapes(20)) == [1, 2, 4, 8, 16, 20]
    assert [sizes(decode_shapes(n)) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


def test_mixed_sizes_grow_by_a_third_or_a_half_and_hold_all_sequences() -> None:
    shapes = sorted(mixed_shapes(1024, 256), key=lambda shape: shape.num_tokens)
    assert [s.num_tokens for s in shapes] == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert [s.num_sequences for s in shapes] == [min(s.num_tokens, 256) for s in shapes]
    assert all(s.max_query_len == s.num_tokens for s in shapes)
    assert [s.num_tokens for s in mixed_shapes(20, 6)] == [16, 20]
    assert [s.num_tokens for s in mixed_shapes(5, 6)] == [5]


def test_large_mixed_sizes_grow_by_an_eighth_at_most() -> None:
    shapes = sorted(shape.num_tokens for shape in mixed_shapes(3000, 256))
    large = [*range(1024, 2048, 128), *range(2048, 3000, 256), 3000]
    assert shapes == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, *large]


def test_large_steps_have_graphs_where_launching_them_takes_longer_than_running_them() -> None:
    device = FakeDevice()
    device.slow_host = 1500
    ladder = Ladder(device.work, [*mixed_shapes(4096, 64), *verifying_shapes(2048, 256, 9)])
    captured(device, ladder)
    mixed = sorted(shape.num_tokens for shape in ladder.graphs if not shape.verifies)
    assert mixed[-5:] == [768, 1024, 1152, 1280, 1408]
    assert {shape.num_tokens for shape in ladder.graphs if shape.verifies} == {
        shape.num_tokens for shape in ladder.shapes if shape.verifies
    }


def test_no_large_step_is_padded_far() -> None:
    device = FakeDevice()
    ladder = Ladder(device.work, mixed_shapes(4096, 64))
    device.broken = {shape for shape in ladder.shapes if 1024 <= shape.num_tokens < 2048}
    captured(device, ladder)
    found = {n: ladder.covering(asked(n, 8, n)) for n in (760, 800, 1024, 1639, 2048, 2100)}
    assert {n: shape and shape.num_tokens for n, shape in found.items()} == {
        760: 768,
        800: None,
        1024: None,
        1639: 2048,
        2048: 2048,
        2100: 2304,
    }


@given(st.integers(1, 300), st.integers(0, 200), st.integers(1, 9))
def test_tokens_are_chosen_by_graphs_of_powers_of_two_rows(most: int, more: int, max_query_len: int) -> None:
    passes = [*decode_shapes(most), *mixed_shapes(600, most)]
    verifying = verifying_shapes(most + more, most, max_query_len)
    rows = {shape.num_rows for shape in choice_shapes([*passes, *verifying])}
    assert rows <= {1 << i for i in range(10)} | {most, most + more}
    for shape in passes:
        assert shape.num_sequences <= shape.num_rows <= most
        assert shape.num_rows in rows
    for shape in verifying:
        assert shape.num_tokens <= shape.num_rows <= most + more
        assert shape.num_rows in rows


@given(st.integers(1, 300), st.integers(1, 400))
def test_the_smallest_graph_that_holds_the_batch_is_chosen(most: int, num_sequences: int) -> None:
    device = FakeDevice()
    ladder = Ladder(device.work, decode_shapes(most))
    captured(device, ladder)
    shape = StepShape(num_sequences, num_sequences, 1, True, num_sequences)
    found = ladder.covering(shape)
    if num_sequences > most:
        assert found is None
        return
    assert found is not None
    ladder.run(found)
    assert device.log[-1] == ("replay", found)
    assert num_sequences <= found.num_sequences < num_sequences + 8
    assert found.num_sequences == min(size for size in sizes(decode_shapes(most)) if size >= num_sequences)


@given(st.integers(1, 700), st.integers(1, 64), st.integers(1, 700))
def test_a_mixed_step_is_padded_in_tokens_and_in_sequences(
    num_tokens: int, num_sequences: int, max_query_len: int
) -> None:
    num_sequences, max_query_len = min(num_sequences, num_tokens), min(max_query_len, num_tokens)
    device = FakeDevice()
    ladder = Ladder(device.work, [*decode_shapes(64), *mixed_shapes(600, 64), *verifying_shapes(128, 64, 4)])
    captured(device, ladder)
    found = ladder.covering(asked(num_tokens, num_sequences, max_query_len))
    if num_tokens > 600:
        assert found is None
        return
    assert found is not None
    assert not found.is_decode
    assert not found.verifies
    assert found.num_tokens >= num_tokens
    assert found.num_sequences >= num_sequences
    assert found.max_query_len >= max_query_len


def test_the_largest_is_captured_first_and_each_runs_once_before() -> None:
    device = FakeDevice()
    _, told = captured(device, Ladder(device.work, decode_shapes(16)))
    order = [decode(size, 16) for size in (16, 8, 4, 2, 1)]
    assert device.log == [(what, shape) for shape in order for what in ("run", "record")]
    assert told == [(number, 5) for number in range(1, 6)]


def test_several_pieces_of_work_are_told_as_one() -> None:
    device = FakeDevice()
    ladders = Ladder(device.work, decode_shapes(2)), Ladder(device.work, decode_shapes(1))
    assert captured(device, *ladders) == ((3, 2), [(1, 3), (2, 3), (3, 3)])


def test_memory_is_looked_at_for_the_whole_and_not_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    looks: list[int] = []
    look = device.num_bytes_in_use

    def note() -> int:
        looks.append(look())
        return looks[-1]

    monkeypatch.setattr(device, "num_bytes_in_use", note)
    ladders = [Ladder(device.work, shapes) for shapes in (decode_shapes(256), mixed_shapes(1024, 256))]
    (num_graphs, num_bytes), _ = captured(device, *ladders)
    assert (num_graphs, num_bytes) == (len(decode_shapes(256)) + 13, 1024)
    assert len(looks) == 2


def test_a_shape_that_cannot_be_captured_runs_without_and_is_told_in_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = FakeDevice()
    ladder = Ladder(device.work, decode_shapes(16))
    device.broken = {decode(8, 16)}
    with caplog.at_level(logging.WARNING):
        _, told = captured(device, ladder)
    assert told[-1] == (5, 5)
    found = [ladder.covering(StepShape(n, n, 1, True, n)) for n in (1, 3, 5, 8, 9, 16)]
    assert [shape and shape.num_sequences for shape in found] == [1, 4, 16, 16, 16, 16]
    ladder.run(decode(8, 16))
    assert device.log[-1] == ("run", decode(8, 16))
    (record,) = caplog.records
    assert record.getMessage() == (
        "no CUDA graph for 8 tokens of 8 sequences, these steps run without: "
        "operation not permitted when stream is capturing"
    )


def test_steps_that_verify_drafts_have_graphs_of_their_own() -> None:
    device = FakeDevice()
    shapes = verifying_shapes(32, 6, 9)
    ladder = Ladder(device.work, [*mixed_shapes(64, 6), *shapes])
    captured(device, ladder)
    assert sorted({(s.num_sequences, s.max_query_len) for s in shapes}) == [
        *((1, length) for length in (2, 3, 5, 9)),
        *((2, length) for length in (2, 3, 5, 9)),
        *((4, length) for length in (2, 3, 5)),
        *((6, length) for length in (2, 3, 5)),
    ]
    assert ladder.covering(asked(7, 3, 4, 4)) == StepShape(20, 4, 5, False, 32, verifies=True)
    assert ladder.covering(asked(7, 3, 4)) == StepShape(16, 6, 16, False, 6)
    assert ladder.covering(asked(40, 3, 9, 8)) is None, "a prompt is among them"
    assert not verifying_shapes(32, 6, 1)
    assert {s.max_query_len for s in verifying_shapes(128, 6, 7)} == {2, 3, 5, 7}


def test_without_capturing_every_step_runs_without() -> None:
    device = FakeDevice()
    ladder = Ladder(device.work, decode_shapes(64))
    assert ladder.covering(decode(2)) is None
    ladder.run(decode(2))
    assert device.log == [("run", decode(2))]


@given(st.integers(0, 70))
def test_where_memory_runs_out_half_is_tried_and_one_line_says_so(room: int) -> None:
    device = FakeDevice()
    device.room = room
    passes, choices = (
        Ladder(device.work, decode_shapes(128)),
        Ladder(device.work, choice_shapes(decode_shapes(64))),
    )
    with pytest.MonkeyPatch.context() as patch:
        warnings: list[tuple[object, ...]] = []
        patch.setattr(graphs.log, "warning", lambda *said: warnings.append(said))
        (num_graphs, num_bytes), told = captured(device, passes, choices)
    assert told[-1] == (len(passes.shapes) + len(choices.shapes),) * 2
    most = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1, 0) if size <= room)
    for ladder in (passes, choices):
        assert set(ladder.graphs) == {shape for shape in ladder.shapes if shape.num_tokens <= most}
    assert num_graphs == len(passes.graphs) + len(choices.graphs)
    assert num_bytes == most
    assert [said[1:] for said in warnings] == [(most,)]
    tried = [shape for what, shape in device.log if what == "record" and shape.num_tokens > room]
    assert len(tried) == len(set(tried)) <= 8, "each half as large as the one before"
    assert device.num_bytes == 100 + most, "what was taken in vain was given back"


class FakeRanks:
    """One of several ranks, each a thread; what they do together is checked to be the same on all of them."""

    def __init__(self, rank: int, meeting: threading.Barrier, said: list[tuple[object, int]]) -> None:
        self.rank, self.size = rank, meeting.parties
        self._meeting = meeting
        self._said = said

    def meet(self, place: object, number: int = 0) -> list[int]:
        """The numbers of all ranks, which have to be at the same place."""
        self._said[self.rank] = place, number
        self._meeting.wait(5.0)
        said = list(self._said)
        self._meeting.wait(5.0)
        assert {there for there, _ in said} == {place}
        return [number for _, number in said]

    def least(self, number: int) -> int:
        return min(self.meet("least", number))

    def sum(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def copy_first(self, x: Tensor) -> None:
        raise NotImplementedError


class RankDevice(FakeDevice):
    """A device whose work is a sum over the ranks: one that is alone in it, or in another, has met a mismatch."""

    def __init__(self, ranks: FakeRanks) -> None:
        super().__init__()
        self.ranks = ranks
        self.ladder = Ladder(self.work, decode_shapes(64))
        self.fault: Exception | None = None
        """What the first run of a shape raises before its sum."""

    def work(self, shape: StepShape) -> None:
        super().work(shape)
        if self.is_recording:
            return
        if self.fault is not None:
            raise self.fault
        self.ranks.meet(shape)

    def capture(self) -> None:
        try:
            capture_all([self.ladder], self, lambda *_: None, self.ranks)
        except Exception:
            self.ranks._meeting.abort()  # as the end of a rank ends the others' sums
            raise


def rank_devices(num: int = 3) -> list[RankDevice]:
    meeting = threading.Barrier(num)
    said: list[tuple[object, int]] = [("", 0)] * num
    return [RankDevice(FakeRanks(rank, meeting, said)) for rank in range(num)]


@pytest.mark.parametrize("room", [1 << 30, 20, 0])
def test_what_one_rank_cannot_capture_none_replays(room: int, caplog: pytest.LogCaptureFixture) -> None:
    """One has no room for large graphs, another cannot record one that there is room for."""
    devices = rank_devices()
    devices[1].room, devices[2].broken = room, {decode(8)}
    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(device.capture) for device in devices]:
            done.result()
    captured = [set(device.ladder.graphs) for device in devices]
    assert captured[0] == captured[1] == captured[2]
    most = next(size for size in (64, 32, 16, 8, 4, 2, 1, 0) if size <= room)
    expected = [size for size in sizes(decode_shapes(64)) if size <= most and size != 8]
    assert sizes(list(captured[0])) == expected
    for num in range(1, 65):
        covering = {device.ladder.covering(StepShape(num, num, 1, True, num)) for device in devices}
        assert len(covering) == 1, "all pad a step to the same shape"
    assert ("another rank could not capture it" in caplog.text) == (room >= 8)


def test_a_rank_that_fails_in_the_midst_of_a_sum_says_so_rather_than_going_on() -> None:
    devices = rank_devices(2)
    devices[1].fault = torch.OutOfMemoryError("CUDA out of memory.")
    with ThreadPoolExecutor(2) as threads:
        first, second = [threads.submit(device.capture) for device in devices]
        with pytest.raises(torch.OutOfMemoryError):
            second.result()
        with pytest.raises(threading.BrokenBarrierError):
            first.result()

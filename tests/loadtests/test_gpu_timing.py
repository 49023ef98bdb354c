"""Time that a device takes, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loadtests.gpu import timing
from loadtests.gpu.timing import Ceilings

CUDA = torch.device("cuda", 0)


class FakeDevice:
    """Its clock goes on with every call; a graph replays the calls that were captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.num_captured = 0
        self.num_launched = 0
        self.is_capturing = False
        self.can_capture = True
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", lambda _: self)
        monkeypatch.setattr(timing, "event", lambda: FakeEvent(self))

    def __enter__(self) -> None:
        if not self.can_capture:
            raise RuntimeError("it waits")
        self.is_capturing = True

    def __exit__(self, *_: object) -> None:
        self.is_capturing = False

    def call(self, takes_ms: float) -> Callable[[], None]:
        def run() -> None:
            self.takes_ms = takes_ms
            if self.is_capturing:
                self.num_captured += 1
            else:
                self.num_launched += 1
                self.now_ms += takes_ms + 1.0  # by the host

        return run

    def replay(self) -> None:
        self.now_ms += self.num_captured * self.takes_ms


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self.at_ms = device, float("nan")

    def record(self) -> None:
        self.at_ms = self._device.now_ms

    def synchronize(self) -> None:
        assert self.at_ms == self._device.now_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


@pytest.mark.parametrize(("takes_ms", "num_calls"), [(0.0, 20), (0.25, 16), (4.0, 4), (30.0, 1)])
def test_calls_are_timed_in_graphs_of_a_fiftieth_of_a_second(
    takes_ms: float, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call, launched by the host, says how many there are; their time is without the host's."""
    device = FakeDevice(monkeypatch)
    assert timing.seconds(CUDA, device.call(takes_ms)) == pytest.approx(takes_ms / 1000)
    assert (device.num_captured, device.num_launched) == (num_calls, 2)


def test_no_more_than_200_calls_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    timing.seconds(CUDA, device.call(-1.0))
    assert device.num_captured == 200


def test_what_cannot_be_captured_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    device.can_capture = False
    assert timing.seconds(CUDA, device.call(4.0)) == pytest.approx(0.005)
    assert (device.num_captured, device.num_launched) == (0, 2 + 8 * 4)


def test_an_event_knows_when_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: str(options))
    assert str(timing.event()) == "{'enable_timing': True}"


def test_a_host_takes_the_median_of_calls_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([100.0, 5.0, 1.0, 2.0, 3.0, 4.0, 60.0, 70.0])
    clock = SimpleNamespace(now_s=0.0)

    def run() -> None:
        clock.now_s += next(times_s)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    assert timing.seconds(torch.device("cpu"), run) == 4.0
    assert next(times_s, None) is None


def test_ceilings_count_products_and_bytes_that_are_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = []

    def once(_: torch.device, run: Callable[[], object]) -> float:
        results.append(run())
        return 0.5

    monkeypatch.setattr(timing, "seconds", once)
    found = Ceilings.measured(8, 100, torch.bfloat16, torch.device("cpu"))
    assert found == Ceilings(bytes_per_s=2 * 100 / 0.5, flop_per_s=2 * 8 * 8 * 8 / 0.5)
    product, copy = results
    assert (product.shape, product.dtype) == ((8, 8), torch.bfloat16)
    assert product.float().std() > 0.5, "random numbers: a card is faster with zeros"
    assert copy.tolist() == [0] * 100

"""Work beside other work: on streams that wait for each other where a graph is captured, and else one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from penstock.engine.kernels import beside as module
from penstock.engine.kernels.beside import beside

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class FakeCuda:
    """Streams that note what is asked of which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_capturing: bool) -> None:
        self.current, self.asked = "main", list[tuple[str, str]]()
        fake = self

        class Stream:
            def __init__(self, name: object) -> None:
                self.name = "side" if name == CUDA else str(name)

            def wait_stream(self, other: Stream) -> None:
                fake.asked.append((self.name, f"waits for {other.name}"))

        @contextmanager
        def stream(side: Stream) -> Iterator[None]:
            self.current = side.name
            yield
            self.current = "main"

        module._side_stream.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(self.current))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.asked.append((self.current, name))
            return name

        return run


@pytest.fixture(autouse=True)
def _no_fake_stays() -> Iterator[None]:
    yield
    module._side_stream.cache_clear()


def test_in_a_graph_the_second_runs_between_two_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, is_capturing=True)
    assert beside(CUDA, cuda.work("routed"), cuda.work("shared")) == ("routed", "shared")
    by_stream = {name: [what for of, what in cuda.asked if of == name] for name in ("main", "side")}
    assert by_stream == {"main": ["routed", "waits for side"], "side": ["waits for main", "shared"]}
    places = [cuda.asked.index(each) for each in (("side", "waits for main"), ("main", "routed"))]
    assert places == sorted(places), "it waits for nothing that is to run beside it"


@pytest.mark.parametrize(("device", "is_capturing"), [(CUDA, False), (CPU, True)])
def test_elsewhere_they_run_one_after_another(
    device: torch.device, is_capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch, is_capturing=is_capturing)
    assert beside(device, cuda.work("routed"), cuda.work("shared")) == ("routed", "shared")
    assert cuda.asked == [("main", "routed"), ("main", "shared")]

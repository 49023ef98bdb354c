"""Passes the step thread's outputs to the thread, or the event loop, that asked for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from penstock.engine.engine import EngineState
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason, Output, Request


class CallOutputs:
    """The outputs of the requests of one call. `put` is for the step thread, the rest for whoever asked."""

    def __init__(self, requests: Sequence[Request], tell: Callable[[], None]) -> None:
        """`tell` is called on the step thread when there is something to take."""
        self.open = {request.request_id: request.n for request in requests}
        """Choices that have not ended, by request."""
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._outputs: SimpleQueue[Output | None] = SimpleQueue()
        self._tell = tell

    def put(self, output: Output | None) -> None:
        """None: the engine has ended, and nothing more will come."""
        self._outputs.put(output)
        self._tell()

    def __iter__(self) -> Iterator[tuple[int, Output]]:
        """Yields the outputs, each with the number of its request, as they come."""
        while self.open:
            yield self._taken(self._outputs.get())

    def arrived(self) -> Iterator[tuple[int, Output]]:
        """Takes what is there already."""
        while self.open and not self._outputs.empty():
            yield self._taken(self._outputs.get())

    def _taken(self, output: Output | None) -> tuple[int, Output]:
        if output is None:
            raise RuntimeError("the engine ended before the answer did")
        if output.finish_reason in (FinishReason.FAILED, FinishReason.CANCELLED):
            raise RuntimeError(output.error or "the engine ended the request")
        if output.finish_reason is not None:
            self.open[output.request_id] -= 1
            if not self.open[output.request_id]:
                del self.open[output.request_id]
        return self._numbers[output.request_id], output


class Deliveries:
    """Hands what the step thread delivers to the calls that wait for it."""

    def __init__(self) -> None:
        self.calls: dict[str, CallOutputs] = {}
        """The calls by request."""
        self.settled = threading.Event()
        """The model is loaded, or cannot be."""

    def deliver(self, report: StepReport) -> None:
        for output in report.outputs:
            if (call := self.calls.get(output.request_id)) is not None:
                call.put(output)

    def announce(self, state: EngineState) -> None:
        self.settled.set()
        if state is not EngineState.READY:
            for call in set(self.calls.values()):
                call.put(None)

"""Baselines for `LaneQueue`: first come, first served, with one line or one per lane."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.request_queue import UNLIMITED, Allowance, StepLoad
from penstock.priority.lanes import Lane


class FirstComeQueue:
    """The order of arrival; with `by_lane`, the more urgent lanes strictly first. Lets everybody in."""

    def __init__(self, *, by_lane: bool) -> None:
        self._by_lane = by_lane
        self._lines: dict[int, deque[Request]] = {lane: deque() for lane in Lane}

    def put(self, request: Request, now: float, num_cached: int = 0, num_in_use: int = 0) -> None:  # noqa: ARG002
        self._lines[request.lane if self._by_lane else 0].append(request)

    def depths(self) -> dict[Lane, int]:
        return {lane: len(self._lines[lane]) for lane in Lane}

    def allowance(self, *_: list[Sequence]) -> Allowance:
        return UNLIMITED

    def take(
        self,
        fits: Callable[[Request], bool],
        above: int | None = None,
        before: Request | None = None,  # noqa: ARG002
    ) -> Request | None:
        if above is not None and not self._by_lane:
            return None
        for lane, line in self._lines.items():
            if line and (above is None or lane < above):
                return line.popleft() if fits(line[0]) else None
        return None

    def passed_over(self) -> Request | None:
        return None

    def charge(self, work: list[tuple[Request, int, int, int]], now: float) -> None: ...

    def observe(self, load: StepLoad) -> None: ...

    def step_seconds(self, *_: int) -> float:
        return 0.0

    def settle(self, request: Request, now: float, sequence: Sequence | None = None) -> None: ...

    def victim(self, running: list[Sequence], beneficiary: Sequence) -> Sequence | None:  # noqa: ARG002
        """The newest, of the least urgent lane if there are lanes."""
        return max(running, key=lambda s: (self._by_lane and s.request.lane, s.order, s.index), default=None)

    def giving_way(self, request: Request, running: list[Sequence]) -> list[Sequence]:  # noqa: ARG002
        return []

"""The queue: requests that were let in and wait for the engine to have room.

Lanes are strict: the most urgent lane that has a request goes first; within a lane it is first come, first served.
Every lane is bounded in requests and in prompt tokens, and nobody waits longer than the lane's time to live.

Two threads meet here, the event loop (put, cancel, expire) and the engine's step thread (take, charge, victim). One
lock, handed in by the caller so that this module stays free of threads, is held for plain integer work only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from engine.request import Request, Sequence
from priority.lanes import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBounds:
    """How much may wait in one lane, and how long."""

    max_requests: int
    max_tokens: int
    """Prompt tokens."""
    ttl_s: float

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "ttl_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)}")


DEFAULT_BOUNDS: Mapping[Lane, LaneBounds] = {
    Lane.INTERACTIVE: LaneBounds(max_requests=256, max_tokens=262_144, ttl_s=60.0),
    Lane.STANDARD: LaneBounds(max_requests=1_024, max_tokens=1_048_576, ttl_s=300.0),
    Lane.BATCH: LaneBounds(max_requests=4_096, max_tokens=4_194_304, ttl_s=3_600.0),
}


class Refusal(Exception):
    """A request that is not let in.

    Attributes:
        reason: machine-readable, e.g. "queue_full".
        retry_after_s: when it is worth coming back.
        tenant_limit: True if it is this tenant's own limit, False if it is the server's.
    """

    def __init__(
        self, reason: str, message: str, retry_after_s: float, *, tenant_limit: bool = False
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.tenant_limit = tenant_limit


class LaneQueue:
    """Bounded FIFO queues, one per lane; the engine's RequestQueue."""

    def __init__(
        self, lock: AbstractContextManager[object], bounds: Mapping[Lane, LaneBounds] = DEFAULT_BOUNDS
    ) -> None:
        self._lock = lock
        self._bounds = bounds
        self._queues: dict[Lane, OrderedDict[str, Request]] = {lane: OrderedDict() for lane in Lane}
        self._num_tokens = dict.fromkeys(Lane, 0)
        self._drain = _DrainRate()

    def put(self, request: Request, now: float) -> None:
        """Lets a request in.

        Raises:
            Refusal: its lane is full.
        """
        lane = Lane(request.lane)
        bounds = self._bounds[lane]
        with self._lock:
            waiting = len(self._queues[lane])
            num_tokens = self._num_tokens[lane] + len(request.prompt_token_ids)
            if waiting >= bounds.max_requests or (waiting and num_tokens > bounds.max_tokens):
                retry_after_s = self._drain.time_for(max(1, waiting // 4), now)
                raise Refusal(
                    "queue_full", f"the {lane.label} lane is full ({waiting} waiting)", retry_after_s
                )
            self._queues[lane][request.request_id] = request
            self._num_tokens[lane] = num_tokens

    def cancel(self, request_id: str) -> bool:
        """True if the request was still waiting here; then it is gone and the engine never sees it."""
        with self._lock:
            return any(self._pop(lane, request_id) is not None for lane in Lane)

    def expire(self, now: float) -> list[Request]:
        """Removes and returns what has waited longer than its lane allows."""
        with self._lock:
            overdue = [
                request
                for lane, queue in self._queues.items()
                for request in queue.values()
                if now - request.arrival_s > self._bounds[lane].ttl_s
            ]
            for request in overdue:
                self._pop(Lane(request.lane), request.request_id)
            return overdue

    def depths(self) -> dict[Lane, int]:
        with self._lock:
            return {lane: len(queue) for lane, queue in self._queues.items()}

    def position(self, request_id: str) -> int | None:
        """How many requests go before this one; None if it does not wait here."""
        with self._lock:
            ahead = 0
            for lane in Lane:
                for other_id in self._queues[lane]:
                    if other_id == request_id:
                        return ahead
                    ahead += 1
            return None

    # The engine's side

    def take(self, fits: Callable[[Request], bool]) -> Request | None:
        """The head of the most urgent lane, if it fits. Nobody overtakes a head that waits for room."""
        with self._lock:
            for lane in Lane:
                head = next(iter(self._queues[lane].values()), None)
                if head is not None:
                    return self._pop(lane, head.request_id) if fits(head) else None
            return None

    def charge(self, work: list[tuple[Request, int, int]]) -> None:
        """First come, first served keeps no accounts."""

    def victim(self, running: list[Sequence]) -> Sequence | None:
        """The least urgent lane's newest sequence; of its request's choices, the one that loses least."""
        return max(running, key=lambda s: (s.request.lane, s.order, -s.num_computed, s.index), default=None)

    def note_finished(self, now: float) -> None:
        """Keeps the estimate of how fast the queue drains."""
        with self._lock:
            self._drain.note(now)

    def _pop(self, lane: Lane, request_id: str) -> Request | None:
        request = self._queues[lane].pop(request_id, None)
        if request is not None:
            self._num_tokens[lane] -= len(request.prompt_token_ids)
        return request


class _DrainRate:
    """Requests finished per second, as a moving average of the gaps between them."""

    def __init__(self) -> None:
        self._gap_s = 0.25
        self._last: float | None = None

    def note(self, now: float) -> None:
        if self._last is not None:
            self._gap_s += 0.1 * (now - self._last - self._gap_s)
        self._last = now

    def time_for(self, num_requests: int, now: float) -> float:
        """Seconds until so many more are likely to have finished, between 1 and 60."""
        since = now - self._last if self._last is not None else 0.0
        return min(60.0, max(1.0, num_requests * max(self._gap_s, since / 10)))

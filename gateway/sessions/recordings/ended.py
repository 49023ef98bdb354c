"""Recordings that have ended and are kept for those who come back for them."""

from __future__ import annotations

from collections import Counter, OrderedDict

from penstock.gateway.sessions.recordings.recording import Recording


class EndedRecordings:
    """The recordings that ended lately. When they are too large, the tenant that has most gives up its oldest."""

    def __init__(self) -> None:
        self._shares: dict[str, OrderedDict[str, tuple[Recording, int]]] = {}
        """The recordings of each tenant that has any and their bytes by id, the earliest end first."""
        self._sizes: Counter[str] = Counter()
        """The bytes of each tenant's recordings."""

    @property
    def num_bytes(self) -> int:
        """The memory that all of them take, about."""
        return self._sizes.total()

    def add(self, recording: Recording) -> None:
        self.discard(recording)
        num_bytes = recording.num_bytes
        self._shares.setdefault(recording.tenant, OrderedDict())[recording.id] = recording, num_bytes
        self._sizes[recording.tenant] += num_bytes

    def discard(self, recording: Recording) -> None:
        share = self._shares.get(recording.tenant, OrderedDict())
        _, num_bytes = share.pop(recording.id, (None, 0))
        self._sizes[recording.tenant] -= num_bytes
        if not share:
            self._shares.pop(recording.tenant, None)
            del self._sizes[recording.tenant]

    def surplus(self, before_s: float, max_bytes: int) -> list[Recording]:
        """The recordings to forget, which nobody reads: those that ended before `before_s`, and those of too much."""
        surplus: dict[str, Recording] = {}
        excess = self.num_bytes - max_bytes
        for share in self._shares.values():
            for recording, num_bytes in share.values():
                if (recording.ended_s or 0.0) >= before_s:
                    break
                if not recording.is_read:
                    surplus[recording.id] = recording
                    excess -= num_bytes
        self._give_up(excess, surplus)
        return list(surplus.values())

    def _give_up(self, excess: int, surplus: dict[str, Recording]) -> None:
        """Collects recordings of so many bytes, each from the tenant that has the most at the time."""
        sizes = self._sizes.copy()
        oldest = {tenant: iter(share.values()) for tenant, share in self._shares.items()}
        while excess > 0 and sizes:
            largest = max(sizes, key=sizes.__getitem__)
            recording, num_bytes = next(oldest[largest], (None, 0))
            if recording is None:
                del sizes[largest]
            elif recording.id in surplus:
                sizes[largest] -= num_bytes
            elif not recording.is_read:
                surplus[recording.id] = recording
                sizes[largest] -= num_bytes
                excess -= num_bytes

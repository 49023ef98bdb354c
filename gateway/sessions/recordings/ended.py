"""Recordings that have ended and are kept for those who come back for them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from penstock.gateway.sessions.recordings.recording import Recording


@dataclass(slots=True)
class _Share:
    """A _Share is what one tenant has."""

    num_bytes: int = 0
    recordings: OrderedDict[str, tuple[Recording, int]] = field(default_factory=OrderedDict)
    """By id, the recordings and their bytes, the one that ended first in front."""


class EndedRecordings:
    """The recordings that ended lately. When they are too large, the tenant that has most gives up its oldest."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """The memory that all of them take, about."""
        self._shares: dict[str, _Share] = {}
        """By tenant; none is empty."""

    def add(self, recording: Recording) -> None:
        self.discard(recording)
        share, num_bytes = self._shares.setdefault(recording.tenant, _Share()), recording.num_bytes
        share.recordings[recording.id] = recording, num_bytes
        share.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def discard(self, recording: Recording) -> None:
        share = self._shares.get(recording.tenant, _Share())
        _, num_bytes = share.recordings.pop(recording.id, (None, 0))
        share.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        if not share.recordings:
            self._shares.pop(recording.tenant, None)

    def surplus(self, before_s: float, max_bytes: int) -> list[Recording]:
        """The recordings to forget, which nobody reads: those that ended before `before_s`, and those of too much."""
        found: dict[str, Recording] = {}
        excess = self.num_bytes - max_bytes
        for share in self._shares.values():
            for recording, num_bytes in share.recordings.values():
                if (recording.ended_s or 0.0) >= before_s:
                    break
                if not recording.is_read:
                    found[recording.id] = recording
                    excess -= num_bytes
        self._give_up(excess, found)
        return list(found.values())

    def _give_up(self, excess: int, found: dict[str, Recording]) -> None:
        """Adds to what was found so many bytes, of the tenant that has most at the time."""
        sizes = {tenant: share.num_bytes for tenant, share in self._shares.items()}
        oldest = {tenant: iter(share.recordings.values()) for tenant, share in self._shares.items()}
        while excess > 0 and sizes:
            largest = max(sizes, key=sizes.__getitem__)
            recording, num_bytes = next(oldest[largest], (None, 0))
            if recording is None:
                del sizes[largest]
            elif recording.id in found:
                sizes[largest] -= num_bytes
            elif not recording.is_read:
                found[recording.id] = recording
                sizes[largest] -= num_bytes
                excess -= num_bytes

"""Recordings that have ended and are kept for those who come back for them."""

from __future__ import annotations

from collections import OrderedDict

from gateway.sessions.recordings.recording import Recording


class EndedRecordings:
    """The recordings that ended lately, in the order in which they ended."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """The memory that all of them take, about."""
        self._recordings: OrderedDict[str, tuple[Recording, int]] = OrderedDict()

    def add(self, recording: Recording) -> None:
        self.discard(recording.id)
        self._recordings[recording.id] = recording, recording.num_bytes
        self.num_bytes += recording.num_bytes

    def discard(self, recording_id: str) -> None:
        _, num_bytes = self._recordings.pop(recording_id, (None, 0))
        self.num_bytes -= num_bytes

    def surplus(self, before_s: float, max_bytes: int) -> list[Recording]:
        """The recordings to forget: nobody reads them, and ended before `before_s` or are the oldest of too many."""
        found: list[Recording] = []
        excess = self.num_bytes - max_bytes
        for recording, num_bytes in self._recordings.values():
            if excess <= 0 and (recording.ended_s or 0.0) >= before_s:
                break
            if not recording.is_read:
                found.append(recording)
                excess -= num_bytes
        return found

"""The events of a recording as they are kept: once for all readers, and once what most of them have in common."""

from __future__ import annotations

from collections import deque
from itertools import islice

MAX_KEPT_BYTES = 8 * 1024 * 1024
"""The bytes of one recording's events; the oldest beyond it are forgotten."""
FRAME_BYTES = 48
"""The bytes that an event takes beside its frame."""
_MARKS = [bytes([code]) for code in range(8)]
"""Control characters, which no frame has, each in place of what frames have in common."""


class KeptFrames:
    """Frames by their number, the first ones forgotten past a bound."""

    def __init__(self) -> None:
        self.num = 0
        """The number of frames, forgotten ones included."""
        self.num_bytes = 0
        self._frames: deque[bytes] = deque()
        self._common: list[bytes] = []
        """What frames have in common, by its mark."""
        self._latest = b""
        self._mark = b""
        """The mark of the latest of these; empty if it has none."""

    @property
    def num_dropped(self) -> int:
        return self.num - len(self._frames)

    def append(self, frame: bytes, common: bytes) -> None:
        """Keeps a frame; it need not have what is `common` to those around it."""
        if common is not self._latest:
            self._turn_to(common)
        if self._mark:
            frame = frame.replace(common, self._mark, 1)
        self.num += 1
        self._frames.append(frame)
        self.num_bytes += len(frame) + FRAME_BYTES
        while self.num_bytes > MAX_KEPT_BYTES:
            self.num_bytes -= len(self._frames.popleft()) + FRAME_BYTES

    def since(self, number: int, most: int | None = None) -> list[bytes]:
        """Returns at most `most` frames from that number on, as far as they are kept."""
        start = max(0, number - self.num_dropped)
        return list(map(self._whole, islice(self._frames, start, None if most is None else start + most)))

    def _turn_to(self, common: bytes) -> None:
        self._latest, self._mark = common, b""
        if common and len(self._common) < len(_MARKS):
            self._mark = _MARKS[len(self._common)]
            self._common.append(common)

    def _whole(self, frame: bytes) -> bytes:
        for mark, common in zip(_MARKS, self._common, strict=False):
            frame = frame.replace(mark, common, 1)
        return frame

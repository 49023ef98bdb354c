"""The lanes: who is in a hurry."""

from __future__ import annotations

from enum import IntEnum


class Lane(IntEnum):
    """The smaller the number, the more urgent."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        return self.name.lower()

"""A tier: a place that keeps the KV of blocks, which is slower than the device's memory and has more room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.engine.tiers.block_file import BlockKey, Payload
from penstock.engine.tiers.rates import ReadRate


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """The contents of a tier, and counts that only grow."""

    num_blocks: int = 0
    """The blocks in it that this server knows of."""
    num_bytes: int = 0
    """The bytes that all of it takes, what belongs to other servers included."""
    max_bytes: int = 0
    num_hits: int = 0
    """Blocks that were read."""
    num_misses: int = 0
    """Blocks that it was said to have and that could not be read."""
    bytes_written: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    """Time that the reads took, added up over threads."""
    num_failures: int = 0
    """Errors while writing, and blocks that were found damaged."""


class Tier(Protocol):
    """A tier of one digest's blocks. All methods are for any thread; payloads are never changed by anybody."""

    name: str
    """A short name for metrics and logs, such as "disk"."""
    keeps: bool
    """Whether what is written to it can be read again; where it is False, others fill it."""

    @property
    def read_rate(self) -> ReadRate | None:
        """The time that reads take, if the tier notes it itself, because a read may also have to wait for others."""

    def has(self, key: BlockKey) -> bool:
        """Returns whether a block is likely to be there; it never blocks, and `read` may disagree."""

    def read(self, key: BlockKey) -> Payload | None:
        """Returns the payload of a block, which was verified; None if it is not there. It may block.

        A block that cannot be read is one that `has` denies from then on. Nothing is raised.
        """

    def write(self, key: BlockKey, payload: Payload) -> None:
        """Keeps a block, in place of those that were used longest ago. It may block; it raises nothing, but counts."""

    def forget(self, key: BlockKey) -> None:
        """Drops a block whose content is not to be trusted."""

    def look_over(self) -> None:
        """Brings what is known of the tier up to date; called now and then, by one thread. It may block."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Frees what it holds in this process; what it keeps elsewhere stays there."""

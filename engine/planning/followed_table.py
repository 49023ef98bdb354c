"""What somebody who keeps a copy of a sequence's block table knows of it: a step tells him only what changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.planning.request import Sequence


@dataclass(slots=True)
class FollowedTable:
    """A block table as it was when it was looked at last. The work of a look is the entries that changed since."""

    blocks: list[int] = field(default_factory=list)
    """The sequence's own list, by which another table of it is recognised."""
    num_blocks: int = 0
    num_rewritten: int = 0

    def changes(self, sequence: Sequence) -> tuple[list[int], int]:
        """Returns the places of known entries that were overwritten, in order, and the first place that is new."""
        blocks, rewritten = sequence.block_table, sequence.rewritten
        if blocks is not self.blocks:
            places, first = list[int](), 0
        else:
            first = self.num_blocks
            places = sorted({place for place in rewritten[self.num_rewritten :] if place < first})
        self.blocks, self.num_blocks, self.num_rewritten = blocks, len(blocks), len(rewritten)
        return places, first

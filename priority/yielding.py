"""Which running sequences give way to more urgent work."""

from __future__ import annotations

from penstock.engine.planning.request import Sequence

MAX_PREEMPTIONS = 3
"""A sequence that gave way so often is not asked again."""
MAX_VICTIMS = 2
"""Running sequences that give way for one request."""


def yielding(running: list[Sequence], lane: int) -> list[Sequence]:
    """Those of strictly lower lanes that were not asked too often: lowest lane, cheapest recompute, newest first."""
    lower = [
        s for s in running if s.request.lane > lane and s.num_preemptions < MAX_PREEMPTIONS and s.block_table
    ]
    lower.sort(key=lambda s: (-s.request.lane, s.num_computed, -s.order, s.index))
    return lower

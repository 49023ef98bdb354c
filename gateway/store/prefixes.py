"""Which prefixes are worth having again: those used most and last, in chains from their start."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gateway.store.interface import PrefixChange

HALF_LIFE_S = 3600.0
"""Twice as many hits are worth as much as being used so much later."""


def hotness(change: PrefixChange) -> float:
    """In seconds since 1970; grows with hits and with the time of last use, and needs no recounting as time passes."""
    return change.last_used_s + HALF_LIFE_S * math.log2(1 + max(0, change.hits))


def complete_chains(hottest_first: Iterable[PrefixChange], limit: int) -> list[PrefixChange]:
    """At most `limit` blocks, parents before children; none whose chain has a gap among those given."""
    found = {change.hash: change for change in hottest_first}
    taken: dict[bytes, PrefixChange] = {}
    for change in found.values():
        missing = _missing(change, found, taken)
        if missing is not None and len(taken) + len(missing) <= limit:
            taken.update((block.hash, block) for block in reversed(missing))
    return list(taken.values())


def _missing(
    change: PrefixChange, found: dict[bytes, PrefixChange], taken: dict[bytes, PrefixChange]
) -> list[PrefixChange] | None:
    """What the chain up to here still lacks, last first; None if the chain has a gap."""
    missing = []
    block: PrefixChange | None = change
    while block is not None and block.hash not in taken:
        missing.append(block)
        if block.parent is None:
            return missing if block.depth == 1 else None
        parent = found.get(block.parent)
        if parent is not None and parent.depth != block.depth - 1:
            return None
        block = parent
    return missing if block is not None else None

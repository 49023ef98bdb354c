"""What is found for a sequence, and what a sequence, a chunk and a snapshot know of the slots that hold states.

A layer with a state (a delta net, a state space, a short convolution) keeps, in place of keys and values for every
token, one state of fixed size. All of a sequence's states are in one *slot*. A slot also has *pending rows*: the inputs
of some tokens behind its state, from which the state can be brought on to any of these tokens without a pass through
the model. They belong to drafts that may turn out wrong, or let a snapshot be found at any of several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple


class Save(NamedTuple):
    """A snapshot that a step takes of a state on its way through a chunk."""

    rows: int
    """It is taken after so many rows of the chunk."""
    slot: int
    num_pending: int
    """The rows behind them that become the slot's pending rows."""


@dataclass(slots=True)
class ChunkState:
    """The slots that a chunk reads the state of its sequence from, and leaves it in.

    The state after all rows that are no drafts is written to `target`; drafts become its pending rows. No slot that a
    step writes is read by another sequence of the step.
    """

    source: int
    """0 stands for the state of no tokens, which is all zeros."""
    target: int
    replayed: int
    """The pending rows of `source` that come before the chunk."""
    saves: ListLike[Save] = ()


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state that can be found by the tokens that it follows from: by the chain of hashes, and those after it."""

    slot: int
    base: int
    """The tokens that the state follows from."""
    key: bytes
    """The hash of the last full block of these tokens, or the start of the chain if there is none."""
    tail: list[int]
    """The tokens after that block, up to the last pending row."""
    blocks: list[int]
    """The entries of block tables that hold the keys and values of the tail."""
    end: int
    """The tokens that it follows from with all pending rows: it is found at each token from `base` on."""
    parent: Snapshot | None = None
    """One before it in its chain, which may be gone."""
    used: int = 0
    """The time of its last use, as a count of started requests."""
    kept_as: bytes = b""
    """The hash by which its state may be kept outside of the device's memory: its key, if the state follows from full
    blocks and is not private."""
    num_fetched: int = 0
    """The tokens that it was brought back for, if it was, until a sequence finds it."""
    is_gone: bool = False

    def reach(self, tail: ListLike[int]) -> int:
        """The tokens at which it is found by a prompt that has these tokens, or fewer, after the same block; 0 if at
        none."""
        own = self.tail
        if tail == own:
            return self.end
        common = next((i for i, (a, b) in enumerate(zip(tail, own, strict=False)) if a != b), len(tail))
        found = self.end - len(own) + common
        return found if found >= self.base else 0

    @property
    def gain(self) -> int:
        """The tokens that have to be computed again if it is gone."""
        while self.parent is not None and self.parent.is_gone:
            self.parent = self.parent.parent
        return self.end - (0 if self.parent is None else self.parent.end)

    def covers(self, other: Snapshot) -> bool:
        """Whether it is found wherever the other is, of those that have its key."""
        is_longer = self.base <= other.base and self.end >= other.end
        return is_longer and self.tail[: len(other.tail)] == other.tail


@dataclass(slots=True, eq=False)
class Prefix:
    """The first tokens of a sequence that are cached, and what it shares if it starts now."""

    entries: list[int] = field(default_factory=list)
    """The table entries of their full blocks, those of the same tokens side by side."""
    num_tokens: int = 0
    snapshot: Snapshot | None = None
    """The state after them, where layers have one."""
    partial: ListLike[int] = ()
    """The entries of the block that they end in, if they do not end with a block; the sequence gets a copy of it."""
    num_known: int = 0
    """The full blocks that are cached, whether there is a state after them or not."""
    key: tuple[object, int, int] = (None, 0, 0)
    """The prefix index, its generation, and the most tokens that could be found."""
    num_drops: int = 0
    """The drops of the prefix index when the entries were up to date."""
    ready: bytearray = field(default_factory=bytearray)
    """1 for each entry that takes no free block when the sequence starts: that of a block in use, and one that is 0."""
    num_ready: int = 0
    """These entries, as they were counted last."""
    counted_at: int = -1
    """The generation of the pool at which these were counted."""


@dataclass(frozen=True, slots=True)
class StateUse:
    """The use of a model's state slots."""

    num_slots: int = 0
    """0 if no layer has a state."""
    num_held: int = 0
    """The slots held by a sequence, alone or together with a snapshot."""
    num_snapshots: int = 0
    """The snapshots that can be found; most have a slot of their own."""


@dataclass(slots=True)
class SequenceState:
    """The slots of a running sequence, as they will be once the launched steps are done."""

    slot: int = 0
    """The slot with the state of the first `at` tokens; others may share it. Pending rows follow up to
    `num_computed`."""
    at: int = 0
    next: int = 0
    """The slot that the next step writes in place of `slot`, if it may not write that; else 0."""
    started_at: int = 0
    """The tokens that the sequence had found, or shared, when it began to run."""
    fork: tuple[int, int] | None = None
    """A slot with the state one token before the prompt's end, from which other choices fork, and the tokens of that
    state without pending rows."""
    junctions: list[int] = field(default_factory=list)
    """Tokens after which snapshots are to be taken: others leave its chain there."""
    promised: list[Snapshot] = field(default_factory=list)
    """The snapshots that steps in flight take."""
    last: Snapshot | None = None
    """The deepest snapshot in its chain."""
    is_torn: bool = False
    """Whether its slot or its blocks may not hold what they should: a step that writes or copies them is not done."""

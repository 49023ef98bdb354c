"""Guesses: the drafts that a step may compute for its sequences, and the record of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.planning.chunks import set_drafts
from penstock.engine.planning.ranked_memory import Memory
from penstock.engine.planning.step import Chunk, StepPlan


@dataclass(slots=True)
class Record:
    """The record of a sequence's drafts."""

    rates: dict[str, float]
    """The share of right drafts by proposer."""
    start: int = 0
    """The tokens that the sequence had when drafts were proposed last."""
    num_read: int = 0
    """The tokens that the draft model had read when it drafted last, its drafts included."""
    proposed: dict[str, list[int]] = field(default_factory=dict)
    """These drafts by proposer, computed or not."""


@dataclass(slots=True)
class Guess:
    """The drafts that a chunk may get."""

    chunk: Chunk
    record: Record
    length: int
    """No more can be used."""
    proposer: str = ""
    rate: float = 0.0
    """The share of the proposer's drafts that are supposed to be right."""
    drafts: list[int] = field(default_factory=list)

    def take(self, proposer: str, drafts: list[int]) -> None:
        self.proposer, self.rate, self.drafts = proposer, self.record.rates[proposer], drafts

    def add(self, plan: StepPlan, count: int, memory: Memory) -> None:
        """Adds so many drafts to the chunk, if there are free blocks for them: nobody gives way for a guess."""
        chunk = self.chunk
        copies = memory.grow(chunk.sequence, chunk.sequence.num_computed + count)
        if copies is None:
            return
        plan.copies.extend(copies)
        set_drafts(plan, chunk, self.drafts[:count], self.proposer)

    def is_copied(self, plan: StepPlan) -> bool:
        """Returns whether a block of the sequence still has to be copied, so that a head would find nothing in it."""
        blocks = self.chunk.sequence.block_table
        return any(target in blocks for _, target in plan.copies)

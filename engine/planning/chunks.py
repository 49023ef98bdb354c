"""Taking chunks out of a step that is planned and not launched."""

from __future__ import annotations

from engine.planning.request import Sequence
from engine.planning.step import Chunk, Plan


def withdraw(plan: Plan, sequence: Sequence) -> int:
    """Takes a sequence out of a plan, with the block copies made for it; returns how many tokens it had there.

    Its `num_computed` still counts them.
    """
    num_tokens = 0
    for chunk in [c for c in plan.chunks if c.sequence is sequence]:
        plan.chunks.remove(chunk)
        sequence.num_pending -= chunk.samples
        num_tokens += chunk.num_tokens
    plan.num_tokens -= num_tokens
    held = set(sequence.block_table)
    plan.copies = [copy for copy in plan.copies if copy[1] not in held]
    return num_tokens


def cut(plan: Plan, chunk: Chunk, num_tokens: int) -> None:
    """Leaves the last tokens of a chunk, but not all of them, to a later step."""
    chunk.sequence.num_computed -= num_tokens
    chunk.sequence.num_pending -= chunk.samples
    chunk.samples = False
    chunk.num_tokens -= num_tokens
    plan.num_tokens -= num_tokens


def drop_drafts(plan: Plan) -> int:
    """Leaves out all drafts of a plan; returns how many tokens they were."""
    num_dropped = 0
    for chunk in plan.chunks:
        num_drafts, chunk.drafts, chunk.proposer = len(chunk.drafts), (), ""
        chunk.num_tokens -= num_drafts
        chunk.sequence.num_computed -= num_drafts
        num_dropped += num_drafts
    plan.num_tokens -= num_dropped
    return num_dropped

"""Questions about the chunks of a planned step, and taking some out before it is launched."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as TokenIds

from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import Chunk, StepPlan


def is_plain(plan: StepPlan) -> bool:
    """Whether every sequence of a step computes the token that it sampled last, and its drafts, if it has any.

    Only the next tokens are to be told then.
    """
    return not plan.copies and all(map(_is_plain, plan.chunks))


def _is_plain(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    request = sequence.request
    return (
        chunk.samples
        and chunk.num_tokens == 1 + len(chunk.drafts)
        and chunk.start >= sequence.num_prompt_tokens
        and request.num_logprobs is None
        and not request.branches
        and not request.sampling.is_guided
    )


def withdraw(plan: StepPlan, sequence: Sequence) -> int:
    """Takes a sequence out of a plan, with the block copies made for it; returns how many tokens it had there."""
    num_tokens = 0
    for chunk in [c for c in plan.chunks if c.sequence is sequence]:
        plan.chunks.remove(chunk)
        if not chunk.is_stale:
            sequence.num_computed = chunk.start
        sequence.num_pending -= chunk.samples + len(chunk.drafts)
        sequence.num_unsure -= len(chunk.drafts)
        num_tokens += chunk.num_tokens
    plan.num_tokens -= num_tokens
    held = set(sequence.block_table)
    plan.copies = [copy for copy in plan.copies if copy[1] not in held]
    return num_tokens


def cut(plan: StepPlan, chunk: Chunk, num_tokens: int) -> None:
    """Leaves the last tokens of a chunk without drafts, but not all of them, to a later step."""
    chunk.sequence.num_computed -= num_tokens
    chunk.sequence.num_pending -= chunk.samples
    chunk.samples = False
    chunk.num_tokens -= num_tokens
    plan.num_tokens -= num_tokens


def set_drafts(plan: StepPlan, chunk: Chunk, drafts: TokenIds[int], proposer: str = "") -> None:
    """Replaces a chunk's drafts; its sequence has blocks for them."""
    sequence, num_more = chunk.sequence, len(drafts) - len(chunk.drafts)
    chunk.drafts, chunk.proposer = drafts, proposer if drafts else ""
    chunk.num_tokens += num_more
    sequence.num_computed += num_more
    sequence.num_pending += num_more
    sequence.num_unsure += num_more
    plan.num_tokens += num_more


def take_back(plan: StepPlan, wrong: Mapping[Sequence, int]) -> None:
    """The chunks of a step that followed one with drafts begin earlier, by the drafts that were wrong."""
    for chunk in plan.chunks:
        chunk.start -= wrong.get(chunk.sequence, 0)


def drop_drafts(plan: StepPlan) -> int:
    """Leaves out all drafts of a plan; returns how many tokens they were."""
    num_dropped = plan.num_drafts
    for chunk in plan.chunks:
        set_drafts(plan, chunk, ())
    return num_dropped

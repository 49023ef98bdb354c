"""The memory and limits of a scheduler, as they follow from the facts of a runner."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.planning.device import RunnerFacts
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.prefix_events import PrefixLog
from penstock.engine.planning.ranked_memory import Memory, RankedMemory
from penstock.engine.planning.step_results import SchedulerLimits


def make_memory(facts: RunnerFacts, *, prefix_cache: bool, log: PrefixLog | None) -> Memory:
    """The memory of no sequence, on what the runner has."""

    def part(after: SequenceMemory | None = None) -> SequenceMemory:
        return SequenceMemory(
            facts.num_blocks,
            facts.block_size,
            num_states=facts.num_states,
            num_pending=facts.num_pending,
            prefix_cache=prefix_cache,
            windows=facts.windows,
            log=log,
            after=after,
        )

    return part() if facts.num_ranks == 1 else RankedMemory(facts.num_ranks, part)


def fit_limits(limits: SchedulerLimits, facts: RunnerFacts, memory: Memory) -> SchedulerLimits:
    """The limits of which none is beyond what the runner can do."""
    return replace(
        limits,
        max_batch_tokens=min(limits.max_batch_tokens, facts.max_batch_tokens),
        max_num_seqs=min(limits.max_num_seqs, memory.max_running),
        max_model_len=min(limits.max_model_len, facts.max_model_len),
        max_scored=facts.max_scored,
        num_stages=facts.num_stages,
    )

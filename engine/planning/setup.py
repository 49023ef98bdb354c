"""The tables and limits of a scheduler, as they follow from the facts of a runner."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.planning.block_tables import BlockTables
from penstock.engine.planning.prefix_events import PrefixLog
from penstock.engine.planning.state_tables import StateTables
from penstock.engine.planning.step import RunnerFacts
from penstock.engine.planning.step_results import SchedulerLimits


def make_tables(facts: RunnerFacts, *, prefix_cache: bool, log: PrefixLog | None) -> BlockTables:
    """The tables of an empty pool, with slots for states where the model has layers with a state."""
    if not facts.num_states:
        return BlockTables(
            facts.num_blocks, facts.block_size, prefix_cache=prefix_cache, windows=facts.windows, log=log
        )
    return StateTables(
        facts.num_blocks,
        facts.block_size,
        num_states=facts.num_states,
        num_pending=facts.num_pending,
        prefix_cache=prefix_cache,
        windows=facts.windows,
        log=log,
    )


def fit_limits(limits: SchedulerLimits, facts: RunnerFacts, tables: BlockTables) -> SchedulerLimits:
    """The limits of which none is beyond what the runner can do."""
    return replace(
        limits,
        max_batch_tokens=min(limits.max_batch_tokens, facts.max_batch_tokens),
        max_num_seqs=min(limits.max_num_seqs, tables.max_running),
        max_model_len=min(limits.max_model_len, facts.max_model_len),
        max_scored=facts.max_scored,
    )

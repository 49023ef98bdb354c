"""The facts of a loaded model that planning has to know."""

from __future__ import annotations

from engine.execution.loaded import LoadedModel
from engine.planning.request import NO_LIMIT
from engine.planning.step import RunnerFacts

_MOST_SCORED = 64
"""Tokens of prompts that a step on a CPU scores while other sequences run: their logits take longer than their layers
where the vocabulary is large and the model small."""


def facts_of(model: LoadedModel, num_ahead: int | None = None) -> RunnerFacts:
    """The facts of a model.

    Args:
        num_ahead: overrides how many steps may be in flight while the next is planned.
    """
    is_on_cpu, options, states = model.device.type == "cpu", model.options, model.states
    return RunnerFacts(
        num_blocks=model.kv.num_blocks,
        block_size=model.kv.block_size,
        max_batch_tokens=options.max_batch_tokens,
        num_ahead=int(not is_on_cpu) if num_ahead is None else num_ahead,
        max_model_len=model.max_model_len,
        windows=model.kv.layout.windows,
        max_drafts=options.max_drafts,
        max_rows=options.max_rows,
        max_scored=_MOST_SCORED if is_on_cpu else NO_LIMIT,
        has_draft_model=model.draft is not None,
        num_states=0 if states is None else states.num_slots,
        num_pending=0 if states is None else states.layout.num_pending,
        has_experts=model.config.spec.chosen_share > 0,
    )

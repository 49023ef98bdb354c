"""The facts of a loaded model that planning has to know."""

from __future__ import annotations

from penstock.engine.execution.block_copies import BlockCopies, StateCopies
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.planning.device import RunnerFacts
from penstock.engine.planning.request import NO_LIMIT

_MOST_SCORED = 64
"""Tokens of prompts that a step on a CPU scores while other sequences run: their logits take longer than their layers
where the vocabulary is large and the model small."""
_LONGEST_AHEAD_S = 0.05
"""The longest step that runs ahead. Python's work between two steps takes a few milliseconds, a twentieth of it."""


def facts_of(model: LoadedModel, num_ahead: int | None = None, *, runs_plain: bool = False) -> RunnerFacts:
    """The facts of a model.

    Args:
        num_ahead: overrides how many steps may be in flight while the next is planned.
        runs_plain: whether plain steps run concurrently with the host.
    """
    is_on_cpu, options, num_states = model.device.type == "cpu", model.options, model.memory.num_states
    num_stages = 1 if model.world is None else model.world.num_stages
    if num_ahead is None and num_stages > 1:
        num_ahead = num_stages - 1
    is_plain_beside = is_on_cpu and num_ahead is None and runs_plain
    return RunnerFacts(
        num_blocks=model.kv.num_blocks,
        block_size=model.kv.block_size,
        max_batch_tokens=options.max_batch_tokens,
        num_ahead=int(not is_on_cpu or is_plain_beside) if num_ahead is None else num_ahead,
        plain_ahead_s=_LONGEST_AHEAD_S if is_plain_beside else None,
        max_model_len=model.max_model_len,
        windows=model.kv.layout.windows,
        max_drafts=options.max_drafts,
        max_rows=options.max_rows,
        max_scored=_MOST_SCORED if is_on_cpu else NO_LIMIT,
        has_draft_model=model.draft is not None,
        drafts_ahead=_drafts_ahead(model) and not runs_plain,
        num_states=num_states,
        num_pending=options.num_pending if num_states else 0,
        has_experts=model.config.spec.chosen_share > 0,
        num_stages=num_stages,
        carrier=BlockCopies(model) if model.world is None else None,
        state_carrier=StateCopies(model) if model.world is None and num_states else None,
        num_ranks=1 if model.kernels.expert_ranks is None else model.kernels.expert_ranks.size,
    )


def _drafts_ahead(model: LoadedModel) -> bool:
    """Whether the draft model runs kernel by kernel, and only positions tell what a sequence keeps of wrong drafts."""
    is_alone = model.kernels.ranks is None and model.states is None
    return is_alone and model.draft is not None and model.draft.native is None

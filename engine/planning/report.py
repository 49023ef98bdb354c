"""What is told of a step once it has come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from penstock.engine.planning.prefix_events import PrefixEvent
from penstock.engine.planning.request import Output
from penstock.engine.planning.step import ExpertUse
from penstock.engine.planning.timings import NO_SECONDS, DraftCount, DraftSeconds


@dataclass(slots=True, kw_only=True)
class StepReport:
    """Everything that one step brought, delivered at once."""

    outputs: list[Output]
    started_s: float
    duration_s: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)
    """The drafts that the step verified, and the right ones, each of which brought one token more, by proposer."""
    draft_seconds: DraftSeconds = NO_SECONDS
    failed_proposers: ListLike[str] = ()
    """The proposers that failed since the report before."""
    num_running: int = 0
    num_waiting: int = 0
    """Sequences that were preempted, or that wait for a prefix that another sequence computes."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    """Evictable cached blocks included."""
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    prefix_events: Iterable[PrefixEvent] = ()
    """The events of cached blocks since the report before."""
    experts: ExpertUse | None = None
    """None if they were not counted in this step."""
    error: str | None = None
    """The step failed, and with it the sequences whose outputs say so."""

"""Plain steps on a CPU: one native call each, while the host goes on.

A step whose sequences all compute the token that they sampled last, and perhaps drafts, needs almost nothing from the
host. Python's work between two such steps, the text of the tokens and their way out included, takes a tenth of a small
model's step and more, for the weights have driven it out of the caches; so it is done while the next step runs, unless
that one has drafts, which follow tokens that the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from itertools import islice

import torch

from penstock.engine.execution.expert_counts import ExpertCounts
from penstock.engine.execution.faults import told
from penstock.engine.execution.landing import NOT_FINITE, num_right
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.seats import Seats
from penstock.engine.execution.state_slots import state_words
from penstock.engine.kernels.cpu.native import NativeChoose, NativeLinear
from penstock.engine.planning.chunks import is_plain
from penstock.engine.planning.step import Sampled, StepPlan, StepResult
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.native_steps import NativeStep, NativeSteps
from penstock.engine.sampling.sampler import Sampler, has_penalties

_CPU = torch.device("cpu")


class PlainSteps:
    """The plain steps of a model that native kernels run as a whole."""

    def __init__(
        self,
        sampler: Sampler,
        native: NativeSteps,
        seats: Seats,
        counts: ExpertCounts | None,
        *,
        has_states: bool,
    ) -> None:
        self._sampler, self._native, self._seats = sampler, native, seats
        self._counts, self._has_states = counts, has_states

    @classmethod
    def of(cls, model: LoadedModel, seats: Seats) -> PlainSteps | None:
        """None if something of a step needs the host."""
        team, decoder, lm_head = model.kernels.team, model.decoder, model.lm_head
        if team is None or not isinstance(decoder, NativeDecoder) or not isinstance(lm_head, NativeLinear):
            return None
        tables = model.sampler.tables
        native = NativeSteps(team, decoder, lm_head, NativeChoose(team), model.table, tables)
        return cls(model.sampler, native, seats, model.expert_counts, has_states=model.states is not None)

    def launch(self, plan: StepPlan) -> PlainStepInFlight | None:
        """Launches a plain step, or runs it if the host is not to go on meanwhile.

        Returns:
            None if the step needs more of the host; then nothing is in flight any more.
        """
        with told(plan, self._seats, _CPU):
            seats = self._seats.seated(plan) if _is_whole(plan) else None
            filters = self._sampler.filters(seat.number for seat in seats or ())
            if seats is None or not filters.is_fused:
                plan.is_beside = False
                self.drain()
                return None
            step = self._seats.table_step(plan, seats)
            if self._has_states:
                step.state_slots, step.state_saves = state_words(plan.chunks)
            drafts = [chunk.drafts for chunk in plan.chunks] if plan.num_drafts else []
            launched = (self._native.launch if plan.is_beside else self._native.run)(step, filters)
            self._seats.note_launched(plan, seats)
            if drafts:
                pairs = zip(seats, drafts, strict=True)
                self._seats.note_verified(seat for seat, its_drafts in pairs if its_drafts)
            return PlainStepInFlight(plan, launched, drafts, self._seats, self._counts)

    def drain(self) -> None:
        """Waits until no step is in flight, so that the host may change the inputs of steps."""
        self._native.drain()


class PlainStepInFlight:
    """A plain step that was launched; see `planning.device.StepInFlight`."""

    def __init__(
        self,
        plan: StepPlan,
        launched: NativeStep | list[int],
        drafts: ListLike[ListLike[int]],
        seats: Seats,
        counts: ExpertCounts | None,
    ) -> None:
        """
        Args:
            drafts: by chunk; empty if none has any.
        """
        self._plan, self._launched, self._drafts, self._seats = plan, launched, drafts, seats
        self._counts = counts

    def choose(self) -> None:
        """Its tokens are chosen where it runs."""

    def wait(self) -> StepResult:
        launched = self._launched
        if isinstance(launched, NativeStep):
            with told(self._plan, self._seats, _CPU):
                launched = launched.wait()
        experts = None if self._counts is None else self._counts.take()
        if not self._drafts:
            return StepResult([_sampled([one]) for one in launched], experts=experts)
        rows, sampled = iter(launched), list[Sampled]()
        for drafts in self._drafts:
            tokens = list(islice(rows, 1 + len(drafts)))
            sampled.append(_sampled(tokens[: num_right(tokens, drafts)]))
        return StepResult(sampled, experts=experts)


def _is_whole(plan: StepPlan) -> bool:
    """Penalties of a sequence with drafts look at its right rows, one after another."""
    return is_plain(plan) and not any(
        chunk.drafts and has_penalties(chunk.sequence.request.sampling) for chunk in plan.chunks
    )


def _sampled(tokens: list[int]) -> Sampled:
    return Sampled(tokens) if tokens[0] >= 0 else Sampled([], error=NOT_FINITE, is_finite=False)

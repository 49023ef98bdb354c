"""Steps of ranks that have sequences of their own: a plan is shared out, and the ranks' results are put together."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.planning.step import ExpertUse, Masks, StepPlan, StepResult

_FADING = 0.98


class SharedPlan:
    """A step's chunks by rank.

    The ranks of its sequences are kept, for a sequence may have another when the step has come back.

    Args:
        num_blocks: the blocks of each rank, which has those from rank * num_blocks on.
    """

    def __init__(self, plan: StepPlan, num_ranks: int, num_blocks: int) -> None:
        self._plan = plan
        self._ranks = [chunk.sequence.rank for chunk in plan.chunks]
        self.plans = [StepPlan(number=plan.number) for _ in range(num_ranks)]
        """The plan of each rank, whose blocks have the numbers that planning knows them by."""
        for chunk, rank in zip(plan.chunks, self._ranks, strict=True):
            self.plans[rank].chunks.append(chunk)
            self.plans[rank].num_tokens += chunk.num_tokens
        for copy in plan.copies:
            self.plans[copy[1] // num_blocks].copies.append(copy)
        self.rows = tuple(own.num_tokens for own in self.plans)
        for own in self.plans:
            own.rows = self.rows

    def share_masks(self) -> None:
        """Gives each rank's plan the masks of its chunks."""
        masks = self._plan.masks
        if masks is None:
            return
        for rank, own in enumerate(self.plans):
            first = [row for row, of in zip(masks.first, self._ranks, strict=True) if of == rank]
            own.masks = Masks(masks.bits, masks.num_words, first) if max(first, default=-1) >= 0 else None

    def merged(self, results: list[StepResult]) -> StepResult:
        """The result of the whole step, by those of the ranks. Rank 0 has counted the experts of all."""
        sampled, scored, pooled = (
            [iter(found) for found in by_rank]
            for by_rank in zip(*((one.sampled, one.scored, one.pooled) for one in results), strict=True)
        )
        pairs = [*zip(self._plan.chunks, self._ranks, strict=True)]
        merged = StepResult([next(sampled[rank]) for chunk, rank in pairs if chunk.samples])
        if any(one.scored or one.pooled for one in results):
            merged.scored = [next(scored[rank]) for chunk, rank in pairs if chunk.scored]
            merged.pooled = [next(pooled[rank]) for chunk, rank in pairs if chunk.pooled]
        merged.experts = results[0].experts
        return merged


class RowSpread:
    """How unevenly steps spread their tokens over ranks, of which the older ones fade."""

    def __init__(self) -> None:
        self._most = self._mean = 0.0

    def add(self, rows: tuple[int, ...]) -> None:
        self._most = _FADING * self._most + max(rows)
        self._mean = _FADING * self._mean + sum(rows) / len(rows)

    def told_in(self, experts: ExpertUse | None) -> ExpertUse | None:
        """The experts of a step, with the tokens of the busiest rank in units of the mean where a load is given."""
        if experts is None or experts.load is None:
            return experts
        return replace(experts, load=replace(experts.load, rows=self._most / self._mean))

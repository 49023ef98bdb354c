"""A fake runner beside which the host goes on: a device double with one queue of steps, as a CUDA stream is one.

What a step needs of the host is taken when it is launched; it runs at any time between then and the moment when it is
waited for, after those launched before. Tokens that the host did not know at launch are taken from the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace

from penstock.engine.planning.blocks import BlockPool
from penstock.engine.planning.device import OutOfMemory
from penstock.engine.planning.ranked_memory import Memory
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.state_records import ChunkState
from penstock.engine.planning.step import OPEN, Chunk, Sampled, StepPlan, StepResult
from tests.engine.fake_runner import VOCABULARY, FakeRunner, blocks_by_position, next_token


@dataclass(frozen=True, slots=True)
class QueuedChunk:
    """A chunk as it was when it was launched."""

    sequence: Sequence
    """Its place on the device; nothing of it is looked at later but what never changes."""
    start: int
    end: int
    samples: bool
    drafts: tuple[int, ...]
    """OPEN where the device makes them."""
    num_unsure: int
    """It may begin so many tokens earlier: drafts in flight at its launch may be wrong."""
    token_ids: tuple[int | None, ...]
    """None where only the device knows it."""
    table: tuple[int, ...]
    state: ChunkState | None

    @classmethod
    def of(cls, chunk: Chunk, drafts: ListLike[int], block_size: int, num_tables: int) -> QueuedChunk:
        end, known = chunk.start + chunk.num_tokens, chunk.sequence.token_ids
        before = range(chunk.start, end - len(drafts))
        table = blocks_by_position(chunk.sequence, block_size, num_tables)
        return cls(
            sequence=chunk.sequence,
            start=chunk.start,
            end=end,
            samples=chunk.samples,
            drafts=tuple(drafts),
            num_unsure=chunk.sequence.num_unsure - len(chunk.drafts),
            token_ids=(*(known[i] if i < len(known) else None for i in before), *drafts),
            table=tuple(table[: -(-end // block_size) * num_tables]),
            state=None if chunk.state is None else replace(chunk.state, saves=list(chunk.state.saves)),
        )

    @property
    def is_unknown(self) -> bool:
        """Whether the host does not know its first token."""
        return self.token_ids[:1] == (None,)

    @property
    def rows(self) -> tuple[ChunkState | None, int, int, int, tuple[int, ...]]:
        return self.state, self.start, self.end, len(self.drafts), self.table


class QueuedStep:
    def __init__(self, runner: QueuedRunner, plan: StepPlan) -> None:
        self.runner = runner
        sizes = runner.block_size, len(runner.windows)
        self.chunks = [QueuedChunk.of(chunk, runner.drafts_of(chunk), *sizes) for chunk in plan.chunks]
        self.made = runner.made(plan)
        self.open = {chunk.sequence for chunk in plan.chunks if chunk.is_open}
        self.copies = list(plan.copies)
        self.result: StepResult | None = None

    @property
    def touched(self) -> set[int]:
        """Blocks that it may read or write."""
        tables = {b for chunk in self.chunks for b in chunk.table if b > 0}
        return tables | {b for copy in self.copies for b in copy}

    def choose(self) -> None:
        pass

    def wait(self) -> StepResult:
        return self.runner.land(self)


class RefusedStep(QueuedStep):
    """A step for whose choice there is no memory."""

    def choose(self) -> None:
        raise OutOfMemory("full")


class QueuedRunner(FakeRunner):
    """`runs_early` says, each time the device could run a step that nobody waits for yet, whether it does."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        runs_early: Callable[[], bool] = lambda: False,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__(num_blocks, block_size, windows)
        self.num_ahead = 1
        self.in_flight: deque[QueuedStep] = deque()
        """Launched and not waited for, oldest first."""
        self.num_unknown = 0
        """Tokens that were computed before the host knew them."""
        self._hurries = runs_early
        self._last: dict[Sequence, tuple[int, int]] = {}
        """The position and the token that each sequence sampled last."""
        self.draws: Callable[[], int] | None = None
        """Makes drafts on the device: 0 makes a right one, and another number one that is so much larger."""
        self.num_wrong = 0
        """Steps that began where drafts in flight had been wrong."""

    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]] | None:
        if self.draws is None:
            return super().draft(plan, may_stay=may_stay)
        assert may_stay
        self._left = {c.sequence: [OPEN] * len(c.drafts) for c in plan.chunks if c.is_open}
        return None

    def watch(self, tables: Memory) -> None:
        """From now on no block may be handed out that a launched step may touch."""
        for part in tables.parts:
            self._watch(part.pool)

    def _watch(self, pool: BlockPool) -> None:
        allocate = pool.allocate

        def watched() -> int:
            block = allocate()
            for step in self.in_flight:
                assert block not in step.touched, f"block {block} is used by a step in flight"
            return block

        pool.allocate = watched  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> QueuedStep:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        assert len(self.in_flight) <= self.num_ahead
        step = QueuedStep(self, plan)
        if not self._has_room(plan) and self.refuses_late:
            self._break_off(step)
            plan.copies = []
        self._refuse_if_too_large(plan)
        self.in_flight.append(step)
        self._run_some()
        return step

    def refused_late(self, plan: StepPlan) -> RefusedStep:
        """A step whose pass is launched, and nothing else."""
        step = RefusedStep(self, plan)
        self._break_off(step)
        plan.copies = []
        return step

    def land(self, step: QueuedStep) -> StepResult:
        assert self.in_flight[0] is step, "steps are waited for in the order of their launch"
        self._run(step)
        self._run_some()
        self.in_flight.popleft()
        assert step.result is not None
        return step.result

    def _break_off(self, step: QueuedStep) -> None:
        """Its turn comes, and it ends before it samples."""
        for earlier in self.in_flight:
            self._run(earlier)
        self._copy(step.copies)
        for chunk in step.chunks:
            self._put(chunk)
        self._run_states([chunk.rows for chunk in step.chunks], breaks_off=True)

    def _run_some(self) -> None:
        for step in self.in_flight:
            if step.result is None:
                if not self._hurries():
                    return
                self._run(step)

    def _run(self, step: QueuedStep) -> None:
        if step.result is not None:
            return
        self._copy(step.copies)
        if self.draws is not None:
            step.chunks = [self._placed(chunk) for chunk in step.chunks]
            step.made = [[*chunk.drafts] for chunk in step.chunks if chunk.sequence in step.open]
        for chunk in step.chunks:
            self._put(chunk)
        self._run_states([chunk.rows for chunk in step.chunks], breaks_off=False)
        sampled = [self._draw(chunk) for chunk in step.chunks if chunk.samples]
        step.result = StepResult(sampled, made=step.made)

    def _placed(self, chunk: QueuedChunk) -> QueuedChunk:
        """The chunk where it begins on the device, and with the drafts that the device makes."""
        if chunk.is_unknown:
            place, _ = self._last[chunk.sequence]
            num_wrong = chunk.start - place
            assert 0 <= num_wrong <= chunk.num_unsure
            self.num_wrong += num_wrong > 0
            chunk = replace(chunk, start=place, end=chunk.end - num_wrong)
        if OPEN not in chunk.drafts or self.draws is None:
            return chunk
        first, sequence, num = chunk.end - len(chunk.drafts), chunk.sequence, len(chunk.drafts)
        known = chunk.token_ids[0]
        assert first == chunk.start + 1
        self._store(chunk.table, chunk.start, self._last[sequence][1] if known is None else known)
        seen = self._seen_by(chunk.table, first)
        for _ in range(num):
            right = next_token(seen, sequence.request, sequence.index, self.window)
            seen.append((right + self.draws()) % VOCABULARY)
        drafts = tuple(seen[-num:])
        return replace(chunk, drafts=drafts, token_ids=(known, *drafts))

    def _put(self, chunk: QueuedChunk) -> None:
        for position, known in enumerate(chunk.token_ids, chunk.start):
            token_id = known
            if token_id is None:
                self.num_unknown += 1
                place, token_id = self._last[chunk.sequence]
                assert place == position, f"{chunk} needs token {position}, the device has {place}"
            self._store(chunk.table, position, token_id)

    def _draw(self, chunk: QueuedChunk) -> Sampled:
        sequence = chunk.sequence
        if sequence.key in self.bad:
            self._last[sequence] = (chunk.end, 0)
            return Sampled([], error="logits were not finite", is_finite=False)
        drawn: list[int] = []
        while True:
            end = chunk.end - len(chunk.drafts) + len(drawn)
            tokens = self._seen_by(chunk.table, end)
            drawn.append(next_token(tokens, sequence.request, sequence.index, self.window))
            if len(drawn) > len(chunk.drafts) or drawn[-1] != chunk.drafts[len(drawn) - 1]:
                self._last[sequence] = (end, drawn[-1])
                return Sampled(drawn)

"""Drafter: has a small model write on for a few tokens ahead of the model that is served.

Its passes are steps like any other, over the seats of the sequences that it drafts for and with their sampling
parameters: the draft model chooses its tokens as the model itself does, with the same noise. As Gumbel-max sampling
couples the two, they agree about as often as any two samplers of their distributions could (Leviathan, Kalman and
Matias, "Fast inference from transformers via speculative decoding", 2023, accept at the best rate there is; Daliri,
Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.execution.device_clock import DeviceClock
from penstock.engine.execution.draft_kv import DraftChunk, DraftKV
from penstock.engine.execution.in_flight import TokensInFlight
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.seats import Seats
from penstock.engine.execution.uploads import send_apart
from penstock.engine.execution.verification import Verification
from penstock.engine.planning.device import StepInFlight
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import Chunk, StepPlan, before_open
from penstock.engine.program.native_drafts import NativeDraft
from penstock.engine.sampling.sampler import has_penalties


class MadeDrafts:
    """Drafts that are on the device alone until the step that verifies them has landed.

    Args:
        passes: [n] int32 of each pass, of the first n of the sequences; -1 where there is none.
        clock: has measured the passes.
        kv: is told the drafts once they are known.
    """

    def __init__(
        self, passes: list[Tensor], sequences: list[Sequence], clock: DeviceClock, kv: DraftKV
    ) -> None:
        self._token_ids, self._clock, self._kv = F.pad(torch.cat(passes), (0, 1), value=-1), clock, kv
        self._places: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
        """The places of each sequence's drafts among the token ids."""
        first = 0
        for token_ids in passes:
            for place, sequence in enumerate(sequences[: len(token_ids)], first):
                self._places[sequence].append(place)
            first += len(token_ids)
        self._sequences: list[Sequence] = []
        """Those whose drafts were put into a step, in its order."""
        self.put_tokens: Tensor | None = None
        """[M] int32: these drafts, one sequence's after another's."""

    def put(self, plan: StepPlan, step_tokens: Tensor, verification: Verification) -> None:
        """Puts the drafts of the chunks that are open where the step reads them.

        Args:
            step_tokens: [T] int32, the tokens of the step.
        """
        places, rows, verified, end = list[int](), list[int](), list[int](), 0
        for chunk, its_rows in zip(plan.chunks, verification.rows_of, strict=True):
            end += chunk.num_tokens
            if chunk.is_open:
                num, its_places = len(chunk.drafts), self._places.get(chunk.sequence, [])
                places += [*its_places[:num], *[len(self._token_ids) - 1] * (num - len(its_places))]
                rows += range(end - num, end)
                verified += its_rows[1:]
                self._sequences.append(chunk.sequence)
        places_, rows_, verified_ = send_apart([places, rows, verified], step_tokens.device)
        self.put_tokens = drafts = self._token_ids.index_select(0, places_)
        step_tokens.index_copy_(0, rows_.long(), drafts.clamp(min=0))
        verification.set_drafts(verified_.long(), drafts)

    def is_of(self, sequence: Sequence) -> bool:
        """Whether there are drafts for a sequence, all of which was read for them."""
        return sequence in self._places

    def land(self, made: ListLike[list[int]]) -> float:
        """Notes the drafts, which have come to the host; the seconds that making them took."""
        for sequence, drafts in zip(self._sequences, made, strict=True):
            if self.is_of(sequence):
                self._kv.keep(sequence, before_open(drafts))
        return self._clock.seconds()


class DraftPass(StepInFlight, Protocol):
    """A step of a draft model."""

    token_ids: Tensor
    """[R] int32, once they are chosen: the first ones are of the chunks that sample. Later steps overwrite them."""


class Drafter:
    """Makes the drafts of plans, for sequences that have a seat; see `planning.device.Runner.draft`.

    Tokens stay on the device from one pass to the next. The host waits for all of them at the end, or, where nobody has
    to know them, not at all. Where a step is in flight, the first pass reads the tokens that it brings on the device.

    Args:
        seats: the seats of the model that is drafted for.
        launch: launches a step of the draft model.
        max_tokens: tokens of the largest pass.
        go_on: launches a step after the first one, if it is another program's.
        in_flight: the tokens of the step that was launched last.
    """

    def __init__(
        self,
        model: LoadedModel,
        seats: Seats,
        launch: Callable[[StepPlan, TokensInFlight | None], DraftPass],
        max_tokens: int,
        go_on: Callable[[StepPlan], DraftPass] | None = None,
        in_flight: Callable[[], TokensInFlight | None] = lambda: None,
    ) -> None:
        self.model = model
        self._seats = seats
        self._launch, self._go_on, self._in_flight = launch, go_on, in_flight
        self._kv = DraftKV(
            model.kv.block_size,
            max_tokens,
            keeps_drafts=not model.reads_target,
            num_tables=len(model.kv.layout.windows),
        )
        self._made: MadeDrafts | None = None
        """Drafts for the next step to be launched."""
        self._last: MadeDrafts | None = None
        """Those for the step that was launched last."""

    @torch.inference_mode()
    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]] | None:
        """See `planning.device.Runner`."""
        self._made = None
        asked = [chunk for chunk in plan.chunks if chunk.is_open]
        seated = [chunk for chunk in asked if self._seats.number_of(chunk.sequence) is not None]
        lengths = {chunk.sequence: len(chunk.drafts) for chunk in seated}
        coming = {chunk.sequence: num for chunk in seated if (num := _num_coming(chunk))}
        chunks = self._kv.begin(lengths, coming, self._is_read)
        counts = [lengths[chunk.sequence] for chunk in chunks if chunk.samples]
        if not chunks:
            return [[] for _ in asked]
        if coming or (may_stay and len(counts) == len(asked) and self.model.native is None):
            self._made = self._leave(chunks, counts, coming)
            return None
        with self._counts_kept(chunks):
            made = self._make(chunks, counts)
        found = dict[Sequence, list[int]]()
        for place, chunk in enumerate(chunks):
            found[chunk.sequence] = drafts = before_open(
                [tokens[place] for tokens in made if place < len(tokens)]
            )
            self._kv.end(chunk, drafts)
        return [found.get(chunk.sequence, []) for chunk in asked]

    def take(self, plan: StepPlan) -> MadeDrafts | None:
        """The drafts that were left on the device for a plan, if it has chunks that are open."""
        made, self._made = self._made, None
        self._last = made if any(chunk.is_open for chunk in plan.chunks) else None
        return self._last

    def forget(self, sequence: Sequence) -> None:
        self._kv.forget(sequence)

    def _make(self, chunks: list[DraftChunk], counts: list[int]) -> list[list[int]]:
        """The tokens that each pass brings to the first of the chunks, -1 where there is none.

        Args:
            counts: the drafts that are wanted of each chunk that samples, the most first.
        """
        if self.model.native is not None:
            return self._make_natively(self.model.native, _plan_of(chunks), counts)
        steps = [*self._passes(chunks, counts, None)]
        return [[(one.token_ids or [-1])[0] for one in step.wait().sampled] for step in steps]

    def _leave(
        self, chunks: list[DraftChunk], counts: list[int], coming: Mapping[Sequence, int]
    ) -> MadeDrafts:
        """Makes drafts, as `_make` does, and leaves them on the device.

        Args:
            coming: as in `DraftKV.begin`.
        """
        clock, follow = DeviceClock(self.model.device), self._in_flight() if coming else None
        with self._counts_kept(chunks), self._seats.kept([chunk.sequence for chunk in chunks]):
            passes = [
                step.token_ids[: _num_longer(counts, number)].clone()
                for number, step in enumerate(self._passes(chunks, counts, follow))
            ]
        clock.stop()
        for chunk in chunks:
            self._kv.end(chunk, [], coming.get(chunk.sequence, 0))
        return MadeDrafts(passes, [chunk.sequence for chunk in chunks[: len(counts)]], clock, self._kv)

    def _passes(
        self, chunks: list[DraftChunk], counts: list[int], follow: TokensInFlight | None
    ) -> Iterator[DraftPass]:
        """Launches one pass after the other; each reads the tokens that the one before has chosen.

        Args:
            follow: the tokens of a step in flight that the first one reads.
        """
        step = self._launch(_plan_of(chunks), follow)
        step.choose()
        yield step
        for number in range(1, max(counts, default=1)):
            still = chunks[: _num_longer(counts, number)]
            ends = [(c.sequence, c.start + c.num_tokens + number - 1) for c in still]
            plan = _plan_of([DraftChunk(sequence, end, 1, samples=True) for sequence, end in ends])
            step = self._launch(plan, None) if self._go_on is None else self._go_on(plan)
            step.choose()
            yield step

    def _is_read(self, sequence: Sequence) -> bool:
        """Whether the passes for the step that was launched last have read all of a sequence that the host knows."""
        return self._last is not None and self._last.is_of(sequence)

    def _make_natively(self, native: NativeDraft, plan: StepPlan, counts: list[int]) -> list[list[int]]:
        """The drafts that `_make` makes, from one native call for all passes."""
        try:
            seats = self._seats.seated(plan)
            assert seats is not None
            asked = self.model.sampler.filters(seat.number for seat in seats[: len(counts)])
            made = native(self._seats.table_step(plan, seats), counts, asked)
        except Exception:
            self._seats.distrust(plan)
            raise
        for seat, chunk in zip(seats, plan.chunks, strict=True):
            seat.length = chunk.start + chunk.num_tokens
        return made

    @contextmanager
    def _counts_kept(self, chunks: list[DraftChunk]) -> Iterator[None]:
        """Choosing counts tokens for the penalties of the next; drafts are not to be counted when they are over."""
        penalised = [c.sequence for c in chunks if c.samples and has_penalties(c.sequence.request.sampling)]
        seats = [seat for sequence in penalised if (seat := self._seats.number_of(sequence)) is not None]
        if not seats:
            yield
            return
        counts, (rows,) = self.model.sampler.tables.counts, send_apart([seats], self.model.device)
        before = counts.index_select(0, rows)
        try:
            yield
        finally:
            counts.index_copy_(0, rows.long(), before)


def _num_coming(chunk: Chunk) -> int:
    """The tokens that a step in flight may bring for the sequence of a chunk that is planned with drafts."""
    return max(0, chunk.sequence.num_pending - 1 - len(chunk.drafts))


def _plan_of(chunks: list[DraftChunk]) -> StepPlan:
    return StepPlan([*chunks], num_tokens=sum(chunk.num_tokens for chunk in chunks))


def _num_longer(counts: list[int], number: int) -> int:
    """Of how many chunks more drafts than this are wanted."""
    return sum(count > number for count in counts)

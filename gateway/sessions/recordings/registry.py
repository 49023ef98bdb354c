"""All recordings of this process: how they begin, are found, are written down, end and are forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

from penstock.engine.engine import EngineState
from penstock.engine.planning.request import Request
from penstock.engine.text.watermark import Watermark
from penstock.gateway.access.idempotency import Idempotency
from penstock.gateway.access.quotas import QuotaReservation
from penstock.gateway.background import Rounds, every, meanwhile
from penstock.gateway.dispatch import Dispatch
from penstock.gateway.errors import ApiError, internal
from penstock.gateway.off_loop import off_loop
from penstock.gateway.sessions.recordings.ended import EndedRecordings
from penstock.gateway.sessions.recordings.journal import (
    CorruptJournal,
    Replayer,
    change_of,
    rebuild,
    replay,
    unwritten_bytes,
)
from penstock.gateway.sessions.recordings.kinds import WriterMaker
from penstock.gateway.sessions.recordings.recording import ABANDONED, OVERDUE, Recording
from penstock.gateway.store.interface import (
    Durable,
    Journal,
    JournalChange,
    JournalOutcome,
    Store,
    StoreUnavailable,
)
from penstock.gateway.store.link import batch_of
from penstock.gateway.store.time_budget import TIME_BUDGET, retry_budget, retrying
from penstock.gateway.wire.compiling import Compiling
from penstock.gateway.wire.reading import Formats, Reading
from penstock.gateway.wire.structured import Form

log = logging.getLogger("penstock.gateway")

_REPLAYED_BYTES = 64
"""Making a token's text again is as much work as reading so many bytes."""
_WRITES = 2
"""A reply is tried to be written down so often before it begins: a store that has much to do may be late once."""
_TAKEN_OVER = 25
"""The number of journals that one call reads."""
MAX_ATTEMPTS = 3
"""The number of processes that may die during one request before it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Keeping says how long recordings are kept, and how much of them."""

    keep_s: float = 300.0
    """A recording is kept for so long after its end."""
    max_age_s: float = 3_600.0
    """Nothing is generated for longer than this after its first token."""
    max_bytes: int = 64 * 1024 * 1024
    """The bytes that all ended replies may take; the oldest are forgotten first."""
    flush_s: float = 0.05
    """The interval at which new events are written to the journal."""
    claim_s: float = 2.0
    """The interval at which streams of dead processes are searched for."""
    batch: int = 100


EndHook = Callable[[Recording], Awaitable[None]]


@dataclass(eq=False)
class Recordings:
    """Recordings are all of this process; every method is for the event loop's thread."""

    dispatch: Dispatch
    store: InitVar[Store]
    replayer: Replayer
    formats: Formats
    compiling: Compiling
    idempotency: Idempotency
    on_resume: Callable[[], None]
    """Called for each reply that is taken over from a process that is gone."""
    clock: Callable[[], float]
    keeping: Keeping = Keeping()
    on_end: dict[str, EndHook] = field(default_factory=dict)
    """The work to do, by kind of reply, before the client gets the end of its reply."""
    writers: dict[str, WriterMaker] = field(default_factory=dict)
    """The function that makes the writer of a reply, by kind."""
    watermark: Watermark | None = None
    """The server's."""

    def __post_init__(self, store: Store) -> None:
        self._journals = store.durable
        self._all: dict[str, Recording] = {}
        self._unsettled: dict[str, Recording] = {}
        self._ended = EndedRecordings()
        self._written: dict[str, int] = {}
        """The number of tokens in the journal by id; missing if not even the header is written."""
        self._dirty: dict[str, None] = {}
        self._doomed: dict[str, None] = {}
        """Ids of journals that are to be deleted."""
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._writing = Rounds(self._flush)
        self._claiming = Rounds(self._claim)
        self._claimed_s = float("-inf")
        self._num_losses = 0

    def __len__(self) -> int:
        return len(self._all)

    # What requests ask for

    async def start(
        self,
        request: Request,
        *,
        kind: str,
        details: dict[str, Any],
        created: int,
        detachable: bool,
        journalled: bool,
        max_detached_s: float | None = None,
        reservation: QuotaReservation | None = None,
    ) -> Recording:
        """Submits a request whose reply is recorded under its id.

        Returns when the journal knows of it, or the store does not take it: the id may be given away.

        Raises:
            ApiError: it is not let in.
        """
        recording = Recording(
            request,
            kind=kind,
            details=details,
            created=created,
            writer=self.writers[kind](request, created, details),
            detachable=detachable,
            journalled=journalled and self._journals is not None,
            max_detached_s=max_detached_s,
        )
        recording.reservation = reservation
        self._count_thoughts(recording)
        self.dispatch.submit(recording)
        self._enter(recording)
        await self._make_known(recording)
        return recording

    async def find(self, tenant: str, recording_id: str) -> Recording | None:
        """Finds a recording of the tenant's that runs or has ended lately, wherever it ran.

        Raises:
            StoreUnavailable: nobody could say for `RETRY_S` whether there is one.
            ApiError: 503, for the same reason: what was interrupted is known when the engine is ready.
        """
        if recording_id not in self._all and self._journals is not None:
            await retrying(partial(self._look_for, recording_id, self._journals))
        return self.here(tenant, recording_id)

    async def _look_for(self, recording_id: str, journals: Durable) -> None:
        """Makes a recording that the store has this process's own, unless another process works on it."""
        try:
            journal = await journals.read_journal(recording_id)
            if journal is not None and journal.end is not None:
                await self._take_up(journal)
            elif journal is not None and recording_id not in self._all:
                self.dispatch.check_open()
                await self._claiming.next()
        except (StoreUnavailable, ApiError):
            if recording_id not in self._all:
                raise
            # It was taken over meanwhile, from the store as it was then.

    @property
    def num_bytes(self) -> int:
        """The memory that all recordings take, about."""
        return self._ended.num_bytes + sum(recording.num_bytes for recording in self._unsettled.values())

    def here(self, tenant: str, recording_id: str) -> Recording | None:
        """The tenant's recording that this process has under that id, whatever state the store is in."""
        recording = self._all.get(recording_id)
        return recording if recording is not None and recording.tenant == tenant else None

    def cancel(self, recording: Recording, code: str = "cancelled") -> None:
        """Ends a recording and tells its readers. What it brought so far is kept."""
        if not recording.ended:
            recording.cancelled = True
            recording.fail(ApiError(409, "The reply was cancelled.", code=code))

    async def discard(self, recording: Recording) -> None:
        """Ends and forgets a recording; if the store is there, for good."""
        self.cancel(recording)
        if (settling := self._settling.get(recording.id)) is not None:
            await settling
        self._forget(recording)
        await self._delete_doomed()

    # What the service's own loops do

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Writes new events and takes over the streams of dead processes, while it is entered."""
        try:
            async with meanwhile(every(self.keeping.flush_s, self._keep, "writing the journal")):
                yield
        finally:
            await asyncio.gather(*self._settling.values())
            await self._write_down()

    async def _keep(self) -> None:
        await self._write_down()
        if self._journals is not None and self._may_claim:
            with contextlib.suppress(StoreUnavailable):
                await self._claiming.next()

    def tick(self, now: float) -> None:
        """Ends recordings that nobody reads or that are too old, and forgets those that ended long ago."""
        for recording in list(self._unsettled.values()):
            if recording.is_abandoned(now):
                self.cancel(recording, ABANDONED)
            elif recording.is_overdue(now, self.keeping.max_age_s):
                message = f"The reply was not complete after {self.keeping.max_age_s:g} seconds."
                recording.fail(ApiError(504, message, type="server_error", code=OVERDUE))
        for recording in self._ended.surplus(now - self.keeping.keep_s, self.keeping.max_bytes):
            self._forget(recording, keep_journal=True)

    # Life of a recording

    def _enter(self, recording: Recording) -> None:
        self._all[recording.id] = self._unsettled[recording.id] = recording
        recording.on_news = self._note_news
        self._dirty[recording.id] = None

    def _note_news(self, recording: Recording) -> None:
        self._dirty[recording.id] = None
        if recording.ended and recording.ended_s is None:
            recording.ended_s = self.clock()
            if not recording.is_interrupted:
                recording.close()
            task = asyncio.get_running_loop().create_task(self._settle(recording))
            self._settling[recording.id] = task
            task.add_done_callback(lambda _: self._settling.pop(recording.id))

    async def _settle(self, recording: Recording) -> None:
        """Runs the work at the end of a reply, before any client sees the end."""
        self.dispatch.release(recording)
        if (grammar := recording.request.sampling.grammar) is not None:
            recording.hold_to(grammar.plain)
        hook = self.on_end.get(recording.kind)
        if hook is not None and not recording.is_interrupted:
            try:
                await hook(recording)
            except Exception:
                log.exception("keeping the reply %s failed", recording.id)
                recording.error = recording.error or internal("The server could not keep the reply.")
        if recording.may_come_again:
            await self.idempotency.forget(recording.tenant, recording.id)
        if recording.error is not None and recording.error.is_fault and not recording.is_read:
            log.error("the reply %s failed, and nobody reads it: %s", recording.id, recording.error.message)
        recording.settle()
        if self._unsettled.pop(recording.id, None) is not None:
            self._ended.add(recording)
        self._dirty[recording.id] = None
        recording.wake()

    def _forget(self, recording: Recording, *, keep_journal: bool = False) -> None:
        self._all.pop(recording.id, None)
        self._unsettled.pop(recording.id, None)
        self._ended.discard(recording)
        self._dirty.pop(recording.id, None)
        self._written.pop(recording.id, None)
        if recording.journalled and not keep_journal:
            self._doomed[recording.id] = None

    # The journal

    async def _make_known(self, recording: Recording) -> None:
        """Returns when the recording is written down, or was refused so often that the store is in trouble.

        Many begin at a time: they are written down together, and none has to find a connection of its own.
        """
        for _ in range(_WRITES):
            if recording.journalled and recording.id not in self._written:
                await self._writing.next()

    async def _write_down(self) -> None:
        """Writes all new events, and deletes the journals that are no longer needed."""
        await self._writing.next()
        await self._delete_doomed()

    async def _flush(self) -> None:
        if self._journals is not None and self._journals.num_losses != self._num_losses:
            self._num_losses = self._journals.num_losses
            self._written.clear()
            self._dirty.update(dict.fromkeys(self._all))
        # What becomes new meanwhile is written next time: steps may bring it faster than the store takes it.
        new = [self._all[i] for i in self._dirty if i in self._all]
        while new:
            sizes = (unwritten_bytes(one, self._written.get(one.id)) for one in new)
            number = batch_of(sizes, self.keeping.batch)
            if not await self._write([one for one in new[:number] if one.id in self._all]):
                return
            del new[:number]

    async def _write(self, recordings: Sequence[Recording]) -> bool:
        """Writes the new events of these; returns False if the store is away, and keeps them for later."""
        for recording in recordings:
            self._dirty.pop(recording.id, None)
        wanted = [recording for recording in recordings if recording.journalled]
        if self._journals is None or not wanted:
            return True
        changes = [
            await change_of(
                recording, self._written.get(recording.id), self.keeping.max_age_s, self.keeping.keep_s
            )
            for recording in wanted
        ]
        try:
            outcomes = await self._journals.write_journals(changes)
        except StoreUnavailable:
            self._dirty.update(dict.fromkeys(change.stream_id for change in changes))
            return False
        for change, outcome in zip(changes, outcomes, strict=True):
            if change.stream_id in self._all:
                self._note_outcome(self._all[change.stream_id], change, outcome)
        return True

    def _note_outcome(self, recording: Recording, change: JournalChange, outcome: JournalOutcome) -> None:
        if outcome in ("missing", "gap"):  # Redis evicted a part of the journal: all of it is written anew
            self._written.pop(recording.id, None)
            self._dirty[recording.id] = None
            return
        self._written[recording.id] = change.offset + len(change.token_ids)
        if outcome in ("foreign", "full"):
            recording.journalled = False
            why = "another server took it over" if outcome == "foreign" else "its tenant has no room in Redis"
            log.warning("the reply %s is no longer written down here: %s", recording.id, why)

    async def _delete_doomed(self) -> None:
        doomed = list(self._doomed)[: self.keeping.batch]
        if self._journals is None or not doomed:
            return
        with contextlib.suppress(StoreUnavailable):
            await self._journals.delete_journals(doomed)
            for recording_id in doomed:
                self._doomed.pop(recording_id, None)

    # Taking over

    @property
    def _may_claim(self) -> bool:
        return (
            not self.dispatch.draining
            and self.dispatch.engine_state is EngineState.READY
            and self.clock() - self._claimed_s >= self.keeping.claim_s
        )

    async def _claim(self) -> None:
        """Goes on with the streams of processes that are gone.

        What is claimed and not taken over, because the store went away between the two, is told again next time.
        """
        assert self._journals is not None
        TIME_BUDGET.set(retry_budget())
        claimed = await self._journals.claim()
        new = [
            stream_id for stream_id in claimed if stream_id not in self._all and stream_id not in self._doomed
        ]
        for start in range(0, len(new), _TAKEN_OVER):
            for journal in await self._journals.read_journals(new[start : start + _TAKEN_OVER]):
                await self._take_over(journal)
        self._claimed_s = self.clock()

    async def _take_over(self, journal: Journal) -> None:
        recording = await self._load(journal)
        refusal = None if recording is None or recording.finished else await self._refusal(recording)
        if journal.stream_id in self._all:
            return
        if recording is None:
            self._doomed[journal.stream_id] = None
            return
        self.on_resume()
        self._enter(recording)
        if recording.finished:  # only its end was not written down
            self._note_news(recording)
            return
        try:
            if refusal is not None:
                raise refusal
            self.dispatch.resume(recording)
        except ApiError as error:
            recording.fail(error)

    async def _refusal(self, recording: Recording) -> ApiError | None:
        """Has the recording's grammar compiled; returns why it cannot go on, if it cannot."""
        if recording.attempts > MAX_ATTEMPTS:
            return internal("The server failed several times over this request.")
        grammar = recording.request.sampling.grammar
        try:
            if grammar is not None:
                recording.hold_to(await self.compiling.compile(recording.tenant, Form("grammar", grammar)))
        except ApiError as error:
            return error
        return None

    async def _take_up(self, journal: Journal) -> None:
        """Keeps a recording that ended in another process; one that is at work there cannot be followed from here."""
        recording = await self._load(journal)
        if recording is not None and recording.id not in self._all:
            recording.ended_s = self.clock()
            recording.close()
            recording.settle()
            self._all[recording.id] = recording
            self._ended.add(recording)

    async def _load(self, journal: Journal) -> Recording | None:
        """Makes the recording again as far as it came; None if its journal cannot be read."""
        size = len(journal.header) + _REPLAYED_BYTES * len(journal.token_ids)
        try:
            return await off_loop(size, self._replayed, journal)
        except CorruptJournal as error:
            log.warning("the journal of %s is passed over: %s", journal.stream_id, error)
            return None

    def _replayed(self, journal: Journal) -> Recording:
        replayed = partial(replay, replayer=self.replayer, max_len=self.dispatch.context_length)
        counted, watermark = self._count_thoughts, self.watermark
        return rebuild(journal, self.clock(), self.writers, replayed, counted, watermark)

    def _count_thoughts(self, recording: Recording) -> None:
        recording.thoughts = self.formats.thoughts(Reading(**recording.details.get("reading", {})))

"""This process works on batches that it was given, and takes over those of processes that are gone.

A batch at work sends each line to its endpoint, a bounded number at a time, until all of them are done.

A line is done when its result is written down. So a process that takes a batch over from one that is gone runs the
other lines, and each line has one result, whatever was under way when the first one went.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import orjson

from penstock.gateway.background import every, meanwhile
from penstock.gateway.dispatch import Dispatch
from penstock.gateway.errors import ApiError, refused
from penstock.gateway.limits import Limits
from penstock.gateway.off_loop import FairSemaphore, off_loop
from penstock.gateway.sessions.batches.batch import (
    BATCHES,
    MAX_RESULT_BYTES,
    WINDOW_S,
    Batch,
    BatchStatus,
    Endpoint,
    InputCheck,
    Line,
    LineError,
    Results,
    requests_in,
)
from penstock.gateway.sessions.batches.files import Files
from penstock.gateway.store.interface import LEASE_S, Key, Store, StoreUnavailable
from penstock.gateway.store.records import Records

log = logging.getLogger("penstock.gateway")

LINES_AT_ONCE = 16
"""This process sends so many lines of all batches at a time; tenants take turns."""
MAX_ATTEMPTS = 3
"""A batch fails once so many processes have died over it."""
WRITE_S = 0.5
"""Results are written down so often, and a batch that is to be cancelled is cancelled as soon."""
MAX_AT_WORK = 8
"""This process works on so many batches of one tenant."""
MAX_UNFINISHED = 1000
CLAIM_S = 2.0
"""Batches whose process is gone are looked for so often."""
MAX_PAUSE_S = 60.0
"""A line that there is no room for is tried again after no longer than this."""

_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to one line."""

    status: int
    request_id: str
    body: bytes
    """The JSON of the reply."""
    retry_after_s: float | None = None
    """The seconds until it is worth trying again, if there was no room."""


AskLine = Callable[[str, Endpoint, dict[str, Any]], Awaitable[LineAnswer | None]]
"""AskLine runs one request for a tenant, in the batch lane; it returns None if this process takes no work any more."""


@dataclass(eq=False)
class Run:
    """A batch that this process works on."""

    store: Store
    files: Files
    limits: Limits
    ask: AskLine
    turns: FairSemaphore
    holds: Callable[[], Awaitable[bool]]
    """Returns whether the batch is still this process's."""
    tenant: str
    batch: Batch
    is_new: bool
    """Whether this process has not worked on it before."""
    is_closed: bool = False
    """Whether this process takes no more work."""
    is_lost: bool = False
    """Whether another process owns the batch, so that nothing may be written here."""

    def __post_init__(self) -> None:
        self._output = Results(self.files, self.tenant, self.batch.output_file_id)
        self._errors = Results(self.files, self.tenant, self.batch.error_file_id)
        self._done: set[str] = set()
        """The `custom_id` of each line that has a result."""

    async def run(self) -> bool:
        """Returns whether the batch has ended; otherwise another process has to go on with it.

        Raises:
            StoreUnavailable: nobody can go on with it now.
        """
        try:
            return await self._run()
        except ApiError as error:
            if error.retry_after_s is not None:
                raise StoreUnavailable(error.message) from None
            code = "line_too_long" if error.code == "line_too_long" else "input_file_gone"
            await self._end("failed", [LineError(code, error.message, "input_file_id")])
            return True

    async def _run(self) -> bool:
        check = InputCheck(self.batch.endpoint, self.limits)
        async for lines in await self._input():
            await off_loop(sum(map(len, lines)), check.read, lines)
            if check.is_over:
                break
        if check.errors:
            await self.fail(check.errors)
            return True
        self._done = await self._output.read() | await self._errors.read()
        begun = await self._change(lambda batch: _begin(batch, check.num_requests, is_new=self.is_new))
        if begun.num_begun > MAX_ATTEMPTS:
            message = f"{MAX_ATTEMPTS} server processes ended while they worked on this batch."
            await self._end("failed", [LineError("server_failed", message)])
            return True
        num_undone = check.num_requests - len(self._done)
        ending = "cancelled" if begun.status == "cancelling" else await self._work(num_undone)
        if ending == "failed":
            message = f"The results have more than {MAX_RESULT_BYTES} bytes."
            await self._end(ending, [LineError("results_too_large", message)])
        elif ending is not None:
            await self._end(ending)
        elif not self.is_lost:
            await self._change(_stop)
        return ending is not None

    async def fail(self, errors: list[LineError]) -> None:
        """Ends the batch before any line is run; raises StoreUnavailable."""

        def edit(batch: Batch) -> None:
            batch.errors = errors
            batch.become("failed")

        await self._change(edit)

    async def _input(self) -> AsyncIterator[list[bytes]]:
        """Finds the lines of the input, which come one list after another."""
        file = await self.files.find(self.tenant, self.batch.input_file_id)
        return self.files.lines(self.tenant, file, self.limits.max_body_bytes)

    async def _undone(self) -> AsyncGenerator[Line]:
        """Reads the lines that have no result at that moment."""
        async for lines in await self._input():
            for line in await off_loop(sum(map(len, lines)), requests_in, lines):
                if line.custom_id not in self._done:
                    yield line

    async def _work(self, num_undone: int) -> BatchStatus | None:
        """Runs the lines, and returns how the batch ends, or None if it does not end here."""
        left, reading = self._undone(), asyncio.Lock()
        num_workers = min(LINES_AT_ONCE, num_undone)
        workers = [asyncio.create_task(self._run_lines(left, reading)) for _ in range(num_workers)]
        try:
            while True:
                if workers:
                    await asyncio.wait(workers, timeout=WRITE_S)
                if (ending := await self._look()) is not None or self.is_lost:
                    return ending
                if all(worker.done() for worker in workers):
                    for worker in workers:
                        worker.result()
                    return None if self.is_closed else "completed"
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await left.aclose()
            with contextlib.suppress(StoreUnavailable):
                await self._write()

    async def _look(self) -> BatchStatus | None:
        """Writes new results down, and returns how the batch is to end, if it is."""
        with contextlib.suppress(StoreUnavailable):  # later, then
            holds, batch = await self.holds(), await self._change(self._count)
            self.is_lost = not holds or batch.ended
            if self.is_lost:
                return None
            await self._write()
            if batch.status == "cancelling":
                return "cancelled"
        if self._is_full:
            return "failed"
        return "expired" if time.time() >= self.batch.expires_at else None

    async def _run_lines(self, lines: AsyncIterator[Line], reading: asyncio.Lock) -> None:
        while not (self.is_closed or self._is_full):
            async with reading:
                line = await anext(lines, None)
            if line is None:
                return
            answer = await self._answer(line)
            if answer is None:
                self.is_closed = True
                return
            results = self._output if answer.status == 200 else self._errors
            results.add(_result(line, answer))
            self._done.add(line.custom_id)

    async def _answer(self, line: Line) -> LineAnswer | None:
        while True:
            async with self.turns.of(self.tenant):
                answer = await self.ask(self.tenant, self.batch.endpoint, line.body)
            if answer is None or answer.retry_after_s is None:
                return answer
            await asyncio.sleep(min(answer.retry_after_s, MAX_PAUSE_S))

    @property
    def _is_full(self) -> bool:
        return self._output.num_bytes + self._errors.num_bytes > MAX_RESULT_BYTES

    async def _write(self) -> None:
        if self.is_lost:
            return
        await self._output.write()
        await self._errors.write()

    async def _end(self, status: BatchStatus, errors: Sequence[LineError] = ()) -> None:
        if status == "completed":
            await self._change(lambda batch: batch.become("finalizing"))
        num_before = self._errors.num_lines
        if status == "expired":
            async for line in self._undone():
                self._errors.add(_line(line, error=orjson.dumps(_EXPIRED)))
        num_expired = self._errors.num_lines - num_before
        await self._output.close(f"{self.batch.id}_output.jsonl")
        await self._errors.close(f"{self.batch.id}_error.jsonl")

        def end(batch: Batch) -> None:
            self._count(batch)
            batch.num_expired = num_expired
            batch.errors = list(errors)
            batch.become(status)

        await self._change(end)

    def _count(self, batch: Batch) -> None:
        if not batch.ended:
            batch.num_completed, batch.num_failed = self._output.num_lines, self._errors.num_lines

    async def _change(self, edit: Callable[[Batch], None]) -> Batch:
        """Raises StoreUnavailable if the record cannot be changed now, or is gone."""
        changed = await BATCHES.change(self.store, self.tenant, self.batch.id, edit)
        if changed is None:
            raise StoreUnavailable(f"the batch {self.batch.id} is no longer kept")
        return changed


def _begin(batch: Batch, num_lines: int, *, is_new: bool) -> None:
    batch.num_lines = num_lines
    batch.num_begun += is_new
    if batch.status == "validating":
        batch.become("in_progress")


def _cancel(batch: Batch) -> None:
    if not batch.ended:
        batch.become("cancelling")


def _stop(batch: Batch) -> None:
    """Notes that the process that works on the batch stops in order."""
    batch.num_begun = max(0, batch.num_begun - 1)


def _result(line: Line, answer: LineAnswer) -> bytes:
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (
        answer.status,
        orjson.dumps(answer.request_id),
        answer.body,
    )
    return _line(line, response)


def _line(line: Line, response: bytes = b"null", error: bytes = b"null") -> bytes:
    id, custom_id = f"batch_req_{secrets.token_hex(16)}".encode(), orjson.dumps(line.custom_id)
    return b'{"id":"%b","custom_id":%b,"response":%b,"error":%b}\n' % (id, custom_id, response, error)


# All of them


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The facts of an unfinished batch that other processes need."""

    tenant: str
    model: str


_UNFINISHED = Records("batch_unfinished", Unfinished, WINDOW_S + 3600.0, lambda _: 0)
_OF_ALL = ""
"""The tenant under which unfinished batches and their leases stand."""


@dataclass(eq=False)
class Batches:
    """The batches that this process works on, and those that it may have to take over."""

    store: Store
    dispatch: Dispatch
    limits: Limits
    files: Files
    ask: AskLine
    _: KW_ONLY
    replica: str
    """The name of this process among those that share the store, which stays after a restart."""
    model: str
    """The name of the served model; batches of others are not taken over."""

    def __post_init__(self) -> None:
        self._holder = self.replica.encode()
        self._turns = FairSemaphore(LINES_AT_ONCE, LINES_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tenants: dict[str, str] = {}
        """The tenant of each batch at work."""
        self._begun: set[str] = set()
        """The batches that this process has worked on and that have not ended here."""

    async def create(self, tenant: str, batch: Batch) -> None:
        """Begins to work on a batch; raises 429 if the tenant has too many."""
        if list(self._tenants.values()).count(tenant) >= MAX_AT_WORK:
            message = f"You have {MAX_AT_WORK} batches at work; wait for one to end."
            raise refused(message, "too_many_batches", 30.0, tenant_limit=True)
        self._tenants[batch.id] = tenant
        try:
            await BATCHES.put(self.store, tenant, batch.id, batch)
            await self.store.put(_lease(batch.id), self._holder, LEASE_S)
            await _UNFINISHED.put(self.store, _OF_ALL, batch.id, Unfinished(tenant, self.model))
        except BaseException:
            del self._tenants[batch.id]
            raise
        self._start(tenant, batch.id)

    async def cancel(self, tenant: str, batch_id: str) -> Batch | None:
        """Returns the batch, which will be cancelled soon unless it has ended, or None if there is none.

        Raises:
            StoreUnavailable: it cannot be changed now.
        """
        return await BATCHES.change(self.store, tenant, batch_id, _cancel)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Takes over batches of processes that are gone while it is entered; at its end, work stops."""
        try:
            if self.store.durable is None:
                yield
                return
            async with meanwhile(every(CLAIM_S, self._claim, "taking over batches")):
                yield
        finally:
            tasks, tenants = list(self._tasks.values()), dict(self._tenants)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for batch_id, tenant in tenants.items():
                with contextlib.suppress(StoreUnavailable):
                    await BATCHES.change(self.store, tenant, batch_id, _stop)
                    await self.store.delete(_lease(batch_id))

    async def _claim(self) -> None:
        if self.dispatch.draining:
            return
        with contextlib.suppress(StoreUnavailable):
            for batch_id in await self.store.list(_UNFINISHED.kind, _OF_ALL, MAX_UNFINISHED):
                if batch_id not in self._tenants:
                    await self._take_over(batch_id)

    async def _take_over(self, batch_id: str) -> None:
        unfinished = await _UNFINISHED.get(self.store, _OF_ALL, batch_id, keep=False)
        if unfinished is None or unfinished.model != self.model:
            return
        holder = await self.store.add(_lease(batch_id), self._holder, LEASE_S)
        if holder in (None, self._holder):
            self._start(unfinished.tenant, batch_id)

    async def _holds(self, batch_id: str) -> bool:
        """Renews the lease; returns False if another process has it, because this one seemed to be gone."""
        lease = _lease(batch_id)
        if await self.store.replace(lease, self._holder, self._holder, LEASE_S):
            return True
        return await self.store.add(lease, self._holder, LEASE_S) is None

    def _start(self, tenant: str, batch_id: str) -> None:
        """Starts the work in a context of its own: the request that created the batch ends before."""
        self._tenants[batch_id] = tenant
        task = asyncio.get_running_loop().create_task(self._run(tenant, batch_id), context=Context())
        self._tasks[batch_id] = task
        task.add_done_callback(lambda _: self._leave(batch_id))

    def _leave(self, batch_id: str) -> None:
        del self._tasks[batch_id], self._tenants[batch_id]

    async def _run(self, tenant: str, batch_id: str) -> None:
        try:
            batch = await BATCHES.get(self.store, tenant, batch_id, keep=False)
            if batch is None or batch.ended or await self._has_run(tenant, batch):
                await self.store.delete(Key(_UNFINISHED.kind, _OF_ALL, batch_id))
                await self.store.delete(_lease(batch_id))
        except StoreUnavailable as error:
            log.warning("the batch %s waits for the store: %s", batch_id, error)

    async def _has_run(self, tenant: str, batch: Batch) -> bool:
        """Runs the batch here; returns False if another process has to go on with it."""
        holds, is_new = partial(self._holds, batch.id), batch.id not in self._begun
        self._begun.add(batch.id)
        run = Run(self.store, self.files, self.limits, self.ask, self._turns, holds, tenant, batch, is_new)
        try:
            has_ended = await run.run()
            self._begun.discard(batch.id)
            return has_ended
        except StoreUnavailable:
            raise
        except Exception:
            log.exception("the batch %s failed", batch.id)
            await run.fail([LineError("internal_error", "The server could not run the batch.")])
            return True


def _lease(batch_id: str) -> Key:
    return Key("batch_lease", _OF_ALL, batch_id)

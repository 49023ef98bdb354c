"""A batch at work sends each line to its endpoint, a bounded number at a time, until all of them are done.

A line is done when its result is written down. So a process that takes a batch over from one that is gone runs the
other lines, and each line has one result, whatever was under way when the first one went.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits
from penstock.gateway.off_loop import FairSemaphore, off_loop
from penstock.gateway.sessions.batches.batch import (
    BATCHES,
    MAX_RESULT_BYTES,
    Batch,
    Endpoint,
    InputCheck,
    Line,
    LineError,
    Results,
    Status,
    requests_in,
)
from penstock.gateway.sessions.batches.files import Files
from penstock.gateway.store.interface import Store, StoreUnavailable

LINES_AT_ONCE = 16
"""This process sends so many lines of all batches at a time; tenants take turns."""
MAX_ATTEMPTS = 3
"""A batch fails once so many processes have died over it."""
WRITE_S = 0.5
"""Results are written down so often, and a batch that is to be cancelled is cancelled as soon."""
MAX_PAUSE_S = 60.0
"""A line that there is no room for is tried again after no longer than this."""

_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one line."""

    status: int
    request_id: str
    body: bytes
    """The JSON of the reply."""
    retry_after_s: float | None = None
    """The seconds until it is worth trying again, if there was no room."""


Ask = Callable[[str, Endpoint, dict[str, Any]], Awaitable[Answer | None]]
"""An Ask runs one request for a tenant, in the batch lane; it returns None if this process takes no work any more."""


class Run:
    """A batch that this process works on."""

    def __init__(
        self,
        store: Store,
        files: Files,
        limits: Limits,
        ask: Ask,
        turns: FairSemaphore,
        holds: Callable[[], Awaitable[bool]],
        tenant: str,
        batch: Batch,
        *,
        is_new: bool,
    ) -> None:
        """
        Args:
            holds: returns whether the batch is still this process's.
            is_new: whether this process has not worked on it before.
        """
        self._store = store
        self._files = files
        self._limits = limits
        self._ask = ask
        self._turns = turns
        self._holds = holds
        self._tenant = tenant
        self._batch = batch
        self._is_new = is_new
        self._output = Results(files, tenant, batch.output_file_id)
        self._errors = Results(files, tenant, batch.error_file_id)
        self._done: set[str] = set()
        """The `custom_id` of each line that has a result."""
        self._is_closed = False
        """Whether this process takes no more work."""
        self._is_lost = False
        """Whether another process owns the batch, so that nothing may be written here."""

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
        check = InputCheck(self._batch.endpoint, self._limits)
        async for lines in self._input():
            await off_loop(sum(map(len, lines)), check.read, lines)
            if check.is_over:
                break
        if check.errors:
            await self.fail(check.errors)
            return True
        self._done = await self._output.read() | await self._errors.read()
        begun = await self._change(lambda batch: _begin(batch, check.num_requests, is_new=self._is_new))
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
        elif not self._is_lost:
            await self._change(stop)
        return ending is not None

    async def fail(self, errors: list[LineError]) -> None:
        """Ends the batch before any line is run; raises StoreUnavailable."""

        def edit(batch: Batch) -> None:
            batch.errors = errors
            batch.become("failed")

        await self._change(edit)

    async def _input(self) -> AsyncIterator[list[bytes]]:
        """Reads the lines of the input, one list after another."""
        file = await self._files.find(self._tenant, self._batch.input_file_id)
        async for lines in self._files.lines(self._tenant, file, self._limits.max_body_bytes):
            yield lines

    async def _undone(self) -> AsyncGenerator[Line]:
        """Reads the lines that have no result at that moment."""
        async for lines in self._input():
            for line in await off_loop(sum(map(len, lines)), requests_in, lines):
                if line.custom_id not in self._done:
                    yield line

    async def _work(self, num_undone: int) -> Status | None:
        """Runs the lines, and returns how the batch ends, or None if it does not end here."""
        left, reading = self._undone(), asyncio.Lock()
        num_workers = min(LINES_AT_ONCE, num_undone)
        workers = [asyncio.create_task(self._run_lines(left, reading)) for _ in range(num_workers)]
        try:
            while True:
                if workers:
                    await asyncio.wait(workers, timeout=WRITE_S)
                if (ending := await self._look()) is not None or self._is_lost:
                    return ending
                if all(worker.done() for worker in workers):
                    for worker in workers:
                        worker.result()
                    return None if self._is_closed else "completed"
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await left.aclose()
            with contextlib.suppress(StoreUnavailable):
                await self._write()

    async def _look(self) -> Status | None:
        """Writes new results down, and returns how the batch is to end, if it is."""
        with contextlib.suppress(StoreUnavailable):  # later, then
            holds, batch = await self._holds(), await self._change(self._count)
            self._is_lost = not holds or batch.ended
            if self._is_lost:
                return None
            await self._write()
            if batch.status == "cancelling":
                return "cancelled"
        if self._is_full:
            return "failed"
        return "expired" if time.time() >= self._batch.expires_at else None

    async def _run_lines(self, lines: AsyncIterator[Line], reading: asyncio.Lock) -> None:
        while not (self._is_closed or self._is_full):
            async with reading:
                line = await anext(lines, None)
            if line is None:
                return
            answer = await self._answer(line)
            if answer is None:
                self._is_closed = True
                return
            results = self._output if answer.status == 200 else self._errors
            results.add(_result(line, answer))
            self._done.add(line.custom_id)

    async def _answer(self, line: Line) -> Answer | None:
        while True:
            async with self._turns.of(self._tenant):
                answer = await self._ask(self._tenant, self._batch.endpoint, line.body)
            if answer is None or answer.retry_after_s is None:
                return answer
            await asyncio.sleep(min(answer.retry_after_s, MAX_PAUSE_S))

    @property
    def _is_full(self) -> bool:
        return self._output.num_bytes + self._errors.num_bytes > MAX_RESULT_BYTES

    async def _write(self) -> None:
        if self._is_lost:
            return
        await self._output.write()
        await self._errors.write()

    async def _end(self, status: Status, errors: Sequence[LineError] = ()) -> None:
        if status == "completed":
            await self._change(lambda batch: batch.become("finalizing"))
        num_before = self._errors.num_lines
        if status == "expired":
            async for line in self._undone():
                self._errors.add(_unanswered(line))
        num_expired = self._errors.num_lines - num_before
        await self._output.close(f"{self._batch.id}_output.jsonl")
        await self._errors.close(f"{self._batch.id}_error.jsonl")

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
        changed = await BATCHES.change(self._store, self._tenant, self._batch.id, edit)
        if changed is None:
            raise StoreUnavailable(f"the batch {self._batch.id} is no longer kept")
        return changed


def _begin(batch: Batch, num_lines: int, *, is_new: bool) -> None:
    batch.num_lines = num_lines
    batch.num_begun += is_new
    if batch.status == "validating":
        batch.become("in_progress")


def stop(batch: Batch) -> None:
    """Notes that the process that works on the batch stops in order."""
    batch.num_begun = max(0, batch.num_begun - 1)


def _result(line: Line, answer: Answer) -> bytes:
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (
        answer.status,
        orjson.dumps(answer.request_id),
        answer.body,
    )
    return _line(line, response, b"null")


def _unanswered(line: Line) -> bytes:
    return _line(line, b"null", orjson.dumps(_EXPIRED))


def _line(line: Line, response: bytes, error: bytes) -> bytes:
    id, custom_id = f"batch_req_{secrets.token_hex(16)}".encode(), orjson.dumps(line.custom_id)
    return b'{"id":"%b","custom_id":%b,"response":%b,"error":%b}\n' % (id, custom_id, response, error)

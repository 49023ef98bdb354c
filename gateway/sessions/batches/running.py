"""This process works on batches that it was given, and takes over those of processes that are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextvars import Context
from dataclasses import dataclass
from functools import partial

from penstock.gateway.background import every, meanwhile
from penstock.gateway.dispatch import Dispatch
from penstock.gateway.errors import refused
from penstock.gateway.limits import Limits
from penstock.gateway.off_loop import FairSemaphore
from penstock.gateway.sessions.batches.batch import BATCHES, WINDOW_S, Batch, LineError
from penstock.gateway.sessions.batches.files import Files
from penstock.gateway.sessions.batches.run import LINES_AT_ONCE, Ask, Run, stop
from penstock.gateway.store.interface import LEASE_S, Key, Store, StoreUnavailable
from penstock.gateway.store.records import Records

log = logging.getLogger("penstock.gateway")

MAX_AT_WORK = 8
"""This process works on so many batches of one tenant."""
MAX_UNFINISHED = 1000
CLAIM_S = 2.0
"""Batches whose process is gone are looked for so often."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The facts of an unfinished batch that other processes need."""

    tenant: str
    model: str


_UNFINISHED = Records("batch_unfinished", Unfinished, WINDOW_S + 3600.0, lambda _: 0)
_OF_ALL = ""
"""The tenant under which unfinished batches and their leases stand."""


class Batches:
    """The batches that this process works on, and those that it may have to take over."""

    def __init__(
        self,
        store: Store,
        dispatch: Dispatch,
        limits: Limits,
        files: Files,
        ask: Ask,
        *,
        replica: str,
        model: str,
    ) -> None:
        """
        Args:
            replica: the name of this process among those that share the store, which stays after a restart.
            model: the name of the served model; batches of others are not taken over.
        """
        self._store = store
        self._dispatch = dispatch
        self._limits = limits
        self._files = files
        self._ask = ask
        self._replica = replica.encode()
        self._model = model
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
            await BATCHES.put(self._store, tenant, batch.id, batch)
            await self._store.put(_lease(batch.id), self._replica, LEASE_S)
            await _UNFINISHED.put(self._store, _OF_ALL, batch.id, Unfinished(tenant, self._model))
        except BaseException:
            del self._tenants[batch.id]
            raise
        self._start(tenant, batch.id)

    async def cancel(self, tenant: str, batch_id: str) -> Batch | None:
        """Returns the batch, which will be cancelled soon unless it has ended, or None if there is none.

        Raises:
            StoreUnavailable: it cannot be changed now.
        """

        def edit(batch: Batch) -> None:
            if not batch.ended:
                batch.become("cancelling")

        return await BATCHES.change(self._store, tenant, batch_id, edit)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Takes over batches of processes that are gone while it is entered; at its end, work stops."""
        try:
            if self._store.durable is None:
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
                    await BATCHES.change(self._store, tenant, batch_id, stop)
                    await self._store.delete(_lease(batch_id))

    async def _claim(self) -> None:
        if self._dispatch.draining:
            return
        with contextlib.suppress(StoreUnavailable):
            for batch_id in await self._store.list(_UNFINISHED.kind, _OF_ALL, MAX_UNFINISHED):
                if batch_id not in self._tenants:
                    await self._take_over(batch_id)

    async def _take_over(self, batch_id: str) -> None:
        found = await _UNFINISHED.get(self._store, _OF_ALL, batch_id, keep=False)
        if found is None or found.model != self._model:
            return
        holder = await self._store.add(_lease(batch_id), self._replica, LEASE_S)
        if holder in (None, self._replica):
            self._start(found.tenant, batch_id)

    async def _holds(self, batch_id: str) -> bool:
        """Renews the lease; returns False if another process has it, because this one seemed to be gone."""
        lease = _lease(batch_id)
        if await self._store.replace(lease, self._replica, self._replica, LEASE_S):
            return True
        return await self._store.add(lease, self._replica, LEASE_S) is None

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
            batch = await BATCHES.get(self._store, tenant, batch_id, keep=False)
            if batch is None or batch.ended or await self._has_run(tenant, batch):
                await self._store.delete(Key(_UNFINISHED.kind, _OF_ALL, batch_id))
                await self._store.delete(_lease(batch_id))
        except StoreUnavailable as error:
            log.warning("the batch %s waits for the store: %s", batch_id, error)

    async def _has_run(self, tenant: str, batch: Batch) -> bool:
        """Runs the batch here; returns False if another process has to go on with it."""
        holds = partial(self._holds, batch.id)
        is_new = batch.id not in self._begun
        self._begun.add(batch.id)
        store, turns = self._store, self._turns
        run = Run(store, self._files, self._limits, self._ask, turns, holds, tenant, batch, is_new=is_new)
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

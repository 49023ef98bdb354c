"""A durable store that knows which of its streams nobody works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.gateway.store.interface import Journal, JournalChange, JournalOutcome, Key, StoreUnavailable
from tests.gateway.store.durable_store import DurableStore


class OrphaningStore(DurableStore):
    """It is `away` while the test says so."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.away = False
        self.loses_answers = False
        """It does what it is asked to, and nobody hears of it."""
        self._own: dict[str, None] = {}
        self._orphaned: set[str] = set()

    def orphan(self) -> None:
        """The process that wrote is gone."""
        self._orphaned.update(self._own)
        self._own.clear()

    async def write_journals(self, changes: Sequence[JournalChange]) -> Sequence[JournalOutcome]:
        self._check()
        self._own.update(dict.fromkeys(change.stream_id for change in changes))
        return await super().write_journals(changes)

    async def read_journal(self, stream_id: str) -> Journal | None:
        self._check()
        return await super().read_journal(stream_id)

    async def delete_journals(self, stream_ids: Sequence[str]) -> None:
        self._check()
        await super().delete_journals(stream_ids)

    async def claim(self) -> Sequence[str]:
        self._check()
        self._own.update(dict.fromkeys(sorted(self._orphaned)))
        self._orphaned.clear()
        if self.loses_answers:
            raise StoreUnavailable("its answer is lost")
        return [stream_id for stream_id in await super().claim() if stream_id in self._own]

    async def get(self, key: Key, ttl_s: float | None = None) -> bytes | None:
        self._check()
        return await super().get(key, ttl_s)

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("it is away")

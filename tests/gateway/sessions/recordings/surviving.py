"""A store that outlives its servers, for tests that end one server and begin another in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.store.interface import Journal, JournalChange, Key, StoreUnavailable
from gateway.store.memory import MemoryStore


class SurvivingStore(MemoryStore):
    """Durable as long as the test keeps it; `away` while the test says so."""

    durable = True

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.away = False
        self.loses_answers = False
        """It does what it is asked to, and nobody hears of it."""
        self._own: dict[str, None] = {}
        self._orphaned: set[str] = set()

    @property
    def journals(self) -> list[str]:
        """Ids of all that are there."""
        return [stream_id for stream_id, _ in self._journals.items()]

    def orphan(self) -> None:
        """The process that wrote is gone."""
        self._orphaned.update(self._own)
        self._own.clear()

    async def write_journals(self, changes: Sequence[JournalChange]) -> None:
        self._check()
        self._own.update(dict.fromkeys(change.stream_id for change in changes))
        await super().write_journals(changes)

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

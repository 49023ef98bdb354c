"""A store that outlives its servers, for tests that end one server and begin another in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.gateway.store.interface import Durable, Journal, JournalChange, JournalOutcome, PrefixChange
from penstock.gateway.store.memory import MemoryStore


class DurableStore(MemoryStore):
    """Durable as long as the test keeps it; `test_contract` holds it against Redis."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, replica: str = "local") -> None:
        super().__init__(clock)
        self.num_losses = 0
        self._replica = replica
        self._journals: dict[str, tuple[Journal, float]] = {}
        """With the time at which each expires."""
        self._prefixes: dict[bytes, PrefixChange] = {}

    @property
    def durable(self) -> Durable:  # type: ignore[override]
        return self

    @property
    def journals(self) -> list[str]:
        """Ids of all that are there."""
        return [stream_id for stream_id in self._journals if self._journal(stream_id) is not None]

    def _journal(self, stream_id: str) -> Journal | None:
        journal, expires_s = self._journals.get(stream_id, (None, 0.0))
        return journal if expires_s > self.clock() else None

    async def write_journals(self, changes: Sequence[JournalChange]) -> Sequence[JournalOutcome]:
        return [self._write(change) for change in changes]

    def _write(self, change: JournalChange) -> JournalOutcome:
        known = self._journal(change.stream_id)
        if known is None and change.header is not None:
            known = Journal(change.stream_id, change.header, (), None)
        if known is None:
            return "missing"
        if known.end is not None:
            return "ended"
        if change.offset > len(known.token_ids):
            return "gap"
        after = known.token_ids[change.offset + len(change.token_ids) :]
        journal = replace(
            known,
            header=known.header if change.header is None else change.header,
            token_ids=known.token_ids[: change.offset] + change.token_ids + after,
            end=change.end,
        )
        self._journals[change.stream_id] = (journal, self.clock() + change.ttl_s)
        return "written"

    async def read_journal(self, stream_id: str) -> Journal | None:
        return self._journal(stream_id)

    async def read_journals(self, stream_ids: Sequence[str]) -> Sequence[Journal]:
        found = [await self.read_journal(stream_id) for stream_id in stream_ids]
        return [journal for journal in found if journal is not None]

    async def delete_journals(self, stream_ids: Sequence[str]) -> None:
        for stream_id in stream_ids:
            self._journals.pop(stream_id, None)

    async def claim(self) -> Sequence[str]:
        journals = [(stream_id, self._journal(stream_id)) for stream_id in self._journals]
        return [stream_id for stream_id, journal in journals if journal is not None and journal.end is None]

    async def write_prefixes(self, changes: Sequence[PrefixChange]) -> None:
        for change in changes:
            known = change if change.resident else self._prefixes.get(change.hash)
            if known is not None:
                self._prefixes[change.hash] = replace(known, resident=change.resident)

    async def locate(self, hashes: Sequence[bytes]) -> dict[str, int]:
        held = [known in self._prefixes and self._prefixes[known].resident for known in hashes]
        num_held = [*held, False].index(False)
        return {self._replica: num_held} if num_held else {}

    async def hottest(self, limit: int) -> Sequence[PrefixChange]:
        return sorted(self._prefixes.values(), key=lambda change: -change.hotness)[:limit]

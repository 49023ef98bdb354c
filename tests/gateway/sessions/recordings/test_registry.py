"""The registry of recordings: what it writes, keeps and asks the store for, and when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.engine.planning.request import FinishReason, Output
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.recordings.registry import Keeping
from penstock.gateway.store.interface import Journal, JournalChange, JournalOutcome, StoreUnavailable
from penstock.gateway.store.time_budget import TIME_BUDGET, TimeBudget
from tests.clock import Clock
from tests.gateway.harness import Gateway, make_timings, settled
from tests.gateway.sessions.recordings.fakes import FakeReader, bring, make_recording, make_request
from tests.gateway.sessions.recordings.orphaning_store import OrphaningStore

pytestmark = pytest.mark.anyio


class Counting(OrphaningStore):
    """A store that brings a token with every write, as a step does that takes no longer than it."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.asked: list[str] = []
        self.busy: Recording | None = None

    async def write_journals(self, changes: Sequence[JournalChange]) -> Sequence[JournalOutcome]:
        outcomes = await super().write_journals(changes)
        self.asked.append("write")
        if self.busy is not None:
            bring(self.busy, "x")
        return outcomes

    async def read_journal(self, stream_id: str) -> Journal | None:
        self.asked.append("read")
        return await super().read_journal(stream_id)

    async def claim(self) -> Sequence[str]:
        self.asked.append("claim")
        return await super().claim()


def end(recording: Recording) -> None:
    timings = make_timings(recording.request)
    recording.push(Output(request_id=recording.id, index=0, finish_reason=FinishReason.STOP, timings=timings))


def entered(gateway: Gateway, number: int = 1) -> Recording:
    recording = make_recording(make_request(f"chatcmpl-{number}"))
    gateway.service.recordings._enter(recording)
    return recording


async def test_writing_ends_though_every_write_takes_as_long_as_a_step() -> None:
    """Or else whoever died would not be taken over, and nothing deleted, while anybody is served."""
    store = Counting()
    gateway = Gateway(store=store)
    store.busy = entered(gateway)
    entered(gateway, 2)
    gateway.service.recordings.keeping = Keeping(batch=1)
    await asyncio.wait_for(gateway.service.recordings._write_down(), 10)
    assert store.asked == ["write", "write"]


async def test_it_is_written_down_again_and_again_while_it_goes_on() -> None:
    store = Counting()
    gateway = Gateway(store=store)
    store.busy = entered(gateway)
    gateway.service.recordings.keeping = Keeping(flush_s=0.001)
    async with gateway.service.recordings.running(), asyncio.timeout(10):
        while store.asked.count("write") < 2:
            await asyncio.sleep(0.001)


async def test_those_that_ended_first_go_when_there_are_too_many_bytes() -> None:
    gateway = Gateway(store=OrphaningStore(Clock()))
    recordings = gateway.service.recordings
    kept = [entered(gateway, number) for number in range(4)]
    for recording in kept:
        bring(recording, "x" * 1000)
    for number in (3, 0, 1):
        end(kept[number])
        await settled()
    recordings.keeping = Keeping(max_bytes=2 * kept[0].num_bytes + 1000)
    recordings.tick(gateway.clock.now)
    here = [number for number, one in enumerate(kept) if recordings.here("", one.id) is one]
    assert here == [0, 1, 2]  # 3 ended first, and 2 has not ended
    assert recordings.num_bytes == sum(kept[number].num_bytes for number in here)


async def test_what_is_read_stays_and_does_not_keep_what_ended_later() -> None:
    gateway = Gateway(store=OrphaningStore(Clock()))
    recordings = gateway.service.recordings
    kept = [entered(gateway, number) for number in range(3)]
    for recording in kept:
        end(recording)
        await settled()
    reader = FakeReader(kept[0])
    recordings.tick(gateway.clock.now + recordings.keeping.keep_s + 1)
    assert [one for one in kept if recordings.here("", one.id)] == [kept[0]]
    kept[0].detach(reader.reader, gateway.clock.now)
    recordings.tick(gateway.clock.now + recordings.keeping.keep_s + 1)
    assert (len(recordings), recordings.num_bytes) == (0, 0)


async def test_a_tenant_that_has_too_much_loses_its_own_replies() -> None:
    gateway = Gateway(store=OrphaningStore(Clock()))
    recordings = gateway.service.recordings
    kept: dict[str, list[Recording]] = {"small": [], "large": []}
    for number, tenant in enumerate(["small", *["large"] * 8]):
        kept[tenant].append(recording := make_recording(make_request(f"chatcmpl-{number}", tenant=tenant)))
        recordings._enter(recording)
        bring(recording, "x" * 1000)
        end(recording)
        await settled()
    recordings.keeping = Keeping(max_bytes=4 * kept["large"][0].num_bytes + 1000)
    recordings.tick(gateway.clock.now)
    here = {tenant: [recordings.here(tenant, one.id) is one for one in own] for tenant, own in kept.items()}
    assert here == {"small": [True], "large": [False] * 5 + [True] * 3}


async def test_what_ended_costs_a_tick_nothing() -> None:
    gateway = Gateway(store=OrphaningStore(Clock()))
    recordings = gateway.service.recordings
    for number in range(200):
        end(entered(gateway, number))
    await settled()
    looked_at = [0]

    def is_read(_: Recording) -> bool:
        looked_at[0] += 1
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recording, "is_read", property(is_read))
        recordings.tick(gateway.clock.now)
        assert looked_at == [0]
        recordings.tick(gateway.clock.now + recordings.keeping.keep_s + 1)
    assert (looked_at, len(recordings)) == ([200], 0)


async def test_for_an_id_that_nobody_knows_the_store_is_asked_once() -> None:
    store = Counting()
    assert await Gateway(store=store).service.recordings.find("ann", "chatcmpl-0") is None
    assert store.asked == ["read"]


async def test_a_lookup_waits_through_a_hiccup_of_the_store() -> None:
    class Hiccup(Counting):
        async def read_journal(self, stream_id: str) -> Journal | None:
            journal = await super().read_journal(stream_id)
            if len(self.asked) < 2:
                raise StoreUnavailable
            return journal

    store = Hiccup()
    assert await Gateway(store=store).service.recordings.find("ann", "chatcmpl-0") is None
    assert store.asked == ["read", "read"]


class SerialStore(OrphaningStore):
    """A store that answers a call after some turns of the loop, and one at a time."""

    def __init__(self, *, num_refused: int = 0) -> None:
        super().__init__(Clock())
        self.num_refused = num_refused
        """So many calls find no connection."""
        self.num_writes = 0
        self._connection = asyncio.Lock()

    async def write_journals(self, changes: Sequence[JournalChange]) -> Sequence[JournalOutcome]:
        self.num_writes += 1
        if self.num_writes <= self.num_refused or self._connection.locked():
            raise StoreUnavailable("Redis: pool")
        async with self._connection:
            for _ in range(10):
                await asyncio.sleep(0)
            return await super().write_journals(changes)


async def begin(gateway: Gateway, number: int) -> None:
    await gateway.service.recordings.start(
        make_request(f"chatcmpl-{number}"),
        kind="chat",
        details=make_recording().details,
        created=7,
        detachable=True,
        journalled=True,
    )


async def test_what_begins_at_a_time_is_written_down_together_before_its_id_is_given_away() -> None:
    """A connection for each would not be had, and who had none would be lost with its server."""
    store = SerialStore()
    gateway = Gateway(store=store)
    await asyncio.gather(*(begin(gateway, number) for number in range(50)))
    assert len(store.journals) == 50
    assert store.num_writes <= 3


@pytest.mark.parametrize(("num_refused", "num_known"), [(1, 50), (2, 0)])
async def test_what_is_not_written_down_at_once_is_tried_once_more(num_refused: int, num_known: int) -> None:
    store = SerialStore(num_refused=num_refused)
    gateway = Gateway(store=store)
    begun = [asyncio.create_task(begin(gateway, number)) for number in range(50)]
    await asyncio.gather(*begun)
    assert (len(store.journals), store.num_writes) == (num_known, 2)


async def test_a_reply_is_written_down_although_its_request_has_waited_for_redis_long_enough() -> None:
    seen: list[TimeBudget | None] = []

    class SlowStore(OrphaningStore):
        async def write_journals(self, changes: Sequence[JournalChange]) -> Sequence[JournalOutcome]:
            seen.append(TIME_BUDGET.get())
            return await super().write_journals(changes)

    before = TIME_BUDGET.set(TimeBudget(num_checks=0))
    try:
        await begin(Gateway(store=SlowStore(Clock())), 1)
    finally:
        TIME_BUDGET.reset(before)
    assert seen == [None]


async def test_hashes_of_the_prompt_are_not_written_down() -> None:
    """They follow from its tokens, and are bytes that JSON does not take."""
    store = Counting()
    gateway = Gateway(store=store)
    request = replace(make_request("chatcmpl-1"), block_hashes=(b"\xff" * 16,))
    gateway.service.recordings._enter(make_recording(request))
    await gateway.service.recordings._write_down()
    assert store.journals == ["chatcmpl-1"]


async def test_all_who_come_back_at_once_are_served_by_few_claims() -> None:
    """A claim for each of them would take a slow store longer than they can wait."""
    store = Counting()
    before = Gateway(store=store)
    await asyncio.gather(*(begin(before, number) for number in range(50)))
    store.orphan()
    store.asked.clear()
    recordings = Gateway(store=store, clock=store.clock).service.recordings
    found = await asyncio.gather(*(recordings.find("", f"chatcmpl-{number}") for number in range(50)))
    assert None not in found
    assert store.asked.count("claim") <= 2

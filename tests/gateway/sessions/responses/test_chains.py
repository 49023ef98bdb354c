"""Chains of responses: what many turns take, and what is left when some of them are gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses import records
from penstock.gateway.sessions.responses.records import KIND, StoredResponse
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.store import link
from penstock.gateway.store.interface import PIECE, Key, Store
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.shared import SharedStore
from tests.clock import Clock
from tests.gateway.sessions.responses.recorded_responses import finish, recording_of, say
from tests.gateway.store.stores import redis_store
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("closing")]

TENANT = "default"
SAID = "He rode on, and the fox went with him as far as the old tree, where it was quiet. "


@pytest.fixture
def redis_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """A busy machine is not to look like a Redis that is gone."""
    monkeypatch.setattr(link, "WORK_S", 2.0)
    with RedisServer() as server:
        yield server


class Talk:
    """A conversation of responses, each of which goes on from the one before it."""

    def __init__(self, store: Store, *, new_head: bool = False) -> None:
        """With a `new_head`, every context begins otherwise, as one does with the time in its instructions."""
        self.store = store
        self.ids: list[str] = []
        self._new_head = new_head

    async def turn(self) -> Recording:
        number = len(self.ids)
        thread = await self.thread() if self.ids else Thread()
        known = list(thread.token_ids) or [1] * 70 * number
        head = [number] if self._new_head else [0]
        prompt = [*head, *known[1:], *range(1000 * number, 1000 * number + 40)]
        recording = recording_of(f"{number}: {SAID * 2}", id=f"resp_{number:048x}", prompt=prompt)
        recording.details["history"] = list(thread.messages)
        recording.details["shared_tokens"] = records.shared_tokens(thread, prompt)
        for word in range(30):
            say(recording, f"{word} {SAID[:20]}", token_id=word)
        finish(recording)
        await records.keep(self.store, recording)
        self.ids.append(recording.id)
        return recording

    async def thread(self, number: int = -1) -> Thread:
        record = await self.record(number)
        assert record is not None
        assert record.thread is not None
        return record.thread

    async def record(self, number: int = -1) -> StoredResponse | None:
        return await records.find(self.store, TENANT, self.ids[number])


async def test_a_thread_is_as_it_was_after_any_turn() -> None:
    talk = Talk(MemoryStore(Clock()))
    kept = [records.continued(await talk.turn()) for _ in range(60)]
    for number in (0, 1, 2, 17, 40, 59):
        assert await talk.thread(number) == kept[number]
    last = kept[-1]
    assert last is not None
    assert len(last.messages) == 120


MANY = [120, pytest.param(500, marks=pytest.mark.long("five hundred turns"))]


@pytest.mark.parametrize("num_turns", MANY)
@pytest.mark.parametrize("new_head", [False, True])
async def test_many_turns_take_linear_space(num_turns: int, new_head: bool) -> None:
    store = MemoryStore(Clock())
    talk, sizes = Talk(store, new_head=new_head), list[int]()
    for _ in range(num_turns):
        await talk.turn()
        sizes.append(store.records.num_bytes)
    half = sizes[num_turns // 2 - 1]
    print(f"{half:,} bytes after {num_turns // 2} turns, {sizes[-1]:,} after {num_turns}")
    assert sizes[-1] < 2.3 * half
    assert store.records.num_evicted == 0


async def test_a_context_that_begins_otherwise_every_time_is_not_kept_every_time() -> None:
    talk = Talk(MemoryStore(Clock()), new_head=True)
    for _ in range(200):
        await talk.turn()
    with_tokens = [number for number in range(200) if (await talk.thread(number)).token_ids]
    assert 20 < len(with_tokens) < 150


@pytest.mark.parametrize("num_turns", MANY)
async def test_many_turns_take_linear_space_in_redis_and_few_calls_each(
    num_turns: int, redis_server: RedisServer
) -> None:
    remote = redis_store(redis_server)
    store = SharedStore(MemoryStore(), remote)
    talk, taken, calls = Talk(store), list[int](), list[int]()
    for number in range(1, num_turns + 1):
        await talk.turn()
        await store.flush()
        if number in (num_turns // 2, num_turns):
            taken.append(sum(redis_server.call("MEMORY", "USAGE", key) for key in redis_server.all_keys()))
            calls.append(remote.stats().num_calls)
    print(f"{taken[0]:,} bytes in Redis after {num_turns // 2} turns, {taken[1]:,} after {num_turns}")
    assert taken[1] < 2.3 * taken[0]
    assert calls[1] - calls[0] < num_turns // 2 * 10
    other = redis_store(redis_server, replica="b")
    record = await records.find(other, TENANT, talk.ids[-1])
    assert record is not None
    assert record.thread == await talk.thread()
    assert other.stats().num_calls <= 10


@pytest.mark.parametrize("deleted", [0, 20, 39])
async def test_a_response_outlives_those_that_it_went_on_from(deleted: int) -> None:
    talk = Talk(MemoryStore(Clock()))
    kept = [records.continued(await talk.turn()) for _ in range(41)]
    await talk.store.delete(Key(KIND, TENANT, talk.ids[deleted]))
    assert await talk.record(deleted) is None
    assert await talk.thread(40) == kept[40]


async def test_one_that_is_asked_for_again_and_again_outlives_its_ancestors() -> None:
    clock = Clock()
    talk = Talk(MemoryStore(clock))
    kept = [records.continued(await talk.turn()) for _ in range(41)]
    for _ in range(3):
        clock.now += records.KEPT_S * 0.9
        assert await talk.thread(40) == kept[40]
    assert await talk.record(39) is None


async def test_nothing_is_left_when_nobody_asks_any_more() -> None:
    clock = Clock()
    talk = Talk(store := MemoryStore(clock))
    for _ in range(41):
        await talk.turn()
    clock.now += records.KEPT_S + 61
    assert (await talk.record(), len(store.records)) == (None, 0)


async def test_a_response_whose_history_is_gone_is_still_shown() -> None:
    talk = Talk(store := MemoryStore(Clock()))
    for _ in range(41):
        recording = await talk.turn()
    (*_, piece) = store.records.list(PIECE, TENANT, 1000)
    await store.delete(Key(PIECE, TENANT, piece))
    record = await talk.record()
    assert record is not None
    assert (record.thread, record.is_broken) == (None, True)
    assert record.object["id"] == recording.id

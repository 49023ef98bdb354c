"""Batches at work: what becomes of each line, whatever happens to the process that works on it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.limits import Limits
from penstock.gateway.sessions.batches import batch as batch_module
from penstock.gateway.sessions.batches import files, run
from penstock.gateway.sessions.batches.batch import BATCHES, Batch, new_batch_id
from penstock.gateway.sessions.batches.files import Files, new_file_id
from penstock.gateway.sessions.batches.run import Batches, LineAnswer
from penstock.gateway.store.interface import Store, StoreUnavailable
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.redis import RedisStore
from penstock.gateway.store.shared import SharedStore
from tests.few import examples
from tests.gateway.harness import Gateway
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio

TENANT = "t"
NUM_LINES = 40


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WRITE_S", 0.001)


class StoreConnection:
    """The way to a store; once it is cut, the process at this end is as good as killed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_cut = False

    def __getattr__(self, name: str) -> Any:
        if self.is_cut:
            raise StoreUnavailable
        return getattr(self._store, name)


class Process:
    """One that shares a store with others, and answers each line as the test says."""

    def __init__(
        self,
        store: Any,
        answer: Callable[[str], Awaitable[LineAnswer | None]],
        replica: str = "r",
        limits: Limits | None = None,
    ) -> None:
        self.asked: Counter[str] = Counter()
        self._answer = answer
        self.files = Files(store)
        self.batches = Batches(
            store,
            Gateway().service.dispatch,
            limits or Limits(),
            self.files,
            self._ask,
            replica=replica,
            model="m",
        )

    async def _ask(self, tenant: str, endpoint: str, body: dict[str, Any]) -> LineAnswer | None:
        assert (tenant in (TENANT, "other"), endpoint) == (True, "/v1/completions")
        self.asked[body["prompt"]] += 1
        return await self._answer(body["prompt"])


async def right(name: str) -> LineAnswer:
    await asyncio.sleep(0)
    return LineAnswer(200, "req", b'{"said":"%b"}' % name.encode())


async def started(process: Process, tenant: str = TENANT, prefix: str = "c", **fields: Any) -> str:
    lines = (
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name}}
        for name in (f"{prefix}{i}" for i in range(NUM_LINES))
    )
    content = b"\n".join(json.dumps(line).encode() for line in lines)
    file = await process.files.add(tenant, "in", "batch", content)
    values: dict[str, Any] = {
        "created_at": int(time.time()),
        "input_file_id": file.id,
        "output_file_id": new_file_id(),
        "error_file_id": new_file_id(),
        **fields,
    }
    batch = Batch(
        id=new_batch_id(),
        endpoint="/v1/completions",
        **values,
    )
    await process.batches.create(tenant, batch)
    return batch.id


async def ended(store: Store, batch_id: str) -> Batch:
    while True:
        batch = await BATCHES.get(store, TENANT, batch_id)
        assert batch is not None
        if batch.ended:
            return batch
        await asyncio.sleep(0.001)


async def has_results(store: Store, batch_id: str) -> bool:
    batch = await BATCHES.get(store, TENANT, batch_id)
    return batch is not None and batch.num_completed > 0


async def results(process: Process, file_id: str) -> dict[str, Any]:
    file = await process.files.find(TENANT, file_id)
    content = b"".join([part async for part in process.files.content(TENANT, file)])
    assert len(content) == file.num_bytes
    lines = [json.loads(line) for line in content.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a line has two results"
    return found


async def test_a_process_goes_on_with_what_another_left() -> None:
    store = MemoryStore()
    connection, written, output_id = StoreConnection(store), set[str](), new_file_id()

    async def cut_off(name: str) -> LineAnswer:
        if first.asked.total() == NUM_LINES // 2 and not connection.is_cut:
            while not written:  # some results are written down, others are not
                await asyncio.sleep(0.001)
                found = await first.files.part(TENANT, output_id, 0)
                written.update(json.loads(line)["custom_id"] for line in (found or b"").splitlines())
            connection.is_cut = True
        return await right(name)

    first, second = Process(connection, cut_off), Process(store, right)
    batch_id = await started(first, output_file_id=output_id)
    while not connection.is_cut:
        await asyncio.sleep(0.001)
    await second.batches._claim()
    batch = await ended(store, batch_id)
    for task in list(first.batches._tasks.values()):
        task.cancel()
    assert (batch.status, batch.num_lines, batch.num_completed, batch.num_failed) == (
        "completed",
        NUM_LINES,
        NUM_LINES,
        0,
    )
    assert (await results(second, batch.output_file_id)).keys() == {f"c{i}" for i in range(NUM_LINES)}
    assert 0 < len(written) < NUM_LINES
    assert second.asked.keys() == {f"c{i}" for i in range(NUM_LINES)} - written
    assert not await store.list("batch_unfinished", "", 9)


async def test_a_batch_of_no_requests_fails_and_is_done_with() -> None:
    store = MemoryStore()
    process = Process(store, right)
    file = await process.files.add(TENANT, "in", "batch", b"not JSON")
    batch_id = await started(process, input_file_id=file.id)
    while process.batches._tasks:
        await asyncio.sleep(0.001)
    assert (await ended(store, batch_id)).status == "failed"
    assert not process.asked
    assert not await store.list("batch_unfinished", "", 9)


async def test_a_batch_that_ends_every_process_fails_and_keeps_what_it_has() -> None:
    store = MemoryStore()
    batch_ids, asked = list[str](), Counter[str]()
    for number in range(run.MAX_ATTEMPTS + 1):
        connection = StoreConnection(store)

        async def poisoned(name: str, connection: StoreConnection = connection) -> LineAnswer:
            if name == "c7":
                while not (batch_ids and await has_results(store, batch_ids[0])):
                    await asyncio.sleep(0.001)
                connection.is_cut = True
                await asyncio.Event().wait()
            return await right(name)

        process = Process(connection, poisoned)
        if number:
            await process.batches._claim()
        else:
            batch_ids.append(await started(process))
        async with asyncio.timeout(10):
            while process.batches._tasks and not connection.is_cut:
                await asyncio.sleep(0.001)
        for task in list(process.batches._tasks.values()):
            task.cancel()
        asked += process.asked
    batch = await ended(store, batch_ids[0])
    assert (batch.status, [error.code for error in batch.errors]) == ("failed", ["server_failed"])
    assert asked["c7"] == run.MAX_ATTEMPTS
    assert len(await results(Process(store, right), batch.output_file_id)) == batch.num_completed > 0
    assert not await store.list("batch_unfinished", "", 9)


async def test_stopping_in_order_is_no_fault_of_the_batch() -> None:
    store = MemoryStore()

    async def slow(_: str) -> LineAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    batch_id = await started(first := Process(store, slow))
    for process in (first, *(Process(store, slow) for _ in range(run.MAX_ATTEMPTS))):
        async with process.batches.running():
            await process.batches._claim()
            while not process.asked:
                await asyncio.sleep(0)
    await Process(store, right).batches._claim()
    assert (await ended(store, batch_id)).status == "completed"


async def test_a_batch_is_one_process_s_at_a_time() -> None:
    store, held = MemoryStore(), asyncio.Event()

    async def hold(name: str) -> LineAnswer:
        await held.wait()
        return await right(name)

    first, second = Process(store, hold), Process(store, right, "other")
    batch_id = await started(first)
    while not first.asked:
        await asyncio.sleep(0)
    await second.batches._claim()
    assert not second.asked
    await store.delete(run._lease(batch_id))  # as if it had not been renewed in time
    await second.batches._claim()
    while first.batches._tasks:
        await asyncio.sleep(0.001)
    held.set()
    assert (await ended(store, batch_id)).num_completed == NUM_LINES


async def test_a_batch_of_another_model_is_left_alone() -> None:
    store = MemoryStore()
    process, other = Process(store, right), Process(store, right)
    other.batches.model = "another"
    batch_id = await started(process)
    async with process.batches.running():
        pass  # it stops, and gives its lease back
    await other.batches._claim()
    assert not other.batches._tasks
    await Process(store, right).batches._claim()
    assert (await ended(store, batch_id)).status == "completed"


async def test_what_is_not_done_in_time_is_said_to_be_expired() -> None:
    store = MemoryStore()

    async def slow(name: str) -> LineAnswer:
        if name != "c3":
            await asyncio.Event().wait()
        return await right(name)

    process = Process(store, slow)
    batch = await ended(
        store, await started(process, created_at=int(time.time()) - batch_module.WINDOW_S + 1)
    )
    assert (batch.status, batch.num_completed, batch.num_failed) == ("expired", 1, NUM_LINES - 1)
    errors = await results(process, batch.error_file_id)
    assert "c3" not in errors
    assert errors["c0"]["response"] is None
    assert errors["c0"]["error"]["code"] == "batch_expired"


async def test_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_RESULT_BYTES", 200)
    store = MemoryStore()
    process = Process(store, right)
    batch = await ended(store, await started(process))
    assert (batch.status, batch.errors[0].code) == ("failed", "results_too_large")
    assert 1 <= batch.num_completed < NUM_LINES
    assert len(await results(process, batch.output_file_id)) == batch.num_completed


async def test_lines_take_turns_and_come_back_when_there_was_no_room() -> None:
    store, at_once, most = MemoryStore(), 0, 0

    async def busy(name: str) -> LineAnswer:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        is_first = process.asked[name] == 1
        return LineAnswer(503, "req", b"{}", 0.0) if is_first else await right(name)

    process = Process(store, busy)
    batch = await ended(store, await started(process))
    assert (batch.num_completed, batch.num_failed) == (NUM_LINES, 0)
    assert most == run.LINES_AT_ONCE
    assert set(process.asked.values()) == {2}


async def test_tenants_take_turns_however_many_batches_one_has() -> None:
    waiting: dict[str, asyncio.Event] = {}

    async def told(name: str) -> LineAnswer:
        waiting[name] = asyncio.Event()
        await waiting[name].wait()
        del waiting[name]
        return await right(name)

    process = Process(MemoryStore(), told)
    for number in range(4):
        await started(process, prefix=f"{number}.")
    while len(waiting) < run.LINES_AT_ONCE:
        await asyncio.sleep(0.001)
    assert len(process.batches._tasks) == 4
    await started(process, "other", prefix="other")
    while not process.batches._turns._places.statistics().tasks_waiting:
        await asyncio.sleep(0.001)
    num_before = 0
    while not any(name.startswith("other") for name in waiting):
        num_asked = process.asked.total()
        next(iter(waiting.values())).set()
        num_before += 1
        while process.asked.total() == num_asked:
            await asyncio.sleep(0.001)
    assert num_before == 1
    for task in process.batches._tasks.values():
        task.cancel()


async def test_a_process_that_takes_no_work_any_more_leaves_it_to_another() -> None:
    store = MemoryStore()

    async def closing(_: str) -> None:
        return None

    process = Process(store, closing)
    batch_id = await started(process)
    while process.batches._tasks:
        await asyncio.sleep(0.001)
    batch = await BATCHES.get(store, TENANT, batch_id)
    assert batch is not None
    assert batch.status == "in_progress"
    await Process(store, right).batches._claim()
    assert (await ended(store, batch_id)).num_completed == NUM_LINES


async def test_a_fault_ends_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()

    async def broken(_: str) -> LineAnswer:
        raise ValueError("of the server's own")

    batch = await ended(store, await started(Process(store, broken)))
    assert (batch.status, batch.errors[0].code) == ("failed", "internal_error")
    assert "of the server's own" in caplog.text


async def test_a_batch_whose_input_is_gone_fails() -> None:
    store = MemoryStore()
    batch = await ended(store, await started(Process(store, right), input_file_id=new_file_id()))
    assert (batch.status, batch.errors[0].code) == ("failed", "input_file_gone")


async def test_a_batch_whose_input_is_deleted_under_way_fails_and_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 300)
    store = MemoryStore()

    async def deleting(name: str) -> LineAnswer:
        for file in await process.files.all(TENANT):
            await process.files.delete(TENANT, file)
        return await right(name)

    process = Process(store, deleting)
    batch = await ended(store, await started(process))
    assert (batch.status, batch.errors[0].code) == ("failed", "input_file_gone")
    assert 0 < len(await results(process, batch.output_file_id)) < NUM_LINES


async def test_a_line_may_not_be_longer_than_a_body() -> None:
    store = MemoryStore()
    process = Process(store, right, limits=Limits(max_body_bytes=60))
    batch = await ended(store, await started(process))
    assert (batch.status, batch.errors[0].code) == ("failed", "line_too_long")
    assert not process.asked


@given(
    st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=20), st.integers(1, 9)
)
@settings(max_examples=examples(50))
def test_lines_are_whole_wherever_parts_end(lines: list[bytes], part_bytes: int) -> None:
    async def read() -> list[bytes]:
        there = Files(MemoryStore())
        file = await there.add(TENANT, "a", "batch", b"\n".join(lines))
        return [line async for some in there.lines(TENANT, file, 20) for line in some]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "PART_BYTES", part_bytes)
        assert asyncio.run(read()) == (lines or [b""])


async def test_a_file_that_is_larger_than_what_may_wait_for_redis_is_there() -> None:
    content = bytes(range(256)) * 8 * (files.PART_BYTES // 256)
    with RedisServer() as server:
        remote = RedisStore(server.url, namespace="n", replica="r")
        store = SharedStore(MemoryStore(), remote, max_dirty_bytes=files.PART_BYTES)
        async with store.running():
            there = Files(store)
            file = await there.add(TENANT, "a", "batch", content)
            assert b"".join([part async for part in there.content(TENANT, file)]) == content
            assert store.stats().num_bytes < files.PART_BYTES, "it has pushed nobody's records out of memory"


async def test_a_batch_that_could_not_be_written_down_takes_nobodys_place() -> None:
    store = MemoryStore()
    connection = StoreConnection(store)
    process = Process(connection, right)
    file = await process.files.add(TENANT, "in", "batch", b"")
    connection.is_cut = True
    for _ in range(run.MAX_AT_WORK):
        batch = Batch(
            id=new_batch_id(),
            endpoint="/v1/completions",
            created_at=int(time.time()),
            input_file_id=file.id,
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
        )
        with pytest.raises(StoreUnavailable):
            await process.batches.create(TENANT, batch)
    connection.is_cut = False
    async with asyncio.timeout(10):
        assert (await ended(store, await started(process))).status == "completed"

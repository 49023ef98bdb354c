"""Journals as recordings write them to Redis, parts of which it may lose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.gateway.sessions.recordings.journal import change_of, header_of, rebuild
from penstock.gateway.sessions.recordings.kinds import writers_of
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.recordings.registry import Recordings
from penstock.gateway.store.interface import JournalChange, JournalOutcome
from tests.gateway.harness import Gateway, make_tokenizer
from tests.gateway.sessions.recordings.fakes import bring, make_recording, make_request
from tests.gateway.store.stores import redis_store
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("closing")]


@pytest.mark.parametrize("section", ["journal", "tokens"])
async def test_a_journal_that_redis_evicted_a_part_of_is_written_anew(
    section: str, server: RedisServer
) -> None:
    store = redis_store(server)
    gateway = Gateway(store=store)
    recordings = gateway.service.recordings
    recordings._enter(recording := make_recording())
    bring(recording, "a")
    await recordings._write_down()
    server.call("DEL", f"penstock:{{test}}:{section}:{recording.id}")
    bring(recording, "b")
    await recordings._write_down()
    bring(recording, "c")
    await recordings._write_down()
    journal = await store.read_journal(recording.id)
    assert journal is not None
    assert journal.token_ids == (9, 9, 9)


async def test_a_reply_that_another_server_took_over_is_no_longer_written_down(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway(store=redis_store(server))
    recordings = gateway.service.recordings
    recordings._enter(recording := make_recording())
    await recordings._write_down()
    assert list(await redis_store(server).claim()) == [recording.id]
    await assert_no_longer_written(recordings, recording, caplog)


async def assert_no_longer_written(
    recordings: Recordings, recording: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes is not written down, which the log says once."""
    for text in ("a", "b"):
        bring(recording, text)
        await recordings._write_down()
    assert not recording.journalled
    (line,) = caplog.records
    assert recording.id in line.getMessage()


def change(id_: str, tenant: str = "t", *, ended: bool = False, num_bytes: int = 1000) -> JournalChange:
    header = random.Random(id_).randbytes(num_bytes)
    return JournalChange(id_, header, 0, (1,), 300.0 if ended else 3600.0, b"end" if ended else None, tenant)


async def test_journals_count_in_their_tenants_share(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.store.redis.MAX_TENANT_BYTES", 5000)
    store = redis_store(server)
    assert await store.write_journals([change(name, ended=True) for name in "abc"]) == ["written"] * 3
    assert await store.write_journals([change("other's", "u")]) == ["written"]
    # Those that have ended make room, the oldest first.
    assert await store.write_journals([change("d"), change("e")]) == ["written"] * 2
    kept = [journal.stream_id for journal in await store.read_journals(["a", "b", "c", "d", "e", "other's"])]
    assert kept == ["c", "d", "e", "other's"]
    assert await store.write_journals([change("f")]) == ["written"]
    # Those that run do not: a new one is not begun, and leaves nothing behind.
    assert await store.write_journals([change("g")]) == ["full"]
    assert [one.stream_id for one in await store.read_journals(["c", "d", "e", "f", "g"])] == ["d", "e", "f"]
    assert set(await store.claim()) == {"d", "e", "f", "other's"}
    # Those that are there go on, and what is deleted makes room.
    assert await store.write_journals([JournalChange("d", None, 1, (2, 3), 3600.0, None, "t")]) == ["written"]
    await store.delete_journals(["e", "unknown"])
    assert await store.write_journals([change("g")]) == ["written"]
    await store.delete_journals(["d", "f", "g", "other's"])
    assert server.call("KEYS", "*journal_*") == []


async def test_a_reply_for_which_there_is_no_room_runs_without_a_journal(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.gateway.store.redis.MAX_TENANT_BYTES", 10)
    recordings = Gateway(store=redis_store(server)).service.recordings
    recordings._enter(recording := make_recording())
    await assert_no_longer_written(recordings, recording, caplog)


async def test_a_long_prompt_takes_a_few_bytes_a_token_and_comes_back(server: RedisServer) -> None:
    tokens = tuple(random.Random(1).randrange(150_000) for _ in range(20_000))
    recording = make_recording(replace(make_request(), prompt_token_ids=tokens))
    assert len(header_of(recording)) < 6 * len(tokens)
    await redis_store(server).write_journals([await change_of(recording, None, 60, 60)])
    journal = await redis_store(server).read_journal(recording.id)
    assert journal is not None
    assert (
        rebuild(journal, 0.0, writers_of(make_tokenizer()), lambda *_: []).request.prompt_token_ids == tokens
    )


async def test_long_prompts_are_written_in_calls_of_a_megabyte(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = redis_store(server)
    recordings, calls, write = Gateway(store=store).service.recordings, list[int](), store.write_journals

    async def counted(changes: Sequence[JournalChange]) -> Sequence[JournalOutcome]:
        calls.append(len(changes))
        return await write(changes)

    monkeypatch.setattr(store, "write_journals", counted)
    for number in range(4):
        request = replace(make_request(f"chatcmpl-{number}"), prompt_token_ids=(7,) * 60_000)
        recordings._enter(make_recording(request))
    for number in range(4, 9):
        recordings._enter(make_recording(make_request(f"chatcmpl-{number}")))
    await recordings._write_down()
    assert calls == [2, 7]

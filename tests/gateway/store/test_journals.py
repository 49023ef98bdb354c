"""Journals as recordings write them to Redis, parts of which it may lose."""

from __future__ import annotations

import pytest

from tests.gateway.harness import Gateway
from tests.gateway.sessions.recordings.fakes import bring, make_recording
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
    for text in ("a", "b"):
        bring(recording, text)
        await recordings._write_down()
    assert not recording.journalled
    (line,) = caplog.records
    assert recording.id in line.getMessage()

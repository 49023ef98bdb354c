"""A replica whose process is stopped in the midst of a stream: its port takes connections, and nobody answers."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from loadtests.passing import fake_replica
from penstock.cluster import members, switch
from penstock.cluster.relay import last_words
from penstock.priority.routing.router import STALE_S
from tests.cluster.test_switch import CHAT, IDENTITY, cluster, until
from tests.gateway.harness import chat_body

pytestmark = pytest.mark.anyio

MANY_EVENTS = 1_000_000
NAME = "fake"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_nothing_new_goes_to_a_frozen_replica_and_its_streams_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "SILENT_S", 3 * STALE_S)
    monkeypatch.setattr(switch, "LOST_S", 0.1)
    with fake_replica(MANY_EVENTS, IDENTITY) as (address, pid):
        async with cluster() as found:
            known = found.switch.members.live

            async def is_chosen() -> bool:
                reply = await found.http.post(f"/choose{CHAT}", json=chat_body())
                assert reply.status_code == 200 or reply.json()["error"]["code"] == "no_replica"
                return reply.status_code == 200

            await found.switch.members.set([address])
            await until(lambda: NAME in known)
            async with found.http.stream("POST", CHAT, json=chat_body(stream=True)) as reply:
                pieces = reply.aiter_raw()
                text = await anext(pieces)
                os.kill(pid, signal.SIGSTOP)
                try:
                    # While it runs, a busy machine is not to look like this.
                    with monkeypatch.context() as usual:
                        usual.setattr(found.switch.router, "_stale_s", STALE_S)
                        while await is_chosen():
                            await asyncio.sleep(0.05)
                    assert NAME in known  # It is suspect before its stream of state is given up.
                    text += b"".join([piece async for piece in pieces])
                    assert NAME not in known
                finally:
                    os.kill(pid, signal.SIGCONT)
            assert text.startswith(b"id: 0\n")
            assert text.endswith(last_words(CHAT))
            await until(lambda: NAME in known)
            assert await is_chosen()

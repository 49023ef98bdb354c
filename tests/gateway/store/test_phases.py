"""Redis in one trouble after the other, and no request that fails: chats, conversations, background responses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import httpx
import pytest

from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.redis import RedisStore
from penstock.gateway.store.shared import SharedStore
from tests.gateway.harness import MODEL, Gateway, chat_body, serving
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("real_waits")]

Step = Callable[[RedisServer], object]


def _nothing(_: RedisServer) -> None: ...


def _set(name: str, value: str) -> Step:
    return lambda server: server.call("CONFIG", "SET", name, value)


PHASES: dict[str, tuple[Step, Step]] = {
    "well": (_nothing, _nothing),
    "stopped": (RedisServer.stop, RedisServer.start),
    "killed": (RedisServer.kill, RedisServer.start),
    "paused": (RedisServer.pause, RedisServer.resume),
    "slow": (lambda server: server.call("CLIENT", "PAUSE", 300), _nothing),
    "read-only": (
        lambda server: server.call("REPLICAOF", "127.0.0.1", 1),
        lambda server: server.call("REPLICAOF", "NO", "ONE"),
    ),
    "out of memory": (_set("maxmemory", "1"), _set("maxmemory", "0")),
    "wrong password": (_set("requirepass", "changed"), RedisServer.restart),
    "emptied": (lambda server: server.call("FLUSHALL"), _nothing),
}


class StoreReader:
    """Asks for everything that is kept somewhere; each answer must be the right one."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.conversation = ""
        self.kept: list[str] = []
        """Responses of all phases before."""

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> dict[str, object]:
        reply = await self.http.request(method, path, json=body, headers=headers)
        assert reply.status_code == 200, (path, reply.text)
        found: dict[str, object] = reply.json()
        return found

    async def visit(self, phase: str) -> None:
        if not self.conversation:
            self.conversation = str((await self.ask("POST", "/v1/conversations", {}))["id"])
        keyed = {"idempotency-key": phase}
        chats = [await self.ask("POST", "/v1/chat/completions", chat_body(phase), **keyed) for _ in range(2)]
        assert chats[0] == chats[1]
        turn = {"model": MODEL, "input": phase, "conversation": self.conversation}
        assert (await self.ask("POST", "/v1/responses", turn))["status"] == "completed"
        asked = {"model": MODEL, "input": phase, "background": True}
        if self.kept:
            asked["previous_response_id"] = self.kept[-1]
        begun = str((await self.ask("POST", "/v1/responses", asked))["id"])
        async with asyncio.timeout(20):
            while (await self.ask("GET", f"/v1/responses/{begun}"))["status"] != "completed":
                await asyncio.sleep(0)
        self.kept.append(begun)
        for response_id in self.kept:
            assert (await self.ask("GET", f"/v1/responses/{response_id}"))["status"] == "completed"
        items = await self.ask("GET", f"/v1/conversations/{self.conversation}/items?limit=100")
        assert len(items["data"]) == 2 * len(self.kept)  # type: ignore[arg-type]


async def answer_all(gateway: Gateway) -> None:
    while True:
        with contextlib.suppress(TimeoutError):  # nobody asked for a while
            gateway.answer(await gateway.taken(), "a", "b")


async def test_no_request_fails_whatever_becomes_of_redis(server: RedisServer) -> None:
    remote = RedisStore(server.url, namespace="test", replica="a")
    gateway = Gateway(store=SharedStore(MemoryStore(), remote), clock=time.monotonic)
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
        answering = asyncio.create_task(answer_all(gateway))
        reader = StoreReader(http)
        for phase, (begin, end) in PHASES.items():
            await asyncio.to_thread(begin, server)
            await reader.visit(f"{phase}, meanwhile")
            await asyncio.to_thread(end, server)
            await reader.visit(f"{phase}, afterwards")
        answering.cancel()
    assert remote.stats().failures

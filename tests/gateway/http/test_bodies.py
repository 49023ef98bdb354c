"""Bodies in flight have one bound together, and none is read of a client whose key is not known."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from penstock.gateway.access.keys import Client as ApiClient
from penstock.gateway.access.keys import digest_of
from penstock.gateway.endpoints.intake import Intake
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Tenant
from tests.gateway.harness import MODEL, Gateway, chat_body, settled

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
WITH_BODY = [
    (path, method)
    for path, operations in OPERATIONS.items()
    for method, operation in operations.items()
    if operation.body is not None or operation.is_form
]


class Client:
    """One request to an app, whose body comes when the test says so."""

    def __init__(self, app: Any, path: str, method: str = "POST", key: str = "") -> None:
        self.status = 0
        self.body = b""
        self.num_read = 0
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        headers = [(b"host", b"x"), (b"content-type", b"application/json")]
        headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {
            **{"type": "http", "method": method, "path": path, "raw_path": path.encode()},
            **{"query_string": b"", "headers": headers, "scheme": "http", "server": ("x", 80)},
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def send(self, part: bytes, *, more: bool = False) -> None:
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": more})

    def hang_up(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})

    async def _receive(self) -> Message:
        self.num_read += 1
        return await self._parts.get()

    async def _send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


@pytest.mark.parametrize(("path", "method"), WITH_BODY)
async def test_the_key_comes_before_the_body(path: str, method: str) -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients={digest_of("ann"): Tenant(name="ann")}))
    client = Client(gateway.app, re.sub(r"{\w+}", "an_id", path), method, key="nobodys")
    async with asyncio.timeout(10):
        await client.task
    assert (client.status, client.num_read) == (401, 0)


async def test_a_body_that_is_one_too_many_is_refused_and_may_come_again() -> None:
    body = json.dumps(chat_body()).encode()
    limits = Limits(max_bodies_bytes=2 * len(body))
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=limits))
    arriving, whole = Client(gateway.app, CHAT), Client(gateway.app, CHAT)
    arriving.send(body, more=True)
    whole.send(body)
    await settled()
    refused = Client(gateway.app, CHAT)
    refused.send(body)
    await refused.task
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (503, "too_many_bodies")
    gateway.answer(await gateway.taken(), "Hi")
    await whole.task
    assert whole.status == 200
    again = Client(gateway.app, CHAT)
    again.send(body)
    gateway.answer(await gateway.taken(), "Hi")
    await again.task
    assert again.status == 200
    arriving.send(b" ")
    gateway.answer(await gateway.taken(), "Hi")
    await arriving.task
    assert arriving.status == 200


async def test_a_stream_that_has_begun_holds_no_room() -> None:
    body = json.dumps(chat_body(stream=True)).encode()
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_bodies_bytes=len(body))))
    clients = []
    for _ in range(3):
        clients.append(client := Client(gateway.app, CHAT))
        client.send(body)
        request = await gateway.taken()
        gateway.bring(request, "H")
        await settled()
        gateway.finish(request)
    for client in clients:
        await client.task
        assert b"[DONE]" in client.body


async def test_room_is_made_once_for_each() -> None:
    """However many came and went, as much fits as at first, and no more."""
    body = json.dumps(chat_body()).encode()
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_bodies_bytes=2 * len(body) - 1)))
    for _ in range(3):
        client = Client(gateway.app, CHAT)
        client.send(body)
        gateway.answer(await gateway.taken(), "Hi")
        await client.task
    arriving, refused = Client(gateway.app, CHAT), Client(gateway.app, CHAT)
    arriving.send(body, more=True)
    await settled()
    refused.send(body)
    await refused.task
    assert (client.status, refused.status) == (200, 503)
    arriving.hang_up()
    await arriving.task


async def test_one_that_leaves_in_the_middle_of_its_body_makes_room() -> None:
    body = json.dumps(chat_body()).encode()
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_bodies_bytes=len(body))))
    leaving = Client(gateway.app, CHAT)
    leaving.send(body, more=True)
    leaving.hang_up()
    await leaving.task
    client = Client(gateway.app, CHAT)
    client.send(body)
    gateway.answer(await gateway.taken(), "Hi")
    await client.task
    assert client.status == 200


async def test_the_body_is_not_kept_for_as_long_as_its_answer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may take an hour; what it was made of has been read by then."""
    gateway, find, seen = Gateway(), Intake.client, list[Request]()

    def client_of(intake: Intake, http: Request) -> ApiClient:
        seen.append(http)
        return find(intake, http)

    monkeypatch.setattr(Intake, "client", client_of)
    client = Client(gateway.app, CHAT)
    client.send(json.dumps(chat_body()).encode())
    request = await gateway.taken()
    assert [hasattr(http, "_body") for http in seen] == [False]
    gateway.answer(request, "Hi")
    await client.task

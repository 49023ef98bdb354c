"""What a switch does with each operation is said in the gateway's table of operations, and read from there."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Any

import httpx
import pytest

from penstock.cluster.members import Member
from penstock.cluster.relay import last_words
from penstock.cluster.switch import Switch, SwitchOptions
from penstock.cluster.upstream import Address
from penstock.gateway.endpoints.operation import (
    JSON,
    FollowQuery,
    IdempotencyHeaders,
    Operation,
    Passing,
)
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.sessions.owners import tag_of
from penstock.gateway.sessions.responses.schemas import StreamQuery
from penstock.gateway.wire.frames import DONE
from penstock.gateway.wire.prompts import Prompts
from penstock.priority.routing.router import Router
from tests.cluster.scripted_replicas import PATIENCE_S, Call, Script, replica, serving
from tests.cluster.test_switch import READ
from tests.gateway.harness import make_tokenizer
from tests.priority.routing.messages import snapshot

pytestmark = pytest.mark.anyio

NAMES = ("r0", "r1")
ALL = [(path, method) for path, operations in OPERATIONS.items() for method in operations]
NAMED_ALIKE = (
    *("/v1/models/{name}", "/v2/models/{name}", "/v2/models/{name}/ready", "/static/{path}"),
    "/internal/kv/{digest}/{keys}",
)
"""Paths whose parameter names what every replica has: only these may be without an owner."""
ONCE_OR_PROMPT = Passing.ONCE | Passing.BY_PROMPT
RECORDED = [
    (path, f"{prefix}{tag_of('r0')}{'0' * num_chars}")
    for path, prefix, num_chars in [
        ("/v1/chat/completions", "chatcmpl-", 24),
        ("/v1/completions", "cmpl-", 24),
        ("/v1/responses", "resp_", 40),
        ("/v1/messages", "msg_", 24),
        ("/api/chat", "reply_", 24),
        ("/api/generate", "reply_", 24),
    ]
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def switched(
    script: Script, gone: Sequence[str] = (), draining: Sequence[str] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a switch before two replicas that follow the script, which tells them apart by `Call.name`.

    Args:
        gone: those that nobody listens for any more.
        draining: those that take nothing new in.
    """
    options = SwitchOptions(secret="a secret", identity="demo", block_size=16)
    switch = Switch(options, Prompts(make_tokenizer()), Router(stale_s=PATIENCE_S))
    async with contextlib.AsyncExitStack() as stack:
        for name in NAMES:
            address = await stack.enter_async_context(replica(script, name=name))
            address = Address("127.0.0.1", 1) if name in gone else address
            switch.router.on_snapshot(snapshot(name), monotonic())
            switch.members.live[name] = Member(name, tag_of(name), address, is_draining=name in draining)
        address = await stack.enter_async_context(serving(switch.app()))
        http = httpx.AsyncClient(base_url=str(address), timeout=PATIENCE_S)
        yield await stack.enter_async_context(http)


def of(path: str, method: str) -> Passing:
    return OPERATIONS[path][method].passing


def event(kind: str, id: str, number: int) -> bytes:
    if kind == "/v1/responses":
        data = f'{{"type":"x","response":{{"id":"{id}"}},"sequence_number":{number}}}'
        return f"event: x\ndata: {data}\n\n".encode()
    if kind.startswith("/api/"):
        return f'{{"id":"{id}","sequence_number":{number}}}\n'.encode()
    return f'id: {number}\ndata: {{"id":"{id}"}}\n\n'.encode()


# The table


def test_an_operation_cannot_be_added_without_saying_who_gets_it() -> None:
    with pytest.raises(TypeError, match="passing"):
        Operation(summary="New")  # type: ignore[call-arg]


@pytest.mark.parametrize(("path", "method"), ALL)
def test_what_is_said_of_an_operation_fits_its_path_and_its_types(path: str, method: str) -> None:
    operation, passing = OPERATIONS[path][method], of(path, method)
    assert (Passing.BY_ID in passing) == ("{" in path and path not in NAMED_ALIKE)
    may_be_recorded = operation.headers is IdempotencyHeaders
    is_followed = operation.query in (FollowQuery, StreamQuery)
    assert (Passing.RECORDED in passing) == (may_be_recorded or is_followed)
    if may_be_recorded:
        assert Passing.RECORDED | Passing.BY_ID in of(f"{path}/{{id}}", "GET")
    # Admission answers these statuses.
    assert (Passing.BY_PROMPT in passing) == ({403, 429} <= operation.refusals)
    assert Passing.ONCE in passing or not operation.is_form
    if Passing.BY_PROMPT in passing and operation.answers != (JSON,):
        assert last_words(path)


def test_every_kind_of_recorded_reply_is_tried_below() -> None:
    assert {path for path, _ in RECORDED} == {
        path for path, method in ALL if Passing.BY_PROMPT | Passing.RECORDED in of(path, method)
    }


def test_every_prompt_is_read() -> None:
    assert {path for path, _ in READ} == {
        path for path, method in ALL if Passing.BY_PROMPT in of(path, method)
    }


# What comes of it


@pytest.mark.parametrize(("path", "method"), [one for one in ALL if Passing.BY_ID in of(*one)])
async def test_what_a_path_names_is_asked_of_its_owner_first(path: str, method: str) -> None:
    asked: list[str] = []

    async def script(call: Call) -> None:
        asked.append(call.name)
        call.reply(200, "application/json")
        call.end(b"{}")

    async with switched(script) as http:
        for name in (*NAMES, *NAMES[:1]):
            found = path.replace("{id}", "{some_id}", 1)
            await http.request(method, re.sub(r"{\w+}", f"x_{tag_of(name)}00", found))
    assert asked == ["r0", "r1", "r0"]


async def test_what_a_replica_has_is_found_while_it_drains() -> None:
    async def script(call: Call) -> None:
        call.reply(404 if call.name == "r0" else 200, "application/json")
        call.end(b"{}")

    async with switched(script, draining=["r1"]) as http:
        found = await http.get("/v1/files/file-without-a-tag")
    assert (found.status_code, found.headers["x-penstock-replica"]) == (200, "r1")


@pytest.mark.parametrize(("path", "method"), [one for one in ALL if Passing.OWN in of(*one)])
async def test_what_tells_of_one_process_is_not_passed_on(path: str, method: str) -> None:
    async def script(call: Call) -> None:
        raise AssertionError(call.target)

    async with switched(script) as http:
        reply = await http.request(method, path, headers={"x-penstock-secret": "a secret"})
        chosen = await http.request(method, f"/choose{path}")
    assert "x-penstock-replica" not in reply.headers
    assert chosen.status_code == 404


@pytest.mark.parametrize(("path", "id"), RECORDED)
async def test_a_recorded_stream_goes_on_when_its_replica_dies(path: str, id: str) -> None:
    async def script(call: Call) -> None:
        if call.target.startswith(f"{path}/{id}?stream=true&starting_after=") and call.name == "r1":
            call.reply()
            call.end(event(path, id, int(call.target.rpartition("=")[2]) + 1), DONE)
            return
        if call.target == path or call.target == f"{path}/{id}?stream=true":
            call.reply()
            call.send(event(path, id, 0))
        await call.cut()

    body: dict[str, Any] = {"model": "demo", "stream": True, "stream_options": {"resumable": True}}
    expected = event(path, id, 0) + event(path, id, 1) + DONE
    async with switched(script) as http:
        for reply in (await http.post(path, json=body), await http.get(f"{path}/{id}?stream=true")):
            assert reply.content == expected


async def asked_of(
    path: str, method: str, body: dict[str, Any] | None = None, *, gone: Sequence[str] = (), key: str = ""
) -> tuple[list[str], httpx.Response]:
    """The replicas that are asked, where each dies when it has the request, and the reply."""
    asked: list[str] = []

    async def script(call: Call) -> None:
        asked.append(call.name)
        await call.cut()

    target = re.sub(r"{\w+}", f"x_{tag_of('r1')}00", path)
    async with switched(script, gone) as http:
        return asked, await http.request(
            method, target, json=body, headers={"idempotency-key": key} if key else {}
        )


@pytest.mark.parametrize(("path", "method"), [one for one in ALL if Passing.OWN not in of(*one)])
async def test_what_makes_something_that_stays_is_not_sent_again(path: str, method: str) -> None:
    asked, reply = await asked_of(path, method)
    once = Passing.ONCE in of(path, method)
    assert len(asked) == (1 if once else 2)
    assert reply.status_code == (502 if once else 529 if path.startswith("/v1/messages") else 503)
    assert ("retry-after" in reply.headers) != once
    assert "was lost" in reply.text


@pytest.mark.parametrize(("path", "method"), [one for one in ALL if Passing.ONCE in of(*one)])
async def test_it_is_sent_to_another_where_nobody_listens(path: str, method: str) -> None:
    asked, _ = await asked_of(path, method, gone=["r1"])
    assert asked == ["r0"]


async def test_an_upload_is_passed_on_as_it_comes_and_is_not_sent_twice() -> None:
    asked: list[str] = []
    arrived = asyncio.Event()

    async def script(call: Call) -> None:
        asked.append(call.name)
        await call.reader.readuntil(b"first")
        arrived.set()
        await call.reader.readuntil(b"last")
        call.refuse(503)

    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)
        yield b"last"

    async with switched(script) as http:
        reply = await http.post("/v1/files", content=parts())
    assert (reply.status_code, reply.json()["error"]["code"], len(asked)) == (503, "mine", 1)


def test_whatever_makes_something_says_that_it_does() -> None:
    """A POST that is not said to be done once computes an answer, or does the same when it is done twice."""
    repeated = {path for path, method in ALL if method == "POST" and not of(path, method) & ONCE_OR_PROMPT}
    assert repeated == {
        *(
            "/v1/batches/{batch_id}/cancel",
            "/v1/messages/batches/{message_batch_id}/cancel",
            "/v1/responses/{id}/cancel",
            "/v1/conversations/{conversation_id}",
            "/v1/chat/completions/{id}",
        ),
        *(
            "/tokenize",
            "/detokenize",
            "/v1/messages/count_tokens",
            "/v1/responses/input_tokens",
            "/v1/completions/render",
            "/v1/chat/completions/render",
            "/v1/prefixes/locate",
            "/api/show",
            "/api/pull",
            "/api/create",
            "/api/copy",
            "/apply-template",
            "/internal/prefill",
            "/internal/pull",
        ),
    }


@pytest.mark.parametrize(
    ("conversation", "key", "num_asked"), [("conv_1", "", 1), ("conv_1", "k", 2), (None, "", 2)]
)
async def test_a_turn_is_not_in_a_conversation_twice(
    conversation: str | None, key: str, num_asked: int
) -> None:
    body = {"model": "demo", "input": "Hi", "conversation": conversation}
    asked, _ = await asked_of("/v1/responses", "POST", body, key=key)
    assert len(asked) == num_asked


@pytest.mark.parametrize(
    ("path", "fields", "key", "num_asked"),
    [
        ("/v1/responses", {"background": True}, "", 1),
        ("/v1/responses", {"background": True}, "k", 2),
        ("/v1/responses", {"store": True}, "", 2),
        ("/v1/chat/completions", {"store": True}, "", 1),
        ("/v1/chat/completions", {"store": True}, "k", 2),
        ("/v1/chat/completions", {"store": False}, "", 2),
    ],
)
async def test_what_another_process_takes_over_is_not_run_twice(
    path: str, fields: dict[str, object], key: str, num_asked: int
) -> None:
    body = {"model": "demo", "input": "Hi", "messages": [{"role": "user", "content": "Hi"}], **fields}
    asked, _ = await asked_of(path, "POST", body, key=key)
    assert len(asked) == num_asked

"""One path for all requests to the model: what is refused, recorded and remembered on it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.engine.planning.grammar import Grammar
from penstock.gateway.access.keys import Client
from penstock.gateway.endpoints import guidance
from penstock.gateway.http.connections import Connection
from penstock.gateway.http.errors import ApiError
from penstock.gateway.store.interface import Quota
from penstock.gateway.wire.streams import Stream
from penstock.priority.lanes import Tenant
from tests.gateway.endpoints.test_counted import LONG, HeldTokenizer, gateway_of, post
from tests.gateway.endpoints.test_tools import TOOL
from tests.gateway.endpoints.test_tools import gateway as gateway_with_tools
from tests.gateway.harness import MODEL, Gateway, chat_body, client

pytestmark = pytest.mark.anyio

RESPONSES = "/v1/responses"
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}


async def test_a_response_that_may_not_wait_to_be_tokenized_may_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.gateway.endpoints.intake._PROMPT_BYTES", 1)
    tokenizer = HeldTokenizer()
    gateway = gateway_of(Quota(), tokenizer)
    gateway.engine.max_sequence_tokens = 10_000
    async with client(gateway.app) as http:
        held = asyncio.create_task(
            post(http, "/v1/completions", {"model": MODEL, "prompt": "held" + LONG, "max_tokens": 1})
        )
        assert await asyncio.to_thread(tokenizer.holds.wait, 30)
        refused = await post(http, RESPONSES, {"model": MODEL, "input": LONG})
        tokenizer.go_on.set()
        gateway.answer(await gateway.taken(), "x")
        assert (await held).status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_much_to_tokenize")
    assert "retry-after" in refused.headers


async def test_a_reservation_ends_where_nothing_is_let_in_any_more() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        request = await gateway.taken()
        gateway.answer(request, "x")
        await asking
    reservation = await gateway.service.quotas.reserve(
        Client(Tenant(name="ann"), Quota(max_streams=1)), 1, 1, "lease"
    )
    stream = Stream([request], reservation)
    stream.connection = Connection({"penstock.server_send": _send}, _send, gateway.clock, lambda: None)
    gateway.service.dispatch.draining = True
    with pytest.raises(ApiError, match="shutting down"):
        gateway.service.dispatch.submit(stream)
    assert reservation.ended
    assert len(gateway.service.dispatch) == 0


async def _send(_: Any) -> None:
    raise AssertionError("nothing is sent")


@pytest.mark.parametrize(
    "field",
    [
        {"use_beam_search": True, "best_of": 2},
        {"best_of": 2},
        {"prompt_logprobs": 1},
        {"return_token_ids": True},
    ],
)
async def test_a_response_has_no_more_than_recordings_have(field: dict[str, Any]) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post(RESPONSES, json={"model": MODEL, "input": "Hi", **field})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(field))


class Written:
    """Notes in which thread each grammar of a service is written."""

    def __init__(self, gateway: Gateway) -> None:
        self.on_loop: list[bool] = []
        formats = gateway.service.formats
        write, loop = formats.grammar, threading.get_ident()

        def noted(*args: Any) -> Grammar | None:
            self.on_loop.append(threading.get_ident() == loop)
            return write(*args)

        formats.grammar = noted  # type: ignore[method-assign]


async def answered(gateway: Gateway, http: Any, *tools: Any) -> Grammar | None:
    """Returns the grammar of an answer to a chat with these tools."""
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(tools=list(tools))))
    request = await gateway.taken()
    gateway.answer(request, "x")
    assert (await asking).status_code == 200
    return request.sampling.grammar


async def test_the_grammar_of_the_same_tools_is_written_once_and_off_the_loop() -> None:
    gateway = gateway_with_tools()
    written = Written(gateway)
    async with client(gateway.app) as http:
        first = await answered(gateway, http, STRICT)
        assert first is not None
        assert await answered(gateway, http, STRICT) == first
        assert written.on_loop == [False]
        other = {"type": "function", "function": {**STRICT["function"], "name": "other"}}
        assert await answered(gateway, http, STRICT, other) != first
        assert written.on_loop == [False, False]


async def test_no_more_grammars_are_remembered_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guidance, "_REMEMBERED_CHARS", 1)
    gateway = gateway_with_tools()
    written = Written(gateway)
    async with client(gateway.app) as http:
        for _ in range(2):
            await answered(gateway, http, STRICT)
    assert len(written.on_loop) == 2

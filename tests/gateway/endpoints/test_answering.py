"""One path for all requests to the model: what is refused, recorded and remembered on it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.engine.text.grammar import Grammar
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.errors import ApiError
from penstock.gateway.http.connections import Connection
from penstock.gateway.reply.generation import Live
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.gateway.wire.embeddings import ScoreWriter
from penstock.priority.lanes import Lane, Tenant
from tests.gateway.endpoints.test_counted import LONG, HeldTokenizer, gateway_of, post
from tests.gateway.endpoints.test_tools import TOOL
from tests.gateway.endpoints.test_tools import gateway as gateway_with_tools
from tests.gateway.harness import MODEL, Gateway, chat_body, client

pytestmark = pytest.mark.anyio

RESPONSES = "/v1/responses"


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
    stream = Live([request], reservation, ScoreWriter("score", 0, MODEL, 1))
    stream.connection = Connection({}, _send, gateway.clock, lambda: None)
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
    async with client(Gateway().app) as http, asyncio.timeout(10):
        reply = await http.post(RESPONSES, json={"model": MODEL, "input": "Hi", **field})
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (next(iter(field)), "unsupported_parameter")


async def test_the_grammar_of_tools_is_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, threads = gateway_with_tools(), list[int]()
    write = gateway.service.formats.grammar

    def noted(*args: Any) -> Grammar | None:
        threads.append(threading.get_ident())
        return write(*args)

    monkeypatch.setattr(gateway.service.formats, "grammar", noted)
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(tools=[strict])))
        request = await gateway.taken()
        gateway.answer(request, "x")
        assert (await asking).status_code == 200
    assert request.sampling.grammar is not None
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_the_tokens_of_a_prompt_are_counted_whatever_lane_it_names() -> None:
    clients = {digest_of("ann"): Client(Tenant(name="ann", top_lane=Lane.BATCH))}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=clients))
    body = chat_body(service_tier="priority")
    async with client(gateway.app) as http:
        assert (await post(http, "/v1/chat/completions/render", body)).status_code == 200
        refused = await post(http, "/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "service_tier_not_allowed")

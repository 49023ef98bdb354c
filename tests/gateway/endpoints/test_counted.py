"""What is answered with the tokenizer alone keeps to its tenant's quota, and stands in no prompt's way."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest

from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.access.quotas import QuotaReservation
from penstock.gateway.endpoints.operation import Operation, Passing
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.priority.lanes import Tenant
from tests.gateway.harness import MODEL, TEMPLATE, Gateway, chat_body, client, settled, tokenizer_json

pytestmark = pytest.mark.anyio

LONG = "All work and no play. " * 100
MESSAGES: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COUNTED: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [9]},
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/prefixes/locate": {"tokens": [9]},
    "/v1/completions/render": {"model": MODEL, "prompt": "Hi"},
    "/v1/chat/completions/render": MESSAGES,
}


LOOKED_UP = [
    (path, operations["GET"])
    for path, operations in OPERATIONS.items()
    if "GET" in operations and operations["GET"].is_lookup
]


class HeldTokenizer(Tokenizer):
    """Holds on to texts of `held` until `go_on` is set."""

    def __init__(self) -> None:
        config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
        super().__init__(tokenizer_json(), config, TEMPLATE)
        self.go_on, self.holds = threading.Event(), threading.Event()

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        if text.startswith("held"):
            self.holds.set()
            assert self.go_on.wait(30)
        return super().encode(text, parse_special=parse_special, add_special=add_special)


def gateway_of(quota: Quota, tokenizer: Tokenizer | None = None) -> Gateway:
    clients = {
        digest_of("ann"): Client(Tenant(name="ann"), quota),
        digest_of("bob"): Client(Tenant(name="bob")),
    }
    return Gateway(ServiceOptions(models=(MODEL,), clients=clients), tokenizer=tokenizer)


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any], key: str = "ann") -> httpx.Response:
    return await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("path", COUNTED)
async def test_it_counts_as_a_request(path: str) -> None:
    gateway = gateway_of(Quota(requests_per_minute=2, tokens_per_minute=100))
    async with client(gateway.app) as http:
        for left in ("1", "0"):
            reply = await post(http, path, COUNTED[path])
            assert (reply.status_code, reply.headers["x-ratelimit-remaining-requests"]) == (200, left)
        refused = await post(http, path, COUNTED[path])
        others = await post(http, path, COUNTED[path], "bob")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1
    assert others.status_code == 200
    assert gateway.engine.cancelled == []


@pytest.mark.parametrize("path", COUNTED)
async def test_it_costs_no_tokens(path: str) -> None:
    gateway = gateway_of(Quota(requests_per_minute=100, tokens_per_minute=10))
    async with client(gateway.app) as http:
        for _ in range(20):
            assert (await post(http, path, COUNTED[path])).status_code == 200


@contextlib.asynccontextmanager
async def holding(
    tokenizer: HeldTokenizer, asking: list[asyncio.Task[httpx.Response]]
) -> AsyncIterator[None]:
    """While the tokenizer works for these."""
    assert await asyncio.to_thread(tokenizer.holds.wait, 30)
    try:
        yield
    finally:
        tokenizer.go_on.set()
        assert [reply.status_code for reply in await asyncio.gather(*asking)] == [200] * len(asking)


async def test_prompts_are_not_behind_what_is_counted() -> None:
    tokenizer = HeldTokenizer()
    gateway = gateway_of(Quota(), tokenizer)
    gateway.engine.max_sequence_tokens = 10_000
    async with client(gateway.app) as http:
        counts = [asyncio.create_task(post(http, "/tokenize", {"prompt": f"held {LONG}"})) for _ in range(20)]
        async with holding(tokenizer, counts):
            asking = asyncio.create_task(post(http, "/v1/chat/completions", chat_body(LONG)))
            gateway.answer(await gateway.taken(), "Hello.")
            assert (await asking).status_code == 200


async def test_one_at_work_is_a_stream() -> None:
    tokenizer = HeldTokenizer()
    gateway = gateway_of(Quota(max_streams=1), tokenizer)
    gateway.engine.max_sequence_tokens = 10_000
    async with client(gateway.app) as http:
        counting = asyncio.create_task(post(http, "/tokenize", {"prompt": f"held {LONG}"}))
        async with holding(tokenizer, [counting]):
            assert (await post(http, "/tokenize", {"prompt": "Hi"})).status_code == 429
            assert (await post(http, "/tokenize", {"prompt": "Hi"}, "bob")).status_code == 200


async def test_what_may_not_wait_to_be_tokenized_is_counted_as_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.gateway.endpoints.intake._COUNTED_BYTES", 1)
    tokenizer = HeldTokenizer()
    gateway = gateway_of(Quota(requests_per_minute=3), tokenizer)
    async with client(gateway.app) as http:
        held = asyncio.ensure_future(post(http, "/tokenize", {"prompt": "held" + LONG}))
        assert await asyncio.to_thread(tokenizer.holds.wait, 30)
        refused = await post(http, "/tokenize", {"prompt": LONG})
        tokenizer.go_on.set()
        assert (await held).status_code == 200
        await post(http, "/tokenize", {"prompt": "Hi"})
        limited = await post(http, "/tokenize", {"prompt": "Hi"})
    assert (refused.status_code, limited.status_code) == (429, 429)
    refused_for = partial(gateway.service.metrics.admissions, "standard", "refused")
    found = {reason: refused_for(reason).value for reason in ("too_much_to_tokenize", "rate_limit_exceeded")}
    assert found == {"too_much_to_tokenize": 1, "rate_limit_exceeded": 1}


def test_whatever_shows_something_by_its_id_counts() -> None:
    shown = {
        path
        for path, operations in OPERATIONS.items()
        if "GET" in operations and Passing.BY_ID in operations["GET"].passing
    }
    assert shown <= {path for path, _ in LOOKED_UP}


@pytest.mark.parametrize(("path", "operation"), LOOKED_UP, ids=[path for path, _ in LOOKED_UP])
async def test_looking_something_up_counts_as_a_request(path: str, operation: Operation) -> None:
    gateway = gateway_of(Quota(requests_per_minute=2, requests_per_day=50, tokens_per_day=50, max_streams=1))
    target, ann = re.sub(r"{\w+}", "an_id", path), {"authorization": "Bearer ann"}
    async with client(gateway.app) as http:
        for _ in range(2):
            reply = await http.get(target, headers=ann)
            assert reply.status_code != 429
            if reply.status_code == 200:
                assert reply.headers["x-ratelimit-limit-requests"] == "2"
        refused = await http.get(target, headers=ann)
        used = (await http.get("/v1/usage", headers=ann)).json()
    assert refused.status_code == 429
    assert 429 in operation.refusals
    assert '"used":0' in str(used).replace(" ", "").replace("'", '"'), "of tokens"


async def test_who_may_have_one_stream_may_look_after_it() -> None:
    gateway = gateway_of(Quota(requests_per_minute=100, max_streams=1))
    ann = {"authorization": "Bearer ann"}
    async with client(gateway.app) as http:
        asking = asyncio.create_task(post(http, "/v1/chat/completions", chat_body()))
        request = await gateway.taken()
        for _ in range(3):
            assert (await http.get("/v1/chat/completions", headers=ann)).status_code == 200
        gateway.answer(request, "Hello.")
        assert (await asking).status_code == 200
        asking = asyncio.create_task(post(http, "/v1/chat/completions", chat_body()))
        gateway.answer(await gateway.taken(), "Hello.")
        assert (await asking).status_code == 200


async def test_what_is_refused_because_the_server_ends_is_not_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quota = Quota(tokens_per_minute=1000, max_streams=1)
    gateway = gateway_of(quota)
    reserve = gateway.service.quotas.reserve

    async def last(*args: Any) -> QuotaReservation:
        reservation = await reserve(*args)
        gateway.service.begin_drain()
        return reservation

    monkeypatch.setattr(gateway.service.quotas, "reserve", last)
    async with client(gateway.app) as http:
        refused = await post(http, "/v1/chat/completions", chat_body())
    assert refused.status_code == 503
    await settled()
    [standing] = await gateway.service.store.standings([("ann", quota, ())])
    assert (standing.num_streams, standing.tokens and standing.tokens.remaining) == (0, 1000)

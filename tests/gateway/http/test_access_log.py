"""The line that the access log has for each request: whether its reply was whole, or its client left before."""

from __future__ import annotations

import json
import logging
from ipaddress import ip_network

import httpx
import pytest

from penstock.app.loop import uvicorn_config
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.priority.lanes import Tenant
from tests.gateway.harness import MODEL, Gateway, chat_body, client, serving
from tests.gateway.raw_http import connect, post

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])


def endings(caplog: pytest.LogCaptureFixture) -> list[bool]:
    """Returns for each logged request whether its reply was whole."""
    return [
        record.__dict__["fields"]["whole"] for record in caplog.records if record.name == "penstock.access"
    ]


@STREAMED
async def test_a_reply_that_was_sent_to_its_end_is_whole(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(stream=stream)))
        gateway.answer(await gateway.taken(), "all ", "of it")
        await connection.answer()
    assert endings(caplog) == [True]


@STREAMED
async def test_a_reply_whose_client_left_is_not_whole(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    gateway = Gateway()
    async with serving(gateway.app) as url:
        async with connect(url) as connection:
            connection.send(post(CHAT, chat_body(stream=stream)))
            gateway.bring(await gateway.taken(), "some")
            connection.hang_up()
        await gateway.left()
    assert endings(caplog) == [False]


async def test_the_line_says_whose_request_it_was_and_what_it_cost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(service_tier="priority")))
        gateway.answer(await gateway.taken(), "all ", "of it")
        usage = json.loads((await connection.answer()).body)["usage"]
    (record,) = (record for record in caplog.records if record.name == "penstock.access")
    noted = {name: record.__dict__["fields"][name] for name in ("lane", "prompt_tokens", "completion_tokens")}
    own = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    assert noted == {"lane": "interactive", **own}
    fields = record.__dict__["fields"]
    assert (fields["tenant"], fields["address"]) == ("default", "127.0.0.1")
    assert "address 127.0.0.1, tenant default, lane interactive, " in record.getMessage()
    assert f"completion_tokens {own['completion_tokens']}" in record.getMessage()


async def test_the_line_of_a_refusal_has_its_tenant_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    known = Client(Tenant(name="ann"), Quota(tokens_per_minute=1))
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients={digest_of("key"): known}))
    async with client(gateway.app) as http:
        for key in ("key", "none"):
            headers = {"authorization": f"Bearer {key}"}
            await http.post(CHAT, json=chat_body(), headers=headers)
    lines = [record.__dict__["fields"] for record in caplog.records if record.name == "penstock.access"]
    assert [(line["status"], line.get("tenant")) for line in lines] == [(429, "ann"), (401, None)]


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("127.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("127.0.0.1", "198.51.100.1, 203.0.113.9, 10.1.2.3", "203.0.113.9"),
        ("127.0.0.1", "no address, 10.1.2.3", "no%20address"),
        ("198.51.100.7", "203.0.113.9", "198.51.100.7"),
    ],
)
async def test_a_proxy_that_is_believed_says_where_a_client_is(
    peer: str, forwarded: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "penstock.access")
    networks = (ip_network("127.0.0.1"), ip_network("10.0.0.0/8"))
    config = uvicorn_config(Gateway().app, "off", proxies=networks)
    config.load()
    transport = httpx.ASGITransport(config.loaded_app, client=(peer, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as http:
        await http.get("/health", headers={"x-forwarded-for": forwarded})
    (record,) = (record for record in caplog.records if record.name == "penstock.access")
    assert record.__dict__["fields"]["address"] == address

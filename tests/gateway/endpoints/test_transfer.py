"""`kv_transfer_params`: what a proxy of vLLM's passes from one server to another, and what nobody can make up."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.cluster.fake_exchange import FakeExchange
from tests.cluster.test_switch import LONG, make_gateway
from tests.gateway.harness import Gateway, chat_body, client, completion_body, serving

pytestmark = pytest.mark.anyio

FIRST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def member(name: str) -> tuple[Gateway, FakeExchange]:
    gateway, exchange = make_gateway(name), FakeExchange()
    gateway.service.kv = exchange
    return gateway, exchange


async def asked(gateway: Gateway, http: httpx.AsyncClient, params: Any, path: str) -> httpx.Response:
    make = chat_body if "chat" in path else completion_body
    body = make(LONG, max_tokens=1, kv_transfer_params=params)
    reply: httpx.Response = await gateway.answering(http.post(path, json=body), "a")
    return reply


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_proxy_passes_on_what_the_first_server_says(path: str) -> None:
    (first, _), (then, exchange) = member("a"), member("b")
    async with serving(first.app) as address, httpx.AsyncClient(base_url=address) as http:
        reply = (await asked(first, http, FIRST, path)).json()
    params = reply["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert f"http://{params['remote_host']}:{params['remote_port']}" == address
    assert params["remote_request_id"] == reply["id"]
    async with client(then.app) as http:
        answer = await asked(then, http, params, path)
        assert "kv_transfer_params" not in answer.json()
        assert [source for source, _ in exchange.expected] == [address]
        changes: list[dict[str, Any]] = [
            {"remote_port": 1},
            {"remote_host": "elsewhere"},
            {"remote_engine_id": "a.guessed"},
            {"remote_engine_id": None},
            {"remote_engine_id": f"b.{params['remote_engine_id'].rpartition('.')[2]}"},
        ]
        for change in changes:
            assert (await asked(then, http, params | change, path)).status_code == 200
        assert len(exchange.expected) == 1


async def test_the_address_is_not_what_a_client_calls_the_server() -> None:
    first, _ = member("a")
    async with serving(first.app) as address, httpx.AsyncClient(base_url=address) as http:
        http.headers["host"] = "elsewhere:9"
        params = (await asked(first, http, FIRST, "/v1/completions")).json()["kv_transfer_params"]
    assert f"http://{params['remote_host']}:{params['remote_port']}" == address


async def test_without_a_secret_it_is_refused_by_name_and_off_it_is_nothing() -> None:
    gateway = make_gateway("a", cluster_secret=None)
    async with client(gateway.app) as http:
        for params in (FIRST, {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1}):
            body = completion_body(kv_transfer_params=params)
            refused = await http.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")
        for off in (None, {}, {"do_remote_decode": False}):
            reply = await asked(gateway, http, off, "/v1/completions")
            assert "kv_transfer_params" not in reply.json()

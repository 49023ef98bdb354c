"""Whom a request is addressed to: one host, and one of this server's."""

from __future__ import annotations

import json

import pytest

from penstock.app.build import allowed_hosts
from penstock.app.settings import Settings
from penstock.gateway.http.hosts import LOOPBACK_HOSTS
from penstock.gateway.service import ServiceOptions
from tests.gateway.harness import MODEL, Gateway, chat_body, completion_body, serving
from tests.gateway.raw_http import connect, get, post, read_events

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def addressed(*hosts: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET /health HTTP/{version}", *(f"Host: {host}" for host in hosts), "", ""]).encode()


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "evil.example"]])
async def test_a_request_has_one_host(hosts: list[str]) -> None:
    async with serving(Gateway().app) as url, connect(url) as connection:
        connection.send(addressed(*hosts))
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (400, "invalid_host")
        assert await connection.rest() == b""


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "localhost.:80", "127.0.0.1:1", "[::1]", "[::1]:8000"],
)
async def test_a_server_answers_to_its_names(host: str) -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), allowed_hosts=LOOPBACK_HOSTS))
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(addressed(host))
        assert (await connection.answer()).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "x:localhost",
        "[::2]",
    ],
)
async def test_it_does_not_answer_to_others(host: str) -> None:
    """As a browser sends it whose page's own name was given this machine's address."""
    gateway = Gateway(ServiceOptions(models=(MODEL,), allowed_hosts=LOOPBACK_HOSTS))
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(addressed(host))
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (421, "host_not_allowed")


@pytest.mark.parametrize("allowed", [(), ("*",), ("evil.example",)])
async def test_any_name_is_taken_where_the_operator_says_so(allowed: tuple[str, ...]) -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), allowed_hosts=allowed))
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(addressed("evil.example:80"))
        assert (await connection.answer()).status == 200


def test_only_a_loopback_address_without_keys_is_guarded_by_default(tmp_path: object) -> None:
    keys = {"api_keys_file": f"{tmp_path}/keys"}
    assert set(allowed_hosts(Settings(), is_open=False)) == set(LOOPBACK_HOSTS)
    assert allowed_hosts(Settings(), is_open=True) == ()
    assert allowed_hosts(Settings.model_validate(keys), is_open=False) == ()
    chosen = Settings.model_validate({"allowed_hosts": "a.example, b.example"})
    assert allowed_hosts(chosen, is_open=False) == ("a.example", "b.example")


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "identity", "chunked, chunked"])
async def test_a_coding_that_nobody_undoes_is_refused(coding: str) -> None:
    async with serving(Gateway().app) as url, connect(url) as connection:
        connection.send(get("/tokenize", f"transfer-encoding: {coding}", method="POST") + b"0\r\n\r\n")
        assert (await connection.answer()).status in (400, 501)


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        gateway.answer(await gateway.taken(), "old ", "friend")
        _, headers = await connection.head()
        assert "transfer-encoding" not in headers
        *chunks, done = (event.data for event in read_events(await connection.rest()))
    assert done == "[DONE]"
    said = (json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert "".join(said) == "old friend"


async def test_a_client_of_http_1_0_gets_a_long_answer_whole() -> None:
    gateway, text = Gateway(), "x" * 100_000
    async with serving(gateway.app) as url, connect(url) as connection:
        body = post("/v1/completions", completion_body(n=4)).replace(b"HTTP/1.1", b"HTTP/1.0")
        connection.send(body.replace(b"host: x\r\n", b""))
        gateway.answer(await gateway.taken(), text)
        _, headers = await connection.head()
        assert "transfer-encoding" not in headers
        choices = json.loads(await connection.rest())["choices"]
    assert [choice["text"] for choice in choices] == [text] * 4

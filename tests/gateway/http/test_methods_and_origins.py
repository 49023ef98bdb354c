"""Methods, origins and request ids: what every answer says in its headers, whatever it answers."""

from __future__ import annotations

import re

import pytest

from penstock.gateway.access.keys import digest_of
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Tenant
from tests.gateway.harness import MODEL, Gateway, chat_body, serving
from tests.gateway.raw_http import Answer, connect, get, post

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
READ, WRITE = {"GET", "HEAD"}, {"POST"}
METHODS = {
    CHAT: READ | WRITE,
    "/v1/completions": WRITE,
    "/tokenize": WRITE,
    "/detokenize": WRITE,
    "/v1/models": READ,
    f"/v1/models/{MODEL}": READ,
    "/health": READ,
    "/ready": READ,
    "/metrics": READ,
}
OURS = "https://ours.example"


def open_to_ours() -> Gateway:
    return Gateway(ServiceOptions(models=(MODEL,), cors_origins=(OURS, "http://localhost:3000")))


async def asked(gateway: Gateway, request: bytes, method: str = "GET") -> Answer:
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(request)
        return await connection.answer(method)


@pytest.mark.parametrize("path", METHODS)
async def test_a_method_that_a_path_lacks_is_a_405_that_names_the_others(path: str) -> None:
    async with serving(Gateway().app) as url, connect(url) as connection:
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            connection.send(get(path, "content-length: 0", method=method))
            answer = await connection.answer(method)
            assert (answer.status != 405) == (method in METHODS[path]), method
            if answer.status == 405:
                assert set(answer.headers["allow"].split(", ")) == METHODS[path]
                assert method == "HEAD" or answer.error["code"] == "method_not_allowed"
                assert method == "HEAD" or method in answer.error["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/other", "/v1/nothing", CHAT])
async def test_head_says_what_get_would_and_sends_no_body(path: str) -> None:
    async with serving(Gateway().app) as url, connect(url) as connection:
        connection.send(get(path, "x-request-id: same", method="HEAD") + get(path, "x-request-id: same"))
        head, full = await connection.answer("HEAD"), await connection.answer()
    assert head.status == full.status
    both = [{**answer.headers, "date": ""} for answer in (head, full)]
    if full.status < 400:
        assert both[0] == both[1]
    assert both[0].keys() == both[1].keys()


def preflight(origin: str, method: str, *headers: str) -> bytes:
    return get(
        CHAT, f"origin: {origin}", f"access-control-request-method: {method}", *headers, method="OPTIONS"
    )


@pytest.mark.parametrize("origin", [OURS, "http://localhost:3000"])
async def test_a_named_origin_may_do_what_the_api_can(origin: str) -> None:
    wanted = "access-control-request-headers: authorization, content-type, x-request-id, x-stainless-lang"
    for method in ("GET", "POST"):
        answer = await asked(open_to_ours(), preflight(origin, method, wanted))
        assert answer.status == 200, answer.body
        headers = answer.headers
        assert headers["access-control-allow-origin"] == origin
        assert method in headers["access-control-allow-methods"].split(", ")
        allowed = {name.lower() for name in headers["access-control-allow-headers"].split(", ")}
        assert {"authorization", "content-type", "x-request-id"} <= allowed
        assert "origin" in headers["vary"].lower()
        # Keys are sent by scripts, never by the browser itself.
        assert "access-control-allow-credentials" not in headers


FOREIGN = [
    "https://ours.example.evil",
    "https://evil.ours.example",
    "http://ours.example",
    "https://ours.example:8443",
    "HTTPS://OURS.EXAMPLE",
    "null",
    "*",
    "",
]


async def test_any_other_origin_is_told_nothing() -> None:
    async with serving(open_to_ours().app) as url, connect(url) as connection:
        for origin in FOREIGN:
            for request, status in (
                (preflight(origin, "POST"), 400),
                (get("/v1/models", f"origin: {origin}"), 200),
            ):
                connection.send(request)
                answer = await connection.answer()
                assert answer.status == status, origin
                assert "access-control-allow-origin" not in answer.headers, origin
                assert "origin" in answer.headers["vary"].lower()


@pytest.mark.parametrize(
    "request_",
    [preflight(OURS, "PUT"), preflight(OURS, "POST", "access-control-request-headers: x-other")],
)
async def test_a_preflight_for_what_the_api_has_not_fails(request_: bytes) -> None:
    assert (await asked(open_to_ours(), request_)).status == 400


async def test_scripts_may_read_refusals_and_their_headers() -> None:
    options = ServiceOptions(
        models=(MODEL,),
        cors_origins=(OURS,),
        clients={digest_of("the-key-of-ann"): Tenant(name="ann")},
        limits=Limits(max_body_bytes=1000),
    )
    origin, key = f"origin: {OURS}", "authorization: Bearer the-key-of-ann"
    gateway = Gateway(options)
    async with serving(gateway.app) as url:
        for request, status in (
            (get("/v1/models", origin, key), 200),
            (get("/v1/models", origin), 401),
            (get("/v1/nothing", origin, key), 404),
            (get("/v1/completions", origin, key), 405),
            (post(CHAT, chat_body(n=0), origin, key), 400),
            (post(CHAT, chat_body("x" * 1000), origin, key), 413),
        ):
            async with connect(url) as connection:
                connection.send(request)
                answer = await connection.answer()
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == OURS
            exposed = set(answer.headers["access-control-expose-headers"].split(", "))
            assert {"x-request-id", "retry-after", "retry-after-ms"} <= exposed
        gateway.service.begin_drain()
        draining = await asked(gateway, post(CHAT, chat_body(), origin, key))
    assert draining.status == 503
    assert draining.headers["access-control-allow-origin"] == OURS
    assert draining.headers["retry-after"]


async def test_scripts_may_read_streams() -> None:
    gateway = open_to_ours()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(stream=True), f"origin: {OURS}"))
        gateway.answer(await gateway.taken(), "ok")
        answer = await connection.answer()
    assert answer.headers["access-control-allow-origin"] == OURS
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert answer.body.endswith(b"data: [DONE]\n\n")


USABLE = ["a", "x" * 128, "A-Z_a.z:0/9+=@", "0af7651916cd43dd8448eb211c80319c"]
UNUSABLE = ["", "x" * 129, "a b", "a\tb", "é", "<script>", 'a"b', "a;b", "a,b", "%0d%0a", "☃"]


async def test_a_usable_request_id_is_kept_and_any_other_replaced() -> None:
    async with serving(Gateway().app) as url, connect(url) as connection:
        for given in (*USABLE, *UNUSABLE):
            connection.send(get("/health", f"x-request-id: {given}"))
            found = (await connection.answer()).headers["x-request-id"]
            assert (found == given) == (given in USABLE)
            assert given in USABLE or re.fullmatch(r"req_[0-9a-f]{24}", found)


async def test_the_first_usable_request_id_counts() -> None:
    ids = [f"x-request-id: {given}" for given in ("not usable", "first", "second")]
    assert (await asked(Gateway(), get("/health", *ids))).headers["x-request-id"] == "first"


async def test_requests_without_an_id_get_different_ones() -> None:
    async with serving(Gateway().app) as url, connect(url) as connection:
        connection.send(get("/health") * 20)
        answers = [await connection.answer() for _ in range(20)]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 20


async def test_every_answer_has_its_request_id() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        for request, status in (
            (get("/v1/nothing", "x-request-id: mine"), 404),
            (get("/v1/completions", "x-request-id: mine"), 405),
            (post(CHAT, {}, "x-request-id: mine"), 400),
            (get("/v1/completions", "x-request-id: mine", "content-length: 0", method="POST"), 415),
        ):
            connection.send(request)
            answer = await connection.answer()
            assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")
        connection.send(post(CHAT, chat_body(stream=True), "x-request-id: mine"))
        gateway.answer(await gateway.taken(), "ok")
        assert (await connection.answer()).headers["x-request-id"] == "mine"

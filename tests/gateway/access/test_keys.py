"""API keys: every way to send one, and none to get one back."""

from __future__ import annotations

import logging

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.gateway.access.keys import Access, Client, digest_of
from penstock.gateway.errors import ApiError
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.priority.lanes import Tenant
from tests.gateway.harness import MODEL, Gateway, chat_body, serving
from tests.gateway.raw_http import connect, get, post

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
KEY = "the-key-of-ann-0123456789"
KEYS = {
    digest_of(KEY): Tenant(name="ann"),
    digest_of("the-key-of-bob-0123456789"): Tenant(name="bob"),
}


def locked() -> Gateway:
    return Gateway(ServiceOptions(models=(MODEL,), clients=KEYS))


async def test_a_bearer_key_opens_however_it_is_spelt() -> None:
    async with serving(locked().app) as url, connect(url) as connection:
        for value in (
            f"Bearer {KEY}",
            f"bearer {KEY}",
            f"BEARER {KEY}",
            f"Bearer   {KEY}",
            f"Bearer {KEY}  ",
        ):
            connection.send(get("/v1/models", f"authorization: {value}"))
            assert (await connection.answer()).status == 200, value
        connection.send(get("/v1/models", f"x-api-key: {KEY}"))  # Anthropic's way
        assert (await connection.answer()).status == 200


NO_KEYS = [
    [],
    ["authorization:"],
    ["authorization: Bearer"],
    [f"authorization: {KEY}"],
    [f"authorization: Basic {KEY}"],
    [f"authorization: Bearer{KEY}"],
    [f"authorization: Bearer: {KEY}"],
    [f"authorization: Token {KEY}"],
    [f"authorization: Bearer {KEY}x"],
    [f"authorization: Bearer {KEY[:-1]}"],
    [f"authorization: Bearer {KEY.upper()}"],
    [f'authorization: Bearer "{KEY}"'],
    [f"authorization: Bearer {KEY} {KEY}"],
    [f"authorization: Bearer {digest_of(KEY).hex()}"],
    [f"api-key: {KEY}"],
    ["x-api-key: nobody"],
    [f"x-api-key: Bearer {KEY}"],
    ["authorization: Bearer nobody", f"x-api-key: {KEY}"],
    [f"cookie: authorization={KEY}"],
    ["authorization: Bearer nobody", f"authorization: Bearer {KEY}"],
]


async def test_nothing_else_opens() -> None:
    async with serving(locked().app) as url, connect(url) as connection:
        for headers in NO_KEYS:
            connection.send(get(f"/v1/models?api_key={KEY}", *headers))
            answer = await connection.answer()
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), headers
            assert answer.error["code"] == "invalid_api_key"
            assert KEY.encode() not in answer.body


async def test_who_may_not_enter_learns_nothing_of_what_is_inside() -> None:
    """Not which models there are, nor whether a body would have been right."""
    async with serving(locked().app) as url, connect(url) as connection:
        bodies = []
        for request in (
            get(f"/v1/models/{MODEL}"),
            get("/v1/models/other"),
            post(CHAT, chat_body()),
            post(CHAT, {"wrong": 1}),
            get(CHAT, "content-length: 0", method="POST"),
        ):
            connection.send(request)
            answer = await connection.answer()
            assert answer.status == 401
            bodies.append(answer.body)
    assert len(set(bodies)) == 1


async def test_no_key_is_ever_written_down(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the right one nor, as it may be the right one of another server, a wrong one."""
    gateway = locked()
    right, wrong = f"authorization: Bearer {KEY}", "authorization: Bearer the-key-of-another-server"
    said = b""
    async with serving(gateway.app) as url:
        for name in ("", "uvicorn", "uvicorn.error", "uvicorn.access"):
            caplog.set_level(logging.DEBUG, name)
            monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        async with connect(url) as connection:
            connection.send(post(CHAT, chat_body(stream=True), right))
            gateway.answer(await gateway.taken(), "ok")
            said += (await connection.answer()).body
            monkeypatch.setattr(gateway.service.tokenizer, "encode", None)
            for request in (
                get("/v1/models", wrong),
                get("/v1/models", right),
                get("/v1/nothing", right),
                post(CHAT, chat_body(n=0), right),
                get("/metrics", right),
                post(CHAT, chat_body(), right),
            ):
                connection.send(request)
                answer = await connection.answer()
                said += repr(answer.headers).encode() + answer.body
            assert answer.status == 500
    assert "Traceback" in caplog.text
    assert "GET /v1/models" in caplog.text
    assert b"Traceback" not in said
    written = said.decode() + caplog.text + repr(vars(gateway.service.access))
    for key in (KEY, "the-key-of-another-server"):
        assert key not in written
        assert digest_of(key).hex() not in written


async def test_a_key_belongs_to_its_request_and_not_to_its_connection() -> None:
    gateway = locked()
    async with serving(gateway.app) as url, connect(url) as connection:
        for name in ("ann", "bob"):
            connection.send(post(CHAT, chat_body(), f"authorization: Bearer the-key-of-{name}-0123456789"))
            request = await gateway.taken()
            gateway.answer(request, "ok")
            assert (await connection.answer()).status == 200
            assert (request.tenant, request.salt) == (name, name.encode())
        connection.send(post(CHAT, chat_body()))
        assert (await connection.answer()).status == 401


PRINTABLE = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@given(st.dictionaries(PRINTABLE, st.sampled_from(["ann", "bob"]), min_size=1, max_size=5), PRINTABLE)
def test_a_key_is_its_tenants_and_any_other_is_nobodys(tenants: dict[str, str], other: str) -> None:
    assume(other not in tenants)
    access = Access({digest_of(key): Tenant(name=tenant) for key, tenant in tenants.items()})
    assert {key: access.tenant(f"Bearer {key}").name for key in tenants} == tenants
    with pytest.raises(ApiError) as error:
        access.tenant(f"Bearer {other}")
    assert error.value.status == 401


ANN, BOB = Client(Tenant(name="ann"), Quota(max_streams=2)), Client(Tenant(name="bob"))


def let_in(access: Access, key: str) -> Client | None:
    try:
        return access.client(f"Bearer {key}")
    except ApiError:
        return None


def test_a_key_says_how_much_may_be_used() -> None:
    access = Access({digest_of("old"): ANN, digest_of("bare"): Tenant(name="bob")})
    assert (let_in(access, "old"), let_in(access, "bare")) == (ANN, BOB)
    assert access.tenant("Bearer old") == ANN.tenant


def test_without_keys_nobody_has_a_quota() -> None:
    assert Access().client(None).quota == Quota()


def test_new_keys_take_the_place_of_the_old_ones() -> None:
    access = Access({digest_of("old"): ANN, digest_of("kept"): ANN})
    access.replace({digest_of("kept"): ANN, digest_of("new"): BOB})
    assert [let_in(access, key) for key in ("old", "kept", "new")] == [None, ANN, BOB]


def test_a_server_that_loses_all_keys_or_gets_its_first_is_open_to_nobody_else() -> None:
    for access, clients in [(Access({digest_of("old"): ANN}), {}), (Access(), {digest_of("new"): BOB})]:
        access.replace(clients)
        assert let_in(access, "old") is None
        with pytest.raises(ApiError):
            access.client(None)


def test_what_else_a_refusal_says_stands_in_its_headers() -> None:
    error = ApiError(429, "Later.", retry_after_s=2.0, extra_headers={"x-ratelimit-limit-requests": "60"})
    headers = error.headers()
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert 2_000 <= int(headers["retry-after-ms"]) <= 2_400


def test_work_that_goes_on_is_its_tenants_for_as_long_as_it_has_a_key() -> None:
    access = Access(KEYS)
    assert access.client_of("bob").tenant == Tenant(name="bob")
    access.replace({})
    with pytest.raises(ApiError, match="no longer known"):
        access.client_of("bob")
    assert Access().client_of("default").tenant.name == "default"

"""Watermarks on the wire: who gets one, what is refused, and that nothing tells the key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.engine.text.watermark import Watermark
from penstock.gateway.service import ServiceOptions
from tests.gateway.endpoints.test_open_model_fields import replied, requested
from tests.gateway.harness import EOS, MODEL, Gateway, chat_body, client, completion_body

pytestmark = pytest.mark.anyio

MARK = Watermark(key=0x1234_5678_9ABC_DEF0, gamma=0.25, delta=1.5)
SEARCH = {"use_beam_search": True, "n": 2}


def gateway(**options: Any) -> Gateway:
    return Gateway(ServiceOptions(models=(MODEL,), eos_token_ids=(EOS,), **options))


@pytest.mark.parametrize("make", [chat_body, completion_body])
@pytest.mark.parametrize(
    ("fields", "is_for_all", "expected"),
    [
        ({}, False, None),
        ({"watermark": False}, False, None),
        ({"watermark": None}, True, MARK),
        ({"watermark": True}, False, MARK),
        ({"watermark": True}, True, MARK),
        ({}, True, MARK),
    ],
)
async def test_who_gets_one(
    make: Any, fields: dict[str, Any], is_for_all: bool, expected: Watermark | None
) -> None:
    request = await requested(make(**fields), gateway(watermark=MARK, watermarks_all=is_for_all))
    assert request.sampling.watermark == expected


@pytest.mark.parametrize("make", [chat_body, completion_body])
@pytest.mark.parametrize(
    ("fields", "options", "field", "said"),
    [
        ({"watermark": True}, {}, "watermark", "--watermark-key-file"),
        ({"watermark": "yes"}, {"watermark": MARK}, "watermark", "watermark"),
        ({"watermark": False}, {"watermark": MARK, "watermarks_all": True}, "watermark", "All texts"),
        ({"watermark": True, **SEARCH}, {"watermark": MARK}, "watermark", "use_beam_search"),
        (SEARCH, {"watermark": MARK, "watermarks_all": True}, "use_beam_search", "All texts"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    make: Any, fields: dict[str, Any], options: dict[str, Any], field: str, said: str
) -> None:
    at = gateway(**options)
    asking, taken = asyncio.create_task(replied(at, make(**fields))), asyncio.create_task(at.taken())
    await asyncio.wait([asking, taken], return_when=asyncio.FIRST_COMPLETED)
    assert not taken.done(), "the engine was asked"
    taken.cancel()
    reply = await asking
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field
    assert said in reply.json()["error"]["message"]


async def test_a_server_without_a_key_takes_what_asks_for_none() -> None:
    assert (await requested(chat_body(watermark=False), gateway())).sampling.watermark is None


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {**CHAT, "max_tokens": 9}),
        ("/api/chat", {**CHAT, "stream": False}),
        ("/v1/responses", {"model": MODEL, "input": "Hi"}),
    ],
)
async def test_other_apis_have_that_of_all(path: str, body: dict[str, Any]) -> None:
    at = gateway(watermark=MARK, watermarks_all=True)
    async with client(at.app) as http:
        asking = asyncio.create_task(http.post(path, json=body))
        request = await at.taken()
        assert request.sampling.watermark == MARK
        at.answer(request, "x")
        assert (await asking).status_code == 200


@pytest.mark.parametrize("wanted", [True, False])
async def test_llama_cpps_settings_tell_of_it(wanted: bool) -> None:
    at = gateway(watermark=MARK)
    async with client(at.app) as http:
        reply = await at.answering(http.post("/completion", json={"prompt": "Hi", "watermark": wanted}), "x")
        rendered = await http.post("/v1/chat/completions/render", json=chat_body(watermark=wanted))
    assert reply.json()["generation_settings"]["watermark"] is wanted
    assert rendered.status_code == 200
    for text in (reply.text, rendered.text):
        assert str(MARK.key) not in text

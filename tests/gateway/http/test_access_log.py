"""The line that the access log has for each request: whether its reply was whole, or its client left before."""

from __future__ import annotations

import json
import logging

import pytest

from tests.gateway.harness import Gateway, chat_body, serving
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
    assert record.__dict__["fields"]["tenant"]
    assert f"completion_tokens {own['completion_tokens']}" in record.getMessage()

"""The line that the access log has for each request: whether its reply was whole, or its client left before."""

from __future__ import annotations

import logging

import pytest

from tests.gateway.desk import Desk, chat_body, serving
from tests.gateway.raw import dialled, post

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])


def endings(caplog: pytest.LogCaptureFixture) -> list[bool]:
    """Of each logged request, whether its reply was whole."""
    return [
        record.__dict__["fields"]["whole"] for record in caplog.records if record.name == "penstock.access"
    ]


@STREAMED
async def test_a_reply_that_was_sent_to_its_end_is_whole(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(CHAT, chat_body(stream=stream)))
        desk.answer(await desk.taken(), "all ", "of it")
        await line.answer()
    assert endings(caplog) == [True]


@STREAMED
async def test_a_reply_whose_client_left_is_not_whole(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    desk = Desk()
    async with serving(desk.app) as url:
        async with dialled(url) as line:
            line.send(post(CHAT, chat_body(stream=stream)))
            desk.bring(await desk.taken(), "some")
            line.hang_up()
        await desk.left()
    assert endings(caplog) == [False]

"""The work on a request before it is queued: the files that a reader has to open, and the calls of functions."""

from __future__ import annotations

import asyncio
import sys
from types import FrameType

import pytest

from penstock.gateway.dispatch import Dispatch
from penstock.gateway.endpoints.replies import RepliesApi
from tests.gateway.harness import Gateway, chat_body, client

pytestmark = pytest.mark.anyio

MOST_FILES, MOST_CALLS = 29, 179


class Profile:
    """Notes this project's calls from the handler of a chat until its request is submitted, but for generated code."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._is_on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if frame.f_code is RepliesApi.chat.__code__:
            self._is_on = True
        elif frame.f_code is Dispatch.submit.__code__:
            self._is_on = False
        module, is_generated = frame.f_globals.get("__name__", ""), frame.f_code.co_filename == "<string>"
        if self._is_on and module.startswith("penstock.") and not is_generated:
            self.calls.append(module)


async def calls_of_a_chat() -> list[str]:
    """The modules of all calls for a second chat: the first one fills what is remembered."""
    gateway = Gateway()
    async with client(gateway.app) as http:
        for _ in range(2):
            profile = Profile()
            sys.setprofile(profile)
            try:
                asking = asyncio.create_task(
                    http.post("/v1/chat/completions", json=chat_body("Hi", stream=True))
                )
                request = await gateway.taken()
            finally:
                sys.setprofile(None)
            gateway.answer(request, "Hello.")
            assert (await asking).status_code == 200
    return profile.calls


async def test_a_chat_opens_few_files_and_makes_few_calls_until_it_is_queued() -> None:
    calls = await calls_of_a_chat()
    files = sorted(set(calls))
    assert "penstock.gateway.endpoints.answering" in files
    assert len(files) <= MOST_FILES, files
    assert len(calls) <= MOST_CALLS

"""Prompting: how many prompts there may be, and how much work their texts are taken for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.gateway.endpoints.prompting import MESSAGE_CHARS, TEXT_CHARS, Prompting
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.gateway.wire.embeddings import EmbeddingsBody, embeddings_ask
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.schemas import Message
from tests.gateway.harness import MODEL, Gateway, client, completion_body, make_tokenizer

pytestmark = pytest.mark.anyio


class CountedThreads:
    """Remembers the sizes of the work, which it does at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def run(self, tenant: str, size: int, work: Callable[[], Any]) -> Any:  # noqa: ARG002
        self.sizes.append(size)
        return work()


async def test_short_messages_and_texts_are_some_work_too() -> None:
    threads = CountedThreads()
    prompts = Prompts(make_tokenizer())
    prompting = Prompting(prompts, Limits(), threads, "t")  # type: ignore[arg-type]
    await prompting.encode_chat([Message(role="user", content="Hi")] * 50)
    await prompting.prompts(embeddings_ask(EmbeddingsBody(model=MODEL, input=["Hi"] * 50), Limits()))
    chat, texts = threads.sizes
    assert 50 * (MESSAGE_CHARS + 2) <= chat < 50 * (MESSAGE_CHARS + 20)
    assert texts == 50 * (TEXT_CHARS + 2)


@pytest.mark.parametrize(("n", "is_let_in"), [(2, True), (3, False)])
async def test_prompts_times_choices_are_bounded(n: int, *, is_let_in: bool) -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_choices=4)))
    async with client(gateway.app) as http:
        asked = http.post("/v1/completions", json=completion_body(["a", "b"], n=n))
        if not is_let_in:
            reply = (await asked).json()
            assert "at most 4" in reply["error"]["message"]
            return
        asking = asyncio.create_task(asked)
        for _ in range(2):
            gateway.answer(await gateway.taken(), "x")
        assert len((await asking).json()["choices"]) == 4

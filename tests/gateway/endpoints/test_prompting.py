"""Prompting: how many prompts there may be, and how much work their texts are taken for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.gateway.endpoints.prompting import MESSAGE_CHARS, TEXT_CHARS, Prompting, _empty
from penstock.gateway.errors import ApiError
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


async def test_a_text_of_more_bytes_than_any_tokens_have_is_not_tokenised() -> None:
    threads, limits = CountedThreads(), Limits(max_bytes_per_token=4)
    prompting = Prompting(Prompts(make_tokenizer()), limits, threads, "t", context_length=10)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="41 bytes") as refused:
        await prompting.encode_text("é" * 20 + "a", "prompt")
    assert (refused.value.param, threads.sizes) == ("prompt", [])
    assert len(await prompting.encode_text("é" * 20, "prompt")) == 41


def test_the_tokens_of_a_long_prompt_are_freed_in_pieces() -> None:
    freed: list[int] = []

    class TokenIds(list[int]):
        def __delitem__(self, place: Any) -> None:
            freed.append(len(self[place]))
            super().__delitem__(place)

    _empty(token_ids := TokenIds(range(200_000)))
    assert not token_ids
    assert (sum(freed), max(freed)) == (200_000, 65_536)

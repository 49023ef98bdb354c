"""`kv_keep`: how much of a long sequence is kept, by request and by server, and what the reply says of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.prefix_index import prompt_hashes
from penstock.engine.planning.request import FinishReason
from penstock.gateway.service import ServiceOptions
from penstock.gateway.wire.sampling import KeepLimits
from tests.gateway.endpoints.test_open_model_fields import replied, requested
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body, make_timings

pytestmark = pytest.mark.anyio

KEEPS = KeepLimits(default=128, most=8192)
LONG = [70] * 2000
"""More tokens than there is room for, and fewer than there are positions."""


def gateway_of(keep: KeepLimits = KEEPS) -> Gateway:
    return Gateway(ServiceOptions(models=(MODEL,), keep=keep))


@pytest.mark.parametrize("make", [chat_body, completion_body])
@pytest.mark.parametrize(
    ("default", "fields", "expected"),
    [
        (0, {}, None),
        (0, {"kv_keep": 100}, 100),
        (0, {"kv_keep": None}, None),
        (128, {}, 128),
        (128, {"kv_keep": 64.0}, 64),
        (128, {"kv_keep": 0}, None),
        (128, {"n": 3}, 128),
    ],
)
async def test_a_request_keeps_what_it_says_or_what_the_server_says(
    make: Any, default: int, fields: dict[str, Any], expected: int | None
) -> None:
    request = await requested(make(**fields), gateway_of(replace(KEEPS, default=default)))
    assert request.keeping == (None if expected is None else Keeping.of(expected, 16))


async def test_a_prompt_beyond_the_cache_is_let_in_and_no_more_of_it_is_hashed_than_is_found() -> None:
    gateway = gateway_of()
    request = await requested(completion_body(LONG), gateway)
    most = Keeping.of(128, 16).most
    assert request.sampling.max_tokens == 16
    assert request.block_hashes == prompt_hashes(LONG[: most + 1], 16, request.salt)
    chat = await requested(chat_body("a" * 1500), gateway)
    assert chat.sampling.max_tokens == gateway.engine.max_kept_tokens - len(chat.prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kv_keep": "many"}, "kv_keep"),
        ({"kv_keep": 64.5}, "kv_keep"),
        ({"kv_keep": True}, "kv_keep"),
        ({"kv_keep": -1}, "kv_keep"),
        ({"kv_keep": 31}, "kv_keep"),
        ({"kv_keep": 8193}, "kv_keep"),
        ({"kv_keep": 1 << 70}, "kv_keep"),
        ({"kv_keep": 64, "use_beam_search": True, "n": 2}, "kv_keep"),
        ({"kv_keep": 0, "prompt": LONG}, "prompt"),
        ({"use_beam_search": True, "n": 2, "prompt": LONG}, "prompt"),
        ({"prompt": [70] * 5000}, "prompt"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    reply = await replied(gateway_of(), completion_body(**fields))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (KeepLimits(window=1000), "between 1032 and"),
        (KeepLimits(sees_chunks=True), "its layers see chunks"),
    ],
)
async def test_what_a_models_layers_see_is_always_kept(keep: KeepLimits, said: str) -> None:
    error = (await replied(gateway_of(keep), chat_body(kv_keep=1024))).json()["error"]
    assert error["param"] == "kv_keep"
    assert said in error["message"]


async def test_inputs_of_which_everything_is_kept_have_to_fit() -> None:
    async with client(gateway_of().app) as api:
        reply = await api.post("/v1/embeddings", json={"model": MODEL, "input": LONG})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_a_search_keeps_everything() -> None:
    gateway = gateway_of()
    asking = asyncio.create_task(replied(gateway, completion_body(use_beam_search=True, n=2)))
    request = await gateway.taken()
    gateway.answer(request, "!")
    await asking
    assert request.keeping is None


async def test_the_reply_says_what_was_dropped() -> None:
    gateway = gateway_of()
    asking = asyncio.create_task(replied(gateway, completion_body(n=2)))
    request = await gateway.taken()
    for index in range(2):
        timings = make_timings(request)
        timings.num_kv_dropped = 64 * (index + 1)
        gateway.bring(request, "a", index, finish_reason=FinishReason.STOP, timings=timings)
    assert (await asking).json()["timings"]["kv_dropped_tokens"] == 192

"""Chat completions: the wire format, streamed and not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.engine.planning.prefix_index import PRIVATE
from penstock.engine.planning.request import FinishReason
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from tests.gateway.harness import MODEL, Gateway, chat_body, client, events, logprobs

pytestmark = pytest.mark.anyio


async def ask(gateway: Gateway, body: dict[str, Any], *texts: str) -> Any:
    """Posts a chat, answers it with these tokens, and returns the response."""
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        gateway.answer(await gateway.taken(), *texts)
        return await asking


async def test_a_whole_answer_has_openais_shape() -> None:
    gateway = Gateway()
    response = await ask(gateway, chat_body("Hi"), "Hel", "lo")
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert isinstance(body["created"], int)
    assert (body["object"], body["model"], body["service_tier"]) == ("chat.completion", MODEL, "default")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 2,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["timings"] == {
        "queue_ms": 10.0,
        "ttft_ms": 30.0,
        "tpot_ms": 20.0,
        "cached_tokens": 4,
        "fetched_tokens": 0,
        "kv_dropped_tokens": 0,
        "prompt_tokens": 6,
        "promised_ttft_ms": None,
        "predicted_ttft_ms": None,
        "preemptions": 1,
        "draft_tokens": 0,
        "drafts": {},
        "accepted_tokens": 0,
        "experts_per_layer": None,
        "timeline": {
            "prefills": [],
            "preempted_ms": [50.0],
            "resumed_ms": [],
            "drafts": [],
            "ended_ms": 70.0,
        },
        "lane": "standard",
    }


ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}


@pytest.mark.parametrize("path", ASKED)
async def test_without_a_model_the_served_one_answers(path: str) -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(path, json=ASKED[path]))
        gateway.answer(await gateway.taken(), "Hello")
        response = await asking
    assert (response.status_code, response.json()["model"]) == (200, MODEL)


async def test_a_stream_has_openais_shape() -> None:
    response = await ask(Gateway(), chat_body("Hi", stream=True), "Hel", "lo")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}
    assert not any("usage" in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
    assert chunks[-1]["timings"]["lane"] == "standard"
    assert not any("timings" in chunk for chunk in chunks[:-1])


async def test_choices_are_numbered_and_sorted() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(n=2)))
        request = await gateway.taken()
        assert request.n == 2
        gateway.finish(request, "second", 1, FinishReason.LENGTH)
        gateway.finish(request, "first", 0)
        body = (await asking).json()
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "first", "stop"),
        (1, "second", "length"),
    ]
    assert body["usage"]["prompt_tokens"] == 6


async def test_a_text_and_an_end_in_one_step_are_two_chunks() -> None:
    *chunks, _ = events((await ask(Gateway(), chat_body(stream=True), "all at once")).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(c["delta"].get("content"), c["finish_reason"]) for c in choices] == [
        ("", None),
        ("all at once", None),
        (None, "stop"),
    ]


@pytest.mark.parametrize(("most", "num_tokens"), [(1, 1), (5, 1), (6, 1), (11, 1), (12, 2), (600, 100)])
async def test_a_chat_in_one_piece_has_as_many_tokens_as_log_probabilities_may_be(
    most: int, num_tokens: int
) -> None:
    """Six for each token of two choices, and one token at least."""
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_logprobs=most)))
    async with client(gateway.app) as http:
        asking = asyncio.create_task(
            http.post("/v1/chat/completions", json=chat_body(logprobs=True, top_logprobs=2, n=2))
        )
        assert (await gateway.taken()).sampling.max_tokens == num_tokens
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_logprobs_of_a_chat() -> None:
    gateway = Gateway()
    spelt = gateway.service.tokenizer.encode("é")
    async with client(gateway.app) as http:
        body = chat_body(logprobs=True, top_logprobs=1)
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        request = await gateway.taken()
        assert request.sampling.num_logprobs == 1
        found = [logprobs((spelt[0], -0.5), (9, -1.0)), logprobs((spelt[1], float("-inf")))]
        gateway.finish(request, "é", token_ids=spelt, logprobs=found)
        content = (await asking).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é"
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5]
    assert content[1]["logprob"] == -9999.0


async def test_logprobs_of_a_streamed_chat() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        body = chat_body(stream=True, logprobs=True)
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        request = await gateway.taken()
        assert request.sampling.num_logprobs == 0
        gateway.finish(request, "", token_ids=[7], logprobs=[logprobs((7, -0.25))])
        *chunks, _ = events((await asking).text)
    entries = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert entries[0] is None
    assert entries[1]["content"][0]["logprob"] == -0.25
    assert entries[1]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize(
    ("fields", "is_private"), [({"store": False}, True), ({}, False), ({"store": None}, False)]
)
async def test_what_is_not_to_be_stored_shares_no_blocks(fields: dict[str, Any], is_private: bool) -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(**fields)))
        request = await gateway.taken()
        gateway.answer(request, "ok")
        await asking
    assert request.salt.endswith(PRIVATE) == is_private

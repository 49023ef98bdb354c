"""`/rerank` and `/score`: texts compared by their embeddings."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from penstock.engine.planning.request import FinishReason
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.gateway.wire.embeddings import likeness
from tests.gateway.harness import MODEL, Gateway, client, make_tokenizer

pytestmark = pytest.mark.anyio

TOKENIZER = make_tokenizer()
VECTORS = {"east": [2.0, 0.0], "north": [0.0, 3.0], "north-east": [1.0, 1.0], "west": [-1.0, 0.0]}


async def answered(path: str, **fields: Any) -> httpx.Response:
    """From an engine whose embeddings are VECTORS."""
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_inputs=4)))
    async with client(gateway.app) as http:
        reply = asyncio.create_task(http.post(path, json={"model": MODEL, **fields}))
        while not reply.done():
            while (request := gateway.queue.take(lambda _: True)) is not None:
                vector = VECTORS[TOKENIZER.decode(request.prompt_token_ids)]
                gateway.finish(request, reason=FinishReason.LENGTH, token_ids=[], embedding=vector)
            await asyncio.sleep(0)
        return await reply


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_put_in_order(path: str) -> None:
    documents = ["west", {"text": "north-east"}, "north", "east"]
    whole = (await answered(path, query="east", documents=documents)).json()
    assert [(one["index"], one["document"]["text"]) for one in whole["results"]] == [
        (3, "east"),
        (1, "north-east"),
        (2, "north"),
        (0, "west"),
    ]
    scores = [one["relevance_score"] for one in whole["results"]]
    assert scores == pytest.approx([1.0, 0.5**0.5, 0.0, -1.0])
    num_tokens = sum(len(TOKENIZER.encode(text)) + 1 for text in ("east", *VECTORS))
    assert whole["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert whole["id"].startswith("rerank-")
    best = (await answered(path, query="east", documents=documents, top_n=1, return_documents=False)).json()
    assert best["results"] == [{"index": 3, "relevance_score": scores[0]}]


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({"text_1": "east", "text_2": "west"}, [-1.0]),
        ({"text_1": "east", "text_2": ["east", "north"]}, [1.0, 0.0]),
        ({"text_1": ["east", "north"], "text_2": ["west", "north-east"]}, [-1.0, 0.5**0.5]),
        ({"queries": ["east"], "documents": ["west"]}, [-1.0]),
    ],
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_texts_are_compared(path: str, fields: dict[str, Any], scores: list[float]) -> None:
    whole = (await answered(path, **fields)).json()
    assert (whole["object"], whole["model"]) == ("list", MODEL)
    assert [one["score"] for one in whole["data"]] == pytest.approx(scores)
    assert [(one["index"], one["object"]) for one in whole["data"]] == [
        (i, "score") for i in range(len(scores))
    ]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/rerank", {"documents": ["a"]}, 400, "query"),
        ("/rerank", {"query": "a"}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"] * 5}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": [{"texts": "a"}]}, 400, "documents[0].text"),
        ("/rerank", {"query": "a", "documents": [1]}, 400, "documents[0]"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, 400, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["a"]}, 400, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["a"], "model": "x"}, 404, "model"),
        ("/rerank", {"query": "a", "documents": ["a" * 600]}, 400, "documents"),
        ("/score", {"text_2": "a"}, 400, "text_1"),
        ("/score", {"text_1": "a"}, 400, "text_2"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "a"}, 400, "queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_1"),
        ("/score", {"text_1": [], "text_2": "a"}, 400, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 5}, 400, "text_2"),
    ],
)
async def test_what_is_refused(path: str, fields: dict[str, Any], status: int, param: str) -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_inputs=4)))
    async with client(gateway.app) as http:
        reply = await http.post(path, json={"model": MODEL, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_what_has_no_direction_is_like_nothing() -> None:
    assert likeness([0.0, 0.0], [1.0, 0.0]) == 0.0

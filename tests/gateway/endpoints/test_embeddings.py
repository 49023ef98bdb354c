"""`/v1/embeddings` with OpenAI's own client: what it sends, and what it reads."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from penstock.engine.planning.embedding import Embedding
from penstock.engine.planning.params import Pooling
from penstock.engine.planning.request import FinishReason, Request
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from tests.gateway.endpoints.test_openai_client import connected
from tests.gateway.harness import MODEL, Gateway, client, make_tokenizer

pytestmark = pytest.mark.anyio
TOKENIZER = make_tokenizer()


def gateway_of(embedding: Embedding | None = None) -> Gateway:
    return Gateway(
        ServiceOptions(models=(MODEL,), embedding=embedding or Embedding(4), limits=Limits(max_inputs=3))
    )


def bring(gateway: Gateway, request: Request, *values: float) -> None:
    gateway.finish(request, reason=FinishReason.LENGTH, token_ids=[], embedding=list(values))


@pytest.mark.parametrize("how", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
async def test_several_texts_in_their_order(how: dict[str, Any]) -> None:
    gateway = gateway_of()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.embeddings.create(model=MODEL, input=["Hi", "there"], **how))
        first, second = await gateway.taken(), await gateway.taken()
        bring(gateway, second, 0.0, 2.0, 0.0, 0.0)
        bring(gateway, first, 3.0, 4.0, 0.0, 0.0)
        reply = await asking
    assert TOKENIZER.decode(first.prompt_token_ids, skip_special=False) == "<|bos|>Hi"
    assert first.pooling is Pooling.LAST
    assert (first.sampling.max_tokens, first.sampling.num_prompt_logprobs) == (0, None)
    assert [entry.index for entry in reply.data] == [0, 1]
    if how.get("encoding_format") == "base64":
        assert str(reply.data[1].embedding) == "AAAAAAAAgD8AAAAAAAAAAA=="
    else:
        assert reply.data[0].embedding == pytest.approx([0.6, 0.8, 0.0, 0.0])
        assert reply.data[1].embedding == [0.0, 1.0, 0.0, 0.0]
    num_tokens = len(first.prompt_token_ids) + len(second.prompt_token_ids)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (num_tokens, num_tokens)
    assert (reply.model, reply.object) == (MODEL, "list")


async def test_fewer_dimensions_are_the_first_ones_with_a_length_of_1() -> None:
    gateway = gateway_of()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.embeddings.create(model=MODEL, input="Hi", dimensions=2))
        bring(gateway, await gateway.taken(), 1.0, 1.0, 5.0, 5.0)
        assert (await asking).data[0].embedding == pytest.approx([math.sqrt(0.5)] * 2)


async def test_the_checkpoint_decides_what_is_pooled_and_whether_it_is_normalised() -> None:
    gateway = gateway_of(Embedding(4, Pooling.MEAN, is_normalised=False))
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.embeddings.create(model=MODEL, input=[[5, 6], [7]]))
        first, second = await gateway.taken(), await gateway.taken()
        assert (first.prompt_token_ids, second.prompt_token_ids) == ((5, 6), (7,))
        assert first.pooling is Pooling.MEAN
        bring(gateway, first, 3.0, 4.0, 0.0, 0.0)
        bring(gateway, second, 0.0, 0.0, 0.0, 0.0)
        data = (await asking).data
    assert [entry.embedding for entry in data] == [[3.0, 4.0, 0.0, 0.0], [0.0] * 4]


async def test_a_prompt_of_token_ids_is_one_text() -> None:
    gateway = gateway_of()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.embeddings.create(model=MODEL, input=[5, 6, 7]))
        request = await gateway.taken()
        bring(gateway, request, 1.0, 0.0, 0.0, 0.0)
        assert len((await asking).data) == 1
    assert request.prompt_token_ids == (5, 6, 7)


async def test_of_a_text_that_is_too_long_the_end_is_kept() -> None:
    """Programs of vLLM's ask for that by -1."""
    gateway = gateway_of()
    async with connected(gateway) as api:
        fields = {"truncate_prompt_tokens": -1}
        asking = asyncio.ensure_future(api.embeddings.create(model=MODEL, input=[7] * 600, extra_body=fields))
        request = await gateway.taken()
        bring(gateway, request, 1.0, 0.0, 0.0, 0.0)
        await asking
    assert len(request.prompt_token_ids) == 511


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"input": []}, "input", 400),
        ({"input": [""], "add_special_tokens": False}, "input", 400),
        ({"input": ["a"] * 4}, "input", 400),
        ({"input": [[]]}, "input", 400),
        ({"input": [10**6]}, "input", 400),
        ({"input": [5] * 600}, "input", 400),
        ({"input": "x" * 600}, "input", 400),
        ({"dimensions": 5}, "dimensions", 400),
        ({"dimensions": 0}, "dimensions", 400),
        ({"encoding_format": "int8"}, "encoding_format", 400),
        ({"stream": True}, "stream", 400),
        ({"model": "other"}, "model", 404),
    ],
)
async def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str, status: int) -> None:
    async with client(gateway_of().app) as api:
        reply = await api.post("/v1/embeddings", json={"model": MODEL, "input": "Hi", **fields})
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == param

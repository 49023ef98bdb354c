"""`/v1/responses/input_tokens` with OpenAI's own client counts what the same response is charged for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.endpoints.test_openai_client import connected
from tests.gateway.endpoints.test_tools import TOOL, gateway
from tests.gateway.harness import MODEL, Gateway, client

pytestmark = pytest.mark.anyio

FUNCTION: Any = {"type": "function", **TOOL["function"], "strict": True}


@pytest.mark.parametrize(
    "asked",
    [
        {"input": "Hi"},
        {"input": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well?"}]},
        {"input": "Hi", "instructions": "Be brief."},
        {"input": "Hi", "tools": [FUNCTION], "tool_choice": "auto", "parallel_tool_calls": True},
    ],
)
async def test_it_counts_what_the_response_has(asked: Any) -> None:
    here = gateway()
    async with connected(here) as api:
        counted = await api.responses.input_tokens.count(model=MODEL, **asked)
        made = await here.answering(api.responses.create(model=MODEL, **asked), "Yes.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)


async def test_it_leaves_out_what_the_response_does() -> None:
    here = Gateway()
    async with connected(here) as api:
        first = await here.answering(api.responses.create(model=MODEL, input="y" * 400), "Well?")
        asked: Any = {"model": MODEL, "input": "x" * 200, "previous_response_id": first.id}
        whole = await api.responses.input_tokens.count(**asked)
        counted = await api.responses.input_tokens.count(**asked, truncation="auto")
        made = await here.answering(api.responses.create(**asked, truncation="auto"), "Yes.")
    assert made.usage is not None
    assert whole.input_tokens > 512 > counted.input_tokens == made.usage.input_tokens


async def test_it_goes_on_from_what_there_is() -> None:
    here = Gateway()
    async with connected(here) as api:
        first = await here.answering(api.responses.create(model=MODEL, input="Hi"), "Well?")
        alone = await api.responses.input_tokens.count(model=MODEL, input="Yes")
        after = await api.responses.input_tokens.count(
            model=MODEL, input="Yes", previous_response_id=first.id
        )
        made = await here.answering(
            api.responses.create(model=MODEL, input="Yes", previous_response_id=first.id), "Yes."
        )
        assert made.usage is not None
        assert alone.input_tokens < after.input_tokens == made.usage.input_tokens
        conversation = await api.conversations.create(
            items=[{"type": "message", "role": "user", "content": "Hi"}]
        )
        inside = await api.responses.input_tokens.count(input="Yes", conversation=conversation.id)
        assert inside.input_tokens > alone.input_tokens
        whole = await api.responses.input_tokens.count(conversation=conversation.id, input=None)
        assert whole.input_tokens < inside.input_tokens
        items = await api.conversations.items.list(conversation.id)
        assert len(items.data) == 1, "nothing is added to it"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": 7}, 400, "input"),
        ({"input": "Hi", "model": "other"}, 404, "model"),
        ({"input": "Hi", "more": 1}, 400, "more"),
        ({"input": "Hi", "previous_response_id": "resp_x"}, 400, "previous_response_id"),
    ],
)
async def test_what_is_refused(body: Any, status: int, param: str) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post("/v1/responses/input_tokens", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)

"""The real anthropic package against a real port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from penstock.engine.planning.request import FinishReason
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, Tenant
from tests.gateway.harness import MODEL, Gateway, client, make_tokenizer, serving

pytestmark = pytest.mark.anyio

HI: Any = [{"role": "user", "content": "Hi"}]
ASKED: Any = {"model": MODEL, "messages": HI, "max_tokens": 9}
KEY = "a-key-of-16-chars"
_CACHED: Any = {"cache_control": {"type": "ephemeral"}}


@contextlib.asynccontextmanager
async def connected(gateway: Gateway, **options: Any) -> AsyncIterator[Any]:
    settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 20, **options}
    async with serving(gateway.app) as url, anthropic.AsyncAnthropic(base_url=url, **settings) as api:
        yield api


async def test_a_message() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        reply = await gateway.answering(api.messages.create(**ASKED), "Hel", "lo")
        counted = await api.messages.count_tokens(model=MODEL, messages=HI)
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in reply.content] == [("text", "Hello")]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (4, 2)
    assert usage.service_tier == "standard"
    assert reply.timings["lane"] == "standard"
    assert reply._request_id


async def test_the_events_of_a_stream_in_their_order() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.messages.create(**ASKED, stream=True))
        request = await gateway.taken()
        gateway.bring(request, "Hel")
        stream = aiter(await asking)
        events = [await anext(stream) for _ in range(3)]
        gateway.bring(request, "lo\u2028\x85")
        events.append(await anext(stream))  # it is there before the next step is
        gateway.finish(request, "!", reason=FinishReason.LENGTH)
        events += [event async for event in stream]
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = events[0].message, events[-2]
    assert (start.id[:4], start.content, start.stop_reason) == ("msg_", [], None)
    assert start.usage.input_tokens == len(request.prompt_token_ids)
    assert "".join(event.delta.text for event in events[2:5]) == "Hello\u2028\x85!"
    assert end.delta.stop_reason == "max_tokens"
    assert end.usage.input_tokens == len(request.prompt_token_ids) - 4
    assert (end.usage.cache_read_input_tokens, end.usage.output_tokens) == (4, 3)
    assert end.timings["ttft_ms"] == 30.0


async def test_pings_keep_a_stream_that_waits() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), timeouts=Timeouts(tick_s=3600)))
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.messages.create(**ASKED, stream=True))
        await gateway.queued()
        gateway.clock.now += 2
        gateway.service.tick(gateway.clock.now)
        stream = aiter(await asking)  # The status is there before any token is.
        assert (await anext(stream)).type == "message_start"
        request = await gateway.taken()
        gateway.clock.now += 6
        gateway.service.tick(gateway.clock.now)
        gateway.finish(request)
        assert [event.type async for event in stream] == ["message_delta", "message_stop"]


async def test_sampling_reaches_the_engine() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = api.messages.create(
            **ASKED,
            stop_sequences=["x", "y"],
            metadata={"user_id": "ann"},
            service_tier="standard_only",
            system="Be brief.",
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 40},
        )
        task = asyncio.ensure_future(asking)
        request = await gateway.taken()
        gateway.answer(request, "ok")
        await task
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 40)
    assert (params.stop, params.max_tokens) == (("x", "y"), 9)
    assert request.lane == Lane.STANDARD
    prompt = gateway.prompt_of(request)
    assert prompt == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


async def test_the_context_bounds_what_is_asked_for() -> None:
    """Clients of large models ask for tens of thousands of tokens, whatever the prompt."""
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.messages.create(model=MODEL, messages=HI, max_tokens=32_000))
        request = await gateway.taken()
        assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)
        gateway.finish(request, "x", reason=FinishReason.LENGTH)
        assert (await asking).stop_reason == "model_context_window_exceeded"
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: 5\d\d tokens > 511 maximum"
        ):
            await api.messages.create(
                model=MODEL, messages=[{"role": "user", "content": "x" * 512}], max_tokens=1
            )


async def test_an_empty_answer_has_no_block() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.messages.create(**ASKED))
        gateway.finish(await gateway.taken(), token_ids=[])
        assert (await asking).content == []


async def test_errors_are_the_right_exceptions() -> None:
    clients = {digest_of(KEY): Client(Tenant(name="ours"), Quota(max_streams=1))}
    full = {Lane.STANDARD: replace(DEFAULT_POLICIES[Lane.STANDARD], max_requests=1)}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=clients), bounds=full)
    async with connected(gateway, api_key=KEY) as api:
        create = api.messages.create
        with pytest.raises(anthropic.AuthenticationError) as unknown_key:
            await api.with_options(api_key="wrong").messages.create(**ASKED)
        assert error_of(unknown_key)["type"] == "authentication_error"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await create(model="other", messages=HI, max_tokens=9)
        assert error_of(unknown)["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="temperature") as wrong:
            await create(**ASKED, extra_body={"temperature": 1.5})
        assert error_of(wrong)["type"] == "invalid_request_error"
        assert wrong.value.body["request_id"] == wrong.value.response.headers["request-id"]  # type: ignore[index]
        waiting = asyncio.ensure_future(create(**ASKED))
        await gateway.queued()
        with pytest.raises(anthropic.InternalServerError) as refused:
            await create(**ASKED, stream=True)
        assert (refused.value.status_code, error_of(refused)["type"]) == (529, "overloaded_error")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        request = await gateway.taken()
        with pytest.raises(anthropic.RateLimitError) as limited:
            await create(**ASKED)
        assert error_of(limited)["type"] == "rate_limit_error"
        gateway.answer(request, "ok")
        await waiting


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "clock"}])
async def test_a_call_cannot_be_asked_for_without_tools(choice: Any) -> None:
    async with connected(Gateway()) as api:
        for asking in (
            api.messages.create(**ASKED, tool_choice=choice),
            api.messages.count_tokens(model=MODEL, messages=HI, tool_choice=choice),
        ):
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                await asking


def error_of(raised: Any) -> dict[str, str]:
    found = raised.value.body["error"]
    assert isinstance(found, dict)
    return found


TOOL_TEMPLATE = (
    "{%- if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{%- for message in messages %}"
    "{{- '<|' ~ message.role ~ '|>' ~ message.content }}"
    "{%- for call in message.tool_calls %}{{ '[' ~ call.id ~ call.function.arguments.zone ~ ']' }}{% endfor %}"
    "{{- message.tool_call_id }}{{ '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% if enable_thinking %}<think></think>{% endif %}{% endif %}"
)
CLOCK: Any = {
    "name": "clock",
    "description": "Says what time it is.",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'


async def test_a_turn_of_claude_code() -> None:
    """As it sends it: tools, the results of the last ones, thoughts, cache marks, and fields of its own."""
    history: Any = [
        {"role": "user", "content": [{"type": "text", "text": "What time is it?", **_CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A clock.", "signature": ""},
                {"type": "tool_use", "id": "call_1", "name": "clock", "input": {"zone": "UTC"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "Noon."}],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    gateway = Gateway(tokenizer=make_tokenizer(TOOL_TEMPLATE))
    async with connected(gateway) as api:

        async def read() -> Any:
            async with api.messages.stream(
                model=MODEL,
                max_tokens=32_000,
                system=[{"type": "text", "text": "Be brief.", **_CACHED}],
                messages=history,
                tools=[CLOCK],
                thinking={"type": "enabled", "budget_tokens": 1024},
                metadata={"user_id": "ann"},
                extra_body={"context_management": {"edits": []}},
            ) as stream:
                return await stream.get_final_message()

        asking = asyncio.ensure_future(read())
        request = await gateway.taken()
        for text in ("<think>The clo", "ck again.</think>I look.", CALL[:30], CALL[30:]):
            gateway.bring(request, text)
        gateway.finish(request)
        message = await asking
    prompt = gateway.prompt_of(request)
    assert prompt.partition("<|system|>")[2] == (
        "Be brief.<|end|><|user|>What time is it?<|end|><|assistant|>[call_1UTC]<|end|>"
        "<|tool|>Noon.call_1<|end|><|user|>And now?<|end|><|assistant|><think></think>"
    )
    thought, said, called = message.content
    assert (thought.type, thought.thinking) == ("thinking", "The clock again.")
    assert (said.type, said.text) == ("text", "I look.")
    assert (called.type, called.name, called.input) == ("tool_use", "clock", {"zone": "UTC"})
    assert message.stop_reason == "tool_use"


async def test_an_answer_that_was_begun_is_continued() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        begun: Any = [*HI, {"role": "assistant", "content": "Hel"}]
        asking = asyncio.ensure_future(api.messages.create(model=MODEL, messages=begun, max_tokens=9))
        request = await gateway.taken()
        gateway.answer(request, "lo")
        assert (await asking).content[0].text == "lo"
    prompt = gateway.prompt_of(request)
    assert prompt.endswith("<|assistant|>Hel")


async def test_an_error_in_a_stream_is_raised() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.messages.create(**ASKED, stream=True))
        request = await gateway.taken()
        gateway.bring(request, "x")
        stream = await asking
        gateway.finish(request, reason=FinishReason.FAILED, error="logits were not finite")
        with pytest.raises(anthropic.APIStatusError, match="logits were not finite") as failed:
            async for _ in stream:
                pass
    assert error_of(failed)["type"] == "api_error"


async def test_who_leaves_is_not_answered() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.messages.create(**ASKED, stream=True))
        request = await gateway.taken()
        gateway.bring(request, "x")
        await (await asking).close()
        await gateway.left()
    assert gateway.engine.cancelled == [request.request_id]


async def test_what_is_refused_before_the_route_is_spelt_the_same_way() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        large = await http.post("/v1/messages", content=b" " * (5 * 2**20))
        other = await http.get("/v1/messages")
        plain = await http.post("/v1/messages", content="{}", headers={"content-type": "text/plain"})
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    assert (other.status_code, other.json()["type"]) == (405, "error")
    assert (plain.status_code, plain.json()["error"]["type"]) == (415, "invalid_request_error")


async def test_models() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL, "org/alias"), created=7))
    async with connected(gateway) as api:
        assert [model.id async for model in api.models.list(limit=1)] == [MODEL, "org/alias"]
        before = await api.models.list(before_id="org/alias")
        assert [model.id for model in before.data] == [MODEL]
        model = await api.models.retrieve("org/alias")
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await api.models.retrieve("other")
        with pytest.raises(anthropic.BadRequestError, match="after_id"):
            await api.models.list(after_id="other")
    assert (model.id, model.display_name, model.lifecycle) == ("org/alias", "org/alias", "active")
    assert (model.created_at.timestamp(), model.max_input_tokens) == (7, 512)
    refused: Any = unknown.value.body
    assert (refused["type"], refused["error"]["type"]) == ("error", "not_found_error")
    async with client(gateway.app) as http:
        assert (await http.get("/v1/models/other")).json()["error"]["param"] == "model"


async def test_extras_of_blocks_are_taken_and_named() -> None:
    gateway = Gateway()
    block = {"type": "text", "text": "Hi", "trace": "x", **_CACHED}
    messages: Any = [{"role": "user", "content": [block], "id": "msg_1"}]
    system: Any = [{"type": "text", "text": "Be brief.", "origin": "y"}]
    async with connected(gateway) as api:
        asking = api.messages.with_raw_response.create(
            model=MODEL, messages=messages, system=system, max_tokens=9
        )
        reply = await gateway.answering(asking, "Hello")
    named = reply.headers["x-penstock-ignored"].split(", ")
    assert named == ["messages[].content[].trace", "messages[].id", "system[].origin"]
    assert (await reply.parse()).content[0].text == "Hello"

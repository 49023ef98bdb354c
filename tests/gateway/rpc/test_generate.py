"""Penstock's own service: text as it comes, and every way in which a call can end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from penstock.engine.engine import EngineState
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.endpoints.intake import Intake
from penstock.gateway.limits import Limits
from penstock.gateway.reply.generation import MAX_PENDING_BYTES
from penstock.gateway.rpc.server import RpcServer
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.priority.lanes import Lane, LanePolicy, Tenant
from tests.gateway.harness import MODEL, Gateway, make_tokenizer
from tests.gateway.rpc.rpc_client import PENSTOCK, connected, error_of, stubs

pytestmark = pytest.mark.anyio

KEY = "the-key-of-ann-0123456789"
HI = [{"role": "user", "content": "Hi"}]


def request(**fields: Any) -> Any:
    return PENSTOCK.GenerateRequest(**(fields or {"prompt": "Hi"}))


async def test_a_prompt_is_continued_as_it_is_sent() -> None:
    gateway = Gateway()
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(
            request(
                prompt="Hi", temperature=0, max_tokens=7, top_k=3, seed=5, stop=["x"], service_tier="flex"
            )
        )
        asked = await gateway.taken()
        gateway.bring(asked, "one ")
        assert (await call.read()).text == "one "
        gateway.bring(asked, "two")
        assert (await call.read()).text == "two"
        gateway.finish(asked)
        last = await call.read()
        assert await call.read() == grpc.aio.EOF
        sampling = asked.sampling
        assert dict(await call.initial_metadata())["x-request-id"]
    assert gateway.prompt_of(asked) == "<|bos|>Hi"
    assert (sampling.temperature, sampling.max_tokens, sampling.top_k, sampling.seed) == (0, 7, 3, 5)
    assert asked.lane == Lane.BATCH
    assert (last.finish_reason, last.text) == ("stop", "")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 3, 4)
    assert (last.timings.queue_ms, last.timings.ttft_ms) == (10.0, 30.0)
    assert last.timings.lane == "batch"
    assert last.timings.HasField("tpot_ms")
    assert not last.timings.HasField("promised_ttft_ms")
    await gateway.left()


async def test_a_conversation_is_answered_by_the_chat_template() -> None:
    gateway = Gateway()
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(
            request(messages=[{"role": "system", "content": "Be kind"}, *HI], model=MODEL)
        )
        asked = await gateway.taken()
        gateway.finish(asked, "Hello")
        replies = [reply async for reply in call]
    assert gateway.prompt_of(asked) == "<|bos|><|system|>Be kind<|end|><|user|>Hi<|end|><|assistant|>"
    assert [reply.text for reply in replies] == ["Hello", ""]
    assert asked.lane == Lane.STANDARD
    assert asked.tried_lane == Lane.INTERACTIVE


async def test_reasoning_is_apart_from_the_answer() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}<think>"
    gateway = Gateway(tokenizer=make_tokenizer(template + "{# </think> #}"))
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(request(messages=HI))
        gateway.finish(await gateway.taken(), "Hm.</think>Yes")
        reply = await call.read()
    assert (reply.reasoning, reply.text) == ("Hm.", "Yes")


BAD: dict[str, dict[str, Any]] = {
    "temperature": {"prompt": "Hi", "temperature": -1},
    "max_tokens": {"prompt": "Hi", "max_tokens": -5},
    "messages[0].role": {"messages": [{"role": "nobody", "content": "Hi"}]},
    "reasoning_effort": {"prompt": "Hi", "reasoning_effort": "low"},
    "service_tier": {"prompt": "Hi", "service_tier": "best"},
    "json_schema": {"prompt": "Hi", "json_schema": "{"},
    "prompt": {"prompt": "Hi", "messages": HI},
}


@pytest.mark.parametrize("field", BAD)
async def test_a_bad_field_is_named(field: str) -> None:
    async with connected(Gateway()) as (_, penstock):
        error = await error_of(penstock.Generate(request(**BAD[field])))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.details()


async def test_a_request_without_prompt_or_messages_is_told_so() -> None:
    async with connected(Gateway()) as (_, penstock):
        error = await error_of(penstock.Generate(request(seed=1)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "'prompt'" in error.details()


async def test_another_model_is_not_found() -> None:
    async with connected(Gateway()) as (_, penstock):
        error = await error_of(penstock.Generate(request(prompt="Hi", model="other")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert ("penstock-error-code", "model_not_found") in tuple(error.trailing_metadata())


async def test_more_messages_than_a_chat_may_have_are_refused() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_messages=2)))
    async with connected(gateway) as (_, penstock):
        error = await error_of(penstock.Generate(request(messages=HI * 3)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "'messages' may be at most 2."


async def test_more_metadata_than_headers_are_refused() -> None:
    async with connected(Gateway()) as (_, penstock):
        metadata = tuple((f"name-{i}", "x") for i in range(Limits().max_headers + 1))
        error = await error_of(penstock.Generate(request(), metadata=metadata))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "too many" in error.details()


async def test_a_long_name_does_not_make_the_status_too_long() -> None:
    async with connected(Gateway()) as (_, penstock):
        error = await error_of(penstock.Generate(request(prompt="Hi", model="x" * 100_000)))
    assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_keys_come_as_metadata() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients={digest_of(KEY): Tenant(name="ann")}))
    async with connected(gateway) as (_, penstock):
        for metadata in ((), (("authorization", "Bearer wrong"),), (("api-key", "wrong"),)):
            error = await error_of(penstock.Generate(request(), metadata=metadata))
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        for metadata in ((("authorization", f"Bearer {KEY}"),), (("api-key", KEY),), (("x-api-key", KEY),)):
            call = penstock.Generate(request(), metadata=metadata)
            asked = await gateway.taken()
            assert asked.tenant == "ann"
            gateway.finish(asked)
            assert (await call.read()).finish_reason == "stop"


async def test_a_tier_above_the_key_is_not_permitted() -> None:
    tenant = Tenant(name="ann", top_lane=Lane.BATCH)
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients={digest_of(KEY): tenant}))
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(request(prompt="Hi", service_tier="priority"), metadata=(("api-key", KEY),))
        error = await error_of(call)
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_a_quota_that_is_used_up_is_said_with_when_to_come_back() -> None:
    client = Client(Tenant(name="ann"), Quota(requests_per_minute=1))
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients={digest_of(KEY): client}))
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(request(), metadata=(("api-key", KEY),))
        gateway.finish(await gateway.taken())
        assert (await call.read()).finish_reason == "stop"
        assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
        error = await error_of(penstock.Generate(request(), metadata=(("api-key", KEY),)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.trailing_metadata())["retry-after-ms"]) > 0


async def test_a_full_lane_is_unavailable() -> None:
    full = LanePolicy(max_requests=1)
    gateway = Gateway(bounds={Lane.STANDARD: full})
    async with connected(gateway) as (_, penstock):
        first = penstock.Generate(request(prompt="Hi", service_tier="default"))
        await gateway.queued()
        error = await error_of(penstock.Generate(request(prompt="Hi", service_tier="default")))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "retry-after-ms" in dict(error.trailing_metadata())
        first.cancel()
        await gateway.left()


async def test_a_message_beyond_the_body_limit_is_refused() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_body_bytes=1000)))
    async with connected(gateway) as (_, penstock):
        error = await error_of(penstock.Generate(request(prompt="a" * 1001)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1000" in error.details()


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_cancelled_call_takes_its_request_along(is_begun: bool) -> None:
    gateway = Gateway()
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(request())
        asked = await gateway.taken()
        if is_begun:
            gateway.bring(asked, "one")
            assert (await call.read()).text == "one"
        call.cancel()
        await gateway.left()
    assert gateway.engine.cancelled == [asked.request_id]


async def test_a_call_ends_with_its_deadline() -> None:
    gateway = Gateway()
    async with connected(gateway) as (_, penstock):
        error = await error_of(penstock.Generate(request(), timeout=0.3))
        await gateway.left()
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert sum(gateway.queue.depths().values()) == 0


async def test_a_drain_refuses_new_calls_and_lets_running_ones_end() -> None:
    gateway = Gateway()
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(request())
        asked = await gateway.taken()
        gateway.bring(asked, "one")
        assert (await call.read()).text == "one"
        gateway.service.begin_drain()
        error = await error_of(penstock.Generate(request()))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in error.details()
        gateway.finish(asked, "two")
        assert (await call.read()).text == "two"
        assert (await call.read()).finish_reason == "stop"


async def test_what_still_runs_at_the_end_is_told() -> None:
    gateway = Gateway()
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(request())
        asked = await gateway.taken()
        gateway.bring(asked, "one")
        assert (await call.read()).text == "one"
        gateway.bring(asked, "two")
        gateway.service.dispatch.fail_all()
        assert (await call.read()).text == "two"
        error = await error_of(call)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in error.details()
    assert gateway.engine.cancelled == [asked.request_id]


async def test_a_server_that_stops_tells_its_callers() -> None:
    gateway = Gateway()
    server = RpcServer(gateway.service, Intake(gateway.service))
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    async with grpc.aio.insecure_channel(address) as channel:
        _, penstock = stubs(channel)
        call = penstock.Generate(request())
        await gateway.taken()
        ending = asyncio.ensure_future(error_of(call))
        await server.stop()
        error = await ending
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in error.details()


async def test_a_fault_is_told_without_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    monkeypatch.setattr(gateway.service.dispatch, "submit", lambda _: 1 / 0)
    async with connected(gateway) as (_, penstock):
        error = await error_of(penstock.Generate(request()))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "ZeroDivision" not in error.details()


async def test_an_engine_that_is_lost_is_unavailable() -> None:
    gateway = Gateway()
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(request())
        await gateway.taken()
        gateway.engine.state = EngineState.FAILED
        gateway.service.tick(gateway.clock())
        error = await error_of(call)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "The engine stopped." in error.details()


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_client_is_cut_off_whatever_is_being_sent(num_turns: int) -> None:
    gateway = Gateway()
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(request())
        asked = await gateway.taken()
        gateway.bring(asked, "x")
        for _ in range(num_turns):
            await asyncio.sleep(0)
        gateway.bring(asked, "x" * MAX_PENDING_BYTES)
        gateway.bring(asked, "x")
        await gateway.left()
        error = await error_of(call)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    gateway = Gateway()
    async with connected(gateway) as (_, penstock):
        call = penstock.Generate(request())
        asked = await gateway.taken()
        piece = "x" * (MAX_PENDING_BYTES // 8)
        while asked.request_id not in gateway.engine.cancelled:
            gateway.bring(asked, piece)
            await asyncio.sleep(0)
        await gateway.left()
        error = await error_of(call)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert gateway.service.metrics.slow_readers.value == 1

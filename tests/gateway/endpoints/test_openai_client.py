"""The real openai package against a real port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from penstock.engine.planning.request import FinishReason
from penstock.gateway.access.keys import digest_of
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, Tenant
from tests.gateway.harness import MODEL, Gateway, serving

pytestmark = pytest.mark.anyio

HI: Any = [{"role": "user", "content": "Hi"}]


@contextlib.asynccontextmanager
async def connected(gateway: Gateway, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(gateway.app) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=options.pop("api_key", "none"), max_retries=0, timeout=20, **options
        ) as api,
    ):
        yield api


@pytest.mark.parametrize("resumable", [False, True])
async def test_every_reply_and_chunk_has_the_fingerprint_of_what_made_it(resumable: bool) -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), system_fingerprint="fp_1"))
    options: Any = {"include_obfuscation": True, "resumable": resumable}
    async with connected(gateway) as api:
        for create, asked in (
            (api.chat.completions.with_raw_response.create, {"messages": HI}),
            (api.completions.with_raw_response.create, {"prompt": "Hi"}),
        ):
            raw = await gateway.answering(create(model=MODEL, **asked), "Hello")
            assert raw.parse().system_fingerprint == "fp_1"
            asking = create(model=MODEL, **asked, stream=True, stream_options=options)
            raw = await gateway.answering(asking, "Hel", "lo")
            assert raw.headers["x-penstock-ignored"] == "stream_options.include_obfuscation"
            assert {chunk.system_fingerprint async for chunk in raw.parse()} == {"fp_1"}


async def test_a_streamed_chat_arrives_token_by_token() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(
            api.chat.completions.create(
                model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
            )
        )
        request = await gateway.taken()
        gateway.bring(request, "Hel")
        stream = await asking
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].delta.role == "assistant"
        # The client has this piece before the engine brings the next.
        assert (await anext(chunks)).choices[0].delta.content == "Hel"
        gateway.bring(request, "lo")
        assert (await anext(chunks)).choices[0].delta.content == "lo"
        gateway.finish(request, reason=FinishReason.LENGTH)
        last = await anext(chunks)
        assert last.choices[0].finish_reason == "length"
        assert last.model_extra is not None
        assert last.model_extra["timings"]["ttft_ms"] == 30.0
        usage = (await anext(chunks)).usage
        assert usage is not None
        assert usage.completion_tokens == 3
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)


async def test_keepalives_do_not_disturb_the_client() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), timeouts=Timeouts(tick_s=3600)))
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.chat.completions.create(model=MODEL, messages=HI, stream=True))
        await gateway.queued()
        gateway.clock.now += 2
        gateway.service.tick(gateway.clock.now)
        stream = await asking  # The status is there before any token is.
        request = await gateway.taken()
        for text in "abc":
            gateway.clock.now += 6
            gateway.service.tick(gateway.clock.now)
            gateway.bring(request, text)
        gateway.finish(request)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "abc"


async def test_sampling_reaches_the_engine() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = api.chat.completions.create(
            model=MODEL,
            messages=HI,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            logit_bias={"7": 5},
            seed=-3,
            stop=["x", "y"],
            max_completion_tokens=9,
            service_tier="flex",
            extra_body={
                "top_k": 40,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
                "min_tokens": 2,
                "ignore_eos": True,
                "stop_token_ids": [3],
            },
        )
        task = asyncio.ensure_future(asking)
        request = await gateway.taken()
        gateway.answer(request, "ok")
        reply = await task
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert params.logit_bias == {7: 5.0}
    assert params.seed == -3
    assert params.stop == ("x", "y")
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (9, 2, True)
    assert params.stop_token_ids == {3}
    assert request.lane == Lane.BATCH
    assert reply.service_tier == "flex"


async def test_completions_of_several_prompts() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.completions.create(model=MODEL, prompt=["a", "b"], n=2))
        first, second = await gateway.taken(), await gateway.taken()
        gateway.answer(second, "of b")
        gateway.answer(first, "of a")
        reply = await asking
    assert [(c.index, c.text) for c in reply.choices] == [(0, "of a"), (1, "of a"), (2, "of b"), (3, "of b")]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 4
    assert reply.usage.completion_tokens == 4


async def test_errors_are_the_right_exceptions() -> None:
    keys = {digest_of("a-key-of-16-chars"): Tenant(name="ours")}
    full = {Lane.STANDARD: replace(DEFAULT_POLICIES[Lane.STANDARD], max_requests=1)}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=keys), bounds=full)
    async with connected(gateway, api_key="a-key-of-16-chars") as api:
        create = api.chat.completions.create
        with pytest.raises(openai.AuthenticationError):
            await api.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError) as unknown:
            await create(model="other", messages=HI)
        assert unknown.value.param == "model"
        with pytest.raises(openai.BadRequestError) as wrong:
            await create(model=MODEL, messages=HI, temperature=101)
        assert wrong.value.param == "temperature"
        waiting = asyncio.ensure_future(create(model=MODEL, messages=HI))
        await gateway.queued()
        with pytest.raises(openai.InternalServerError) as refused:
            await create(model=MODEL, messages=HI, stream=True)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1
        gateway.answer(await gateway.taken(), "ok")
        await waiting


async def test_an_error_in_a_stream_is_raised() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.chat.completions.create(model=MODEL, messages=HI, stream=True))
        request = await gateway.taken()
        gateway.bring(request, "x")
        stream = await asking
        gateway.finish(request, reason=FinishReason.FAILED, error="logits were not finite")
        with pytest.raises(openai.APIError, match="logits were not finite"):
            async for _ in stream:
                pass


async def test_models() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL, "org/alias"), created=7))
    async with connected(gateway) as api:
        assert [model.id async for model in api.models.list()] == [MODEL, "org/alias"]
        model = await api.models.retrieve("org/alias")
    assert (model.id, model.created, model.owned_by) == ("org/alias", 7, "penstock")

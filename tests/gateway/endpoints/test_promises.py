"""Promises over HTTP: what the forecast lets in, what it refuses, and what the client is told of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.planning.prefix_index import prompt_hashes
from penstock.engine.planning.request_queue import StepLoad
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from tests.gateway.harness import MODEL, Gateway, chat_body, client

pytestmark = pytest.mark.anyio

PROMISE_S = 1.0
LONG = "a prompt of many letters " * 3


def slow_gateway(seconds_per_token: float) -> Gateway:
    """A server whose steps were measured, with an interactive promise of a second."""
    bounds = {Lane.INTERACTIVE: replace(DEFAULT_POLICIES[Lane.INTERACTIVE], ttft_s=PROMISE_S)}
    gateway = Gateway(ServiceOptions(models=(MODEL,), promises={Lane.INTERACTIVE: PROMISE_S}), bounds=bounds)
    for number in range(40):
        num_prefill = 16 * (1 + number % 4)
        gateway.queue.observe(
            StepLoad(
                num_prefill_tokens=num_prefill,
                num_decode_tokens=number % 3,
                num_context_tokens=100,
                duration_s=0.01 + num_prefill * seconds_per_token,
                num_running=1,
                max_num_seqs=16,
                max_batch_tokens=512,
                num_free_tokens=100_000,
            )
        )
    return gateway


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"model": MODEL, "prompt": LONG}),
        ("/v1/responses", {"model": MODEL, "input": LONG}),
        ("/v1/embeddings", {"model": MODEL, "input": LONG}),
    ],
)
async def test_a_prompt_is_hashed_before_it_is_queued(path: str, body: dict[str, object]) -> None:
    """The event loop and the step thread only compare the hashes, which a long prompt has in a thread."""
    gateway = Gateway()
    async with client(gateway.app) as http:
        reply = asyncio.create_task(http.post(path, json=body))
        request = await gateway.taken()
        gateway.service.dispatch.fail_all()
        await reply
    assert len(request.block_hashes) == (len(request.prompt_token_ids) - 1) // 16 > 0
    assert request.block_hashes == prompt_hashes(request.prompt_token_ids, 16, request.salt)


def urgent(text: str) -> dict[str, object]:
    body = chat_body(service_tier="priority")
    body["messages"] = [{"role": "user", "content": text}]
    return body


async def test_a_request_that_can_be_kept_is_let_in_and_told_when() -> None:
    gateway = slow_gateway(0.0005)
    async with client(gateway.app) as http:
        reply = asyncio.create_task(http.post("/v1/chat/completions", json=urgent("short")))
        gateway.finish(await gateway.taken(), "done")
        timings = (await reply).json()["timings"]
    assert 0 < timings["predicted_ttft_ms"] < PROMISE_S * 1000
    assert timings["lane"] == "interactive"


async def test_what_cannot_be_kept_is_refused_before_the_engine_sees_it() -> None:
    gateway = slow_gateway(0.002)
    async with client(gateway.app) as http:
        first = asyncio.create_task(http.post("/v1/chat/completions", json=urgent("a" * 300)))
        await gateway.queued()
        refused = await http.post("/v1/chat/completions", json=urgent("b" * 300))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "promise_out_of_reach"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert 1000 <= int(refused.headers["retry-after-ms"]) <= 60_000
        assert sum(gateway.queue.depths().values()) == 1
        gateway.finish(await gateway.taken(), "done")
        assert (await first).status_code == 200


async def test_the_batch_lane_refuses_nobody_for_being_late() -> None:
    gateway = slow_gateway(0.002)
    async with client(gateway.app) as http:
        bodies = [{**urgent("c" * 300), "service_tier": "flex"} for _ in range(3)]
        replies = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for body in bodies]
        for _ in bodies:
            gateway.finish(await gateway.taken(), "done")
        assert [(await reply).status_code for reply in replies] == [200, 200, 200]


async def test_the_metrics_say_how_promises_and_forecasts_came_out() -> None:
    gateway = slow_gateway(0.0005)
    async with client(gateway.app) as http:
        reply = asyncio.create_task(http.post("/v1/chat/completions", json=urgent("short")))
        gateway.finish(await gateway.taken(), "done")
        await reply
        text = (await http.get("/metrics")).text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["penstock_promises_total", "interactive", "kept"] == 1
    assert samples["penstock_ttft_forecast_ratio_count", "interactive"] == 1
    assert samples["penstock_promise_use_ratio_count", "interactive"] == 1
    assert 0 < samples["penstock_promise_use_ratio_sum", "interactive"] < 1
    assert samples["penstock_step_model_seconds", "beta_s"] == pytest.approx(0.0005, rel=0.1)

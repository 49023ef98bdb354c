"""The operator's side: keys, metrics, request ids, origins, the page."""

from __future__ import annotations

import asyncio
import time
from importlib import metadata

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.planning.request import FinishReason
from penstock.engine.planning.timings import DraftCount
from penstock.gateway.access.keys import Access, digest_of
from penstock.gateway.endpoints.models import reasoning_of
from penstock.gateway.errors import ApiError
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Lane, Tenant
from tests.gateway.harness import MODEL, Gateway, chat_body, client, make_timings, settled, step_report
from tests.gateway.sessions.recordings.fakes import make_request

pytestmark = pytest.mark.anyio

ANN, BOB = Tenant(name="ann", top_lane=Lane.STANDARD), Tenant(name="bob", default_lane=Lane.BATCH)
KEYS = {digest_of("key-of-ann"): ANN, digest_of("key-of-bob"): BOB}


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic key-of-ann", "key-of-ann", "Bearer key-of-an", "Bearer \udcff"],
)
def test_what_is_no_key_is_a_401(header: str | None) -> None:
    with pytest.raises(ApiError) as error:
        Access(KEYS).tenant(header)
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")
    assert "key-of" not in error.value.message


def test_a_key_is_looked_up_by_a_hash_that_nobody_can_foresee() -> None:
    one, other = Access(KEYS), Access(KEYS)
    assert not one._clients.keys() & other._clients.keys()
    assert not one._clients.keys() & KEYS.keys()


def test_many_keys_cost_no_more_than_few() -> None:
    def seconds(num_keys: int) -> float:
        access = Access({digest_of(f"key-{i}"): Tenant(name=f"tenant-{i}") for i in range(num_keys)})

        def ask() -> float:
            began_s = time.thread_time()
            for _ in range(100):
                assert access.tenant("Bearer key-1").name == "tenant-1"
                assert access.client_of("tenant-1").tenant.name == "tenant-1"
            return time.thread_time() - began_s

        return min(ask() for _ in range(5))

    assert seconds(20_000) < 20 * seconds(2)


async def test_a_model_names_the_lanes_that_the_key_may_use() -> None:
    async with client(Gateway(ServiceOptions(models=(MODEL,), clients=KEYS)).app) as http:
        lanes = []
        for key in ("key-of-ann", "key-of-bob"):
            listed = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            lanes.append(set(listed.json()["data"][0]["lanes"]))
    assert lanes == [{"standard", "batch"}, {"interactive", "standard", "batch"}]


@pytest.mark.parametrize(
    ("variables", "reasoning"),
    [
        ({"messages"}, None),
        ({"messages", "enable_thinking"}, "switch"),
        ({"thinking"}, "switch"),
        ({"reasoning_effort", "enable_thinking"}, "effort"),
    ],
)
def test_a_model_says_what_sets_its_reasoning(variables: set[str], reasoning: str | None) -> None:
    assert reasoning_of(variables) == reasoning


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/events"),
        ("GET", "/v1/events?detail=kv"),
    ],
)
async def test_what_needs_a_key(method: str, path: str) -> None:
    async with client(Gateway(ServiceOptions(models=(MODEL,), clients=KEYS)).app) as http:
        response = await http.request(method, path, json={})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/load", "/version"])
async def test_what_needs_no_key(path: str) -> None:
    async with client(Gateway(ServiceOptions(models=(MODEL,), clients=KEYS)).app) as http:
        assert (await http.get(path)).status_code == 200
        assert (await http.head(path)).content == b""


async def test_load_is_what_waits_and_runs() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        await gateway.queued()
        assert (await http.get("/load")).json() == {"server_load": 1}
        gateway.answer(await gateway.taken(), "ok")
        await asking
        assert (await http.get("/load")).json() == {"server_load": 0}


async def test_the_version_is_the_packages() -> None:
    async with client(Gateway().app) as http:
        assert (await http.get("/version")).json() == {"version": metadata.version("penstock")}


async def test_the_same_request_id_twice_is_two_requests() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        headers = {"x-request-id": "same"}
        body = chat_body()
        asking = [
            asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
            for _ in range(2)
        ]
        first, second = await gateway.taken(), await gateway.taken()
        gateway.answer(second, "second")
        gateway.answer(first, "first")
        texts = [(await task).json()["choices"][0]["message"]["content"] for task in asking]
    assert texts == ["first", "second"]


async def test_origins_are_closed_unless_named() -> None:
    async with client(Gateway().app) as http:
        reply = await http.get("/health", headers={"origin": "https://ours.example"})
    assert "access-control-allow-origin" not in reply.headers


def samples(text: str) -> dict[str, float]:
    """Value by name and labels."""
    return {
        sample.name
        + "".join(f" {k}={v}" for k, v in sorted(sample.labels.items()) if k != "le"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_tell_how_long_tokens_took_and_who_waits() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        await gateway.answering(http.post("/v1/chat/completions", json=chat_body()), "a", "b")
        failing = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        gateway.finish(await gateway.taken(), reason=FinishReason.FAILED, error="x")
        await failing
        waiting = asyncio.create_task(
            http.post("/v1/chat/completions", json=chat_body(service_tier="priority"))
        )
        await gateway.queued()
        found = samples((await http.get("/metrics")).text)
        gateway.answer(await gateway.taken(), "x")
        await waiting
    assert found["penstock_time_to_first_token_seconds_count lane=standard"] == 1
    assert found["penstock_time_to_first_token_seconds_sum lane=standard"] == pytest.approx(0.030)
    assert found["penstock_time_per_output_token_seconds_sum lane=standard"] == pytest.approx(0.020)
    assert found["penstock_inter_token_seconds_count"] == 2
    assert found["penstock_queued_requests lane=interactive"] == 1


async def test_cancelled_and_refused_are_counted_once() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(n=2)))
        request = await gateway.taken()
        asking.cancel()
        await settled()
        for index in range(2):
            gateway.finish(request, "", index, FinishReason.CANCELLED)
        found = samples((await http.get("/metrics")).text)
    assert found["penstock_choices_total finish_reason=cancelled lane=standard"] == 2


async def test_vllms_names_say_the_same() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), metrics_compat="vllm"))
    gateway.service.deliver(
        step_report(num_running=3, num_waiting=1, num_preemptions=2, num_prefix_hit_tokens=5)
    )
    gateway.service.metrics.note_finished(Lane.STANDARD, FinishReason.STOP, make_timings(make_request()))
    async with client(gateway.app) as http:
        found = samples((await http.get("/metrics")).text)
    label = f" engine=0 model_name={MODEL}"
    assert found[f"vllm:num_requests_running{label}"] == found["penstock_running_sequences"] == 3
    assert found[f"vllm:num_requests_waiting{label}"] == 1
    assert found[f"vllm:kv_cache_usage_perc{label}"] == 0.25
    assert found[f"vllm:num_preemptions_total{label}"] == 2
    assert found[f"vllm:prefix_cache_hits_total{label}"] == 5
    assert found[f"vllm:cache_config_info block_size=16{label} num_gpu_blocks=32"] == 1
    assert f"vllm:iteration_tokens_total_count{label}" in found
    assert (
        found[f"vllm:request_success_total engine=0 finished_reason=stop lane=standard model_name={MODEL}"]
        == 1
    )
    for part, seconds in (("queue", 0.01), ("prefill", 0.02), ("decode", 0.04), ("inference", 0.06)):
        name = f"vllm:request_{part}_time_seconds_sum engine=0 lane=standard model_name={MODEL}"
        assert found[name] == pytest.approx(seconds)


async def test_vllms_names_tell_of_speculation() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), metrics_compat="vllm"))
    drafts = {"draft": DraftCount([5, 4], [3, 1]), "lookup": DraftCount([2], [1])}
    label = f"engine=0 model_name={MODEL}"
    async with client(gateway.app) as http:
        assert samples((await http.get("/metrics")).text)[f"vllm:spec_decode_num_drafts_total {label}"] == 0
        gateway.service.deliver(step_report(drafts=drafts))
        gateway.clock.now += 0.02
        found = samples((await http.get("/metrics")).text)
    for name, count in (("drafts", 7), ("draft_tokens", 11), ("accepted_tokens", 5)):
        assert found[f"vllm:spec_decode_num_{name}_total {label}"] == count
    by_place = f"vllm:spec_decode_num_accepted_tokens_per_pos_total {label} position="
    assert [found[f"{by_place}{place}"] for place in (0, 1)] == [4, 1]


async def test_two_apps_share_no_metric() -> None:
    first, second = Gateway(), Gateway()
    first.service.deliver(step_report())
    assert samples(second.service.render_metrics().decode())["penstock_step_seconds_count"] == 0


async def test_without_a_page_there_is_none() -> None:
    async with client(Gateway().app) as http:
        assert (await http.get("/")).status_code == 404


async def test_a_key_names_the_lane_of_requests_that_do_not() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=KEYS))
    headers = {"authorization": "Bearer key-of-bob"}
    async with client(gateway.app) as http:
        reply = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(), headers=headers))
        request = await gateway.taken()
        assert request.lane == Lane.BATCH
        gateway.finish(request, "done")
        assert (await reply).json()["service_tier"] == "flex"


async def test_nobody_raises_its_lane_above_what_its_key_allows() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=KEYS))
    headers = {"authorization": "Bearer key-of-ann"}
    async with client(gateway.app) as http:
        body = chat_body(service_tier="priority")
        reply = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 403
    assert reply.json()["error"]["param"] == "service_tier"
    assert reply.json()["error"]["code"] == "service_tier_not_allowed"
    assert "'priority'. The most urgent one that it may name is '" in reply.json()["error"]["message"]

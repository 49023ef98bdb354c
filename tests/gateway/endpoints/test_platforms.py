"""What the platforms around a model server read of it, by the names in their own sources."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.engine import EngineState
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.priority.lanes import Lane, LanePolicy, Tenant
from tests.gateway.endpoints.test_promises import slow_gateway
from tests.gateway.harness import MODEL, Gateway, chat_body, client, step_report

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"

# llm-d-inference-scheduler, pkg/epp/framework/plugins/datalayer/extractor/metrics/factories.go, less LoRA's; the same
# in docs/proposals/003-model-server-protocol of gateway-api-inference-extension.
PICKER = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)
# production-stack, src/vllm_router/stats/engine_stats.py and its autoscaling and dashboards under helm/.
PRODUCTION_STACK = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:gpu_prefix_cache_hit_rate",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:request_success_total",
)
# ray, python/ray/dashboard/modules/metrics/dashboards/vllm_engine_panels.py, which puts "ray_" in front.
RAY = (
    "vllm:request_prompt_tokens_sum",
    "vllm:generation_tokens_total",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:request_queue_time_seconds_bucket",
)
# kserve, docs/samples/llmisvc/e2e-gpt-oss/grafana.
KSERVE = (
    "vllm:prompt_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
)
# The names for llm-d's engineConfigs in docs/guide/platforms.md.
OWN = ("penstock_waiting_requests", "penstock_running_sequences", "penstock_kv_usage_ratio")


async def scraped(gateway: Gateway) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Returns the labels and the value of each sample, by its name."""
    async with client(gateway.app) as http:
        text = (await http.get("/metrics")).text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.mark.parametrize("names", [PICKER, PRODUCTION_STACK, RAY, KSERVE, OWN])
async def test_the_names_that_a_platform_reads_are_there(names: tuple[str, ...]) -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), metrics_compat="vllm"))
    async with client(gateway.app) as http:
        await gateway.answering(http.post(CHAT, json=chat_body()), "a", "b")
    gateway.clock.now += 1
    assert set(names) <= (await scraped(gateway)).keys()


async def test_a_picker_reads_one_series_of_each_name() -> None:
    """llm-d takes one series of a family, and does not add up several."""
    gateway = Gateway(ServiceOptions(models=(MODEL,), metrics_compat="vllm"))
    async with client(gateway.app) as http:
        asking = [
            asyncio.create_task(http.post(CHAT, json=chat_body(service_tier=tier)))
            for tier in ("priority", "default", "flex")
        ]
        await gateway.queued(3)
        gateway.service.deliver(step_report(num_running=2, num_waiting=1))
        found = await scraped(gateway)
        for _ in asking:
            gateway.answer(await gateway.taken(), "x")
        await asyncio.gather(*asking)
    assert {len(found[name]) for name in (*PICKER, *OWN)} == {1}
    assert found["penstock_waiting_requests"] == [({}, 4.0)]
    assert found["vllm:num_requests_waiting"][0][1] == 4.0
    assert found["vllm:num_requests_running"][0][1] == 2.0
    labels, _ = found["vllm:cache_config_info"][0]
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", "32")


async def test_prefix_hits_are_a_share_too() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), metrics_compat="vllm"))
    gateway.service.deliver(step_report(num_prefix_query_tokens=8, num_prefix_hit_tokens=6))
    found = await scraped(gateway)
    assert found["vllm:gpu_prefix_cache_hit_rate"][0][1] == 0.75
    assert found["vllm:gpu_prefix_cache_hits_total"] == found["vllm:prefix_cache_hits_total"]


async def test_the_promise_to_a_new_request_is_what_admission_would_compare() -> None:
    gateway = slow_gateway(0.0005)
    found = {
        labels["prompt_tokens"]: value
        for labels, value in (await scraped(gateway))["penstock_promised_first_token_seconds"]
    }
    for num_tokens in (512, 4096):
        forecast = gateway.queue.predict(Lane.INTERACTIVE, num_tokens, gateway.clock.now)
        assert forecast is not None
        assert found.pop(str(num_tokens)) == forecast.late_s > 0.0005 * num_tokens
    assert not found


async def test_nothing_is_promised_before_a_step_was_measured() -> None:
    assert "penstock_promised_first_token_seconds" not in await scraped(Gateway())


# llm-d-inference-scheduler, pkg/common/error/error.go: the header and its reasons.
DROPPED = "x-llm-d-request-dropped-reason"


def full_gateway(overload_status: int = 503) -> Gateway:
    bounds = {Lane.STANDARD: LanePolicy(max_requests=1, ttl_s=60)}
    return Gateway(ServiceOptions(models=(MODEL,), overload_status=overload_status), bounds=bounds)


@pytest.mark.parametrize(
    ("path", "chosen", "status"),
    [(CHAT, 503, 503), (CHAT, 429, 429), ("/v1/messages", 503, 529), ("/v1/messages", 429, 429)],
)
async def test_a_refusal_by_load_says_so_whatever_its_status(path: str, chosen: int, status: int) -> None:
    body = {**chat_body(), "max_tokens": 4}
    gateway = full_gateway(chosen)
    async with client(gateway.app) as http:
        waiting = asyncio.create_task(http.post(CHAT, json=chat_body()))
        await gateway.queued()
        refused = await http.post(path, json=body)
        gateway.answer(await gateway.taken(), "x")
        await waiting
    assert refused.status_code == status
    assert refused.headers[DROPPED] == "rejected-saturated"
    assert refused.headers["retry-after"]


async def test_a_request_that_waited_too_long_has_its_own_reason() -> None:
    gateway = full_gateway()
    async with client(gateway.app) as http:
        waiting = asyncio.create_task(http.post(CHAT, json=chat_body(stream=True)))
        await gateway.queued()
        gateway.service.tick(gateway.clock.now + 61)
        assert (await waiting).headers[DROPPED] == "rejected-ttl-expired"


async def test_a_tenants_own_limit_and_a_server_that_loads_are_no_overload() -> None:
    quota = {digest_of("key"): Client(Tenant(name="ann"), Quota(requests_per_minute=1))}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=quota, overload_status=429))
    headers = {"authorization": "Bearer key"}
    async with client(gateway.app) as http:
        assert (await http.post("/tokenize", json={"prompt": "x"}, headers=headers)).status_code == 200
        limited = await http.post("/tokenize", json={"prompt": "x"}, headers=headers)
        gateway.engine.state = EngineState.STARTING
        loading = await http.post(CHAT, json=chat_body(), headers=headers)
    assert (limited.status_code, loading.status_code) == (429, 503)
    assert DROPPED not in limited.headers
    assert DROPPED not in loading.headers


@pytest.mark.parametrize(("is_ready", "statuses"), [(False, [200, 200, 200]), (True, [503, 200, 503])])
async def test_health_is_what_kserves_template_takes_for_readiness_where_the_operator_wants_it(
    is_ready: bool, statuses: list[int]
) -> None:
    """kserve, config/llmisvcconfig/config-llm-template.yaml: all three probes ask /health."""
    gateway, found = Gateway(ServiceOptions(models=(MODEL,), health_is_ready=is_ready)), list[int]()
    async with client(gateway.app) as http:
        for state, draining in (
            (EngineState.STARTING, False),
            (EngineState.READY, False),
            (EngineState.READY, True),
        ):
            gateway.engine.state, gateway.service.dispatch.draining = state, draining
            found.append((await http.get("/health")).status_code)
    assert found == statuses


async def test_pickers_that_scrape_at_the_same_time_share_a_page() -> None:
    gateway = Gateway()
    before = gateway.service.render_metrics()
    gateway.service.deliver(step_report())
    assert gateway.service.render_metrics() is before
    gateway.clock.now += 0.02
    assert b"penstock_step_seconds_count 1.0" in gateway.service.render_metrics()

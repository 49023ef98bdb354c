"""`/v1/events` and `/v1/prefixes/events`: what they tell, whom, and that they cost nothing while nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from base64 import b64decode
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.engine.planning.block_map import BlockMap
from penstock.engine.planning.prefix_events import Dropped, Stored
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.state_records import StateUse
from penstock.engine.planning.step import ExpertUse
from penstock.engine.planning.timings import NO_SECONDS, DraftCount, DraftSeconds
from penstock.engine.tiers.tier import TierStats
from penstock.engine.tiers.tiers import TiersUse
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.endpoints import events
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.gateway.watch import MAX_STEPS, StepWatch
from penstock.priority.lanes import Lane, Tenant
from tests.gateway.harness import MODEL, Gateway, chat_body, client, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVERY_S", 0.02)


@contextlib.asynccontextmanager
async def listening(url: str, path: str, **options: Any) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    async with (
        httpx.AsyncClient(base_url=url, timeout=10) as http,
        http.stream("GET", path, **options) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield _events(response.aiter_lines())


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, Any]]:
    kind = ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


async def first(found: AsyncIterator[tuple[str, Any]], kind: str) -> Any:
    """The data of the next event of this kind."""
    async with asyncio.timeout(10):
        return await anext(data async for name, data in found if name == kind)


async def kinds(found: AsyncIterator[tuple[str, Any]], number: int) -> list[str]:
    """Returns the kinds of so many events."""
    return [(await anext(found))[0] for _ in range(number)]


async def test_the_state_of_the_server_and_its_lanes() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), promises={Lane.STANDARD: 30.0}), clock=time.monotonic)
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        asked = asyncio.create_task(http.post(CHAT, json=chat_body()))
        await gateway.queued()
        async with listening(url, "/v1/events") as found:
            told = await first(found, "server")
            assert (told["state"], told["streams"]) == ("ready", 1)
            assert told["engine"]["kv_blocks"] == 32
            standard = told["lanes"]["standard"]
            assert (standard["waiting"], standard["promised_ttft_ms"], standard["attainment"]) == (
                1,
                30_000,
                None,
            )
            gateway.answer(await gateway.taken(), "a")
            await asked
            while (told := await first(found, "server"))["streams"]:
                pass
            assert told["lanes"]["standard"]["waiting"] == 0
            assert told["lanes"]["standard"]["attainment"] == 1.0
            assert told["engine"]["output_tokens"] == 1


async def test_what_is_in_tiers_is_told_where_there_are_some() -> None:
    gateway = Gateway()
    stats = TierStats(num_blocks=7, num_bytes=700, max_bytes=1000, num_hits=3, bytes_read=300)
    gateway.engine.tiers = TiersUse(tiers={"disk": stats}, num_fetched_blocks=3, seconds_saved=1.5)
    told = gateway.service.status()["engine"]["tiers"]  # type: ignore[index]
    assert told["disk"] == {
        "blocks": 7,
        "bytes": 700,
        "max_bytes": 1000,
        "hits": 3,
        "read_bytes": 300,
        "written_bytes": 0,
    }
    shown = gateway.service.render_metrics().decode().splitlines()
    assert {
        'penstock_kv_tier_blocks{tier="disk"} 7.0',
        'penstock_kv_tier_bytes{tier="disk"} 700.0',
        'penstock_kv_tier_hits_total{tier="disk"} 3.0',
        "penstock_kv_tiers_fetched_blocks_total 3.0",
        "penstock_kv_tiers_saved_seconds_total 1.5",
    } <= {*shown}
    assert Gateway().service.status()["engine"]["tiers"] is None  # type: ignore[index]


async def test_what_becomes_of_states_is_told_where_there_are_some() -> None:
    gateway = Gateway()
    gateway.engine.states = StateUse(40, 3, 12)
    assert gateway.service.status()["engine"]["states"] == {"slots": 40, "held": 3, "snapshots": 12}  # type: ignore[index]
    shown = gateway.service.render_metrics().decode().splitlines()
    assert {
        "penstock_state_slots 40.0",
        "penstock_state_held_slots 3.0",
        "penstock_state_snapshots 12.0",
    } <= {*shown}
    assert Gateway().service.status()["engine"]["states"] is None  # type: ignore[index]


async def test_a_request_of_the_caller_has_its_place_while_it_waits_and_no_other() -> None:
    clients = {digest_of(name): Tenant(name=name) for name in ("ann", "bob")}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=clients))
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        before = asyncio.create_task(http.post(CHAT, json=chat_body("a"), headers=ann))
        await gateway.queued()
        mine = asyncio.create_task(
            http.post(CHAT, json=chat_body("b"), headers={**ann, "x-request-id": "mine"})
        )
        await gateway.queued(2)
        async with listening(url, "/v1/events?request_id=mine", headers=bob) as found:
            assert await kinds(found, 3) == ["server"] * 3
        async with listening(url, "/v1/events?request_id=mine", headers=ann) as found:
            told = await first(found, "request")
            assert (told["request_id"], told["position"]) == ("mine", 1)
            for _ in range(2):
                gateway.answer(await gateway.taken(), "a")
            await asyncio.gather(before, mine)
            async with asyncio.timeout(10):
                while await kinds(found, 2) != ["server"] * 2:  # what was told before
                    pass
            assert await kinds(found, 3) == ["server"] * 3
        response = await http.get("/v1/events?request_id=mine")
        assert response.status_code == 401


async def test_nothing_is_computed_for_nobody_and_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, made = Gateway(), 0
    status = gateway.service.status

    def counted() -> dict[str, object]:
        nonlocal made
        made += 1
        return status()

    monkeypatch.setattr(gateway.service, "status", counted)
    async with serving(gateway.app) as url:
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(listening(url, "/v1/events")) for _ in range(5)]
            for found in streams:
                await first(found, "server")
            assert made == 1  # the gateway's clock stands still
        async with asyncio.timeout(10):
            while any("run_asgi" in repr(task) for task in asyncio.all_tasks()):
                await asyncio.sleep(0)
        gateway.clock.now += 60
        await asyncio.sleep(5 * events.EVERY_S)
        assert made == 1


async def test_the_steps_since_the_event_before_in_a_bounded_list() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, listening(url, "/v1/events?detail=steps") as found:
        told = await first(found, "steps")
        assert (told["num_steps"], told["at_ms"], told["steps"]["started_ms"]) == (0, 0.0, [])
        count = DraftCount([2, 1], [1, 0])
        for i in range(MAX_STEPS + 1):
            gateway.deliver(
                started_s=1000 + i / 1000,
                duration_s=0.001,
                num_prefill_tokens=5,
                num_decode_tokens=3,
                drafts={"lookup": count} if i == MAX_STEPS else {},
                draft_seconds=DraftSeconds(0.002, 0.003) if i == MAX_STEPS else NO_SECONDS,
                num_preemptions=1,
                num_prefix_query_tokens=10,
                num_prefix_hit_tokens=4,
                experts=ExpertUse(16, 2) if i else None,
            )
        gateway.deliver(num_decode_tokens=0)  # a cancelled request, say: no step
        gateway.service.note_loop_lag(0.020)
        gateway.service.note_loop_lag(0.010)
        while not (told := await first(found, "steps"))["num_steps"]:
            pass
        steps, num_steps = told.pop("steps"), MAX_STEPS + 1
        assert told == {
            "at_ms": 0.0,
            "num_steps": num_steps,
            "busy_ms": num_steps * 1.0,
            "draft_spent_ms": 2.0,
            "draft_saved_ms": 3.0,
            "loop_lag_ms": 20.0,
            "output_tokens": 0,
            "prefill_tokens": 5 * num_steps,
            "decode_tokens": 3 * num_steps,
            "draft_tokens": 3,
            "accepted_tokens": 1,
            "prefix_query_tokens": 10 * num_steps,
            "prefix_hit_tokens": 4 * num_steps,
            "preemptions": num_steps,
            "experts_touched": 16 * MAX_STEPS,
            "expert_layers": 2 * MAX_STEPS,
        }
        assert {name: len(values) for name, values in steps.items()} == dict.fromkeys(steps, MAX_STEPS)
        last = {name: values[-1] for name, values in steps.items()}
        assert last == {
            "started_ms": float(MAX_STEPS),
            "duration_ms": 1.0,
            "prefill": 5,
            "decode": 3,
            "drafts": 3,
            "accepted": 1,
        }
        told = await first(found, "steps")
        assert (told["num_steps"], told["loop_lag_ms"]) == (0, 0.0)


async def test_each_event_counts_from_the_one_before_and_its_times_from_the_first() -> None:
    watch = StepWatch(now=5.0, num_output_tokens=7)
    for now, num_output_tokens, at_ms, since in ((6.5, 10, 1500.0, 3), (7.0, 11, 2000.0, 1)):
        told = watch.take(now, num_output_tokens)
        assert (told["at_ms"], told["output_tokens"]) == (at_ms, since)


async def test_the_blocks_are_drawn_for_those_who_ask_when_they_have_changed() -> None:
    gateway = Gateway()
    gateway.engine.ref_counts[1:4] = [1, 2, 3]
    gateway.engine.findable[3:5] = b"\1\1"
    async with serving(gateway.app) as url, listening(url, "/v1/events?detail=kv") as found:
        told = await first(found, "kv")
        cells = {name: b64decode(told[name])[:5] for name in ("held", "shared", "cached", "holders")}
        assert cells == {
            "held": b"\xff\xff\xff\0\0",
            "shared": b"\0\xff\xff\0\0",
            "cached": b"\0\0\0\xff\0",
            "holders": b"\1\2\3\0\0",
        }
        assert (told["num_blocks"], told["blocks_per_cell"]) == (32, 1)
        assert (told["num_shared"], told["num_saved"]) == (2, 3)
        gateway.clock.now += 60
        assert await kinds(found, 3) == ["server"] * 3
        counts, gateway.engine.ref_counts = gateway.engine.ref_counts, []
        gateway.clock.now += 60
        assert await kinds(found, 3) == ["server"] * 3
        gateway.engine.ref_counts = [0, 0, *counts[2:]]
        gateway.clock.now += 60
        assert b64decode((await first(found, "kv"))["held"])[:2] == b"\0\xff"


async def test_details_are_for_clients_with_a_key_and_known_by_name() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients={digest_of("ann"): Tenant(name="ann")}))
    async with client(gateway.app) as http:
        assert (await http.get("/v1/events?detail=kv")).status_code == 401
        answer = await http.get("/v1/events?detail=kv,all", headers={"authorization": "Bearer ann"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "detail")


async def test_the_tenants_are_told_to_those_who_ask() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        asked = asyncio.create_task(http.post(CHAT, json=chat_body()))
        request = await gateway.taken()
        async with listening(url, "/v1/events?detail=tenants") as found:
            told = await first(found, "tenants")
        [row] = told["tenants"]
        assert row == {"tenant": "default", "share": 1.0, "waiting": 0, "running": 1, "refused": 0}
        assert told["others"]["tenants"] == 0
        gateway.answer(request, "a")
        await asked


async def test_no_step_is_noted_and_no_block_drawn_while_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, drawn, noted = Gateway(), 0, 0
    draw, note = gateway.engine.block_map, StepWatch.note

    def counted() -> BlockMap | None:
        nonlocal drawn
        drawn += 1
        return draw()

    def counted_note(watch: StepWatch, report: StepReport) -> None:
        nonlocal noted
        noted += 1
        note(watch, report)

    monkeypatch.setattr(gateway.engine, "block_map", counted)
    monkeypatch.setattr(StepWatch, "note", counted_note)
    async with serving(gateway.app) as url:
        async with listening(url, "/v1/events") as found:
            await first(found, "server")
            gateway.deliver(num_decode_tokens=1)
            await first(found, "server")
        assert (drawn, noted) == (0, 0)
        async with listening(url, "/v1/events?detail=steps,kv") as found:
            await first(found, "steps")
            gateway.deliver(num_decode_tokens=1)
            await first(found, "kv")
        assert (drawn, noted) == (1, 1)
        async with asyncio.timeout(10):
            while any("run_asgi" in repr(task) for task in asyncio.all_tasks()):
                await asyncio.sleep(0)
        gateway.deliver(num_decode_tokens=1)
        assert noted == 1


async def test_a_drain_is_told_and_ends_the_events_after_the_token_streams() -> None:
    gateway = Gateway(clock=time.monotonic)
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        asked = asyncio.create_task(http.post(CHAT, json=chat_body(stream=True)))
        request = await gateway.taken()
        async with listening(url, "/v1/events") as found:
            assert (await first(found, "server"))["state"] == "ready"
            gateway.service.begin_drain()
            while (await first(found, "server"))["state"] != "draining":
                pass
            gateway.answer(request, "a", "b")
            assert "[DONE]" in (await asked).text
            assert {kind async for kind, _ in found} <= {"server"}


async def test_routers_hear_of_the_callers_blocks_that_come_and_go() -> None:
    gateway = Gateway()

    def block(number: int, salt: bytes = b"default") -> Stored:
        return Stored(bytes([number]), None, 1, (1,), salt)

    def tell(*happened: Stored | Dropped) -> None:
        gateway.service.prefixes.take(happened)

    tell(block(1), block(2), block(3, b"somebody else"))
    async with serving(gateway.app) as url, listening(url, "/v1/prefixes/events") as found:
        assert await first(found, "stored") == {"blocks": ["01", "02"]}
        tell(block(4), block(5), Dropped(b"\5"), Dropped(b"\1"), block(6, b"somebody else"))
        assert await anext(found) == ("removed", {"blocks": ["01"]})
        assert await anext(found) == ("stored", {"blocks": ["04"]})


CLIENTS = {
    digest_of("ann"): Client(Tenant(name="ann"), Quota(requests_per_minute=3)),
    digest_of("bob"): Client(Tenant(name="bob")),
    digest_of("ops"): Client(Tenant(name="ops"), is_operator=True),
}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_a_tenant_has_so_many_event_streams_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_LISTENERS", 2)
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=CLIENTS))
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url, timeout=10) as http:
        async with contextlib.AsyncExitStack() as stack:
            for path in ("/v1/events", "/v1/prefixes/events"):
                await stack.enter_async_context(listening(url, path, headers=key("bob")))
            refused = await http.get("/v1/events", headers=key("bob"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_event_streams")
            assert "retry-after" in refused.headers
            async with listening(url, "/v1/events", headers=key("ops")) as found:
                await first(found, "server")
        async with asyncio.timeout(10):
            while any("run_asgi" in repr(task) for task in asyncio.all_tasks()):
                await asyncio.sleep(0)
        async with listening(url, "/v1/events", headers=key("bob")) as found:
            await first(found, "server")


async def test_opening_an_event_stream_counts_as_a_request() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=CLIENTS))
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url, timeout=10) as http:
        assert (await http.get("/v1/events?detail=all", headers=key("ann"))).status_code == 400
        for path in ("/v1/events", "/v1/prefixes/events", "/v1/events?detail=tenants"):
            async with listening(url, path, headers=key("ann")):
                pass
        refused = await http.get("/v1/events", headers=key("ann"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_what_shows_the_work_for_everybody_is_the_operators() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=CLIENTS, promises={Lane.STANDARD: 30.0}))
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url, timeout=10) as http:
        asked = asyncio.create_task(http.post(CHAT, json=chat_body(), headers=key("bob")))
        request = await gateway.taken()
        for detail in ("steps", "kv", "tenants,kv"):
            refused = await http.get(f"/v1/events?detail={detail}", headers=key("bob"))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "detail")
            async with listening(url, f"/v1/events?detail={detail}", headers=key("ops")) as found:
                assert (await first(found, "server"))["engine"]["kv_blocks"] == 32
        for name, num_streams in (("ann", 0), ("bob", 1)):
            gateway.clock.now += 1
            async with listening(url, "/v1/events?detail=tenants", headers=key(name)) as found:
                told = await first(found, "server")
                assert (told["state"], told["streams"], told.keys()) == (
                    *("ready", num_streams),
                    {"state", "streams", "lanes"},
                )
                standard = {"forecast_ttft_ms": None, "promised_ttft_ms": 30_000}
                assert told["lanes"]["standard"] == standard
                shown = await first(found, "tenants")
                assert [row["tenant"] for row in shown["tenants"]] == [name]
                assert not any(shown["others"].values())
        gateway.answer(request, "a")
        await asked


async def test_requests_of_one_name_are_found_as_long_as_they_wait() -> None:
    gateway = Gateway()
    dispatch, named = gateway.service.dispatch, {"x-request-id": "mine"}
    async with client(gateway.app) as http:
        asked = [asyncio.create_task(http.post(CHAT, json=chat_body(), headers=named)) for _ in range(2)]
        await gateway.queued(2)
        for left in (True, False):
            request = await gateway.taken()
            assert (dispatch.waiting("default", "mine") is not None) == left
            assert dispatch.waiting("another", "mine") is None
            gateway.answer(request, "a")
        await asyncio.gather(*asked)
    await gateway.left()
    assert not dispatch._by_name

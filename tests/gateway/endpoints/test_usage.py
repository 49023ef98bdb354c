"""Who takes the machine, and what tenants used of their limits: what an operator sees, and what a tenant does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.access.quotas import Quotas
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.gateway.tenants import MOST_NAMED, Tenants
from penstock.priority.lanes import Tenant
from tests.clock import Clock
from tests.gateway.harness import MODEL, Gateway, chat_body, client, settled
from tests.priority.simulated_engine import ask, make_queue, serve, take

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
NOON = datetime(2026, 11, 28, 12, tzinfo=UTC).timestamp()
NOTHING = {"share": 0.0, "waiting": 0, "running": 0, "refused": 0}


@dataclass
class Served:
    gateway: Gateway
    http: httpx.AsyncClient

    async def get(self, path: str, key: str) -> httpx.Response:
        return await self.http.get(path, headers=as_(key))

    async def usage(self, key: str, query: str = "") -> list[dict[str, Any]]:
        reply = await self.get(f"/v1/usage{query}", key)
        assert reply.status_code == 200
        assert reply.json()["object"] == "list"
        rows: list[dict[str, Any]] = reply.json()["data"]
        return rows

    async def chat(self, key: str) -> httpx.Response:
        """Chats, and waits until its quota is settled."""
        asked = asyncio.create_task(self.http.post(CHAT, json=chat_body(max_tokens=50), headers=as_(key)))
        request = await self.gateway.taken()
        self.gateway.answer(request, "a", "b")
        serve(self.gateway.queue, request, 2, self.gateway.clock())
        reply = await asked
        await settled()
        return reply


def as_(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    quota = Quota(requests_per_minute=60, requests_per_day=3, tokens_per_month=1_000, max_streams=2)
    known = [
        Client(Tenant(name="ann"), quota),
        Client(Tenant(name="bob")),
        Client(Tenant(name="root"), is_operator=True),
    ]
    clients = {digest_of(client.tenant.name): client for client in known}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=clients))
    gateway.service.quotas = Quotas(gateway.service.store, gateway.clock, lambda: NOON)
    async with client(gateway.app) as http:
        yield Served(gateway, http)


async def test_a_tenant_sees_its_own_usage_and_what_is_left(served: Served) -> None:
    reply = await served.chat("ann")
    num_tokens = reply.json()["usage"]["total_tokens"]
    assert reply.headers["x-ratelimit-remaining-requests-day"] == "2"
    assert reply.headers["x-ratelimit-reset-requests-day"] == "12h0m0s"
    [row] = await served.usage("ann")
    left = 1_000 - num_tokens
    month = {"limit": 1_000, "used": num_tokens, "remaining": left, "ends_at": "2026-12-01T00:00:00Z"}
    assert row == {
        "object": "usage",
        "tenant": "ann",
        "requests": {
            "minute": {"limit": 60, "used": 1, "remaining": 59},
            "day": {"limit": 3, "used": 1, "remaining": 2, "ends_at": "2026-11-29T00:00:00Z"},
            "month": {**month, "limit": None, "used": 1, "remaining": None},
        },
        "tokens": {
            "day": {
                "limit": None,
                "used": num_tokens,
                "remaining": None,
                "ends_at": "2026-11-29T00:00:00Z",
            },
            "month": month,
        },
        "streams": {"limit": 2, "used": 0},
        "last_minute": {**NOTHING, "share": 1.0},
    }


async def test_the_day_is_refused_by_name_and_counted_as_refused(served: Served) -> None:
    for _ in range(3):
        await served.chat("ann")
    refused = await served.http.post(CHAT, json=chat_body(max_tokens=50), headers=as_("ann"))
    assert refused.status_code == 429
    assert "The day ends at 2026-11-29T00:00:00Z, in 12h0m0s." in refused.json()["error"]["message"]
    assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("43200", "false")
    served.gateway.clock.now += 1
    [row] = await served.usage("ann")
    assert row["last_minute"]["refused"] == 1


async def test_an_operator_sees_all_and_others_only_themselves(served: Served) -> None:
    assert [row["tenant"] for row in await served.usage("root")] == ["ann", "bob", "root"]
    assert [row["tenant"] for row in await served.usage("root", "?tenant=bob")] == ["bob"]
    assert [row["tenant"] for row in await served.usage("bob")] == ["bob"]
    assert [row["tenant"] for row in await served.usage("bob", "?tenant=bob")] == ["bob"]
    for key, name in (("bob", "ann"), ("root", "eve")):
        reply = await served.get(f"/v1/usage?tenant={name}", key)
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "tenant")
    assert (await served.http.get("/v1/usage")).status_code == 401


async def test_who_has_no_limits_still_sees_its_part_of_the_machine(served: Served) -> None:
    await served.chat("bob")
    await served.chat("root")
    [row] = await served.usage("bob")
    assert (row["requests"], row["tokens"], row["streams"]) == ({}, {}, None)
    assert row["last_minute"] == {**NOTHING, "share": 0.5}


# The event `tenants`


def busy_tenants() -> Tenants:
    """Twelve tenants, of which the last takes most; one of them is refused twice."""
    clock, queue = Clock(), make_queue()
    for number in range(1, 13):
        queue.put(ask(f"r{number}", 10 * number, tenant=f"t{number}"), clock.now)
        assert take(queue) is not None
    queue.put(ask("waits", 10, tenant="t3"), clock.now)
    tenants = Tenants(queue, clock)
    for _ in range(2):
        tenants.note_refused("t2")
    return tenants


async def test_an_operator_is_told_who_takes_most_and_the_sum_of_the_others() -> None:
    told: Any = busy_tenants().event_data(Client(Tenant(name="root"), is_operator=True))
    named = {row.pop("tenant"): row for row in told["tenants"]}
    assert list(named) == [f"t{number}" for number in range(12, 12 - MOST_NAMED, -1)]
    assert named["t3"] == {"share": named["t3"]["share"], "waiting": 1, "running": 1, "refused": 0}
    others = told["others"]
    assert (others["tenants"], others["running"], others["refused"]) == (2, 2, 2)
    shares = [row["share"] for row in named.values()]
    assert sum(shares) + others["share"] == pytest.approx(1, abs=0.001)
    assert shares == sorted(shares, reverse=True)


async def test_a_tenant_is_told_of_itself_and_no_other_s_name() -> None:
    told: Any = busy_tenants().event_data(Client(Tenant(name="t2")))
    [own] = told["tenants"]
    assert (own["tenant"], own["running"], own["refused"]) == ("t2", 1, 2)
    assert told["others"] == {"tenants": 0, **NOTHING}
    told = busy_tenants().event_data(Client(Tenant(name="idle")))
    assert told["tenants"] == [{"tenant": "idle", **NOTHING}]

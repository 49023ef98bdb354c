"""`/v1/prefixes` and `/v1/prefixes/locate`: what of a prompt is warm, and where."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine.planning.prefix_events import Stored
from penstock.engine.planning.prefix_index import extend_hashes
from penstock.gateway.access.keys import digest_of
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Tenant
from tests.gateway.harness import MODEL, Gateway, client, step_report

pytestmark = pytest.mark.anyio

LOCATE = "/v1/prefixes/locate"
KEYS = {digest_of(f"the-key-of-{name}"): Tenant(name=name) for name in ("ann", "bob")}
TOKENS = tuple(range(5, 5 + 48))


def as_(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer the-key-of-{name}"}


def warm_gateway() -> Gateway:
    """Three blocks of ann's are resident."""
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=KEYS, replica="here"))
    hashes: list[bytes] = []
    extend_hashes(hashes, TOKENS, 3, 16, b"ann")
    events = [
        Stored(known, hashes[i - 1] if i else None, i + 1, TOKENS[16 * i : 16 * (i + 1)], b"ann")
        for i, known in enumerate(hashes)
    ]
    gateway.service.deliver(step_report(prefix_events=tuple(events)))
    return gateway


async def test_a_tenant_sees_its_own_prefixes_only() -> None:
    async with client(warm_gateway().app) as http:
        ann = (await http.get("/v1/prefixes", headers=as_("ann"))).json()
        bob = (await http.get("/v1/prefixes", headers=as_("bob"))).json()
        nobody = await http.get("/v1/prefixes")
    assert [found["num_tokens"] for found in ann["data"]] == [48]
    assert bob == {"object": "list", "data": []}
    assert nobody.status_code == 401


async def test_by_tokens_and_by_messages_by_get_and_by_post() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), replica="here"))
    messages = [{"role": "user", "content": "Hi"}]
    async with client(gateway.app) as http:
        replies = [
            await http.get(LOCATE, params={"messages": json.dumps(messages)}),
            await http.post(LOCATE, json={"messages": messages}),
        ]
        tokens = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
        replies.append(await http.get(LOCATE, params={"tokens": ",".join(map(str, tokens))}))
        replies.append(await http.post(LOCATE, json={"tokens": tokens}))
    expected = {
        "object": "prefix.location",
        "block_size": 16,
        "num_tokens": len(tokens),
        "replicas": [{"replica": "here", "num_cached_tokens": 0, "this": True}],
    }
    assert [reply.json() for reply in replies] == [expected] * 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": [1], "messages": [{"role": "user", "content": "Hi"}]}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [10**30]}, "tokens[0]"),
        ({"tokens": [10**6]}, "tokens"),
        ({"tokens": [5] * 600}, "tokens"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"other": 1}, "other"),
    ],
)
async def test_bad_bodies_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post(LOCATE, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(param.partition("[")[0])


@pytest.mark.parametrize("query", ["tokens=1,x", "tokens=", "messages=[", "messages=1", "what=1"])
async def test_bad_queries_are_refused(query: str) -> None:
    async with client(Gateway().app) as http:
        reply = await http.get(f"{LOCATE}?{query}")
    assert reply.status_code == 400, reply.text

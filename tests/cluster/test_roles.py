"""Replicas by role behind a switch: who computes a prompt, who goes on with it, and what happens if one is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from penstock.cluster import members
from penstock.engine.planning.prefix_index import prompt_hashes
from penstock.engine.planning.request import FinishReason, Request
from penstock.gateway.endpoints import prefill
from penstock.gateway.endpoints.state import SECRET_HEADER
from penstock.gateway.http.correlation import SOURCE_HEADER, TICKET_HEADER
from penstock.gateway.tickets import source_of, ticket_of
from penstock.priority.lanes import Lane
from penstock.priority.routing import router
from penstock.priority.routing.state import Role
from tests.cluster.fake_exchange import FakeExchange
from tests.cluster.test_switch import CHAT, LONG, SECRET, Cluster, cluster, make_gateway, stored, until
from tests.gateway.harness import Gateway, chat_body, client

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "LONG_PROMPT", 64)


def replica_for(role: Role, name: str | None = None) -> Gateway:
    gateway = make_gateway(name or role.value, role=role)
    gateway.service.kv = FakeExchange()
    return gateway


def expected_at(gateway: Gateway) -> list[tuple[str, list[bytes]]]:
    assert isinstance(gateway.service.kv, FakeExchange)
    return gateway.service.kv.expected


def pulled_at(gateway: Gateway) -> list[tuple[str, list[bytes]]]:
    assert isinstance(gateway.service.kv, FakeExchange)
    return gateway.service.kv.pulled


def compute_blocks(gateway: Gateway, request: Request, first: int, end: int) -> None:
    """So much of the prompt has been computed there."""
    gateway.deliver(prefix_events=[stored(each) for each in request.block_hashes[first:end]])


def is_answering(gateway: Gateway, request: Request) -> None:
    gateway.answer(request, "a", "b")
    gateway.queue.settle(request, gateway.clock())


@contextlib.asynccontextmanager
async def asking(found: Cluster, **fields: Any) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    body = chat_body(LONG, max_tokens=4, **fields)
    task = asyncio.create_task(found.http.post(CHAT, json=body, headers={SOURCE_HEADER: "of.a-client"}))
    yield task
    if not task.done():
        await task


async def test_one_computes_the_prompt_and_the_other_takes_its_kv_from_there() -> None:
    first, then = replica_for(Role.PREFILL), replica_for(Role.DECODE)
    async with cluster(first, then) as found, asking(found) as reply:
        prompt = await first.taken()
        assert (prompt.sampling.max_tokens, prompt.n, Lane(prompt.lane)) == (1, 1, Lane.STANDARD)
        is_answering(first, prompt)
        request = await then.taken()
        assert request.prompt_token_ids == prompt.prompt_token_ids
        assert request.block_hashes == prompt.block_hashes
        assert request.sampling.max_tokens == 4
        assert expected_at(then) == [(str(found.addresses["prefill"]), list(request.block_hashes))]
        assert expected_at(first) == []
        is_answering(then, request)
        assert (await reply).headers["x-penstock-replica"] == "decode"
        assert found.switch.metrics.computed_elsewhere.value == 1
        assert found.switch.router.num_reserved == 0


async def test_kv_is_taken_while_the_prompt_is_computed() -> None:
    """And the request goes where it is, which has been asked for nothing else until then."""
    first, others = replica_for(Role.PREFILL), [replica_for(Role.DECODE, name) for name in ("d1", "d2")]
    async with cluster(first, *others) as found, asking(found) as reply:
        prompt = await first.taken()
        source, num_blocks = str(found.addresses["prefill"]), len(prompt.block_hashes)
        assert num_blocks > 4
        compute_blocks(first, prompt, 0, 2)
        await until(lambda: any(map(pulled_at, others)))
        [then] = [one for one in others if pulled_at(one)]
        compute_blocks(first, prompt, 2, 3)
        await until(lambda: len(pulled_at(then)) == 2)
        assert pulled_at(then) == [
            (source, list(prompt.block_hashes[:2])),
            (source, list(prompt.block_hashes[2:3])),
        ]
        assert not sum(then.queue.depths().values())
        assert found.switch.metrics.early_tokens.value == 3 * 16
        compute_blocks(first, prompt, 3, num_blocks)
        is_answering(first, prompt)
        request = await then.taken()
        assert request.block_hashes == prompt.block_hashes
        assert expected_at(then) == [(source, list(request.block_hashes))]
        is_answering(then, request)
        assert (await reply).status_code == 200
        assert found.switch.router.num_reserved == 0


async def test_a_request_goes_where_a_part_of_its_prompt_is_if_the_rest_is_lost() -> None:
    first, others = replica_for(Role.PREFILL), [replica_for(Role.DECODE, name) for name in ("d1", "d2")]
    async with cluster(first, *others) as found, asking(found) as reply:
        prompt = await first.taken()
        compute_blocks(first, prompt, 0, 2)
        await until(lambda: any(map(pulled_at, others)))
        then, other = sorted(others, key=lambda one: not pulled_at(one))
        compute_blocks(other, prompt, 0, 1)  # it would be chosen for that
        name = other.service.options.replica
        await until(lambda: found.switch.router.num_held(name, prompt.block_hashes) == 1)
        first.finish(prompt, reason=FinishReason.FAILED, error="no")
        is_answering(then, await then.taken())
        assert (await reply).status_code == 200
        assert expected_at(then) == []


async def test_nothing_more_is_taken_when_the_client_is_gone() -> None:
    first, then = replica_for(Role.PREFILL), replica_for(Role.DECODE)
    async with cluster(first, then) as found:
        task = asyncio.create_task(found.http.post(CHAT, json=chat_body(LONG)))
        prompt = await first.taken()
        compute_blocks(first, prompt, 0, 1)
        await until(lambda: pulled_at(then))
        task.cancel()
        await until(lambda: first.engine.cancelled == [prompt.request_id])
        await until(lambda: found.switch.router.num_reserved == 0)
        compute_blocks(first, prompt, 1, 3)
        await until(lambda: found.switch.router.num_held("prefill", prompt.block_hashes) == 3)
        assert len(pulled_at(then)) == 1


async def test_a_replica_that_takes_no_kv_computes_the_prompt() -> None:
    first, then = replica_for(Role.PREFILL), replica_for(Role.DECODE)
    then.service.kv = None
    async with cluster(first, then) as found, asking(found) as reply:
        prompt = await first.taken()
        compute_blocks(first, prompt, 0, 2)
        await until(lambda: found.switch.router.num_held("prefill", prompt.block_hashes) == 2)
        is_answering(first, prompt)
        is_answering(then, await then.taken())
        assert (await reply).status_code == 200


async def test_a_private_prompt_is_computed_where_it_goes_on_and_taken_from_nobody() -> None:
    first, then = replica_for(Role.PREFILL), replica_for(Role.DECODE)
    async with cluster(first, then) as found, asking(found, store=False) as reply:
        is_answering(then, await then.taken())
        assert (await reply).headers["x-penstock-replica"] == "decode"
        assert found.switch.metrics.computed_elsewhere.value == 0
    ticket, address = ticket_of(SECRET, "ab", 1), "http://127.0.0.1:9"
    headers = {TICKET_HEADER: ticket, SOURCE_HEADER: source_of(SECRET, ticket, address)}
    async with client(then.app) as http:
        for store in (False, None):
            body = chat_body(LONG, store=store)
            await then.answering(http.post(CHAT, json=body, headers=headers), "a")
    assert [source for source, _ in expected_at(then)] == [address]


async def test_a_short_prompt_is_computed_where_it_goes_on() -> None:
    first, then = replica_for(Role.PREFILL), replica_for(Role.DECODE)
    async with cluster(first, then) as found:
        assert await found.chat("Hi") == "decode"
        assert expected_at(then) == []


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_cluster_without_the_other_role_serves_with_what_it_has(
    role: Role, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "LACK_S", 0.0)
    async with cluster(replica_for(role, "only")) as found:
        assert await found.chat() == "only"
        assert found.switch.metrics.computed_elsewhere.value == 0
        line = f"all replicas have --role {role}"
        for _ in range(3):
            found.switch.members.look_over()
        assert caplog.text.count(line) == 1


async def test_where_no_role_is_missing_nothing_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "LACK_S", 0.0)
    async with cluster(replica_for(Role.DECODE), replica_for(Role.BOTH)) as found:
        caplog.clear()
        for _ in range(3):
            found.switch.members.look_over()
        assert "all replicas have" not in caplog.text


async def test_a_prompt_that_fails_elsewhere_is_computed_where_it_goes_on() -> None:
    first, then = replica_for(Role.PREFILL), replica_for(Role.DECODE)
    async with cluster(first, then) as found, asking(found) as reply:
        first.finish(await first.taken(), reason=FinishReason.FAILED, error="no")
        is_answering(then, await then.taken())
        assert (await reply).headers["x-penstock-replica"] == "decode"
        assert expected_at(then) == []


async def test_one_that_drains_while_the_prompt_comes_is_no_loss() -> None:
    first, then = replica_for(Role.PREFILL), replica_for(Role.DECODE)
    async with cluster(first, then) as found:
        first.service.dispatch.draining = True  # and the switch does not know yet
        async with asking(found) as reply:
            is_answering(then, await then.taken())
            assert (await reply).status_code == 200


async def test_a_prompt_is_computed_no_further_when_its_client_is_gone() -> None:
    first, then = replica_for(Role.PREFILL), replica_for(Role.DECODE)
    async with cluster(first, then) as found:
        task = asyncio.create_task(found.http.post(CHAT, json=chat_body(LONG)))
        prompt = await first.taken()
        task.cancel()
        await until(lambda: first.engine.cancelled == [prompt.request_id])
        await until(lambda: found.switch.router.num_reserved == 0)
        assert not sum(then.queue.depths().values())


async def test_nobody_but_a_switch_says_where_kv_is_taken_from() -> None:
    gateway = replica_for(Role.BOTH)
    ticket, address = ticket_of(SECRET, "ab", 1), "http://127.0.0.1:9"
    right = source_of(SECRET, ticket, address)
    tried = [
        {TICKET_HEADER: ticket, SOURCE_HEADER: right},
        {TICKET_HEADER: ticket_of(SECRET, "ab", 2), SOURCE_HEADER: right},
        {SOURCE_HEADER: right},
        {TICKET_HEADER: ticket, SOURCE_HEADER: source_of("another secret", ticket, address)},
        {TICKET_HEADER: ticket, SOURCE_HEADER: right.replace(":9", ":8")},
        {TICKET_HEADER: ticket, SOURCE_HEADER: address},
    ]
    async with client(gateway.app) as http:
        for headers in tried:
            await gateway.answering(http.post(CHAT, json=chat_body(LONG), headers=headers), "a")
    assert [source for source, _ in expected_at(gateway)] == [address]


async def test_a_prompt_for_another_is_for_those_who_know_the_secret() -> None:
    gateway = replica_for(Role.PREFILL)
    order = {"token_ids": [9] * 40, "salt": "00ff", "tenant": "t", "lane": 1}
    async with client(gateway.app) as http:
        assert (await http.post(prefill.PATH, json=order)).status_code == 401
        known = {SECRET_HEADER: SECRET}
        answering = http.post(prefill.PATH, json=order, headers=known)
        reply = asyncio.ensure_future(answering)
        request = await gateway.taken()
        assert (request.salt, request.tenant, len(request.block_hashes)) == (b"\x00\xff", "t", 2)
        gateway.answer(request, "a")
        assert (await reply).json() == {"prompt_tokens": 40, "cached_tokens": 4}
        mistakes: list[dict[str, Any]] = [
            {"token_ids": []},
            {"token_ids": [10**9]},
            {"token_ids": ["9"]},
            {"token_ids": [9] * 600},
            {"salt": "x"},
            {"lane": 7},
            {"tenant": 1},
            {"more": 1},
        ]
        for wrong in mistakes:
            assert (await http.post(prefill.PATH, json=order | wrong, headers=known)).status_code == 400


async def test_kv_that_is_being_computed_is_taken_for_those_who_know_the_secret() -> None:
    gateway, known = replica_for(Role.DECODE), {SECRET_HEADER: SECRET}
    order = {
        "token_ids": [9] * 40,
        "salt": "00ff",
        "tenant": "t",
        "lane": 1,
        "source": "http://127.0.0.1:9",
    }

    async def told(order: dict[str, Any], *lines: bytes, headers: dict[str, str] = known) -> httpx.Response:
        body = b"\n".join([orjson.dumps(order), *lines, b""])
        return await http.post(prefill.PULL_PATH, content=body, headers=headers)

    async with client(gateway.app) as http:
        assert (await told(order, b"1", headers={})).status_code == 401
        assert (await told(order, b"1", b"9")).json() == {"blocks": 9}
        hashes = prompt_hashes([9] * 40, 16, b"\x00\xff")
        assert pulled_at(gateway) == [(order["source"], [hashes[0]]), (order["source"], [hashes[1]])]
        for wrong in ({"source": 1}, {"token_ids": [10**9]}, {"lane": 7}, {"more": 1}):
            assert (await told(order | wrong, b"1")).status_code == 400
        for line in (b"", b"-1", b"x", b"1" * 10):
            assert (await told(order, line)).status_code == 400
        assert (await http.post(prefill.PULL_PATH, content=b"", headers=known)).status_code == 400
        assert len(pulled_at(gateway)) == 2
        gateway.service.kv = None
        assert (await told(order, b"1")).status_code == 404

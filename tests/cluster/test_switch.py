"""A switch before real gateways whose engines are in the test's hands: what they say, and who is chosen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
import tokenizers

from penstock.cluster import members
from penstock.cluster.queries import QueryReader
from penstock.cluster.switch import MOST_CHOSEN, Switch, SwitchOptions
from penstock.cluster.upstream import Address
from penstock.engine.planning.params import Pooling
from penstock.engine.planning.prefix_events import Dropped, Stored
from penstock.engine.planning.prefix_index import extend_hashes
from penstock.engine.planning.request import Request
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.endpoints.state import MOST_BLOCKS, PATH, SECRET_HEADER
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.gateway.sessions.owners import tag_in, tag_of
from penstock.gateway.tickets import ticket_of
from penstock.gateway.wire.lanes import TPOT_HEADER, TTFT_HEADER, slo_of
from penstock.gateway.wire.prompts import Prompts
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, Tenant
from penstock.priority.routing.router import RouteQuery, Router
from penstock.priority.routing.state import parse_change, parse_snapshot
from penstock.priority.verdict import Refusal
from tests.cluster.scripted_replicas import PATIENCE_S, serving
from tests.gateway.harness import (
    MODEL,
    TEMPLATE,
    Gateway,
    chat_body,
    client,
    completion_body,
    make_tokenizer,
    tokenizer_json,
)
from tests.gateway.raw_http import connect, get

pytestmark = pytest.mark.anyio

SECRET = "a secret of the tests"
IDENTITY = "fake 1"
MOST_BYTES = 50_000
CHAT = "/v1/chat/completions"
LONG = "A story about a fox that is long enough for many blocks. " * 4


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "AGAIN_S", 0.02)


def make_gateway(name: str, **options: Any) -> Gateway:
    given = {"models": (MODEL,), "replica": name, "identity": IDENTITY, "cluster_secret": SECRET, **options}
    return Gateway(ServiceOptions(**given))


async def until(is_so: Callable[[], object]) -> None:
    """Returns when something that another task brings about has come."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.005)


class Cluster:
    """Gateways behind a switch, and a client of it."""

    def __init__(self, switch: Switch, http: httpx.AsyncClient, gateways: dict[str, Gateway]) -> None:
        self.switch = switch
        self.http = http
        self.gateways = gateways
        self.addresses: dict[str, Address] = {}

    async def chat(self, content: str = LONG) -> str:
        """Who was chosen for a chat, and answered it."""
        asking = asyncio.create_task(self.http.post(CHAT, json=chat_body(content, max_tokens=4)))
        taking = {asyncio.create_task(gateway.taken()): gateway for gateway in self.gateways.values()}
        (taken,), left = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        gateway, request = taking[taken], taken.result()
        gateway.answer(request, "a", "b")
        gateway.queue.settle(request, gateway.clock())
        return (await asking).headers["x-penstock-replica"]

    def told_requests(self) -> int:
        """The number of requests that replicas have reported as begun and not as ended."""
        works = [work for one in self.switch.router.replicas.values() for work in one.load.lanes.values()]
        return sum(work.num_waiting + work.num_running for work in works)


@contextlib.asynccontextmanager
async def cluster(
    *gateways: Gateway, ready: int | None = None, stale_s: float = PATIENCE_S
) -> AsyncIterator[Cluster]:
    switch = Switch(
        SwitchOptions(
            secret=SECRET, identity=IDENTITY, block_size=16, limits=Limits(max_body_bytes=MOST_BYTES)
        ),
        Prompts(make_tokenizer()),
        Router(stale_s=stale_s),
    )
    async with contextlib.AsyncExitStack() as stack:
        found = Cluster(
            switch, httpx.AsyncClient(timeout=PATIENCE_S), {d.service.options.replica: d for d in gateways}
        )
        for gateway in gateways:
            found.addresses[gateway.service.options.replica] = await stack.enter_async_context(
                serving(gateway.app)
            )
        await stack.enter_async_context(switch.running(found.addresses.values()))
        address = await stack.enter_async_context(serving(switch.app()))
        await until(lambda: len(switch.members.live) == (len(gateways) if ready is None else ready))
        found.http.base_url = httpx.URL(str(address))
        await stack.enter_async_context(found.http)
        yield found


# What a replica says of itself


async def test_state_is_for_those_who_know_the_secret_and_there_is_none_without_one() -> None:
    with_secret, without = make_gateway("a"), make_gateway("b", cluster_secret=None)
    async with client(with_secret.app) as http:
        assert (await http.get(f"{PATH}?switch=ab")).status_code == 401
        known = {SECRET_HEADER: SECRET}
        assert (await http.get(f"{PATH}?switch=../x", headers=known)).status_code == 400
        with_secret.service.begin_drain()
        assert (await http.get(f"{PATH}?switch=ab", headers=known)).status_code == 503
    async with client(without.app) as http:
        assert (await http.get(f"{PATH}?switch=ab", headers={SECRET_HEADER: "None"})).status_code == 404


async def test_a_snapshot_then_what_changes_and_the_tickets_of_this_switch_alone() -> None:
    gateway = make_gateway("a")
    gateway.deliver(prefix_events=[stored(b"1" * 16)])
    async with (
        serving(gateway.app) as address,
        httpx.AsyncClient(base_url=str(address), timeout=PATIENCE_S) as http,
    ):
        known = {SECRET_HEADER: SECRET}
        async with http.stream("GET", f"{PATH}?switch=ab", headers=known) as reply:
            lines = reply.aiter_lines()
            snapshot = parse_snapshot(json.loads(await anext(lines)))
            assert (snapshot.replica, snapshot.model, snapshot.blocks) == ("a", IDENTITY, [b"1" * 16])
            assert (snapshot.num_kv_tokens, snapshot.load.num_free_kv) == (512, 512)
            gateway.deliver(prefix_events=[stored(b"2" * 16)])
            asking = []
            forged = ticket_of("another secret", "ab", 9)
            for ticket in (ticket_of(SECRET, "ab", 7), ticket_of(SECRET, "cd", 8), forged, "ab/7"):
                headers = {"x-penstock-ticket": ticket}
                asking.append(asyncio.create_task(http.post(CHAT, json=chat_body(), headers=headers)))
            await gateway.queued(4)
            blocks: list[bytes] = []
            tickets: list[int] = []
            number = 0
            while not (blocks and tickets):
                change = parse_change(json.loads(await anext(lines)))
                number += 1
                assert (change.number, change.epoch) == (number, snapshot.epoch)
                blocks += change.stored
                tickets += change.counted
                waiting = change.load and change.load.lanes[Lane.STANDARD].num_waiting
            assert (blocks, tickets, waiting) == ([b"2" * 16], [7], 4)
            for task in asking:
                gateway.answer(await gateway.taken(), "a")
                await task


async def test_many_blocks_come_in_many_messages() -> None:
    gateway = make_gateway("a")
    hashes = [number.to_bytes(16, "big") for number in range(2 * MOST_BLOCKS + 10)]
    gateway.deliver(prefix_events=[stored(each) for each in hashes])
    async with cluster(gateway) as found:
        index = found.switch.router.index
        await until(lambda: index.num_blocks == len(hashes))
        async with (
            httpx.AsyncClient(base_url=str(found.addresses["a"]), timeout=PATIENCE_S) as http,
            http.stream("GET", f"{PATH}?switch=ab", headers={SECRET_HEADER: SECRET}) as reply,
        ):
            lines = reply.aiter_lines()
            blocks = [parse_snapshot(json.loads(await anext(lines))).blocks]
            while sum(map(len, blocks)) < len(hashes):
                blocks.append(parse_change(json.loads(await anext(lines))).stored)
        assert max(map(len, blocks)) <= MOST_BLOCKS
        assert {each for some in blocks for each in some} == {*hashes}
        gateway.deliver(prefix_events=[Dropped(hashes[0]), Dropped(hashes[-1])])
        await until(lambda: index.num_blocks == len(hashes) - 2)
        whole = await found.http.get(f"{found.addresses['a']}{PATH}", headers={SECRET_HEADER: SECRET})
        assert {*parse_snapshot(whole.json()).blocks} == {*hashes[1:-1]}


async def test_the_key_comes_before_the_body_and_what_is_unknown_needs_neither() -> None:
    async with cluster(make_gateway("a")) as found:
        found.switch.access.replace({digest_of("sk-alice"): Client(Tenant(name="alice"))})

        for path in (CHAT, "/v1/files", "/tokenize", "/v1/batches"):
            async with connect(str(found.http.base_url).rstrip("/")) as connection:
                connection.send(get(path, "content-length: 9", "authorization: Bearer x", method="POST"))
                assert (await connection.answer()).status == 401
        assert (await found.http.post("/v1/nothing", json={})).status_code == 404


def stored(hash_: bytes) -> Stored:
    return Stored(hash=hash_, parent=None, depth=1, token_ids=(1,) * 16, salt=b"default")


# Who is chosen


async def test_a_replica_counts_the_switches_that_know_it_and_not_who_only_looks() -> None:
    gateway = make_gateway("a")
    switches = gateway.service.metrics.switches
    async with cluster(gateway) as found:
        await until(lambda: switches.value == 1)
        url = f"{found.addresses['a']}{PATH}"
        reply = await found.http.get(url, headers={SECRET_HEADER: SECRET})
        assert parse_snapshot(reply.json()).model == IDENTITY
        assert switches.value == 1
    await until(lambda: switches.value == 0)


async def test_a_prompt_goes_to_who_holds_its_beginning_and_others_in_turn() -> None:
    async with cluster(make_gateway("a"), make_gateway("b")) as found:
        others = "Something else, and as long as many blocks are. " * 4
        assert {await found.chat(LONG), await found.chat(others)} == {"a", "b"}
        hashes = prompt_hashes(LONG)
        found.gateways["b"].deliver(prefix_events=[stored(known) for known in hashes])
        await until(lambda: found.switch.router.index.num_blocks >= len(hashes))
        for content in (LONG, LONG + "And more."):
            await until(lambda: not found.told_requests())
            assert await found.chat(content) == "b"
        assert (await found.http.get("/metrics")).text.count("penstock_switch_cached_tokens_total") == 3


def prompt_hashes(content: str) -> list[bytes]:
    token_ids = Prompts(make_tokenizer()).chat(
        [{"role": "user", "content": content}], add_generation_prompt=False
    )
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, len(token_ids) // 16, 16, b"default")
    return hashes


async def test_a_replica_that_is_gone_or_drains_is_passed_over_at_once_and_comes_back() -> None:
    a, b = make_gateway("a"), make_gateway("b")
    async with cluster(a, b) as found:
        a.service.begin_drain()
        for _ in range(2):  # before it was told, and after
            assert await found.chat() == "b"
        await until(lambda: "a" not in found.switch.members.live)
        a.service.dispatch.draining = False
        await until(lambda: "a" in found.switch.members.live)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"identity": "other 2"}, "it serves other 2, and this switch is for fake 1"),
        ({"block_size": 32}, "its blocks have 32 tokens, not 16"),
        ({"cluster_secret": "another secret than ours"}, "it does not take this switch's secret"),
        ({"cluster_secret": None}, "it was started without a cluster secret"),
        ({"replica": "a"}, "another replica is called a, too; set --replica"),
    ],
)
async def test_who_cannot_stand_in_for_the_others_is_left_out_with_one_line(
    options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.switch")
    async with cluster(make_gateway("a")) as found, serving(make_gateway("b", **options).app) as odd:
        await found.switch.members.set([found.addresses["a"], odd])
        await until(lambda: [r for r in caplog.records if str(odd) in r.getMessage()])
        await asyncio.sleep(0.1)  # it is asked again and again
        lines = [record.getMessage() for record in caplog.records if str(odd) in record.getMessage()]
        assert lines == [f"replica {odd} is left out: {says}"]
        assert found.switch.members.live.keys() == {"a"}


# What is asked


async def test_ids_lead_to_who_has_what_they_name() -> None:
    async with cluster(make_gateway("a"), make_gateway("b")) as found:
        for _ in range(2):
            made = (await found.http.post("/v1/conversations", json={})).json()["id"]
            assert tag_in(made) in (tag_of("a"), tag_of("b"))
            for _ in range(2):
                shown = await found.http.get(f"/v1/conversations/{made}")
                assert shown.status_code == 200
            body = {"model": MODEL, "input": "Hi", "conversation": made}
            asking = asyncio.create_task(found.http.post("/v1/responses", json=body))
            owner = "a" if tag_in(made) == tag_of("a") else "b"
            found.gateways[owner].answer(await found.gateways[owner].taken(), "yes")
            assert (await asking).status_code == 200
            assert (await found.http.delete(f"/v1/conversations/{made}")).status_code == 200
        assert (await found.http.get("/v1/conversations/conv_0123")).status_code == 404


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), ("/v1/completions", completion_body("Hi"))])
async def test_a_recorded_reply_is_followed_and_forgotten_wherever_it_was_made(
    path: str, body: dict[str, Any]
) -> None:
    async with cluster(make_gateway("a"), make_gateway("b")) as found:
        asked = {**body, "max_tokens": 4, "stream": True, "stream_options": {"resumable": True}}
        asking = asyncio.create_task(found.http.post(path, json=asked))
        taking = [asyncio.create_task(gateway.taken()) for gateway in found.gateways.values()]
        (taken,), (left,) = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        list(found.gateways.values())[taking.index(taken)].answer(taken.result(), "a", "b")
        reply = await asking
        id = json.loads(reply.text.partition("data: ")[2].partition("\n")[0])["id"]
        for _ in range(2):
            assert (await found.http.get(f"{path}/{id}")).text == reply.text
        assert (await found.http.delete(f"{path}/{id}")).json()["deleted"]
        assert (await found.http.get(f"{path}/{id}")).status_code == 404


async def test_a_file_may_be_larger_than_other_bodies() -> None:
    async with cluster(make_gateway("a"), make_gateway("b")) as found:
        content = b"x" * (20 * MOST_BYTES)
        form = {"file": ("in.jsonl", content)}
        made = (await found.http.post("/v1/files", files=form, data={"purpose": "batch"})).json()
        assert made["bytes"] == len(content)
        assert (await found.http.get(f"/v1/files/{made['id']}/content")).content == content


async def test_the_page_may_upload_through_the_switch_and_no_other() -> None:
    async with cluster(make_gateway("a")) as found:
        form: Any = {"files": {"file": ("in.jsonl", b"x")}, "data": {"purpose": "batch"}}
        for origin, status in ((str(found.http.base_url), 200), ("http://evil.example", 403)):
            reply = await found.http.post("/v1/files", headers={"origin": origin}, **form)
            assert reply.status_code == status, reply.text


async def test_a_replica_logs_where_the_client_is_and_not_where_the_switch_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    async with cluster(make_gateway("a")) as found:
        await found.http.get("/v1/models", headers={"x-forwarded-for": "198.51.100.1, 203.0.113.9"})
    lines = [record.__dict__["fields"] for record in caplog.records if record.name == "penstock.access"]
    models = [line for line in lines if line["path"] == "/v1/models"]
    assert [line["address"] for line in models] == ["203.0.113.9"] * 2, "the switch's line and the replica's"


async def test_the_rest_is_answered_by_any_replica_or_by_the_switch() -> None:
    async with cluster(make_gateway("a"), make_gateway("b")) as found:
        models = [await found.http.get("/v1/models") for _ in range(4)]
        assert {reply.headers["x-penstock-replica"] for reply in models} == {"a", "b"}
        assert models[0].json()["data"][0]["id"] == MODEL
        assert (await found.http.get("/ready")).json() == {"status": "ready"}
        assert (await found.http.get(f"{PATH}?switch=ab", headers={SECRET_HEADER: SECRET})).status_code == 404
        named = await found.http.get("/v1/models", headers={"x-request-id": "mine"})
        assert named.headers.get_list("x-request-id") == ["mine"]
        assert (await found.http.head("/v1/models")).content == b""
        wrong = await found.http.post(CHAT, json={"model": MODEL})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")
        assert (
            await found.http.post(CHAT, content=b"{", headers={"content-type": "application/json"})
        ).status_code == 400
        large = await found.http.post(CHAT, content=b"x" * (MOST_BYTES + 1))
        assert large.status_code == 413
        assert (await found.http.get("/v1/models", headers={"host": "evil.example"})).status_code == 200


async def test_without_a_replica_it_says_so_and_when_it_drains_too() -> None:
    async with cluster(make_gateway("a", identity="other"), ready=0) as found:
        for path in (CHAT, "/v1/messages", "/api/chat"):
            reply = await found.http.post(path, json=chat_body())
            assert reply.status_code == (529 if path == "/v1/messages" else 503)
            assert "retry-after" in reply.headers
        assert (await found.http.get("/ready")).status_code == 503
        found.switch.draining = True
        assert (await found.http.get("/v1/models")).json()["error"]["code"] == "server_shutting_down"


# What other proxies ask


async def test_another_proxy_is_told_where_a_request_goes_and_its_place_is_reserved() -> None:
    async with cluster(make_gateway("a"), make_gateway("b")) as found:
        reply = await found.http.post(f"/choose{CHAT}", json=chat_body(LONG))
        told = reply.json()
        name, ticket = told["replica"], told["headers"]["x-penstock-ticket"]
        assert told["address"] == str(found.addresses[name])
        assert reply.headers["x-penstock-replica"] == name
        assert reply.headers["x-penstock-address"] == told["address"]
        assert f"http://{reply.headers['x-penstock-authority']}" == told["address"]
        assert reply.headers["x-penstock-ticket"] == ticket
        assert "x-penstock-once" not in reply.headers
        making = await found.http.post("/choose/v1/batches", json={})
        assert making.headers["x-penstock-once"] == "1"
        # Its blocks are expected there.
        again = await found.http.post(f"/choose{CHAT}", json=chat_body(LONG + "And more."))
        assert again.json()["replica"] == name
        reservation = found.switch.router.replicas[name].open[int(ticket.partition("/")[2])]
        assert not reservation.is_counted
        async with httpx.AsyncClient(base_url=told["address"], headers=told["headers"]) as http:
            asking = asyncio.create_task(http.post(CHAT, json=chat_body(LONG)))
            request = await found.gateways[name].taken()
            await until(lambda: reservation.is_counted)
            found.gateways[name].answer(request, "x")
            assert (await asking).status_code == 200


async def test_who_asks_where_is_asked_for_a_key_and_refused_like_a_request() -> None:
    async with cluster(make_gateway("a"), make_gateway("b")) as found:
        made = (await found.http.post("/v1/conversations", json={})).json()["id"]
        owner = "a" if tag_in(made) == tag_of("a") else "b"
        for _ in range(2):
            told = await found.http.get(f"/choose/v1/conversations/{made}")
            assert told.json() == {"replica": owner, "address": str(found.addresses[owner]), "headers": {}}
        found.switch.access.replace({digest_of("sk-alice"): Client(Tenant(name="alice"))})
        for path in (CHAT, "/v1/models"):
            assert (await found.http.post(f"/choose{path}", json=chat_body())).status_code == 401
        found.http.headers["authorization"] = "Bearer sk-alice"
        assert (await found.http.get("/choose/v1/models")).json()["replica"] in ("a", "b")
        await found.switch.members.set(())
        refused = await found.http.post(f"/choose{CHAT}", json=chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        assert "retry-after" in refused.headers
        found.switch.draining = True
        assert (await found.http.get("/choose/v1/models")).json()["error"]["code"] == "server_shutting_down"


async def test_what_a_router_refuses_is_refused_for_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(make_gateway("a")) as found:
        for reason in ("promise_out_of_reach", "no_replica"):
            monkeypatch.setattr(Router, "choose", lambda *_, why=reason: Refusal(why, "too late", 2.5))
            refused = await found.http.post(CHAT, json=chat_body())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, reason)
            assert ("too late" in refused.text) == (reason == "promise_out_of_reach")
        found.switch.options = replace(found.switch.options, overload_status=429)
        for reason, status in (("promise_out_of_reach", 429), ("no_replica", 503)):
            monkeypatch.setattr(Router, "choose", lambda *_, why=reason: Refusal(why, "too late", 2.5))
            assert (await found.http.post(CHAT, json=chat_body())).status_code == status


async def test_a_switch_is_drained_when_the_last_reply_is_over() -> None:
    async with cluster(make_gateway("a")) as found:
        await found.switch.drained(PATIENCE_S)
        asking = asyncio.create_task(found.http.post(CHAT, json=chat_body()))
        request = await found.gateways["a"].taken()
        await found.switch.drained(0)
        draining = asyncio.create_task(found.switch.drained(100 * PATIENCE_S))
        await asyncio.sleep(0)
        assert not draining.done()
        found.gateways["a"].answer(request, "x")
        assert (await asking).status_code == 200
        async with asyncio.timeout(PATIENCE_S):
            await draining


async def test_a_tenant_that_asks_where_again_and_again_has_only_its_last_places() -> None:
    async with cluster(make_gateway("a"), make_gateway("b")) as found:
        clients = {name: Client(Tenant(name=name)) for name in ("alice", "bob")}
        found.switch.access.replace({digest_of(f"sk-{name}"): client for name, client in clients.items()})
        tickets: dict[str, list[int]] = {"alice": [], "bob": []}
        for name in ("bob", *["alice"] * (MOST_CHOSEN + 3)):
            headers = {"authorization": f"Bearer sk-{name}"}
            reply = await found.http.post(f"/choose{CHAT}", json=chat_body(), headers=headers)
            tickets[name].append(int(reply.headers["x-penstock-ticket"].partition("/")[2]))
        kept = {ticket for one in found.switch.router.replicas.values() for ticket in one.open}
        assert kept == {*tickets["bob"], *tickets["alice"][-MOST_CHOSEN:]}
        assert found.switch.router.num_reserved == len(kept)


# What is read of a request

RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}Say it at once.{% endif %}"
READ = [
    (CHAT, chat_body(LONG)),
    (CHAT, chat_body(LONG, service_tier="priority", cache_salt="own", store=False)),
    (CHAT, chat_body(LONG, truncate_prompt_tokens=40)),
    (
        CHAT,
        {
            **chat_body(),
            "messages": [{"role": "developer", "content": LONG}, {"role": "user", "content": "x"}],
        },
    ),
    ("/v1/completions", completion_body(LONG, service_tier="flex")),
    ("/v1/completions", completion_body([LONG, "other"])),
    ("/v1/completions", completion_body([5] * 40)),
    ("/v1/responses", {"model": MODEL, "input": LONG, "instructions": "Be kind."}),
    (
        "/v1/messages",
        {"model": MODEL, "messages": [{"role": "user", "content": LONG}], "max_tokens": 3, "system": "x"},
    ),
    ("/api/chat", {"model": MODEL, "messages": [{"role": "user", "content": LONG}], "stream": False}),
    ("/api/generate", {"model": MODEL, "prompt": LONG, "raw": True, "stream": False}),
    (CHAT, chat_body(LONG, reasoning_effort="none")),
    ("/v1/responses", {"model": MODEL, "input": LONG, "reasoning": {"effort": "none"}}),
    ("/v1/embeddings", {"model": MODEL, "input": ["x", LONG], "service_tier": "flex"}),
    *((path, {"model": MODEL, "query": "x", "documents": [LONG, "y"]}) for path in RERANK),
    *((path, {"model": MODEL, "text_1": "x", "text_2": [LONG, "y"]}) for path in ("/score", "/v1/score")),
    (
        "/v1/decisions",
        {
            "model": MODEL,
            "input": LONG,
            "questions": [{"type": "predicate", "instructions": "Is it long?"}],
            "service_tier": "flex",
        },
    ),
    (
        "/v1/systemone",
        {
            "model": MODEL,
            "state": {"said": LONG},
            "questions": {"a": {"type": "noul", "instructions": "Is it?"}},
        },
    ),
    ("/completion", {"prompt": ["x", f"<|user|>{LONG}"]}),
    ("/infill", {"input_prefix": LONG, "input_suffix": "z", "prompt": "y"}),
    ("/api/embed", {"model": MODEL, "input": [LONG, "x"]}),
    ("/api/embeddings", {"model": MODEL, "prompt": LONG}),
]


@pytest.mark.parametrize(("path", "body"), READ)
async def test_a_prompt_has_the_blocks_that_a_replica_makes_of_it(path: str, body: dict[str, Any]) -> None:
    ask, requests = await read_in_both(path, body)
    longest = max(requests, key=lambda request: len(request.prompt_token_ids))
    hashes: list[bytes] = []
    num_blocks = (len(longest.prompt_token_ids) - 1) // 16
    extend_hashes(hashes, longest.prompt_token_ids, num_blocks, 16, longest.salt)
    assert num_blocks > 1
    assert ask.hashes == hashes
    assert ask.num_prompt == sum(len(request.prompt_token_ids) for request in requests)
    assert {(ask.lane, ask.tenant)} == {(request.lane, request.tenant) for request in requests}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"service_tier": "priority"}])
@pytest.mark.parametrize("headers", [{}, {TTFT_HEADER: "20000"}, {TPOT_HEADER: "500"}])
async def test_a_request_is_as_urgent_as_a_replica_takes_it(
    fields: dict[str, Any], headers: dict[str, str]
) -> None:
    ask, [request] = await read_in_both(CHAT, chat_body(**fields), headers=headers)
    assert (ask.lane, ask.tried, ask.ttft_s) == (request.lane, request.tried_lane, request.ttft_s)


def tokenizer_for_infills(template: str) -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(tokenizer_json())
    inner.add_special_tokens(["<fim_prefix>", "<fim_middle>", "<fim_suffix>"])
    return Tokenizer(inner.to_str(), make_tokenizer().special_tokens, template)


async def read_in_both(
    path: str, body: dict[str, Any], pooling: Pooling = Pooling.LAST, headers: Mapping[str, str] = {}
) -> tuple[RouteQuery, list[Request]]:
    """What a switch finds in a body, and the requests that a replica makes of it."""
    gateway, tokenizer = make_gateway("a"), tokenizer_for_infills(THINKING)
    gateway.service.prompts, gateway.service.vocab_size = Prompts(tokenizer), tokenizer.vocab_size
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(path, json=body, headers=headers))
        requests = [await gateway.taken()]
        while sum(gateway.queue.depths().values()):
            requests.append(await gateway.taken())
        asking.cancel()
    asks, kind = QueryReader(Prompts(tokenizer), 16, Limits(), pooling), OPERATIONS[path]["POST"].body
    assert kind is not None
    slo = slo_of(headers)
    read = await asks.read(kind, body, 1, Tenant(name="default"), slo, DEFAULT_POLICIES)
    return read.query, requests


async def test_nothing_is_found_in_a_cache_where_all_of_a_prompt_is_wanted() -> None:
    ask, requests = await read_in_both("/v1/embeddings", {"model": MODEL, "input": LONG}, Pooling.MEAN)
    assert (ask.num_prompt, ask.hashes) == (len(requests[0].prompt_token_ids), [])


async def test_keys_are_read_as_the_replicas_read_them() -> None:
    clients = {digest_of("sk-alice"): Tenant(name="alice")}
    async with cluster(make_gateway("a", clients=clients)) as found:
        found.switch.access.replace({digest: Client(tenant) for digest, tenant in clients.items()})
        assert (await found.http.post(CHAT, json=chat_body())).status_code == 401
        found.http.headers["authorization"] = "Bearer sk-alice"
        asking = asyncio.create_task(found.http.post(CHAT, json=chat_body()))
        request = await found.gateways["a"].taken()
        assert request.tenant == "alice"
        found.gateways["a"].answer(request, "x")
        assert (await asking).status_code == 200

"""`/internal/kv`: whole blocks, in a row, for members of the cluster alone."""

from __future__ import annotations

import httpx
import pytest

from penstock.engine.tiers.block_file import BlockKey, digest_of, pack
from penstock.engine.tiers.peer import MAX_KEYS, PATH, PeerTier
from penstock.gateway.endpoints.state import SECRET_HEADER
from tests.clock import Clock
from tests.cluster.fake_exchange import FakeExchange
from tests.cluster.test_switch import SECRET, make_gateway
from tests.gateway.harness import client, serving

pytestmark = pytest.mark.anyio

KEYS = [BlockKey(bytes([number]) * 16, number % 2) for number in range(MAX_KEYS + 1)]
DIGEST = FakeExchange.digest
KNOWN = {SECRET_HEADER: SECRET}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def exchange_of(keys: list[BlockKey]) -> FakeExchange:
    exchange = FakeExchange()
    exchange.payloads = {key: key.hash * 40 for key in keys}
    return exchange


def path_of(keys: list[BlockKey], digest: bytes = DIGEST) -> str:
    return f"{PATH}/{digest.hex()}/{','.join(key.text for key in keys)}"


async def asked(http: httpx.AsyncClient, path: str, headers: dict[str, str] = KNOWN) -> httpx.Response:
    return await http.get(path, headers=headers)


async def test_blocks_come_in_a_row_up_to_the_first_that_is_missing() -> None:
    gateway, exchange = make_gateway("a"), exchange_of(KEYS)
    gateway.service.kv = exchange
    del exchange.payloads[KEYS[2]]
    async with client(gateway.app) as http:
        reply = await asked(http, path_of(KEYS[:5]))
        assert reply.status_code == 200
        assert reply.content == b"".join(pack(key, exchange.payloads[key], DIGEST) for key in KEYS[:2])
        assert (await asked(http, path_of(KEYS[2:4]))).content == b""


async def test_what_is_not_right_is_refused() -> None:
    gateway = make_gateway("a")
    async with client(gateway.app) as http:
        assert (await asked(http, path_of(KEYS[:1]))).status_code == 404  # it gives nothing at all
        gateway.service.kv = exchange_of(KEYS)
        assert (await asked(http, path_of(KEYS[:1]), {})).status_code == 401
        assert (await asked(http, path_of(KEYS[:1]), {SECRET_HEADER: "guessed"})).status_code == 401
        assert (await asked(http, path_of(KEYS[:1], digest_of(["other"])))).status_code == 404
        assert (await asked(http, path_of(KEYS))).status_code == 400
        assert (await asked(http, f"{PATH}/{DIGEST.hex()}/what")).status_code == 400
        assert (await asked(http, path_of(KEYS[:-1]))).status_code == 200
    async with client(make_gateway("b", cluster_secret=None).app) as http:
        assert (await asked(http, path_of(KEYS[:1]), {SECRET_HEADER: "None"})).status_code == 404


async def test_another_replica_reads_them() -> None:
    import anyio

    gateway = make_gateway("a")
    gateway.service.kv = exchange_of(KEYS)
    async with serving(gateway.app) as address:
        peers = PeerTier(DIGEST, 16 * 40, KNOWN, Clock())
        peers.expect(address, KEYS)
        for key in KEYS:
            payload = await anyio.to_thread.run_sync(peers.read, key)
            assert payload is not None
            assert bytes(payload) == key.hash * 40

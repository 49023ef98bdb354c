"""A real Ray with two replicas and a switch: `python -m loadtests.ray_cluster` in short."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import httpx
import pytest

from loadtests.local_ray import LocalRay
from loadtests.ray_cluster import Cluster, Status, killed_under_streams, light_load
from penstock.app.listen import bind, port_of
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is in penstock[cluster], not in penstock[test]"
)
LIFE_S = 400


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@needs_ray
async def test_a_cluster_is_deployed_loses_a_replica_shrinks_and_ends() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = port_of(listener)
    with RedisServer() as redis, LocalRay(num_cpus=2) as ray:
        cluster = Cluster(ray)
        async with asyncio.timeout(LIFE_S):
            common = f"--port {port} --redis-url {redis.url} --threads 1 --warm-up-tokens 0".split()
            status = Status.parse(await cluster.run("deploy", "--replicas", "2", *common))
            (switch,) = status.switches
            assert switch.url == f"http://127.0.0.1:{port}"
            assert all(one.url.startswith("http://127.0.0.1:") for one in status.replicas)
            victim = status.replicas[0]
            async with light_load([switch.url]) as tally:
                expected, got = await killed_under_streams(victim, [switch.url], 8, 48)
                assert got == expected
                replaced = await cluster.until_replaced(switch.url, victim.name, 2)
                assert f"failed: {victim.name} on" in replaced.text
                scaled = Status.parse(await cluster.run("scale", "1"))
                assert len(scaled.replicas) == 1
            assert tally.failures == []
            assert tally.num_answered > 0
            assert await cluster.run("down") == "penstock is down\n"
            with pytest.raises(
                RuntimeError, match="no cluster called penstock runs here; `penstock cluster deploy`"
            ):
                await cluster.run("status")
            with pytest.raises(OSError, match=str(port)):
                await asyncio.open_connection("127.0.0.1", port)


@needs_ray
async def test_replicas_for_prompts_run_beside_the_others() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = port_of(listener)
    with LocalRay(num_cpus=2) as ray:
        cluster = Cluster(ray)
        async with asyncio.timeout(LIFE_S):
            common = f"--port {port} --threads 1 --warm-up-tokens 0".split()
            text = await cluster.run("deploy", "--replicas", "1", "--prefill-replicas", "1", *common)
            assert "penstock-prefill: running" in text
            status = Status.parse(text)
            assert len(status.replicas) == 2
            url = status.switches[0].url
            body = {"model": "penstock-demo", "prompt": [300 + i % 50 for i in range(600)], "max_tokens": 2}
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                assert (await http.post("/v1/completions", json=body)).status_code == 200
                metrics = (await http.get("/metrics")).text
            assert "penstock_switch_computed_elsewhere_total 1" in metrics
            assert await cluster.run("down") == "penstock is down\n"

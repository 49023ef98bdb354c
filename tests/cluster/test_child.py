"""A process of Penstock's and its keeper: what it says is heard, and it does not outlive it."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from penstock.cluster.child import Child, ChildFailed, package_parent

pytestmark = pytest.mark.anyio

START_S = 120
SECRET = {"PENSTOCK_CLUSTER_SECRET": "a secret of the tests", "PENSTOCK_PORT": "0"}
# Starts a switch, tells its address, and is killed.
KEEPER = """\
import asyncio, sys
from penstock.cluster.child import Child

async def main() -> None:
    child = await Child.start(["switch", "--replicas-file", sys.argv[1]], {
        "PENSTOCK_CLUSTER_SECRET": "a secret of the tests", "PENSTOCK_PORT": "0"
    })
    print(child.pid, child.url, flush=True)
    await child.ended()

asyncio.run(main())
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def no_replicas(tmp_path: Path) -> Path:
    path = tmp_path / "replicas"
    path.touch()
    return path


async def test_it_is_ready_and_ends_when_it_is_told_to(
    no_replicas: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(START_S):
        child = await Child.start(["switch", "--replicas-file", str(no_replicas)], SECRET)
        assert await asyncio.to_thread(_health, child.url) == 200
        assert child.is_running
        await child.stop(START_S)
        assert await child.ended() == 0
    assert not child.is_running
    assert f"open {child.url}" in capfd.readouterr().err  # its log is that of the keeper


async def test_why_it_did_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "from the keeper's own environment")
    async with asyncio.timeout(START_S):
        with pytest.raises(
            ChildFailed, match="unknown variable PENSTOCK_THEADS; did you mean PENSTOCK_THREADS"
        ):
            await Child.start(["serve"], {"PENSTOCK_THEADS": "1"})


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_it_dies_with_its_keeper(no_replicas: Path) -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(no_replicas)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package_parent())},
    )
    assert keeper.stdout is not None
    with keeper, keeper.stdout:
        pid, url = keeper.stdout.readline().split()
        assert _health(url) == 200
        child = os.pidfd_open(int(pid))
        keeper.kill()
    try:
        assert _ended(child)
    finally:
        os.close(child)


def _ended(pidfd: int) -> bool:
    readable, _, _ = select.select([pidfd], [], [], START_S)
    return bool(readable)


def _health(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=START_S) as response:
        status: int = response.status
        return status

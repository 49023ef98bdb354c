"""The life of a cluster on Ray, on a stand-in for its commands: what is asked, counted, told and judged."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from loadtests.local_ray import LocalRay
from loadtests.ray_cluster import (
    Cluster,
    Process,
    Status,
    ask,
)
from tests.loadtests.scripted import HEAD, REFUSED, ScriptedServer, chat, frame


def status_of(*replicas: str, switches: int = 2) -> str:
    lines = ["penstock-switches:"]
    lines += [f"  http://127.0.0.1:{80 + i}  s{i}  pid {i} on here  serves" for i in range(switches)]
    lines += ["penstock-replicas: running"]
    lines += [f"  http://127.0.0.1:90  {name}  pid 7{name[1:]} on there  is idle" for name in replicas]
    return "\n".join(lines)


def test_a_status_is_read() -> None:
    text = status_of("r1", "r2", switches=1) + "\n  failed: r3 on there"
    status = Status.parse(text)
    assert status == Status(
        text,
        [Process("http://127.0.0.1:80", "s0", 0, "serves")],
        [Process("http://127.0.0.1:90", f"r{i}", 70 + i, "is idle") for i in (1, 2)],
    )


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Its command says what it was told, and fails if it is `fail`."""
    command = tmp_path / "python"
    command.write_text('#!/bin/sh\necho "$VALUE: $@"\ncase "$@" in *fail*) echo no >&2; exit 1;; esac\n')
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    ray = SimpleNamespace(address="here:1", environment={"VALUE": "token"})
    return Cluster(cast(LocalRay, ray))


def test_a_replica_is_replaced_when_the_switch_and_ray_say_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = [status_of("r1", "r2"), status_of("r2", "r3")]

    async def run(*_: str) -> str:
        return statuses.pop(0)

    monkeypatch.setattr(cluster, "run", run)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\npenstock_switch_replicas "
    with ScriptedServer(head + b"1.0", head + b"2.0") as server:
        found = asyncio.run(cluster.until_replaced(server.url, "r1", 2))
    assert [one.name for one in found.replicas] == ["r2", "r3"]
    assert server.asked == [("GET", "/metrics", None)] * 3


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (chat("a", output=7), "it ended after 7 tokens"),
        (HEAD + frame(choices=[{"delta": {"content": "a"}}]), r"the stream ended without \[DONE\]"),
        (REFUSED, "HTTP/1.1 503 Service Unavailable"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_failure(reply: bytes, error: str) -> None:
    with ScriptedServer(reply) as server, pytest.raises(RuntimeError, match=error):
        asyncio.run(ask(server.url, "Hello"))

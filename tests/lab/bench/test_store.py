"""The parts of the store's bench: a Redis of its own, a slow line to it, and the whole, quick."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from lab.bench.redis_process import RedisProcess, SlowLine
from tests.lab.bench.command import measure

ANSWER_S = 5.0


@pytest.fixture
def process() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


def connection(url: str, timeout_s: float = ANSWER_S) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=timeout_s)


def test_a_paused_redis_takes_connections_and_answers_when_it_goes_on(process: RedisProcess) -> None:
    process.pause()
    with connection(process.url, 0.05) as impatient, pytest.raises(redis.exceptions.TimeoutError):
        impatient.ping()
    process.resume()
    with connection(process.url) as client:
        assert client.ping()


def test_a_redis_that_is_gone_refuses(process: RedisProcess) -> None:
    process.kill()
    with connection(process.url) as client, pytest.raises(redis.exceptions.ConnectionError):
        client.ping()


def test_it_leaves_nothing_behind() -> None:
    with RedisProcess() as process, SlowLine(process.url) as line:
        folders = [Path(url.removeprefix("unix://")).parent for url in (process.url, line.url)]
        assert all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)


def test_on_a_slow_line_every_answer_comes_whole_and_late(process: RedisProcess) -> None:
    value = os.urandom(1 << 20)
    with SlowLine(process.url) as line, connection(line.url) as client:
        client.set("key", value)
        line.delay_s = 0.05
        started_s = time.monotonic()
        assert client.ping()
        assert client.ping()
        assert time.monotonic() - started_s >= 2 * line.delay_s
        line.delay_s = 0.0
        assert client.get("key") == value


def test_a_slow_line_to_nobody_ends_connections(process: RedisProcess) -> None:
    with SlowLine(process.url) as line, connection(line.url) as client:
        assert client.ping()
        process.kill()
        for _ in range(2):  # the one there was, and a new one
            with pytest.raises(redis.exceptions.ConnectionError):
                client.ping()


@pytest.mark.long("benches")
def test_redis_is_measured_well_and_in_trouble(tmp_path: Path) -> None:
    part, _ = measure("store", tmp_path)
    (streams,) = part["streams"]
    assert (streams["requests"], streams["failed"]) == (3 * 64, 0)
    assert all(rate > 0 for (rate,) in streams["turns"].values())
    assert [row["redis"] for row in part["trouble"]] == ["none", "well", "paused", "slow by 150 ms", "gone"]
    assert all(row["requests"] == 10 and row["ttft_p50_ms"] > 0 for row in part["trouble"])

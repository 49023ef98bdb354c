"""The life of a cluster on Ray, on a stand-in for its commands: what is asked, counted, told and judged."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadtests import local_ray, ray_cluster, replicas
from loadtests.local_ray import LocalRay
from loadtests.ray_cluster import (
    Cluster,
    Process,
    Status,
    Tally,
    ask,
    killed_under_streams,
    life,
    light_load,
    main,
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


def test_commands_are_those_of_an_operator(cluster: Cluster) -> None:
    said = "token: -m penstock cluster scale --address here:1 2\n"
    assert asyncio.run(cluster.run("scale", "2")) == said
    with pytest.raises(RuntimeError) as caught:
        asyncio.run(cluster.run("fail", "2"))
    failed = "fail 2: token: -m penstock cluster fail --address here:1 2\nno\n"
    assert str(caught.value) == failed
    assert asyncio.run(cluster.status()).text == "token: -m penstock cluster status --address here:1\n"


def test_a_status_that_is_not_well_is_one(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: str) -> str:
        raise RuntimeError(status_of("r1"))

    monkeypatch.setattr(cluster, "run", fail)
    assert [one.name for one in asyncio.run(cluster.status()).replicas] == ["r1"]


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


def test_a_request_is_this_and_its_first_text_is_told_once() -> None:
    firsts: list[int] = []
    with ScriptedServer(chat("a", "b"), chat("c", output=64)) as server:
        assert asyncio.run(ask(server.url, "Hello")) == "ab"
        text = asyncio.run(ask(server.url, "Hello", 64, lambda: firsts.append(1), seed=3, ignore_eos=False))
    body = {
        "model": "penstock-demo",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"resumable": True, "include_usage": True},
    }
    path = "/v1/chat/completions"
    more = {**body, "max_tokens": 64, "seed": 3, "ignore_eos": False}
    assert server.asked == [("POST", path, body), ("POST", path, more)]
    assert (text, firsts) == ("c", [1])


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


def test_the_load_asks_every_switch_in_turn_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    paused: list[float] = []
    enough, closing = asyncio.Event(), asyncio.Event()

    async def scripted(url: str, words: str) -> str:
        asked.append((url, words))
        if len(asked) == 2:
            raise TimeoutError
        if len(asked) == 3:
            raise RuntimeError("cut")
        if len(asked) == 4:
            enough.set()
            await closing.wait()
        return ""

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(ray_cluster, "ask", scripted)
    monkeypatch.setattr("asyncio.sleep", sleep)
    times = iter([10.0, 11.25, 12.0])
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(perf_counter=lambda: next(times)))

    async def run() -> Tally:
        async with light_load(["a", "b"]) as tally:
            await enough.wait()
            closing.set()
        return tally

    tally = asyncio.run(run())
    assert asked == [(url, f"Tell me about fox {i}.") for i, url in enumerate("abab", 1)]
    assert tally == Tally(2, ["1.2 s: TimeoutError: ", "2.0 s: RuntimeError: cut"])
    assert paused == [0.2] * 4


def test_a_replica_is_killed_when_every_stream_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    killed: list[tuple[int, int, int]] = []

    async def scripted(url: str, words: str, most: int, on_first: Callable[[], None], **more: object) -> str:
        asked.append((url, words, most, more))
        on_first()
        return f"{words} {len(asked)}"

    monkeypatch.setattr(ray_cluster, "ask", scripted)
    monkeypatch.setattr(ray_cluster, "kill", lambda *what: killed.append((len(asked), *what)))
    expected, got = asyncio.run(killed_under_streams(Process("", "r1", 71, ""), ["a", "b"], 3, 64))
    words = [f"Tell me a long story about knight {i}." for i in range(3)]
    assert expected == [f"{one} {i}" for i, one in enumerate(words, 1)]
    assert got == [f"{one} {i}" for i, one in enumerate(words, 4)]
    seeds = [{"seed": i, "temperature": 1.0} for i in range(3)]
    assert asked == [(url, one, 64, more) for url, one, more in zip("aba", words, seeds, strict=True)] * 2
    assert killed == [(6, 71, signal.SIGKILL)]


class Scripted:
    """Stands for a cluster: notes commands, and says after each what its status is."""

    def __init__(self, *statuses: str) -> None:
        self.log: list[tuple[object, ...]] = []
        self._statuses = list(statuses)

    async def run(self, *arguments: str) -> str:
        self.log.append(arguments)
        return self._statuses.pop(0) if arguments[0] == "deploy" else "penstock is down"

    async def status(self) -> Status:
        return Status.parse(self._statuses.pop(0))

    async def until_replaced(self, *what: object) -> None:
        self.log.append(("until replaced", *what))


COMMON = (
    *("--replicas", "3", "--switches", "2", "--port", "4711", "--threads", "1", "--cpus", "1"),
    *("--redis-url", "redis://here", "--drain-timeout", "30", "--warm-up-tokens", "0"),
)


@pytest.mark.parametrize("is_well", [True, False])
def test_a_life_is_all_of_this(
    is_well: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed, rolled = status_of("r1", "r2", "r3"), status_of("r7", "r8" if is_well else "r4")
    cluster = Scripted(deployed, status_of("r2", "r3"), status_of("r4", "r3"), rolled)
    streams: list[object] = []

    async def run(url: str, load: object) -> str:
        streams.append(load)
        return f"sessions on {url}"

    @asynccontextmanager
    async def load(urls: Sequence[str]) -> AsyncIterator[Tally]:
        cluster.log.append(("load", *urls))
        yield Tally(12, [] if is_well else ["1.2 s: cut"])
        cluster.log.append(("load ends",))

    async def killed(*what: Any) -> tuple[list[str], list[str]]:
        cluster.log.append(("killed", what[0].name, *what[1:]))
        return ["a", "b"], ["a", "b" if is_well else "c"]

    monkeypatch.setattr(replicas, "run", run)
    monkeypatch.setattr(ray_cluster, "light_load", load)
    monkeypatch.setattr(ray_cluster, "killed_under_streams", killed)
    times = iter(range(5, 100))
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    failures = asyncio.run(life(cast(Cluster, cluster), "redis://here", 4_711))
    broken = ["streams were broken", "not all replicas were replaced", "1.2 s: cut"]
    assert failures == ([] if is_well else broken)
    urls = ["http://127.0.0.1:80", "http://127.0.0.1:81"]
    assert cluster.log == [
        ("deploy", *COMMON),
        ("load", *urls),
        ("killed", "r1", urls, 50, 64),
        ("until replaced", urls[0], "r1", 3),
        ("scale", "2"),
        ("drain", "r2"),
        ("until replaced", urls[0], "r2", 2),
        ("deploy", *COMMON, "--replicas", "2", "--max-num-seqs", "64"),
        ("load ends",),
        ("down",),
    ]
    loads = replicas.Load(num_sessions=12, num_turns=4, served_as="penstock-demo")
    assert streams == [loads] * 3
    told = [
        f"deployed\n{deployed}",
        "sessions on one replica: sessions on http://127.0.0.1:90",
        *(f"through switch {i}, at once with the other: sessions on {url}" for i, url in enumerate(urls)),
        "the load begins",
        f"killed r1: {2 if is_well else 1} of 2 streams have the text of an undisturbed run",
        "Ray has replaced it",
        "scaled to 2",
        "drained r2, and Ray has replaced it",
        f"rolled: r3, r4 became {'r7, r8' if is_well else 'r4, r7'}",
        f"12 requests beside that, {0 if is_well else 1} failed",
        "penstock is down",
    ]
    assert capsys.readouterr().out == "".join(f"{i:6.1f} s  {what}\n" for i, what in enumerate(told, 1))


@pytest.mark.parametrize("failures", [[], ["one", "two"]])
def test_the_command_fails_if_anything_did(
    failures: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lives: list[tuple[str, int]] = []
    cores: list[int] = []

    class Ray:
        url = "redis://here"

        def __init__(self, num_cpus: int = 0) -> None:
            cores.append(num_cpus)

        def __enter__(self) -> Ray:
            return self

        def __exit__(self, *_: object) -> None: ...

    async def scripted(_: Cluster, redis_url: str, port: int) -> list[str]:
        lives.append((redis_url, port))
        return failures

    monkeypatch.setattr(ray_cluster, "RedisProcess", Ray)
    monkeypatch.setattr(ray_cluster, "LocalRay", Ray)
    monkeypatch.setattr(ray_cluster, "life", scripted)
    statuses = []
    for arguments in ([], ["--port", "4711"]):
        monkeypatch.setattr(sys, "argv", ["ray_cluster", *arguments])
        statuses.append(main())
    assert statuses == [1 if failures else 0] * 2
    assert lives[1] == ("redis://here", 4_711)
    assert 1_024 < lives[0][1] != 4_711
    assert cores == [0, 8] * 2
    assert capsys.readouterr().out == "".join(f"failed: {one}\n" for one in failures) * 2


FAKE_RAY = """#!/bin/sh
echo "$@" >> {log}
sleep 1000 > /dev/null 2>&1 &
echo $! >> {pids}
if [ $(wc -l < {log}) -le {fails} ]; then exit 1; fi
echo " here:1 "
cat > /dev/null
"""
"""It says where it listens when it was started often enough, ends with its standard input, and leaves a child."""


def fake_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int) -> Path:
    log = tmp_path / "log"
    command = tmp_path / "python"
    command.write_text(FAKE_RAY.format(log=log, pids=tmp_path / "pids", fails=fails))
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    return log


def is_gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().split()[2] == "Z"


def test_ray_is_started_again_until_it_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_ray(tmp_path, monkeypatch, 2)
    with LocalRay(3) as ray:
        assert ray.address == "here:1"
        folder = ray._folder
        assert folder.is_dir()
        assert str(folder).startswith("/tmp/ray-")
    assert not folder.exists()
    assert log.read_text() == f"-m loadtests.local_ray 3 {folder}\n" * 3
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    known = {
        name: ray.environment[name] for name in ("PYTHONPATH", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")
    }
    assert known == {
        "PYTHONPATH": str(Path(local_ray.__file__).parents[1]),
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    assert len(ray.environment["RAY_AUTH_TOKEN"]) == 64


def test_a_ray_that_does_not_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_ray(tmp_path, monkeypatch, 9)
    monkeypatch.setattr(local_ray, "_STOP_S", 5.0)
    ray = LocalRay(3)
    with pytest.raises(RuntimeError, match="Ray did not start"):
        ray.__enter__()
    assert len(log.read_text().splitlines()) == 3
    assert not ray._folder.exists()


def test_rays_process_starts_it_small_and_ends_it_with_its_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[object] = []

    def init(**given: object) -> SimpleNamespace:
        log.append(given)
        return SimpleNamespace(address_info={"gcs_address": "here:1"})

    ray = SimpleNamespace(init=init, shutdown=lambda: log.append("shutdown"))
    monkeypatch.setitem(sys.modules, "ray", cast(Any, ray))
    monkeypatch.setattr("signal.alarm", log.append)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=lambda: log.append("read")))
    local_ray.main(3, "/tmp/folder")
    given = {
        "num_cpus": 3,
        "num_gpus": 0,
        "object_store_memory": 83_886_080,
        "include_dashboard": False,
        "log_to_driver": False,
        "configure_logging": False,
        "_temp_dir": "/tmp/folder",
    }
    assert log == [120, given, 0, "read", "shutdown"]
    assert capsys.readouterr().out == "here:1\n"

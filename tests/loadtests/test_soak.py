"""The soak test: its clients, troubles and judgements one by one, and in its short form on a real server and Redis."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadtests import soak as module
from loadtests.exchange import Server
from loadtests.soak import BEHAVIOURS, Clients, ServerUnderTest, main, soak
from penstock.app.reader import TimedAnswer
from tests.loadtests.scripted import ScriptedServer, whole
from tests.loadtests.test_behaviours import Clock


@pytest.mark.long("soak")
def test_nothing_fails_and_nothing_is_left() -> None:
    assert soak(seconds=8, num_clients=4) == []


def test_a_first_turn_that_failed_has_no_second() -> None:
    with ScriptedServer(whole(id="r", error={"code": "x"})) as server:
        assert BEHAVIOURS["talk"](Server(server.url), random.Random(3)).error == '{"code": "x"}'
    assert len(server.asked) == 1


class Target:
    """Stands for the server under test."""

    def __init__(self, *metrics: dict[str, float], num_files: int = 10) -> None:
        self.server = Server("http://127.0.0.1:1")
        self.down = False
        self.num_files = num_files
        self.memory = iter([100.0])
        self.log: list[str] = []
        self._metrics = list(metrics)

    @property
    def memory_mib(self) -> float:
        return next(self.memory)

    def metrics(self) -> dict[str, float]:
        return self._metrics.pop(0) if len(self._metrics) > 1 else self._metrics[0]

    def was_down(self, began_s: float, ended_s: float) -> bool:
        assert 0 < began_s <= ended_s
        return self.down

    def restart(self, number: signal.Signals) -> None:
        self.log.append(f"restart {number.name}")

    def wait_written(self) -> None:
        self.log.append("wait written")


def under_test(target: Target) -> ServerUnderTest:
    return cast(ServerUnderTest, target)


def scripted(monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], TimedAnswer]) -> None:
    """Clients do nothing but ask that by their names."""
    for name in BEHAVIOURS:
        monkeypatch.setitem(BEHAVIOURS, name, lambda *_, name=name: ask(name))


CUT = "the stream ended without [DONE]"


@pytest.mark.parametrize(
    ("name", "answer", "down", "ending"),
    [
        ("talk", {"status": 200}, True, "done"),
        ("talk", {"status": 200, "error": CUT}, False, "failed"),
        ("talk", {"status": 200, "error": CUT}, True, "cut"),
        ("talk", {"status": 503, "error": "full"}, True, "refused"),
        ("leave", {"status": 200, "error": CUT}, False, "left"),
        ("leave", {"status": 200, "error": CUT}, True, "cut"),
        ("leave", {"status": 200}, False, "done"),
        ("resume", {"status": 200, "error": CUT, "last_event": 0}, True, "failed"),
        ("resume", {"status": 503, "error": CUT, "last_event": 7}, False, "failed"),
        ("resume", {"status": 200, "error": CUT}, True, "cut"),
        ("resume", {"status": 503, "error": CUT}, False, "refused"),
        ("resume", {"status": 200, "last_event": 7}, False, "done"),
        ("nonsense", {"status": 400, "error": "no"}, False, "done"),
        ("nonsense", {"status": 499, "error": "no"}, True, "done"),
        ("nonsense", {"status": 500, "error": "no"}, False, "failed"),
        ("nonsense", {"status": 399}, False, "failed"),
        ("nonsense", {"status": 200}, True, "cut"),
        ("nonsense", {"status": 503, "error": "no"}, False, "refused"),
    ],
)
def test_an_answer_ends_so(name: str, answer: dict[str, Any], down: bool, ending: str) -> None:
    target = Target()
    target.down = down
    clients = Clients(under_test(target), 0)
    clients._note(name, TimedAnswer(0, 1, **answer), 0.5)
    assert clients.endings == {(name, ending): 1}
    failures = [f"{name}: HTTP {answer['status']}, {answer.get('error')}"] if ending == "failed" else []
    assert clients.failures == failures


class Redis:
    """Notes what is done to it, as Redis and as the line to it."""

    url = "unix:///redis"

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "delay_s":
            self.log.append(f"delay {value}")

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(name)

    def __enter__(self) -> Redis:
        return self

    def __exit__(self, *_: object) -> None: ...


IDLE: dict[str, float] = {
    "penstock_streams": 0,
    "penstock_running_sequences": 0,
    "penstock_waiting_sequences": 0,
    "penstock_queued_requests": 0,
    "penstock_kv_free_blocks": 64,
    "penstock_kv_blocks": 64,
    "penstock_pool_violations": 0,
    "penstock_store_bytes": 3 * 2**20,
    "penstock_recording_bytes": 2**20,
}


def run_soak(
    monkeypatch: pytest.MonkeyPatch, target: Target, memory: tuple[float, float], *failures: str
) -> tuple[list[str], list[float]]:
    """The judgements of a soak of 112 s on stand-ins, and how long it slept."""

    class Scripted:
        def __init__(self, _: object, number: int) -> None:
            assert number == 3
            self.endings = Counter({("talk", "done"): 12, ("nonsense", "refused"): 3})
            self.failures = failures

        def __enter__(self) -> Scripted:
            return self

        def __exit__(self, *_: object) -> None:
            target.log.append("clients end")

    @contextmanager
    def server(url: str) -> Iterator[Target]:
        assert url == "unix:///redis"
        yield target

    clock = Clock()
    target.memory = iter(memory)
    redis = Redis(target.log)
    fakes = {"RedisProcess": lambda: redis, "SlowLine": lambda _: redis, "_server_under_test": server}
    for name, fake in {**fakes, "Clients": Scripted, "time": clock}.items():
        monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(module, "storm", lambda _: target.log.append("storm"))
    return soak(112.0, 3), clock.slept


def test_what_did_not_hold_is_told_when_patience_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {**IDLE, "penstock_streams": 2, "penstock_kv_free_blocks": 60, "penstock_pool_violations": 1}
    target = Target(busy)
    files = iter([10, *[19] * 1_000])
    monkeypatch.setattr(Target, "num_files", property(lambda _: next(files), lambda *_: None), raising=False)
    wrong, slept = run_soak(monkeypatch, target, (100.0, 129.6), "talk: HTTP 500, no")
    assert wrong == [
        "failed: talk: HTTP 500, no",
        "memory grew from 100 to 130 MiB",
        "penstock_streams is 2",
        "60 of 64 KV blocks are free",
        "the KV pool had to start afresh",
        "19 open files, 10 at the start",
    ]
    assert set(slept[10:]) == {0.2}
    assert 29 < sum(slept[10:]) < 31


def test_a_server_may_take_its_time_to_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {name: {**IDLE, name: 1.0} for name in list(IDLE)[:4]}
    target = Target(*busy.values(), IDLE)
    files = iter([10, *[18] * 1_000])
    monkeypatch.setattr(Target, "num_files", property(lambda _: next(files), lambda *_: None), raising=False)
    wrong, slept = run_soak(monkeypatch, target, (100.0, 100.0))
    assert (wrong, slept[10:]) == ([], [0.2] * 4)


class Process:
    """Stands for a server of `penstock serve`."""

    started: list[Process]

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = [*arguments]
        self.log: list[object] = []
        self.port, self.url = 4_711, "http://127.0.0.1:4711"
        self.process = SimpleNamespace(pid=os.getpid())
        self.started.append(self)

    def signal(self, number: signal.Signals) -> None:
        self.log.append(number)

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """It stands for the soak's clock, and a stand-in for its server."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "ServerProcess", Process)
    monkeypatch.setattr(Process, "started", [], raising=False)
    return clock


def test_a_server_comes_back_on_its_port_and_it_is_known_when_it_was_away(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with module._server_under_test("unix:///redis") as target:
        (first,) = Process.started
        assert target.server == Server(first.url)
        assert not target.was_down(0.0, 1_000.0)

        def wait(process: Process) -> None:
            process.log.append("wait")
            clock.sleep(5.0)

        def wait_ready(process: Process) -> None:
            process.log.append(target.was_down(900.0, 901.0))

        monkeypatch.setattr(Process, "wait", wait, raising=False)
        monkeypatch.setattr(Process, "wait_ready", wait_ready, raising=False)
        target.restart(signal.SIGKILL)
    second = Process.started[1]
    assert first.arguments == ["--redis-url", "unix:///redis", "--kv-memory", "64MiB"]
    assert second.arguments == [*first.arguments, "--port", "4711"]
    assert first.log == ["wait_ready", signal.SIGKILL, "wait"]
    assert second.log == [True, "kill"]
    away = [target.was_down(*span) for span in ((98, 99), (98, 100), (101, 102), (105, 106), (105.1, 106))]
    assert away == [False, True, True, True, False]


def test_it_waits_until_redis_knows_all(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ServerUnderTest("unix:///redis")
    found = [(0, 0), (1, 5), (0, 5), (1, 0)]
    states = [{"penstock_store_up": up, "penstock_store_unwritten": rest} for up, rest in found]
    monkeypatch.setattr(target, "metrics", lambda: states.pop(0) if len(states) > 1 else states[0])
    target.wait_written()
    assert clock.slept == [0.05] * 3
    states[:] = [{"penstock_store_up": 0, "penstock_store_unwritten": 0}]
    target.wait_written()
    assert 29.9 < sum(clock.slept[3:]) < 30.1


@pytest.mark.parametrize(
    ("wrong", "printed", "status"),
    [([], "all held\n", 0), (["a"], "a\n1 things did not hold\n", 1),
     (["a"] * 21, "a\n" * 20 + "21 things did not hold\n", 1)],
)  # fmt: skip
def test_the_command_says_what_did_not_hold(
    wrong: list[str],
    printed: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: list[tuple[float, int]] = []

    def scripted(seconds: float, num_clients: int) -> list[str]:
        given.append((seconds, num_clients))
        return wrong

    monkeypatch.setattr(module, "soak", scripted)
    assert [main([]), main(["--seconds", "2.5", "--clients", "3"])] == [status] * 2
    assert given == [(600.0, 16), (2.5, 3)]
    assert capsys.readouterr().out == printed * 2

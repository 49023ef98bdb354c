"""The soak test: its clients, troubles and judgements one by one, and in its short form on a real server and Redis."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadtests import soak as module
from loadtests.exchange import Server
from loadtests.soak import BEHAVIOURS, NONSENSE, Clients, ServerUnderTest, main, soak, storm, troubles
from penstock.app.bench.server_process import ServerFailed
from penstock.app.errors import OperatorError
from penstock.app.reader import Answer
from tests.loadtests.scripted import ScriptedServer, chat, response, whole
from tests.loadtests.test_behaviours import Clock


@pytest.mark.long("soak")
def test_nothing_fails_and_nothing_is_left() -> None:
    assert soak(seconds=8, num_clients=4) == []


ASKED = "Tell me about a winter walk."
"""The question of a source that is seeded with 3."""
CHAT = {"model": "penstock-demo", "stream": True, "messages": [{"role": "user", "content": ASKED}]}
RESPONSE = {"model": "penstock-demo", "stream": True, "input": ASKED}
COUNTED = {"stream_options": {"include_usage": True}}
TALK = {**RESPONSE, "max_output_tokens": 23, "service_tier": "priority"}
DONE = whole(id="r", status="completed", usage={"input_tokens": 1, "output_tokens": 2})


@pytest.mark.parametrize(
    ("name", "reply", "asked"),
    [
        ("talk", response("r1"), [
            ("POST", "/v1/responses", TALK), ("POST", "/v1/responses", {**TALK, "previous_response_id": "r1"})]),
        ("complete", chat("a"), [("POST", "/v1/completions", {
            "model": "penstock-demo", "stream": True, "max_tokens": 96, "service_tier": "flex", **COUNTED,
            "prompt": "Once upon a time there was a small house at the edge of a great forest. " * 4
            + "a winter walk"})]),
        ("poll", DONE, [("POST", "/v1/responses", {
            **RESPONSE, "stream": False, "background": True, "max_output_tokens": 32})]),
        ("leave", chat("a"), [("POST", "/v1/chat/completions", {
            **CHAT, "max_tokens": 400, "ignore_eos": True, **COUNTED})]),
        ("dawdle", chat("a"), [("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 64, **COUNTED})]),
        ("resume", response("r1"), [("POST", "/v1/responses", {
            **RESPONSE, "max_output_tokens": 64, "stream_options": {"resumable": True}})]),
        ("nonsense", chat("a"), [("POST", "/v1/completions", {"model": "another", "prompt": "x"})]),
    ],
)  # fmt: skip
def test_every_client_sends_this(name: str, reply: bytes, asked: list[tuple[str, str, object]]) -> None:
    random.seed(3)
    with ScriptedServer(reply) as server:
        answer = BEHAVIOURS[name](Server(server.url), random.Random(3))
    assert answer.error is None
    assert server.asked == asked


def test_a_first_turn_that_failed_has_no_second() -> None:
    with ScriptedServer(whole(id="r", error={"code": "x"})) as server:
        assert BEHAVIOURS["talk"](Server(server.url), random.Random(3)).error == '{"code": "x"}'
    assert len(server.asked) == 1


def test_lengths_and_places_of_leaving_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = SimpleNamespace(
        uniform=lambda *ends: ("uniform", *ends), randint=lambda *ends: ("randint", *ends)
    )
    for name in ("leave", "resume"):
        monkeypatch.setattr(module, name, lambda _, __, *when: when)
    monkeypatch.setattr(module, "respond", lambda _, body: Answer(0, 1, error=str(body["max_output_tokens"])))
    source = cast(random.Random, drawn)
    assert BEHAVIOURS["talk"](cast(Server, None), source).error == "('randint', 8, 48)"
    found: list[object] = [BEHAVIOURS[name](cast(Server, None), source) for name in ("leave", "resume")]
    assert found == [(("uniform", 0.0, 0.5),), (("randint", 1, 8_000), 60.0)]


def test_nonsense_is_all_of_this() -> None:
    model = "penstock-demo"
    assert list(NONSENSE) == [
        ("POST", "/v1/chat/completions", {"model": model}),
        ("POST", "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": 7}]}),
        ("POST", "/v1/completions", {"model": model, "prompt": "x", "max_tokens": -1}),
        ("POST", "/v1/completions", {"model": "another", "prompt": "x"}),
        ("POST", "/v1/completions", {"model": model, "prompt": "x" * 200_000}),
        ("POST", "/v1/responses", {"model": model, "input": "x", "previous_response_id": "resp_gone"}),
        ("POST", "/v1/responses", [[[[[[[]]]]]]]),
        ("GET", "/v1/responses/resp_gone", None),
        ("DELETE", "/nothing", None),
    ]


class Waits:
    """Stands for the event that ends clients: they may go on for so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waited.append(round(seconds, 4))
        return len(self.waited) > self.rounds


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


def scripted(monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], Answer]) -> None:
    """Clients do nothing but ask that by their names."""
    for name in BEHAVIOURS:
        monkeypatch.setitem(BEHAVIOURS, name, lambda *_, name=name: ask(name))


def test_a_client_goes_on_with_pauses_of_its_own_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def ask(name: str) -> Answer:
        names.append(name)
        if len(names) == 2:
            raise ConnectionResetError("gone")
        return Answer(0, 1, status=200)

    scripted(monkeypatch, ask)
    clients, waits = Clients(under_test(Target()), 0), Waits(4)
    clients._stopped = cast(threading.Event, waits)
    clients._run(5)
    source = random.Random(5)
    expected = [(round(source.uniform(0.0, 0.1), 4), source.choice(list(BEHAVIOURS))) for _ in range(5)]
    assert waits.waited == [wait for wait, _ in expected]
    assert names == [name for _, name in expected[:4]]
    assert clients.failures == [f"{names[1]}: HTTP 0, ConnectionResetError: gone"]
    assert sum(clients.endings.values()) == 4


def test_all_clients_run_at_once_and_end_when_they_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    together, all_asked = threading.Barrier(3), threading.Event()

    def ask(_: str) -> Answer:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(30)
            all_asked.set()
        return Answer(0, 1, status=400)

    scripted(monkeypatch, ask)
    with Clients(under_test(Target()), 3) as clients:
        assert all_asked.wait(30)
        together.abort()
    assert not any(thread.is_alive() for thread in clients._threads)
    assert sum(clients.endings.values()) >= 3


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
    clients._note(name, Answer(0, 1, **answer), 0.5)
    assert clients.endings == {(name, ending): 1}
    failures = [f"{name}: HTTP {answer['status']}, {answer.get('error')}"] if ending == "failed" else []
    assert clients.failures == failures


def test_a_storm_is_sixty_requests_at_once() -> None:
    random.seed(3)
    with ScriptedServer(chat("a")) as server:
        process = SimpleNamespace(host="127.0.0.1", port=server.port)
        storm(cast(ServerUnderTest, SimpleNamespace(process=process)))
        server.wait_asked(60)
    assert server.asked == [("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 1_000})] * 60


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


TROUBLES = [
    *("a storm of disconnects", "storm", "|", "Redis stopped", "pause", "|", "resume"),
    *("Redis slow", "delay 0.3", "|", "delay 0.0", "Redis well", "wait written", "|"),
    *("kill -9 and a new start", "restart SIGKILL", "|", "SIGTERM and a new start", "restart SIGTERM", "|"),
    *("another storm", "storm", "|", "Redis gone", "kill", "|"),
]


def test_the_troubles_are_these(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target()
    redis: Any = Redis(target.log)
    monkeypatch.setattr(module, "storm", lambda _: target.log.append("storm"))
    for name, begin, end in troubles(under_test(target), redis, redis):
        target.log.append(name)
        begin()
        target.log.append("|")
        end()
    assert target.log == TROUBLES


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


def test_a_soak_is_every_trouble_and_then_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target(IDLE)
    wrong, slept = run_soak(monkeypatch, target, (100.0, 129.0))
    assert (wrong, slept) == ([], [8.0] * 8 + [14.0, 42.0])
    names = [*TROUBLES[:1], "Redis stopped", "Redis slow", "Redis well", "kill -9 and a new start"]
    names += ["SIGTERM and a new start", "another storm", "Redis gone", "quiet"]
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"soak: {name}" for name in names]
    acts = [one for one in TROUBLES if one != "|" and one not in names]
    assert target.log == [*acts, "clients end"]
    assert printed.out == (
        "\nclients   done  refused  left  cut  failed\n"
        "--------  ----  -------  ----  ---  ------\n"
        "talk        12        0     0    0       0\n"
        "complete     0        0     0    0       0\n"
        "poll         0        0     0    0       0\n"
        "leave        0        0     0    0       0\n"
        "dawdle       0        0     0    0       0\n"
        "resume       0        0     0    0       0\n"
        "nonsense     0        3     0    0       0\n"
        "memory: 100 MiB, after the quiet 129 MiB\n"
    )


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


@pytest.mark.usefixtures("clock")
def test_memory_is_counted_without_what_has_bounds_of_its_own() -> None:
    target = ServerUnderTest("unix:///redis")
    text = "penstock_store_bytes 3145728\npenstock_recording_bytes 1048576\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"
    with ScriptedServer(head + text.encode()) as server:
        target.server = Server(server.url)
        assert target.metrics() == {"penstock_store_bytes": 3_145_728, "penstock_recording_bytes": 1_048_576}
        memory_mib = target.memory_mib
    assert server.asked == [("GET", "/metrics", None)] * 2
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert memory_mib == pytest.approx(pages * 4096 / 2**20 - 4, abs=2)
    before = target.num_files
    with open(os.devnull):
        assert target.num_files == before + 1


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


@pytest.mark.parametrize("error", [ServerFailed("no room"), OperatorError("no room")])
def test_the_command_says_what_it_lacks(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> list[str]:
        raise error

    monkeypatch.setattr(module, "soak", fail)
    assert main([]) == 2
    assert capsys.readouterr() == ("", "soak: no room\n")

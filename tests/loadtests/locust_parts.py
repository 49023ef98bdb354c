"""The users of locust, their number, and the way of their outcomes, without its runners.

test_locust.py runs these tests in a process of their own, for locust replaces the sockets of the one that imports it.
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from locust.env import Environment
from locust.event import EventHook
from locust.runners import MasterRunner, WorkerRunner

from loadtests import behaviours, collecting, locustfile, shapes, users
from loadtests.collecting import Collector
from loadtests.outcomes import Outcome
from loadtests.shapes import Shape
from loadtests.users import Chatter, Completer, PenstockUser
from penstock.app.reader import Answer
from tests.loadtests.scripted import ScriptedServer, chat, response, whole
from tests.loadtests.test_figures import FAILED, LEFT, REFUSED, outcome

OPTIONS = Namespace(
    model="m", rate=0.5, tenants="ann=k1,bob=k2", headless=True, report="", promise_ttft=1.0, promise_tpot=0.1,
    run_time=None, num_users=20, spawn_rate=3, load_shape="steps",
)  # fmt: skip
ASKED = "Tell me about a winter walk."
"""The question of a source that is seeded with 3."""
CHAT = {"stream": True, "model": "m", "messages": [{"role": "user", "content": ASKED}]}
TEXT = {"stream": True, "model": "m", "input": ASKED}
COUNTED = {"stream_options": {"include_usage": True}}
STORY = "Once upon a time there was a small house at the edge of a great forest. " * 4 + "a winter walk"
DONE = whole(id="r", status="completed", usage={"input_tokens": 1, "output_tokens": 2})


def environment(host: str, **options: object) -> tuple[Environment, list[Outcome]]:
    """An environment of locust, and the outcomes that are reported in it."""
    found = Environment(host=host, parsed_options=Namespace(**{**vars(OPTIONS), **options}))
    outcomes: list[Outcome] = []
    found.events.request_outcome = EventHook()
    found.events.request_outcome.add_listener(lambda outcome: outcomes.append(outcome))
    return found, outcomes


@pytest.mark.parametrize(
    ("kind", "weight", "lane", "reply", "path", "body"),
    [
        ("Completer", 3, "interactive", chat("a"), "completions", {
            "stream": True, "model": "m", "prompt": ASKED, "max_tokens": 24, "service_tier": "priority", **COUNTED}),
        ("Batcher", 2, "batch", chat("a"), "completions", {
            "stream": True, "model": "m", "prompt": STORY, "max_tokens": 96, "service_tier": "flex", **COUNTED}),
        ("Background", 1, "standard", DONE, "responses", {
            **TEXT, "stream": False, "background": True, "max_output_tokens": 48, "service_tier": "default"}),
        ("Leaver", 1, "interactive", chat("a"), "chat/completions", {
            **CHAT, "max_tokens": 400, "ignore_eos": True, "service_tier": "priority", **COUNTED}),
        ("SlowReader", 1, "standard", chat("a"), "chat/completions", {
            **CHAT, "max_tokens": 64, "service_tier": "default", **COUNTED}),
        ("Resumer", 1, "interactive", response("r"), "responses", {
            **TEXT, "max_output_tokens": 64, "service_tier": "priority", "stream_options": {"resumable": True}}),
    ],
)  # fmt: skip
def test_every_user_sends_this(
    kind: str, weight: int, lane: str, reply: bytes, path: str, body: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gevent.sleep", lambda _: None)
    with ScriptedServer(reply) as server:
        place, outcomes = environment(server.url)
        user = getattr(locustfile, kind)(place)
        random.seed(3)
        user.on_start()
        random.seed(3)
        user.request(time.perf_counter() - 5.0)
    assert server.asked == [("POST", f"/v1/{path}", body)]
    (found,) = outcomes
    assert server.keys == [{"ann": "Bearer k1", "bob": "Bearer k2"}[found.tenant]]
    assert (user.weight, found.kind, found.lane, found.answer.error) == (weight, kind.lower(), lane, None)
    assert found.was_left == (kind == "Leaver")
    assert 5.0 <= found.lag_s < 6.0
    assert found.at_s == pytest.approx(time.time() - 5.0, abs=3.0)
    assert 5000 <= found.e2e_ms < 9000


@pytest.mark.parametrize(
    ("kind", "drawn"),
    [
        ("Leaver", ("uniform", 0.0, 0.3)),
        ("Resumer", ("randint", 1, 8_000)),
        ("Completer", ("randint", 16, 48)),
        ("Chatter", ("randint", 16, 64)),
    ],
)
def test_lengths_and_places_of_leaving_are_drawn(
    kind: str, drawn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    place, _ = environment("http://here")
    user = getattr(users, kind)(place)
    PenstockUser.on_start(user)
    user.previous_id, user.num_turns = "", 0

    def ask(_: object, body: dict[str, object], *when: object) -> Answer:
        given.extend([body.get("max_tokens"), body.get("max_output_tokens"), *when])
        return Answer(0, 1)

    for name in ("leave", "resume", "complete", "respond"):
        monkeypatch.setattr(users, name, ask)
    for name in ("uniform", "randint"):
        monkeypatch.setattr(random, name, lambda *ends, name=name: (name, *ends))
    user.say() if kind == "Chatter" else user.request(0.0)
    assert drawn in given


def test_a_connection_that_fails_is_an_outcome() -> None:
    place, outcomes = environment("http://127.0.0.1:1", tenants="")
    user = Completer(place)
    PenstockUser.on_start(user)

    def fail() -> Answer:
        raise OSError("gone")

    due_s = time.perf_counter()
    found = user.report(due_s, fail)
    assert outcomes == [found]
    assert (found.answer.error, found.answer.started_s, found.was_left) == ("OSError: gone", due_s, False)
    assert (found.tenant, user.server.key, user.server.url) == ("default", "", "http://127.0.0.1:1")


def test_a_chatter_goes_on_for_six_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = whole(id="x", error={"code": "x"})
    replies = [*(response(f"r{i}") for i in range(8)), failed, response("r9")]
    with ScriptedServer(*replies) as server:
        place, outcomes = environment(server.url)
        user = Chatter(place)
        user.on_start()
        random.seed(3)
        for _ in range(10):
            user.say()
        last = (user.previous_id, user.num_turns)
    bodies = [body for _, _, body in server.asked]
    ids = [None, "r0", "r1", "r2", "r3", "r4", None, "r6", "r7", None]
    assert [body.get("previous_response_id") for body in bodies] == ids
    random.seed(3)
    for body in bodies:
        body.pop("previous_response_id", None)
    drawn = [(behaviours.question(), random.randint(16, 64)) for _ in bodies]
    common = {"model": "m", "service_tier": "priority", "stream": True}
    assert bodies == [{**common, "input": asked, "max_output_tokens": most} for asked, most in drawn]
    assert [one.ending for one in outcomes] == [*["done"] * 8, "failed", "done"]
    assert last == ("r9", 1)
    assert all(one.kind == "chatter" and one.lag_s < 0.5 for one in outcomes)
    assert Chatter.weight == 6
    monkeypatch.setattr(random, "random", lambda: 0.0)
    assert user.wait_time() == 0.2
    monkeypatch.setattr(random, "random", lambda: 1.0)
    assert user.wait_time() == 1.5


def test_requests_are_due_at_random_times_whether_or_not_the_last_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    spawned: list[object] = []
    monkeypatch.setattr(users, "gevent", SimpleNamespace(sleep=slept.append))
    now_s = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    rates: list[float] = []

    def expovariate(rate: float) -> float:
        rates.append(rate)
        return 2.0

    monkeypatch.setattr(random, "expovariate", expovariate)
    user = Completer(environment("http://here")[0])
    user.on_start()
    user.at_work = SimpleNamespace(
        spawn=lambda *what: spawned.append(what), join=lambda: spawned.append("join")
    )
    user.send()
    now_s = 103.0
    assert user.wait_time() == 1.0
    now_s = 110.0
    assert user.wait_time() == 0.0
    user.send()
    user.on_stop()
    assert (slept, rates) == ([2.0], [0.5] * 3)
    assert spawned == [(user.request, 102.0), (user.request, 106.0), "join"]


def collector(monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[Collector, list[Any], list[Any]]:
    """A collector, the rows that it gives locust, and the reports that it prints or writes."""
    place, _ = environment("http://here", **options)
    rows: list[Any] = []
    reports: list[Any] = []
    place.events.request.add_listener(lambda **row: rows.append(row))
    monkeypatch.setattr(collecting, "print_report", lambda found: reports.append(found["completed"]))
    monkeypatch.setattr(collecting, "write_report", lambda path, _: reports.append(path))
    locustfile.collect(place)
    made = place.events.test_start._handlers[-1].__self__
    return made, rows, reports


def test_locust_is_told_every_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows, _ = collector(monkeypatch)
    polled = outcome(tokens_s=())
    polled = replace(polled, answer=replace(polled.answer, queue_s=None))
    for one in (outcome(tokens_s=(0.5, 0.6, 0.9)), polled, REFUSED, LEFT, FAILED):
        made._environment.events.request_outcome.fire(outcome=one)
    assert len(made.outcomes) == 5
    assert [(row["request_type"], round(row["response_time"], 3)) for row in rows] == [
        *(("ttft", 500), ("tpot", 200), ("longest itl", 300), ("queue", 200), ("e2e", 900), ("e2e", 250)),
        *(("refused", 250), ("left", 250), ("e2e", 250)),
    ]
    assert {row["name"] for row in rows} == {"chatter, interactive, ann"}
    assert [row["response_length"] for row in rows] == [3] * 6 + [0] * 3
    assert [str(row["exception"]) for row in rows] == ["None"] * 8 + ["ConnectionResetError"]
    assert all(row["context"] == {} for row in rows)


def test_outcomes_go_from_workers_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, _ = collector(monkeypatch)
    master, _, _ = collector(monkeypatch)
    events = worker._environment.events
    worker.note(outcome())
    events.test_start.fire(environment=None)
    assert worker.outcomes == []
    worker.note(REFUSED)
    data: dict[str, Any] = {}
    events.report_to_master.fire(client_id="w", data=data)
    assert worker.outcomes == []
    master.note(LEFT)
    for told in (data, {}):
        master._environment.events.worker_report.fire(client_id="w", data=told)
    assert master.outcomes == [LEFT, REFUSED]


@pytest.mark.parametrize("headless", [True, False])
def test_one_report_of_a_run(headless: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, _, reports = collector(monkeypatch, headless=headless, report=str(tmp_path))
    events = made._environment.events
    made.note(outcome())
    events.test_stop.fire(environment=None)
    assert reports == ([] if headless else [1, tmp_path])
    events.quit.fire(exit_code=0)
    assert reports == [1, tmp_path]
    made._environment.parsed_options.report = ""
    (events.quit.fire if headless else events.test_stop.fire)()
    assert reports == [1, tmp_path, 1]
    made._environment.runner = worker = WorkerRunner.__new__(WorkerRunner)
    worker.greenlet = None  # which its end looks at
    (events.quit.fire if headless else events.test_stop.fire)()
    assert reports == [1, tmp_path, 1]


class Runner:
    """Stands for locust's, of a run that began so long ago."""

    def __init__(self, **options: object) -> None:
        self.environment = SimpleNamespace(
            parsed_options=Namespace(**{**vars(OPTIONS), **options}), stop_timeout=7.0
        )
        self.log: list[Any] = []
        self.server = SimpleNamespace(send_to_client=lambda message: self.log.append(vars(message)))
        self.clients = SimpleNamespace(all=[SimpleNamespace(id=f"w{i}") for i in range(2)])

    def stop(self, **how: object) -> None:
        self.log.append(("stop", how))


class Master(Runner, MasterRunner):  # type: ignore[misc]
    """Stands for the one of several workers."""

    def __init__(self, **options: object) -> None:
        Runner.__init__(self, **options)

        self.greenlet = None

    stop = Runner.stop


def shape(runner: Runner, passed_s: float) -> Shape:
    found = Shape()
    found.runner = runner
    found.get_run_time = lambda: passed_s
    return found


@pytest.mark.parametrize(
    ("passed_s", "options", "expected"),
    [
        (0.0, {}, (4, 3)),
        (1_800.0, {}, (12, 3)),
        (9_999.0, {}, (20, 3)),
        (50.0, {"run_time": 100}, (12, 3)),
        (99.0, {"run_time": 100, "spawn_rate": None, "num_users": None}, (1, 1)),
        (0.0, {"num_users": 1, "spawn_rate": 0.5}, (1, 1)),
        (0.0, {"load_shape": "flash-crowd", "num_users": 50}, (5, 50)),
        (1_000.0, {"load_shape": "flash-crowd", "num_users": 50}, (50, 50)),
    ],
)
def test_so_many_users_are_wanted(
    passed_s: float, options: dict[str, Any], expected: tuple[int, float]
) -> None:
    runner = Runner(**options)
    assert shape(runner, passed_s).tick() == expected
    assert runner.log == []
    assert Shape.use_common_options


@pytest.mark.parametrize("runner", [Runner(run_time=10), Master(run_time=10, headless=False)])
def test_a_run_ends_in_its_time(runner: Runner) -> None:
    assert shape(runner, 10.0).tick() is None
    assert runner.log == [("stop", {})]


def test_a_master_waits_for_the_last_word_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Master(run_time=10)
    patience: list[object] = []

    class Timeout:
        def __init__(self, *how: object) -> None:
            patience.extend(how)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    def sleep(seconds: float) -> None:
        patience.append(seconds)
        runner.clients.all.pop()

    monkeypatch.setattr(shapes, "gevent", SimpleNamespace(Timeout=Timeout, sleep=sleep))
    assert shape(runner, 11.0).tick() is None
    quits = [{"type": "quit", "data": None, "node_id": f"w{i}"} for i in range(2)]
    assert runner.log == [("stop", {"send_stop_to_client": False}), *quits]
    assert patience == [67.0, False, 0.05, 0.05]

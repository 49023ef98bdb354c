"""Sessions over replicas, a trace on a server, and a minute of traffic: what is started, sent, told and judged."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadtests import replay, replicas
from loadtests import run as minute
from loadtests.keys import key_file
from loadtests.replicas import Load
from penstock.app.bench.checkpoint import LLAMA_135M
from penstock.app.bench.client import Job
from penstock.app.bench.job import run_module
from penstock.app.bench.server_process import ServerFailed
from penstock.app.checkpoint import DEMO_MODEL
from penstock.app.reader import Answer
from penstock.cluster.switch import Switch
from penstock.cluster.upstream import Address
from penstock.priority.routing.router import RandomRouter, Router
from tests.loadtests.scripted import REFUSED, ScriptedServer, chat

Log = list[Any]


def test_a_session_says_all_that_was_said_before() -> None:
    with ScriptedServer(chat("Yes", "."), chat("No."), REFUSED) as server:
        answers = asyncio.run(replicas.session(server.url, 5, Load(2, 4, 2, "m"), "salt"))
    assert [answer.text for answer in answers] == ["Yes.", "No.", ""]
    said = "He rode on, and the fox 5.{0}.0 went with him as far as the old tree. "
    said += "He rode on, and the fox 5.{0}.1 went with him as far as the old tree. "
    messages = [
        (
            "system",
            "You tell stories about knights, foxes and old trees, kindly and in short sentences. " * 8,
        ),
        ("user", said.format(0) + "Tell me about knight 5, part 0."),
        ("assistant", "Yes."),
        ("user", said.format(1) + "Tell me about knight 5, part 1."),
        ("assistant", "No."),
        ("user", said.format(2) + "Tell me about knight 5, part 2."),
    ]
    common = {"model": "m", "max_tokens": 24, "stream": True, "ignore_eos": True, "cache_salt": "salt"}
    assert server.asked == [
        (
            "POST",
            "/v1/chat/completions",
            {
                **common,
                "messages": [{"role": role, "content": content} for role, content in messages[:number]],
                "stream_options": {"include_usage": True},
            },
        )
        for number in (2, 4, 6)
    ]
    assert (Load(1, 2).num_sentences, Load(1, 2).served_as) == (0, "sessions")


def test_sessions_run_four_at_a_time_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    salts, now, most = set(), 0, 0

    async def session(url: str, number: int, load: Load, salt: str) -> list[Answer]:
        nonlocal now, most
        salts.add(salt)
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        assert (url, load.num_sessions) == ("here", 9)
        if number == 8:
            return [Answer(0.0, 1.0, error="cut")]
        return [Answer(0.0, 1.0, [0.1 + 0.01 * number], num_prompt_tokens=100, num_cached_tokens=25)]

    monkeypatch.setattr(replicas, "session", session)
    told = asyncio.run(replicas.run("here", Load(9, 1)))
    assert told == ("9 turns, 1 failed: 25.0% of 800 prompt tokens cached, TTFT P50 135.0 ms, P99 169.3 ms")
    (salt,) = salts
    assert (most, len(salt)) == (4, 8)


def test_a_run_of_which_nothing_came_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async def session(*_: object) -> list[Answer]:
        return [Answer(0.0, 1.0, error="cut")]

    monkeypatch.setattr(replicas, "session", session)
    assert asyncio.run(replicas.run("here", Load(1, 1))).startswith(
        "1 turns, 1 failed: 0.0% of 0 prompt tokens"
    )


def test_sessions_go_through_the_switch_when_it_knows_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, object] = {}
    log: Log = []

    async def app(_: object, __: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    @asynccontextmanager
    async def running(addresses: Sequence[Address]) -> AsyncIterator[None]:
        log.append([*addresses])
        loop = asyncio.get_running_loop()
        for number in range(2):
            loop.call_later(0.06 * number, known.setdefault, f"r{number}")
        yield
        log.append("over")

    async def run(url: str, load: Load) -> str:
        log.append(len(known))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        said = await reader.read()
        writer.close()
        return f"{load.num_sessions} {b'hello' in said}"

    monkeypatch.setattr(replicas, "run", run)
    switch = SimpleNamespace(app=lambda: app, running=running, members=SimpleNamespace(known=known))
    urls = ["http://127.0.0.1:81", "http://127.0.0.1:82"]
    told = asyncio.run(replicas.behind(cast(Switch, switch), urls, Load(3, 1)))
    assert told == "3 True"
    assert log == [[Address("127.0.0.1", 81), Address("127.0.0.1", 82)], 2, "over"]


@pytest.mark.parametrize("model", [None, "m"])
def test_one_server_is_compared_with_both_switches(
    model: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: Log = []

    async def run(url: str, load: Load) -> str:
        log.append((url, load))
        return f"{load.num_sessions} sessions"

    async def behind(switch: Router, urls: Sequence[str], load: Load) -> str:
        log.append((switch, urls, load))
        return type(switch).__name__

    def make_switch(settings: Any, keys: object, *, is_open: bool, router: Router) -> Router:
        assert (settings.cluster_secret, settings.model, settings.served_model_name) == (
            "s" * 16,
            model,
            "sessions",
        )
        assert (keys, is_open) == (None, False)
        return router

    for name, fake in {"run": run, "behind": behind, "make_switch": make_switch}.items():
        monkeypatch.setattr(replicas, name, fake)
    load = Load(24, 4, 7)
    asyncio.run(replicas.compare(["a", "b"], "s" * 16, model, load))
    assert log[:3] == [("a", Load(2, 2, 7)), ("b", Load(2, 2, 7)), ("a", load)]
    assert [(type(switch), *more) for switch, *more in log[3:]] == [
        (router, ["a", "b"], load) for router in (Router, RandomRouter)
    ]
    assert capsys.readouterr().out == (
        "one server: 24 sessions\n2 replicas, by forecast: Router\n2 replicas, at random: RandomRouter\n"
    )


@pytest.mark.parametrize(
    ("given", "num", "load", "model"),
    [
        ([], 3, Load(24, 4), None),
        (
            ["--replicas", "2", "--sessions", "5", "--turns", "6", "--sentences", "7", "--model", "m"],
            2, Load(5, 6, 7), "m",
        ),
    ],
)  # fmt: skip
def test_replicas_are_started_one_after_another_and_all_stopped(
    given: list[str], num: int, load: Load, model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: Log = []

    class Process:
        def __init__(self, arguments: list[str]) -> None:
            self.url = f"http://{arguments[-1]}"
            log.append(arguments)

        def wait_ready(self) -> None:
            log.append("ready")

        def stop(self) -> None:
            log.append("stopped")

    async def compare(urls: list[str], secret: str, *more: object) -> None:
        log.append((urls, len(secret), *more))
        assert log[0][3] == secret

    monkeypatch.setattr(replicas, "ServerProcess", Process)
    monkeypatch.setattr(replicas, "compare", compare)
    monkeypatch.setattr(sys, "argv", ["replicas", *given])
    replicas.main()
    secret = log[0][3]
    common = ["--threads", "1", "--cluster-secret", secret, "--served-model-name", "sessions"]
    common += ["--model", "m"] if model else []
    started = [line for i in range(num) for line in ([*common, "--replica", f"r{i}"], "ready")]
    compared = ([f"http://r{i}" for i in range(num)], 32, model, load)
    assert log == [*started, compared, *["stopped"] * num]


def test_keys_are_in_a_file_by_their_digests() -> None:
    with key_file(["ann", "bob"]) as (path, keys):
        lines = [re.split("[: ]", line) for line in Path(path).read_text().splitlines()]
        assert [(name, kind, len(digest), top) for name, kind, digest, top in lines] == [
            ("ann", "sha256", 64, "top=interactive"),
            ("bob", "sha256", 64, "top=interactive"),
        ]
        assert [len(key) for key in keys.values()] == [32, 32]
    assert not Path(path).exists()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Stands for the servers of `make loadtest` and of a replay; returns their arguments."""
    started: Log = []

    @contextmanager
    def process(arguments: list[str]) -> Iterator[SimpleNamespace]:
        started.append(arguments)
        yield SimpleNamespace(url="http://here", host="here", port=80)

    monkeypatch.setattr(minute, "ServerProcess", process)
    monkeypatch.setattr(replay, "ServerProcess", process)
    return started


def test_a_minute_of_traffic(
    server: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], *, check: bool, env: dict[str, str]) -> SimpleNamespace:
        assert not check
        assert command == [
            *(sys.executable, "-m", "locust", "--headless", "--only-summary", "--locustfile"),
            str(Path(minute.__file__).parent / "locustfile.py"),
            *("--host", "http://here", "--users", "16", "--spawn-rate", "4", "--run-time", "1m"),
            *("--stop-timeout", "60", "--exit-code-on-error", "1", "--rate", "2"),
        ]
        tenants = [one.split("=") for one in env["LOADTEST_TENANTS"].split(",")]
        assert [(name, len(key)) for name, key in tenants] == [("ann", 32), ("bob", 32), ("cy", 32)]
        assert "PATH" in env
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr("subprocess.run", run)
    assert minute.main(["--rate", "2"]) == 7
    assert [one[:1] for one in server] == [["--api-keys-file"]]
    assert (
        capsys.readouterr().out == "loadtest: starting a server\nloadtest: 16 users for 1m on http://here\n"
    )


def fail(*_: object) -> None:
    raise ServerFailed("no room")


def test_a_minute_without_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(minute, "ServerProcess", fail)
    assert minute.main([]) == 2
    assert capsys.readouterr().err == "loadtest: the server did not start: no room\n"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Log:
    """The requests of warming a server, and what is compared."""
    log: Log = []

    def ask(run: object, job: Job) -> list[Answer]:
        assert run is run_module
        log.append(job)
        return [Answer(0, 1)]

    def compare(server: Any, run: object, arrivals: Any, token_ids: list[int], keys: Any) -> tuple[Any, ...]:
        assert run is run_module
        log.append((server.url, arrivals, token_ids, keys))
        return "machine", "served", "simulated"

    for name, fake in {
        "ask": ask,
        "compare": compare,
        "print_comparison": lambda *said: log.append(said),
    }.items():
        monkeypatch.setattr(replay, name, fake)
    return log


def test_a_trace_is_compared_on_a_warm_server(server: Log, compared: Log, tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    assert replay.main(["--json", str(written), "--seed", "3"]) == 0
    assert written.read_text().split() == [
        *("{", '"machine":', '"machine",', '"served":', '"served",', '"simulated":', '"simulated"', "}"),
    ]
    arguments = ["--model", str(DEMO_MODEL), "--served-model-name", "bench", "--no-speculation"]
    assert [one[:-1] for one in server] == [[*arguments, "--api-keys-file"]]
    warm, (url, arrivals, token_ids, keys), (name, *both) = compared
    assert (url, both) == ("http://here", ["served", "simulated"])
    assert name.startswith("demo: mixed")
    assert name.endswith("/s")
    assert 150 < len(arrivals) < 350
    assert 50 < arrivals[-1].at_s <= 60
    assert set(keys) == {arrival.tenant for arrival in arrivals}
    assert (warm.host, warm.port, warm.path) == ("here", 80, "/v1/completions")
    assert warm.keys == [keys[min(keys)]] * 8
    assert warm.starts_s == [0.2 * i for i in range(8)]
    assert [[(len(body["prompt"]), body["max_tokens"]) for body in bodies] for bodies in warm.bodies] == [
        [(200, 64)] * 2
    ] * 8
    assert {token for bodies in warm.bodies for body in bodies for token in body["prompt"]} <= set(token_ids)


def test_how_much_traffic_may_be_said_in_requests(server: Log, compared: Log) -> None:
    assert replay.main(["--requests", "5", "--rate", "0.5"]) == 0
    assert len(compared[1][1]) == 5
    assert len(server) == 1


def test_a_trace_of_a_file_has_no_defaults_of_scenarios(server: Log, compared: Log, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 6, "output_length": 2, "hash_ids": [1]}\n' * 2)
    assert replay.main(["--trace", str(trace)]) == 0
    assert [(arrival.num_prompt, arrival.num_output) for arrival in compared[1][1]] == [(6, 2)] * 2
    assert len(server) == 1


def test_a_replay_says_in_a_line_why_there_is_none(
    compared: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "ServerProcess", fail)
    assert replay.main(["--requests", "1"]) == 2
    assert capsys.readouterr().err == "replay: the server did not start: no room\n"
    assert compared == []


def test_a_server_that_fails_when_it_is_warmed_is_not_measured(
    server: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "ask", lambda *_: [Answer(0, 1), Answer(0, 1, error="HTTP 500")])
    assert replay.main(["--requests", "1"]) == 2
    assert capsys.readouterr().err == "replay: the server answers with HTTP 500\n"
    assert len(server) == 1


def test_models_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "ensure_checkpoint", lambda name: Path("made", name.name))
    names = [replay._model(name) for name in ("demo", "135m", "x/y")]
    assert names == [DEMO_MODEL, Path("made", LLAMA_135M.name), Path("x/y")]

"""Sessions over replicas, a trace on a server, and a minute of traffic: what is started, sent, told and judged."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtests import replay, replicas
from loadtests import run as minute
from loadtests.keys import key_file
from loadtests.replicas import Load
from penstock.app.bench.client import Job
from penstock.app.bench.job import run_module
from penstock.app.bench.server_process import ServerFailed
from penstock.app.checkpoint import DEMO_MODEL
from penstock.app.reader import TimedAnswer
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


def fail(*_: object) -> None:
    raise ServerFailed("no room")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Log:
    """The requests of warming a server, and what is compared."""
    log: Log = []

    def ask(run: object, job: Job) -> list[TimedAnswer]:
        assert run is run_module
        log.append(job)
        return [TimedAnswer(0, 1)]

    def compare(server: Any, run: object, arrivals: Any, token_ids: list[int], keys: Any) -> tuple[Any, ...]:
        assert run is run_module
        log.append((server.url, arrivals, token_ids, keys))
        return "machine", "served", "simulated"

    for name, fake in {
        "ask": ask,
        "compare": compare,
        "print_comparison": lambda *said: log.append(said),
        "print_groups": lambda summaries: log.append(summaries),
        "print_promises": lambda url: log.append(url),
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
    warm, (url, arrivals, token_ids, keys), counted_at, (name, *both), told_apart = compared
    assert (url, counted_at, both, told_apart) == (
        "http://here",
        "http://here",
        ["served", "simulated"],
        both,
    )
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


def test_a_server_elsewhere_gets_the_trace_without_keys(
    server: Log, compared: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = SimpleNamespace(host="there", port=81)
    monkeypatch.setattr(replay, "OtherServer", SimpleNamespace(at={"http://there:81": elsewhere}.__getitem__))

    def serve(*sent: object, seed: int) -> str:
        compared.append((*sent, seed))
        return "served"

    monkeypatch.setattr(replay, "serve", serve)
    assert replay.main(["--url", "http://there:81", "--requests", "29", "--seed", "3"]) == 0
    warm, (to, run, arrivals, _, keys, seed), told_apart = compared
    assert (warm.host, warm.port, set(warm.keys)) == ("there", 81, {""})
    assert (to, run, len(arrivals), keys, seed) == (elsewhere, run_module, 29, {}, 3)
    assert told_apart == ["served"]
    assert server == []


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
    monkeypatch.setattr(replay, "ask", lambda *_: [TimedAnswer(0, 1), TimedAnswer(0, 1, error="HTTP 500")])
    assert replay.main(["--requests", "1"]) == 2
    assert capsys.readouterr().err == "replay: the server answers with HTTP 500\n"
    assert len(server) == 1


@pytest.mark.long("load tests")
def test_a_trace_is_served_and_simulated_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    assert replay.main(["--requests", "12", "--rate", "4", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    served, simulated = found["served"]["total"], found["simulated"]["total"]
    assert served["offered"] == simulated["offered"] == 12
    assert served["work"] > 0 < served["kept"] <= 12 - served["refused"]
    assert found["machine"]["max_batch_tokens"] in (512, 8192)
    assert 0 < found["machine"]["coefficients"]["alpha_s"] < 1
    printed = capsys.readouterr().out
    assert "served / simulated" in printed
    assert "longer prompts, simulated" in printed


@pytest.mark.long("load tests")
def test_sessions_run_on_one_server_and_behind_both_switches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["replicas", "--replicas", "2", "--sessions", "3", "--turns", "2"])
    replicas.main()
    names = ("one server", "2 replicas, by forecast", "2 replicas, at random")
    for line, name in zip(capsys.readouterr().out.splitlines(), names, strict=True):
        assert line.startswith(f"{name}: 6 turns, 0 failed: ")

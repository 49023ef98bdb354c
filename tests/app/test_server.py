"""What the process makes of its engine's states and of signals; how a real one comes up is in `test_serving`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.app import server
from penstock.app.errors import OperatorError
from penstock.app.listen import bind, certificate_of, url
from penstock.app.promises import remembered
from penstock.app.settings import Settings
from penstock.engine.engine import EngineState
from penstock.priority.lanes import Lane

Told = list[object]


class Parts:
    """Stands for a server's parts: what they are told is noted."""

    folder = Path("folder")

    def __init__(self) -> None:
        self.told: Told = []
        self.failure: Exception | None = None
        self.app = self.engine = self.service = self.dispatch = self.access = self.queue = self
        self.admission, self.max_sequence_tokens = self, 100
        self.promised: float | None = None

    def warm_up(self) -> None:
        self.told.append("warm up")

    def promised_s(self, lane: Lane, num_tokens: int) -> float | None:
        return self.promised if lane is Lane.INTERACTIVE and num_tokens < 100 else None

    def begin_drain(self) -> None:
        self.told.append("drain")

    async def drained(self, timeout_s: float) -> None:
        self.told.append(timeout_s)
        if timeout_s:
            await asyncio.Event().wait()

    def fail_all(self) -> None:
        self.told.append("fail")

    def replace(self, clients: object) -> None:
        self.told.append(clients)

    def set_weights(self, weights: object) -> None:
        self.told.append(weights)


@pytest.fixture
def process() -> Iterator[server._Process]:
    parts: Any = Parts()
    with bind("127.0.0.1", 0) as listener:
        settings = Settings(drain_timeout=0)
        certificate = certificate_of(settings)
        yield server._Process(settings, certificate, parts, listener, None, None, started_s=100.0)


def told(process: server._Process) -> Told:
    parts: Any = process.parts
    return list(parts.told)


def test_the_status_is_that_of_the_engine(
    process: server._Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    parts: Any = process.parts
    assert process.finish(ended=True) == 0
    assert caplog.messages == ["stopped"]
    parts.failure = ValueError("x")
    with pytest.raises(OperatorError, match=r"^folder cannot be loaded: ValueError: x$"):
        process.finish(ended=True)
    process.was_ready = True
    assert process.finish(ended=True) == 1
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    process.finish(ended=False)
    assert left == [1]


def test_a_model_that_is_loaded_is_told_once_all_is_settled(
    process: server._Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settled: list[object] = []
    monkeypatch.setattr(server, "settle_garbage", lambda: settled.append("garbage"))
    monkeypatch.setattr(sys, "setswitchinterval", settled.append)
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: 102.5))
    process._on_state(EngineState.STARTING)
    assert (process.was_ready, told(process), settled) == (False, [], [])
    process._on_state(EngineState.READY)
    assert (process.was_ready, told(process), settled) == (True, ["warm up"], ["garbage", 0.0001])
    assert caplog.messages == [f"ready in 2.5 s: open {url(process.listener, process.settings)}"]
    assert not process.server.should_exit
    process._on_state(EngineState.FAILED)
    assert process.server.should_exit


def test_what_is_promised_is_said_and_remembered(
    process: server._Process,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(server, "_settle_interpreter", lambda: None)
    parts: Any = process.parts
    parts.promised = 1.0
    process._on_state(EngineState.READY)
    said = "interactive: first token within 1 s for prompts of up to 99 tokens"
    assert caplog.messages[0] == f"promised, {said}"
    assert caplog.messages[1].startswith("ready in ")
    assert remembered(parts.folder, process.settings)[0].startswith(said)


def signalled(process: server._Process, times: int) -> None:
    """Runs the drain that so many signals at once start, to its end."""

    async def run() -> None:
        for _ in range(times):
            process._on_signal()
        assert process._drain is not None
        await asyncio.wait([process._drain])

    asyncio.run(run())


def test_streams_drain_before_what_is_left_fails(process: server._Process) -> None:
    signalled(process, 1)
    assert told(process) == ["drain", 0.0, "fail"]
    assert process.server.should_exit


def test_a_second_signal_ends_a_drain_that_has_not_begun(
    process: server._Process, caplog: pytest.LogCaptureFixture
) -> None:
    process.settings = Settings(drain_timeout=7)
    signalled(process, 2)
    assert told(process) == ["drain", "fail"]
    assert process.server.should_exit
    assert caplog.messages == ["a second signal: ending at once"]


def test_new_keys_reach_the_door_and_the_queue(process: server._Process) -> None:
    process._take_keys({})
    assert told(process) == [{}, {}]

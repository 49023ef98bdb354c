"""The server writes its own lines from a level on, and its progress in loading, to stderr."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
import threading
from types import SimpleNamespace
from typing import cast

import pytest
from starlette.types import Receive, Scope, Send

from penstock.app import log as log_module
from penstock.app.log import configure_log, counter, log, progress_bar, said_if_slow
from penstock.gateway.http.entrance import Entrance
from penstock.gateway.limits import Limits

Capture = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    """A stderr that somebody watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in its only place, which tests set."""
    now = [100.0]
    monkeypatch.setattr("penstock.app.log.time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_lines_are_said_from_the_level_on(capsys: Capture, level: str, said: list[str]) -> None:
    configure_log(level)
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("this is %s", name)
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == said


def test_a_line_is_the_time_and_the_words(capsys: Capture) -> None:
    configure_log("info")
    log.info("starting on %s", "http://127.0.0.1:1")
    assert re.fullmatch(r"\d\d:\d\d:\d\d starting on http://127\.0\.0\.1:1\n", capsys.readouterr().err)


def test_what_is_worse_than_information_says_how_bad_it_is(capsys: Capture) -> None:
    configure_log("info")
    log.warning("open to %s", "all")
    log.error("lost")
    lines = [line[9:] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["warning: open to all", "error: lost"]


def test_of_libraries_only_errors_are_heard(capsys: Capture) -> None:
    configure_log("debug")
    for level in ("info", "warning", "error"):
        getattr(logging.getLogger("some.library"), level)("library %s", level)
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["error: library error"]


def test_the_engine_speaks_through_the_same_log(capsys: Capture) -> None:
    configure_log("info")
    logging.getLogger("penstock.engine").info("42 blocks")
    assert capsys.readouterr().err.endswith(" 42 blocks\n")


def test_configuring_twice_says_everything_once(capsys: Capture) -> None:
    configure_log("info")
    configure_log("info")
    log.info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_where_nobody_watches_progress_is_a_line_now_and_then(capsys: Capture, clock: list[float]) -> None:
    configure_log("info")
    with progress_bar("loading the weights") as show:
        for percent in range(0, 101, 5):
            clock[0] += 0.5
            show(percent / 100)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[-1] for line in lines] == ["15 %", "35 %", "55 %", "75 %", "95 %"]
    assert all("loading the weights" in line for line in lines)


def test_what_is_counted_is_said_in_requests(capsys: Capture, clock: list[float]) -> None:
    configure_log("info")
    with counter("fcfs", 2_500) as show:
        clock[0] += 60
        show(1_000)
    assert capsys.readouterr().err.endswith(" fcfs: 1,000 of 2,500 requests\n")


def test_what_is_quick_is_loaded_without_a_line(capsys: Capture, clock: list[float]) -> None:
    configure_log("info")
    with progress_bar("loading the weights") as show:
        clock[0] += log_module._LINE_EVERY_S / 2
        show(0.5)
        show(1.0)
    assert capsys.readouterr().err == ""


def test_what_is_slow_is_said_and_what_is_quick_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    said, is_said = list[str](), threading.Event()

    def note(text: str, *values: object) -> None:
        said.append(text % values)
        is_said.set()

    monkeypatch.setattr(log, "info", note)
    with said_if_slow("reading %s", "it"):
        pass
    monkeypatch.setattr("penstock.app.log._SILENT_S", 0.0)
    with said_if_slow("making %s", "it"):
        assert is_said.wait(30)
    assert said == ["making it"]


def test_progress_keeps_to_the_level_of_the_log(capsys: Capture, clock: list[float]) -> None:
    configure_log("warning")
    with progress_bar("loading the weights") as show:
        clock[0] += 60
        show(0.5)
    assert capsys.readouterr().err == ""


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From here on stderr is a terminal. No fixture: pytest puts its own stderr back before a test begins."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_on_a_terminal_progress_is_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with progress_bar("loading the weights") as show:
        show(0.25)
        show(1.0)
    written = terminal.getvalue()
    assert "loading the weights" in written
    assert "\x1b[2K" in written.rpartition("loading the weights")[2], (
        "the line of the bar is wiped at the end"
    )


def test_on_a_terminal_what_is_counted_stands_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with counter("fcfs", 2_500) as show:
        show(1_000)
        show(2_500)
    assert "2500/2500" in terminal.getvalue()


def test_a_bar_goes_away_when_loading_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with pytest.raises(ZeroDivisionError), progress_bar("loading the weights") as show:
        show(1 / 0)
    assert "\x1b[?25h" in terminal.getvalue(), "the cursor is shown again"


@pytest.mark.parametrize(
    ("modules", "widgets", "is_jupyter", "has_bar"),
    [
        ({"IPython": None}, True, True, True),
        ({"IPython": None}, True, False, False),
        ({"IPython": None}, False, True, False),
        ({}, True, True, False),
    ],
)
def test_a_notebook_that_has_widgets_has_a_bar(
    monkeypatch: pytest.MonkeyPatch,
    modules: dict[str, None],
    widgets: bool,
    is_jupyter: bool,
    has_bar: bool,
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(log_module, "find_spec", lambda _: object() if widgets else None)
    monkeypatch.setattr("rich.console.Console", lambda: SimpleNamespace(is_jupyter=is_jupyter))
    assert log_module._is_notebook() is has_bar


# For machines, and for each request


def test_a_line_of_json_has_the_fields_of_its_record(capsys: Capture) -> None:
    configure_log("info", "json")
    log.getChild("store").warning("gone\n%s", "for good", extra={"fields": {"request_id": "req_1"}})
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "warning", "logger": "penstock.store", "message": "gone\nfor good", "request_id": "req_1",
    }  # fmt: skip


def test_a_fault_is_one_line_of_json_too(capsys: Capture) -> None:
    configure_log("info", "json")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: why" in json.loads(line)["exception"]


@pytest.mark.parametrize(("level", "paths"), [("info", ["/"]), ("debug", ["/", "/health"]), ("warning", [])])
def test_each_request_has_a_line_but_probes_only_at_debug(
    level: str, paths: list[str], capsys: Capture
) -> None:
    configure_log(level, "json", access=True)
    answer_requests("/", "/health")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["path"] for line in lines] == paths
    assert all((line["method"], line["status"], line["whole"]) == ("GET", 204, True) for line in lines)
    assert all(line["request_id"] == "req-1" and line["seconds"] >= 0 for line in lines)


def test_without_access_log_there_is_none(capsys: Capture) -> None:
    configure_log("debug")
    answer_requests("/")
    assert capsys.readouterr().err == ""


def test_a_reply_that_nobody_waited_for_is_not_whole(capsys: Capture) -> None:
    configure_log("info", access=True)
    answer_requests("/gone", is_whole=False)
    assert re.search(r"GET /gone 204, left, \d+ ms, req-1$", capsys.readouterr().err.strip())


def answer_requests(*paths: str, is_whole: bool = True) -> None:
    """Requests to an app that answers them with 204."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "more_body": not is_whole})

    async def nothing(*_: object) -> None: ...

    for path in paths:
        scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"x-request-id", b"req-1")]}
        asyncio.run(Entrance(app, Limits())(scope, cast("Receive", nothing), nothing))

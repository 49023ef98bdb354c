"""What the bench starts: modules and servers in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.app.bench.job import run_module
from penstock.app.bench.server_process import ServerFailed, ServerProcess
from penstock.app.errors import OperatorError

MODULE = """
import sys
from dataclasses import dataclass

@dataclass
class Found:
    number: int

def measure(number, fail=""):
    if fail:
        print("first", fail, sep="\\n", file=sys.stderr)
        sys.exit(3)
    return {"found": Found(number + 1)}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that a process finds by the path of the environment."""
    (tmp_path / "scripted.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "scripted"


def test_a_module_measures_in_a_process_of_its_own(module: str) -> None:
    assert run_module(module, {"number": 4}) == {"found": {"number": 5}}


def test_a_module_that_fails_says_why(module: str) -> None:
    with pytest.raises(OperatorError, match=r"^scripted failed: \['no memory'\]$"):
        run_module(module, {"number": 4, "fail": "no memory"})
    with pytest.raises(OperatorError, match=r"^scripted failed: \['no message'\]$"):
        run_module(module, {"number": 4, "fail": "no memory"}, stderr=subprocess.DEVNULL)


# Servers

SERVER = """
import os, signal, sys
signal.signal(signal.SIGTERM, {stop})
print("00:00:00 starting on http://127.0.0.2:81", file=sys.stderr)
print("00:00:01 ready in 1 s", sys.argv[1:], os.environ["PYTHONUNBUFFERED"], file=sys.stderr)
while True:
    signal.pause()
"""


def server(stop: str = "lambda *_: sys.exit(5)") -> ServerProcess:
    return ServerProcess(["--model", "m"], [sys.executable, "-c", SERVER.format(stop=stop)])


def test_a_server_tells_where_it_listens_and_when_it_is_ready() -> None:
    with server() as running:
        assert (running.url, running.host, running.port) == ("http://127.0.0.2:81", "127.0.0.2", 81)
        assert running.log.splitlines()[1:] == ["00:00:01 ready in 1 s ['--port', '0', '--model', 'm'] 1"]
        assert running.process.poll() is None
    assert (running.process.returncode, running.stop()) == (5, 5)


def test_a_server_that_does_not_say_a_line_in_time_is_killed() -> None:
    running = server()
    running.wait_ready()
    with pytest.raises(ServerFailed, match="starting on"):
        running.wait_line("serving", timeout_s=0.01)
    assert running.process.returncode == -signal.SIGKILL


def test_a_server_that_does_not_end_in_time_is_killed() -> None:
    running = server("signal.SIG_IGN")
    running.wait_line("ready")
    running.signal()
    assert running.wait(timeout_s=0.01) == -signal.SIGKILL


def test_a_server_that_ended_says_what_it_wrote() -> None:
    started_s = time.monotonic()
    with (
        pytest.raises(ServerFailed, match=r"^no model$"),
        ServerProcess(command=["sh", "-c", "echo no model >&2"]),
    ):
        pass
    assert time.monotonic() - started_s < 60

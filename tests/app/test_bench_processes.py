"""What the bench starts: modules and servers in processes of their own, and transformers' generate."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from penstock.app.bench import generate
from penstock.app.bench.job import run_module
from penstock.app.bench.server_process import ServerFailed, ServerProcess
from penstock.app.errors import OperatorError

MODULE = """
import os, sys
from dataclasses import dataclass

@dataclass
class Found:
    number: int

def measure(number, fail=""):
    if fail:
        print("first", fail, sep="\\n", file=sys.stderr)
        sys.exit(3)
    return {"found": Found(number + 1), "path": os.environ["PYTHONPATH"].split(os.pathsep)[1:]}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that a process finds by the path of the environment; the working directory has another `app`."""
    (tmp_path / "scripted.py").write_text(MODULE)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('the wrong app')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return "scripted"


def test_a_module_measures_in_a_process_of_its_own(module: str, tmp_path: Path) -> None:
    assert run_module(module, {"number": 4}) == {"found": {"number": 5}, "path": [str(tmp_path)]}


def test_a_module_that_fails_says_why(module: str) -> None:
    with pytest.raises(OperatorError, match=r"^scripted failed: \['no memory'\]$"):
        run_module(module, {"number": 4, "fail": "no memory"})
    with pytest.raises(OperatorError, match=r"^scripted failed: \['no message'\]$"):
        run_module(module, {"number": 4, "fail": "no memory"}, stderr=subprocess.DEVNULL)


def test_without_a_path_in_the_environment_a_process_has_the_packages_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(OperatorError, match="No module named 'scripted'"):
        run_module("scripted", {})
    monkeypatch.setattr(
        subprocess, "run", lambda *_, env, **__: SimpleNamespace(returncode=0, stdout=json.dumps(env))
    )
    assert run_module("scripted", {})["PYTHONPATH"] == str(Path(__file__).parents[2])


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


# transformers' generate


class Network:
    """Each token of an answer takes a second of the clock."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.clock_s = 0.0

    def from_pretrained(self, model: str, *, dtype: torch.dtype) -> Network:
        self.calls.append((model, dtype))
        return self

    def generate(self, ids: Tensor, *, attention_mask: Tensor, max_new_tokens: int, **rest: object) -> Tensor:
        self.calls.append((ids.tolist(), attention_mask.tolist(), max_new_tokens, rest))
        self.clock_s += max_new_tokens
        return torch.zeros(1, ids.shape[1] + max_new_tokens)


def test_generate_is_greedy_and_timed_after_it_was_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=network))
    monkeypatch.setattr(time, "perf_counter", lambda: network.clock_s)
    monkeypatch.setattr(torch, "set_num_threads", network.calls.append)
    assert generate.measure("m", [[5, 6], [7]], 9, 2) == [9.0, 9.0]

    def call(prompt: list[int], length: int) -> object:
        rest = {"do_sample": False, "min_new_tokens": length, "pad_token_id": 0}
        return ([prompt], [[1] * len(prompt)], length, rest)

    assert network.calls == [2, ("m", torch.float32), call([5, 6], 4), call([5, 6], 9), call([7], 9)]

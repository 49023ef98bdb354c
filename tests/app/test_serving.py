"""How a server comes up and goes down: real processes, real signals, real streams."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loadtests.forked import ForkedServer
from penstock.app.bench.server_process import SERVE, ServerProcess
from tests.collector import Collector

Start = Callable[..., ServerProcess]

LONG = {
    "prompt": "Once upon a time",
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}

# A server whose device is lost in the third step after it was warm, once somebody writes to the pipe that it is given.
FAILING = """
import sys
from penstock.app.cli import main
from penstock.engine.planning.device import DeviceError
import penstock.engine.engine

gate = sys.argv.pop(1)
launch, launched = penstock.engine.engine.Engine._launch, []

def failing(self, scheduler, plan, now):
    if self.state is penstock.engine.engine.EngineState.READY:  # not in its rehearsal
        launched.append(plan)
    if len(launched) == 3:
        open(gate).read()
        raise DeviceError("the device is gone")
    return launch(self, scheduler, plan, now)

penstock.engine.engine.Engine._launch = failing
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers; none outlives its test."""
    servers: list[ServerProcess] = []

    def start_one(*arguments: str, command: Sequence[str] = SERVE) -> ServerProcess:
        servers.append(ForkedServer(arguments) if command is SERVE else ServerProcess(arguments, command))
        return servers[-1]

    yield start_one
    for server in servers:
        server.kill()


@contextmanager
def answer_to(
    server: ServerProcess, method: str, path: str, body: object = None
) -> Iterator[http.client.HTTPResponse]:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"content-type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


def status_of(server: ServerProcess, path: str) -> int:
    with answer_to(server, "GET", path) as response:
        response.read()
        return response.status


def events(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


@contextmanager
def running_stream(server: ServerProcess) -> Iterator[Iterator[str]]:
    """The rest of a long stream whose first token has come."""
    with answer_to(server, "POST", "/v1/completions", {"model": "penstock-demo", **LONG}) as response:
        assert response.status == 200, response.read()
        rest = events(response)
        assert next(rest)
        yield rest


def finish_reason(payload: str) -> str | None:
    reason: str | None = json.loads(payload)["choices"][0]["finish_reason"]
    return reason


def test_not_ready_while_the_model_loads_and_ready_after(start: Start) -> None:
    server = start("--metrics-port", "0")
    assert status_of(server, "/ready") == 503
    assert status_of(server, "/health") == 200
    apart = urlsplit(server.wait_line(" metrics on ").split()[-1])
    for path, status in (("/ready", 503), ("/metrics", 200), ("/v1/models", 404)):
        connection = http.client.HTTPConnection(apart.hostname or "", apart.port, timeout=60)
        connection.request("GET", path)
        assert connection.getresponse().status == status
        connection.close()
    assert status_of(server, "/metrics") == 404
    server.wait_ready()
    assert status_of(server, "/ready") == 200
    assert server.stop() == 0
    assert server.lines[-1].endswith("stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_it_well(start: Start, number: signal.Signals) -> None:
    server = start()
    assert status_of(server, "/ready") == 503
    server.signal(number)
    assert server.wait() == 0
    assert "Traceback" not in server.log


def test_running_streams_finish_after_sigterm_and_new_work_is_refused(start: Start) -> None:
    """With their traces, which the server sends before it ends."""
    with Collector() as collector:
        server = start("--otlp-endpoint", collector.url, "--access-log")
        _drain(server)
    assert f"a trace of each request goes to {collector.url} (--otlp-endpoint)" in server.log
    (span,) = collector.spans
    assert any(line.endswith(f", trace {span.trace_id.hex()}") for line in server.lines)
    assert [event.name for event in span.events] == ["queued", "admitted", "first_token", "ended"]


def _drain(server: ServerProcess) -> None:
    server.wait_ready()
    with running_stream(server) as rest, answer_to(server, "GET", "/v1/events") as told:
        server.signal()
        server.wait_line(" draining")
        assert status_of(server, "/ready") == 503
        with answer_to(server, "POST", "/v1/completions", {"model": "penstock-demo", **LONG}) as refused:
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
        payloads = list(rest)
        states = [json.loads(line[6:])["state"] for line in told if line.startswith(b"data: ")]
    assert payloads[-1] == "[DONE]"
    assert finish_reason(payloads[-2]) == "length"
    assert (states[0], states[-1]) == ("ready", "draining")
    assert server.wait() == 0


def test_streams_that_do_not_finish_in_time_end_with_an_error_frame(start: Start) -> None:
    server = start("--drain-timeout", "0.1")
    server.wait_ready()
    with running_stream(server) as rest:
        server.signal()
        *_, error, last = rest
    assert json.loads(error)["error"]["message"]
    assert last == "[DONE]"
    assert server.wait() == 0


def test_a_second_signal_ends_streams_at_once(start: Start) -> None:
    server = start("--drain-timeout", "600")
    server.wait_ready()
    with running_stream(server) as rest:
        server.signal()
        server.wait_line(" draining")
        server.signal(signal.SIGINT)
        *_, error, last = rest
    assert "error" in json.loads(error)
    assert last == "[DONE]"
    assert server.wait() == 0


def test_a_lost_device_ends_streams_with_an_error_frame_and_the_process_with_1(
    start: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = start(command=[sys.executable, "-c", FAILING, str(gate)])
    server.wait_ready()
    with running_stream(server) as rest:
        gate.write_text("")
        *_, error, last = rest
    assert "error" in json.loads(error)
    assert last == "[DONE]"
    assert server.wait() == 1
    assert "the device is gone" in server.log
    assert "Traceback" not in server.log


def test_a_server_open_to_all_says_so(start: Start) -> None:
    server = start("--host", "0.0.0.0", "--insecure")
    assert "whoever reaches 0.0.0.0 can use this server" in server.wait_line("warning: ")
    assert server.url.startswith("http://127.0.0.1:")
    server.wait_ready()
    assert server.stop() == 0


def test_serving_writes_no_line_per_request(start: Start) -> None:
    server = start()
    server.wait_ready()
    before = list(server.lines)
    assert before[-1].endswith(server.url)
    for path in ("/health", "/v1/models", "/nowhere"):
        status_of(server, path)
    server.signal()
    assert server.wait() == 0
    assert [
        line for line in server.lines[len(before) :] if "draining" not in line and "stopped" not in line
    ] == []

"""Ctrl-C and SIGTERM to the installed command: while it starts, when it has nothing to do, and with streams running."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import pytest

from loadtests.forked import ForkedServer
from penstock.app.bench.server_process import ServerProcess

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
WAITING = ("penstock_queued_requests", "penstock_waiting_sequences")

Start = Callable[..., ServerProcess]
Stream = Iterator[str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers in process groups of their own, as a shell does; none outlives its test."""
    servers: list[ServerProcess] = []

    def start_one(*arguments: str) -> ServerProcess:
        servers.append(ForkedServer(arguments))  # which calls setsid
        return servers[-1]

    yield start_one
    for server in servers:
        server.kill()


def press_ctrl_c(server: ServerProcess) -> None:
    """As a terminal does it: every process of the group gets the signal."""
    os.killpg(server.process.pid, signal.SIGINT)


@contextmanager
def request(
    server: ServerProcess, path: str, body: Mapping[str, object] | None = None
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


@contextmanager
def stream(server: ServerProcess, num_tokens: int = 1000) -> Iterator[Stream]:
    """The frames of a stream after its first, which has come."""
    body = {
        "model": "penstock-demo",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with request(server, "/v1/chat/completions", body) as response:
        assert response.status == 200, response.read()
        frames = (line[5:].strip().decode() for line in response if line.startswith(b"data:"))
        assert "error" not in json.loads(next(frames))
        yield frames


def assert_whole(frames: Stream, num_tokens: int = 1000) -> None:
    *_, last, usage, done = frames
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"]["completion_tokens"] == num_tokens
    assert done == "[DONE]"


def assert_ended_well(server: ServerProcess) -> None:
    assert server.wait() == 0, server.log
    assert server.lines[-1].endswith(" stopped")
    assert "Traceback" not in server.log
    assert not [line for line in server.lines if "error" in line]


@BOTH
def test_a_signal_before_the_model_was_looked_at_ends_it_well(start: Start, number: signal.Signals) -> None:
    """Between the first line and the event loop: nothing runs yet that would have to be ended."""
    server = start()
    server.wait_line(" starting on ")
    server.signal(number)
    assert server.wait() == 0, server.log
    assert "Traceback" not in server.log
    assert " ready in " not in server.log


def test_ctrl_c_with_nothing_to_do_ends_it_well_and_frees_the_port(start: Start) -> None:
    server = start()
    server.wait_ready()
    port = server.port
    press_ctrl_c(server)
    assert_ended_well(server)
    with socket.create_server(("127.0.0.1", port)) as again:
        assert again.getsockname()[1] == port


def test_ctrl_c_lets_all_streams_end_whole_and_refuses_new_ones(start: Start) -> None:
    server = start()
    server.wait_ready()
    with stream(server) as first, stream(server) as second:
        press_ctrl_c(server)
        server.wait_line(" draining")
        for path in ("/v1/chat/completions", "/v1/completions"):
            body = {"model": "penstock-demo", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
            with request(server, path, body) as refused:
                error = json.load(refused)["error"]
                assert refused.status == 503
                assert error["code"] == "server_shutting_down"
        with request(server, "/ready") as ready:
            assert ready.status == 503
        with request(server, "/health") as health:
            assert health.status == 200
        assert_whole(first)
        assert_whole(second)
    assert_ended_well(server)


def test_a_stream_that_waited_for_its_turn_ends_whole_too(start: Start) -> None:
    """What was let in is served, also what had not begun when the signal came."""
    server = start("--max-num-seqs", "1")
    server.wait_ready()
    body = {
        "model": "penstock-demo",
        "prompt": "One day",
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": False,
    }
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    with stream(server) as running, closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        wait_queued(server)
        server.signal(signal.SIGTERM)
        server.wait_line(" draining")
        assert_whole(running)
        answer = json.load(connection.getresponse())
    assert answer["usage"]["completion_tokens"] == 8
    assert_ended_well(server)


def wait_queued(server: ServerProcess) -> None:
    """Returns once a request waits for another to end."""
    for _ in range(500):
        with request(server, "/metrics") as response:
            gauges = [line.split() for line in response.read().decode().splitlines() if line[0] != "#"]
        if any(name.startswith(WAITING) and float(value) > 0 for name, value in gauges):
            return
    raise AssertionError("no request ever waited")

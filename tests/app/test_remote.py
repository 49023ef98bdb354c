"""`penstock doctor --url`: a real server is well, and each thing that is not is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

import pytest

from penstock.app import remote
from penstock.app.doctor import Severity
from penstock.app.errors import OperatorError
from penstock.app.reader import TimedAnswer
from tests.app.command import penstock


def test_a_server_that_is_well(live_server: str) -> None:
    done = penstock("doctor", "--url", live_server)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert {"health", "ready", "kv", "store", "stream"} <= lines.keys()
    assert "32 tokens in " in lines["stream"]
    assert lines["stream"].startswith("ok")


def test_nobody_there() -> None:
    done = penstock("doctor", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith("fail  server    http://127.0.0.1:1 does not answer: ")
    assert line.endswith("; is it running, and is the port right?")


@pytest.mark.parametrize(
    "arguments", [["--url", "ftp://x"], ["--url", "http://x", "--port", "1"], ["demo", "--url", "http://x"]]
)
def test_what_cannot_be_asked(arguments: list[str]) -> None:
    done = penstock("doctor", *arguments)
    assert done.returncode == 2
    assert "--url" in done.stderr
    assert "Traceback" not in done.stderr


WELL = {
    "penstock_promises_total kept": 19,
    "penstock_promises_total broken": 1,
    "penstock_admissions_total admitted": 19,
    "penstock_admissions_total refused": 1,
    "penstock_kv_usage_ratio": 0.95,
    "penstock_preemptions_total": 1,
    "penstock_store_up": 1,
}


@pytest.mark.parametrize(
    ("sums", "lines"),
    [
        ({}, ["ok    kv        0% in use; sequences gave way 0 times"]),
        (
            WELL,
            [
                "ok    promises  95.0% kept of 20",
                "ok    refused   5.0% of 20 requests",
                "ok    kv        95% in use; sequences gave way 1 times",
                "ok    store     up; 0 calls failed",
            ],
        ),
        (
            {
                "penstock_promises_total kept": 2,
                "penstock_promises_total broken": 2,
                "penstock_admissions_total admitted": 2,
                "penstock_admissions_total refused": 2,
                "penstock_kv_usage_ratio": 0.96,
                "penstock_preemptions_total": 1,
                "penstock_store_up": 0,
                "penstock_store_failures_total": 3,
                "penstock_failed_steps_total": 1,
            },
            [
                "warn  promises  50.0% kept of 4; see Sizing",
                "warn  refused   50.0% of 4 requests; more load than the promise allows",
                "warn  kv        96% in use; sequences gave way 1 times; more --kv-memory, or --kv-dtype int8",
                "warn  store     Redis does not answer, memory stands in; 3 calls failed; "
                "docs/guide/deploy.md, Redis is slow or gone",
                "warn  steps     1 failed; the log says why",
            ],
        ),
        (
            {"penstock_kv_usage_ratio": 0.99},
            ["ok    kv        99% in use; sequences gave way 0 times"],
        ),
    ],
    ids=["idle", "well", "short", "full"],
)
def test_counters_in_words(sums: dict[str, float], lines: list[str]) -> None:
    assert [str(check) for check in remote.check_metrics(sums)] == lines


def test_samples_are_added_up_by_each_label() -> None:
    text = """# TYPE asked counter
asked_total{lane="batch",outcome="kept"} 2.0
asked_total{lane="batch",outcome="broken"} 3.0
"""
    assert remote.sums_of(text) == {
        "asked_total": 5, "asked_total batch": 5, "asked_total kept": 2, "asked_total broken": 3,
    }  # fmt: skip


OPENING = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ANSWERS = {
    "/health": (200, b'{"status": "ok"}'),
    "/ready": (200, b'{"status": "ready"}'),
    "/metrics": (200, b""),
    "/v1/models": (200, b'{"data": [{"id": "m"}]}'),
}


class Fake(ThreadingHTTPServer):
    """Something like the server behind the path /v1: connections stay open unless the client closes them."""

    def __init__(self, answers: dict[str, tuple[int, bytes]], status: int, pieces: list[bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.status, self.pieces = answers, status, pieces
        self.url = f"http://127.0.0.1:{self.server_port}/behind"
        self.asked: list[object] = []
        self.keys: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        status, text = self.server.answers[self.path.removeprefix("/behind")]
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, self.headers["content-type"], body))
        self.send_response(self.server.status)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in self.server.pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.close_connection = not self.server.pieces
        if self.server.pieces:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(
    pieces: list[bytes], status: int = 200, changes: Mapping[str, tuple[int, bytes]] = MappingProxyType({})
) -> Iterator[Fake]:
    """A server whose stream comes in these pieces, and which answers some paths otherwise."""
    answers = {**ANSWERS, **changes}
    with Fake(answers, status, pieces) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_one_short_stream_is_asked_for_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving([OPENING * 3 + DONE]) as server:
        check = remote.check_stream(server.url)
    assert str(check).endswith(
        " in 1 pieces; something on the way buffers: docs/guide/deploy.md, Behind a proxy"
    )
    assert check.level is Severity.WARN
    body = {
        "model": "m", "prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert server.asked == [("/behind/v1/completions", "application/json", body)]
    assert server.keys == ["Bearer secret"] * 2


def test_a_stream_is_told_with_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = TimedAnswer(1.0, 3.0, token_times_s=[1.25, 2.0, 2.0], num_output_tokens=3)
    monkeypatch.setattr(remote, "_stream", lambda *_: answer)
    with serving([]) as server:
        check = remote.check_stream(server.url)
    assert str(check) == "ok    stream    first token after 250 ms, 3 tokens in 2 pieces"


@pytest.mark.parametrize(
    ("pieces", "status", "models", "line"),
    [
        (
            [],
            200,
            (401, b"{}"),
            "warn  stream    not tried: the server wants a key; put one into OPENAI_API_KEY",
        ),
        ([], 200, (500, b""), "fail  stream    /v1/models: HTTP 500"),
        ([b"{}"], 429, ANSWERS["/v1/models"], "warn  stream    refused with 429: there is no room now"),
        ([OPENING], 200, ANSWERS["/v1/models"], "fail  stream    the stream ended without [DONE]"),
        ([], 200, ANSWERS["/v1/models"], "fail  stream    the stream broke: IncompleteRead(0 bytes read)"),
    ],
)
def test_a_stream_that_fails_is_told_with_its_reason(
    pieces: list[bytes], status: int, models: tuple[int, bytes], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(pieces, status, {"/v1/models": models}) as server:
        assert str(remote.check_stream(server.url)) == line
    assert set(server.keys) == {None}


STREAM = "warn  stream    not tried: the server wants a key; put one into OPENAI_API_KEY"


@pytest.mark.parametrize(
    ("changes", "lines", "status"),
    [
        (
            {},
            [
                "ok    health    ok",
                "ok    ready     ready",
                "ok    kv        0% in use; sequences gave way 0 times",
            ],
            0,
        ),
        (
            {
                "/health": (503, b'{"status": "stuck"}'),
                "/ready": (503, b'{"status": "loading"}'),
                "/metrics": (404, b""),
            },
            [
                "fail  health    stuck; the step loop makes no progress: its log says why; start it again",
                "fail  ready     loading; it loads, warms up or drains: balancers send nobody here now",
                "warn  metrics   HTTP 404; a proxy may hide them; ask the server itself",
            ],
            1,
        ),
        (
            {"/health": (200, b"<html>"), "/metrics": (404, b"")},
            [
                "fail  health    HTTP 200, and not what Penstock says; is it a Penstock at all?",
                "ok    ready     ready",
                "warn  metrics   HTTP 404; a proxy may hide them; ask the server itself",
            ],
            1,
        ),
    ],
    ids=["well", "stuck", "another"],
)
def test_every_check_is_a_line(
    changes: dict[str, tuple[int, bytes]], lines: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving([], changes={"/v1/models": (401, b""), **changes}) as server:
        assert remote.run(f"{server.url}/") == status
    assert capsys.readouterr().out.splitlines() == [*lines, STREAM]


@pytest.mark.parametrize("url", ["ftp://x", "http://", "https:///x"])
def test_a_url_of_nothing(url: str) -> None:
    with pytest.raises(OperatorError, match=f"^--url {url}: not a URL like http://127.0.0.1:8000$"):
        remote.run(url)


def test_a_connection_is_made_as_the_url_says() -> None:
    for url, kind in (("https://x:1/y", HTTPSConnection), ("http://x:1/y", HTTPConnection)):
        connection = remote.connect(url)
        assert type(connection) is kind
        assert (connection.host, connection.port, connection.timeout) == ("x", 1, 60)

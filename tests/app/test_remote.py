"""`penstock doctor --url`: a real server is well, and each thing that is not is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from app import remote
from app.doctor import Level
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
    assert "does not answer" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--url", "ftp://x"], ["--url", "http://x", "--port", "1"], ["demo", "--url", "http://x"]]
)
def test_what_cannot_be_asked(arguments: list[str]) -> None:
    done = penstock("doctor", *arguments)
    assert done.returncode == 2
    assert "--url" in done.stderr
    assert "Traceback" not in done.stderr


def levels(**sums: float) -> dict[str, Level]:
    return {
        check.name: check.level
        for check in remote.check_metrics({k.replace("__", " "): v for k, v in sums.items()})
    }


@pytest.mark.parametrize(("kept", "broken", "level"), [(95, 5, Level.OK), (94, 6, Level.WARN)])
def test_promises_that_are_broken(kept: int, broken: int, level: Level) -> None:
    assert (
        levels(penstock_promises_total__kept=kept, penstock_promises_total__broken=broken)["promises"]
        is level
    )


@pytest.mark.parametrize(("refused", "level"), [(5, Level.OK), (6, Level.WARN)])
def test_many_that_are_refused(refused: int, level: Level) -> None:
    found = levels(
        penstock_admissions_total__admitted=100 - refused, penstock_admissions_total__refused=refused
    )
    assert found["refused"] is level


def test_what_is_short_or_gone() -> None:
    assert levels(penstock_kv_usage_ratio=0.99, penstock_preemptions_total=3)["kv"] is Level.WARN
    assert levels(penstock_kv_usage_ratio=0.99)["kv"] is Level.OK
    assert levels(penstock_store_up=0)["store"] is Level.WARN
    assert levels(penstock_failed_steps_total=1)["steps"] is Level.WARN


@contextmanager
def serving(stream: list[bytes]) -> Iterator[str]:
    """Something like the server, whose stream comes in these pieces."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok", "data": [{"id": "m"}]}' if self.path != "/metrics" else b"")

        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for piece in stream:
                self.wfile.write(piece)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_stream_that_comes_all_at_once_was_held_back() -> None:
    text = b'data: {"choices": [{"text": "a"}]}\n\n'
    with serving([text * 3 + b"data: [DONE]\n\n"]) as url:
        check = remote.check_stream(url)
    assert check.level is Level.WARN
    assert "buffers" in check.advice


def test_a_stream_that_ends_in_silence() -> None:
    with serving([b'data: {"choices": [{"text": "a"}]}\n\n']) as url:
        check = remote.check_stream(url)
    assert check.level is Level.FAIL
    assert "[DONE]" in check.text

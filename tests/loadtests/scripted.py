"""A server that says what a test tells it to say, and keeps what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
REFUSED = b"HTTP/1.1 503 Service Unavailable\r\n\r\n"


def frame(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def whole(**fields: Any) -> bytes:
    """A reply that is not streamed."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + json.dumps(fields).encode()


def chat(*words: str, prompt: int = 10, output: int = 8, cached: int = 0) -> bytes:
    """A whole stream of chat or text completions."""
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    frames = [frame(choices=[{"delta": {"content": word}}]) for word in words]
    return HEAD + b"".join(frames) + frame(choices=[], usage=usage) + b"data: [DONE]\n\n"


def event(number: int, kind: str, **fields: Any) -> bytes:
    return frame(type=f"response.{kind}", sequence_number=number, **fields)


def response(name: str, output: int = 3) -> bytes:
    """A whole stream of events of a response."""
    usage = {"input_tokens": 5, "output_tokens": output}
    return (
        HEAD
        + event(0, "in_progress", response={"id": name})
        + event(1, "output_text.delta", delta="One")
        + event(2, "completed", response={"id": name, "usage": usage})
        + b"data: [DONE]\n\n"
    )


class ScriptedServer:
    """Gives one reply after the other, and the last again and again."""

    def __init__(self, *replies: bytes) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        """Methods, paths and bodies."""
        self.keys: list[str | None] = []
        self._replies = replies
        self._news = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(), bind_and_activate=False)
        self._server.request_queue_size = 128
        self._server.server_bind()
        self._server.server_activate()
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def wait_asked(self, number: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.asked) >= number, timeout=30)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _note(self, method: str, path: str, body: bytes, key: str | None) -> bytes:
        with self._news:
            self.asked.append((method, path, json.loads(body) if body else None))
            self.keys.append(key)
            self._news.notify_all()
            return self._replies[min(len(self.asked), len(self._replies)) - 1]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        note = self._note

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                reply = note(self.command, self.path, body, self.headers.get("authorization"))
                with contextlib.suppress(OSError):
                    self.wfile.write(reply)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None: ...

        return Handler

"""People who chat and scripts that complete, as locust users that read SSE the way it comes.

locust's own clients time the response's headers and read in blocks of a kilobyte; a user here has a socket of its own
and notes when the first and the last frame with text came. It reports `ttft`, `tpot` and `e2e` for each kind of
request. Whatever is not a whole stream is a failure, a refusal (429, 503) too: this load is one that fits.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import urlsplit

from locust import User, between, task

MODEL = os.environ.get("LOADTEST_MODEL", "penstock-demo")

_TIMEOUT_S = 60.0
_TOPICS = ("the sea", "a lighthouse", "bread", "a winter walk", "the moon", "an old clock", "bees", "a river")


class StreamFailed(Exception):
    """The stream did not end as it should have."""


@dataclass(slots=True)
class StreamTimes:
    """When the frames of one answer came, on the clock of `perf_counter`."""

    started_s: float
    frames_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.frames_s[0] - self.started_s) * 1000

    @property
    def e2e_ms(self) -> float:
        return (self.frames_s[-1] - self.started_s) * 1000

    @property
    def tpot_ms(self) -> float:
        """Per token after the first."""
        return (self.e2e_ms - self.ttft_ms) / max(1, self.num_tokens - 1)


def read_events(read: Iterator[bytes]) -> Iterator[str]:
    """The payloads of `data:` events in a stream of bytes."""
    rest = b""
    for data in read:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines).decode()


class SSEUser(User):
    """A user that streams."""

    abstract = True

    def stream(self, name: str, path: str, body: dict[str, object]) -> None:
        """Sends one request, reads its stream to the end and reports how it went."""
        times = StreamTimes(time.perf_counter())
        try:
            self._exchange(path, body | {"model": MODEL, "stream": True}, times)
        except (OSError, ValueError, StreamFailed) as error:
            self._fire(f"{name} e2e", 0.0, 0, error)
            return
        self._fire(f"{name} ttft", times.ttft_ms, 0, None)
        self._fire(f"{name} tpot", times.tpot_ms, 0, None)
        self._fire(f"{name} e2e", times.e2e_ms, times.num_tokens, None)

    def _exchange(self, path: str, body: dict[str, object], times: StreamTimes) -> None:
        address = urlsplit(self.host)
        payload = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
        )
        with socket.create_connection((address.hostname, address.port), _TIMEOUT_S) as connection:
            connection.sendall(head.encode() + payload)
            _read_stream(connection, times)

    def _fire(self, name: str, milliseconds: float, length: int, error: Exception | None) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name=name,
            response_time=milliseconds,
            response_length=length,
            exception=error,
            context={},
        )


def _read_stream(connection: socket.socket, times: StreamTimes) -> None:
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        while file.readline() not in (b"\r\n", b""):
            pass
        if status != 200:
            raise StreamFailed(f"status {status}: {file.read(500).decode(errors='replace')}")
        last = ""
        for last in read_events(_chunks(file)):
            if last != "[DONE]":
                _note(json.loads(last), times)
    if last != "[DONE]" or not times.frames_s:
        raise StreamFailed(
            f"the stream ended after {len(times.frames_s)} frames, without [DONE] or without text"
        )


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """The pieces of a chunked body, each as soon as it is complete."""
    while size := int(file.readline().split(b";")[0] or b"0", 16):
        yield file.read(size)
        file.readline()


def _note(frame: dict[str, object], times: StreamTimes) -> None:
    if error := frame.get("error"):
        raise StreamFailed(json.dumps(error))
    choices, usage = frame.get("choices"), frame.get("usage")
    if isinstance(usage, dict):
        times.num_tokens = usage["completion_tokens"]
    if isinstance(choices, list) and choices:
        choice = choices[0]
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            times.frames_s.append(time.perf_counter())


class Chatter(SSEUser):
    """Somebody who talks: short questions, the conversation goes on, pauses to read."""

    weight = 3
    wait_time = between(0.2, 1.5)

    def on_start(self) -> None:
        self.messages: list[dict[str, str]] = []

    @task
    def ask(self) -> None:
        self.messages = self.messages[-2:]
        self.messages.append({"role": "user", "content": f"Tell me about {random.choice(_TOPICS)}."})
        body: dict[str, object] = {
            "messages": self.messages,
            "max_tokens": random.randint(16, 64),
            "service_tier": "priority",
        }
        self.stream("chat", "/v1/chat/completions", body)
        self.messages.append({"role": "assistant", "content": "I see."})


class Script(SSEUser):
    """A program without haste: longer completions, one after another, all with the same beginning."""

    weight = 1
    wait_time = between(0.0, 0.3)

    @task
    def complete(self) -> None:
        prompt = "Once upon a time there was a small house. " * 4 + random.choice(_TOPICS)
        body: dict[str, object] = {"prompt": prompt, "max_tokens": 64, "service_tier": "flex"}
        self.stream("complete", "/v1/completions", body)

"""Recordings without a server, and a connection whose willingness to take more is the test's choice."""

from __future__ import annotations

from typing import Any, cast

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.gateway.http.connections import Connection, Timeouts
from penstock.gateway.sessions.recordings.kinds import details_of, writers_of
from penstock.gateway.sessions.recordings.recording import Reader, Recording
from penstock.gateway.wire.reading import PLAIN, Reading
from penstock.gateway.wire.writing import Head
from tests.gateway.harness import make_timings, make_tokenizer

TOKENIZER = make_tokenizer()


def make_request(request_id: str = "chatcmpl-1", **fields: Any) -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=100), **fields
    )


def make_recording(
    request: Request | None = None, *, include_usage: bool = False, reading: Reading = PLAIN
) -> Recording:
    head = Head(id="chatcmpl-1", created=7, model="fake")
    known = details_of(head, reading, stream=True, include_usage=include_usage)
    request = request or make_request()
    return Recording(
        request,
        kind="chat",
        details=known,
        created=7,
        writer=writers_of(TOKENIZER)["chat"](request, 7, known),
        detachable=True,
        journalled=True,
        max_detached_s=60.0,
    )


def bring(recording: Recording, text: str) -> None:
    recording.push(Output(request_id=recording.id, index=0, token_ids=[9], text=text))


def end(recording: Recording) -> None:
    timings = make_timings(recording.request)
    last = Output(request_id=recording.id, index=0, finish_reason=FinishReason.STOP, timings=timings)
    recording.push(last)
    recording.close()
    recording.settle()


class FakeConnection:
    """Takes frames at once while it `waits` and is `writable`."""

    def __init__(self) -> None:
        self.committed = True
        self.gone = False
        self.overdue = False
        self.waits = True
        self.writable = True
        self.sent: list[bytes] = []

    @property
    def is_ready(self) -> bool:
        return self.waits and self.writable

    def send_now(self, body: bytes) -> None:
        self.sent.append(body)

    def wake(self) -> None:
        self.waits = False

    def look_after(self, now: float, timeouts: Timeouts) -> None:
        """It is patient."""


class FakeReader:
    """A reader, and all that it was sent."""

    def __init__(self, recording: Recording, position: int = -1) -> None:
        self.connection = FakeConnection()
        self.reader = Reader(recording, position)
        self.reader.connection = cast(Connection, self.connection)
        recording.attach(self.reader)

    def take(self) -> None:
        """The connection's own task gets its turn."""
        self.connection.sent.append(self.reader.take())
        self.connection.waits = True

    @property
    def frames(self) -> list[bytes]:
        """One a frame, however they were sent."""
        return [frame + b"\n\n" for frame in b"".join(self.connection.sent).split(b"\n\n") if frame]

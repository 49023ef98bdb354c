"""A server that says what a test tells it to say, when the test tells it to: a double for time and faults."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.gateway.http.page import Page as PageFiles

STATIC = Path(__file__).parents[2] / "static"
PAGE = PageFiles(STATIC)
PATIENCE_S = 20
"""How long a test waits for what should come: many times what a quiet machine takes."""
TIMINGS: dict[str, Any] = {
    "queue_ms": 3.2,
    "ttft_ms": 85.0,
    "tpot_ms": 20.0,
    "cached_tokens": 16,
    "prompt_tokens": 40,
    "predicted_ttft_ms": 90.0,
    "preemptions": 0,
    "draft_tokens": 0,
    "drafts": {},
    "accepted_tokens": 0,
    "experts_per_layer": None,
    "timeline": {
        "prefills": [[85.0, 24]],
        "preempted_ms": [],
        "resumed_ms": [],
        "drafts": [],
        "ended_ms": 120.0,
    },
    "lane": "interactive",
}


DEFAULTS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}


class Gate:
    """Holds a stream until the test opens it, or the page has the answer discarded."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def wait(self, answer: Answer) -> None:
        while not (self._open.is_set() or answer.discarded):
            await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Refusal:
    """An answer before the stream: an error status."""

    status: int
    message: str = "No."
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """The connection ends here, after these bytes; the answer goes on for whoever follows it."""

    last: bytes = b""


CUT = Cut()


@dataclass(frozen=True)
class Thought:
    """Reasoning of the model, told apart by the server."""

    text: str


@dataclass(frozen=True)
class Pause:
    """For pictures: what comes as if a model made it."""

    seconds: float


Piece = str | bytes | Gate | Cut | Thought | Pause


@dataclass(frozen=True)
class Stream:
    """Pieces of text, gates and raw bytes, in order; then the end that OpenAI's format asks for, or none."""

    pieces: tuple[Piece, ...]
    opens: bool = True
    """It begins with an event without text, at once."""
    ends: bool = True
    finish: str = "stop"
    timings: dict[str, Any] | None = None


def stream(
    *pieces: Piece,
    opens: bool = True,
    ends: bool = True,
    finish: str = "stop",
    timings: dict[str, Any] | None = None,
) -> Stream:
    return Stream(pieces, opens, ends, finish, timings)


def frame(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


def error_frame(message: str, code: str | None = None) -> bytes:
    """Makes the error of either format: a stream of chat completions has an object, one of responses an event."""
    error = {"message": message, "type": "error", "param": None, "code": code}
    return frame({"error": error, **error})


DONE = b"data: [DONE]\n\n"


@dataclass
class Answer:
    """A stream that was begun, with numbered events; every connection can follow it from any of them."""

    id: str
    stream: Stream
    said: list[dict[str, str]]
    """Before it."""
    cuts: set[int] = field(default_factory=set)
    """Places of the cuts that were made: each is made once."""
    discarded: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        text = "".join(piece for piece in self.stream.pieces if isinstance(piece, str))
        return [*self.said, {"role": "assistant", "content": text}]

    async def frames(self, after: int) -> AsyncIterator[bytes]:
        number = -1
        for place, piece in enumerate(self._all()):
            if isinstance(piece, Gate):
                await piece.wait(self)
                if self.discarded:
                    yield error_frame("It was cancelled.", "cancelled")
                    return
            elif isinstance(piece, Pause):
                await asyncio.sleep(piece.seconds)
            elif isinstance(piece, Cut):
                if place not in self.cuts:
                    self.cuts.add(place)
                    yield piece.last
                    return
            elif isinstance(piece, bytes):
                yield piece
            else:
                number += 1
                if number > after:
                    yield self._numbered(number, piece)

    def _numbered(self, number: int, content: dict[str, Any]) -> bytes:
        return frame(content | {"sequence_number": number})

    def _all(self) -> Iterator[dict[str, Any] | bytes | Gate | Cut | Pause]:
        """As a response's events."""
        has_begun = self.stream.opens
        if has_begun:
            yield self._event("created", status="in_progress")
        for piece in self.stream.pieces:
            if isinstance(piece, str):
                if not has_begun:
                    yield self._event("created", status="in_progress")
                has_begun = True
                yield {"type": "response.output_text.delta", "delta": piece}
            elif isinstance(piece, Thought):
                yield {"type": "response.reasoning_text.delta", "delta": piece.text}
            else:
                yield piece
        if self.stream.ends:
            is_whole = self.stream.finish == "stop"
            yield self._event(
                "completed" if is_whole else "incomplete",
                status="completed" if is_whole else "incomplete",
                incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
                timings=self.stream.timings or TIMINGS,
                usage={"input_tokens": 40, "output_tokens": self._num_tokens},
            )

    def _event(self, kind: str, **response: object) -> dict[str, Any]:
        return {"type": f"response.{kind}", "response": {"id": self.id, "error": None, **response}}

    @property
    def _num_tokens(self) -> int:
        return sum(isinstance(piece, str) for piece in self.stream.pieces)


class ChatAnswer(Answer):
    """The stream as the chunks of a chat completion."""

    def _numbered(self, number: int, content: dict[str, Any]) -> bytes:
        return b"id: %d\n%b" % (number, frame({"id": self.id, **content}))

    def _all(self) -> Iterator[dict[str, Any] | bytes | Gate | Cut | Pause]:
        if self.stream.opens:
            yield self._chunk({"role": "assistant", "content": ""})
        for piece in self.stream.pieces:
            if isinstance(piece, str):
                yield self._chunk({"content": piece})
            elif isinstance(piece, Thought):
                yield self._chunk({"reasoning_content": piece.text})
            else:
                yield piece
        if self.stream.ends:
            yield self._chunk({}, self.stream.finish, timings=self.stream.timings or TIMINGS)
            yield {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": self._num_tokens}}
            yield DONE

    def _chunk(
        self, delta: dict[str, str], finish_reason: str | None = None, **extra: object
    ) -> dict[str, Any]:
        return {
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
            "usage": None,
            **extra,
        }


class ScriptedServer:
    """Serves the page as the real server does; answers each request with the next reply in the script.

    What is lost of an answer can be followed, unless `refusals` says otherwise.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        app = Starlette(
            routes=[
                Route("/", PAGE.index),
                Route("/static/{path:path}", PAGE.file),
                Route("/v1/events", self._events),
                Route("/v1/models", self._models),
                *(
                    Route(f"/v1/{path}{rest}", act, methods=[method])
                    for path in ("responses", "chat/completions")
                    for rest, method, act in (
                        ("", "POST", self._answer),
                        ("/{id}", "GET", self._follow),
                        ("/{id}", "DELETE", self._discard),
                    )
                ),
            ]
        )
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._arrival = threading.Condition()
        self.reset()

    def start(self) -> None:
        self._socket.listen()
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def reset(self) -> None:
        self.model = "penstock-demo"
        self.state = "ready"
        self.key: str | None = None
        self.offers: dict[str, Any] = {"lanes": ["interactive", "standard", "batch"], "reasoning": None}
        self.told: list[tuple[str, Any]] = []
        """Events that whoever asks for a detail is told, or for a request's place, once each beside the state."""
        self.watchers: set[Request] = set()
        """Connections that ask for a detail or a place."""
        self.replies: deque[Refusal | Stream] = deque()
        self._requests: list[dict[str, Any]] = []
        self.refusals: deque[Refusal] = deque()
        """The answers to the next attempts to follow a stream."""
        self.followed: list[int] = []
        """After which events."""
        self.discarded: SimpleQueue[str] = SimpleQueue()
        self._answers: dict[str, Answer] = {}
        self._names: dict[str, Answer] = {}

    def script(self, *replies: Refusal | Stream) -> None:
        self.replies.extend(replies)

    def requests(self, count: int) -> list[dict[str, Any]]:
        """The bodies of all requests for answers, once so many have arrived; more of them fail the test.

        A page shows a question before its request is here. In a body, `messages` is all that was said, for a turn of
        a session, too.
        """
        with self._arrival:
            self._arrival.wait_for(lambda: len(self._requests) >= count, PATIENCE_S)
        assert len(self._requests) == count, self._requests
        return self._requests

    def next_discarded(self) -> str:
        """The id of the answer that was discarded next, once it was."""
        return self.discarded.get(timeout=PATIENCE_S)

    def _refused_key(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return _refuse(Refusal(401, "Incorrect API key.", "invalid_api_key"))

    async def _events(self, request: Request) -> Response:
        is_watcher, watchers = bool(request.query_params), self.watchers

        async def tell() -> AsyncIterator[bytes]:
            if is_watcher:
                watchers.add(request)
            num_told, state_told = 0, None
            try:
                while True:
                    if not is_watcher and state_told != self.state:
                        state_told = self.state
                        yield frame({"state": state_told})
                    for kind, data in self.told[num_told:] if is_watcher else ():
                        yield f"event: {kind}\n".encode() + frame(data)
                        num_told += 1
                    await asyncio.sleep(0.05)
            finally:
                watchers.discard(request)

        return StreamingResponse(tell(), media_type="text/event-stream")

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self.model,
            "object": "model",
            "max_model_len": 512,
            "defaults": DEFAULTS,
            **self.offers,
        }
        models = {"object": "list", "data": [model]}
        return self._refused_key(request) or JSONResponse(models)

    async def _answer(self, request: Request) -> Response:
        if refused := self._refused_key(request):
            return refused
        body, is_chat = await request.json(), request.url.path.endswith("/completions")
        if not is_chat:
            previous = self._answers.get(body.get("previous_response_id"))
            if previous is None and "previous_response_id" in body:
                return _refuse(Refusal(404, "Not found.", "previous_response_not_found"))
            body["messages"] = [*(previous.messages if previous else ()), *body["input"]]
        with self._arrival:
            self._requests.append(body)
            self._arrival.notify_all()
        name = request.headers["idempotency-key"]
        if name not in self._names:
            reply = self.replies.popleft()
            if isinstance(reply, Refusal):
                return _refuse(reply)
            kind, prefix = (ChatAnswer, "chatcmpl-") if is_chat else (Answer, "resp_")
            self._names[name] = answer = kind(f"{prefix}{len(self._names)}", reply, body["messages"])
            self._answers[answer.id] = answer
        return _streamed(self._names[name], -1)

    def forget(self) -> None:
        """As a server that was emptied."""
        self._answers.clear()

    async def _follow(self, request: Request) -> Response:
        after = int(request.query_params["starting_after"])
        self.followed.append(after)
        with suppress(IndexError):  # a test may clear them meanwhile
            return _refuse(self.refusals.popleft())
        answer = self._answers.get(request.path_params["id"])
        return _streamed(answer, after) if answer else _refuse(Refusal(404, "There is no such reply."))

    async def _discard(self, request: Request) -> Response:
        if answer := self._answers.pop(request.path_params["id"], None):
            answer.discarded = True
        self.discarded.put(request.path_params["id"])
        return JSONResponse({"deleted": True})


def _streamed(answer: Answer, after: int) -> Response:
    return StreamingResponse(answer.frames(after), media_type="text/event-stream")


def _refuse(refusal: Refusal) -> JSONResponse:
    error = {"message": refusal.message, "type": "error", "param": None, "code": refusal.code}
    return JSONResponse({"error": error}, refusal.status, refusal.headers)

"""Clients that do more than wait: they poll, leave, dawdle, and lose their connection and come back.

Plain sockets and plain waiting: users of locust run this in greenlets, the soak test in threads.
"""

from __future__ import annotations

import random
import time

from loadtests.exchange import Server
from penstock.app.reader import TimedAnswer, TimedBytes, read_answer, read_json

Body = dict[str, object]

_TOPICS = ("the sea", "a lighthouse", "bread", "a winter walk", "the moon", "an old clock", "bees", "a river")
_INTRODUCTION = "Once upon a time there was a small house at the edge of a great forest. " * 4
_POLL_S = 0.2
_PIECE_BYTES, _PIECE_S = 512, 0.02
"""A slow reader takes so much at a time, and then looks away for so long."""


def question() -> str:
    return f"Tell me about {random.choice(_TOPICS)}."


def long_prompt() -> str:
    """A beginning that all have in common, and an end."""
    return _INTRODUCTION + random.choice(_TOPICS)


def complete(server: Server, body: Body) -> TimedAnswer:
    return server.answer("POST", "/v1/completions", body | _USAGE)


def respond(server: Server, body: Body) -> TimedAnswer:
    return server.answer("POST", "/v1/responses", body)


def poll(server: Server, body: Body) -> TimedAnswer:
    """A background response, looked for now and then; it has no first token that anybody sees."""
    recording = server.exchange("POST", "/v1/responses", body | {"background": True, "stream": False})
    while (found := read_json(recording)) and found["status"] in ("queued", "in_progress"):
        time.sleep(_POLL_S)
        recording = server.exchange("GET", f"/v1/responses/{found['id']}")
    return read_answer(recording)


def leave(server: Server, body: Body, after_s: float) -> TimedAnswer:
    """Goes away, before the first token or in the middle."""

    def stays(recording: TimedBytes) -> bool:
        return time.perf_counter() - recording.started_s < after_s

    return read_answer(server.exchange("POST", "/v1/chat/completions", body | _USAGE, patience=stays))


def dawdle(server: Server, body: Body) -> TimedAnswer:
    """Reads a little at a time."""

    def looks_away(_: TimedBytes) -> bool:
        time.sleep(_PIECE_S)
        return True

    return read_answer(
        server.exchange(
            "POST", "/v1/chat/completions", body | _USAGE, patience=looks_away, piece_bytes=_PIECE_BYTES
        )
    )


def resume(server: Server, body: Body, after_bytes: int, patience_s: float = 0.0) -> TimedAnswer:
    """Loses the connection after so many bytes, but not before it has the id, and goes on after the last event.

    Args:
        patience_s: how long to try again while the server is away, or cannot tell yet.
    """
    resumable = body | {"stream_options": {"resumable": True}}

    def reads_on(recording: TimedBytes) -> bool:
        return len(recording.data) < after_bytes or b"response.in_progress" not in recording.data

    first = read_answer(server.exchange("POST", "/v1/responses", resumable, patience=reads_on))
    answer, give_up_s = first, time.perf_counter() + patience_s
    while first.id and answer.error and not answer.num_output_tokens:
        path = f"/v1/responses/{first.id}?stream=true&starting_after={first.last_event}"
        answer = server.answer("GET", path, after_event=first.last_event)
        first.token_times_s += answer.token_times_s
        first.last_event = max(first.last_event, answer.last_event)
        if answer.error and time.perf_counter() > give_up_s:
            break
        if answer.error:
            time.sleep(_POLL_S)
    answer.started_s, answer.token_times_s = first.started_s, first.token_times_s
    return answer


_USAGE: Body = {"stream_options": {"include_usage": True}}

"""The APIs whose replies are recorded, and their writers, which are made of what a journal has of the request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from penstock.engine.planning.request import Request
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.wire.anthropic.messages import MessageWriter
from penstock.gateway.wire.completions import ChatWriter, CompletionWriter, Extras, TextWriter
from penstock.gateway.wire.logprobs import TokenText
from penstock.gateway.wire.ollama.lines import LineWriter
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.writing import Head, Writer

CHAT, TEXT, MESSAGE, LINES = "chat", "completion", "message", "ollama"
"""The kinds of recordings; responses have theirs in `gateway.sessions.responses`."""
PREFIXES = {CHAT: "chatcmpl-", TEXT: "cmpl-", MESSAGE: "msg_", LINES: "reply_"}
"""The beginning of the ids of each kind; 32 hexadecimal digits follow."""
IDS = {kind: re.compile(prefix + r"[0-9a-f]{32}") for kind, prefix in PREFIXES.items()}

WriterMaker = Callable[[Request, int, dict[str, Any]], Writer[Recording]]
"""A WriterMaker makes the writer of a reply of its request, when it was created, and its details."""


def details_of(head: Head, reading: Reading, *, stream: bool, **more: Any) -> dict[str, Any]:
    """Returns the request's details for a recording, as JSON; `more` is what its own writer is made of."""
    return {
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
        "stream": stream,
        "reading": asdict(reading),
        **more,
    }


def writers_of(tokens: TokenText) -> dict[str, WriterMaker]:
    """Returns the makers of writers by kind; `tokens` spells log probabilities."""
    return {
        CHAT: partial(_completion_writer, ChatWriter, tokens),
        TEXT: partial(_completion_writer, TextWriter, tokens),
        MESSAGE: _message_writer,
        LINES: partial(_line_writer, tokens),
    }


def _head(request: Request, created: int, details: dict[str, Any]) -> Head:
    return Head(
        id=request.request_id,
        created=created,
        model=details["model"],
        system_fingerprint=details.get("system_fingerprint"),
    )


def _completion_writer(
    kind: type[CompletionWriter], tokens: TokenText, request: Request, created: int, details: dict[str, Any]
) -> Writer[Recording]:
    return kind(
        tokens,
        _head(request, created, details),
        Extras(num_top=request.sampling.num_logprobs or 0),
        reading=Reading(**details["reading"]),
        include_usage=details["include_usage"],
        is_recorded=True,
    )


def _message_writer(request: Request, created: int, details: dict[str, Any]) -> Writer[Recording]:
    head, reading = _head(request, created, details), Reading(**details["reading"])
    return MessageWriter(head, details["max_tokens"], reading, is_recorded=True)


def _line_writer(
    tokens: TokenText, request: Request, created: int, details: dict[str, Any]
) -> Writer[Recording]:
    num_top = request.sampling.num_logprobs
    return LineWriter(
        _head(request, created, details),
        is_chat=details["is_chat"],
        tells_context=details["tells_context"],
        reading=Reading(**details["reading"]),
        tokens=None if num_top is None else tokens,
        num_top=num_top or 0,
        is_recorded=True,
    )

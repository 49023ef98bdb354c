"""What is written down of a recording, so that another process can go on with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.planning.request import FinishReason, Request
from gateway.http.errors import ApiError
from gateway.sessions.recordings.recording import Recording, Script
from gateway.store.interface import Journal


class CorruptJournal(ValueError):
    """It was not written by this version of the server, or not by it at all."""


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: str
    about: dict[str, Any]
    created: int
    detachable: bool
    max_detached_s: float | None
    attempts: int
    """How many processes have worked on it."""
    request: Request


class _End(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: FinishReason
    error: dict[str, Any] | None
    timings: dict[str, Any] | None
    num_cached_tokens: int


def header_of(recording: Recording) -> bytes:
    header = _Header(
        kind=recording.kind,
        about=recording.about,
        created=recording.created,
        detachable=recording.detachable,
        max_detached_s=recording.max_detached_s,
        attempts=recording.attempts,
        request=replace(recording.request, output_token_ids=()),
    )
    return header.model_dump_json().encode()


def end_of(recording: Recording) -> bytes:
    error = recording.error
    end = _End(
        reason=recording.reason,
        error=None if error is None else json.loads(error.body())["error"] | {"status": error.status},
        timings=recording.timings_json,
        num_cached_tokens=recording.num_cached_tokens,
    )
    return end.model_dump_json().encode()


ScriptMaker = Callable[[str, dict[str, Any]], Script]
"""Makes the script of the reply with that id, of what its format has to know."""


def rebuild(journal: Journal, now: float, scripts: Mapping[str, ScriptMaker]) -> Recording:
    """The recording as far as it was written down; its texts are not there yet.

    Args:
        scripts: by kind.

    Raises:
        CorruptJournal: if it cannot be read.
    """
    try:
        header = _Header.model_validate_json(journal.header)
        end = _End.model_validate_json(journal.end) if journal.end is not None else None
    except ValidationError as error:
        raise CorruptJournal(f"{error.error_count()} fields are wrong") from None
    if header.request.request_id != journal.stream_id:
        raise CorruptJournal("it is another stream's")
    if header.kind not in scripts:
        raise CorruptJournal(f"nobody knows the kind {header.kind!r}")
    recording = Recording(
        replace(header.request, arrival_s=now, output_token_ids=journal.token_ids),
        kind=header.kind,
        about=header.about,
        created=header.created,
        script=scripts[header.kind](header.request.request_id, header.about),
        detachable=header.detachable,
        journalled=True,
        max_detached_s=header.max_detached_s,
    )
    recording.attempts = header.attempts + 1
    if end is not None:
        recording.timings_json = end.timings
        recording.num_cached_tokens = end.num_cached_tokens
        recording.cancelled = end.reason is FinishReason.CANCELLED
        if end.error is not None:
            recording.error = _error(end.error)
    return recording


def _error(fields: dict[str, Any]) -> ApiError:
    return ApiError(
        int(fields.get("status", 500)),
        str(fields.get("message")),
        type=str(fields.get("type")),
        param=fields.get("param"),
        code=fields.get("code"),
    )

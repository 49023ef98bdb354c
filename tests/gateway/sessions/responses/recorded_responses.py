"""Recordings of responses as the server makes them, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses.objects import details_of, input_items
from penstock.gateway.sessions.responses.records import KIND
from penstock.gateway.sessions.responses.schemas import ResponseBody, check_response
from penstock.gateway.sessions.responses.writer import make_writer
from penstock.gateway.wire.frames import timings_of
from penstock.gateway.wire.reading import PLAIN, Reading
from penstock.gateway.wire.strict import read
from penstock.priority.lanes import Lane
from tests.gateway.harness import MODEL, make_timings, make_tokenizer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def body_of(body_input: Any = "Hi", **fields: Any) -> ResponseBody:
    """A checked body."""
    body = read(ResponseBody, {"model": MODEL, "input": body_input, **fields}, Limits())
    check_response(body, Limits())
    return body


SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, grammar=Grammar(GrammarKind.REGEX, "é.*"))


def recording_of(
    body_input: Any = "Hi",
    *,
    reading: Reading = PLAIN,
    sampling: SamplingParams = SAMPLING,
    id: str = "resp_1a2b",
    prompt: Sequence[int] = (3, 4, 5, 6),
    **fields: Any,
) -> Recording:
    """A response that was just asked for. Call it on an event loop, or see that nothing ends it."""
    body = body_of(body_input, **fields)
    request = Request(
        request_id=id,
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        arrival_s=10.0,
        lane=Lane.STANDARD,
        tenant="default",
    )
    known = details_of(body, input_items(body.input), [], reading)
    return Recording(
        request,
        kind=KIND,
        details=known,
        created=1_700_000_000,
        writer=make_writer(make_tokenizer(), request, 1_700_000_000, known),
        detachable=bool(body.background),
        journalled=bool(body.background),
    )


def say(recording: Recording, *texts: str, token_id: int = 7) -> None:
    """One token for each text."""
    for text in texts:
        recording.push(_output(recording, text, token_id))


def finish(
    recording: Recording, reason: FinishReason = FinishReason.STOP, text: str = "", token_id: int = 7
) -> None:
    timings = make_timings(recording.request)
    recording.push(_output(recording, text, token_id, finish_reason=reason, timings=timings))
    recording.timings_json = timings_of(recording)
    recording.close()


def fail(recording: Recording, code: str = "internal_error", **fields: Any) -> ApiError:
    error = ApiError(500, "It broke.", type="server_error", code=code, **fields)
    recording.fail(error)
    if not recording.is_interrupted:
        recording.close()
    return error


def cancel(recording: Recording) -> ApiError:
    recording.cancelled = True
    return fail(recording, "cancelled")


def _output(recording: Recording, text: str, token_id: int, **fields: Any) -> Output:
    return Output(request_id=recording.id, index=0, text=text, token_ids=[token_id], **fields)


def frames_of(recording: Recording) -> list[bytes]:
    """All events of a response, as a client is sent them."""
    if not recording.settled:
        recording.settle()
    return recording.frames_from(0)


def data_of(frame: bytes) -> Any:
    """The data of one frame that is spelt as it should be."""
    event, data, *rest = frame.decode("ascii").split("\n")
    assert rest == ["", ""]
    found = json.loads(data.removeprefix("data: "))
    assert event == f"event: {found['type']}"
    return found


def strict(value: Any) -> Any:
    """Reads the value as openai's own type, and checks that nothing but our timings is unknown to it."""
    found = Response.model_validate_json(json.dumps(value), strict=True)
    assert set(found.model_extra or {}) <= {"store", "timings"}
    return found

"""An operation, a method of a path, says what it takes and answers with, and how a switch passes it on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from enum import Flag, auto
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from penstock.gateway.access.idempotency import MAX_KEY_CHARS
from penstock.gateway.endpoints.events import DETAILS
from penstock.gateway.wire.strict import StrictBody

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"


class IdempotencyHeaders(TypedDict, total=False):
    idempotency_key: Annotated[
        str, Field(alias="Idempotency-Key", min_length=1, max_length=MAX_KEY_CHARS, pattern="^[ -~]+$")
    ]


class FollowQuery(TypedDict, total=False):
    starting_after: Annotated[int, Field(ge=-1, lt=10**9)]


class FollowHeaders(TypedDict, total=False):
    last_event_id: Annotated[int, Field(alias="Last-Event-ID", ge=-1, lt=10**9)]


class EventsQuery(TypedDict, total=False):
    request_id: str
    detail: Annotated[str, Field(pattern=f"^({'|'.join(DETAILS)})(,({'|'.join(DETAILS)}))*$")]


class StateQuery(TypedDict):
    switch: Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]


class LocateQuery(TypedDict, total=False):
    """A prompt in one of two forms."""

    tokens: Annotated[str, Field(pattern="^[0-9]+(,[0-9]+)*$")]
    messages: Annotated[str, Field(json_schema_extra={"contentMediaType": "application/json"})]


class Passing(Flag):
    """The ways in which a switch passes requests of an operation on: ANY, or those of the others that hold."""

    ANY = 0
    """Any replica answers as well as any other."""
    OWN = auto()
    """The answer tells of one process: a switch gives its own, or none."""
    BY_PROMPT = auto()
    """They go to the replica whose first token is forecast soonest, by the prompt in the body."""
    BY_ID = auto()
    """They go to the replica that has what the first parameter of the path names."""
    RECORDED = auto()
    """Another replica can go on with a stream whose replica dies, if the client asked for one that is recorded."""
    ONCE = auto()
    """They make something that stays: none is sent to another replica once the first one may have carried it out."""


ALWAYS = (400, 408, 413, 421, 431, 500, 501)
"""Any request may be answered with these: it is no HTTP, too slow, too large, or for another host."""
_PASSED = {Passing.BY_PROMPT: (403, 404, 429, 503), Passing.BY_ID: (404, 503)}


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of one path takes and answers with, and which replica gets it."""

    passing: Passing
    summary: str
    body: type[StrictBody] | None = None
    _: KW_ONLY
    query: Any = None
    headers: Any = None
    answers: tuple[str, ...] = (JSON,)
    """The media types that a 200 may have."""
    statuses: tuple[int, ...] = ()
    """The refusals that do not follow from `passing` and the types."""
    is_form: bool = False
    """The body is a form, and no JSON."""
    is_open: bool = False
    """It asks for no key."""
    is_probe: bool = False
    """A supervisor asks it: a 503 has the JSON of a 200."""
    is_cached: bool = False
    """A client that has the answer already is told so."""

    @property
    def refusals(self) -> set[int]:
        """The statuses that are answered with an error object."""
        passed = (status for one in self.passing for status in _PASSED.get(one, ()))
        typed = [(self.body, 415), (self.headers is IdempotencyHeaders, 409), (not self.is_open, 401)]
        return {*ALWAYS, *self.statuses, *passed, *(status for holds, status in typed if holds)}

    @property
    def types(self) -> Iterator[Any]:
        """The types that requests are checked with."""
        yield from (kind for kind in (self.body, self.query, self.headers) if kind is not None)

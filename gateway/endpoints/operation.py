"""What is said of one operation, a method of a path: its types, and how a switch passes it on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import Flag, auto
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from gateway.access.idempotency import MAX_KEY_CHARS
from gateway.endpoints import answers
from gateway.endpoints.events import DETAILS
from gateway.wire.schemas import StrictBody

_ANY = (400, 408, 413, 421, 431, 500, 501)
"""Statuses that every request may get: what comes is no HTTP, too slow, too large, or for another host."""


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
    """One of them."""

    tokens: Annotated[str, Field(pattern="^[0-9]+(,[0-9]+)*$")]
    messages: Annotated[str, Field(json_schema_extra={"contentMediaType": "application/json"})]


class Passing(Flag):
    """How a switch passes requests of one operation on: ANY, or what of the others holds."""

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


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of one path takes and answers, each as a type, and which replica gets it."""

    passing: Passing
    _: KW_ONLY
    summary: str
    body: type[StrictBody] | None = None
    is_form: bool = False
    """The body is a form, and no JSON."""
    query: Any = None
    headers: Any = None
    answer: Any = None
    """The JSON of a 200."""
    media_type: str | None = None
    """Of a 200 that is no JSON."""
    events: dict[str, Any] = field(default_factory=dict)
    """The JSON of each event of a stream, by its name. Those without a name end with a `[DONE]`."""
    lines: Any = None
    """The JSON of each line of a stream."""
    unavailable: Any = None
    """The JSON of a 503 that is no error."""
    statuses: tuple[int, ...] = ()
    """Of refusals, beside those that all have."""
    is_open: bool = False
    """It asks for no key."""
    cached: bool = False
    """A client that has it already is told so."""
    error: Any = answers.Error
    """The JSON of a refusal."""

    @property
    def refusals(self) -> set[int]:
        """Statuses that are answered with an error."""
        with_body = () if self.body is None else (415,)
        with_key = () if self.is_open else (401,)
        return {*_ANY, *self.statuses, *with_body, *with_key}

    @property
    def types(self) -> Iterator[Any]:
        one = (self.body, self.query, self.headers, self.answer, self.lines, self.unavailable, self.error)
        yield from (kind for kind in (*one, *self.events.values()) if kind is not None)

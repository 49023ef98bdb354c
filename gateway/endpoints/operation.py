"""An operation is a method of a path: its input and output, and how a switch routes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from enum import Flag, auto
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from penstock.gateway.access.idempotency import MAX_KEY_CHARS, RESUMABLE_HEADER
from penstock.gateway.endpoints.events import DETAILS
from penstock.gateway.wire.lanes import TPOT_HEADER, TTFT_HEADER
from penstock.gateway.wire.strict import StrictBody

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"


class IdempotencyHeaders(TypedDict, total=False):
    idempotency_key: Annotated[
        str, Field(alias="Idempotency-Key", min_length=1, max_length=MAX_KEY_CHARS, pattern="^[ -~]+$")
    ]
    resumable: Annotated[Literal["true", "false"], Field(alias=RESUMABLE_HEADER)]


class SloHeaders(TypedDict, total=False):
    ttft_ms: Annotated[float, Field(alias=TTFT_HEADER, gt=0, lt=10**9)]
    tpot_ms: Annotated[float, Field(alias=TPOT_HEADER, gt=0, lt=10**9)]


class FollowQuery(TypedDict, total=False):
    starting_after: Annotated[int, Field(ge=-1, lt=10**9)]


class FollowHeaders(TypedDict, total=False):
    last_event_id: Annotated[int, Field(alias="Last-Event-ID", ge=-1, lt=10**9)]


class EventsQuery(TypedDict, total=False):
    request_id: str
    detail: Annotated[str, Field(pattern=f"^({'|'.join(DETAILS)})(,({'|'.join(DETAILS)}))*$")]


class UsageQuery(TypedDict, total=False):
    tenant: str


class StateQuery(TypedDict):
    switch: Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]


class LocateQuery(TypedDict, total=False):
    """A prompt in one of two forms."""

    tokens: Annotated[str, Field(pattern="^[0-9]+(,[0-9]+)*$")]
    messages: Annotated[str, Field(json_schema_extra={"contentMediaType": "application/json"})]


class Passing(Flag):
    """How a switch routes the requests of an operation: ANY, or a combination of the other flags."""

    ANY = 0
    """Any replica answers as well as any other."""
    OWN = auto()
    """The answer describes one process: a switch gives its own, or none."""
    BY_PROMPT = auto()
    """Requests go to the replica with the earliest forecast first token for the prompt in the body."""
    BY_ID = auto()
    """Requests go to the replica that has the object named by the path's first parameter."""
    RECORDED = auto()
    """Another replica can continue a recorded stream if its replica dies."""
    ONCE = auto()
    """Requests create something permanent: none is sent to a second replica once the first may have executed it."""


ALWAYS = (400, 408, 413, 421, 431, 500, 501)
"""Statuses that any request may get: it is not HTTP, too slow, too large, or for another host."""
_PASSED = {Passing.BY_PROMPT: (403, 404, 429, 503), Passing.BY_ID: (404, 503)}


@dataclass(frozen=True, slots=True)
class Operation:
    """The input and output of one method of one path, and the replica that gets it."""

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
    json_types: tuple[str, ...] = ("object",)
    """The types that the JSON of a 200 may have."""
    is_lookup: bool = False
    """It shows, lists or follows what is kept, and counts as a request."""
    is_cached: bool = False
    """A client that already has the answer gets 304."""

    @property
    def refusals(self) -> set[int]:
        """The statuses that are answered with an error object."""
        passed = (status for one in self.passing for status in _PASSED.get(one, ()))
        typed = [
            (self.body, 415),
            (self.headers is IdempotencyHeaders, 409),
            (not self.is_open, 401),
            (self.is_lookup, 429),
        ]
        return {*ALWAYS, *self.statuses, *passed, *(status for holds, status in typed if holds)}

    @property
    def types(self) -> Iterator[Any]:
        """The types that requests are checked with."""
        slo = SloHeaders if Passing.BY_PROMPT in self.passing else None
        yield from (kind for kind in (self.body, self.query, self.headers, slo) if kind is not None)

"""An operation is a method of a path: its input and output, how a switch routes it, and the function that serves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Flag, auto
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import TypedDict

from penstock.gateway.access.idempotency import MAX_KEY_CHARS, RESUMABLE_HEADER
from penstock.gateway.http.entrance import forget_body
from penstock.gateway.wire.lanes import TPOT_HEADER, TTFT_HEADER
from penstock.gateway.wire.strict import StrictBody

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
STREAMED, LINED = (JSON, EVENTS), (JSON, LINES)


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


ANY, OWN, ONCE = Passing.ANY, Passing.OWN, Passing.ONCE
BY_PROMPT, BY_ID, RECORDED = Passing.BY_PROMPT, Passing.BY_ID, Passing.RECORDED
ALWAYS = (400, 408, 413, 421, 431, 500, 501)
"""Statuses that any request may get: it is not HTTP, too slow, too large, or for another host."""
_PASSED = {BY_PROMPT: (403, 404, 429, 503), BY_ID: (404, 503)}


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
        slo = SloHeaders if BY_PROMPT in self.passing else None
        yield from (kind for kind in (self.body, self.query, self.headers, slo) if kind is not None)


# The functions that serve them

Handler = Callable[[HttpRequest], Awaitable[Response]]
_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Response]])


def serves(
    places: str, passing: Passing, body: type[StrictBody] | None = None, **details: Any
) -> Callable[[_Method], _Method]:
    """Says which operation a method of some endpoints serves; the first line of its docstring is the summary.

    Args:
        places: the HTTP method and the path, and further paths.
    """

    def note(serve: _Method) -> _Method:
        verb, *paths = places.split()
        summary = (serve.__doc__ or "").partition("\n")[0].removesuffix(".")
        operation = Operation(passing, summary, body, **details)
        serve.__dict__.setdefault("served", []).extend((path, verb, operation) for path in paths)
        return serve

    return note


def answers(
    path: str, body: type[StrictBody], media_types: tuple[str, ...] = STREAMED
) -> Callable[[_Method], _Method]:
    """As `serves`, for replies that may be recorded."""
    passing = BY_PROMPT | RECORDED
    return serves(f"POST {path}", passing, body, headers=IdempotencyHeaders, answers=media_types)


def looks_up(path: str, passing: Passing, **details: Any) -> Callable[[_Method], _Method]:
    """As `serves`, for what is kept."""
    return serves(f"GET {path}", passing, is_lookup=True, **details)


def follows(path: str, media_types: tuple[str, ...] = STREAMED) -> Callable[[_Method], _Method]:
    """As `serves`, for recorded replies that are followed again."""
    types = {"query": FollowQuery, "headers": FollowHeaders, "answers": media_types}
    return looks_up(path, BY_ID | RECORDED, statuses=(410,), **types)


def served(kind: type) -> Iterator[tuple[str, str, Operation, str]]:
    """Yields the path, the HTTP method and the operation that each method of a class serves, and the method's name."""
    for name, serve in vars(kind).items():
        for path, verb, operation in getattr(serve, "served", ()):
            yield path, verb, operation, name


Wrapped = Callable[[Operation, Handler], Handler]


def handlers_of(
    *apis: object, wrapped: Wrapped = lambda _, handler: handler
) -> dict[str, dict[str, Handler]]:
    """Returns the handlers of some endpoints by path and HTTP method."""
    handlers: dict[str, dict[str, Handler]] = {}
    for api in apis:
        for path, verb, operation, name in served(type(api)):
            handlers.setdefault(path, {})[verb] = wrapped(operation, getattr(api, name))
    return handlers


def routes_of(*apis: object, wrapped: Wrapped = lambda _, handler: handler) -> list[Route]:
    """Makes one route for all methods of a path, so that a 405 names them all.

    Paths without parameters come first: what they name could be an id.
    """
    handlers = handlers_of(*apis, wrapped=wrapped)
    return [_route(path, handlers[path]) for path in sorted(handlers, key=lambda path: "{" in path)]


def _route(path: str, handlers: Mapping[str, Handler]) -> Route:
    async def handle(http: HttpRequest) -> Response:
        response = await handlers["GET" if http.method == "HEAD" else http.method](http)
        forget_body(http)
        return response

    return Route(path, handle, methods=list(handlers))

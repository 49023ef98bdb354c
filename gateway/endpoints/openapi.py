"""`/openapi.json` describes the routes of OPERATIONS, with the fields of the types that check requests, and the limits.

A route that is missing in OPERATIONS is a fault, of which a test tells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import anyio.to_thread
from pydantic import TypeAdapter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.batches import BATCH_ID, MESSAGE_BATCH_ID
from penstock.gateway.endpoints.operation import JSON, Operation, Passing, SloHeaders
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.http.correlation import ANTHROPIC_PATH
from penstock.gateway.http.refusals import OLLAMA_PATH, OVERLOADED
from penstock.gateway.limits import Limits
from penstock.gateway.sessions.batches.files import FILE_ID
from penstock.gateway.sessions.recordings.kinds import CHAT, IDS, LINES, MESSAGE, TEXT
from penstock.gateway.sessions.responses.schemas import ITEM_PREFIXES, id_pattern
from penstock.gateway.wire.strict import rules_of

OpenApiObject = dict[str, Any]

_SCHEMAS = "#/components/schemas/"


class OpenApi:
    """Describes the routes of an app when it is first asked for."""

    def __init__(self, routes: Sequence[Route], limits: Limits, *, with_keys: bool) -> None:
        """`with_keys` says whether clients need a key."""
        self.routes = [Route("/openapi.json", self.show, methods=["GET"]), *routes]
        """The routes that are described, that of the description included."""
        self._limits = limits
        self._with_keys = with_keys
        self._document = b""

    async def show(self, _: HttpRequest) -> Response:
        self._document = self._document or await anyio.to_thread.run_sync(self._render)
        return Response(self._document, media_type="application/json")

    def _render(self) -> bytes:
        return json.dumps(self.document()).encode()

    def document(self) -> OpenApiObject:
        """Returns the description; raises LookupError if a route is not in OPERATIONS."""
        entries = [
            (route.path_format, method, OPERATIONS[route.path_format][method])
            for route in self.routes
            for method in sorted((route.methods or set()) - {"HEAD"})
        ]
        schemas = _Schemas((operation for _, _, operation in entries), self._limits)
        paths: dict[str, OpenApiObject] = {}
        for path, method, operation in entries:
            paths.setdefault(path, {})[method.lower()] = _describe(path, method, operation, schemas)
        components: OpenApiObject = {"schemas": schemas.components | _ERRORS}
        document: OpenApiObject = {
            "openapi": "3.2.0",
            "info": {"title": "Penstock", "version": "1"},
            "paths": paths,
            "components": components,
        }
        if self._with_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document


class _Schemas:
    """The JSON schemas of types, by their `repr`; those with names are components."""

    def __init__(self, operations: Iterable[Operation], limits: Limits) -> None:
        types = {repr(kind): kind for operation in operations for kind in operation.types}
        self._schemas, definitions = TypeAdapter.json_schemas(
            [(name, "validation", TypeAdapter(kind)) for name, kind in types.items()],
            ref_template=f"{_SCHEMAS}{{model}}",
        )
        self.components: dict[str, OpenApiObject] = definitions.get("$defs", {})
        for kind in types.values():
            self._name(kind)
            for steps, most in rules_of(kind).bounds():
                number = getattr(limits, most) if isinstance(most, str) else most
                self._bound(self.of(kind), steps, number)

    def of(self, kind: Any) -> OpenApiObject:
        return self._schemas[repr(kind), "validation"]

    def members(self, kind: Any) -> OpenApiObject:
        """The schema of an object, not a reference to it."""
        return next(self._forms(self.of(kind)))

    def _name(self, kind: Any) -> None:
        """Writes fields under their other names as well."""
        names = getattr(kind, "ALIASES", {})
        properties = self.members(kind)["properties"] if names else {}
        for name, field in names.items():
            if field in properties:
                properties.setdefault(name, properties[field])

    def _bound(self, schema: OpenApiObject, steps: Sequence[str], most: int) -> None:
        """Writes the largest size or number into the schema of a place."""
        for form in self._forms(schema):
            if not steps:
                limit = {"array": "maxItems", "object": "maxProperties", "integer": "maximum"}
                form.update({limit[form["type"]]: most} if form.get("type") in limit else {})
            elif below := form.get("items") if steps[0] == "[]" else form.get("properties", {}).get(steps[0]):
                self._bound(below, steps[1:], most)

    def _forms(self, schema: OpenApiObject) -> Iterator[OpenApiObject]:
        """The schemas of what a value may be, without references."""
        if "$ref" in schema:
            schema = self.components[schema["$ref"].removeprefix(_SCHEMAS)]
        for form in schema.get("anyOf", ()):
            yield from self._forms(form)
        yield schema


def _describe(path: str, method: str, operation: Operation, schemas: _Schemas) -> OpenApiObject:
    description: OpenApiObject = {
        "operationId": f"{method.lower()} {path}",
        "summary": operation.summary,
        "parameters": [*_identifiers(path), *_parameters("query", operation.query, schemas)],
        "responses": _responses(path, operation),
    }
    description["parameters"] += _parameters("header", operation.headers, schemas)
    if Passing.BY_PROMPT in operation.passing:
        description["parameters"] += _parameters("header", SloHeaders, schemas)
    if operation.body is not None:
        media_type = "multipart/form-data" if operation.is_form else JSON
        content = {media_type: {"schema": schemas.of(operation.body)}}
        description["requestBody"] = {"required": True, "content": content}
    if operation.is_open:
        description["security"] = []
    return description


_IDS = {
    "/v1/chat": IDS[CHAT].pattern,
    "/v1/completions": IDS[TEXT].pattern,
    "/v1/messages": IDS[MESSAGE].pattern,
    "/api": IDS[LINES].pattern,
}
"""The patterns of ids, by the beginning of their paths."""


def _identifiers(path: str) -> Iterator[OpenApiObject]:
    patterns = {
        "id": next((p for start, p in _IDS.items() if path.startswith(start)), id_pattern("resp")),
        "conversation_id": id_pattern("conv"),
        "file_id": FILE_ID.pattern,
        "batch_id": BATCH_ID.pattern,
        "message_batch_id": MESSAGE_BATCH_ID.pattern,
        "item_id": id_pattern(*ITEM_PREFIXES),
    }
    for name in re.findall(r"{(\w+)}", path):
        schema: OpenApiObject = {
            "type": "string",
            **({"pattern": patterns[name]} if name in patterns else {}),
        }
        yield {"name": name, "in": "path", "required": True, "schema": schema}


def _parameters(place: str, kind: Any, schemas: _Schemas) -> Iterator[OpenApiObject]:
    schema = {} if kind is None else schemas.members(kind)
    for name, of_one in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
        yield {"name": name, "in": place, "required": required, "schema": of_one}


def _responses(path: str, operation: Operation) -> OpenApiObject:
    types = operation.json_types
    in_json: OpenApiObject = {"schema": {"type": types[0] if len(types) == 1 else list(types)}}
    whole = {media_type: in_json if media_type == JSON else {} for media_type in operation.answers}
    responses = {200: {"description": "OK", "content": whole}}
    for status in operation.refusals:
        if status == HTTPStatus.SERVICE_UNAVAILABLE and path.startswith(ANTHROPIC_PATH):
            status = OVERLOADED
        responses[status] = {"description": _phrase(status), "content": {JSON: {"schema": _error(path)}}}
    if operation.is_probe:
        responses[503] = {"description": "Red", "content": whole}
    if operation.is_cached:
        responses[304] = {"description": _phrase(304)}
    return {str(status): responses[status] for status in sorted(responses)}


def _error(path: str) -> OpenApiObject:
    """The error object of the API that a path belongs to."""
    names = {ANTHROPIC_PATH: "AnthropicError", OLLAMA_PATH: "OllamaError"}
    name = next((name for start, name in names.items() if path.startswith(start)), "Error")
    return {"$ref": _SCHEMAS + name}


def _phrase(status: int) -> str:
    return "Overloaded" if status == OVERLOADED else HTTPStatus(status).phrase


def _object(**properties: OpenApiObject) -> OpenApiObject:
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT: OpenApiObject = {"type": "string"}
_TEXT_OR_NULL: OpenApiObject = {"type": ["string", "null"]}
_ERRORS = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "AnthropicError": _object(
        type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT_OR_NULL
    ),
    "OllamaError": _object(error=_TEXT),
}

"""The form of an answer: every way to ask for one, and what comes of it for the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.engine.planning.request import Request
from penstock.engine.text.grammar import CompiledGrammar, Grammar, GrammarKind
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OF_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, TEXT)
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


async def grammar_of(path: str, body: dict[str, Any]) -> Grammar | None:
    """Returns the grammar that the engine gets."""
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(path, json=body))
        request = await gateway.taken()
        gateway.answer(request, "ok")
        assert (await asking).status_code == 200
    return plain_of(request)


def plain_of(request: Request) -> Grammar | None:
    """The grammar of a request, which has to be compiled."""
    grammar = request.sampling.grammar
    assert grammar is None or isinstance(grammar, CompiledGrammar)
    return grammar and grammar.plain


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": NAMED}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, Grammar(GrammarKind.LARK, 'start: "a" | "b\\""')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.LARK, 'start: "a"')),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": INT64}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(INT64, separators=(",", ":")))),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"guided_choice": ["a"]}, Grammar(GrammarKind.LARK, 'start: "a"')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar(GrammarKind.LARK, 'root ::= "a"')),
    ],
)
async def test_what_is_asked_for_reaches_the_engine(
    path: str, fields: dict[str, Any], expected: Grammar | None
) -> None:
    body = chat_body() if path == CHAT else completion_body()
    assert await grammar_of(path, {**body, **fields}) == expected


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ANY_OBJECT),
        ({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, OF_SCHEMA),
    ],
)
async def test_a_response_has_its_form_and_tells_it(format: dict[str, Any], expected: Grammar | None) -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        body = {"model": MODEL, "input": "Hi", "text": {"format": format}}
        asking = asyncio.create_task(http.post(RESPONSES, json=body))
        request = await gateway.taken()
        gateway.answer(request, "ok")
        reply = (await asking).json()
    assert plain_of(request) == expected
    assert reply["text"]["format"] == format


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({"type": "json_schema", "schema": SCHEMA}, "text.format.name"),
        ({"type": "json_schema", "name": "n", "schema": {"type": "what"}}, "text.format.schema"),
        ({"type": "grammar"}, "text.format.type"),
    ],
)
async def test_a_wrong_form_of_a_response_is_refused_by_field(format: dict[str, Any], param: str) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post(RESPONSES, json={"model": MODEL, "input": "Hi", "text": {"format": format}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)

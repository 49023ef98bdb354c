"""Keywords of schemas that no grammar can hold an answer to are left out, and the reply's header names them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.gateway.wire.enforced import enforced_form, enforced_tools
from penstock.gateway.wire.structured import Form
from penstock.gateway.wire.tools.use import tool_use
from tests.gateway.endpoints.test_tools import CHAT, RESPONSES, answered, gateway
from tests.gateway.harness import chat_body, client

pytestmark = pytest.mark.anyio

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
"""As zod 4 writes it."""
MEMBERS = {
    "address": {"type": "string", "format": "email", "pattern": EMAIL},
    "secret": {"type": "string", "format": "password"},
}
SCHEMA = {"type": "object", "properties": MEMBERS, "required": ["secret"], "additionalProperties": False}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"pattern": EMAIL}, ["s.pattern"]),
        ({"pattern": r"a\b"}, ["s.pattern"]),
        ({"pattern": r"(a)\1"}, ["s.pattern"]),
        ({"pattern": r"(?<=a)b"}, ["s.pattern"]),
        ({"pattern": r"^\d+\\b$", "format": "uuid"}, []),
        ({"pattern": r"\(?=a"}, []),
        ({"type": ["string", "null"], "format": "phone"}, ["s.format"]),
        ({"type": "integer", "format": "int64"}, []),
        (
            {"properties": {"pattern": {"format": "x"}, "format": {"type": "string"}}},
            ["s.properties.pattern.format"],
        ),
        ({"enum": [{"format": "x"}], "default": {"pattern": "(?=a)"}}, []),
        (
            {"anyOf": [{"format": "x"}, {"items": {"format": "y"}}]},
            ["s.anyOf[0].format", "s.anyOf[1].items.format"],
        ),
        ({"$defs": {"a b": {"format": "x"}}}, ["s"]),
        ({"properties": {"\n": {"format": "x"}}}, ["s"]),
        (True, []),
    ],
)
def test_what_only_narrows_strings_is_left_out(schema: Any, names: list[str]) -> None:
    form = Form("s", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    kept, left_out = enforced_form(form)
    assert left_out == names
    assert (kept == form) is (not names)
    assert enforced_form(kept) == (kept, [])


def test_only_schemas_are_looked_at() -> None:
    for kind, text in (
        (GrammarKind.REGEX, '"pattern"(?=a)'),
        (GrammarKind.JSON_SCHEMA, '{"pattern": "(?=a)"'),
    ):
        form = Form("s", Grammar(kind, text))
        assert enforced_form(form) == (form, [])


def test_tools_whose_arguments_need_not_match_are_not_named() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": name == "b"}}
        for name in "ab"
    ]
    named = ["address.pattern", "secret.format"]
    use, left_out = enforced_tools(tool_use(tools))
    assert left_out == [f"tools[1].parameters.properties.{name}" for name in named]
    assert "password" not in json.dumps(use.tools)
    assert len(enforced_tools(tool_use(tools, "required"))[1]) == 4


async def test_the_header_names_them_and_the_rest_holds() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    bodies = [
        (CHAT, chat_body(response_format=NAMED), "response_format.json_schema.schema."),
        (CHAT, chat_body(tools=[tool]), "tools[0].parameters."),
        (CHAT, chat_body(guided_json=SCHEMA), "guided_json."),
    ]
    form = {"type": "json_schema", **NAMED["json_schema"]}  # type: ignore[dict-item]
    bodies.append(
        (
            RESPONSES,
            {"model": chat_body()["model"], "input": "Hi", "text": {"format": form}},
            "text.format.schema.",
        )
    )
    for path, body, field in bodies:
        reply, request = await answered(gateway(), body, "ok", path=path)
        assert reply.status_code == 200
        names = [f"{field}properties.{name}" for name in ("address.pattern", "secret.format")]
        assert reply.headers["x-penstock-ignored"].split(", ") == names
        assert request.sampling.grammar is not None
        async with client(gateway(strict=True).app) as http:
            refused = await http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, names[0])

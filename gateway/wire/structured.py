"""Structured output: from what a body says of the form of its answer to a grammar.

OpenAI's `response_format` (and `text.format`), vLLM's `structured_outputs` with the older `guided_*` fields, and
llama.cpp's `json_schema` and `grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import orjson

from penstock.engine.planning.grammar import Grammar, GrammarKind
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.limits import Limits, parse_object
from penstock.gateway.wire.schemas import AnswerFormat, Sampled, Schema

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


class Form(NamedTuple):
    """The grammar that the answer has to match, and the field that asks for it."""

    field: str
    grammar: Grammar


def form_of(body: Sampled, limits: Limits, main: Form | None) -> Form | None:
    """Returns the one form that a body asks for; None if its answer is free.

    Args:
        main: the form that its `response_format` asks for.

    Raises:
        ApiError: 400 that names the field, if there are several, or one that is too large, or no grammar.
    """
    forms = [*([] if main is None else [main]), *_guided(body, limits)]
    if not forms:
        return None
    if len(forms) > 1:
        raise invalid(f"Give '{forms[0].field}' or '{forms[1].field}', not both.", forms[1].field)
    form = forms[0]
    if len(form.grammar.text.encode(errors="replace")) > limits.max_grammar_bytes:
        message = f"'{form.field}' is too large: this server takes at most {limits.max_grammar_bytes} bytes."
        raise invalid(message, form.field)
    return form


def answer_form(given: AnswerFormat | None) -> Form | None:
    """Returns the form that `response_format` asks for."""
    if given is None or given.type == "text":
        return None
    if given.schema_ is not None and given.json_schema is None:
        return Form("response_format.schema", schema_grammar(given.schema_))
    if given.type == "json_object":
        return Form("response_format", ANY_OBJECT)
    if given.json_schema is None:
        raise missing("response_format.json_schema")
    if given.schema_ is not None:
        message = "Give 'response_format.schema' or 'response_format.json_schema', not both."
        raise invalid(message, "response_format.schema")
    return Form("response_format.json_schema.schema", schema_grammar(given.json_schema.schema_))


def schema_grammar(schema: Schema | None) -> Grammar:
    """Returns the grammar of the JSON that a schema accepts; of any JSON without one."""
    text = orjson.dumps({} if schema is None else schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def missing(field: str) -> ApiError:
    return invalid(f"You must provide the parameter '{field}'.", field, "missing_required_parameter")


def _guided(body: Sampled, limits: Limits) -> Iterator[Form]:
    if body.json_schema is not None:
        yield Form("json_schema", schema_grammar(_parsed(body.json_schema, "json_schema", limits)))
    if body.grammar:
        yield Form("grammar", Grammar(GrammarKind.LARK, body.grammar))
    given = body.structured_outputs
    if given is not None:
        yield from _forms(
            "structured_outputs.", given.json_, given.regex, given.choice, given.grammar, limits
        )
        if given.json_object:
            yield Form("structured_outputs.json_object", ANY_OBJECT)
    yield from _forms(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, limits
    )


def _forms(
    prefix: str,
    schema: Schema | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    limits: Limits,
) -> Iterator[Form]:
    if schema is not None:
        yield Form(f"{prefix}json", schema_grammar(_parsed(schema, f"{prefix}json", limits)))
    if regex is not None:
        yield Form(f"{prefix}regex", Grammar(GrammarKind.REGEX, regex))
    if choice is not None:
        alternatives = " | ".join(json.dumps(text) for text in choice)
        yield Form(f"{prefix}choice", Grammar(GrammarKind.LARK, f"start: {alternatives}"))
    if grammar is not None:
        yield Form(f"{prefix}grammar", Grammar(GrammarKind.LARK, grammar))


def _parsed(schema: Schema | str, field: str, limits: Limits) -> Schema:
    """Returns a schema, which may be written as a text."""
    if not isinstance(schema, str):
        return schema
    try:
        return parse_object(schema.encode(), limits)
    except ApiError:
        raise invalid(f"'{field}' is neither a JSON Schema nor the text of one.", field) from None

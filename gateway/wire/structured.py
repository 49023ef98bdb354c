"""Structured output: from what a body says of the form of its answer to a grammar.

OpenAI's `response_format` (and `text.format`), vLLM's `structured_outputs` with the older `guided_*` fields, and
llama.cpp's `json_schema` and `grammar`.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import orjson

from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.limits import Limits, parse_object
from penstock.gateway.wire.mistakes import missing
from penstock.gateway.wire.schemas import AnswerFormat, SamplingFields, Schema, StructuredOutputs

FORM_FIELDS = {
    *("grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema"),
    *("response_format", "structured_outputs", "text"),
}
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


class Form(NamedTuple):
    """The grammar that the answer has to match, and the field that asks for it."""

    field: str
    grammar: Grammar


def form_of(body: SamplingFields, limits: Limits, main: Form | None) -> Form | None:
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


def _guided(body: SamplingFields, limits: Limits) -> list[Form]:
    outputs = body.structured_outputs or StructuredOutputs()
    values = {
        "json_schema": body.json_schema,
        "grammar": body.grammar or None,
        "structured_outputs.json": outputs.json_,
        "structured_outputs.regex": outputs.regex,
        "structured_outputs.choice": outputs.choice,
        "structured_outputs.grammar": outputs.grammar,
        "structured_outputs.json_object": outputs.json_object or None,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    return [
        Form(field, _grammar(field, value, limits)) for field, value in values.items() if value is not None
    ]


def _grammar(field: str, value: Any, limits: Limits) -> Grammar:
    """Returns the grammar that the value of a field asks for; the end of the field's name says what the value is."""
    if field.endswith("json_object"):
        return ANY_OBJECT
    if field.endswith(("json", "json_schema")):
        return schema_grammar(_parsed(value, field, limits))
    if field.endswith("choice"):
        return Grammar(GrammarKind.LARK, f"start: {' | '.join(map(json.dumps, value))}")
    return Grammar(GrammarKind.REGEX if field.endswith("regex") else GrammarKind.LARK, value)


def _parsed(schema: Schema | str, field: str, limits: Limits) -> Schema:
    """Returns a schema, which may be written as a text."""
    if not isinstance(schema, str):
        return schema
    try:
        return parse_object(schema.encode(), limits)
    except ApiError:
        raise invalid(f"'{field}' is neither a JSON Schema nor the text of one.", field) from None

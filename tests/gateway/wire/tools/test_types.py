"""An argument in a tagged format has the type that its schema admits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.wire.parsing import Answer, answer_of
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.tools.types import admitted, property_schema

DEFINED = {
    "size": {"type": "integer"},
    "level": {"enum": ["1", "2"]},
    "maybe": {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]},
    "loop": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/loop"}]},
    "a/b": {"type": "boolean"},
}

# Schema, text, value.
CASES: list[tuple[Any, str, Any]] = [
    ({"$ref": "#/$defs/size"}, "5", 5),
    ({"$ref": "#/$defs/maybe"}, "5", 5),
    ({"$ref": "#/$defs/maybe"}, "null", None),
    ({"$ref": "#/$defs/level"}, "1", "1"),
    ({"$ref": "#/$defs/loop"}, "1.5", 1.5),
    ({"$ref": "#/$defs/a~1b"}, "true", True),
    ({"$ref": "#/properties/other"}, "5", 5),
    ({"$ref": "#/$defs/none"}, "word", "word"),
    ({"allOf": [{"$ref": "#/$defs/size"}], "description": "A size."}, "5", 5),
    ({"allOf": [{"type": ["integer", "string"]}, {"minimum": 3, "type": "integer"}]}, "5", 5),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
    ({"oneOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1]),
    ({"type": ["boolean", "null"]}, "False", False),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "nullable", "nullable"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5 apples", "5 apples"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "05", "05"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "true", "true"),
    ({"const": 5}, "5", 5),
    ({"const": "5"}, "5", "5"),
    ({"const": None}, "null", None),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["1", "2", "true"]}, "2", "2"),
    ({"enum": ["1", 2]}, "1", "1"),
    ({"enum": ["1", 2]}, "2", 2),
    ({"enum": ["low", None]}, "null", None),
    ({"type": "string"}, "5", "5"),
    ({"type": "string", "enum": ["true"]}, "true", "true"),
    ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
    ({"type": "integer"}, '"5"', 5),
    ({"type": "integer"}, "'5'", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "object"}, "{'a': None, 'b': [1]}", {"a": None, "b": [1]}),
    ({}, "5", 5),
    ({}, "five", "five"),
    ({}, "", ""),
    ({}, '{"a": [1, 2]}', {"a": [1, 2]}),
    ({}, "[not a list", "[not a list"),
    ({}, '"quoted"', '"quoted"'),
    ({"description": "Anything."}, "null", None),
    (True, "1e3", 1000.0),
    (False, "x", "x"),
]


def called(format: str, text: str, schemas: dict[str, Any], step: int = 1000) -> dict[str, Any]:
    parser, answer = Reading(tools=format, schemas=schemas).parser("a"), Answer()
    for start in range(0, len(text), step):
        answer.add(parser.feed(text[start : start + step]))
    answer.add(parser.finish())
    assert answer.text == ""
    (call,) = answer.calls
    assert call.name == "f"
    found: dict[str, Any] = json.loads(call.arguments)
    return found


@pytest.mark.parametrize(("schema", "text", "value"), CASES)
def test_a_value_has_the_type_that_its_schema_admits(schema: Any, text: str, value: Any) -> None:
    whole = {"properties": {"a": schema, "other": {"type": "integer"}}, "$defs": DEFINED}
    texts = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }
    for format, said in texts.items():
        for step in (1000, 1):
            found = called(format, said, {"f": whole}, step)["a"]
            assert (found, type(found)) == (value, type(value))


def test_the_schema_of_a_member_is_found_behind_references_and_alternatives() -> None:
    number = {"type": "number"}
    wholes: list[dict[str, Any]] = [
        {"properties": {"a": number}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": number}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": number}}]},
        {"anyOf": [{"properties": {"b": {}}}, {"oneOf": [{"properties": {"a": number}}]}]},
        {"additionalProperties": number},
        {"allOf": [{"$ref": "#"}], "properties": {"a": number}},
    ]
    for whole in wholes:
        assert property_schema(whole, "a") == number
        text = "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>"
        assert called("qwen3_coder", text, {"f": whole}) == {"a": 5}
    nothings: list[Any] = [None, True, [], {}, {"properties": 3}, {"allOf": [{"$ref": "#"}]}]
    for nothing in nothings:
        assert property_schema(nothing, "a") is None


def test_a_schema_that_refers_to_itself_many_times_is_soon_read() -> None:
    part = {"anyOf": [{"$ref": "#/$defs/x"}] * 40}
    root = {"$defs": {"x": {"anyOf": [part, {"allOf": [part] * 40}]}}}
    assert admitted(part, root).words is None
    chain = {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)}}
    assert "number" in admitted({"$ref": "#/$defs/0"}, chain).types


def test_listed_words_are_those_that_every_part_lists() -> None:
    root = {"$defs": {"few": {"enum": ["a", "b", 1]}}}
    lists: list[tuple[Any, set[str] | None]] = [
        ({"$ref": "#/$defs/few"}, {"a", "b"}),
        ({"allOf": [{"$ref": "#/$defs/few"}, {"enum": ["b", "c"]}]}, {"b"}),
        ({"anyOf": [{"const": "x"}, {"type": "null"}]}, {"x"}),
        ({"anyOf": [{"const": "x"}, {"type": "string"}]}, None),
        ({"type": "integer"}, set()),
        ({}, None),
    ]
    for schema, words in lists:
        assert admitted(schema, root).words == words


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen3_coder", '<tool_call><function="f"><parameter="a">1</parameter></function></tool_call>'),
        ("qwen3_coder", "<tool_call><function='f'><parameter='a'>1</parameter></function></tool_call>"),
        ("qwen3_coder", '<tool_call><function= "f" ><parameter= "a" >1</parameter></function></tool_call>'),
        (
            "seed_oss",
            '<seed:tool_call><function="f"><parameter="a">1</parameter></function></seed:tool_call>',
        ),
        ("glm45", '<tool_call>"f"<arg_key>"a"</arg_key><arg_value>1</arg_value></tool_call>'),
    ],
)
def test_quotation_marks_around_a_name_are_no_part_of_it(format: str, text: str) -> None:
    schemas = {"f": {"properties": {"a": {"type": "integer"}}}}
    for step in (1000, 1):
        assert called(format, text, schemas, step) == {"a": 1}


def test_a_single_quotation_mark_is_part_of_a_parameters_name() -> None:
    text = (
        '<tool_call><function=f><parameter=a">1</parameter><parameter=">2</parameter></function></tool_call>'
    )
    assert called("qwen3_coder", text, {"f": {}}) == {'a"': 1, '"': 2}


@pytest.mark.parametrize(
    "number", ["1098765432109876543", "-9223372036854775808", "12345678901234567890123", "1.10"]
)
@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{{"name": "f", "arguments": {{"a": {}}}}}</tool_call>'),
        ("hermes", '<tool_call>{{"arguments": {{"a": {}}}, "name": "f"}}</tool_call>'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>{}</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>['x', {}]</parameter></function></tool_call>"),
        ("llama_pythonic", "[f(a={})]"),
        ("llama_pythonic", "[f(a=[True, {{'b': {}}}])]"),
        ("gemma4", "<|tool_call>call:f{{a:{}}}<tool_call|>"),
    ],
)
def test_numbers_keep_their_digits(format: str, text: str, number: str) -> None:
    answer = answer_of(Reading(tools=format, schemas={"f": {}}).parser("a"), text.format(number))
    assert number in answer.calls[0].arguments
    json.loads(answer.calls[0].arguments)

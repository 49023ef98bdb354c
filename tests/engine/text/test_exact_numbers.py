"""Integers beyond 2^53 in a schema are exact in what its grammar allows."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from penstock.engine.text.exact_numbers import TooComplex, _between, exact_rules
from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.engine.text.grammars import GrammarError, source_of

LARGE = 1098765432109876543
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
MEMBERS = {
    "type": "object",
    "properties": {"id": {"$ref": "#/$defs/id"}, "name": {"type": "string"}, "size": INT64},
    "required": ["id", "size"],
    "additionalProperties": False,
    "$defs": {"id": {"enum": [LARGE, LARGE + 1]}},
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"id": INT64, "below": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["id"],
        }
    },
}

# Schema, texts that it admits, texts that it does not.
CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"enum": [LARGE]}, [str(LARGE)], [str(LARGE - 63), str(LARGE + 1), str(float(LARGE))]),
    ({"const": LARGE}, [str(LARGE)], [str(LARGE + 1)]),
    ({"const": -LARGE}, [str(-LARGE)], [str(LARGE)]),
    ({"enum": ["a", LARGE, None]}, ['"a"', str(LARGE), "null"], ['"b"', "1"]),
    ({"type": "string", "enum": ["a", LARGE]}, ['"a"'], [str(LARGE)]),
    (
        INT64,
        ["0", "-1", str(2**63 - 1), str(-(2**63)), str(LARGE)],
        [str(2**63), str(-(2**63) - 1), "01", "-0"],
    ),
    ({"type": "integer", "minimum": -9223372036854775807}, [str(-(2**63) + 1), str(10**30)], [str(-(2**63))]),
    ({"type": "integer", "exclusiveMaximum": 2**63}, [str(2**63 - 1), "-5"], [str(2**63)]),
    ({"type": "integer", "maximum": 2**64 - 1, "minimum": 0}, ["0", str(2**64 - 1)], ["-1", str(2**64)]),
    (
        {"type": "number", "maximum": LARGE},
        [str(LARGE), "0.5", "-1.5", f"{LARGE - 1}.9"],
        [f"{LARGE}.1", str(LARGE + 1)],
    ),
    ({"type": ["integer", "null"], "maximum": LARGE}, ["null", str(LARGE)], [str(LARGE + 1), "true"]),
    ({"anyOf": [INT64, {"type": "null"}]}, ["null", str(LARGE)], [str(2**63), '"a"']),
    ({"allOf": [{"type": "integer"}, {"maximum": LARGE}]}, [str(LARGE)], [str(LARGE + 1)]),
    (
        {"type": "array", "items": INT64, "minItems": 1, "maxItems": 2},
        ["[1]", f"[{LARGE}, 2]"],
        ["[]", "[1, 2, 3]"],
    ),
    ({"type": "array", "items": {"const": LARGE}}, ["[]", f"[{LARGE}, {LARGE}]"], ["[1]"]),
    (
        {"type": "object", "additionalProperties": {"const": LARGE}},
        ["{}", f'{{"a": {LARGE}, "b": {LARGE}}}'],
        ['{"a": 1}'],
    ),
    (
        MEMBERS,
        [f'{{"id": {LARGE}, "size": 1}}', f'{{"id": {LARGE + 1}, "name": "x", "size": {2**63 - 1}}}'],
        [f'{{"id": {LARGE}}}', '{"id": 1, "size": 1}', f'{{"id": {LARGE}, "size": 1, "x": 1}}'],
    ),
    (TREE, [f'{{"id": {LARGE}, "below": [{{"id": 1}}, {{"id": 2, "below": []}}]}}'], [f'{{"id": {2**63}}}']),
]


class Bytes:
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = [256]  # noqa: RUF012
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def accepts(grammar: Grammar, text: str) -> bool:
    matcher, tokens = LLMatcher(TOKENIZER, source_of(grammar)), list(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and matcher.consume_tokens(tokens)
        and matcher.is_accepting()
    )


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES)
def test_a_grammar_allows_the_integers_that_its_schema_admits(
    schema: Any, right: list[str], wrong: list[str]
) -> None:
    of_schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert exact_rules(schema, "start", {})
    for grammar in (of_schema, Grammar(GrammarKind.LARK, "start: @answer", of_schema)):
        for text in right:
            assert accepts(grammar, text), text
        for text in wrong:
            assert not accepts(grammar, text), text


def test_other_schemas_are_llguidances() -> None:
    for schema in (
        True,
        {},
        {"maximum": 2**53},
        {"default": LARGE, "type": "integer"},
        {"const": str(LARGE)},
    ):
        assert exact_rules(schema, "start", {}) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": LARGE, "multipleOf": 2},
        {"type": "integer", "minimum": LARGE, "maximum": LARGE - 1},
        {"type": "string", "enum": [LARGE]},
        {"type": "object", "properties": {"a": INT64}, "minProperties": 2},
        {"allOf": [{"maximum": LARGE}, {"maximum": LARGE + 1}]},
    ],
)
def test_what_there_are_no_rules_for_is_refused(schema: Any) -> None:
    with pytest.raises(TooComplex):
        exact_rules(schema, "start", {})
    with pytest.raises(GrammarError):
        source_of(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def test_the_integers_of_a_range_are_those_that_its_expressions_match() -> None:
    rng = random.Random(8)
    for _ in range(60):
        low, high = sorted(rng.randint(-1200, 1200) for _ in range(2))
        ends = rng.choice([(low, high), (None, high), (low, None), (low, low)])
        matches = re.compile("|".join(f"(?:{part})" for part in _between(*ends))).fullmatch
        for number in range(-1250, 1250, 7):
            is_in = (ends[0] is None or number >= ends[0]) and (ends[1] is None or number <= ends[1])
            assert bool(matches(str(number))) is is_in, (ends, number)

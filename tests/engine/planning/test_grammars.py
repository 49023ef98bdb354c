"""Compiling: what is a grammar, what is too much of one, and how long that takes."""

from __future__ import annotations

import json
import time

import pytest

from engine.planning import grammars as module
from engine.planning.grammar import Grammar, GrammarKind, Guide
from engine.planning.grammar_check import GrammarCheck
from engine.planning.grammars import GrammarError, Grammars, source_of
from engine.planning.request import Request, SamplingParams
from tests.gateway.desk import EOS, make_tokenizer

TOKENIZER = make_tokenizer()
SCHEMA, REGEX, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, (EOS,))


def guide(grammars: Grammars, grammar: Grammar, text: str = "") -> Guide:
    request = Request(
        request_id="r",
        prompt_token_ids=(1,),
        sampling=SamplingParams(grammar=grammar),
        output_token_ids=tuple(TOKENIZER.encode(text)),
    )
    return grammars.start(request, grammar)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar(SCHEMA, "true"), '{"a": [1, null]}'),
        (Grammar(SCHEMA, '{"enum": ["é☃", 1.5]}'), '"é☃"'),
        (Grammar(SCHEMA, '{"type": "string", "maxLength": 2}'), '"\\n☃"'),
        (Grammar(REGEX, "[é-ü]{3}|x"), "éñü"),
        (Grammar(LARK, 'start: "a\\n\\"" | /b+c/'), 'a\n"'),
        (Grammar(LARK, 'root ::= "a" [0-9] "b"?'), "a7b"),
    ],
)
def test_a_text_that_matches_is_followed_to_its_end(grammars: Grammars, grammar: Grammar, text: str) -> None:
    grammars.compile("tenant", grammar)
    found = guide(grammars, grammar, text)
    assert (found.error, found.is_complete) == ("", True)
    for end in range(len(text)):
        assert not guide(grammars, grammar, text[:end]).is_complete
    wrong = guide(grammars, grammar, f"{text[:-1]}\x7f")
    assert wrong.error.startswith("the grammar could not be followed")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar(REGEX, "("), "unclosed"),
        (Grammar(REGEX, "(?=a)b"), "look-ahead"),
        (Grammar(LARK, "start: nothing"), "nothing"),
        (Grammar(LARK, 'root := "a"'), ""),
        (Grammar(LARK, 'a ::= "b"'), "root"),
        (Grammar(SCHEMA, "false"), "Unsatisfiable"),
        (Grammar(SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}'), "minimum"),
        (Grammar(SCHEMA, '{"not": {"type": "string"}}'), "not"),
        (Grammar(SCHEMA, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar(SCHEMA, '{"$ref": "http://127.0.0.1/x.json"}'), "fetch"),
        (Grammar(SCHEMA, '{"$ref": "#"}'), ""),
        (Grammar(SCHEMA, '{"items":' * 1000 + "{}" + "}" * 1000), "recursion"),
        (Grammar(SCHEMA, "{"), ""),
        (
            Grammar(SCHEMA, json.dumps({"properties": {f"p{i}": {} for i in range(1500)}, "type": "object"})),
            "items",
        ),
    ],
)
def test_what_no_answer_can_be_held_to_is_refused(grammars: Grammars, grammar: Grammar, why: str) -> None:
    with pytest.raises(GrammarError) as raised:
        grammars.compile("tenant", grammar)
    message = str(raised.value)
    assert message
    assert why in message
    assert "\n" not in message


def test_what_takes_too_long_to_compile_is_given_up() -> None:
    """And the next one is checked as if nothing had been."""
    check = GrammarCheck(patience_s=0.3)
    assert check.refusal(source_of(Grammar(REGEX, "a"))) == ""
    parts = " & ".join(f"/.*a.{{{i}}}.*/" for i in range(5, 30))
    endless = source_of(Grammar(LARK, f"start: X\nX: {parts}"))
    started = time.monotonic()
    assert check.refusal(endless) == "it is too complex"
    assert time.monotonic() - started < 10
    check._patience_s = 30.0
    assert check.refusal(source_of(Grammar(REGEX, "b"))) == ""


def test_a_tenant_s_grammars_are_compiled_once_and_the_oldest_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars, compiled = Grammars(TOKENIZER, (EOS,)), list[str]()
    compile_ = grammars._compile

    def noted(grammar: Grammar) -> object:
        compiled.append(grammar.text)
        return compile_(grammar)

    monkeypatch.setattr(module, "_MOST_COMPILED", 2)
    monkeypatch.setattr(grammars, "_compile", noted)
    for tenant, text in [("t", "a"), ("t", "a"), ("u", "a"), ("t", "a"), ("t", "b"), ("t", "a"), ("u", "a")]:
        grammars.compile(tenant, Grammar(REGEX, text))
    assert compiled == ["a", "a", "b", "a"]

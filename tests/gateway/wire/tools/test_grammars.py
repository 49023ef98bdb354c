"""A reply that has to call a tool: what its grammar allows is what its parser reads, whatever else is tried."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.engine.text.grammars import Grammars, source_of
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.wire.parsing import answer_of
from penstock.gateway.wire.reading import NONE, Formats, Reading
from penstock.gateway.wire.reasoning import REASONING_FORMATS
from penstock.gateway.wire.tools.formats import TOOL_FORMATS
from penstock.gateway.wire.tools.grammars import Beside, calls_grammar
from penstock.gateway.wire.tools.use import tool_use
from tests.gateway.harness import tokenizer_json

SCHEMAS: dict[str, Any] = {
    "clock": {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 99},
            "b": {"$ref": "#/$defs/small"},
            "note": {"type": "string", "maxLength": 5},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"small": {"type": "boolean"}},
    },
}
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|tool_call>", "<tool_call|>", '<|"|>']
SPECIAL += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|START_ACTION|>", "<|END_ACTION|>"]
EOS = 256
ENDS_OF_TEXT = ["\n</parameter>", "</parameter>", "</param>", "</arg_value>", '<|"|>']
"""The ends of an argument that is any text: by chance alone they would never come."""


class Bytes:
    """A token a byte, and the special ones."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = list(range(256, 257 + len(SPECIAL)))  # noqa: RUF012
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>", *(text.encode() for text in SPECIAL)]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def spell(marker: str) -> str:
    return f"<[{257 + SPECIAL.index(marker)}]>" if marker in SPECIAL else json.dumps(marker)


def matcher(format: str, **fields: Any) -> LLMatcher:
    text = calls_grammar(format, SCHEMAS, spell, **{"one_call": True, **fields})
    grammar = LLMatcher.grammar_from_lark(text)
    assert LLMatcher.validate_grammar(grammar, TOKENIZER) == "", text
    return LLMatcher(TOKENIZER, grammar)


def tokens_of(text: str) -> list[int]:
    for i, special in enumerate(SPECIAL):
        text = text.replace(special, chr(0xE000 + i))
    return [
        token
        for character in text
        for token in (
            [257 + ord(character) - 0xE000] if "\ue000" <= character < "\ue010" else character.encode()
        )
    ]


def accepts(found: LLMatcher, text: str) -> bool:
    tokens = tokens_of(text)
    return (
        found.validate_tokens(tokens) == len(tokens) and found.consume_tokens(tokens) and found.is_accepting()
    )


def anything(found: LLMatcher, rng: random.Random) -> str:
    """A text that the grammar allows, a token at a time; it ends where it may."""
    said = b""
    while not found.is_accepting():
        end = tokens_of(rng.choice(ENDS_OF_TEXT))
        if rng.random() < 0.2 and found.validate_tokens(end) == len(end):
            assert found.consume_tokens(end)
            said += b"".join(Bytes.tokens[token] for token in end)
            continue
        bits = found.compute_bitmask()
        allowed = [i for i in range(len(Bytes.tokens)) if bits[i // 8] >> i % 8 & 1 and i != EOS]
        # Printable letters are the likelier: no text is all control characters.
        likely = [i for i in allowed if 32 <= i < 127] or allowed
        token = rng.choice(
            likely if rng.random() < 0.9 else [i for i in allowed if i < 128 or i > EOS] or allowed
        )
        assert found.consume_token(token)
        said += Bytes.tokens[token]
        assert len(said) < 4000
    return said.decode(errors="replace")


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_whatever_is_allowed_is_a_call_with_the_arguments_that_its_schema_wants(format: str) -> None:
    rng = random.Random(format)
    for _ in range(12):
        text = anything(matcher(format), rng)
        answer = answer_of(Reading(tools=format, schemas=SCHEMAS).parser("a"), text)
        assert answer.text == "", text
        (call,) = answer.calls
        arguments = json.loads(call.arguments)
        properties, required = SCHEMAS[call.name]["properties"], set(SCHEMAS[call.name].get("required", ()))
        assert required <= arguments.keys() <= properties.keys(), text
        assert isinstance(arguments.get("a", 0), int)
        assert isinstance(arguments.get("b", True), bool)
        assert arguments.get("zone", "UTC") in ("UTC", "CET")


ADD = '{"name": "add", "arguments": {"a": 1, "b": true}}'
WRITTEN = {
    "harmony": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": true}',
    "cohere2": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1, "b": true}}'
    "\n]<|END_ACTION|>",
    "functionary": '<function=add>{"a": 1, "b": true}</function>',
    "functools": f"functools[{ADD}]",
    "gemma4": '<|tool_call>call:add{a:1,b:true,note:<|"|>a, {b}<|"|>}<tool_call|>',
    "glm4": 'add\n{"a": 1, "b": true}',
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>true</arg_value>\n<arg_key>note</arg_key>\n<arg_value>a < b</arg_value>\n</tool_call>",
    "granite": f"<|tool_call|>[{ADD}]",
    "hermes": f"<tool_call>\n{ADD}\n</tool_call>",
    "hunyuan": f"<tool_calls>[{ADD}]</tool_calls>",
    "hunyuan_dense": '<tool_calls><tool_call>add\n```json\n{"a": 1, "b": true}\n```</tool_call></tool_calls>',
    "lfm2": '<|tool_call_start|>[add(a=1, b=true, note="x")]<|tool_call_end|>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": true, "note": "x"}}',
    "llama_pythonic": '[add(a=1, b=true, note="x")]',
    "llama4_json": '{"name": "add", "parameters": {"a": 1, "b": true, "note": "x"}}',
    "minicpm5": '<function name="add"><param name="a">1</param><param name="b">true</param>'
    '<param name="note"><![CDATA[a < b]]></param></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">true</parameter>\n<parameter name="note">a < b</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": f"[TOOL_CALLS][{ADD}]",
    "mistral_args": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": true}',
    "nemotron": f"<TOOLCALL>[{ADD}]</TOOLCALL>",
    "olmo3": '<function_calls>\nadd(a=1, b=true, note="x")\n</function_calls>',
    "phi4_mini": f"<|tool_call|>[{ADD}]<|/tool_call|>",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntrue\n</parameter>\n"
    "<parameter=note>\na < b\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>true</parameter>\n"
    "<parameter=note>a < b</parameter>\n</function>\n</seed:tool_call>",
}
"""As each family's template writes a call in the history."""
FREE = sorted(set(TOOL_FORMATS) - {"harmony"})
"""The formats in which what is no call has no header; see `test_harmony`."""
BETWEEN = {
    "functionary": "",
    "gemma4": "",
    "glm45": "\n",
    "hermes": "\n",
    "llama3_json": "; ",
    "llama4_json": "; ",
    "minicpm5": "\n",
    "mistral_args": "",
    "qwen3_coder": "\n",
    "seed_oss": "\n",
}
INSIDE = {
    "cohere2": (",\n    {", "{", "}"),
    "granite": (", {", "{", "}"),
    "hunyuan_dense": ("\n<tool_call>", "<tool_call>", "</tool_call>"),
    "lfm2": (", add", "add", ")"),
    "minimax_m2": ("\n<invoke", "<invoke", "</invoke>"),
    "nemotron": (", {", "{", "}"),
    "olmo3": ("\nadd", "add", ")"),
    "phi4_mini": (", {", "{", "}"),
}
"""What begins another call in a list, and what the first begins and ends with."""


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_models_write_as_they_were_taught_to(format: str) -> None:
    text = WRITTEN[format]
    assert accepts(matcher(format), text)
    assert not accepts(matcher(format), f"Well: {text}")
    assert not accepts(matcher(format), text.replace("1", '"one"'))
    if format in BETWEEN:
        twice = f"{text}{BETWEEN[format]}{text}"
        assert accepts(matcher(format, one_call=False), twice)
        assert not accepts(matcher(format), twice)
    if format in INSIDE:
        another, first, last = INSIDE[format]
        call = text[text.index(first) + len(first) : text.rindex(last) + len(last)]
        listed = text.replace(call, f"{call}{another}{call}")
        assert accepts(matcher(format, one_call=False), listed)
        assert not accepts(matcher(format), listed)
        assert len(answer_of(Reading(tools=format, schemas=SCHEMAS).parser("a"), listed).calls) == 2


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_integers_beyond_doubles_are_exact(format: str) -> None:
    large = 1098765432109876543
    add = SCHEMAS["add"]
    for of_a in ({"enum": [large]}, {"type": "integer", "minimum": large, "maximum": large}):
        schemas = {"add": {**add, "properties": {**add["properties"], "a": of_a}}}
        text = calls_grammar(format, schemas, spell, one_call=True)
        found = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(text))
        for number, is_right in ((large, True), (large - 63, False), (large + 1, False)):
            written = WRITTEN[format].replace("1", str(number))
            assert accepts(found.deep_copy(), written) is is_right, written


LEVELS = {
    "properties": {
        "level": {"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}]},
        "size": {"allOf": [{"$ref": "#/$defs/size"}], "description": "A size."},
    },
    "required": ["level", "size"],
    "additionalProperties": False,
    "$defs": {"level": {"enum": ["low", "high", "5"]}, "size": {"type": "integer"}},
}
OF_LEVELS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=level>\n{}\n</parameter>\n"
    "<parameter=size>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>level</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>size</arg_key>\n"
    "<arg_value>{}</arg_value>\n</tool_call>",
    "gemma4": "<|tool_call>call:f{{level:{},size:{}}}<tool_call|>",
}


@pytest.mark.parametrize("format", OF_LEVELS)
def test_a_value_of_a_tagged_call_is_held_to_what_stands_behind_references(format: str) -> None:
    text = calls_grammar(format, {"f": LEVELS}, spell, one_call=True)
    found = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(text))
    quote = '<|"|>' if format == "gemma4" else ""
    values = [(f"{quote}low{quote}", "low"), (f"{quote}5{quote}", "5"), ("null", None)]
    for written, level in values:
        said = OF_LEVELS[format].format(written, 7)
        assert accepts(found.deep_copy(), said), said
        (call,) = answer_of(Reading(tools=format, schemas={"f": LEVELS}).parser("a"), said).calls
        assert json.loads(call.arguments) == {"level": level, "size": 7}
    for wrong in ((f"{quote}medium{quote}", 7), ("true", 7), (f"{quote}low{quote}", "seven")):
        assert not accepts(found.deep_copy(), OF_LEVELS[format].format(*wrong)), wrong


def test_spaces_around_a_call_are_those_that_each_model_writes() -> None:
    call = WRITTEN["hermes"].replace("\n", "")
    assert accepts(matcher("hermes"), call)
    assert accepts(matcher("glm45"), WRITTEN["glm45"].replace("\n", ""))


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_may_come_first(name: str) -> None:
    opening, closing = thinking = REASONING_FORMATS[name]
    call = WRITTEN["hermes"]
    for is_open in (False, True):
        begun = "" if is_open else opening
        assert accepts(
            matcher("hermes", thinking=thinking, is_open=is_open), f"{begun}Hm < {closing}\n\n{call}"
        )
        assert accepts(matcher("hermes", thinking=thinking, is_open=is_open), call) is not is_open
        assert accepts(matcher("hermes", thinking=thinking), f"\n{opening}Hm{closing}{call}")
        assert not accepts(
            matcher("hermes", thinking=thinking, is_open=is_open), f"{begun}Hm {closing}Well. {call}"
        )


@pytest.mark.parametrize("format", FREE)
@pytest.mark.parametrize("thinking", [None, *(REASONING_FORMATS[name] for name in ("think", "mistral"))])
def test_in_a_free_reply_what_is_opened_as_a_call_is_one(
    format: str, thinking: tuple[str, str] | None
) -> None:
    call = WRITTEN[format]
    fields = {"thinking": thinking, "beside": Beside.TEXT, "one_call": False}
    wrong = call.replace("true", "1")
    texts = ["", "Hm, {[<", call]
    refused = [wrong]
    if TOOL_FORMATS[format].opening:
        texts += [f"Well. {call}", f"{call} So.\n{call}", f"A < b. {call}\nSo."]
        refused += [f"Well. {wrong}", f"{call} So.\n{wrong}"]
    thoughts = [""] if thinking is None else ["", f"{thinking[0]}Hm <tool_call> x{thinking[1]}\n"]
    found = matcher(format, **fields)
    for thought in thoughts:
        for text in texts:
            assert accepts(found.deep_copy(), thought + text), thought + text
        for text in refused:
            assert not accepts(found.deep_copy(), thought + text), thought + text
    if thinking is not None:
        found = matcher(format, **fields, is_open=True)
        assert accepts(found.deep_copy(), f"Hm <tool_call> x{thinking[1]} {texts[1]}")
        assert not accepts(found, f"Hm <tool_call> x{thinking[1]}{refused[0]}")


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_a_lenient_tool_may_have_a_schema_that_nothing_can_be_held_to(format: str) -> None:
    of_a = {"type": "integer", "not": {"const": 3}}
    schemas = {"add": {"type": "object", "properties": {"a": of_a, "b": {"type": "boolean"}}}}
    for lenient in (("add",), ()):
        text = calls_grammar(format, schemas, spell, one_call=True, lenient=lenient)
        why = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text), TOKENIZER)
        assert (why == "") is bool(lenient), why


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_markers_may_be_special_tokens(format: str) -> None:
    """As in the vocabularies that models of a format come with."""
    inner = tokenizers.Tokenizer.from_str(tokenizer_json())
    inner.add_special_tokens(
        re.findall(r"</?[a-z_|:\"]+>|\[[A-Z_]+\]", " ".join(TOOL_FORMATS[format].markers))
    )
    tokenizer = Tokenizer(inner.to_str(), {}, None)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in SCHEMAS.items()
    ]
    formats, grammars = Formats(tokenizer, format, NONE), Grammars(tokenizer, (1,))
    for use in (tool_use(tools, "required"), tool_use(tools)):
        grammar = formats.grammar([], formats.reading([], use), use, None)
        assert grammar is not None
        found = grammars.compile("a", grammar).matcher
        wrong = WRITTEN[format].replace("true", "1")
        for text, is_allowed in ((WRITTEN[format], True), (wrong, False)):
            one = found.deep_copy()
            tokens = tokenizer.encode(text, parse_special=True)
            allowed = one.validate_tokens(tokens) == len(tokens)
            assert (allowed and one.consume_tokens(tokens) and one.is_accepting()) is is_allowed


DEEP = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}


@pytest.mark.parametrize("format", FREE)
@pytest.mark.parametrize("thought", ["", "<think>Hm <tool_call> x</think>\n"])
@pytest.mark.parametrize(
    ("kind", "text", "answer", "wrong"),
    [
        (GrammarKind.JSON_SCHEMA, json.dumps(DEEP), '{"deep": true}', '{"deep": 1}'),
        (GrammarKind.JSON_SCHEMA, '{"maxProperties": 1, "type": "object"}', '{"name": "clock"}', "x"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array"}', '["add"]', "[add(1)]"),
        (GrammarKind.REGEX, "yes|no", "yes", "yes."),
    ],
)
def test_a_reply_is_calls_or_the_answer_that_was_asked_for(
    format: str, thought: str, kind: GrammarKind, text: str, answer: str, wrong: str
) -> None:
    thinking = ("<think>", "</think>") if thought else None
    frame = calls_grammar(format, SCHEMAS, spell, one_call=True, thinking=thinking, beside=Beside.ANSWER)
    found = LLMatcher(TOKENIZER, source_of(Grammar(GrammarKind.LARK, frame, Grammar(kind, text))))
    for said in (answer, WRITTEN[format]):
        assert accepts(found.deep_copy(), thought + said)
    for said in (wrong, WRITTEN[format].replace("true", "1"), answer + WRITTEN[format]):
        assert not accepts(found.deep_copy(), thought + said)

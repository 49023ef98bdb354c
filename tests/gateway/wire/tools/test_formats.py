"""Each format of calls: what its texts come to, whole and in whatever pieces they come."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from penstock.gateway.wire.parsing import Answer, ReplyParser, answer_of
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.tools.formats import TOOL_FORMATS, Style

SCHEMAS = {
    "clock": {"type": "object", "properties": {"zone": {"type": "string"}}},
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "exact": {"type": "boolean"},
            "tags": {"type": "array"},
        },
    },
}

Calls = list[tuple[str, Any]]

# Format, text, what is said beside the calls, the calls.
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", "Hello, world.\n", "Hello, world.\n", []),
    (
        "hermes",
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>',
        "",
        [("clock", {"zone": "UTC"})],
    ),
    (
        "hermes",
        'Let me see.\n\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": 1, "b": [2, {"c": "}\\""}]}, "name": "add"}\n</tool_call>\n',
        "Let me see.",
        [("clock", {}), ("add", {"a": 1, "b": [2, {"c": '}"'}]})],
    ),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", [("clock", {})]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": null}</tool_call>', "", [("clock", {})]),
    (
        "hermes",
        '<tool_call>{"id": 7, "name": "clock", "arguments": "{\\"zone\\": \\"UTC\\"}"}</tool_call>',
        "",
        [("clock", {"zone": "UTC"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": {"zone": "a</tool_call>b"}, "id": "x", "n": 1}</tool_call> Done.',
        "Done.",
        [("clock", {"zone": "a</tool_call>b"})],
    ),
    ("hermes", "<tool_call>\nnot JSON\n</tool_call>", "<tool_call>\nnot JSON\n</tool_call>", []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    # The last bracket is forgotten.
    (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}\n</tool_call>',
        "",
        [("clock", {"zone": "UTC"})],
    ),
    ("llama3_json", "Hello.", "Hello.", []),
    ("llama3_json", " ", " ", []),
    (
        "llama3_json",
        '{"name": "clock", "parameters": {"zone": "UTC"}}',
        "",
        [("clock", {"zone": "UTC"})],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}; '
        '{"name": "add", "parameters": {"a": 1}}',
        "",
        [("clock", {}), ("add", {"a": 1})],
    ),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", "[add(a=1)]", "", [("add", {"a": 1})]),
    (
        "llama3_json",
        '{"name": "clock", "parameters": {}}{"name": "add", "parameters": {"a": 1}} Done.',
        "Done.",
        [("clock", {}), ("add", {"a": 1})],
    ),
    ("llama3_json", '{"name": "clock", "parameters": {}}{"a": 1}', '{"a": 1}', [("clock", {})]),
    (
        "llama4_json",
        '<|python_start|><|python_end|>{"name": "clock", "parameters": {"zone": "UTC"}}',
        "",
        [("clock", {"zone": "UTC"})],
    ),
    (
        "llama4_json",
        '<|python_start|>I look,\nthen. <|python_end|>{"name": "clock", "parameters": {"zone": "UTC"}}',
        "I look,\nthen.",
        [("clock", {"zone": "UTC"})],
    ),
    (
        "llama_pythonic",
        "<|python_start|>I look.<|python_end|>\n[clock(), add(a=1)] Done.<|python_start|>[clock()]<|python_end|>",
        "I look.Done.",
        [("clock", {}), ("add", {"a": 1}), ("clock", {})],
    ),
    (
        "llama4_json",
        "<|python_start|>I look.<|python_end|>[clock(zone=]",
        "<|python_start|>I look.<|python_end|>[clock(zone=]",
        [],
    ),
    ("llama4_json", "<|python_start|>I look.", "<|python_start|>I look.", []),
    (
        "llama4_json",
        "I look.<|python_start|>[clock(zone='UTC')]<|python_end|>",
        "I look.",
        [("clock", {"zone": "UTC"})],
    ),
    (
        "llama4_json",
        "<|python_start|>print(1)<|python_end|>",
        "<|python_start|>print(1)<|python_end|>",
        [],
    ),
    ("llama4_json", "<|python_start|><|python_end|>1", "<|python_start|><|python_end|>1", []),
    ("llama_pythonic", '{"name": "clock", "parameters": {}}', "", [("clock", {})]),
    (
        "llama_pythonic",
        '[{"name": "clock", "parameters": {}}, {"name": "add", "arguments": {"a": 1}}]',
        "",
        [("clock", {}), ("add", {"a": 1})],
    ),
    ("llama_pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("llama_pythonic", "[nothing(a=1)]", "[nothing(a=1)]", []),
    ("llama_pythonic", "[clock()]", "", [("clock", {})]),
    (
        "llama_pythonic",
        "<|python_start|>[clock(zone='it\\'s, \"UTC\"'), add(a=-1, b=None, exact=True, tags=['x)', {'y': (1, 2.5)}])]"
        "<|python_end|>",
        "",
        [
            ("clock", {"zone": 'it\'s, "UTC"'}),
            ("add", {"a": -1, "b": None, "exact": True, "tags": ["x)", {"y": [1, 2.5]}]}),
        ],
    ),
    ("llama_pythonic", "[add(a=true, b=null)]", "", [("add", {"a": True, "b": None})]),
    ("llama_pythonic", '[clock(zone="\\d")]', "", [("clock", {"zone": "\\d"})]),
    ("llama_pythonic", "[clock(zone=now())]", "[clock(zone=now())]", []),
    ("llama_pythonic", "[clock(zone=]})]", "[clock(zone=]})]", []),
    (
        "mistral",
        'Sure.[TOOL_CALLS] [{"name": "clock", "arguments": {"zone": "UTC"}}, {"name": "add", "arguments": {"a": 1}}]',
        "Sure.",
        [("clock", {"zone": "UTC"}), ("add", {"a": 1})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]clock[ARGS]{"zone": "UTC"}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}',
        "",
        [("clock", {"zone": "UTC"}), ("add", {"a": 1})],
    ),
    ("mistral", '[TOOL_CALLS]clock{"zone": "UTC"}', "", [("clock", {"zone": "UTC"})]),
    ("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    ("mistral", "[TOOL", "[TOOL", []),
    (
        "mistral",
        '[TOOL_CALLS][TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS] [TOOL_CALLS][{"name": "clock", "arguments": {}}]',
        "[TOOL_CALLS][TOOL_CALLS]",
        [("clock", {}), ("clock", {})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[add(a=tru<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
        "<|tool_call_start|>[add(a=tru",
        [("add", {"a": 1})],
    ),
    (
        "glm45",
        "<tool_call>clock<arg_key>zo<tool_call>clock</tool_call>",
        "<arg_key>zo",
        [("clock", {}), ("clock", {})],
    ),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=clock>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("clock", {"zone": "UTC"})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2.5\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=tags>\n[\n1]\n</parameter>\n</function>\n</tool_call>\n",
        "",
        [("add", {"a": 1, "b": 2.5, "exact": True, "tags": [1]})],
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=clock>\n<parameter=zone>\n\n a "b"\n\t<c>\n\n</parameter>\n</function>\n</tool_call>'
        "<tool_call><function=clock></function></tool_call>",
        "",
        [("clock", {"zone": '\n a "b"\n\t<c>\n'}), ("clock", {})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=add><parameter=a>one<parameter=b>2</function></tool_call>",
        "",
        [("add", {"a": "one", "b": 2})],
    ),
    ("qwen3_coder", "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    (
        "qwen3_coder",
        "<tool_call><function=add><parameter=tags>\n['x', None]\n</parameter></function></tool_call>",
        "",
        [("add", {"tags": ["x", None]})],
    ),
    (
        "seed_oss",
        "So.\n<seed:tool_call>\n<function=clock>\n<parameter=zone>\n a </parameter>\n</function>\n</seed:tool_call>"
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=exact>False</parameter>\n"
        "</function>\n</seed:tool_call>",
        "So.",
        [("clock", {"zone": "\n a "}), ("add", {"a": 1, "exact": False})],
    ),
    (
        "minimax_m2",
        'So.\n<minimax:tool_call>\n<invoke name="clock">\n<parameter name="zone">a "<b>"\n</parameter>\n</invoke>\n'
        '<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="tags">["x"]</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "So.",
        [("clock", {"zone": 'a "<b>"\n'}), ("add", {"a": 1, "tags": ["x"]})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="clock"></invoke></minimax:tool_call>\n<minimax:tool_call>\n'
        '<invoke name="add">',
        "",
        [("clock", {}), ("add", {})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<tool name="clock">',
        '<minimax:tool_call>\n<tool name="clock">',
        [],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=clock>\n</function>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("clock", {}), ("add", {"a": 1})],
    ),
    (
        "glm45",
        'Well.\n<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>a <b> "c"\n</arg_value>\n</tool_call>\n'
        "<tool_call>clock</tool_call>",
        "Well.",
        [("clock", {"zone": 'a <b> "c"\n'}), ("clock", {})],
    ),
    (
        "glm45",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>tags</arg_key><arg_value>[1]</arg_value>"
        "</tool_call>",
        "",
        [("add", {"a": 1, "tags": [1]})],
    ),
    (
        "hunyuan_dense",
        'So.\n<tool_calls><tool_call>clock\n```json\n{"zone": "``` </tool_call>"}\n```</tool_call>\n'
        "<tool_call>add\n```json\n{}\n```</tool_call></tool_calls>\n",
        "So.",
        [("clock", {"zone": "``` </tool_call>"}), ("add", {})],
    ),
    (
        "hunyuan_dense",
        '<tool_calls>\n<tool_call> clock\n{"zone": "UTC"}\n```\n</tool_call>\n</tool_calls> Done.',
        "Done.",
        [("clock", {"zone": "UTC"})],
    ),
    ("hunyuan_dense", "<tool_calls>clock</tool_calls>", "<tool_calls>clock</tool_calls>", []),
    ("hunyuan_dense", "<tool_calls><tool_call>clock x", "<tool_calls><tool_call>clock x", []),
    (
        "functionary",
        'So. <function=clock>{"zone": "</function>"}</function><function=add>\n{"a": 1}\n</function>',
        "So.",
        [("clock", {"zone": "</function>"}), ("add", {"a": 1})],
    ),
    ("functionary", "f<function=x>y</function>", "f<function=x>y</function>", []),
    (
        "minicpm5",
        'So.\n<function name="add"><param name="a">1</param><param name="tags">["x"]</param></function>\n'
        '<function name="clock"><param name="zone">a & b\n</param></function>',
        "So.",
        [("add", {"a": 1, "tags": ["x"]}), ("clock", {"zone": "a & b\n"})],
    ),
    (
        "minicpm5",
        '<function name="clock">\n<param name="zone"><![CDATA[</param> ]] </function>\n]]></param>\n'
        '<param name="b"><![CDATA[<]]></param></function> Done.',
        "Done.",
        [("clock", {"zone": "</param> ]] </function>\n", "b": "<"})],
    ),
    ("minicpm5", '<function name="clock"></function>', "", [("clock", {})]),
    ("minicpm5", '<function name="a b">', '<function name="a b">', []),
    ("glm45", "<tool_call>hello world</tool_call>", "<tool_call>hello world</tool_call>", []),
    ("glm45", "<tool_call>clock <", "<tool_call>clock <", []),
    ("glm45", "<tool_call>clock<arg_key>zone</arg_key>UTC", "<arg_key>zone</arg_key>UTC", [("clock", {})]),
    (
        "gemma4",
        'Hm.<|tool_call>call:clock{zone:<|"|>a, "b": {<}\n<|"|>}<tool_call|><|tool_call>call:clock{}<tool_call|>',
        "Hm.",
        [("clock", {"zone": 'a, "b": {<}\n'}), ("clock", {})],
    ),
    (
        "gemma4",
        '<|tool_call>call:add{a:-1.5,b:None,exact:true,tags:[<|"|>x<|"|>,{y:[ ],"z":"<|\\"|>",'
        '<|"|>k<|"|>:{}},]}<tool_call|>',
        "",
        [("add", {"a": -1.5, "b": None, "exact": True, "tags": ["x", {"y": [], "z": '<|"|>', "k": {}}]})],
    ),
    (
        "gemma4",
        "<|tool_call>call:clock{zone: Europe/Rome }<tool_call|>",
        "",
        [("clock", {"zone": "Europe/Rome"})],
    ),
    ("gemma4", "<|tool_call>clock()<tool_call|>", "<|tool_call>clock()<tool_call|>", []),
    ("gemma4", "<|tool_call>call:clock[]<tool_call|>", "<|tool_call>call:clock[]<tool_call|>", []),
    (
        "cohere2",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "clock", "parameters": {"zone": "UTC"}},\n'
        '    {"tool_call_id": "1", "tool_name": "add", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        "",
        [("clock", {"zone": "UTC"}), ("add", {"a": 1})],
    ),
    (
        "hunyuan",
        'I call.\n<tool_calls>[{"name": "clock", "arguments": {"zone": "UTC"}}, {"name": "clock"}]</tool_calls>',
        "I call.",
        [("clock", {"zone": "UTC"}), ("clock", {})],
    ),
    ("hunyuan", "<tool_calls>[]</tool_calls>", "<tool_calls>[]</tool_calls>", []),
    (
        "olmo3",
        "<function_calls>\nclock(zone='UTC')\nadd(a=1, b=null, exact=true)\n</function_calls>",
        "",
        [("clock", {"zone": "UTC"}), ("add", {"a": 1, "b": None, "exact": True})],
    ),
    ("olmo3", "<function_calls>\nclock()", "", [("clock", {})]),
    ("olmo3", "<function_calls>nothing()</function_calls>", "<function_calls>nothing()</function_calls>", []),
    (
        "lfm2",
        'Let me see: <|tool_call_start|>[clock(zone="UTC"), add(a=1)]<|tool_call_end|> So.',
        "Let me see:So.",
        [("clock", {"zone": "UTC"}), ("add", {"a": 1})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>clock()<|tool_call_end|>",
        "<|tool_call_start|>clock()<|tool_call_end|>",
        [],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "clock", "arguments": {"zone": "UTC"}}, {"name": "add"}]<|tool_call_end|>',
        "",
        [("clock", {"zone": "UTC"}), ("add", {})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[clock(zone='it's \"a\",\nb\\\\'), "
        "add(tags=['x', {'k': 'v'}, ''], a='', exact='' )]<|tool_call_end|>",
        "",
        [
            ("clock", {"zone": 'it\'s "a",\nb\\'}),
            ("add", {"tags": ["x", {"k": "v"}, ""], "a": "", "exact": ""}),
        ],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[clock(zone='print('a', \"b\")\nplot('c', label='d') + \\\n 'e)', ), clock(zone='f'"
        "<|tool_call_end|>",
        "clock(zone='f'<|tool_call_end|>",
        [("clock", {"zone": "print('a', \"b\")\nplot('c', label='d') + \\\n 'e)"})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[clock(zone='a')<|tool_call_end|>",
        "",
        [("clock", {"zone": "a"})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[clock(zone='''a\n'b', \"c\"''')]<|tool_call_end|>",
        "",
        [("clock", {"zone": "a\n'b', \"c\""})],
    ),
    (
        "nemotron",
        'So.\n<TOOLCALL>[{"name": "clock", "arguments": {"zone": "UTC"}}, '
        '{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>',
        "So.",
        [("clock", {"zone": "UTC"}), ("add", {"a": 1})],
    ),
    (
        "functools",
        'functools[{"name": "clock", "arguments": {"zone": "UTC"}}, {"name": "add", "arguments": {"a": 1}}]',
        "",
        [("clock", {"zone": "UTC"}), ("add", {"a": 1})],
    ),
    ("functools", "import functools\nfunctools.cache", "import functools\nfunctools.cache", []),
    (
        "phi4_mini",
        '<|tool_call|>[{"name": "clock", "arguments": {"zone": "UTC"}}]<|/tool_call|>',
        "",
        [("clock", {"zone": "UTC"})],
    ),
    (
        "phi4_mini",
        '<|tool_call|>{"name": "clock", "parameters": {}}, {"name": "add", "arguments": {"a": 1}}<|/tool_call|>',
        "",
        [("clock", {}), ("add", {"a": 1})],
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "clock", "arguments": {"zone": "UTC"}}, {"name": "add", "arguments": {"a": 1}}]',
        "",
        [("clock", {"zone": "UTC"}), ("add", {"a": 1})],
    ),
    ("granite", "<|tool_call|>none", "<|tool_call|>none", []),
    ("glm4", 'clock\n{"zone": "UTC"}', "", [("clock", {"zone": "UTC"})]),
    ("glm4", '\nclock\n{"zone": "UTC"} It is.', "It is.", [("clock", {"zone": "UTC"})]),
    ("glm4", "clock\nThe clock is a tool.", "clock\nThe clock is a tool.", []),
    ("glm4", 'Hello.\n{"zone": "UTC"}', 'Hello.\n{"zone": "UTC"}', []),
]


def parser(format: str) -> ReplyParser:
    return Reading(tools=format, schemas=SCHEMAS).parser("chatcmpl-1")


def in_pieces(parser: ReplyParser, texts: list[str]) -> Answer:
    answer = Answer()
    for text in texts:
        answer.add(parser.feed(text))
    answer.add(parser.finish())
    return answer


@pytest.mark.parametrize(("format", "text", "said", "calls"), CASES)
def test_a_text_comes_to_what_it_says(format: str, text: str, said: str, calls: Calls) -> None:
    answer = answer_of(parser(format), text)
    assert answer.text == said
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert len({call.id for call in answer.calls}) == len(calls)


@pytest.mark.parametrize(("format", "text"), [case[:2] for case in CASES])
def test_how_a_text_is_cut_changes_nothing(format: str, text: str) -> None:
    whole = answer_of(parser(format), text)
    assert in_pieces(parser(format), list(text)) == whole
    rng = random.Random(text)
    for _ in range(5):
        cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(4))})
        assert in_pieces(parser(format), [text[a:b] for a, b in itertools.pairwise(cuts)]) == whole


@pytest.mark.parametrize(("format", "text"), [case[:2] for case in CASES])
def test_a_text_may_end_anywhere(format: str, text: str) -> None:
    """Nothing that was said or argued is taken back, and no text is lost that is no call's."""
    for end in range(len(text)):
        cut, stream = answer_of(parser(format), text[:end]), parser(format)
        shown = Answer()
        shown.add(stream.feed(text[:end]))
        assert cut.text.startswith(shown.text)
        assert [call.name for call in cut.calls][: len(shown.calls)] == [call.name for call in shown.calls]
        if not cut.calls:
            assert cut.text == text[:end]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "clock", "arguments": {}}</tool_ca',
        '<tool_call>\n{"name": "clock", "arguments": {}}\n<',
        "<tool_call><function=clock></function></tool_call",
        "<tool_call><function=clock></func",
        "<|python_start|>[clock()]<|pyth",
    ],
)
def test_a_call_that_is_cut_off_in_its_end_leaves_no_text(text: str) -> None:
    format = (
        "qwen3_coder" if "<function=" in text else "hermes" if text.startswith("<tool") else "llama_pythonic"
    )
    answer = answer_of(parser(format), text)
    assert [call.name for call in answer.calls] == ["clock"]
    assert answer.text == ""


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_arguments_come_as_they_are_written(format: str) -> None:
    """Long before the call is complete."""
    begun = {
        "cohere2": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "clock", "parameters": {"zone": "aaaaaaaa',
        "functionary": '<function=clock>{"zone": "aaaaaaaa',
        "functools": 'functools[{"name": "clock", "arguments": {"zone": "aaaaaaaa',
        "gemma4": '<|tool_call>call:clock{zone:<|"|>aaaaaaaa',
        "glm4": 'clock\n{"zone": "aaaaaaaa',
        "glm45": "<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>aaaaaaaa",
        "granite": '<|tool_call|>[{"name": "clock", "arguments": {"zone": "aaaaaaaa',
        "harmony": '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "aaaaaaaa',
        "hermes": '<tool_call>{"name": "clock", "arguments": {"zone": "aaaaaaaa',
        "hunyuan": '<tool_calls>[{"name": "clock", "arguments": {"zone": "aaaaaaaa',
        "hunyuan_dense": '<tool_calls><tool_call>clock\n```json\n{"zone": "aaaaaaaa',
        "lfm2": '<|tool_call_start|>[add(a=1, b="aaaaaaaa',
        "llama3_json": '{"name": "clock", "parameters": {"zone": "aaaaaaaa',
        "llama4_json": '{"name": "clock", "parameters": {"zone": "aaaaaaaa',
        "llama_pythonic": '[add(a=1, b="aaaaaaaa',
        "minicpm5": '<function name="clock"><param name="zone"><![CDATA[aaaaaaaa',
        "minimax_m2": '<minimax:tool_call>\n<invoke name="clock">\n<parameter name="zone">aaaaaaaa',
        "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {"zone": "aaaaaaaa',
        "mistral_args": '[TOOL_CALLS]clock[ARGS]{"zone": "aaaaaaaa',
        "nemotron": '<TOOLCALL>[{"name": "clock", "arguments": {"zone": "aaaaaaaa',
        "olmo3": "<function_calls>\nadd(a=1, b='aaaaaaaa",
        "phi4_mini": '<|tool_call|>[{"name": "clock", "arguments": {"zone": "aaaaaaaa',
        "qwen3_coder": "<tool_call>\n<function=clock>\n<parameter=zone>\naaaaaaaa",
        "seed_oss": "<seed:tool_call>\n<function=clock>\n<parameter=zone>aaaaaaaa",
    }
    answer = Answer()
    answer.add(parser(format).feed(begun[format]))
    expected = '{"a": 1' if TOOL_FORMATS[format].style is Style.PYTHON else '{"zone": "aaaaaaaa'
    assert answer.calls[0].arguments == expected


def test_random_rubbish_is_never_too_much() -> None:
    """Each way of cutting it gives the same, and no parser fails."""
    rng = random.Random(16)
    words = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "clock"',
        ', "arguments": ',
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ":",
    ]
    words += [
        "<|python_tag|>",
        "<|python_start|>",
        "clock(",
        "zone=",
        "'a'",
        ")",
        ",",
        "[TOOL_CALLS]",
        "[ARGS]",
    ]
    words += [
        "<function=clock>",
        "<parameter=zone>",
        "</parameter>",
        "</function>",
        "\n",
        " ",
        "1",
        "null",
        ";",
    ]
    words += [
        "clock\n",
        "call:clock{",
        "zone:",
        "<arg_key>zone</arg_key>",
        "<arg_value>",
        '"tool_name": "clock",',
    ]
    for name, format in TOOL_FORMATS.items():
        own = [*words, *format.markers * 4, format.opening * 2 or "["]
        for _ in range(100):
            texts = rng.choices(own, k=rng.randrange(1, 25))
            assert in_pieces(parser(name), texts) == answer_of(parser(name), "".join(texts)), texts


def test_ids_are_the_same_for_the_same_reply_and_no_other() -> None:
    text = '[TOOL_CALLS][{"name": "clock", "arguments": {}}]'
    reading = Reading(tools="mistral", schemas=SCHEMAS)
    ids = [
        answer_of(reading.parser(*place), text).calls[0].id
        for place in (("a", 0), ("a", 0), ("a", 1), ("b", 0))
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert all(len(found) == 9 and found.isalnum() for found in ids)


def test_values_within_values_have_an_end() -> None:
    text = "<|tool_call>call:add{tags:" + "[" * 5000
    answer = in_pieces(parser("gemma4"), [text])
    assert [call.name for call in answer.calls] == ["add"]

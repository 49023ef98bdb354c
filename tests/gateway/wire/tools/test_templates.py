"""Chat templates of the forms that makers ship: the format is known by them, and a history reads as it was written.

The templates are written here; they have only in common with the makers' what their calls and reasoning look like.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from penstock.engine.text.grammar import GrammarKind
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.errors import ApiError
from penstock.gateway.wire.conversation import as_call
from penstock.gateway.wire.parsing import Answer
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.reading import Formats, Reading
from penstock.gateway.wire.tools.formats import TOOL_FORMATS
from penstock.gateway.wire.tools.use import tool_use
from tests.gateway.harness import make_tokenizer, tokenizer_json

OBJECTS = (
    "{% for c in calls %}{{ {'name': c.name, 'arguments': c.arguments} | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}"
)
PYTHON = (
    "{% for c in calls %}{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ SEPARATOR if not loop.last }}{% endfor %}"
)
PARAMETERS = (
    "{% for k, v in c.arguments.items() %}<parameter={{ k }}>{{ PAD }}"
    "{{ v if v is string else v | tojson }}{{ PAD }}</parameter>{{ LINE }}{% endfor %}"
)

# What a template says of a call, and the format and the reasoning that it is known for.
TEMPLATES: dict[str, tuple[str, str, str | None]] = {
    "Qwen 3, SmolLM3": (
        "{% for c in calls %}<tool_call>{{ LINE }}{{ {'name': c.name, 'arguments': c.arguments} | tojson }}{{ LINE }}"
        "</tool_call>{{ LINE }}{% endfor %}{# <think></think> #}",
        "hermes",
        "think",
    ),
    "EXAONE 4": (
        "{% for c in calls %}<tool_call>{{ {'name': c.name, 'arguments': c.arguments} | tojson }}</tool_call>"
        "{{ LINE }}{% endfor %}{{ '<think>' if thinks }}{{ '</think>' if thinks }}",
        "hermes",
        "think",
    ),
    "Granite 4": (
        "{% for c in calls %}<tool_call>" + OBJECTS.replace("calls", "[c]") + "</tool_call>{% endfor %}",
        "hermes",
        None,
    ),
    "ERNIE 4.5": (
        "{% for c in calls %}{{ LINE }}<tool_call>{{ LINE }}"
        + OBJECTS.replace("calls", "[c]")
        + "{{ LINE }}</tool_call>"
        "{% endfor %}{{ '<think></think><response></response>' if thinks }}",
        "hermes",
        "think_response",
    ),
    "gpt-oss": (
        "{% for c in calls %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
        "{{ c.arguments | tojson }}<|call|>{% endfor %}{# <|channel|>analysis<|message|><|end|> #}"
        "{# <|channel|>final<|message|><|return|> #}",
        "harmony",
        "harmony",
    ),
    "MiniMax M2": (
        '{{ LINE }}<minimax:tool_call>{{ LINE }}{% for c in calls %}<invoke name="{{ c.name }}">{{ LINE }}'
        '{% for k, v in c.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}'
        "</parameter>{{ LINE }}{% endfor %}</invoke>{{ LINE }}{% endfor %}</minimax:tool_call>"
        "{{ '<think></think><response></response>' if thinks }}",
        "minimax_m2",
        "minimax_m2",
    ),
    "Qwen 3 Coder": (
        "{% for c in calls %}<tool_call>{{ LINE }}<function={{ c.name }}>{{ LINE }}"
        + PARAMETERS.replace("PAD", "LINE")
        + "</function>{{ LINE }}</tool_call>{% endfor %}",
        "qwen3_coder",
        None,
    ),
    "Qwen 3.5, Nemotron 3": (
        "{% for c in calls %}<tool_call>{{ LINE }}<function={{ c.name }}>{{ LINE }}"
        + PARAMETERS.replace("PAD", "LINE").replace(
            "v is string else v | tojson", "v is string or v is not iterable else v | tojson"
        )
        + "</function>{{ LINE }}</tool_call>{{ LINE }}{% endfor %}{{ '<think></think>' if thinks }}",
        "qwen3_coder",
        "think",
    ),
    "Seed-OSS": (
        "{% for c in calls %}<seed:tool_call>{{ LINE }}<function={{ c.name }}>{{ LINE }}"
        + PARAMETERS.replace("PAD", "''")
        + "</function>{{ LINE }}</seed:tool_call>{% endfor %}{{ '<seed:think></seed:think>' if thinks }}",
        "seed_oss",
        "seed_oss",
    ),
    "GLM 4.5": (
        "{% for c in calls %}<tool_call>{{ c.name }}{{ LINE }}"
        "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "{{ LINE }}<arg_value>{{ v if v is string else v | tojson }}</arg_value>{{ LINE }}{% endfor %}</tool_call>"
        "{% endfor %}{{ '<think></think>' if thinks }}",
        "glm45",
        "think",
    ),
    "GLM 4.7": (
        "{% for c in calls %}<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}",
        "glm45",
        None,
    ),
    "GLM 4 0414": (
        "{{ calls[0].name }}{{ LINE }}{{ calls[0].arguments | tojson }}{# 请使用 Json 格式表示调用的参数。 #}",
        "glm4",
        None,
    ),
    "Gemma 4": (
        "{% macro v(x) %}{% if x is string %}<|\"|>{{ x }}<|\"|>{% elif x is mapping %}{{ '{' }}"
        "{% for k in x %}{{ k }}:"
        "{{ v(x[k]) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif x is iterable %}["
        "{% for y in x %}{{ v(y) }}"
        "{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ x | tojson }}{% endif %}{% endmacro %}"
        "{% for c in calls %}<|tool_call>call:{{ c.name }}{{ v(c.arguments) }}<tool_call|>{% endfor %}"
        "{{ '<|channel>thought<channel|>' if thinks }}",
        "gemma4",
        "gemma4",
    ),
    "Mistral 7B 0.3": ("[TOOL_CALLS] [" + OBJECTS + "]", "mistral", None),
    "Mistral Small 3.2": (
        "{% for c in calls %}[TOOL_CALLS]{{ c.name }}[CALL_ID]123456789[ARGS]{{ c.arguments | tojson }}{% endfor %}",
        "mistral_args",
        None,
    ),
    "Ministral 3": (
        "{% for c in calls %}[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}{% endfor %}"
        "{{ '[THINK][/THINK]' if thinks }}",
        "mistral_args",
        "mistral",
    ),
    "Phi-4-mini, the marker": ("<|tool_call|>[" + OBJECTS + "]<|/tool_call|>", "phi4_mini", None),
    "Phi-4-mini, the word": ("functools[" + OBJECTS + "]", "functools", None),
    "Granite 3": (
        "<|tool_call|>[" + OBJECTS + "]{{ '<think></think><response></response>' if thinks }}",
        "granite",
        "think_response",
    ),
    "Hunyuan": (
        "<tool_calls>[" + OBJECTS + "]</tool_calls>{{ '<think></think><answer></answer>' if thinks }}",
        "hunyuan",
        "think_answer",
    ),
    "Hunyuan, 0.5B to 4B": (
        "<tool_calls>{% for c in calls %}<tool_call>{{ c.name }}{{ LINE }}```json{{ LINE }}{{ c.arguments | tojson }}"
        "{{ LINE }}```</tool_call>{{ LINE if not loop.last }}{% endfor %}</tool_calls>"
        "{{ '<think></think><answer></answer>' if thinks }}",
        "hunyuan_dense",
        "think_answer",
    ),
    "Functionary 3.1": (
        "{# <|python_tag|> #}{% for c in calls %}<function={{ c.name }}>{{ c.arguments | tojson }}</function>"
        "{% endfor %}",
        "functionary",
        None,
    ),
    "MiniCPM 5": (
        '{% for c in calls %}{{ LINE if not loop.first }}<function name="{{ c.name }}">'
        '{% for k, v in c.arguments.items() %}<param name="{{ k }}">'
        "{% if v is string and '<' in v %}<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}</param>{% endfor %}"
        "</function>{% endfor %}{{ '<think></think>' if thinks }}",
        "minicpm5",
        "think",
    ),
    "Cohere": (
        "<|START_ACTION|>[{% for c in calls %}{{ LINE }}{{ {'tool_call_id': loop.index0 | string, 'tool_name': c.name, "
        "'parameters': c.arguments} | tojson }}{{ ',' if not loop.last }}{% endfor %}]<|END_ACTION|>"
        "{{ '<|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>' if thinks }}",
        "cohere2",
        "cohere2",
    ),
    "OLMo 3": (
        "<function_calls>{{ LINE }}" + PYTHON.replace("SEPARATOR", "LINE") + "{{ LINE }}</function_calls>",
        "olmo3",
        None,
    ),
    "LFM2": (
        "<|tool_call_start|>[" + PYTHON.replace("SEPARATOR", "', '") + "]<|tool_call_end|>",
        "lfm2",
        None,
    ),
    "LFM2.5": (
        "<|tool_call_start|>["
        + PYTHON.replace(
            "v | tojson", "QUOTE ~ v ~ QUOTE if v is string else v | tojson if v is mapping else v"
        )
        .replace("QUOTE", '"\'"')
        .replace("SEPARATOR", "', '")
        + "]<|tool_call_end|>{{ '</think>' if thinks }}",
        "lfm2",
        "think",
    ),
    "Nemotron Nano 2": (
        "<TOOLCALL>[" + OBJECTS + "]</TOOLCALL>{{ '<think></think>' if thinks }}",
        "nemotron",
        "think",
    ),
    "Llama 4": (
        "{# [func_name1(a=1)] #}[" + PYTHON.replace("SEPARATOR", "', '") + "]",
        "llama_pythonic",
        None,
    ),
    "Llama 4, in JSON": (
        "<|python_start|>{{ m.content }}<|python_end|>{% for c in calls %}"
        "{{ {'name': c.name, 'parameters': c.arguments} | tojson }}{% endfor %}",
        "llama4_json",
        None,
    ),
    "Llama 3.1": (
        "{% for c in calls %}<|python_tag|>{{ {'name': c.name, 'parameters': c.arguments} | tojson }}{% endfor %}",
        "llama3_json",
        None,
    ),
}
FRAME = (
    "{% set LINE = '\\n' %}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<"
    "{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{% set calls = m.tool_calls | map(attribute='function') | list %}CALLS"
    "{% endif %}{% endfor %}<end>"
)
PARAMETER_TYPES = {"text": "string", "n": "integer", "flag": "boolean", "all": "array", "of": "object"}
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {k: {"type": kind} for k, kind in PARAMETER_TYPES.items()},
        },
    },
}
CALLS: list[dict[str, Any]] = [
    {"text": 'a "b", <c>\n{d}: é', "n": -3, "flag": True, "all": [1, "x", None], "of": {"k": "v", "e": {}}},
    {},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_history_reads_as_it_was_written(name: str) -> None:
    calls, format, reasoning = TEMPLATES[name]
    tokenizer = make_tokenizer(FRAME.replace("CALLS", calls))
    formats = Formats(tokenizer)
    assert (formats.tools, formats.reasoning) == (format, reasoning)
    arguments = CALLS[:1] if format in ("glm4", "llama3_json") else CALLS
    told = {
        "role": "assistant",
        "content": "",
        "tool_calls": [as_call("abcdefghi", "note", json.dumps(of)) for of in arguments],
    }
    prompt = Prompts(tokenizer).chat(
        [{"role": "user", "content": "Hi"}, told], add_generation_prompt=False, tools=[TOOL]
    )
    text = tokenizer.decode(prompt).partition("<assistant>")[2].removesuffix("<end>")
    parser, answer = formats.reading(prompt, tool_use([TOOL])).parser("a"), Answer()
    for character in text:
        answer.add(parser.feed(character))
    answer.add(parser.finish())
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        ("note", of) for of in arguments
    ], text
    assert answer.text == ""


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_a_template_finds_reasoning_under_either_name(name: str) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.NAME }}{% endfor %}".replace("NAME", name))
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert tokenizer.decode(Prompts(tokenizer).chat([message])) == "Hm."


def test_each_format_has_a_template() -> None:
    assert {format for _, format, _ in TEMPLATES.values()} == set(TOOL_FORMATS)


@pytest.mark.parametrize("messages", [[], [{"role": "system", "content": "Be kind."}]])
def test_a_template_may_have_the_tools_in_its_system_message(messages: list[dict[str, str]]) -> None:
    template = (
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
        "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    assert Formats(tokenizer).tools == "phi4_mini"
    said = [*messages, {"role": "user", "content": "Hi"}]
    text = tokenizer.decode(Prompts(tokenizer).chat(said, tools=[TOOL]))
    before, _, rest = text.partition("<|tool|>")
    tools, _, after = rest.partition("<|/tool|>")
    assert (before, after) == ("<system>" + "Be kind." * len(messages), "<user>Hi")
    assert json.loads(tools) == [TOOL["function"]]
    assert "<|tool|>" not in tokenizer.decode(Prompts(tokenizer).chat(said))


def test_a_template_may_have_calls_as_metadata_and_results_as_observations() -> None:
    """As GLM-4-0414's, which knows neither calls nor the role of their results."""
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
        "{% for m in messages %}{% if m.role in ('user', 'assistant', 'observation') %}"
        "<{{ m.role }}>{{ m.get('metadata', '') }}\n{{ m.content }}{% endif %}{% endfor %}"
    )
    told = [as_call("a", "note", '{"n": 1}'), as_call("b", "note", "not JSON")]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": told},
        {"role": "tool", "tool_call_id": "a", "content": "One."},
        {"role": "assistant", "content": "So.", "tool_calls": told[:1]},
    ]
    tokenizer = make_tokenizer(template)
    text = tokenizer.decode(Prompts(tokenizer).chat(messages, tools=[TOOL]))
    assert text == (
        'note<user>\nHi<assistant>note\n{"n": 1}<assistant>note\nnot JSON<observation>\nOne.'
        '<assistant>\nSo.<assistant>note\n{"n": 1}'
    )


def test_templates_by_name_are_for_requests_with_tools_and_without() -> None:
    """As Command R7B's and Hermes' ones."""
    named = {
        "default": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "tool_use": "{{ bos_token }}{% for t in tools %}<tool_call>{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    }
    config = {"chat_template": [{"name": name, "template": source} for name, source in named.items()]}
    tokenizer = Tokenizer(tokenizer_json(), {"bos_token": "<|bos|>", **config})
    prompts, said = Prompts(tokenizer), [{"role": "user", "content": "Hi"}]
    assert Formats(tokenizer).tools == "hermes"
    assert tokenizer.decode(prompts.chat(said)) == "<user>Hi"
    assert tokenizer.decode(prompts.chat(said, tools=[TOOL])) == "<tool_call>note[user]Hi"


def test_a_template_without_tools_takes_none() -> None:
    """As Gemma 2's and 3's."""
    template = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>{% endfor %}"
    formats, prompts = Formats(make_tokenizer(template)), Prompts(make_tokenizer(template))
    assert (formats.tools, formats.reasoning) == (None, None)
    with pytest.raises(ApiError, match="takes no tools"):
        prompts.chat([{"role": "user", "content": "Hi"}], tools=[TOOL])


def test_markers_that_are_special_tokens_are_shown_and_held_to() -> None:
    """Some are a special token and more."""
    inner = tokenizers.Tokenizer.from_str(tokenizer_json())
    special = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>']
    inner.add_special_tokens(special)
    ids = [inner.token_to_id(text) for text in special]
    tokenizer = Tokenizer(inner.to_str(), {}, FRAME.replace("CALLS", TEMPLATES["Gemma 4"][0]))
    formats, use = Formats(tokenizer), tool_use([TOOL], "required")
    reading = formats.reading([], use)
    assert formats.shown(reading) == set(ids)
    grammar = formats.grammar([], reading, use, None)
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert f'<[{ids[0]}]> "thought"' in grammar.text
    assert all(f"<[{token_id}]>" in grammar.text for token_id in ids)
    parser = Reading(tools="gemma4", reasoning="gemma4", schemas=use.schemas).parser("a")
    answer = Answer()
    answer.add(parser.feed("<|channel>thought\nHm.<channel|><|tool_call>call:note{n:1}<tool_call|>"))
    answer.add(parser.finish())
    assert (answer.reasoning, answer.text, answer.calls[0].arguments) == ("Hm.", "", '{"n": 1}')

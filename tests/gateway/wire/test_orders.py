"""Orders of messages that agents and pages send: every template shows all that is said, each result behind its call."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.wire.conversation import ANSWERED
from penstock.gateway.wire.prompts import Prompts
from tests.gateway.harness import make_tokenizer
from tests.gateway.wire.test_published_templates import TOOLS, WORLD, prompts_of, published

ALTERNATE = """{{ bos_token }}{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(turn=0, wants='') %}{% for m in rest %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endif %}
{%- if m.role == 'user' %}[{{ first or '' }}|{{ m.content }}]{% set first = '' %}
{%- elif m.tool_calls %}{{ m.content }}
{%- for c in m.tool_calls %}<{{ c.id }} {{ c.function.arguments | tojson }}>{% endfor %}
{%- elif m.role == 'tool' %}<{{ m.tool_call_id }}={{ m.content }}>
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}{{ tools or '' }}"""
"""Turns alternate, calls and results between them; the system speaks first or never. As Mistral's are."""
NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- m.role }}:{{ m.content }};{% endfor %}"""
"""As Gemma 2's."""
WORDLESS = """{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<{{ c.id }}>{% endfor %}
{%- else %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}{{ tools or '' }}"""
"""What is said beside calls is left out. As Llama 3's."""
TEXT = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or () %}" + (
    "{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endfor %}{{ tools or '' }}"
)
"""Arguments are JSON's text. As Functionary's."""

TALKS = (
    "system system user",
    "system user assistant system user",
    "user assistant system user",
    "system user assistant system",
    "developer developer user",
    "system developer user",
    "system",
    "user user",
    "system user user assistant user user user",
    "assistant user",
    "system assistant user",
    "user assistant",
    "user nothing user",
    "user assistant assistant user",
)
"""Roles; `nothing` is an assistant that says nothing."""
TALKS_WITH_TOOLS = (
    "user call1 tool1 user",
    "user call1 user tool1",
    "user call1 user tool1 user",
    "user call12 tool1 tool2 user",
    "user call12 tool2 tool1",
    "user assistant call1 tool1 assistant user",
    "user tool1 user",
    "user call1 user",
    "user call12 tool1 user",
    "system system user call1 tool1 user",
    "user call1 tool1 assistant",
    "user call1 tool1 call2 tool2 call3 tool3",
    "user call1 call2 tool1 tool2",
    "developer user call1 tool1 developer user",
)
SPEECHLESS = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "takes no parameter without a description",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "is the half for requests with tools",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "is the half for requests with tools",
    "fireworks-ai-llama-3-firefunction-v2": "wants a variable of its own",
}
"""Published ones that refuse more than an order."""
LAST_USER = {"mistralai-Mistral-Nemo-Instruct-2407"}
"""What the system says is shown where a user speaks last, and not behind results."""
CALLS_UNSEEN = {"LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"}
WORDS_UNSEEN = {"Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"}
"""What is said before calls is left out, and may not stand before them either."""


def talk(roles: str) -> list[dict[str, Any]]:
    """Messages that each say something of their own; the ids of calls and results are what follows their roles."""
    return [_message(role, f"words{number:02d}") for number, role in enumerate(roles.split())]


def _message(role: str, content: str) -> dict[str, Any]:
    if role == "nothing":
        return {"role": "assistant", "content": ""}
    if role.startswith("call"):
        calls = [_call(number) for number in role.removeprefix("call")]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if role.startswith("tool"):
        return {
            "role": "tool",
            "tool_call_id": f"call0000{role[4:]}",
            "name": "get_weather",
            "content": content,
        }
    return {"role": role, "content": content}


def _call(number: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": f"city{number}"}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def rendered(template: str, roles: str) -> str:
    tokenizer = make_tokenizer(template)
    tools = TOOLS if roles in TALKS_WITH_TOOLS else []
    return tokenizer.decode(Prompts(tokenizer).chat(talk(roles), tools=tools), skip_special=False)


SYNTHETIC = [
    (template, roles)
    for template in (ALTERNATE, NO_SYSTEM, WORDLESS, TEXT)
    for roles in TALKS + TALKS_WITH_TOOLS * (template != NO_SYSTEM)
]


@pytest.mark.parametrize(("template", "roles"), SYNTHETIC)
def test_a_template_shows_all_that_is_said(template: str, roles: str) -> None:
    text = rendered(template, roles)
    assert all(message["content"] in text for message in talk(roles))
    assert all(f"call0000{id}" in text or f"city{id}" in text for id in "123" if f"call{id}" in roles)


@pytest.mark.parametrize(
    "roles", ["user call1 user tool1", "user call1 user tool1 user", "user call1 call2 tool1 tool2"]
)
@pytest.mark.parametrize("template", [ALTERNATE, WORDLESS], ids=["alternate", "wordless"])
def test_a_result_stands_behind_its_call(template: str, roles: str) -> None:
    text = rendered(template, roles)
    result = next(message["content"] for message in talk(roles) if message["role"] == "tool")
    between = text[text.index("call00001") : text.index(result)]
    assert "words" not in between
    assert "call00002" not in between


def test_a_turn_behind_results_is_answered_where_a_template_wants_it() -> None:
    assert f"=words02>{ANSWERED}</s>[|words03]" in rendered(ALTERNATE, "user call1 tool1 user")
    assert ANSWERED not in rendered(ALTERNATE, "user call1 tool1 assistant user")
    assert ANSWERED not in rendered(WORDLESS, "user call1 tool1 user")


def test_what_is_said_before_calls_is_a_message_where_a_template_leaves_it_out() -> None:
    messages = [*talk("user"), {**_message("call1", ""), "content": "Let me see."}, *talk("user tool1")[1:]]
    tokenizer = make_tokenizer(WORDLESS)
    text = tokenizer.decode(Prompts(tokenizer).chat(messages, tools=TOOLS))
    assert "assistant:Let me see.;<call00001>tool:" in text


def test_a_template_of_which_nothing_is_seen_gets_messages_as_they_are() -> None:
    silent = "{% for m in messages %}{{ m.role }};{% endfor %}"
    assert rendered(silent, "user user") == "user;user;"


@pytest.mark.skipif(not WORLD.is_dir(), reason="no published templates lie beside the repository")
@pytest.mark.parametrize("roles", TALKS + TALKS_WITH_TOOLS)
def test_published_templates_show_all_that_is_said(roles: str) -> None:
    for name in published().keys() - SPEECHLESS.keys():
        prompts = prompts_of(name)
        takes_tools = "tools" in prompts.variables
        if roles in TALKS_WITH_TOOLS and not takes_tools:
            continue
        ids = prompts.chat(talk(roles), tools=TOOLS if roles in TALKS_WITH_TOOLS else [])
        text = published()[name].decode(ids, skip_special=False)
        unseen = {
            message["content"]
            for i, message in enumerate(talk(roles))
            if (name in LAST_USER and message["role"] in ("system", "developer") and "call" in roles)
            or (name in WORDS_UNSEEN and message["role"] == "assistant" and "call" in roles[i:])
        }
        for message in talk(roles):
            assert message["content"] in text or message["content"] in unseen, name
        for call in (call for message in talk(roles) for call in message.get("tool_calls", ())):
            assert call["function"]["arguments"]["city"] in text or name in CALLS_UNSEEN, name

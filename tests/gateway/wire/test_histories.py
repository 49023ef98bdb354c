"""Histories in the shapes that chat templates look for."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.wire.conversation import as_call
from penstock.gateway.wire.prompts import Prompts
from tests.gateway.harness import make_tokenizer

USER = {"role": "user", "content": "Hi"}
CALLS = [as_call("a", "note", '{"n": 1}'), as_call("b", "ask", '{"n": 2}')]


def result(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def answer(content: str, reasoning: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        found["reasoning_content"] = reasoning
    return found | ({"tool_calls": calls} if calls else {})


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = make_tokenizer(template)
    return tokenizer.decode(Prompts(tokenizer).chat(messages))


# As gpt-oss's: one call a message, whose name the results take; reasoning or what is said, not both.
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.thinking and m.content %}{{ raise_exception('both') }}"
    "{% elif m.thinking %}({{ m.thinking }}){% endif %}"
    "{% set c = m.tool_calls[0].function %}[{{ c.name }} {{ c.arguments | tojson }}]"
    "{% elif m.thinking and not loop.last %}<|channel|>analysis{{ m.thinking }}"
    "{% else %}{{ m.role }}:{{ m.thinking }}{{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (
            [
                USER,
                answer("So.", "Hm.", CALLS),
                result("b", "two"),
                result("a", "one"),
                result("c", "three"),
                USER,
            ],
            'user:Hi;(Hm.\nSo.)[note {"n": 1}]tool:one;[ask {"n": 2}]tool:two;tool:three;user:Hi;',
        ),
        ([answer("", "Hm.", CALLS[:1]), result("x", "one")], '(Hm.)[note {"n": 1}]tool:one;'),
        ([answer("So.", "", CALLS)], '(So.)[note {"n": 1}][ask {"n": 2}]'),
        ([answer("Yes.", "Hm."), USER], "assistant:Yes.;user:Hi;"),
        ([USER, answer("Yes.", "Hm.")], "user:Hi;assistant:Hm.Yes.;"),
    ],
)
def test_a_template_may_show_one_call_of_a_message(messages: list[dict[str, Any]], text: str) -> None:
    assert rendered(ONE_CALL, messages) == text


def test_a_template_that_shows_each_call_gets_them_together() -> None:
    each = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }}{% endfor %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].id }}{% endif %};{% endfor %}"
    )
    assert rendered(each, [answer("", "", CALLS), result("a", "one"), result("b", "two")]) == "aba;;;"


def test_a_template_may_have_results_in_the_message_that_has_their_calls() -> None:
    """As Gemma 4's first one."""
    within = (
        "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls %}<|tool_call>{{ c.function.name }}{% endfor %}"
        "{% for r in m.tool_responses %}<{{ r.name }}={{ r.response }}>{% endfor %}{{ m.content }};{% endfor %}"
    )
    messages = [
        answer("So.", "", CALLS),
        result("b", "two"),
        result("c", "three"),
        answer("Yes."),
        result("a", "one"),
    ]
    expected = "assistant:<|tool_call>note<|tool_call>ask<ask=two><note=one><unknown=three>;assistant:Yes.;"
    assert rendered(within, messages) == expected
    knows = within + "{# m.role == 'tool' #}"
    assert rendered(knows, messages[:2]) == "assistant:<|tool_call>note<|tool_call>ask;tool:two;"


@pytest.mark.parametrize(
    "late",
    ["", "{{ raise_exception('System message must be at the beginning.') }}"],
    ids=["left out", "refused"],
)
def test_all_that_the_system_says_is_shown_where_a_template_looks_at_the_first_message_alone(
    late: str,
) -> None:
    each = "{{ m.role }}:{{ m.content }};"
    first = f"{{% if loop.first or m.role != 'system' %}}{each}{{% else %}}{late}{{% endif %}}"
    template = f"{{% for m in messages %}}{first}{{% endfor %}}"
    said = [{"role": role, "content": role[0]} for role in ("system", "developer", "user", "developer")]
    assert rendered(template, said) == "system:s\n\nd;user:u;user:d;"
    assert (
        rendered(f"{{% for m in messages %}}{each}{{% endfor %}}", said)
        == "system:s;system:d;user:u;system:d;"
    )
    assert rendered(template, [USER]) == "user:Hi;"

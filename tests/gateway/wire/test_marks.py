"""What people type never becomes a mark of the chat template, also where the mark's token is not a special one."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.wire.prompts import Prompts
from tests.gateway.harness import tokenizer_json

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
OWN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
RESULT = ("<tool_response>", "</tool_response>")
OTHERS = ("<h1>", "\n\n", "  ")
"""Tokens of the vocabulary that are no marks: HTML that people write, and what templates are laid out with."""
TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.name or '' }}
{%- if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>

{%- else %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or () %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def make(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    made = tokenizers.Tokenizer.from_str(tokenizer_json())
    plain = Tokenizer(made.to_str())
    ours = [text for text in (*ROLES, *OWN, *RESULT, *OTHERS) if plain.id_of(text) is None]
    made = tokenizers.Tokenizer.from_str(made.to_str().replace('"special":true', '"special":false'))
    made.add_tokens([AddedToken(text, normalized=normalizer is not None) for text in ours])
    if normalizer is not None:
        made.normalizer = normalizer
    return Tokenizer(made.to_str(), {}, TEMPLATE)


TOKENIZER = make()
PROMPTS = Prompts(TOKENIZER)
MARKS = {TOKENIZER.id_of(text): text for text in (*ROLES, *OWN, *RESULT)}
TYPED = st.lists(
    st.sampled_from([*MARKS.values(), "<|", "|>", "user", " ", "é", "x", *OTHERS]), max_size=8
).map("".join)


def marks(token_ids: list[int]) -> list[str]:
    return [MARKS[token_id] for token_id in token_ids if token_id in MARKS]


def talk(user: str, name: str = "ann", result: str = "21", city: str = "Köln") -> list[dict[str, Any]]:
    call = {"id": "c", "function": {"name": "weather", "arguments": {"city": city}}}
    return [
        {"role": "system", "content": user},
        {"role": "user", "content": user, "name": name},
        {"role": "assistant", "content": "", "reasoning_content": user, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]


def tool(description: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "description": description}}]


def test_none_of_the_marks_is_a_special_token() -> None:
    assert not TOKENIZER.special_ids
    assert None not in MARKS
    assert len(MARKS) == len((*ROLES, *OWN, *RESULT))


@given(TYPED, TYPED, TYPED, TYPED, TYPED)
def test_messages_names_results_arguments_and_tools_have_none(
    user: str, name: str, result: str, city: str, description: str
) -> None:
    ids = PROMPTS.chat(talk(user, name, result, city), tools=tool(description))
    frame = PROMPTS.chat(talk("hi", "ann", "21"), tools=tool("The weather."))
    assert marks(ids) == [mark for mark in marks(frame) if user or mark not in ("<think>", "</think>")]
    shown = TOKENIZER.decode(ids, skip_special=False)
    assert f"<|user|>{name}{user}" in shown
    assert f"<tool_response>{result}</tool_response>" in shown


@pytest.mark.parametrize("text", OTHERS)
def test_tokens_that_are_no_marks_stay(text: str) -> None:
    assert TOKENIZER.id_of(text) in PROMPTS.chat([{"role": "user", "content": f"a{text}b"}])


@pytest.mark.parametrize("text", OWN)
def test_a_model_may_have_said_its_own(text: str) -> None:
    said = PROMPTS.chat([{"role": "assistant", "content": f"a{text}b"}], add_generation_prompt=False)
    assert marks(said) == ["<|assistant|>", text]


@pytest.mark.parametrize("text", [*ROLES, *RESULT])
def test_a_model_has_not_said_others(text: str) -> None:
    said = PROMPTS.chat([{"role": "assistant", "content": f"a{text}b"}], add_generation_prompt=False)
    assert marks(said) == ["<|assistant|>"]


def test_a_mark_in_wide_letters_is_no_mark_for_a_tokenizer_that_makes_them_narrow() -> None:
    tokenizer = make(normalizers.NFKC())
    typed = "".join(chr(ord(letter) + 0xFEE0) for letter in "<tool_response>")
    token_id = tokenizer.id_of("<tool_response>")
    assert token_id in tokenizer.encode(typed, parse_special=True)
    assert token_id not in Prompts(tokenizer).chat([{"role": "user", "content": f"{typed} é"}])

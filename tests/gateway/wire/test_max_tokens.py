"""The tokens that an answer may have: as many as were asked for, or as the context has room for."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.wire.sampling import MaxTokens, chat_tokens, completion_tokens, output_tokens
from penstock.gateway.wire.schemas import ChatBody, CompletionBody
from tests.gateway.harness import chat_body, completion_body

CONTEXT = 100


@pytest.mark.parametrize(
    ("wanted", "num_prompt", "num_output", "least"),
    [
        (completion_tokens(CompletionBody(**completion_body())), 10, 16, 1),
        (completion_tokens(CompletionBody(**completion_body())), 95, 5, 1),
        (completion_tokens(CompletionBody(**completion_body(max_tokens=20))), 80, 20, 20),
        (chat_tokens(ChatBody(**chat_body())), 60, 40, 1),
        (chat_tokens(ChatBody(**chat_body(max_tokens=7, max_completion_tokens=9))), 60, 7, 7),
        (chat_tokens(ChatBody(**chat_body(max_completion_tokens=9))), 60, 9, 9),
        (MaxTokens("max_tokens", 0), 99, 0, 1),
        (MaxTokens("n_predict", 50, may_be_fewer=True), 99, 1, 1),
    ],
)
def test_an_answer_has_as_many(wanted: MaxTokens, num_prompt: int, num_output: int, least: int) -> None:
    assert output_tokens(wanted, CONTEXT, num_prompt, "prompt") == num_output
    assert wanted.least == least


@pytest.mark.parametrize(
    ("fields", "num_prompt", "param"),
    [({"max_tokens": 21}, 80, "max_tokens"), ({"max_tokens": 1}, 100, "prompt"), ({}, 100, "prompt")],
)
def test_what_does_not_fit_is_refused_by_the_field_that_is_too_much(
    fields: dict[str, Any], num_prompt: int, param: str
) -> None:
    wanted = completion_tokens(CompletionBody(**completion_body(**fields)))
    with pytest.raises(ApiError, match="100 tokens") as raised:
        output_tokens(wanted, CONTEXT, num_prompt, "prompt")
    assert (raised.value.param, raised.value.code) == (param, "context_length_exceeded")

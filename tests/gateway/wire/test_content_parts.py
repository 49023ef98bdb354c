"""Messages in parts: the same tokens as in one piece, and no way around what holds for one piece."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.wire.conversation import as_dict
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.schemas import Message
from tests.gateway.harness import MODEL, SPECIAL, TEMPLATE, Gateway, client, make_tokenizer

TOKENIZER = make_tokenizer()
PROMPTS = Prompts(TOKENIZER)
CHAT = "/v1/chat/completions"

PIECES = st.lists(st.sampled_from([*SPECIAL, "<|", "|>", "end", "\n", "é", "😀", "x"]), max_size=5).map(
    "".join
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def tokens(*messages: dict[str, Any], prompts: Prompts = PROMPTS) -> list[int]:
    """As a request with these messages would have them."""
    return prompts.chat([as_dict(Message.model_validate(message)) for message in messages])


@given(st.lists(PIECES, max_size=4), st.sampled_from(["system", "developer", "user", "assistant"]))
def test_parts_are_lines_of_one_text(texts: list[str], role: str) -> None:
    in_parts = tokens({"role": role, "content": parts(*texts)})
    assert in_parts == tokens({"role": role, "content": "\n".join(texts)})


@given(st.lists(PIECES, min_size=1, max_size=4))
def test_no_part_becomes_a_special_token(texts: list[str]) -> None:
    silent = tokens({"role": "user", "content": ""})
    found = tokens({"role": "user", "content": parts(*texts)})
    assert [token_id for token_id in found if token_id in TOKENIZER.special_ids] == silent
    spoken = TOKENIZER.decode([token_id for token_id in found if token_id not in TOKENIZER.special_ids])
    assert spoken == "\n".join(texts).strip()


def test_halves_of_a_special_token_do_not_meet() -> None:
    """Neither in two parts nor in two messages, whatever the template puts between them."""
    glued = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    said = tokens(
        {"role": "user", "content": parts("<|", "end|>")},
        {"role": "user", "content": "<|end|>"},
        prompts=Prompts(glued),
    )
    assert not set(said) & glued.special_ids


NAMED = make_tokenizer(TEMPLATE.replace("'|>' ~ (", "'|>' ~ message.name ~ ': ' ~ ("))


@given(PIECES.filter(bool), PIECES)
def test_a_name_is_no_way_in_either(name: str, content: str) -> None:
    def special(**message: str) -> list[int]:
        found = tokens({"role": "user", **message}, prompts=Prompts(NAMED))
        return [token_id for token_id in found if token_id in NAMED.special_ids]

    assert special(name=name, content=content) == special(name="ann", content="")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "text"}], "messages[1].content[0].text"),
        ([{"text": "x"}], "messages[1].content[0].type"),
        ([*parts("a"), {"type": "text", "text": 7}], "messages[1].content[1].text"),
        ([*parts("a", "b"), {"type": "input_audio", "text": "x"}], "messages[1].content[2].type"),
        (parts(*"x" * 257), "messages[1].content"),
        ({"type": "text", "text": "x"}, "messages[1].content"),
        (7, "messages[1].content"),
    ],
)
async def test_the_part_that_is_wrong_is_named(content: Any, param: str) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": content}]
    async with client(Gateway().app) as http:
        response = await http.post(
            CHAT,
            content=json.dumps({"model": MODEL, "messages": messages}),
            headers={"content-type": "application/json"},
        )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.anyio
@pytest.mark.parametrize("content", [parts(*"x" * 200), parts(""), []], ids=["many", "an empty one", "none"])
async def test_a_chat_in_parts_reaches_the_engine_as_tokenize_shows_it(content: list[dict[str, str]]) -> None:
    messages = [{"role": "user", "content": content}]
    gateway = Gateway()
    async with client(gateway.app) as http:
        shown = (await http.post("/tokenize", json={"messages": messages})).json()
        asking = asyncio.create_task(http.post(CHAT, json={"model": MODEL, "messages": messages}))
        request = await gateway.taken()
        gateway.answer(request, "ok")
        usage = (await asking).json()["usage"]
    assert list(request.prompt_token_ids) == shown["tokens"]
    assert usage["prompt_tokens"] == shown["count"] == len(shown["tokens"])


@pytest.mark.anyio
async def test_the_length_of_all_parts_counts_together() -> None:
    gateway = Gateway()
    long = [{"role": "user", "content": parts(*["x" * 100] * 6)}]
    async with client(gateway.app) as http:
        response = await http.post(CHAT, json={"model": MODEL, "messages": long})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"] == "messages"

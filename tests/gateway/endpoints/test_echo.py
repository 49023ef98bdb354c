"""Echoed prompts and their log probabilities, in OpenAI's form and in vLLM's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.engine.planning.request import FinishReason
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body, events, logprobs

pytestmark = pytest.mark.anyio


async def asked(gateway: Gateway, path: str, body: dict[str, Any]) -> asyncio.Task[Any]:
    async def post() -> Any:
        async with client(gateway.app) as api:
            return await api.post(path, json=body)

    return asyncio.create_task(post())


def ids(gateway: Gateway, text: str) -> list[int]:
    return gateway.service.tokenizer.encode(text)


async def test_an_echo_comes_before_the_answer() -> None:
    gateway = Gateway()
    asking = await asked(gateway, "/v1/completions", completion_body(["Hi", "Ho"], echo=True, n=2))
    for text in ("Hi", "Ho"):
        request = await gateway.taken()
        assert request.sampling.num_prompt_logprobs is None
        gateway.answer(request, text.lower())
    choices = (await asking).json()["choices"]
    assert [choice["text"] for choice in choices] == ["Hihi", "Hihi", "Hoho", "Hoho"]
    assert {choice["logprobs"] for choice in choices} == {None}


async def test_an_echo_of_token_ids_is_their_text_with_special_tokens() -> None:
    gateway = Gateway()
    asking = await asked(gateway, "/v1/completions", completion_body([0, *ids(gateway, "Hi")], echo=True))
    gateway.answer(await gateway.taken(), "!")
    assert (await asking).json()["choices"][0]["text"] == "<|bos|>Hi!"


async def test_an_echo_without_output_has_the_log_probabilities_of_the_prompt() -> None:
    gateway = Gateway()
    prompt = ids(gateway, "Hi")
    body = completion_body(prompt, echo=True, max_tokens=0, logprobs=1)
    asking = await asked(gateway, "/v1/completions", body)
    request = await gateway.taken()
    assert (request.sampling.max_tokens, request.sampling.num_prompt_logprobs) == (0, 1)
    found = [logprobs((prompt[1], -1.5), (9, -0.5))]
    gateway.finish(request, reason=FinishReason.LENGTH, token_ids=[], prompt_logprobs=found)
    reply = (await asking).json()
    assert reply["usage"]["completion_tokens"] == 0
    (choice,) = reply["choices"]
    assert choice["text"] == "Hi"
    assert choice["finish_reason"] == "length"
    best = gateway.service.tokenizer.token_bytes(9).decode()
    assert choice["logprobs"] == {
        "tokens": ["H", "i"],
        "token_logprobs": [None, -1.5],
        "top_logprobs": [None, {best: -0.5}],
        "text_offset": [0, 1],
    }


async def test_a_token_that_is_part_of_a_character_is_told_by_its_bytes() -> None:
    """Two of them would have the same text, and of `top_logprobs`, which has them by their texts, one would be lost."""
    gateway = Gateway()
    prompt = ids(gateway, "é")
    body = completion_body(prompt, echo=True, max_tokens=0, logprobs=2)
    asking = await asked(gateway, "/v1/completions", body)
    found = [logprobs((prompt[1], -0.5), (prompt[0], -1.5))]
    gateway.finish(await gateway.taken(), reason=FinishReason.LENGTH, token_ids=[], prompt_logprobs=found)
    (choice,) = (await asking).json()["choices"]
    assert choice["logprobs"]["tokens"] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert choice["logprobs"]["top_logprobs"] == [None, {r"bytes:\xa9": -0.5, r"bytes:\xc3": -1.5}]


@pytest.mark.parametrize(
    ("prompt", "echo", "offsets"),
    [
        ("Né", "Né", [0, 0, 1, 1]),  # the tokenizer's own first token is in no echo of a text
        ([0, 5, 0], "<|bos|>!<|bos|>", [0, 7, 8]),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_offsets_are_places_in_the_text(
    prompt: Any, echo: str, offsets: list[int], stream: bool
) -> None:
    """Characters of several tokens are where their first token is, in the prompt and in the answer."""
    gateway = Gateway()
    body = completion_body(prompt, echo=True, logprobs=0, stream=stream)
    asking = await asked(gateway, "/v1/completions", body)
    request = await gateway.taken()
    own = ids(gateway, "é!")
    at = [logprobs((token_id, -1.0)) for token_id in request.prompt_token_ids[1:]]
    for number, text in enumerate(["", "é", "!"]):
        at_first: Any = {"prompt_logprobs": at} if not number else {}
        told = [logprobs((own[number], -0.5))]
        gateway.bring(request, text, token_ids=own[number : number + 1], logprobs=told, **at_first)
    gateway.finish(request, token_ids=[1], logprobs=[logprobs((1, -0.1))])
    reply = await asking
    chunks = events(reply.text)[:-1] if stream else [reply.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == f"{echo}é!"
    places = [
        place for choice in choices if choice["logprobs"] for place in choice["logprobs"]["text_offset"]
    ]
    length = len(echo)
    assert places == [*offsets, length, length, length + 1, length + 2]


async def test_every_choice_has_the_log_probabilities_that_the_first_one_brought() -> None:
    gateway = Gateway()
    prompt = ids(gateway, "Hi")
    asking = await asked(gateway, "/v1/completions", completion_body(prompt, echo=True, logprobs=0, n=2))
    request = await gateway.taken()
    at = logprobs((prompt[1], -2.0))
    gateway.finish(
        request, "!", 0, token_ids=[prompt[0]], prompt_logprobs=[at], logprobs=[logprobs((1, -3.0))]
    )
    gateway.finish(request, "?", 1, token_ids=[prompt[1]], logprobs=[logprobs((1, -4.0))])
    choices = (await asking).json()["choices"]
    assert [choice["text"] for choice in choices] == ["Hi!", "Hi?"]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [
        [None, -2.0, -3.0],
        [None, -2.0, -4.0],
    ]
    assert choices[0]["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("told", [True, False])
async def test_a_stream_begins_with_its_echo(told: bool) -> None:
    gateway = Gateway()
    more = {"logprobs": 1} if told else {}
    asking = await asked(gateway, "/v1/completions", completion_body("Hi", echo=True, stream=True, **more))
    request = await gateway.taken()
    found: Any = {}
    if told:
        at = [logprobs((token_id, -1.0)) for token_id in request.prompt_token_ids[1:]]
        found = {"prompt_logprobs": at, "logprobs": [logprobs((7, -0.5))]}
    gateway.bring(request, "a", **found)
    found.pop("prompt_logprobs", None)
    gateway.bring(request, "b", **found)
    gateway.finish(request)
    chunks = [event for event in events((await asking).text) if event != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hiab"
    if told:
        shown = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        values = [value for part in shown for value in part["token_logprobs"]]
        assert values == [None, -1.0, -1.0, -0.5, -0.5]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_prompt_logprobs_have_their_tokens_by_id(path: str) -> None:
    gateway = Gateway()
    is_chat = "chat" in path
    body = chat_body(prompt_logprobs=1) if is_chat else completion_body("Hi", prompt_logprobs=1)
    asking = await asked(gateway, path, body)
    request = await gateway.taken()
    prompt = request.prompt_token_ids
    at = [logprobs((token_id, -1.5), (9, -0.5)) for token_id in prompt[1:]]
    gateway.finish(request, "!", prompt_logprobs=at)
    reply = (await asking).json()
    found = reply["prompt_logprobs"] if is_chat else reply["choices"][0]["prompt_logprobs"]
    assert len(found) == len(prompt)
    assert found[0] is None
    best = {"logprob": -0.5, "rank": 1, "decoded_token": gateway.service.tokenizer.token_bytes(9).decode()}
    text = gateway.service.tokenizer.token_bytes(prompt[-1]).decode()
    mine = {"logprob": -1.5, "rank": None, "decoded_token": text}
    assert found[-1] == {str(prompt[-1]): mine, "9": best}


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"max_tokens": -1, "echo": True}, "max_tokens"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"echo": True, "logprobs": 3, "n": 4}, "prompt"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"echo": True}, "echo"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(path: str, fields: dict[str, Any], field: str) -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_logprobs=40)))
    body = chat_body(**fields) if "chat" in path else completion_body("Hi", **fields)
    async with client(gateway.app) as api:
        reply = await api.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field


async def test_a_reply_that_can_be_fetched_again_has_no_prompt_logprobs() -> None:
    async with client(Gateway().app) as api:
        headers = {"idempotency-key": "k"}
        reply = await api.post("/v1/chat/completions", json=chat_body(prompt_logprobs=0), headers=headers)
    assert reply.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("num_logprobs", [None, 0])
async def test_the_best_choices_of_each_prompt_are_shown(num_logprobs: int | None, echo: bool) -> None:
    """By the sum over what was generated, and the tokens of the others are counted, too."""
    gateway = Gateway()
    body = completion_body(["Hi", "Ho"], best_of=3, n=2, logprobs=num_logprobs, echo=echo)
    asking = await asked(gateway, "/v1/completions", body)
    for _ in range(2):
        request = await gateway.taken()
        assert (request.n, request.sampling.num_logprobs) == (3, 0)
        told = [logprobs((1, -1.0))] * (len(request.prompt_token_ids) - 1)
        asked_for = request.sampling.num_prompt_logprobs is not None
        for index, first, second in [(0, -1.0, -1.0), (1, -0.1, -5.0), (2, -1.5, -0.2)]:
            more = {"prompt_logprobs": told} if asked_for and not index else {}
            gateway.bring(
                request, f"{index}", index, token_ids=[70], logprobs=[logprobs((70, first))], **more
            )
            gateway.finish(request, "!", index, token_ids=[71], logprobs=[logprobs((71, second))])
    reply = (await asking).json()
    assert reply["usage"]["completion_tokens"] == 12
    prompts = ["Hi", "Ho"] if echo else ["", ""]
    expected = [f"{prompt}{index}!" for prompt in prompts for index in (2, 0)]
    assert [choice["text"] for choice in reply["choices"]] == expected
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] is None for choice in reply["choices"]] == [num_logprobs is None] * 4
    if num_logprobs is not None:
        assert [sum(choice["logprobs"]["token_logprobs"][-2:]) for choice in reply["choices"]] == [
            -1.7,
            -2.0,
        ] * 2

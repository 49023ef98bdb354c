"""Fields that clients of open models send: what each does to the prompt, to the sampling and to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from penstock.engine.planning.request import Request
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.endpoints.requests import salt_of, salts_of
from penstock.priority.lanes import Tenant
from tests.gateway.harness import (
    SPECIAL,
    Gateway,
    chat_body,
    client,
    completion_body,
    events,
    logprobs,
    make_tokenizer,
    tokenizer_json,
)

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def path_of(body: dict[str, Any]) -> str:
    return CHAT if "messages" in body else COMPLETIONS


async def replied(gateway: Gateway, body: dict[str, Any], **headers: str) -> Any:
    async with client(gateway.app) as api:
        return await api.post(path_of(body), json=body, headers=headers)


async def requested(body: dict[str, Any], gateway: Gateway | None = None) -> Request:
    """Returns the request that the engine gets."""
    gateway = gateway or Gateway()
    asking = asyncio.create_task(replied(gateway, body))
    taken = asyncio.create_task(gateway.taken())
    await asyncio.wait([asking, taken], return_when=asyncio.FIRST_COMPLETED)
    assert taken.done(), (await asking).text
    request = taken.result()
    gateway.answer(request, "!")
    assert (await asking).status_code == 200
    return request


TOKENIZER = make_tokenizer()


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def spelt(request: Request) -> str:
    return TOKENIZER.decode(request.prompt_token_ids, skip_special=False)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (completion_body("Hi"), "<|bos|>Hi"),
        (completion_body("Hi", add_special_tokens=False), "Hi"),
        (completion_body("Hi there", truncate_prompt_tokens=5), "there"),
        (completion_body(TOKENIZER.encode("Hi there"), truncate_prompt_tokens=3), "ere"),
        (completion_body(TOKENIZER.encode("Hi there") * 100, truncate_prompt_tokens=2), "re"),
        (completion_body("Hi there", truncate_prompt_tokens=-1), "<|bos|>Hi there"),
        (completion_body("Hi " * 9000 + "there", truncate_prompt_tokens=5), "there"),
        (completion_body(["Hi " * 9000 + "there"], truncate_prompt_tokens=5), "there"),
        (chat_body("Hi " * 9000, truncate_prompt_tokens=3), "i<|end|><|assistant|>"),
        (chat_body("Hi"), "<|bos|><|user|>Hi<|end|><|assistant|>"),
        (chat_body("Hi", add_generation_prompt=False), "<|bos|><|user|>Hi<|end|>"),
        (chat_body("Hi", truncate_prompt_tokens=2), "<|end|><|assistant|>"),
    ],
)  # fmt: skip
async def test_what_becomes_of_the_prompt(body: dict[str, Any], prompt: str) -> None:
    assert spelt(await requested(body)) == prompt


@pytest.mark.parametrize(
    ("body", "num_kept"),
    [
        (completion_body([7] * 600), 511),
        (completion_body([7] * 600, max_tokens=20), 492),
        (chat_body("Hi" * 300), 511),
        (chat_body("Hi" * 300, max_tokens=20), 492),
        (chat_body("Hi" * 300, max_completion_tokens=30), 482),
    ],
)
async def test_of_a_prompt_that_is_too_long_the_end_is_kept(body: dict[str, Any], num_kept: int) -> None:
    request = await requested({**body, "truncate_prompt_tokens": -1})
    assert len(request.prompt_token_ids) == num_kept


@pytest.mark.parametrize("said", ["Once upon", "  Once upon ", "<|end|>"])
async def test_a_last_message_is_continued(said: str) -> None:
    """Its own text cannot end it, though it spells the token that does."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
    body = {**chat_body(), "messages": messages, "continue_final_message": True}
    request = await requested(body)
    assert spelt(request) == f"<|bos|><|user|>Hi<|end|><|assistant|>{said.strip()}"
    assert request.prompt_token_ids.count(SPECIAL.index("<|end|>")) == 1


@pytest.mark.parametrize(
    ("fields", "is_so"),
    [
        ({"include_stop_str_in_output": True}, lambda s: s.shows_stop),
        ({}, lambda s: not s.shows_stop and not s.shown_special and not s.logit_bias),
        ({"skip_special_tokens": False}, lambda s: s.shown_special == TOKENIZER.special_ids),
        ({"skip_special_tokens": True, "spaces_between_special_tokens": True}, lambda s: not s.shown_special),
        ({"bad_words": ["x", "ab"]}, lambda s: s.bad_words == tuple(map(ids_of, ("x", " x", "ab", " ab")))),
        ({"allowed_token_ids": [9, 7, 9]}, lambda s: s.allowed_token_ids == (7, 9) and s.is_guided),
        ({"priority": 0}, lambda s: s.temperature == 1.0),
        ({"priority": 7}, lambda s: s.temperature == 1.0),
    ],
)
async def test_what_becomes_of_the_sampling(fields: dict[str, Any], is_so: Callable[[Any], bool]) -> None:
    assert is_so((await requested(chat_body(**fields))).sampling)


async def test_a_salt_parts_the_blocks_of_one_tenant() -> None:
    one, other, none = [
        (await requested(chat_body(**fields))).salt
        for fields in ({"cache_salt": "a"}, {"cache_salt": "b"}, {})
    ]
    assert len({one, other, none}) == 3
    tenant = Tenant(name="t")
    assert salt_of(tenant, asked="a") not in salts_of(tenant)
    assert salt_of(tenant, asked="a").endswith(b"\0private"), "its tokens stay in this process"


def with_fim(*names: str) -> Tokenizer:
    made = tokenizers.Tokenizer.from_str(tokenizer_json())
    made.add_special_tokens(list(names))
    return Tokenizer(made.to_str())


@pytest.mark.parametrize(
    ("names", "prompt"),
    [
        (
            ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
            "<|fim_prefix|>a<|fim_suffix|>z<|fim_middle|>",
        ),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "<fim_prefix>a<fim_suffix>z<fim_middle>"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>a<｜fim▁hole｜>z<｜fim▁end｜>",
        ),
    ],
)
async def test_the_middle_is_filled_in(names: tuple[str, ...], prompt: str) -> None:
    tokenizer = with_fim(*names)
    request = await requested(completion_body("a", suffix="z"), Gateway(tokenizer=tokenizer))
    assert tokenizer.decode(request.prompt_token_ids, skip_special=False) == prompt


@pytest.mark.parametrize("body", [chat_body(), completion_body()])
@pytest.mark.parametrize("stream", [True, False])
async def test_token_ids_are_told(body: dict[str, Any], stream: bool) -> None:
    gateway = Gateway()
    asking = asyncio.create_task(replied(gateway, {**body, "return_token_ids": True, "stream": stream}))
    request = await gateway.taken()
    gateway.bring(request, "a", token_ids=[70])
    gateway.bring(request, "", token_ids=[71])
    gateway.finish(request, "b", token_ids=[72])
    reply = await asking
    parts = events(reply.text)[:-1] if stream else [reply.json()]
    choices = [part["choices"][0] for part in parts if part["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [70, 71, 72]
    holders = parts if "messages" in body else choices
    (prompt,) = [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
    assert prompt == list(request.prompt_token_ids)
    assert {str(choice.get("logprobs")) for choice in choices} == {"None"}


async def test_usage_grows_with_the_stream() -> None:
    gateway = Gateway()
    options = {"include_usage": True, "continuous_usage_stats": True}
    asking = asyncio.create_task(replied(gateway, chat_body(stream=True, stream_options=options)))
    request = await gateway.taken()
    for text in "abc":
        gateway.bring(request, text)
        await asyncio.sleep(0)
    gateway.finish(request)
    chunks = events((await asking).text)[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert chunks[0]["usage"]["prompt_tokens"] == len(request.prompt_token_ids)


LAST = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " "}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (chat_body(allowed_token_ids=[]), "allowed_token_ids"),
        (chat_body(allowed_token_ids=[1 << 20]), "allowed_token_ids"),
        (chat_body(allowed_token_ids=[1] * 16_385), "allowed_token_ids"),
        (chat_body(add_special_tokens=True), "add_special_tokens"),
        (chat_body(spaces_between_special_tokens=False), "spaces_between_special_tokens"),
        (chat_body(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (chat_body(cache_salt=""), "cache_salt"),
        (chat_body(cache_salt="x" * 257), "cache_salt"),
        (chat_body(bad_words=["x" * 257]), "bad_words"),
        (chat_body(bad_words=[""]), "bad_words[0]"),
        (chat_body(bad_words=["x"] * 65), "bad_words"),
        (chat_body(continue_final_message=True), "continue_final_message"),
        ({**chat_body(continue_final_message=True), "messages": LAST}, "continue_final_message"),
        (
            {**chat_body(continue_final_message=True, add_generation_prompt=True), "messages": LAST},
            "continue_final_message",
        ),
        (completion_body("a", suffix="z"), "suffix"),
        (completion_body([5], suffix="z"), "suffix"),
        (completion_body("a", suffix="z", echo=True), "echo"),
        (completion_body("a", best_of=2, n=3), "best_of"),
        (completion_body("a", dry_multiplier=0.8), "dry_multiplier"),
        (completion_body("a", best_of=2, stream=True), "stream"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    reply = await replied(Gateway(), body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field


async def test_a_reply_that_can_be_fetched_again_tells_no_token_ids() -> None:
    reply = await replied(Gateway(), chat_body(return_token_ids=True), **{"idempotency-key": "k"})
    assert reply.json()["error"]["param"] == "return_token_ids"


@pytest.mark.parametrize("body", [chat_body(logprobs=True, top_logprobs=1), completion_body(logprobs=1)])
async def test_log_probabilities_may_have_numbers_for_tokens(body: dict[str, Any]) -> None:
    gateway = Gateway()
    asking = asyncio.create_task(replied(gateway, {**body, "return_tokens_as_token_ids": True}))
    request = await gateway.taken()
    gateway.finish(request, "a", token_ids=[70], logprobs=[logprobs((70, -0.5), (71, -1.0))])
    found = (await asking).json()["choices"][0]["logprobs"]
    told = [one["token"] for one in found["content"]] if "messages" in body else found["tokens"]
    assert told == ["token_id:70"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"enable_thinking": True}, "enable_thinking"),
        ({"enable_thinking": False}, None),
        ({"thinking": {"type": "enabled", "keep": "all"}}, "thinking, thinking.keep"),
        ({"reasoning": {"enabled": True}}, "reasoning.enabled"),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort"),
        ({"priority": 7, "guided_decoding_backend": "xgrammar"}, "guided_decoding_backend, priority"),
    ],
)
async def test_what_this_model_cannot_do_is_named(fields: dict[str, Any], named: str | None) -> None:
    gateway = Gateway()
    reply = await gateway.answering(replied(gateway, chat_body(**fields)), "!")
    told = reply.headers.get("x-penstock-ignored")
    assert (told and sorted(told.split(", "))) == (named and named.split(", "))

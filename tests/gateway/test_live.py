"""The real server with the real model: the promises that only hold if gateway, queue and engine keep them together."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import torch
import transformers
from pydantic import BaseModel, Field

from penstock.app.checkpoint import DEMO_MODEL

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
ENDLESS = {"ignore_eos": True}


@pytest.fixture
def api(live_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(api: openai.OpenAI) -> str:
    return api.models.list().data[0].id


def running(live_server: str) -> float:
    """Sequences that the engine holds, and requests that wait."""
    text = httpx.get(f"{live_server}/metrics").text
    names = ("penstock_running_sequences ", "penstock_waiting_sequences ", "penstock_queued_requests{")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))


def wait_until(condition: Callable[[], bool]) -> None:
    """Asks again and again; the server's own work is what takes the time."""
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s


def test_a_greedy_stream_says_what_a_greedy_answer_says(api: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    whole = api.chat.completions.create(**fields)
    stream = list(api.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert whole.usage is not None
    assert stream[-1].usage is not None
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    timings = stream[-2].model_extra or {}
    assert timings["timings"]["ttft_ms"] > 0
    assert timings["timings"]["prompt_tokens"] == whole.usage.prompt_tokens


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Person(BaseModel):
    name: str = Field(max_length=16)
    mood: Literal["happy", "sad"]
    pets: list[Cat | Dog] = Field(max_length=2)


def test_an_answer_is_parsed_as_what_it_was_held_to(api: openai.OpenAI, model: str) -> None:
    chat = api.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Person, temperature=0, max_tokens=200
    )
    response = api.responses.parse(model=model, input=MESSAGES, text_format=Person, temperature=0)
    assert chat.choices[0].finish_reason == "stop"
    assert isinstance(chat.choices[0].message.parsed, Person)
    assert response.output_parsed == chat.choices[0].message.parsed


SUM_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out a sum.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def test_a_tool_is_called_where_it_helps(api: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "tools": [SUM_TOOL], "temperature": 0}
    messages: list[Any] = [{"role": "user", "content": "What is 1234 + 5678?"}]
    choice = api.chat.completions.create(messages=messages, **fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert json.loads(call.function.arguments) == {"expression": "1234 + 5678"}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "6912"}]
    told = api.chat.completions.create(messages=messages, **fields).choices[0].message
    assert (told.content, told.tool_calls) == ("It is 6912.", None)
    greeting = api.chat.completions.create(messages=[{"role": "user", "content": "Hello!"}], **fields)
    assert not greeting.choices[0].message.tool_calls


def test_a_seed_decides(api: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> list[str | None]:
        reply = api.chat.completions.create(
            model=model, messages=MESSAGES, seed=seed, n=3, max_tokens=24, temperature=1.5, top_p=1
        )
        return [choice.message.content for choice in reply.choices]

    first = sample(1)
    assert first == sample(1)
    assert first != sample(2)
    assert len(set(first)) > 1


def test_a_stop_string_is_never_shown(api: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    text = api.chat.completions.create(**fields).choices[0].message.content or ""
    stop = text[len(text) // 2 :][:6]
    reply = api.chat.completions.create(**fields, stop=[stop]).choices[0]
    assert reply.finish_reason == "stop"
    assert reply.message.content == text[: text.index(stop)]


def test_logprobs_add_up_to_the_text(api: openai.OpenAI, model: str) -> None:
    reply = api.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    ).choices[0]
    assert reply.logprobs is not None
    tokens = reply.logprobs.content or []
    spelt = bytes(byte for token in tokens for byte in token.bytes or ())
    assert spelt.decode(errors="replace").startswith(reply.message.content or "")
    for token in tokens:
        best = token.top_logprobs[0]
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(best.logprob, abs=1e-4)
        assert token.logprob <= 0


@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
def test_an_echo_scores_what_was_said_greedily(
    api: openai.OpenAI, model: str, live_server: str, as_ids: bool
) -> None:
    """As lm-eval's `local-completions` asks for the likelihood of a continuation, and reads it."""
    context = httpx.post(f"{live_server}/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    said = api.completions.create(model=model, prompt=context, max_tokens=12, temperature=0, logprobs=1)
    assert said.choices[0].logprobs is not None
    expected = said.choices[0].logprobs.token_logprobs or []
    whole = "Once upon a time" + said.choices[0].text
    ids = httpx.post(f"{live_server}/tokenize", json={"prompt": whole}).json()["tokens"]
    assert ids[: len(context)] == context
    prompts: Any = [ids if as_ids else whole, ids[:-2] if as_ids else whole]
    reply = api.completions.create(
        model=model, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    for choice, number in zip(reply.choices, (0, 2 if as_ids else 0), strict=True):
        assert choice.logprobs is not None
        logprobs = (choice.logprobs.token_logprobs or [])[len(context) : -1]
        tops = (choice.logprobs.top_logprobs or [])[len(context) : -1]
        assert logprobs == pytest.approx(expected[: len(expected) - number], abs=1e-4)
        assert all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
    assert whole in reply.choices[0].text


def test_embeddings_are_the_last_hidden_states_of_transformers(
    api: openai.OpenAI, model: str, live_server: str
) -> None:
    texts = ["The cat sat by the fire.", "A storm came over the sea.", "Once upon a time " * 20]
    reply = api.embeddings.create(model=model, input=texts)
    oracle = transformers.AutoModel.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    for text, entry in zip(texts, reply.data, strict=True):
        ids = httpx.post(f"{live_server}/tokenize", json={"prompt": text}).json()["tokens"]
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids])).last_hidden_state[0, -1]
        found = torch.tensor(entry.embedding)
        assert found.norm() == pytest.approx(1, abs=1e-5)
        assert torch.cosine_similarity(found, expected, dim=0) > 0.999


def test_a_logit_bias_forces_a_token(api: openai.OpenAI, model: str, live_server: str) -> None:
    found = httpx.post(f"{live_server}/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()
    token_id = found["tokens"][0]
    reply = api.completions.create(model=model, prompt="x", max_tokens=5, logit_bias={str(token_id): 100})
    assert reply.choices[0].text == "aaaaa"
    assert reply.choices[0].finish_reason == "length"


def test_a_completion_of_token_ids_is_that_of_the_text(
    api: openai.OpenAI, model: str, live_server: str
) -> None:
    prompt = "Once upon a time"
    ids = httpx.post(f"{live_server}/tokenize", json={"prompt": prompt}).json()["tokens"]
    fields: Any = {"model": model, "max_tokens": 12, "temperature": 0}
    by_text = api.completions.create(prompt=prompt, **fields)
    by_ids = api.completions.create(prompt=ids, **fields)
    assert by_text.choices[0].text == by_ids.choices[0].text
    several = api.completions.create(prompt=[prompt, "The sea"], **fields)
    assert several.choices[0].text == by_text.choices[0].text


def test_omitted_max_tokens_is_what_is_left_of_the_context(
    api: openai.OpenAI, model: str, live_server: str
) -> None:
    context = httpx.get(f"{live_server}/v1/models").json()["data"][0]["max_model_len"]
    reply = api.chat.completions.create(model=model, messages=MESSAGES, extra_body=ENDLESS)
    assert reply.usage is not None
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == context


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_the_engine(live_server: str, model: str, stream: bool) -> None:
    address = urlsplit(live_server)
    asked = {
        "model": model,
        "messages": MESSAGES,
        "stream": stream,
        "n": 4,
        "service_tier": "default",
        **ENDLESS,
    }
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}"
    )
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            wait_until(lambda: running(live_server) > 0)
    wait_until(lambda: running(live_server) == 0)
    text = httpx.get(f"{live_server}/metrics").text
    assert 'penstock_choices_total{finish_reason="cancelled",lane="standard"}' in text


def test_many_streams_at_once_all_end(api: openai.OpenAI, model: str, live_server: str) -> None:
    def count(_: int) -> int:
        stream = api.chat.completions.create(
            model=model,
            messages=MESSAGES,
            stream=True,
            max_tokens=20,
            extra_body=ENDLESS,
            stream_options={"include_usage": True},
        )
        usage = list(stream)[-1].usage
        return usage.completion_tokens if usage else 0

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(count, range(32))) == [20] * 32
    assert httpx.get(f"{live_server}/health").json() == {"status": "ok"}
    assert not running(live_server)

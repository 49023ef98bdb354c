"""Replies are what the types of the openai, anthropic and ollama packages say; what is added to them is listed here."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic.types
import httpx
import ollama
import openai.types
import pytest
from anthropic.types.messages import DeletedMessageBatch, MessageBatch, MessageBatchIndividualResponse
from anthropic.types.shared import ErrorResponse
from openai.types import chat, conversations, responses, shared
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import ValidationError

from penstock.engine.planning.request import FinishReason
from tests.gateway.endpoints.test_tools import SAID, TOOL, gateway
from tests.gateway.harness import MODEL, serving
from tests.gateway.reply_types import check

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
DEMO = "penstock-demo"
HI: Any = [{"role": "user", "content": "Hello!"}]
USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}

TIMED = frozenset({"timings"})
STORED = TIMED | {"store"}
IN_EVENTS = frozenset({"response.timings", "response.store"})
IN_USAGE = frozenset(
    f"usage.{name}" for name in ("total_tokens", "input_tokens_details", "output_tokens_details")
)
LIKELY = frozenset({"logprobs[].bytes", "logprobs[].top_logprobs[].bytes"})


@pytest.fixture(scope="module")
def http(live_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live_server, timeout=60) as http:
        yield http


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    reply = http.post(path, json={"model": DEMO, **body})
    assert reply.status_code == 200, reply.text
    return reply.text


def data(stream: str) -> list[str]:
    """The JSON of each event."""
    return [line[6:] for line in stream.splitlines() if line.startswith("data: {")]


def ended(chunk: str) -> str:
    """A chunk of a text completion as if it were the last one: the package's type has no other, OpenAI's API has."""
    told = json.loads(chunk)
    choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in told["choices"]]
    return json.dumps(told | {"choices": choices})


def test_the_check_finds_what_is_missing_wrong_and_added() -> None:
    model = {"id": "m", "created": 1, "object": "model", "owned_by": "us"}
    check(openai.types.Model, json.dumps(model))
    for wrong in ({"created": None}, {"created": "1"}, {"object": "file"}):
        with pytest.raises(ValidationError):
            check(openai.types.Model, json.dumps(model | wrong))
    with pytest.raises(AssertionError):
        check(openai.types.Model, json.dumps(model | {"more": 1}))
    with pytest.raises(AssertionError):
        check(openai.types.Model, json.dumps(model), adds=frozenset({"more"}))
    page = json.dumps({"object": "list", "data": [], "first_id": "", "last_id": ""})
    with pytest.raises(ValidationError, match="has_more"):
        check(ResponseItemList, page)


# OpenAI's


def test_models(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert http.get(f"/v1/models/{DEMO}").json() == model
    check(
        openai.types.Model,
        json.dumps(model),
        adds=frozenset({"root", "max_model_len", "defaults", "lanes", "reasoning"}),
    )


def test_chats(http: httpx.Client) -> None:
    likely = {"messages": HI, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    check(chat.ChatCompletion, post(http, CHAT, {**likely, "n": 2}), adds=TIMED)
    check(chat.ChatCompletionChunk, *data(post(http, CHAT, {**likely, **USAGE})), adds=TIMED)
    asked = {**likely, "return_token_ids": True, "prompt_logprobs": 1}
    added = {"choices[].token_ids", "prompt_token_ids", "prompt_logprobs"}
    check(chat.ChatCompletion, post(http, CHAT, asked), adds=TIMED | added)


def test_stored_chats(http: httpx.Client) -> None:
    made = json.loads(post(http, CHAT, {"messages": HI, "max_tokens": 9, "store": True}))
    path = f"{CHAT}/{made['id']}"
    shown = [http.get(path).text, *map(json.dumps, http.get(CHAT, params={"limit": 100}).json()["data"])]
    check(chat.ChatCompletion, *shown, adds=TIMED)
    for message in http.get(f"{path}/messages").json()["data"]:
        # The package's type knows no other role.
        check(chat.ChatCompletionStoreMessage, json.dumps(message | {"role": "assistant"}))
    check(chat.ChatCompletionDeleted, http.delete(path).text)


def test_texts(http: httpx.Client) -> None:
    asked = {"prompt": "Once", "max_tokens": 9, "logprobs": 2}
    check(openai.types.Completion, post(http, TEXT, asked), adds=TIMED | {"service_tier"})
    chunks = map(ended, data(post(http, TEXT, {**asked, **USAGE})))
    check(openai.types.Completion, *chunks, adds=TIMED | {"service_tier"})


def test_embeddings(http: httpx.Client) -> None:
    check(openai.types.CreateEmbeddingResponse, post(http, "/v1/embeddings", {"input": ["a", "b"]}))


def test_decisions(http: httpx.Client) -> None:
    choices = [{"value": "yes"}, {"value": True}, {"value": "no", "description": "not at all"}]
    questions = [
        {"type": "predicate", "instructions": "Is it a greeting?", "name": "greeting"},
        {"type": "choice", "instructions": "Is it polite?", "choices": choices},
        {"type": "score", "instructions": "How polite?", "levels": [{"label": "not"}, {"label": "very"}]},
    ]
    reply = post(http, "/v1/decisions", {"input": "Hello!", "questions": questions})
    check(openai.types.Decision, reply, adds=TIMED | {"answers[].label_mass"})


def test_responses(http: httpx.Client) -> None:
    asked = {"input": "Hello!", "max_output_tokens": 9, "include": ["message.output_text.logprobs"]}
    whole = post(http, RESPONSES, {**asked, "top_logprobs": 1})
    path = f"{RESPONSES}/{json.loads(whole)['id']}"
    begun = json.loads(post(http, RESPONSES, {"input": "Hello!", "background": True}))["id"]
    cancelled = http.post(f"{RESPONSES}/{begun}/cancel").text
    check(responses.Response, whole, http.get(path).text, cancelled, adds=STORED)
    check(ResponseItemList, http.get(f"{path}/input_items").text)
    events = data(post(http, RESPONSES, {**asked, "top_logprobs": 1, "stream": True}))
    check(responses.ResponseStreamEvent, *events, adds=IN_EVENTS | LIKELY)
    check(InputTokenCountResponse, post(http, f"{RESPONSES}/input_tokens", {"input": "Hello!"}))


def test_conversations(http: httpx.Client) -> None:
    begun = http.post("/v1/conversations", json={"items": HI, "metadata": {"of": "a test"}}).text
    check(conversations.Conversation, begun)
    path = f"/v1/conversations/{json.loads(begun)['id']}"
    post(http, RESPONSES, {"input": "Well?", "conversation": json.loads(begun)["id"], "max_output_tokens": 9})
    items = http.get(f"{path}/items").text
    check(conversations.ConversationItemList, items)
    item = f"{path}/items/{json.loads(items)['last_id']}"
    check(conversations.ConversationItem, http.get(item).text)
    check(conversations.Conversation, http.post(path, json={"metadata": {}}).text, http.delete(item).text)
    check(conversations.ConversationDeletedResource, http.delete(path).text)


def test_files_and_batches(http: httpx.Client) -> None:
    line = {"custom_id": "1", "method": "POST", "url": TEXT, "body": {"model": DEMO, "prompt": "A"}}
    sent = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = http.post("/v1/files", data={"purpose": "batch"}, files=sent).text
    id = json.loads(file)["id"]
    check(openai.types.FileObject, file, http.get(f"/v1/files/{id}").text)
    asked = {"input_file_id": id, "endpoint": TEXT, "completion_window": "24h", "metadata": {"of": "a test"}}
    batch = http.post("/v1/batches", json=asked).text
    path = f"/v1/batches/{json.loads(batch)['id']}"
    check(openai.types.Batch, batch, http.get(path).text, http.post(f"{path}/cancel").text)
    check(openai.types.FileDeleted, http.delete(f"/v1/files/{id}").text)


def test_errors_of_openai(http: httpx.Client) -> None:
    wrong = [{"messages": 7}, {"messages": HI, "model": "other"}, {"messages": HI, "temperature": 101}]
    replies = [http.post(CHAT, json={"model": DEMO, **body}).json() for body in wrong]
    check(shared.ErrorObject, *(json.dumps(reply["error"]) for reply in replies))


# Anthropic's


def test_messages(http: httpx.Client) -> None:
    asked = {"messages": HI, "max_tokens": 9}
    check(anthropic.types.Message, post(http, MESSAGES, asked), adds=TIMED)
    check(
        anthropic.types.RawMessageStreamEvent,
        *message_events(post(http, MESSAGES, asked | {"stream": True})),
        adds=TIMED,
    )
    check(anthropic.types.MessageTokensCount, post(http, f"{MESSAGES}/count_tokens", {"messages": HI}))
    check(ErrorResponse, http.post(MESSAGES, json={"model": DEMO, "messages": HI}).text)


def test_models_of_anthropic(http: httpx.Client) -> None:
    told = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    check(anthropic.types.ModelInfo, *map(json.dumps, told["data"]))
    assert told.keys() == {"data", "has_more", "first_id", "last_id"}


def test_batches_of_messages(http: httpx.Client) -> None:
    wrong = {"custom_id": "b", "params": {"model": DEMO}}
    right = {"custom_id": "a", "params": {"model": DEMO, "messages": HI, "max_tokens": 4}}
    made = http.post(f"{MESSAGES}/batches", json={"requests": [right, wrong]}).text
    path = f"{MESSAGES}/batches/{json.loads(made)['id']}"
    while json.loads(told := http.get(path).text)["processing_status"] != "ended":
        time.sleep(0.05)
    check(MessageBatch, made, told)
    results = http.get(f"{path}/results").text.splitlines()
    check(MessageBatchIndividualResponse, *results, adds=frozenset({"result.message.timings"}))
    check(DeletedMessageBatch, http.delete(path).text)


def message_events(stream: str) -> list[str]:
    """The events that the package's type has: its client skips pings."""
    return [event for event in data(stream) if json.loads(event) != {"type": "ping"}]


# Ollama's


def test_ollama(http: httpx.Client) -> None:
    few = {"options": {"num_predict": 9}}
    check(ollama.ChatResponse, *post(http, "/api/chat", {"messages": HI, **few}).splitlines(), adds=TIMED)
    check(
        ollama.GenerateResponse,
        *post(http, "/api/generate", {"prompt": "Hi", **few}).splitlines(),
        adds=TIMED,
    )
    check(ollama.EmbedResponse, post(http, "/api/embed", {"input": "Hi"}))
    check(ollama.EmbeddingsResponse, post(http, "/api/embeddings", {"prompt": "Hi"}))
    check(ollama.ListResponse, http.get("/api/tags").text, adds=frozenset({"models[].name"}))
    check(ollama.ProcessResponse, http.get("/api/ps").text)
    check(ollama.ShowResponse, post(http, "/api/show", {}))
    questions = {
        "greeting": {"type": "noul", "instructions": "Is it a greeting?"},
        "polite": {
            "type": "choice",
            "instructions": "Is it polite?",
            "criteria": {"yes": None, "no": "not at all"},
        },
        "how": {"type": "score", "instructions": "How polite?", "criteria": ["not", "very"]},
    }
    reply = post(http, "/v1/systemone", {"state": "Hello!", "questions": questions})
    check(ollama.SystemOneResponse, reply, adds=TIMED | IN_USAGE)


# With reasoning, calls of tools, and faults


async def said(path: str, body: dict[str, Any], reason: FinishReason = FinishReason.STOP) -> str:
    """The reply where the model reasons, says something and calls a tool, then ends for a reason."""
    here = gateway()
    async with serving(here.app) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
        asked = http.build_request("POST", path, json={"model": MODEL, "tools": [TOOL], **body})
        asking = asyncio.create_task(http.send(asked, stream=True))
        request = await here.taken()
        for text in SAID[:4]:
            here.bring(request, text)
        if body.get("stream"):
            await asking  # it has begun
        for text in SAID[4:]:
            here.bring(request, text)
        here.finish(request, reason=reason, error="not finite" if reason is FinishReason.FAILED else None)
        return (await (await asking).aread()).decode()


RESPONSE_TOOL = {"type": "function", **TOOL["function"], "strict": True}
ANTHROPIC_TOOL = {"name": "clock", "input_schema": TOOL["function"]["parameters"]}
REASONED = "choices[].message.reasoning_content"


@pytest.mark.anyio
async def test_chats_with_reasoning_and_calls() -> None:
    check(chat.ChatCompletion, await said(CHAT, {"messages": HI}), adds=TIMED | {REASONED})
    chunks = data(await said(CHAT, {"messages": HI, **USAGE}))
    check(chat.ChatCompletionChunk, *chunks, adds=TIMED | {"choices[].delta.reasoning_content"})


@pytest.mark.anyio
async def test_responses_with_reasoning_and_calls() -> None:
    asked = {"input": "Hello!", "tools": [RESPONSE_TOOL]}
    check(responses.Response, await said(RESPONSES, asked), adds=STORED)
    events = data(await said(RESPONSES, {**asked, "stream": True}))
    check(responses.ResponseStreamEvent, *events, adds=IN_EVENTS | {"name"})
    kinds = {json.loads(event)["type"].removeprefix("response.") for event in events}
    assert kinds > {"reasoning_text.delta", "output_text.done", "function_call_arguments.done", "completed"}


@pytest.mark.anyio
async def test_messages_with_reasoning_and_calls() -> None:
    asked = {"messages": HI, "max_tokens": 99, "tools": [ANTHROPIC_TOOL]}
    check(anthropic.types.Message, await said(MESSAGES, asked), adds=TIMED)
    events = message_events(await said(MESSAGES, {**asked, "stream": True}))
    check(anthropic.types.RawMessageStreamEvent, *events, adds=TIMED)


@pytest.mark.anyio
async def test_chats_of_ollama_with_reasoning_and_calls() -> None:
    lines = (await said("/api/chat", {"messages": HI, "think": True})).splitlines()
    check(ollama.ChatResponse, *lines, adds=TIMED | {"message.tool_calls[].id"})


@pytest.mark.anyio
async def test_faults_in_a_stream() -> None:
    failed = FinishReason.FAILED
    fault = data(await said(CHAT, {"messages": HI, "stream": True}, failed))[-1]
    check(shared.ErrorObject, json.dumps(json.loads(fault)["error"]))
    events = data(await said(RESPONSES, {"input": "Hello!", "stream": True, "tools": []}, failed))
    check(responses.ResponseFailedEvent, events[-1], adds=frozenset({"response.store"}))
    asked = {"messages": HI, "max_tokens": 99, "stream": True, "tools": [ANTHROPIC_TOOL]}
    check(ErrorResponse, data(await said(MESSAGES, asked, failed))[-1])

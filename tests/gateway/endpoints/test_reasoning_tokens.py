"""A reply counts its reasoning tokens, and on `/v1/responses` has the log probabilities of the others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from penstock.engine.planning.request import FinishReason
from tests.gateway.endpoints.test_tools import CHAT, RESPONSES, gateway
from tests.gateway.harness import MODEL, Gateway, chat_body, client, events, logprobs, make_timings

pytestmark = pytest.mark.anyio

THOUGHT, SAID = "<think>Hm.</think>", "Yes."
LOGPROBS = "message.output_text.logprobs"


async def answered(here: Gateway, path: str, body: dict[str, Any]) -> httpx.Response:
    """Token by token, as an engine does: each is a character, and is half as likely as the one before."""
    async with client(here.app) as http:
        reply = asyncio.create_task(http.post(path, json={"model": MODEL, **body}))
        request = await here.taken()
        for place, token_id in enumerate(here.service.tokenizer.encode(THOUGHT + SAID)):
            told = (
                [logprobs((token_id, -float(place)), (7, -9.0))]
                if request.sampling.num_logprobs is not None
                else None
            )
            text = here.service.tokenizer.decode([token_id])
            here.bring(request, text, token_ids=[token_id], logprobs=told)
        here.deliver(
            here.output(
                request,
                "",
                token_ids=[],
                finish_reason=FinishReason.STOP,
                timings=make_timings(request),
            )
        )
        return await reply


ASKED: dict[str, dict[str, Any]] = {
    CHAT: chat_body(),
    RESPONSES: {"input": "Hi"},
    "/v1/messages": chat_body(max_tokens=99),
}
COUNTED = {
    CHAT: '"completion_tokens_details": {"reasoning_tokens": %d}',
    RESPONSES: '"output_tokens_details": {"reasoning_tokens": %d}',
    "/v1/messages": '"output_tokens_details": {"thinking_tokens": %d}',
}
WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
RESUMABLE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "resumable": True}}


@pytest.mark.parametrize(
    ("path", "streamed"),
    [*((path, {}) for path in ASKED), (CHAT, WITH_USAGE), (CHAT, RESUMABLE)]
    + [(path, {"stream": True}) for path in (RESPONSES, "/v1/messages")],
)
async def test_reasoning_is_counted(path: str, streamed: dict[str, Any]) -> None:
    reply = await answered(gateway(), path, {**ASKED[path], **streamed})
    told = events(reply.text) if streamed else [reply.json()]
    usages = [json.dumps(event) for event in told if "_tokens_details" in json.dumps(event)]
    assert COUNTED[path] % len(THOUGHT) in usages[-1]


async def test_a_response_tells_how_likely_what_it_says_was() -> None:
    asked = {"input": "Hi", "include": [LOGPROBS], "top_logprobs": 1}
    whole = (await answered(gateway(), RESPONSES, asked)).json()
    told = whole["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in told] == list(SAID), "its reasoning is not told of"
    assert [entry["logprob"] for entry in told] == [-float(len(THOUGHT) + i) for i in range(len(SAID))]
    assert [len(entry["top_logprobs"]) for entry in told] == [1] * len(SAID)
    assert (whole["top_logprobs"], told[0]["bytes"]) == (1, [ord(SAID[0])])

    streamed = events((await answered(gateway(), RESPONSES, {**asked, "stream": True})).text)
    deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == list(SAID)
    assert [event["delta"] for event in deltas] == list(SAID)
    (done,) = (event for event in streamed if event["type"] == "response.output_text.done")
    assert done["logprobs"] == told
    assert streamed[-1]["response"]["output"][1]["content"][0]["logprobs"] == told
    plain = (await answered(gateway(), RESPONSES, {"input": "Hi"})).json()
    assert plain["output"][1]["content"][0]["logprobs"] == []


async def test_log_probabilities_that_cannot_be_kept_are_refused() -> None:
    here = gateway()
    here.engine.max_sequence_tokens = 4096
    async with client(here.app) as http:
        fields = {"top_logprobs": 20, "max_output_tokens": 3000}
        asked = {"model": MODEL, "input": "Hi", "include": [LOGPROBS], **fields}
        reply = await http.post(RESPONSES, json=asked)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_output_tokens")

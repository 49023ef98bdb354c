"""Tokens on their way out: at once where the connection takes them, later where it does not, and never lost."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import Output, Request
from penstock.gateway.http.connections import SEND, WRITABLE
from penstock.gateway.reply import generation as live
from penstock.gateway.service import ServiceOptions
from tests.gateway.endpoints.test_tools import TEMPLATE, TOOL
from tests.gateway.harness import (
    MODEL,
    Gateway,
    chat_body,
    completion_body,
    events,
    logprobs,
    make_tokenizer,
    serving,
    settled,
    step_report,
)
from tests.gateway.raw_http import connect, post, read_events

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PATIENCE_S = 10
TOKENIZER = make_tokenizer()


class FakeClient:
    """A client without a socket, whose connection is stuffed and freed by the test."""

    def __init__(self, gateway: Gateway, body: dict[str, Any], path: str = CHAT) -> None:
        self.sent: list[bytes] = []
        self.is_writable = True
        self.claims_writable = False
        """Whatever is true."""
        self._freed = asyncio.Event()
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "extensions": {
                SEND: self._send,
                WRITABLE: lambda: self.is_writable or self.claims_writable,
            },
        }
        self._asking = asyncio.ensure_future(gateway.app(scope, self._receive, self._send))

    def stuff(self) -> None:
        self.is_writable = False
        self._freed.clear()

    def free(self) -> None:
        self.is_writable = True
        self._freed.set()

    async def answered(self) -> str:
        """All that it was sent."""
        await asyncio.wait_for(self._asking, PATIENCE_S)
        return b"".join(self.sent).decode()

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await asyncio.Event().wait()  # It stays until the end.
        return None

    async def _send(self, message: Any) -> None:
        if not self.is_writable:
            await self._freed.wait()
        self.sent.append(message.get("body", b""))


async def begun(gateway: Gateway, **fields: Any) -> tuple[FakeClient, Request]:
    """A stream whose first token is out."""
    client = FakeClient(gateway, chat_body(stream=True, **fields))
    request = await gateway.taken()
    gateway.bring(request, "<", token_ids=TOKENIZER.encode("<"))
    await settled()
    return client, request


def contents(body: str) -> list[str]:
    chunks = (event for event in events(body) if event != "[DONE]" and "choices" in event)
    return [text for chunk in chunks if (text := chunk["choices"][0]["delta"].get("content"))]


async def test_a_token_is_out_when_the_delivery_returns() -> None:
    gateway = Gateway()
    client, request = await begun(gateway)
    gateway.bring(request, "now")
    assert b'"now"' in client.sent[-1]
    gateway.finish(request)
    assert contents(await client.answered()) == ["<", "now"]


async def calls_for_a_token(gateway: Gateway, *texts: str, **fields: Any) -> int:
    """Calls of Python functions that a token takes to its client, after these texts."""
    client, request = await begun(gateway, **fields)
    for text in texts:
        gateway.bring(request, text, token_ids=TOKENIZER.encode(text))
    report, events = step_report(gateway.output(request, " token")), []
    sys.setprofile(lambda _frame, event, _arg: events.append(event))
    gateway.service.deliver(report)
    sys.setprofile(None)
    gateway.finish(request)
    assert contents(await client.answered())[-1:] == [" token"] or texts[-1:] == ("Hm,",)
    return events.count("call")


@pytest.mark.parametrize(("options", "most"), [(None, 11), ({"resumable": True}, 18)])
async def test_a_token_takes_few_calls_from_its_reply_to_the_socket(
    options: dict[str, bool] | None, most: int
) -> None:
    """Two of them are this file's own: how the connection says that it is writable, and its `send`."""
    gateway = Gateway()
    client, request = await begun(gateway, stream_options=options)
    report, calls = step_report(gateway.output(request, " token")), []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    gateway.service.deliver(report)
    sys.setprofile(None)
    gateway.finish(request)
    assert contents(await client.answered()) == ["<", " token"]
    own = calls[calls.index("Generation.push") :]
    assert len(own) <= most, own


async def test_reasoning_and_tools_cost_a_token_a_few_calls_more_than_plain_text() -> None:
    plain = await calls_for_a_token(Gateway(ServiceOptions(models=(MODEL,))))
    tools = {"tools": [TOOL]}
    for texts in (("think>", "Hm,"), ("think>", "Hm.</think>", "So"), ("So",), ("So \n", "on")):
        options = ServiceOptions(models=(MODEL,), tool_parser="hermes", reasoning_parser="think")
        reading = Gateway(options, tokenizer=make_tokenizer(TEMPLATE))
        assert await calls_for_a_token(reading, *texts, **tools) <= plain + 8


async def test_a_delivery_waits_for_no_reader() -> None:
    gateway = Gateway()
    client, request = await begun(gateway)
    client.stuff()
    before = list(client.sent)
    for text in "abc":
        gateway.bring(request, text)
        await settled()
    assert client.sent == before
    client.free()
    await settled()
    gateway.bring(request, "d")
    gateway.finish(request, ">")
    # The first of them was under way; what came while it waited was joined.
    assert contents(await client.answered()) == ["<", "a", "bc", "d", ">"]


async def test_what_is_kept_goes_before_what_comes_after_it() -> None:
    """Also if the connection is freed before the reader has woken up for what was kept."""
    gateway = Gateway()
    client, request = await begun(gateway)
    client.stuff()
    gateway.bring(request, "kept")
    client.free()
    gateway.bring(request, ", then this")
    gateway.finish(request)
    assert contents(await client.answered()) == ["<", "kept, then this"]


TEXTS = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('\u2028\x85\n\r"\\é😀'), max_size=5
)
STEPS = st.dictionaries(st.integers(0, 2), TEXTS, max_size=3)
HAPPENINGS = st.lists(STEPS | st.sampled_from(["stuff", "free", "turn"]), max_size=25)


class LaggingGateway(Gateway):
    """Its event loop comes for so many reports at a time."""

    def __init__(self, num_at_a_time: int) -> None:
        super().__init__(tokenizer=TOKENIZER)
        self._num_at_a_time = num_at_a_time
        self._reports: list[StepReport] = []

    def deliver(self, *outputs: Output, **fields: Any) -> None:
        self._reports.append(step_report(*outputs, **fields))
        if len(self._reports) >= self._num_at_a_time or any(output.finish_reason for output in outputs):
            reports, self._reports = self._reports, []
            self.service.deliver(*reports)


async def happen(gateway: Gateway, client: FakeClient, request: Request, what: Any, **fields: Any) -> None:
    if what == "turn":
        await settled()
    elif what == "stuff":
        client.stuff()
    elif what == "free":
        client.free()
    else:
        gateway.deliver(*(gateway.output(request, text, index, **fields) for index, text in what.items()))


@given(HAPPENINGS, STEPS, st.booleans(), st.sampled_from([CHAT, "/v1/completions"]), st.integers(1, 4))
async def test_nothing_is_lost_or_out_of_order(
    happenings: list[Any], last: dict[int, str], with_logprobs: bool, path: str, num_at_a_time: int
) -> None:
    """Reports come one by one, or several at a time, as they do while the event loop is busy."""
    gateway = LaggingGateway(num_at_a_time)
    asked: dict[str, Any] = {"stream": True, "n": 3, "stream_options": {"include_usage": True}}
    brought: dict[str, Any] = {"logprobs": [logprobs((7, -0.5))]} if with_logprobs else {}
    if path == CHAT:
        client = FakeClient(gateway, chat_body(**asked, logprobs=with_logprobs))
    else:
        client = FakeClient(gateway, completion_body(**asked, logprobs=0 if with_logprobs else None), path)
    request = await gateway.taken()
    for what in happenings:
        await happen(gateway, client, request, what, **brought)
    for index in range(3):
        gateway.finish(request, last.get(index, ""), index, **brought)
    client.free()
    steps = [what for what in happenings if isinstance(what, dict)]
    *chunks, usage, done = events(await client.answered())
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == sum(map(len, steps)) + 3
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        texts = [choice["text"] if path != CHAT else choice["delta"].get("content", "") for choice in own]
        assert "".join(texts) == "".join(step.get(index, "") for step in [*steps, last])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        entries = [choice["logprobs"] for choice in own if choice["logprobs"]]
        spelt = sum(len(entry["content" if path == CHAT else "tokens"]) for entry in entries)
        assert spelt == (sum(index in step for step in steps) + 1 if with_logprobs else 0)
    choices = [chunk["choices"][0] for chunk in chunks]
    openings = Counter(choice["index"] for choice in choices if "role" in choice.get("delta", ()))
    assert openings == ({0: 1, 1: 1, 2: 1} if path == CHAT else {})


async def test_a_narrow_connection_gets_the_same_text_in_fewer_pieces() -> None:
    gateway = Gateway()
    pieces = [f"{number:08}" * 2560 for number in range(48)]
    async with serving(gateway.app) as url, connect(url, narrow=True) as connection:
        connection.send(post(CHAT, chat_body(stream=True)))
        request = await gateway.taken()
        for piece in pieces:
            gateway.bring(request, piece)
            await settled()
        gateway.finish(request)
        await connection.head()
        stream = b"".join([chunk async for chunk in connection.chunks()])
    chunks = [json.loads(event.data) for event in read_events(stream)[:-1]]
    texts = [text for chunk in chunks if (text := chunk["choices"][0]["delta"].get("content"))]
    assert "".join(texts) == "".join(pieces)
    assert 1 < len(texts) < len(pieces)


async def test_a_connection_that_waits_after_all_fails_its_own_stream_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = Gateway()
    before, bad, after = [await begun(gateway) for _ in range(3)]
    bad[0].stuff()
    bad[0].claims_writable = True
    gateway.deliver(*(gateway.output(request, "token") for _, request in (before, bad, after)))
    assert f"passing on the output of {bad[1].request_id} failed" in caplog.text
    bad[0].free()
    *_, error, done = events(await bad[0].answered())
    assert (error["error"]["code"], done) == ("internal_error", "[DONE]")
    assert gateway.engine.cancelled == [bad[1].request_id]
    for client, request in (before, after):
        gateway.finish(request, ">")
        assert contents(await client.answered()) == ["<", "token", ">"]


async def test_the_step_is_counted_although_a_push_failed() -> None:
    gateway = Gateway()
    client, request = await begun(gateway)
    client.stuff()
    client.claims_writable = True
    gateway.bring(request, "token")
    client.free()
    await client.answered()
    found = gateway.service.render_metrics()
    assert b"penstock_output_tokens_total 2.0" in found
    assert b"penstock_step_seconds_count 2.0" in found
    assert b'penstock_choices_total{finish_reason="cancelled",lane="standard"} 1.0' in found


async def test_what_the_engine_brings_after_a_failed_push_harms_nobody() -> None:
    gateway = Gateway()
    client, request = await begun(gateway)
    client.stuff()
    client.claims_writable = True
    gateway.bring(request, "lost")
    client.free()
    gateway.bring(request, "late")
    gateway.finish(request, "later")
    body = await client.answered()
    assert body.count("[DONE]") == 1
    assert body.count('"error"') == 1
    await gateway.left()


async def test_log_probabilities_that_nobody_reads_count_as_what_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "MAX_PENDING_BYTES", 100_000)
    gateway, cut = Gateway(), 0
    asked = chat_body(stream=True, logprobs=True, top_logprobs=20)
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post("/v1/chat/completions", asked))
        request = await gateway.taken()
        top = logprobs(*((number, -1.0) for number in range(20)))
        for _ in range(100):  # no turn of the loop in between: the reader takes nothing
            gateway.bring(request, "x", logprobs=[top])
            cut += bool(gateway.service.metrics.slow_readers.value)
        await gateway.left()
    assert cut == 100 - 100_000 // (21 * 100 + 1)

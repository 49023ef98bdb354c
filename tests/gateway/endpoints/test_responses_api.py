"""The Responses API over real connections, with the engine in the test's hands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from starlette.applications import Starlette

from penstock.engine.planning.request import FinishReason, Request
from penstock.gateway.access.keys import digest_of
from penstock.gateway.endpoints.conversations import ConversationsApi
from penstock.gateway.endpoints.intake import Intake
from penstock.gateway.endpoints.operation import routes_of
from penstock.gateway.endpoints.responses import ResponsesApi
from penstock.gateway.errors import ApiError
from penstock.gateway.http.refusals import answer_api_error
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import PIECE, Key, StoreUnavailable
from penstock.priority.lanes import Lane, Tenant
from tests.gateway.harness import MODEL, Gateway, client, serving
from tests.gateway.raw_http import connect, get, post

pytestmark = pytest.mark.anyio

RESPONSES = "/v1/responses"


def app_of(gateway: Gateway) -> Any:
    intake = Intake(gateway.service)
    routes = routes_of(ResponsesApi(gateway.service, intake), ConversationsApi(gateway.service, intake))
    handlers: Any = {ApiError: answer_api_error}
    return Starlette(routes=routes, exception_handlers=handlers)


@contextlib.asynccontextmanager
async def connected(gateway: Gateway, **options: Any) -> AsyncIterator[Any]:
    async with (
        serving(app_of(gateway)) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=options.pop("api_key", "none"), max_retries=0, timeout=20
        ) as api,
    ):
        yield api


def told(gateway: Gateway, request: Request, *texts: str, reason: FinishReason = FinishReason.STOP) -> None:
    """The model says these texts, with the tokens that spell them, and ends."""
    for text in texts:
        gateway.bring(request, text, token_ids=gateway.service.tokenizer.encode(text))
    gateway.finish(request, reason=reason, token_ids=[1] if reason is FinishReason.STOP else [])


async def answered(gateway: Gateway, asking: Any, *texts: str, **fields: Any) -> Any:
    """Awaits a call to the client while an engine answers it."""
    task = asyncio.ensure_future(asking)
    told(gateway, await gateway.taken(), *texts, **fields)
    return await asyncio.wait_for(task, 10)


async def taken_of(gateway: Gateway, asking: Any) -> tuple[Request, Any]:
    """A call that is not answered yet, and what the engine has of it."""
    task = asyncio.ensure_future(asking)
    return await gateway.taken(), task


async def refused(asking: Any) -> Any:
    """The error that a call ends with."""
    with pytest.raises(openai.APIStatusError) as caught:
        await asyncio.wait_for(asking, 10)
    return caught.value


# One response


async def test_a_response_and_what_is_kept_of_it() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        made = await answered(gateway, api.responses.create(model=MODEL, input="Hi"), "Hel", "lo")
        assert (made.status, made.output_text) == ("completed", "Hello")
        assert made.usage.input_tokens_details.cached_tokens == 4
        assert made.timings["lane"] == "standard"
        assert await api.responses.retrieve(made.id) == made
        (item,) = (await api.responses.input_items.list(made.id)).data
        assert (item.role, item.content[0].text) == ("user", "Hi")
        await api.responses.delete(made.id)
        assert (await refused(api.responses.retrieve(made.id))).status_code == 404
        assert (await refused(api.responses.delete(made.id))).status_code == 404


async def test_what_is_asked_for_reaches_the_engine() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        request, task = await taken_of(
            gateway,
            api.responses.create(
                model=MODEL,
                instructions="Be brief.",
                input=[{"role": "user", "content": "Hi"}],
                max_output_tokens=2,
                service_tier="flex",
                temperature=0.5,
            ),
        )
        assert gateway.prompt_of(request) == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
        assert (request.lane, request.sampling.max_tokens, request.sampling.temperature) == (
            Lane.BATCH,
            2,
            0.5,
        )
        told(gateway, request, "a", "b", reason=FinishReason.LENGTH)
        made = await task
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (made.service_tier, made.max_output_tokens) == ("flex", 2)


async def test_a_stream_and_the_rest_of_it_from_every_event_on() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        stream = await answered(
            gateway, api.responses.create(model=MODEL, input="Hi", stream=True), "Hel", "", "lo"
        )
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(10))
        assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == "Hello"
        response_id = events[0].response.id
        for number in range(-1, 10):
            after = {} if number < 0 else {"starting_after": number}
            rest = await api.responses.retrieve(response_id, stream=True, **after)
            assert [event async for event in rest] == events[number + 1 :]
        assert events[-1].response == await api.responses.retrieve(response_id)


async def test_a_fault_after_the_first_byte_ends_with_response_failed() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        request, task = await taken_of(gateway, api.responses.create(model=MODEL, input="Hi", stream=True))
        gateway.bring(request, "Hel")
        stream = await task
        first = await anext(stream)
        gateway.finish(request, reason=FinishReason.FAILED)
        last = [event async for event in stream][-1]
        assert (last.type, last.response.error.code) == ("response.failed", "server_error")
        assert last.response.output_text == "Hel"
        assert (await api.responses.retrieve(first.response.id)).status == "failed"


async def test_a_client_that_leaves_ends_its_response() -> None:
    gateway = Gateway()
    async with serving(app_of(gateway)) as url, connect(url) as connection:
        connection.send(post(RESPONSES, {"model": MODEL, "input": "Hi"}))
        request = await gateway.taken()
        connection.hang_up()
        await gateway.left()
    assert gateway.engine.cancelled == [request.request_id]


async def test_what_is_not_to_be_stored_cannot_be_asked_for() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        made = await answered(gateway, api.responses.create(model=MODEL, input="Hi", store=False), "a")
        assert (await refused(api.responses.retrieve(made.id))).status_code == 404
        assert (await refused(api.responses.delete(made.id))).status_code == 404
        error = await refused(api.responses.create(model=MODEL, input="b", previous_response_id=made.id))
        assert (error.status_code, error.code) == (400, "previous_response_not_found")


# In the background


async def test_a_response_in_the_background() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        made = await api.responses.create(model=MODEL, input="Hi", background=True)
        assert (made.status, made.output) == ("queued", [])
        request = await gateway.taken()
        gateway.bring(request, "Hel", token_ids=[7])
        assert (await api.responses.retrieve(made.id)).status == "in_progress"
        (item,) = (await api.responses.input_items.list(made.id)).data
        assert item.content[0].text == "Hi"
        stream = await api.responses.retrieve(made.id, stream=True, starting_after=3)
        assert (await anext(stream)).delta == "Hel"
        gateway.finish(request, "lo")
        assert [event async for event in stream][-1].response.output_text == "Hello"
        assert (await api.responses.retrieve(made.id)).output_text == "Hello"


async def test_cancelling() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        stream = await api.responses.create(model=MODEL, input="Hi", background=True, stream=True)
        request = await gateway.taken()
        gateway.bring(request, "Hel", token_ids=[7])
        response_id = (await anext(stream)).response.id
        cancelled = await api.responses.cancel(response_id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
        last = [event async for event in stream][-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        assert gateway.engine.cancelled == [request.request_id]
        assert (await api.responses.cancel(response_id)).status == "cancelled"
        assert (await api.responses.retrieve(response_id)).status == "cancelled"
        whole = [event async for event in await api.responses.retrieve(response_id, stream=True)]
        assert whole[-1] == last
        for event in whole:
            after = event.sequence_number
            rest = await api.responses.retrieve(response_id, stream=True, starting_after=after)
            assert [event async for event in rest] == whole[after + 1 :]


async def test_only_the_background_can_be_cancelled() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        made = await answered(gateway, api.responses.create(model=MODEL, input="Hi"), "a")
        for _ in range(2):
            error = await refused(api.responses.cancel(made.id))
            assert (error.status_code, error.body["message"]) == (
                400,
                "Cannot cancel a synchronous response.",
            )
            _forget_all(gateway)


async def test_deleting_ends_what_is_at_work() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        made = await api.responses.create(model=MODEL, input="Hi", background=True)
        request = await gateway.taken()
        await api.responses.delete(made.id)
        assert gateway.engine.cancelled == [request.request_id]
        assert (await refused(api.responses.retrieve(made.id))).status_code == 404


# What is found, and by whom


@pytest.mark.parametrize("header", [True, False])
async def test_what_is_resumable_goes_on_without_its_client(header: bool) -> None:
    gateway = Gateway()
    body = {"model": MODEL, "input": "Hi", "stream": True}
    options = {} if header else {"stream_options": {"resumable": True}}
    sent = post(RESPONSES, body | options, *(["idempotency-key: k"] if header else []))
    async with serving(app_of(gateway)) as url, connect(url) as connection, connect(url) as other:
        connection.send(sent)
        request = await gateway.taken()
        gateway.bring(request, "Hel")
        await connection.head()
        connection.hang_up()
        recording = await gateway.service.recordings.find("default", request.request_id)
        assert recording is not None
        while recording.is_read:
            await asyncio.sleep(0)
        assert gateway.engine.cancelled == []
        gateway.finish(request, "lo")
        other.send(sent if header else get(f"{RESPONSES}/{request.request_id}?stream=true"))
        assert b'"text":"Hello"' in (await other.answer()).body


def _forget_all(gateway: Gateway) -> None:
    """The recordings are gone; what is in the store stays."""
    gateway.clock.now += 301
    gateway.service.recordings.tick(gateway.clock.now)
    assert len(gateway.service.recordings) == 0


async def test_a_response_outlives_its_events() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        made = await answered(gateway, api.responses.create(model=MODEL, input="Hi"), "a")
        _forget_all(gateway)
        assert await api.responses.retrieve(made.id) == made
        assert len((await api.responses.input_items.list(made.id)).data) == 1
        error = await refused(api.responses.retrieve(made.id, stream=True))
        assert error.status_code == 410


async def test_each_look_at_a_response_keeps_it_for_a_day() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        made = await answered(gateway, api.responses.create(model=MODEL, input="Hi"), "a")
        for _ in range(3):
            gateway.clock.now += 23 * 3600
            assert (await api.responses.retrieve(made.id)).id == made.id
        gateway.clock.now += 25 * 3600
        gateway.service.recordings.tick(gateway.clock.now)
        assert (await refused(api.responses.retrieve(made.id))).status_code == 404


async def test_anothers_response_is_no_response() -> None:
    keys = {digest_of(key): Tenant(name=key) for key in ("ann", "bob")}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=keys))
    async with connected(gateway, api_key="ann") as ann:
        bob = ann.with_options(api_key="bob")
        made = await answered(gateway, ann.responses.create(model=MODEL, input="Hi"), "a")
        unknown = "resp_" + "0" * 48
        for find in (
            bob.responses.retrieve,
            bob.responses.delete,
            bob.responses.cancel,
            bob.responses.input_items.list,
            lambda one: bob.responses.retrieve(one, stream=True),
        ):
            foreign, none = await refused(_awaited(find(made.id))), await refused(_awaited(find(unknown)))
            assert foreign.status_code == none.status_code == 404
            assert foreign.body["message"].replace(made.id, unknown) == none.body["message"]
        error = await refused(bob.responses.create(model=MODEL, input="b", previous_response_id=made.id))
        assert error.code == "previous_response_not_found"
        assert (await ann.responses.retrieve(made.id)).id == made.id


async def _awaited(call: Any) -> Any:
    return await call


async def test_malformed_questions() -> None:
    gateway = Gateway()
    async with client(app_of(gateway)) as http:
        for path, param in (
            ("resp-1", "response_id"),
            ("conv_1", "response_id"),
            ("resp_1?stream=true&starting_after=x", "starting_after"),
            ("resp_1/input_items?limit=0", "limit"),
        ):
            reply = await http.get(f"{RESPONSES}/{path}")
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_corrupt_record_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway()
    await gateway.service.store.put(Key("response", "default", "resp_1"), b'{"object":', 60.0)
    async with client(app_of(gateway)) as http:
        with caplog.at_level(logging.WARNING):
            reply = await http.get(f"{RESPONSES}/resp_1")
    assert reply.status_code == 404
    assert len([line for line in caplog.messages if "resp_1" in line]) == 1


# Going on


async def test_a_thread_goes_on_from_its_own_tokens() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        request, task = await taken_of(
            gateway, api.responses.create(model=MODEL, input="Hi", instructions="Be brief.")
        )
        told(gateway, request, "Hel", "lo")
        first = await task
        request, task = await taken_of(
            gateway, api.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        )
        # The instructions were the first turn's alone.
        asked = "<|bos|><|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>And?<|end|><|assistant|>"
        assert gateway.prompt_of(request) == asked
        told(gateway, request, "Yes")
        second = await task
        request, task = await taken_of(
            gateway, api.responses.create(model=MODEL, input="So", previous_response_id=second.id)
        )
        assert gateway.prompt_of(request) == f"{asked}Yes<|end|><|user|>So<|end|><|assistant|>"
        told(gateway, request, "x")
        assert (await task).previous_response_id == second.id


async def test_what_has_no_answer_is_not_gone_on_from() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        made = await api.responses.create(model=MODEL, input="Hi", background=True)
        await gateway.taken()
        going_on = {"model": MODEL, "input": "b", "previous_response_id": made.id}
        assert (await refused(api.responses.create(**going_on))).code == "previous_response_not_ready"
        await api.responses.cancel(made.id)
        error = await refused(api.responses.create(**going_on))
        assert (error.status_code, error.code) == (400, "previous_response_not_ready")
        going_on["previous_response_id"] = "resp_0"
        assert (await refused(api.responses.create(**going_on))).code == "previous_response_not_found"


async def test_one_that_has_lost_its_history_is_shown_and_not_gone_on_from() -> None:
    gateway = Gateway()
    gateway.engine.max_sequence_tokens = 10**6
    async with connected(gateway) as api:
        made = await answered(gateway, api.responses.create(model=MODEL, input="Hi " * 1000), "Ho")
        gateway.clock.now += 400
        gateway.service.tick(gateway.clock.now)
        store = gateway.service.store
        for piece in await store.list(PIECE, "default", 100):
            await store.delete(Key(PIECE, "default", piece))
        assert await api.responses.retrieve(made.id) == made
        error = await refused(api.responses.create(model=MODEL, input="b", previous_response_id=made.id))
        assert (error.code, "has lost its history" in error.message) == ("previous_response_not_ready", True)


async def test_a_conversation_takes_in_its_responses() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        conversation = await api.conversations.create()
        ask = {"model": MODEL, "conversation": conversation.id}
        first = await answered(gateway, api.responses.create(input="Hi", **ask), "Hel", "lo")
        assert first.conversation.id == conversation.id
        request, task = await taken_of(gateway, api.responses.create(input="And?", **ask))
        assert "<|assistant|>Hello<|end|><|user|>And?" in gateway.prompt_of(request)
        # One at a time.
        error = await refused(api.responses.create(input="Me, too", **ask))
        assert (error.status_code, error.code) == (409, "conversation_locked")
        told(gateway, request, "Yes")
        await task
        items = (await api.conversations.items.list(conversation.id, order="asc")).data
        assert [(item.role, item.content[0].text) for item in items] == [
            ("user", "Hi"),
            ("assistant", "Hello"),
            ("user", "And?"),
            ("assistant", "Yes"),
        ]
        assert items[1].id == first.output[0].id


async def test_a_response_that_fails_leaves_its_conversation_as_it_was_and_free() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        conversation = await api.conversations.create()
        ask = {"model": MODEL, "conversation": conversation.id}
        request, task = await taken_of(gateway, api.responses.create(input="Hi", **ask))
        gateway.finish(request, reason=FinishReason.FAILED)
        assert (await refused(task)).status_code == 500
        # Too long: refused before it was queued.
        assert (await refused(api.responses.create(input="x" * 600, **ask))).code == "context_length_exceeded"
        assert (await api.conversations.items.list(conversation.id)).data == []
        await answered(gateway, api.responses.create(input="Hi", **ask), "a")
        assert len((await api.conversations.items.list(conversation.id)).data) == 2


async def test_a_conversation_that_is_not_there() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        error = await refused(api.responses.create(model=MODEL, input="Hi", conversation="conv_0"))
        assert error.status_code == 404


async def test_a_store_that_is_away_for_a_moment_costs_a_conversation_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway()
    store, times_away = gateway.service.store, 2
    get = store.get

    async def away_at_first(key: Key, ttl_s: float | None = None) -> bytes | None:
        nonlocal times_away
        times_away -= 1
        if times_away >= 0:
            raise StoreUnavailable
        return await get(key, ttl_s)

    async with connected(gateway) as api:
        conversation = await api.conversations.create()
        request, task = await taken_of(
            gateway, api.responses.create(model=MODEL, input="Hi", conversation=conversation.id)
        )
        monkeypatch.setattr(store, "get", away_at_first)
        told(gateway, request, "a")
        assert (await task).status == "completed"
        assert len((await api.conversations.items.list(conversation.id)).data) == 2


async def test_a_request_that_is_sent_twice_is_done_once() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        ask = {"model": MODEL, "input": "Hi", "extra_headers": {"Idempotency-Key": "k"}}
        first = await answered(gateway, api.responses.create(**ask), "a")
        assert await api.responses.create(**ask) == first
        _forget_all(gateway)
        assert await api.responses.create(**ask) == first
        ask["input"] = "Ho"
        assert (await refused(api.responses.create(**ask))).code == "idempotency_key_reused"


@pytest.mark.parametrize("max_tokens", [None, 100, 400])
async def test_what_is_too_long_loses_its_oldest_turns(max_tokens: int | None) -> None:
    gateway = Gateway()  # 512 tokens, one a byte
    said = {"role": "system", "content": "Rule one."}
    turns = [
        message
        for number in range(20)
        for message in (
            {"role": "user", "content": f"Question {number:02}"},
            {"role": "assistant", "content": f"Answer {number:02}."},
        )
    ]
    asked: dict[str, Any] = {"model": MODEL, "input": [said, *turns, {"role": "user", "content": "Now?"}]}
    if max_tokens is not None:
        asked["max_output_tokens"] = max_tokens
    async with connected(gateway) as api:
        error = await refused(api.responses.create(**asked))
        assert error.code == "context_length_exceeded"
        request, task = await taken_of(gateway, api.responses.create(**asked, truncation="auto"))
        text, room = gateway.prompt_of(request), max_tokens or 512 // 8
        head = "<|bos|><|system|>Rule one.<|end|><|user|>"
        assert text.startswith(head)
        assert text.endswith("<|user|>Now?<|end|><|assistant|>")
        oldest = int(re.findall(r"Question (\d+)", text + "Question 20")[0])
        numbers = list(range(oldest, 20))
        assert [int(number) for number in re.findall(r"Answer (\d+)", text)] == numbers
        one_more = len(turns[0]["content"]) + len(turns[1]["content"]) + 4
        assert len(request.prompt_token_ids) + room <= 512 < len(request.prompt_token_ids) + room + one_more
        told(gateway, request, "x")
        assert (await task).truncation == "auto"
        short = {**asked, "input": "Hi", "max_output_tokens": 9}
        request, task = await taken_of(gateway, api.responses.create(**short, truncation="auto"))
        assert gateway.prompt_of(request) == "<|bos|><|user|>Hi<|end|><|assistant|>"
        told(gateway, request, "x")
        await task
        error = await refused(
            api.responses.create(model=MODEL, input="x" * 600, instructions="y", truncation="auto")
        )
        assert (error.status_code, error.code) == (400, "context_length_exceeded")

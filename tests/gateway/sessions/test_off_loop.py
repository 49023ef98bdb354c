"""Large values are packed and read beside the event loop: what its turns allocate, with and without threads."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread
import pytest

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request, TokenLogprobs
from penstock.gateway import off_loop
from penstock.gateway.reply.generation import Generation
from penstock.gateway.reply.whole import whole, whole_json
from penstock.gateway.sessions import chats
from penstock.gateway.sessions.conversations import CONVERSATIONS, Conversation
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses import records
from penstock.gateway.sessions.responses.objects import input_items
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.wire.completions import ChatWriter, Extras
from penstock.gateway.wire.frames import json_pieces
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.writing import Delta, Head
from tests.clock import Clock
from tests.gateway.harness import Gateway, make_tokenizer
from tests.gateway.sessions.recordings.fakes import make_recording, make_request
from tests.gateway.sessions.recordings.orphaning_store import OrphaningStore
from tests.gateway.sessions.responses.recorded_responses import finish, recording_of

pytestmark = pytest.mark.anyio

TENANT = "default"
NUM_TOKENS = 400_000
TOKENS = tuple(range(7, 207)) * (NUM_TOKENS // 200)
ITEMS = input_items("All work and no play. " * 20_000)
THREAD = Thread(({"role": "user", "content": "All work and no play. " * 20_000},), TOKENS)
ID = "resp_1a2b"

Work = Callable[[Gateway], Coroutine[None, None, None]]


def recording() -> Recording:
    sampling = SamplingParams(max_tokens=10**6)
    made = make_recording(
        Request(request_id="chatcmpl-1", tenant=TENANT, prompt_token_ids=TOKENS, sampling=sampling)
    )
    made.kept[0].token_ids = [5] * 20_000
    made.kept[0].finish_reason, made._num_unfinished, made.settled = FinishReason.STOP, 0, True
    return made


async def write_journal(gateway: Gateway) -> None:
    gateway.service.recordings._enter(made := recording())
    assert await gateway.service.recordings._write([made])


async def take_up(gateway: Gateway) -> None:
    await write_journal(gateway)
    gateway.service.recordings._all.clear()
    assert await gateway.service.recordings.find(TENANT, "chatcmpl-1") is not None


async def keep_response(gateway: Gateway) -> None:
    response = recording_of()
    response.request = replace(response.request, prompt_token_ids=TOKENS)
    response.details["history"] = list(THREAD.messages)
    finish(response)
    await records.keep(gateway.service.store, response)


async def read_response(gateway: Gateway) -> None:
    await keep_response(gateway)
    record = await records.find(gateway.service.store, TENANT, ID)
    assert record is not None
    assert record.thread is not None
    assert len(record.thread.token_ids) == NUM_TOKENS + 1


async def change_conversation(gateway: Gateway) -> None:
    store, talk = gateway.service.store, Conversation("conv_1", 1, items=ITEMS, token_ids=TOKENS)
    await CONVERSATIONS.put(store, TENANT, talk.id, talk)
    assert await CONVERSATIONS.change(store, TENANT, talk.id, lambda found: found.metadata.clear())


TOOL_NAMES = {"f": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOLD = [TokenLogprobs(-0.5, tuple((5 + i, -0.5 - i) for i in range(20)))] * 400


def writer_of(**fields: Any) -> ChatWriter:
    head = Head(id="chatcmpl-1", created=7, model="fake")
    return ChatWriter(make_tokenizer(), head, Extras(num_top=20), **fields)


async def parse_calls(_: Gateway) -> None:
    """A whole reply with as many calls as fit into a context."""
    reply, reading = Generation([make_request()]), Reading(tools="hermes", schemas=TOOL_NAMES)
    outputs = [(0, Delta([CALL * 400], finish_reason=FinishReason.STOP))]
    made = await whole(writer_of(reading=reading), reply, outputs)
    assert next(json_pieces(made))


async def store_logprobs(gateway: Gateway) -> None:
    reply, ids = Generation([make_request()]), [5] * len(TOLD)
    outputs = [(0, Delta(["a"], ids, [*TOLD], finish_reason=FinishReason.STOP))]
    body, completion = await whole_json(writer_of(), reply, outputs)
    request = {"messages": [{"role": "user", "content": "All work and no play. " * 20_000}]}
    await chats.keep(gateway.service.store, TENANT, request, completion, len(body))
    assert await chats.CHATS.get(gateway.service.store, TENANT, "chatcmpl-1") is not None


@dataclass
class LoopWork:
    """The memory that the event loop's turns take, without what is done in threads: here those run within a turn."""

    most: int = 0
    """The bytes of the turn that takes most."""
    _start: int = 0

    def turn(self, run: Callable[[asyncio.Handle], None], handle: asyncio.Handle) -> None:
        self._begin()
        run(handle)
        self._end()

    async def thread(self, work: Callable[..., Any], *args: Any, **_: Any) -> Any:
        self._end()
        try:
            return work(*args)
        finally:
            self._begin()

    def _begin(self) -> None:
        tracemalloc.reset_peak()
        self._start = tracemalloc.get_traced_memory()[0]

    def _end(self) -> None:
        self.most = max(self.most, tracemalloc.get_traced_memory()[1] - self._start)


async def bytes_of_loop(work: Work, monkeypatch: pytest.MonkeyPatch) -> int:
    """What is packed, read or joined is allocated: so many bytes are in the event loop's largest turn."""
    gateway, taken, run = Gateway(store=OrphaningStore(Clock())), LoopWork(), asyncio.Handle._run
    gateway.engine.max_sequence_tokens = 10**6
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.Handle, "_run", lambda handle: taken.turn(run, handle))
        patched.setattr(anyio.to_thread, "run_sync", taken.thread)
        tracemalloc.start()
        try:
            await asyncio.create_task(work(gateway))
        finally:
            tracemalloc.stop()
    return taken.most


@pytest.mark.parametrize(
    "work",
    [
        write_journal,
        take_up,
        keep_response,
        read_response,
        change_conversation,
        parse_calls,
        store_logprobs,
    ],
)
async def test_large_things_are_packed_and_read_beside_the_loop(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bytes_of_loop(work, monkeypatch)  # what is imported and made on first use
    beside = await bytes_of_loop(work, monkeypatch)
    monkeypatch.setattr(off_loop, "OFF_LOOP_BYTES", 10**9)
    on_it = await bytes_of_loop(work, monkeypatch)
    print(f"{work.__name__}: {beside:,} bytes of {on_it:,}")
    assert beside < on_it / 3

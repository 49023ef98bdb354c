"""A stream that one server began is finished by another one: same events, same numbers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.engine import EngineState
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request, TokenLogprobs
from penstock.engine.text.grammar import CompiledGrammar, Grammar, GrammarKind
from penstock.engine.text.thinking import ThinkingBudget
from penstock.gateway.errors import ApiError
from penstock.gateway.sessions.recordings import registry
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.recordings.registry import MAX_ATTEMPTS
from penstock.gateway.store.interface import Journal, JournalChange, JournalOutcome, StoreUnavailable
from tests.clock import Clock
from tests.few import examples
from tests.gateway.harness import Gateway, make_timings, make_tokenizer
from tests.gateway.sessions.recordings.fakes import FakeReader, make_recording, make_request
from tests.gateway.sessions.recordings.orphaning_store import OrphaningStore

pytestmark = pytest.mark.anyio

TEXT = "Grüße, 日本!"
TOKENS = make_tokenizer().encode(TEXT)
"""One a byte: most bring no text of their own."""
ID = "chatcmpl-" + "1" * 32


@asynccontextmanager
async def serving(store: OrphaningStore) -> AsyncIterator[Gateway]:
    gateway = Gateway(store=store, clock=store.clock)
    async with gateway.service.recordings.running():
        yield gateway


async def begun(gateway: Gateway, request: Request | None = None) -> Recording:
    like = make_recording()
    recordings = gateway.service.recordings
    recording = await recordings.start(
        request or make_request(ID, tenant="ann"),
        kind="chat",
        details=like.details,
        created=7,
        detachable=True,
        journalled=True,
    )
    assert await gateway.taken() == recording.request
    return recording


def engine_brings(
    gateway: Gateway, recording: Recording, first: int, last: int, *, ends: bool = False
) -> None:
    """The text of TOKENS from `first` to `last`, as the engine's own text side would cut it."""
    texts, _ = gateway.sink.replay(recording.request, TOKENS, 512)
    for i in range(first, last):
        gateway.bring(recording.request, texts[i], token_ids=[TOKENS[i]])
    if ends:
        gateway.deliver(
            gateway.output(
                recording.request, "", token_ids=[1], finish_reason=FinishReason.STOP,
                timings=make_timings(recording.request),
            )
        )  # fmt: skip


async def settled(recording: Recording) -> None:
    async with asyncio.timeout(10):
        while not recording.settled:
            await asyncio.sleep(0)


def frames(recording: Recording, position: int = -1) -> list[bytes]:
    reader = FakeReader(recording, position)
    reader.take()
    return reader.frames


async def expected_frames() -> list[bytes]:
    async with serving(OrphaningStore(Clock())) as gateway:
        recording = await begun(gateway)
        engine_brings(gateway, recording, 0, len(TOKENS), ends=True)
        await settled(recording)
        return frames(recording)


async def test_what_an_answer_has_to_match_is_compiled_again() -> None:
    """Before it is queued, and let go of when the answer has ended, as long as that is kept."""
    store, plain = OrphaningStore(Clock()), Grammar(GrammarKind.REGEX, ".*")
    async with serving(store) as gateway:
        asked = make_request(ID, tenant="ann")
        sampling = replace(asked.sampling, grammar=gateway.grammars.compile("ann", plain))
        engine_brings(gateway, await begun(gateway, replace(asked, sampling=sampling)), 0, 3)
    store.orphan()
    async with serving(store) as gateway:
        recording = await gateway.service.recordings.find("ann", ID)
        assert recording is not None
        assert isinstance((await gateway.taken()).sampling.grammar, CompiledGrammar)
        engine_brings(gateway, recording, 3, len(TOKENS), ends=True)
        await settled(recording)
        for request in (recording.request, *recording.requests):
            assert request.sampling.grammar == plain, "compiled, it is not"
        assert frames(recording) == await expected_frames()


async def test_the_budget_for_reasoning_goes_on() -> None:
    store, budget = (
        OrphaningStore(Clock()),
        ThinkingBudget(num_tokens=9, opening="<a>", closing="</a>", is_open=True, forced=(7, 8)),
    )
    async with serving(store) as gateway:
        asked = make_request(ID, tenant="ann")
        sampling = replace(asked.sampling, thinking=budget)
        engine_brings(gateway, await begun(gateway, replace(asked, sampling=sampling)), 0, 3)
    store.orphan()
    async with serving(store) as gateway:
        assert await gateway.service.recordings.find("ann", ID) is not None
        taken = await gateway.taken()
        assert (taken.sampling.thinking, taken.output_token_ids) == (budget, tuple(TOKENS[:3]))


async def test_what_can_no_longer_be_compiled_is_an_error() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        asked = make_request(ID, tenant="ann")
        sampling = replace(asked.sampling, grammar=Grammar(GrammarKind.REGEX, "("))
        await begun(gateway, replace(asked, sampling=sampling))
    store.orphan()
    async with serving(store) as gateway:
        recording = await gateway.service.recordings.find("ann", ID)
        assert recording is not None
        assert recording.error is not None
        assert recording.error.code == "invalid_grammar"
        await settled(recording)


@pytest.mark.parametrize("recorded", range(len(TOKENS) + 1))
async def test_from_any_token_on(recorded: int) -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        engine_brings(gateway, await begun(gateway), 0, recorded)
    store.orphan()
    async with serving(store) as gateway:
        recording = await gateway.service.recordings.find("ann", ID)
        assert recording is not None
        taken = await gateway.taken()
        assert taken.output_token_ids == tuple(TOKENS[:recorded])
        engine_brings(gateway, recording, recorded, len(TOKENS), ends=True)
        await settled(recording)
        found = frames(recording)
        assert recording.num_output_tokens == len(TOKENS) + 1
    assert found == await expected_frames()


async def test_what_was_not_written_down_is_made_again() -> None:
    store = OrphaningStore(Clock())
    gateway = Gateway(store=store, clock=store.clock)
    recording = await begun(gateway)  # nobody flushes here: only the header is in the journal
    engine_brings(gateway, recording, 0, 5)
    told = frames(recording)
    store.orphan()
    async with serving(store) as gateway:
        recording = await begun_again(gateway)
        assert recording.request.output_token_ids == ()
        engine_brings(gateway, recording, 0, len(TOKENS), ends=True)
        await settled(recording)
        assert told + frames(recording, len(told) - 1) == await expected_frames()


async def begun_again(gateway: Gateway) -> Recording:
    recording = await gateway.service.recordings.find("ann", ID)
    assert recording is not None
    await gateway.taken()
    return recording


WORDS = ["ab", "xyz", "q"]
"""The texts of the choices of one request, a token a character."""


def several(**fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=100, num_logprobs=1)
    return replace(make_request(ID, tenant="ann"), n=len(WORDS), sampling=sampling, **fields)


async def begun_with_several(gateway: Gateway, kind: str) -> Recording:
    details = {**make_recording().details, "num_choices": len(WORDS)}
    recording = await gateway.service.recordings.start(
        several(), kind=kind, details=details, created=7, detachable=True, journalled=True
    )
    await gateway.taken()
    return recording


def steps(order: Sequence[int]) -> list[tuple[int, int]]:
    """(choice, number of its token) in the order in which the engine brings them, so often each choice in turn."""
    left = [deque(enumerate([*word, "end"])) for word in WORDS]
    return [(index, left[index].popleft()[0]) for index in order]


def bring_steps(gateway: Gateway, recording: Recording, brought: Iterable[tuple[int, int]]) -> None:
    for index, number in brought:
        (request,) = [r for r in recording.requests if r.index == index or r.n > 1]
        text = WORDS[index][number : number + 1]
        token_id = make_tokenizer().encode(text)[0] if text else 1
        told = [TokenLogprobs(float(np.float32(-0.1 * (number + 1))), ((token_id, -0.75),))]
        fields = {"finish_reason": FinishReason.STOP, "timings": make_timings(request)} if not text else {}
        gateway.bring(request, text, index, token_ids=[token_id], logprobs=told, **fields)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_choices_of_one_request_go_on_whatever_their_order_was(kind: str, data: st.DataObject) -> None:
    every = [index for index, word in enumerate(WORDS) for _ in [*word, "end"]]
    first, second = data.draw(st.permutations(every)), data.draw(st.permutations(every))
    num_before, flushes = data.draw(st.integers(0, len(every))), data.draw(st.booleans())

    async def killed() -> list[bytes]:
        store = OrphaningStore(Clock())
        async with contextlib.AsyncExitStack() as stack:
            gateway = (
                await stack.enter_async_context(serving(store))
                if flushes
                else Gateway(store=store, clock=store.clock)
            )
            recording = await begun_with_several(gateway, kind)
            bring_steps(gateway, recording, steps(first)[:num_before])
            seen = frames(recording) if num_before < len(every) else []
        store.orphan()
        async with serving(store) as gateway:
            recording = found(await gateway.service.recordings.find("ann", ID))
            known = [len(choice.token_ids) for choice in recording.choices]
            ended = [choice.ended for choice in recording.choices]
            assert [r.index for r in recording.requests if not all(ended)] == [
                i for i in range(3) if not ended[i]
            ]
            bring_steps(gateway, recording, [(i, n) for i, n in steps(second) if n >= known[i]])
            await settled(recording)
            assert recording.num_output_tokens == len(every)
            assert frames(recording)[: len(seen)] == seen
            return frames(recording)

    async def whole() -> list[bytes]:
        async with serving(OrphaningStore(Clock())) as gateway:
            recording = await begun_with_several(gateway, kind)
            bring_steps(gateway, recording, steps(every))
            await settled(recording)
            return frames(recording)

    assert without_timings(asyncio.run(killed())) == without_timings(asyncio.run(whole()))


def found(recording: Recording | None) -> Recording:
    assert recording is not None
    return recording


def without_timings(frames: list[bytes]) -> list[bytes]:
    """Nobody knows them if the end alone was not written down."""
    return [re.sub(rb',"timings":.*}', b"", frame) for frame in frames]


async def test_one_that_ended_is_told_by_the_next_server_too() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        recording = await begun(gateway)
        engine_brings(gateway, recording, 0, len(TOKENS), ends=True)
        await settled(recording)
    store.orphan()
    async with serving(store) as gateway:
        again = await gateway.service.recordings.find("ann", ID)
        assert again is not None
        assert frames(again) == frames(recording)
        assert not any(gateway.queue.depths().values())


async def test_one_whose_end_alone_was_not_written_down_ends() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        recording = await begun(gateway)
        engine_brings(gateway, recording, 0, len(TOKENS))
        gateway.bring(recording.request, "", token_ids=[1])
    store.orphan()
    async with serving(store) as gateway:
        again = await gateway.service.recordings.find("ann", ID)
        assert again is not None
        await settled(again)
        assert again.finish_reason is FinishReason.STOP
        assert not any(gateway.queue.depths().values())
        assert again.choices[0].text == TEXT


async def test_one_that_the_server_could_not_finish_goes_on() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        recording = await begun(gateway)
        engine_brings(gateway, recording, 0, 4)
        gateway.service.dispatch.fail_all()
        await settled(recording)
        assert b"server_shutting_down" in b"".join(frames(recording))
    store.orphan()
    async with serving(store) as gateway:
        again = await begun_again(gateway)
        engine_brings(gateway, again, 4, len(TOKENS), ends=True)
        await settled(again)
        assert frames(again) == await expected_frames()


async def test_one_that_was_cancelled_is_over() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        recording = await begun(gateway)
        engine_brings(gateway, recording, 0, 4)
        gateway.service.recordings.cancel(recording)
        await settled(recording)
    store.orphan()
    async with serving(store) as gateway:
        again = await gateway.service.recordings.find("ann", ID)
        assert again is not None
        assert again.cancelled
        assert not any(gateway.queue.depths().values())


async def test_nobody_says_that_there_is_none_before_it_can_be_known() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        engine_brings(gateway, await begun(gateway), 0, 4)
    store.orphan()
    async with serving(store) as gateway:
        find = gateway.service.recordings.find
        gateway.engine.state = EngineState.STARTING
        with pytest.raises(ApiError) as refused:
            await find("ann", ID)
        assert refused.value.code == "model_loading"
        gateway.engine.state = EngineState.READY
        store.away = True
        with pytest.raises(StoreUnavailable):
            await find("ann", ID)
        store.away = False
        store.loses_answers = True
        with pytest.raises(StoreUnavailable):
            await find("ann", ID)
        store.loses_answers = False
        assert (await begun_again(gateway)).request.output_token_ids == tuple(TOKENS[:4])


class Leaving(OrphaningStore):
    """Goes away after so many journals were read."""

    num_reads_left = 1_000

    async def read_journal(self, stream_id: str) -> Journal | None:
        self.away = self.num_reads_left == 0
        self.num_reads_left -= 1
        return await super().read_journal(stream_id)


async def test_one_that_was_taken_over_before_the_store_went_away_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_TAKEN_OVER", 1)
    store = Leaving(Clock())
    async with serving(store) as gateway:
        await begun(gateway)
        await begun(gateway, make_request("chatcmpl-" + "2" * 32, tenant="ann"))
    store.orphan()
    gateway = Gateway(store=store, clock=store.clock)
    store.num_reads_left = 2  # to look for it, and to take it over; the other one is claimed with it
    assert await gateway.service.recordings.find("ann", ID) is not None
    assert store.away
    assert len(gateway.service.recordings) == 1


async def test_nobody_else_finds_it() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        await begun(gateway)
        assert await gateway.service.recordings.find("bob", ID) is None
    store.orphan()
    async with serving(store) as gateway:
        assert await gateway.service.recordings.find("bob", ID) is None
        assert await gateway.service.recordings.find("ann", ID) is not None


async def test_a_request_that_kills_every_server_fails_in_the_end() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        await begun(gateway)
    for _ in range(MAX_ATTEMPTS - 1):
        store.orphan()
        async with serving(store) as gateway:
            await begun_again(gateway)
    store.orphan()
    async with serving(store) as gateway:
        recording = await gateway.service.recordings.find("ann", ID)
        assert recording is not None
        await settled(recording)
        assert recording.error is not None
        assert recording.error.status == 500
        assert not any(gateway.queue.depths().values())
    store.orphan()
    assert await store.claim() == []


@pytest.mark.parametrize("header", [b"", b"{}", b"\xff", b'{"kind": 1}'])
async def test_a_broken_journal_is_a_miss(header: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        recording = await begun(gateway)
        engine_brings(gateway, recording, 0, 3)
    journal = await store.read_journal(ID)
    assert journal is not None
    await store.delete_journals([ID])
    await store.write_journals([JournalChange(ID, header, 0, journal.token_ids, 100.0)])
    store.orphan()
    async with serving(store) as gateway:
        assert await gateway.service.recordings.find("ann", ID) is None
    assert sum("passed over" in record.getMessage() for record in caplog.records) == 1


async def test_a_journal_of_events_with_other_numbers_is_a_miss() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        await begun(gateway)
    journal = await store.read_journal(ID)
    assert journal is not None
    header = json.loads(journal.header)
    for version in (None, header["version"] - 1):
        earlier = {**header, "version": version}
        if version is None:
            del earlier["version"]
        await store.delete_journals([ID])
        await store.write_journals([JournalChange(ID, json.dumps(earlier).encode(), 0, (), 100.0)])
        store.orphan()
        async with serving(store) as gateway:
            assert await gateway.service.recordings.find("ann", ID) is None


async def test_a_store_that_is_away_holds_nobody_up_and_catches_up() -> None:
    store = OrphaningStore(Clock())
    store.away = True
    async with serving(store) as gateway:
        recording = await begun(gateway)
        engine_brings(gateway, recording, 0, 5)
        assert store.journals == []
        store.away = False
    journal = await store.read_journal(ID)
    assert journal is not None
    assert journal.token_ids == tuple(TOKENS[:5])


@pytest.mark.parametrize(
    ("outcome", "why"),
    [("foreign", "another server took it over"), ("full", "its tenant has no room in Redis")],
)
async def test_a_reply_that_the_store_refuses_is_no_longer_written_down(
    outcome: JournalOutcome, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = OrphaningStore(Clock())

    async def refuse(changes: Sequence[JournalChange]) -> Sequence[JournalOutcome]:
        return [outcome for _ in changes]

    async with serving(store) as gateway:
        recording = await begun(gateway)
        monkeypatch.setattr(store, "write_journals", refuse)
        for number in range(3):
            engine_brings(gateway, recording, number, number + 1)
            await gateway.service.recordings._write_down()
        assert not recording.journalled
    (record,) = caplog.records
    assert record.getMessage() == f"the reply {ID} is no longer written down here: {why}"


async def test_what_the_store_lost_is_written_again() -> None:
    store = OrphaningStore(Clock())
    async with serving(store) as gateway:
        recording = await begun(gateway)
        engine_brings(gateway, recording, 0, 5)
        await store.delete_journals([ID])
        store.num_losses += 1
        engine_brings(gateway, recording, 5, 6)
    journal = await store.read_journal(ID)
    assert journal is not None
    assert journal.token_ids == tuple(TOKENS[:6])

"""Cancel, hang up, delete, expire, restart, lose the store: at any moment, in any order, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.planning.request import FinishReason
from penstock.gateway.access.keys import Client
from penstock.gateway.errors import ApiError
from penstock.gateway.http.connections import Connection
from penstock.gateway.sessions.recordings.recording import Reader, Recording
from penstock.gateway.store.interface import Quota, StoreUnavailable
from penstock.priority.lanes import Tenant
from tests.clock import Clock
from tests.few import examples
from tests.gateway.harness import Gateway
from tests.gateway.harness import settled as turns
from tests.gateway.sessions.recordings.fakes import FakeConnection, make_recording, make_request
from tests.gateway.sessions.recordings.orphaning_store import OrphaningStore

_Result = TypeVar("_Result")
ANN = Client(Tenant(name="ann"), Quota(max_streams=5, tokens_per_minute=100_000))
picks = st.integers(0, 100)


class RecordingsMachine(RuleBasedStateMachine):
    """Recordings with quotas, on a store that outlives the server; the engine's side is played here."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = Clock()
        self.store = OrphaningStore(self.clock)
        self.num_started = 0
        self.readers: list[tuple[Recording, Reader]] = []
        self.begin()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self.runner.run(work)

    def begin(self) -> None:
        async def enter() -> None:
            self.gateway = Gateway(store=self.store, clock=self.clock)
            self.recordings = self.gateway.service.recordings
            with contextlib.suppress(StoreUnavailable):
                await self.recordings._claiming.next()

        self.run(enter())

    @property
    def alive(self) -> list[Recording]:
        return [r for r in self.recordings._all.values() if not r.ended]

    def picked(self, pick: int) -> Recording:
        every = list(self.recordings._all.values())
        return every[pick % len(every)]

    @rule(detachable=st.booleans(), journalled=st.booleans())
    def start(self, detachable: bool, journalled: bool) -> None:
        self.num_started += 1
        request = make_request(f"chatcmpl-{self.num_started}", tenant="ann", arrival_s=self.clock())

        async def start() -> None:
            try:
                reservation = await self.gateway.service.quotas.reserve(ANN, 2, 10, request.request_id)
            except ApiError as error:
                assert error.status == 429  # noqa: PT017
                return
            await self.recordings.start(
                request,
                kind="chat",
                details=make_recording().details,
                created=7,
                detachable=detachable,
                journalled=journalled,
                max_detached_s=60.0,
                reservation=reservation,
            )

        self.run(start())

    @precondition(lambda self: bool(self.alive))
    @rule(pick=picks, ends=st.booleans())
    def the_engine_brings(self, pick: int, ends: bool) -> None:
        recording = self.alive[pick % len(self.alive)]

        async def bring() -> None:
            while self.gateway.queue.take(lambda _: True) is not None:
                pass
            if ends:
                self.gateway.finish(recording.request, "", token_ids=[1], reason=FinishReason.STOP)
            else:
                self.gateway.bring(recording.request, "a", token_ids=[100])
            await turns()

        self.run(bring())

    @precondition(lambda self: len(self.recordings) > 0)
    @rule(pick=picks)
    def a_reader_comes(self, pick: int) -> None:
        recording = self.picked(pick)
        reader = Reader(recording)
        reader.connection = cast(Connection, FakeConnection())
        recording.attach(reader)
        self.readers.append((recording, reader))

    @precondition(lambda self: bool(self.readers))
    @rule(pick=picks)
    def a_reader_goes(self, pick: int) -> None:
        recording, reader = self.readers.pop(pick % len(self.readers))

        async def go() -> None:
            recording.detach(reader, self.clock())
            if recording.is_abandoned(self.clock()):
                self.recordings.cancel(recording)
            await turns()

        self.run(go())

    @precondition(lambda self: len(self.recordings) > 0)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        async def cancel() -> None:
            self.recordings.cancel(self.picked(pick))
            await turns()

        self.run(cancel())

    @precondition(lambda self: len(self.recordings) > 0)
    @rule(pick=picks)
    def discard(self, pick: int) -> None:
        recording = self.picked(pick)
        self.run(self.recordings.discard(recording))
        assert self.store.away or recording.id not in self.store.journals

    @rule(seconds=st.sampled_from([0.1, 30.0, 61.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        async def tick() -> None:
            self.clock.now += seconds
            self.gateway.service.tick(self.clock())
            await turns()

        self.run(tick())

    @rule()
    def the_journal_is_written(self) -> None:
        self.run(self.recordings._write_down())

    @rule(away=st.booleans())
    def the_store(self, away: bool) -> None:
        self.store.away = away

    @rule()
    def the_server_is_killed(self) -> None:
        """Its memory is lost, and so are the connections of its clients."""
        self.readers.clear()
        self.store.orphan()
        self.begin()

    @rule()
    def the_server_stops(self) -> None:
        async def stop() -> None:
            self.gateway.service.begin_drain()
            self.gateway.service.dispatch.fail_all()
            await turns()
            await self.recordings._write_down()

        self.run(stop())
        self.the_server_is_killed()

    @invariant()
    def what_has_ended_holds_nothing(self) -> None:
        service = self.gateway.service
        assert {r.id for r in self.alive} == set(service.dispatch._by_request)
        assert set(self.alive) == set(service.dispatch._streams)
        for recording in self.recordings._all.values():
            if recording.settled and recording.reservation is not None:
                assert recording.reservation.ended

    def teardown(self) -> None:
        async def end() -> None:
            self.store.away = False
            for recording in list(self.recordings._all.values()):
                recording._readers.clear()
                recording.detached_s = self.clock()
            for seconds in (61.0, 400.0, 4_000.0):
                await self.recordings._claiming.next()
                await self.recordings._write_down()
                self.clock.now += seconds
                self.gateway.service.tick(self.clock())
                await turns()
            await self.recordings._write_down()
            assert len(self.recordings) == 0
            assert self.recordings._dirty == self.recordings._written == self.recordings._doomed == {}
            assert self.store.journals == []
            assert not self.gateway.service.dispatch._streams
            assert not any(self.gateway.queue.depths().values())
            grant = await self.store.reserve("ann", ANN.quota, 1, "last")
            assert grant.refused is None
            assert len(asyncio.all_tasks()) == 1

        try:
            self.run(end())
        finally:
            self.runner.close()


TestRecordings = RecordingsMachine.TestCase
TestRecordings.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)

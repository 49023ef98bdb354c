"""Tenants have the tokenizing threads in turns; what of one may wait is bounded, and the refusal says until when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.http import fair_threads
from penstock.gateway.http.fair_threads import TOKENIZED_ON_LOOP_BYTES, FairThreads
from tests.clock import Clock
from tests.gateway.harness import settled

pytestmark = pytest.mark.anyio

BIG = TOKENIZED_ON_LOOP_BYTES + 1


class Works:
    """Work that is over when it is told to be; notes who began, in order."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.begun: list[str] = []
        self.began = threading.Semaphore(0)

    def of(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            self.began.release()
            assert self.go_on.acquire(timeout=30)
            return name

        return work

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.began.acquire, timeout=30)


@pytest.fixture
def works() -> Iterator[Works]:
    works = Works()
    yield works
    works.go_on.release(1000)


async def test_what_is_small_is_done_at_once() -> None:
    threads, here = FairThreads(1, 1), threading.get_ident()
    assert await threads.run("a", TOKENIZED_ON_LOOP_BYTES, threading.get_ident) == here
    assert await threads.run("a", BIG, threading.get_ident) != here


@pytest.mark.parametrize("num_threads", [1, 2])
async def test_a_tenant_waits_for_few_of_anothers(works: Works, num_threads: int) -> None:
    threads = FairThreads(num_threads, 1000 * BIG)
    flood = [asyncio.create_task(threads.run("flood", BIG, works.of("flood"))) for _ in range(50)]
    for _ in range(num_threads):
        await works.has_begun()
    quiet = asyncio.create_task(threads.run("quiet", BIG, works.of("quiet")))
    await settled()
    # Its turn comes after 2 for each thread; those that run beside it may begin before it, though their turn is later.
    works.go_on.release(3 * num_threads)
    assert await quiet == "quiet"
    assert works.begun.index("quiet") < 3 * num_threads
    works.go_on.release(50)
    assert await asyncio.gather(*flood) == ["flood"] * 50


async def test_what_may_wait_of_one_tenant_is_bounded(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_threads, "_FIRST_GUESS_S_PER_BYTE", 0.001)
    threads = FairThreads(1, 3 * BIG)
    waiting = [asyncio.create_task(threads.run("a", BIG, works.of("a"))) for _ in range(3)]
    other = asyncio.create_task(threads.run("b", 2 * BIG, works.of("b")))
    await works.has_begun()
    with pytest.raises(ApiError) as refusal:
        await threads.run("a", BIG, works.of("too much"))
    assert (refusal.value.status, refusal.value.code) == (429, "too_much_to_tokenize")
    # One piece of a's has to be done, and as much of b's has its turn meanwhile.
    assert refusal.value.retry_after_s == pytest.approx(2 * BIG * 0.001)
    works.go_on.release(4)
    await asyncio.gather(*waiting, other)
    again = asyncio.create_task(threads.run("a", BIG, works.of("again")))
    works.go_on.release()
    assert await again == "again"


async def test_one_text_is_taken_however_long(works: Works) -> None:
    works.go_on.release()
    assert await FairThreads(1, BIG).run("a", 10 * BIG, works.of("long")) == "long"


async def test_who_leaves_gives_back_the_turn(works: Works) -> None:
    threads = FairThreads(1, 2 * BIG)
    first = asyncio.create_task(threads.run("a", BIG, works.of("first")))
    await works.has_begun()
    leaving = asyncio.create_task(threads.run("a", BIG, works.of("leaving")))
    await settled()
    leaving.cancel()
    await settled()
    last = asyncio.create_task(threads.run("a", BIG, works.of("last")))
    works.go_on.release(2)
    assert [await first, await last] == ["first", "last"]
    assert works.begun == ["first", "last"]


async def test_the_wait_is_told_by_what_was_measured(works: Works) -> None:
    clock = Clock()
    threads = FairThreads(1, BIG, clock)
    await threads.run("a", BIG, lambda: setattr(clock, "now", clock.now + 10.0))
    holding = asyncio.create_task(threads.run("a", BIG, works.of("a")))
    await works.has_begun()
    with pytest.raises(ApiError) as refusal:
        await threads.run("a", BIG, works.of("too much"))
    assert refusal.value.retry_after_s == pytest.approx(2.0, rel=0.01)  # the newest counts for a fifth
    works.go_on.release()
    await holding

"""Measures for how long each of the heaviest bodies, and each of the longest replies, holds the event loop.

Run it as `python -m tests.gateway.loop_lag [PATTERN]`, where the pattern chooses by name. The gateway is whole and
serves a real socket, to a client in another process; the tokenizer and the template are the demo model's; the engine is
a double, so that nothing but the gateway is measured. Each figure is the least of three rounds:

- *held*: the longest processor time of one callback of the loop or, if that is longer, of the whole process while
  neither the loop nor a thread that does nothing else had the interpreter. Both are deaf to other processes.
- *late*: by how much a timer of one millisecond was late at most, with all waiting for locks, the interpreter and the
  machine's other processes.
- *collecting*: the longest collection of garbage, which is part of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from penstock.app.checkpoint import DEMO_MODEL
from penstock.app.loop import settle_garbage
from penstock.app.tables import table
from penstock.engine.model.checkpoint import read_tokenizer
from penstock.engine.planning.request import FinishReason, Request
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Lane, LanePolicy
from tests.gateway.harness import MODEL, Gateway, logprobs, make_timings, serving
from tests.gateway.heavy_bodies import CONTEXT, Heavy, bodies

ROUNDS, MOST_MS = 3, 20.0
STEP_CHARS = 16
TIMEOUT_S = 300
_ROOT = str(Path(__file__).parents[2])
_TOP = tuple((token_id, -0.1 * token_id) for token_id in range(5, 25))


class Watch:
    """For how long the loop, and the interpreter, were held at most; in seconds of processor time."""

    def __init__(self) -> None:
        self.loop_s = self.piece_s = self.late_s = self.garbage_s = 0.0
        self.where = ""
        """The function that was seen at work in the longest of these times."""
        self._loop_thread = threading.get_ident()
        self._seen = ""
        self._over = threading.Event()
        self._collecting_since_s = 0.0
        self._seen_at_s = 0.0
        """The process's time when the loop or the ticking thread had the interpreter last."""

    @property
    def held_s(self) -> float:
        return max(self.loop_s, self.piece_s)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        run, ticking = asyncio.Handle._run, threading.Thread(target=self._tick)

        def timed(handle: asyncio.Handle) -> None:
            self._note_piece(time.process_time() - self._seen_at_s)
            self._seen, started_s = "", time.thread_time()
            run(handle)
            taken_s = time.thread_time() - started_s
            self._seen_at_s = time.process_time()
            if taken_s > self.held_s:
                self.where = self._seen or str(handle)
            self.loop_s = max(self.loop_s, taken_s)

        asyncio.Handle._run = timed  # type: ignore[assignment, method-assign]
        gc.callbacks.append(self._note_garbage)
        self._seen_at_s = time.process_time()
        ticking.start()
        try:
            yield
        finally:
            self._over.set()
            ticking.join()
            gc.callbacks.remove(self._note_garbage)
            asyncio.Handle._run = run  # type: ignore[method-assign]

    async def beat(self) -> None:
        """Notes how late timers are, until it is cancelled."""
        while True:
            due_s = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.late_s = max(self.late_s, time.perf_counter() - due_s)

    def _tick(self) -> None:
        with _schedule() as file:
            last_s = _clocks(file)
            while not self._over.wait(0.0005):
                now_s, frames = _clocks(file), sys._current_frames()
                self._seen = _ours(frames.pop(self._loop_thread, None)) or self._seen
                # Whoever works beside the loop gives way to it or to this thread, and not always to both.
                self._note_piece(min(now_s[0] - self._seen_at_s, now_s[1] - last_s[1]))
                last_s, self._seen_at_s = now_s, now_s[0]

    def _note_piece(self, piece_s: float) -> None:
        """Notes for how long neither the loop nor the ticking thread had the interpreter."""
        if piece_s > self.held_s:
            frames = sys._current_frames()
            others = (frame for ident, frame in frames.items() if ident != threading.get_ident())
            self.where = next(filter(None, map(_ours, others)), self._seen)
        self.piece_s = max(self.piece_s, piece_s)

    def _note_garbage(self, phase: str, _: Any) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._collecting_since_s = now_s
        else:
            self.garbage_s = max(self.garbage_s, now_s - self._collecting_since_s)


@contextlib.contextmanager
def _schedule() -> Iterator[BinaryIO | None]:
    """The file with this thread's waits for a processor, which only Linux has.

    It stays open: whoever opens and closes it lets go of the interpreter each time, and waits for it again.
    """
    try:
        file = Path("/proc/thread-self/schedstat").open("rb", buffering=0)  # noqa: SIM115
    except OSError:
        yield None
    else:
        with file:
            yield file


def _clocks(schedule: BinaryIO | None) -> tuple[float, float]:
    """Returns the process's time, and the time that passed while this thread did not wait for a processor.

    The process's goes on while another thread works that has let go of the interpreter, the other one while the thread
    that has the interpreter waits for a processor.
    """
    waited_s = 0.0
    if schedule is not None:
        waited_s = int(os.pread(schedule.fileno(), 100, 0).split()[1]) / 1e9
    return time.process_time(), time.perf_counter() - waited_s


def _ours(frame: FrameType | None) -> str:
    """Returns the innermost function of this project on a stack, but for its tests."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT) and "/tests/" not in path and "off_loop" not in path:
            return (
                f"{path.removeprefix(_ROOT).removeprefix('/penstock').strip('/')}:{frame.f_code.co_qualname}"
            )
        frame = frame.f_back
    return ""


def send(port: int, name: str) -> tuple[int, str]:
    """Sends a body, and asks for what is to be asked for then; returns its size, and what became of it.

    This runs in the client's process.
    """
    heavy = bodies()[name]()
    status, reply = _call(port, "POST", heavy.path, heavy.content, heavy.headers)
    reply_id, code = (
        re.search(rb'"%b": ?"([^"]+)"' % field, reply[-4000:] if field == b"code" else reply)
        for field in (b"id", b"code")
    )
    if heavy.then and reply_id is not None:
        _call(port, "GET", heavy.then.format(id=reply_id[1].decode()))
    return len(heavy.content), f"{status} {code[1].decode()}" if status >= 400 and code is not None else str(
        status
    )


def _call(port: int, method: str, path: str, content: bytes = b"", headers: Any = ()) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with contextlib.closing(connection), contextlib.suppress(BrokenPipeError, ConnectionResetError):
        # A server that refuses a body does not read it to its end.
        connection.request(method, path, content, {"content-type": "application/json", **dict(headers)})
        reply = connection.getresponse()
        return reply.status, reply.read()
    return 0, b""


async def answer(gateway: Gateway, heavy: Heavy) -> None:
    """Answers everything that comes, a step after another, until it is cancelled."""
    while True:
        try:
            request = await gateway.taken()
        except TimeoutError:  # a long text is still tokenised
            continue
        if request.branches:
            gateway.score(request)
        elif request.sampling.max_tokens == 0:
            gateway.finish(request, embedding=[0.5] * 1024)
        else:
            await _bring(gateway, request, heavy)
        await asyncio.sleep(0)


async def _bring(gateway: Gateway, request: Request, heavy: Heavy) -> None:
    starts = range(0, min(len(heavy.reply), 4 * request.sampling.max_tokens), STEP_CHARS)
    ended = {"finish_reason": FinishReason.STOP, "timings": make_timings(request)}
    found = logprobs(*_TOP[: max(1, heavy.num_top or 0)])
    for start in starts:
        step: dict[str, Any] = {"token_ids": [7, 8, 9, 10]}
        if request.sampling.num_logprobs is not None:
            step["logprobs"] = [found] * 4
        if start == 0 and request.sampling.num_prompt_logprobs is not None:
            step["prompt_logprobs"] = [logprobs(*_TOP)] * (request.num_prompt_tokens - 1)
        if start == starts[-1]:
            step |= ended
        text = heavy.reply[start : start + STEP_CHARS]
        gateway.deliver(*(gateway.output(request, text, index, **step) for index in range(request.n)))
        await asyncio.sleep(0)


@cache
def _tokenizer() -> Tokenizer:
    return read_tokenizer(DEMO_MODEL)


def make_gateway(parser: str) -> Gateway:
    """Returns a gateway with the demo model's tokenizer, a long context, and a queue that has room."""
    roomy = LanePolicy(max_requests=10_000, max_tokens=10**8, max_bytes=2**32)
    options = ServiceOptions(models=(MODEL,), tool_parser=parser)
    bounds = dict.fromkeys(Lane, roomy)
    gateway = Gateway(options, tokenizer=_tokenizer(), bounds=bounds, clock=time.monotonic)
    gateway.engine.max_sequence_tokens = CONTEXT
    return gateway


async def measure(name: str, make: Callable[[], Heavy], client: ProcessPoolExecutor) -> dict[str, Any]:
    """Returns the figures of one body, each round's on a new gateway, which remembers nothing."""
    heavy, watches = make(), []
    for _ in range(ROUNDS):
        size, status, watch = await _round(name, heavy, client)
        watches.append(watch)
    best = min(watches, key=lambda watch: watch.held_s)
    return {
        "name": name,
        "bytes": size,
        "status": status,
        "held_ms": 1000 * best.held_s,
        "late_ms": 1000 * min(watch.late_s for watch in watches),
        "garbage_ms": 1000 * min(watch.garbage_s for watch in watches),
        "where": best.where,
    }


async def _round(name: str, heavy: Heavy, client: ProcessPoolExecutor) -> tuple[int, str, Watch]:
    gateway, watch = make_gateway(heavy.parser), Watch()
    async with serving(gateway.app) as url:
        answering = asyncio.create_task(answer(gateway, heavy))
        settle_garbage()
        beating = asyncio.create_task(watch.beat())
        with watch.watching():
            port = int(url.rpartition(":")[2])
            sending = asyncio.get_running_loop().run_in_executor(client, send, port, name)
            await asyncio.wait((sending, answering), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            size, status = await sending
        for task in (beating, answering):
            task.cancel()
    return size, status, watch


async def main(pattern: str = "") -> int:
    sys.setswitchinterval(0.0001)  # as the server does
    rows = []
    with ProcessPoolExecutor(1, get_context("spawn")) as client:
        for name, make in bodies().items():
            if re.search(pattern, name):
                rows.append(row := await measure(name, make, client))
                print(f"{row['held_ms']:8.1f} {row['late_ms']:8.1f} {row['status']} {name}", file=sys.stderr)
    rows.sort(key=lambda row: -row["held_ms"])
    head = ["body", "bytes", "status", "held, ms", "late, ms", "collecting, ms", "in"]
    cells = [
        [
            row["name"],
            f"{row['bytes']:,}",
            row["status"],
            *(f"{row[figure]:.1f}" for figure in ("held_ms", "late_ms", "garbage_ms")),
            row["where"],
        ]
        for row in rows
    ]
    print(table(head, cells))
    over: int = sum(row["held_ms"] > MOST_MS for row in rows)
    print(f"{len(rows)} bodies, {over} of them hold the loop for more than {MOST_MS:g} ms")
    return min(over, 1)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))

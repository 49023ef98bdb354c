"""The load driver: SSE streams read with as little work as possible, best in a process of its own.

Streams of one request after another are a closed loop; streams of one request each, with the times at which they start,
are an open one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from penstock.app.bench.job import ModuleRunner
from penstock.app.reader import TimedAnswer, TimedBytes, read_answer, request_bytes


@dataclass(frozen=True, slots=True)
class Job:
    """`bodies[i]` are the requests of stream i, one after another.

    Stream i starts after `starts_s[i]`; without any they start together. After `stop_s` no stream begins another body.
    """

    host: str
    port: int
    path: str
    bodies: list[list[dict[str, object]]]
    starts_s: list[float] | None = None
    stop_s: float | None = None
    keys: list[str] | None = None
    """The API key of each stream; empty for none."""

    def share(self, number: int, of: int) -> Job:
        """Every so many streams, beginning with that one."""
        own = slice(number, None, of)
        starts_s = None if self.starts_s is None else self.starts_s[own]
        keys = None if self.keys is None else self.keys[own]
        return replace(self, bodies=self.bodies[own], starts_s=starts_s, keys=keys)


def ask(run: ModuleRunner, job: Job, num_processes: int = 1) -> list[TimedAnswer]:
    """Sends all requests of a job, from so many processes of its own among which the streams are shared out."""
    shares = [asdict(job.share(number, num_processes)) for number in range(num_processes)]
    with ThreadPoolExecutor(num_processes) as pool:
        results = list(pool.map(lambda share: run("penstock.app.bench.client", share)["answers"], shares))
    answers = []
    for number, result in enumerate(results):
        answers += [TimedAnswer(**one | {"stream": one["stream"] * num_processes + number}) for one in result]
    return sorted(answers, key=lambda answer: answer.stream)


class _Recorder(asyncio.Protocol):
    """Sends one request and notes what comes back, and when."""

    def __init__(self, request: bytes, watch: Callable[[TimedBytes], object]) -> None:
        self.recording = TimedBytes()
        self.done = asyncio.get_running_loop().create_future()
        self._request = request
        self._watch = watch
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self.recording.started_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.recording.note(data)
        self._watch(self.recording)
        if self.recording.is_done and self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.done.done():
            self.done.set_result(None)


async def exchange(
    host: str,
    port: int,
    path: str,
    body: object,
    key: str = "",
    watch: Callable[[TimedBytes], object] = lambda _: None,
) -> TimedBytes:
    """Posts one request and notes the answer until its end; `watch` sees what came so far with every piece.

    Raises:
        OSError: there is no connection.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = request_bytes("POST", path, f"{host}:{port}", body, headers)
    loop = asyncio.get_running_loop()
    _, recorder = await loop.create_connection(lambda: _Recorder(request, watch), host, port)
    await recorder.done
    return recorder.recording


async def _run_stream(job: Job, number: int, began_s: float) -> list[TimedBytes]:
    loop = asyncio.get_running_loop()
    recordings: list[TimedBytes] = []
    if job.starts_s is not None:
        await asyncio.sleep(began_s + job.starts_s[number] - loop.time())
    for body in job.bodies[number]:
        if job.stop_s is not None and loop.time() - began_s > job.stop_s:
            break
        key = job.keys[number] if job.keys is not None else ""
        recordings.append(await exchange(job.host, job.port, job.path, body, key))
    return recordings


async def run_job(job: Job) -> list[TimedAnswer]:
    """All streams at once; the answers in the order of the streams."""
    began_s = asyncio.get_running_loop().time()
    streams = await asyncio.gather(*(_run_stream(job, number, began_s) for number in range(len(job.bodies))))
    return [
        replace(read_answer(recording), stream=number)
        for number, recordings in enumerate(streams)
        for recording in recordings
    ]


def measure(**job: Any) -> dict[str, object]:
    """Runs a job in this process: its answers, and the processor time that they took here."""
    answers = asyncio.run(run_job(Job(**job)))
    return {"cpu_s": time.process_time(), "answers": answers}

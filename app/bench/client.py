"""The load: many SSE streams read with as little work as possible, in a process of its own.

`python -m app.bench.client` takes a Job as JSON on stdin and writes Answers to stdout.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from app.bench.reader import Answer, Recording, read_answer, request_bytes


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


Run = Callable[[str, object], Any]
"""Runs a module in a process of its own: its name, its job, and the figures that it writes."""


def ask(run: Run, job: Job) -> list[Answer]:
    """Sends all requests of a job from a process of its own."""
    return [Answer(**answer) for answer in run("app.bench.client", asdict(job))["answers"]]


class Recorder(asyncio.Protocol):
    """Sends one request and notes what comes back, and when."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.recording = Recording()
        self.done = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.recording.started_s = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.recording.note(data)
        if self.recording.is_done and self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.done.done():
            self.done.set_result(None)


async def _run_stream(job: Job, number: int, began_s: float) -> list[Recorder]:
    loop = asyncio.get_running_loop()
    recorders: list[Recorder] = []
    key = job.keys[number] if job.keys is not None else ""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if job.starts_s is not None:
        await asyncio.sleep(began_s + job.starts_s[number] - loop.time())
    for body in job.bodies[number]:
        if job.stop_s is not None and loop.time() - began_s > job.stop_s:
            break
        request = request_bytes("POST", job.path, f"{job.host}:{job.port}", body, headers)
        _, recorder = await loop.create_connection(partial(Recorder, request), job.host, job.port)
        await recorder.done
        recorders.append(recorder)
    return recorders


async def run_job(job: Job) -> list[Answer]:
    """All streams at once; the answers in the order of the streams."""
    began_s = asyncio.get_running_loop().time()
    streams = await asyncio.gather(*(_run_stream(job, number, began_s) for number in range(len(job.bodies))))
    answers = []
    for number, recorders in enumerate(streams):
        for recorder in recorders:
            answers.append(read_answer(recorder.recording))
            answers[-1].stream = number
    return answers


def main() -> None:
    job = Job(**json.load(sys.stdin))
    answers = asyncio.run(run_job(job))
    json.dump({"cpu_s": time.process_time(), "answers": [asdict(answer) for answer in answers]}, sys.stdout)


if __name__ == "__main__":
    main()

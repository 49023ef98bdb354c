"""The load: many SSE streams read with as little work as possible, in a process of its own.

It shares the cores with the server it measures, so that while streams run it only notes when which bytes came;
what they say is read afterwards. `python -m app.bench.client` takes a Job as JSON on stdin and writes Answers to
stdout.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

_TAIL = 16
"""More than the length of the end mark, which can arrive in two pieces."""


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


@dataclass(slots=True)
class Answer:
    """How one request went; times are seconds on one clock of the client."""

    started_s: float
    ended_s: float
    token_times_s: list[float] = field(default_factory=list)
    """When each frame with text came; a frame can carry several tokens."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    stream: int = 0
    status: int = 0
    """Of HTTP; 0 if there was no answer."""
    predicted_ttft_s: float | None = None
    drafts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By proposer, the drafts that were verified and those that were right, as the server tells."""

    @property
    def was_refused(self) -> bool:
        """Whether the server had no room for the request: 429 is the tenant's limit, 503 the server's."""
        return self.status in (429, 503)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        return [late - early for early, late in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


class Recorder(asyncio.Protocol):
    """Sends one request and notes what comes back, and when."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.data = bytearray()
        self.offsets: list[int] = []
        self.times_s: list[float] = []
        self.started_s = 0.0
        self.done = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.started_s = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.times_s.append(time.perf_counter())
        self.data += data
        self.offsets.append(len(self.data))
        if b"[DONE]" in self.data[-len(data) - _TAIL :] and self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.done.done():
            self.done.set_result(None)

    def time_of(self, offset: int) -> float:
        """When the byte before `offset` came."""
        return self.times_s[bisect_left(self.offsets, offset)]


def request_bytes(job: Job, body: dict[str, object]) -> bytes:
    payload = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST {job.path} HTTP/1.1\r\nhost: {job.host}:{job.port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + payload


def body_pieces(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """The pieces of a chunked body that begins at `start`, each with the offset at which it was complete."""
    while (line_end := data.find(b"\r\n", start)) >= 0:
        size = int(data[start:line_end].split(b";")[0], 16)
        piece_end = line_end + 2 + size
        if size == 0 or piece_end > len(data):
            return
        yield data[line_end + 2 : piece_end], piece_end
        start = piece_end + 2


def frames(pieces: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """The payload of every `data:` event, with the offset at which it was complete."""
    rest = b""
    for piece, offset in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines), offset


def read_answer(recorder: Recorder) -> Answer:
    """What the recorded bytes say."""
    data = bytes(recorder.data)
    ended_s = recorder.times_s[-1] if recorder.times_s else time.perf_counter()
    answer = Answer(recorder.started_s, ended_s)
    head, _, body = data.partition(b"\r\n\r\n")
    answer.status = int(head[9:12]) if head[9:12].isdigit() else 0
    if not head.startswith(b"HTTP/1.1 200 "):
        answer.error = (
            f"{head[:60].decode(errors='replace')} {body[:300].decode(errors='replace')}".strip()
            or "no answer"
        )
        return answer
    last = b""
    for last, offset in frames(body_pieces(data, len(head) + 4)):
        if last != b"[DONE]":
            _read_frame(json.loads(last), recorder.time_of(offset), answer)
    if last != b"[DONE]":
        answer.error = answer.error or "the stream ended without [DONE]"
    return answer


def _read_frame(frame: dict[str, object], time_s: float, answer: Answer) -> None:
    if frame.get("error"):
        answer.error = json.dumps(frame["error"])
    usage, choices = frame.get("usage"), frame.get("choices")
    timings = frame.get("timings")
    if isinstance(timings, dict):
        answer.drafts = timings.get("drafts") or {}
        if timings.get("predicted_ttft_ms"):
            answer.predicted_ttft_s = timings["predicted_ttft_ms"] / 1000
    if isinstance(usage, dict):
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_output_tokens = usage["completion_tokens"]
        answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if isinstance(choices, list) and choices:
        choice = choices[0]
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            answer.token_times_s.append(time_s)


async def _run_stream(job: Job, number: int, began_s: float) -> list[Recorder]:
    loop = asyncio.get_running_loop()
    recorders: list[Recorder] = []
    if job.starts_s is not None:
        await asyncio.sleep(began_s + job.starts_s[number] - loop.time())
    for body in job.bodies[number]:
        if job.stop_s is not None and loop.time() - began_s > job.stop_s:
            break
        request = request_bytes(job, body)
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
            answers.append(read_answer(recorder))
            answers[-1].stream = number
    return answers


def main() -> None:
    job = Job(**json.load(sys.stdin))
    answers = asyncio.run(run_job(job))
    json.dump({"cpu_s": time.process_time(), "answers": [asdict(answer) for answer in answers]}, sys.stdout)


if __name__ == "__main__":
    main()

"""The reader of streamed answers, which the bench, locust's users and the replay of traces all share.

While a stream runs, TimedBytes only note which bytes came, and when, for the reader shares the cores with the server
that it measures. The bytes are parsed afterwards: chat and text completions, and the events of `/v1/responses`.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_END = b"[DONE]"
_TAIL = 16
"""More than the length of the end mark, which can arrive in two pieces."""
_LAST_EVENTS = ("response.completed", "response.incomplete")


@dataclass(slots=True)
class TimedBytes:
    """The bytes of one answer, and the time of each piece, on the clock of `perf_counter`."""

    started_s: float = 0.0
    data: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def note(self, data: bytes) -> None:
        self.times_s.append(time.perf_counter())
        self.data += data
        self.offsets.append(len(self.data))

    @property
    def is_done(self) -> bool:
        """Whether the last piece had the end mark, with the end of its frame."""
        last = len(self.data) - self.offsets[-2] if len(self.offsets) > 1 else len(self.data)
        return _END + b"\n\n" in self.data[-last - _TAIL :]

    def time_of(self, offset: int) -> float:
        """The time at which the byte before `offset` came."""
        return self.times_s[bisect_left(self.offsets, offset)]


@dataclass(slots=True)
class TimedAnswer:
    """The outcome of one request; times are seconds on one clock of the client."""

    started_s: float
    ended_s: float
    token_times_s: list[float] = field(default_factory=list)
    """The time of each frame with text; a frame can carry several tokens."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    stream: int = 0
    status: int = 0
    """The status of HTTP; 0 if there was no answer."""
    predicted_ttft_s: float | None = None
    queue_s: float | None = None
    """The time in the server's queue, as the server reports it."""
    lane: str | None = None
    """The lane that the server says it used."""
    drafts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The verified and the right drafts by proposer, as the server reports them."""
    id: str = ""
    """The id of a response."""
    last_event: int = -1
    """The number of the last event that was read of a response; -1 before the first."""
    text: str = ""

    @property
    def was_refused(self) -> bool:
        """Returns whether the server had no room for the request: 429 is the tenant's limit, 503 the server's."""
        return self.status in (429, 503)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.started_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; a frame can carry several. NaN of a single frame."""
        if len(self.token_times_s) < 2:
            return math.nan
        return (self.token_times_s[-1] - self.token_times_s[0]) / max(1, self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [late - early for early, late in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


def request_bytes(
    method: str, path: str, host: str, body: object = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """One request on a connection of its own; `host` as it stands in the header, with its port."""
    payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    fields = {"host": host, "connection": "close", **(headers or {})}
    if payload:
        fields |= {"content-type": "application/json", "content-length": str(len(payload))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + payload


def body_pieces(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """The pieces of a chunked body that begins at `start`, each with the offset at which it was complete."""
    while (line_end := data.find(b"\r\n", start)) != -1:
        size = int(data[start:line_end].split(b";")[0], 16)
        piece_end = line_end + 2 + size
        if size == 0 or piece_end > len(data):
            return
        yield data[line_end + 2 : piece_end], piece_end
        start = piece_end + 2


def _plain_pieces(recording: TimedBytes, start: int) -> Iterator[tuple[bytes, int]]:
    """The pieces of a body that ends with its connection, as they came."""
    for offset in recording.offsets:
        yield bytes(recording.data[start:offset]), offset
        start = max(start, offset)


def frames(pieces: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """The payload of every `data:` event, with the offset at which it was complete."""
    rest = b""
    for piece, offset in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines), offset


def read_answer(recording: TimedBytes, after_event: int = -1) -> TimedAnswer:
    """Reads the recorded bytes.

    Args:
        after_event: the event of a response that was read before, where the recording goes on with it.
    """
    data = bytes(recording.data)
    ended_s = recording.times_s[-1] if recording.times_s else time.perf_counter()
    answer = TimedAnswer(recording.started_s, ended_s, last_event=after_event)
    head, _, body = data.partition(b"\r\n\r\n")
    answer.status = int(head[9:12]) if head[9:12].isdigit() else 0
    if not head.startswith(b"HTTP/1.1 200 "):
        answer.error = (
            f"{head[:60].decode(errors='replace')} {body[:300].decode(errors='replace')}".strip()
            or "no answer"
        )
        return answer
    if b"text/event-stream" not in head.lower():
        _read_whole(recording, answer)
        return answer
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    pieces = body_pieces(data, len(head) + 4) if is_chunked else _plain_pieces(recording, len(head) + 4)
    is_whole = False
    for payload, offset in frames(pieces):
        is_whole = payload == _END
        if not is_whole:
            frame = json.loads(payload)
            is_whole = frame.get("type") in _LAST_EVENTS
            _read_frame(frame, recording.time_of(offset), answer)
    if not is_whole:
        answer.error = answer.error or "the stream ended without [DONE]"
    return answer


def read_json(recording: TimedBytes) -> Any:
    """The body of an answer that is not streamed; None if it is not whole."""
    head, _, body = bytes(recording.data).partition(b"\r\n\r\n")
    try:
        return json.loads(body) if head.startswith(b"HTTP/1.1 200 ") else None
    except ValueError:
        return None


def _read_whole(recording: TimedBytes, answer: TimedAnswer) -> None:
    """A reply that was not streamed."""
    found = read_json(recording)
    if found is None:
        answer.error = "the answer is not whole"
        return
    answer.id = found.get("id", "")
    _read_totals(found, answer)
    if found.get("error"):
        answer.error = json.dumps(found["error"])


def _read_frame(frame: dict[str, Any], time_s: float, answer: TimedAnswer) -> None:
    if frame.get("error"):
        answer.error = json.dumps(frame["error"])
    if "sequence_number" in frame:
        _read_event(frame, time_s, answer)
        return
    _read_totals(frame, answer)
    if choices := frame.get("choices"):
        choice = choices[0]
        if text := choice.get("text") or (choice.get("delta") or {}).get("content"):
            answer.text += text
            answer.token_times_s.append(time_s)


def _read_event(event: dict[str, Any], time_s: float, answer: TimedAnswer) -> None:
    kind, number = event["type"], event["sequence_number"]
    if kind == "error":  # under the number of the event before: the reader goes on after it
        answer.error = json.dumps(event)
        return
    if number != answer.last_event + 1:
        answer.error = answer.error or f"event {number} came after event {answer.last_event}"
    answer.last_event = number
    if kind == "response.output_text.delta":
        answer.text += event["delta"]
        answer.token_times_s.append(time_s)
    elif response := event.get("response"):
        answer.id = response["id"]
        _read_totals(response, answer)
        if response.get("error"):
            answer.error = json.dumps(response["error"])


def _read_totals(frame: dict[str, Any], answer: TimedAnswer) -> None:
    if timings := frame.get("timings"):
        answer.drafts = timings.get("drafts") or {}
        if "queue_ms" in timings:
            answer.queue_s, answer.lane = timings["queue_ms"] / 1000, timings["lane"]
        if timings.get("predicted_ttft_ms"):
            answer.predicted_ttft_s = timings["predicted_ttft_ms"] / 1000
    if usage := frame.get("usage"):
        chat = "prompt_tokens" in usage
        answer.num_prompt_tokens = usage["prompt_tokens" if chat else "input_tokens"]
        answer.num_output_tokens = usage["completion_tokens" if chat else "output_tokens"]
        details = usage.get("prompt_tokens_details" if chat else "input_tokens_details") or {}
        answer.num_cached_tokens = details.get("cached_tokens") or 0

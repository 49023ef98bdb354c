"""A recorded reply: its events have numbers, and any connection can follow it from any of them.

The events are a pure function of the output tokens: some that open the reply, those that its texts come to, some that
close it. So a server that makes the same tokens again makes the same events under the same numbers, and
what has to be written down of a stream is its tokens, with their log probabilities if they are told. The tokens of
several choices are taken in turns, so that their order, too, follows from them alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.engine.text.grammar import Grammar
from penstock.gateway.errors import ApiError, gone
from penstock.gateway.http.connections import Connection, Timeouts
from penstock.gateway.http.correlation import log_fault
from penstock.gateway.reply.generation import LOGPROB_BYTES, Generation
from penstock.gateway.sessions.recordings.frames import KeptFrames
from penstock.gateway.wire.frames import timings_of
from penstock.gateway.wire.writing import Delta, Outputs, Writer
from penstock.priority.verdict import Forecast

INTERRUPTED = frozenset({"server_shutting_down", "engine_failed"})
"""Errors that end what this process does for a reply, but not the reply: another process goes on with it."""
ABANDONED = "abandoned"
"""The error code of a reply that was cancelled since nobody read it."""
OVERDUE = "generation_timeout"
"""The error code of a reply that took longer than any may."""
_TOKEN_BYTES = 110
"""The approximate bytes of an output token with its text."""
_HELD_BYTES = 400
"""The approximate bytes of a token that waits to be turned into events."""
_BATCH = 256
"""The events that are sent at once; other work of the event loop has its turn between two batches."""
_OWN_BYTES = 6_000
"""The approximate bytes of a recording without its events and tokens, with its request and writer."""


@dataclass(eq=False)
class Recording(Generation):
    """The reply to one request, written down as it comes."""

    may_join = False  # every token is an event

    request: Request
    """The request as it was sent; the part of it on which the engine still works is in `requests`."""
    _: KW_ONLY
    kind: str
    """The API that it is written for, "chat" say."""
    details: dict[str, Any]
    """What the writer is made of; JSON, for it goes into the journal."""
    created: int
    """In seconds since 1970."""
    writer: Writer[Recording]
    detachable: bool
    """Whether it goes on when nobody reads it."""
    journalled: bool
    max_detached_s: float | None = None
    """How long it goes on then, if there is a bound."""
    attempts: int = 1
    """The number of processes that have worked on it."""
    cancelled: bool = False
    settled: bool = False
    """Whether it has ended and was kept."""
    started: bool = False
    """Whether the first token has come."""
    ended_s: float | None = None
    detached_s: float | None = None
    """The time since which nobody reads it; None while somebody does."""
    on_news: Callable[[Recording], None] = lambda _: None
    """A function that is called when there is something to write down."""

    def __post_init__(self) -> None:
        super().__init__([self.request])
        self.detached_s = self.request.arrival_s if self.detachable else None
        self.is_streamed = bool(self.details.get("stream", True))
        """Whether it has events; otherwise it can only be had as a whole."""
        self.kept = {index: Delta() for index in range(self.request.n)}
        self._begun_s: float | None = None
        """The time about which its first token came here."""
        self._frames = KeptFrames()
        self._turns = deque(range(self.request.n))
        """The choices that have not ended, in the order in which they bring a token each."""
        self._held: list[deque[Output]] = [deque() for _ in range(self.request.n)]
        """The outputs of each choice that wait for their turn."""
        self._readers: dict[Reader, None] = {}

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason for which the first choice ended, once it has."""
        return self.kept[0].finish_reason

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def is_interrupted(self) -> bool:
        """Whether this process will not finish it, but another one can."""
        return self.journalled and self.error is not None and self.error.code in INTERRUPTED

    @property
    def may_come_again(self) -> bool:
        """Whether the request came to nothing, and may be answered if it is sent again."""
        error = self.error
        if error is None or self.is_interrupted:
            return False
        return error.code in (ABANDONED, OVERDUE) or error.is_fault or error.retry_after_s is not None

    def is_overdue(self, now: float, max_age_s: float) -> bool:
        """Returns whether it is still being made so long after its first token; it is asked several times a second."""
        if self.started and self._begun_s is None:
            self._begun_s = now
        return self._begun_s is not None and now - self._begun_s > max_age_s

    @property
    def reason(self) -> FinishReason:
        """The reason for which the reply ended, once it has."""
        if self.cancelled:
            return FinishReason.CANCELLED
        if self.error is not None or not self.finished:
            return FinishReason.FAILED
        return self.finish_reason or FinishReason.FAILED

    @property
    def num_events(self) -> int:
        """The number of its events, forgotten ones included."""
        return self._frames.num

    @property
    def num_dropped(self) -> int:
        """The number of its events that are forgotten."""
        return self._frames.num_dropped

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, about."""
        num_held = sum(map(len, self._held)) if self.request.n > 1 else 0
        num_logprobs = sum(len(choice.logprobs) for choice in self.choices)
        return (
            _OWN_BYTES
            + self._frames.num_bytes
            + _HELD_BYTES * num_held
            + LOGPROB_BYTES * num_logprobs * (1 + (self.request.sampling.num_logprobs or 0))
            + _TOKEN_BYTES * self.num_taken
            + 36 * self.num_prompt_tokens
        )

    @property
    def choices(self) -> list[Delta]:
        """The whole output of each choice."""
        return list(self.kept.values())

    @property
    def num_taken(self) -> int:
        """The number of tokens in it; others may wait for their turn."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def outputs(self) -> Outputs:
        return self.kept.items()

    # Events

    def frames_from(self, number: int, most: int | None = None) -> list[bytes]:
        """Returns at most `most` events from that number on, as far as they are kept."""
        return self._frames.since(number, most)

    def open(self) -> None:
        """Adds the events that open the reply, unless they are there."""
        if not self.num_events and self.is_streamed:
            self._add(self.writer.begin(self))

    def close(self) -> None:
        """Adds the last events of the choices that came to no end; no more text comes."""
        if self.is_streamed:
            self.open()
            for index, choice in self.kept.items():
                if not choice.ended:
                    self._add(self.writer.more(self, index, Delta(finish_reason=self.reason)))

    def settle(self) -> None:
        """Adds the events that say how it ended, once nothing of that changes any more."""
        self.timings_json = timings_of(self)
        if self.is_streamed and not self.is_interrupted:
            self._add(self.writer.end(self))
        self.settled = True

    def _add(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            number = self._frames.num
            self._frames.append(frame, self.writer.common)
            for reader in self._readers:
                if reader.position == number - 1 and reader.connection.is_ready:
                    reader.connection.send_now(frame)
                    reader.position = number
                else:
                    reader.connection.wake()

    def go_on(self) -> None:
        """Lets the engine continue after the tokens that were replayed, with the choices that have not ended.

        Several of them are as many requests, which share the blocks of the prompt, as choices of one request do.
        """
        if self.request.n == 1:
            self.request = replace(self.request, output_token_ids=tuple(self.kept[0].token_ids))
            self.requests = [self.request]
            return
        left = [
            replace(
                self.request,
                request_id=f"{self.id}.{index}",
                n=1,
                index=index,
                output_token_ids=tuple(choice.token_ids),
            )
            for index, choice in enumerate(self.choices)
            if not choice.ended
        ]
        if left:
            self.requests = left
            self._unfinished = {request.request_id: 1 for request in left}

    def hold_to(self, grammar: Grammar) -> None:
        """Gives its requests this grammar in place of theirs: the same one, compiled or plain."""
        self.request, *self.requests = [
            replace(request, sampling=replace(request.sampling, grammar=grammar))
            for request in (self.request, *self.requests)
        ]

    # As a Generation

    def note_let_in(self, requests: Sequence[Request], forecast: Forecast | None, now: float) -> None:
        super().note_let_in(requests, forecast, now)
        [self.request] = requests

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    def choice_of(self, output: Output) -> Hashable:
        return output.index

    def receive(self, output: Output) -> None:
        if self.request.n == 1:
            self._take(output)
        else:
            self._held[output.index].append(output)
            while self._turns and (waiting := self._held[self._turns[0]]):
                index, output = self._turns.popleft(), waiting.popleft()
                if output.finish_reason is None:
                    self._turns.append(index)
                self._take(output)
        self.on_news(self)

    def _take(self, output: Output) -> None:
        if not self.started:
            self.started = True
            self.open()
        self.kept[output.index].add(output)
        if self.is_streamed and (output.finish_reason is not None or output.logprobs):
            self._add(self._more(output))
        elif self.is_streamed:
            self._add(self.writer.text(output.index, output.text))

    def _more(self, output: Output) -> list[bytes]:
        num_before = self.num_output_tokens - len(output.token_ids)
        delta = Delta(num_reasoning=max(0, self.num_reasoning_tokens - num_before))
        delta.add(output)
        return self.writer.more(self, output.index, delta)

    def fail(self, error: ApiError) -> None:
        super().fail(error)
        self.on_news(self)

    def leave(self) -> None:
        super().leave()
        self.on_news(self)

    def _end_choice(self, output: Output) -> None:
        super()._end_choice(output)
        if self.error is not None:  # then `receive` is not called
            self.on_news(self)

    def wake(self) -> None:
        for reader in self._readers:
            reader.connection.wake()

    def look_after(self, now: float, timeouts: Timeouts) -> None:
        for reader in list(self._readers):
            reader.connection.look_after(now, timeouts)

    # Readers

    def attach(self, reader: Reader) -> None:
        self._readers[reader] = None
        self.detached_s = None

    def detach(self, reader: Reader, now: float) -> None:
        self._readers.pop(reader, None)
        if not self._readers:
            self.detached_s = now

    @property
    def is_read(self) -> bool:
        return bool(self._readers)

    def is_abandoned(self, now: float) -> bool:
        """Returns whether nobody reads it or is expected to."""
        if self.detached_s is None or self.ended:
            return False
        patience_s = self.max_detached_s if self.detachable else 0.0
        return patience_s is not None and now - self.detached_s >= patience_s


class Reader:
    """One connection that follows a recording, from any of its events on."""

    def __init__(self, recording: Recording, position: int = -1) -> None:
        """
        Args:
            position: number of the last event that the client has; -1 if none.

        Raises:
            ApiError: 410, if what comes next is no longer kept.
        """
        self.recording = self.reply = recording
        self.connection: Connection
        """The connection, from the moment on in which the reader is attached."""
        self.position = position
        self._began_at = position
        self.at_end = False
        """Whether the reader has everything."""
        self._check_position()

    @property
    def writer(self) -> Writer[Recording]:
        return self.recording.writer

    @property
    def finished(self) -> bool:
        return self.recording.settled

    @property
    def refusal(self) -> ApiError | None:
        """The error that is the whole reply; a reader that has some events gets it as another event instead."""
        return self.recording.error if self.recording.settled and self._began_at < 0 else None

    @property
    def is_behind(self) -> bool:
        """Whether there is more to take at once."""
        return not self.at_end and self._lacks_events

    @property
    def _lacks_events(self) -> bool:
        return self.position + 1 < self.recording.num_events

    @property
    def _has_news(self) -> bool:
        recording, is_committed = self.recording, self.connection.committed
        if is_committed and self.writer.opens_early:
            recording.open()
        # How a reply opens is told with its first token, or when the client has waited for long enough.
        return recording.settled or ((recording.started or is_committed) and self._lacks_events)

    async def news(self) -> None:
        """Returns when there is something to send, or the connection is gone."""
        while not (self._has_news or self.connection.gone or self.connection.overdue):
            await self.connection.sleep()

    async def end(self) -> None:
        """Returns when the recording has ended, or the connection is gone."""
        while not (self.recording.settled or self.connection.gone):
            await self.connection.sleep()

    def outputs(self) -> Outputs:
        return self.recording.outputs()

    def take(self) -> bytes:
        """Returns the next events that the client does not have."""
        recording = self.recording
        try:
            self._check_position()
        except ApiError as error:  # it was too slow: the events that it lacks are forgotten
            return self._end_here(error)
        frames = recording.frames_from(self.position + 1, _BATCH) if self._has_news else []
        self.position += len(frames)
        if not recording.settled or self._lacks_events:
            return b"".join(frames)
        if recording.error is not None:
            log_fault(recording.error)
            if recording.is_interrupted:
                return b"".join(frames) + self._end_here(recording.error)
        self.at_end = True
        return b"".join([*frames, self.writer.tail])

    def _end_here(self, error: ApiError) -> bytes:
        self.at_end = True
        return self.writer.fault(self.recording, error, self.position)

    def _check_position(self) -> None:
        first = self.recording.num_dropped
        if first and self.position + 1 < first:
            message = f"Events up to {first - 1} are no longer kept; go on with starting_after={first - 1}."
            raise gone(message, "position_expired")

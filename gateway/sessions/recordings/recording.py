"""A recorded reply: its events have numbers, and any connection can follow it from any of them.

The events are a pure function of the output tokens: some that open the reply, those that its texts come to, some that
close it. So a server that makes the same tokens again makes the same events under the same numbers, and
what has to be written down of a stream is its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

from engine.planning.request import FinishReason, Output, Request, TokenLogprobs
from gateway.http.connections import Connection, Timeouts
from gateway.http.errors import ApiError, gone, log_fault
from gateway.wire.streams import LOGPROB_BYTES, Generation

MAX_TEXT_BYTES = 8 * 1024 * 1024
"""Of one recording; the oldest events beyond it are forgotten."""
INTERRUPTED = frozenset({"server_shutting_down", "engine_failed"})
"""Errors that end what this process does for a reply, but not the reply: another process goes on with it."""
EVENT_BYTES = 160
"""What an event takes beside its text."""
_OWN_BYTES = 6_000
"""What a recording takes beside its events and tokens, its request and its script included."""


class Script(Protocol):
    """What the texts of one reply come to, whoever reads it: plain objects, of which its Format makes events."""

    def feed(self, text: str) -> Sequence[object]: ...

    def note(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Log probabilities of tokens that are no reasoning, if they were asked for, before their text is fed."""

    def finish(self, reason: FinishReason) -> Sequence[object]:
        """What is left to say when no more text comes."""


class Format(Protocol):
    """The events of one kind of reply, on the wire."""

    num_opening: int
    """Events before the first that a text came to; they have the numbers from 0 on."""
    tail: bytes
    """What ends every connection, without a number."""

    def opening(self, recording: Recording) -> list[bytes]: ...

    def event(self, number: int, event: Any) -> bytes:
        """One that the recording's Script made."""

    def closing(self, recording: Recording, first: int) -> list[bytes]:
        """The events after those of the texts, numbered from `first`."""

    def fault(self, recording: Recording, error: ApiError, number: int) -> list[bytes]:
        """What is said instead of `closing` if the reply cannot be finished."""

    def body(self, recording: Recording) -> dict[str, object]:
        """The reply in one piece."""


class Recording(Generation):
    """A reply of one choice that is written down as it comes."""

    may_join = False  # every token is an event

    def __init__(
        self,
        request: Request,
        *,
        kind: str,
        about: dict[str, Any],
        created: int,
        script: Script,
        detachable: bool,
        journalled: bool,
        max_detached_s: float | None = None,
    ) -> None:
        """
        Args:
            kind: whose format and script it has, "chat" say.
            about: what that format has to know; JSON, for it goes into the journal.
            created: in seconds since 1970.
            detachable: it goes on when nobody reads it.
            max_detached_s: but for no longer than this.
        """
        super().__init__([request])
        self.kind = kind
        self.about = about
        self.created = created
        self.detachable = detachable
        self.journalled = journalled
        self.max_detached_s = max_detached_s
        self.token_ids: list[int] = list(request.output_token_ids)
        self.num_output_tokens = len(self.token_ids)
        self.finish_reason: FinishReason | None = None
        self.cancelled = False
        self.settled = False
        """It has ended, and what was to be done then is done."""
        self.started = False
        """The first token is there."""
        self.timings_json: dict[str, object] | None = None
        """Where its time went, once it has ended; None if nobody knows."""
        self.ended_s: float | None = None
        self.attempts = 1
        """Processes that have worked on it."""
        self.detached_s: float | None = request.arrival_s if detachable else None
        """Since when nobody reads it."""
        self.on_news: Callable[[Recording], None] = _ignore
        """Called when there is something to write down."""
        self.num_dropped = 0
        self._script = script
        self._events: deque[object] = deque()
        self._sizes: deque[int] = deque()
        """Bytes that each event takes, about."""
        self._num_held = 0
        """Characters that came since the last event."""
        self._num_bytes = 0
        self._readers: dict[Reader, None] = {}

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def request(self) -> Request:
        return self.requests[0]

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def is_interrupted(self) -> bool:
        """This process does not finish it, but another one can."""
        return self.journalled and self.error is not None and self.error.code in INTERRUPTED

    @property
    def reason(self) -> FinishReason:
        """Why it ended, once it has."""
        if self.cancelled:
            return FinishReason.CANCELLED
        if self.error is not None or self.finish_reason is None:
            return FinishReason.FAILED
        return self.finish_reason

    @property
    def num_events(self) -> int:
        """Events that its texts came to, forgotten ones included."""
        return self.num_dropped + len(self._events)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return _OWN_BYTES + self._num_bytes + 36 * (len(self.token_ids) + self.num_prompt_tokens)

    @property
    def events(self) -> list[Any]:
        """All that its texts came to so far.

        Raises:
            ApiError: 410, if the beginning is forgotten.
        """
        if self.num_dropped:
            raise gone(f"The beginning of '{self.id}' is no longer kept.", "position_expired")
        return list(self._events)

    def events_from(self, number: int) -> list[Any]:
        """Those from the `number`-th on, counted from 0, forgotten ones included."""
        return list(islice(self._events, max(0, number - self.num_dropped), None))

    def add_text(self, text: str) -> None:
        self._num_held += len(text)
        self._add(self._script.feed(text))

    def close(self) -> None:
        """Adds what is left to say; no text comes any more."""
        self._add(self._script.finish(self.reason))

    def _add(self, events: Iterable[object]) -> None:
        for event in events:
            self._events.append(event)
            self._sizes.append(self._num_held + EVENT_BYTES)
            self._num_bytes += self._sizes[-1]
            self._num_held = 0
            while self._num_bytes > MAX_TEXT_BYTES:
                self._events.popleft()
                self._num_bytes -= self._sizes.popleft()
                self.num_dropped += 1
            for reader in self._readers:
                reader.tell(event)

    def replay(self, texts: Iterable[str], reason: FinishReason | None) -> None:
        """What its known tokens brought, and why they ended, if they did."""
        for text in filter(None, texts):
            self.add_text(text)
        self.started = bool(self.token_ids)
        if reason is not None:
            self.finish_reason = reason
            self._num_unfinished = 0

    # As a Generation

    def receive(self, output: Output) -> None:
        self.started = True
        self.token_ids += output.token_ids
        if output.logprobs:
            self._note_logprobs(output.token_ids, output.logprobs)
        if output.text:
            self.add_text(output.text)
        self.finish_reason = output.finish_reason
        self.on_news(self)

    def _note_logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        """Of what is told to the user: reasoning comes before it."""
        num_before = self.num_output_tokens - len(token_ids)
        first = max(0, self.num_reasoning_tokens - num_before)
        self._script.note(token_ids[first:], logprobs[first:])
        self._num_held += LOGPROB_BYTES * sum(1 + len(found.top) for found in logprobs)

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
        """Nobody reads it, and nobody is expected any more."""
        if self.detached_s is None or self.ended:
            return False
        patience_s = self.max_detached_s if self.detachable else 0.0
        return patience_s is not None and now - self.detached_s >= patience_s


class Reader:
    """One connection that follows a recording."""

    def __init__(self, recording: Recording, format: Format, connection: Connection, position: int) -> None:
        """
        Args:
            position: number of the last event that the client has; -1 if none.

        Raises:
            ApiError: 410, if what comes next is no longer kept.
        """
        self.recording = recording
        self.connection = connection
        self.position = position
        self._format = format
        self._said_all = False
        self._check_position()

    def tell(self, event: object) -> None:
        """There is one more event; it is the recording's last."""
        number = self._format.num_opening + self.recording.num_events - 1
        is_next = self.position == number - 1 and self.connection.waits
        if is_next and self.connection.is_writable():
            self.connection.send_now(self._format.event(number, event))
            self.position = number
        else:
            self.connection.wake()

    async def news(self) -> None:
        """Returns when there is something to send, or the connection is gone."""
        while not (self._has_news or self.connection.gone or self.connection.overdue):
            await self.connection.sleep()

    @property
    def at_end(self) -> bool:
        """Nothing comes any more."""
        return self._said_all

    @property
    def _has_news(self) -> bool:
        if self.recording.settled:
            return True
        # How a reply opens is told with its first token, or when the client has waited for long enough.
        is_open = self.recording.started or self.connection.committed
        return is_open and self.position + 1 < self._format.num_opening + self.recording.num_events

    def take(self) -> list[bytes]:
        """The frames of all events that the client does not have."""
        recording, format = self.recording, self._format
        if not self._has_news:
            return []
        frames: list[bytes] = []
        if self.position + 1 < format.num_opening:
            frames += format.opening(recording)[self.position + 1 :]
            self.position = format.num_opening - 1
        self._check_position()
        for event in recording.events_from(self.position + 1 - format.num_opening):
            self.position += 1
            frames.append(format.event(self.position, event))
        if recording.settled:
            frames += [*self._closing(), format.tail]
            self._said_all = True
        return frames

    def give_up(self, error: ApiError) -> list[bytes]:
        """The frames that tell the client why nothing more comes."""
        self._said_all = True
        return [*self._format.fault(self.recording, error, self.position + 1), self._format.tail]

    def _closing(self) -> list[bytes]:
        recording, first = self.recording, self._format.num_opening + self.recording.num_events
        if recording.error is None:
            frames = self._format.closing(recording, first)
        else:
            log_fault(recording.error)
            frames = self._format.fault(recording, recording.error, first)
        num_known = max(0, self.position - first + 1)
        return frames[num_known:]

    def _check_position(self) -> None:
        first = self._format.num_opening + self.recording.num_dropped
        if self.recording.num_dropped and self.position + 1 < first:
            message = f"Events up to {first - 1} are no longer kept; go on with starting_after={first - 1}."
            raise gone(message, "position_expired")


def _ignore(_: Recording) -> None:
    pass

"""A recorded reply: its events have numbers, and any connection can follow it from any of them.

The events are a pure function of the output tokens: some that open the reply, those that its texts come to, some that
close it. So a server that makes the same tokens again makes the same events under the same numbers, and
what has to be written down of a stream is its tokens, with their log probabilities if they are told. The tokens of
several choices are taken in turns, so that their order, too, follows from them alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import nan
from typing import Any, Protocol

from penstock.engine.planning.grammar import Grammar
from penstock.engine.planning.request import FinishReason, Output, Request, TokenLogprobs
from penstock.gateway.errors import ApiError
from penstock.gateway.http.connections import Connection, Timeouts
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
_OWN_BYTES = 6_000
"""The approximate bytes of a recording without its events and tokens, with its request and writer."""
_UNTOLD = TokenLogprobs(nan)


class Turns:
    """The order of choices' tokens: each choice that has not ended brings one, then each of them the next one."""

    def __init__(self, num_choices: int) -> None:
        self._left = list(range(num_choices))
        self._place = 0

    @property
    def next(self) -> int:
        """The number of the choice whose token comes next; -1 when all have ended."""
        return self._left[self._place] if self._left else -1

    def pass_on(self, *, ends: bool) -> None:
        """Notes that the choice's token was taken; with it the choice `ends`, or goes on."""
        if ends:
            del self._left[self._place]
        else:
            self._place += 1
        if self._place == len(self._left):
            self._place = 0


class Follower(Protocol):
    """One connection that follows a recording."""

    connection: Connection
    position: int
    """The number of the last event that the connection was sent; -1 for none."""


class Recording(Generation):
    """The reply to one request, written down as it comes."""

    may_join = False  # every token is an event

    def __init__(
        self,
        request: Request,
        *,
        kind: str,
        details: dict[str, Any],
        created: int,
        writer: Writer[Recording],
        detachable: bool,
        journalled: bool,
        max_detached_s: float | None = None,
    ) -> None:
        """
        Args:
            kind: the API that it is written for, "chat" say.
            details: what the writer is made of; JSON, for it goes into the journal.
            created: in seconds since 1970.
            detachable: it goes on when nobody reads it.
            max_detached_s: but for no longer than this.
        """
        super().__init__([request])
        self.request = request
        """The request as it was sent; the part of it on which the engine still works is in `requests`."""
        self.writer = writer
        self.kind = kind
        self.details = details
        self.created = created
        self.detachable = detachable
        self.journalled = journalled
        self.max_detached_s = max_detached_s
        self.is_streamed = bool(details.get("stream", True))
        """Whether it has events; otherwise it can only be had as a whole."""
        self.kept = {index: Delta() for index in range(request.n)}
        self.token_ids: list[int] = []
        """The tokens of all choices, in turns."""
        self.logprobs: list[TokenLogprobs] = []
        """The log probabilities of all of them; none if they are not told."""
        self.ends: set[int] = set()
        """The places of the tokens with which one of several choices ended."""
        self.cancelled = False
        self.settled = False
        """Whether it has ended and was kept."""
        self.started = False
        """Whether the first token has come."""
        self._begun_s: float | None = None
        """The time about which its first token came here."""
        self.ended_s: float | None = None
        self.attempts = 1
        """The number of processes that have worked on it."""
        self.detached_s: float | None = request.arrival_s if detachable else None
        """The time since which nobody reads it; None while somebody does."""
        self.on_news: Callable[[Recording], None] = _ignore
        """A function that is called when there is something to write down."""
        self._frames = KeptFrames()
        self._tells_logprobs = request.sampling.num_logprobs is not None
        self._turns = Turns(request.n)
        self._held: list[deque[Output]] = [deque() for _ in range(request.n)]
        """The outputs of each choice that wait for their turn."""
        self._readers: dict[Follower, None] = {}

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
        num_logprobs = len(self.logprobs) * (1 + (self.request.sampling.num_logprobs or 0))
        return (
            _OWN_BYTES
            + self._frames.num_bytes
            + _HELD_BYTES * num_held
            + LOGPROB_BYTES * num_logprobs
            + _TOKEN_BYTES * len(self.token_ids)
            + 36 * self.num_prompt_tokens
        )

    @property
    def choices(self) -> list[Delta]:
        """The whole output of each choice."""
        return list(self.kept.values())

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
            self.request = replace(self.request, output_token_ids=tuple(self.token_ids))
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
            while (index := self._turns.next) >= 0 and self._held[index]:
                self._take_turn(self._held[index].popleft())
        self.on_news(self)

    def _take_turn(self, output: Output) -> None:
        ends = output.finish_reason is not None
        self._take(output)
        if ends:
            self.ends.add(len(self.token_ids) - 1)
        self._turns.pass_on(ends=ends)

    def _take(self, output: Output) -> None:
        if not self.started:
            self.started = True
            self.open()
        self.kept[output.index].add(output)
        self.token_ids += output.token_ids
        if self._tells_logprobs:
            self.logprobs += output.logprobs or [_UNTOLD] * len(output.token_ids)
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

    def attach(self, reader: Follower) -> None:
        self._readers[reader] = None
        self.detached_s = None

    def detach(self, reader: Follower, now: float) -> None:
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


def _ignore(_: Recording) -> None:
    pass

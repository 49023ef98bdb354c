"""A recorded reply: its events have numbers, and any connection can follow it from any of them.

The events are a pure function of the output tokens: some that open the reply, those that its texts come to, some that
close it. So a server that makes the same tokens again makes the same events under the same numbers, and
what has to be written down of a stream is its tokens, with their log probabilities if they are told. The tokens of
several choices are taken in turns, so that their order, too, follows from them alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import nan
from typing import Any, Protocol

from penstock.engine.planning.grammar import Grammar
from penstock.engine.planning.request import FinishReason, Output, Request, TokenLogprobs
from penstock.gateway.http.connections import Connection, Timeouts
from penstock.gateway.http.errors import ApiError, gone
from penstock.gateway.wire.streams import LOGPROB_BYTES, Generation
from penstock.priority.verdict import Forecast

MAX_TEXT_BYTES = 8 * 1024 * 1024
"""The bytes of one recording; the oldest events beyond it are forgotten."""
INTERRUPTED = frozenset({"server_shutting_down", "engine_failed"})
"""Errors that end what this process does for a reply, but not the reply: another process goes on with it."""
EVENT_BYTES = 160
"""The bytes of an event without its text."""
_CHOICE_BYTES = 80
"""The bytes that an event takes more, where it says which choice it is of."""
_KNOWN_BYTES = 240
"""The bytes that an event takes more, where it has log probabilities, without these."""
_HELD_BYTES = 400
"""The approximate bytes of a token that waits to be turned into events."""
_OWN_BYTES = 6_000
"""The approximate bytes of a recording without its events and tokens, with its request and script."""
_UNTOLD = TokenLogprobs(nan)


class Script(Protocol):
    """The maker of one reply's events, from its texts: plain objects, which a Format writes for each reader."""

    def feed(self, text: str, index: int = 0) -> Sequence[object]:
        """Takes more text of the choice of that number."""

    def note(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], index: int, num_reasoning: int
    ) -> None:
        """Log probabilities of tokens, if they were asked for, before their text is fed.

        Args:
            num_reasoning: so many of them, the first ones, are reasoning.
        """

    def finish(self, reason: FinishReason, index: int = 0) -> Sequence[object]:
        """Returns the last events of a choice, when no more text comes."""


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


@dataclass(slots=True)
class Choice:
    """The tokens of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The log probabilities of all of them; none if they are not told."""
    ended: bool = False


class Follower(Protocol):
    """One connection that follows a recording."""

    connection: Connection

    def tell(self, event: object) -> None:
        """The recording has one more event; it is its last."""


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
        script: Script,
        detachable: bool,
        journalled: bool,
        max_detached_s: float | None = None,
    ) -> None:
        """
        Args:
            kind: whose format and script it has, "chat" say.
            details: what that format has to know; JSON, for it goes into the journal.
            created: in seconds since 1970.
            detachable: it goes on when nobody reads it.
            max_detached_s: but for no longer than this.
        """
        super().__init__([request])
        self.request = request
        """The request as it was sent; the part of it on which the engine still works is in `requests`."""
        self.kind = kind
        self.details = details
        self.created = created
        self.detachable = detachable
        self.journalled = journalled
        self.max_detached_s = max_detached_s
        self.token_ids: list[int] = []
        """The tokens of all choices, in turns."""
        self.logprobs: list[TokenLogprobs] = []
        """The log probabilities of all of them; none if they are not told."""
        self.ends: set[int] = set()
        """The places of the tokens with which one of several choices ended."""
        self.reasons: dict[int, FinishReason] = {}
        """The reasons for which choices ended."""
        self.cancelled = False
        self.settled = False
        """Whether it has ended and was kept."""
        self.started = False
        """Whether the first token has come."""
        self.timings_json: dict[str, object] | None = None
        """The `timings` of the reply, once it has ended; None if they are not known."""
        self.ended_s: float | None = None
        self.attempts = 1
        """The number of processes that have worked on it."""
        self.detached_s: float | None = request.arrival_s if detachable else None
        """The time since which nobody reads it; None while somebody does."""
        self.on_news: Callable[[Recording], None] = _ignore
        """A function that is called when there is something to write down."""
        self.num_dropped = 0
        self._script = script
        self._tells_logprobs = request.sampling.num_logprobs is not None
        self._event_bytes = (
            EVENT_BYTES + _CHOICE_BYTES * (request.n > 1) + _KNOWN_BYTES * self._tells_logprobs
        )
        self._turns = Turns(request.n)
        self._held: list[deque[Output]] = [deque() for _ in range(request.n)]
        """The outputs of each choice that wait for their turn."""
        self._events: deque[object] = deque()
        self._sizes: deque[int] = deque()
        """The bytes that each event takes, about."""
        self._num_held = 0
        """The number of characters that came since the last event."""
        self._num_bytes = 0
        self._readers: dict[Follower, None] = {}

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason for which the first choice ended, once it has."""
        return self.reasons.get(0)

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def is_interrupted(self) -> bool:
        """Whether this process will not finish it, but another one can."""
        return self.journalled and self.error is not None and self.error.code in INTERRUPTED

    @property
    def reason(self) -> FinishReason:
        """The reason for which the reply ended, once it has."""
        if self.cancelled:
            return FinishReason.CANCELLED
        if self.error is not None or not self.finished:
            return FinishReason.FAILED
        return self.reasons[0]

    @property
    def num_events(self) -> int:
        """The number of its events, forgotten ones included."""
        return self.num_dropped + len(self._events)

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, about."""
        num_held = sum(map(len, self._held)) if self.request.n > 1 else 0
        each = _HELD_BYTES + self._logprob_bytes(1)
        return (
            _OWN_BYTES
            + self._num_bytes
            + each * num_held
            + 36 * (len(self.token_ids) + self.num_prompt_tokens)
        )

    @property
    def choices(self) -> list[Choice]:
        """The tokens of each choice."""
        found, turns = [Choice() for _ in range(self.request.n)], Turns(self.request.n)
        for place, token_id in enumerate(self.token_ids):
            choice = found[turns.next]
            choice.token_ids.append(token_id)
            choice.logprobs += self.logprobs[place : place + 1]
            choice.ended = place in self.ends
            turns.pass_on(ends=choice.ended)
        return found

    @property
    def events(self) -> list[Any]:
        """All events so far; raises 410 if the beginning is forgotten."""
        if self.num_dropped:
            raise gone(f"The beginning of '{self.id}' is no longer kept.", "position_expired")
        return list(self._events)

    def events_from(self, number: int) -> list[Any]:
        """Returns the events from the `number`-th on, counted from 0, forgotten ones included."""
        return list(islice(self._events, max(0, number - self.num_dropped), None))

    def add_text(self, text: str, index: int = 0) -> None:
        self._num_held += len(text)
        self._add(self._script.feed(text, index))

    def close(self) -> None:
        """Adds the last events; no more text comes."""
        for index in range(self.request.n):
            self._add(self._script.finish(self.reason, index))

    def _add(self, events: Iterable[object]) -> None:
        for event in events:
            self._events.append(event)
            self._sizes.append(self._num_held + self._event_bytes)
            self._num_bytes += self._sizes[-1]
            self._num_held = 0
            while self._num_bytes > MAX_TEXT_BYTES:
                self._events.popleft()
                self._num_bytes -= self._sizes.popleft()
                self.num_dropped += 1
            for reader in self._readers:
                reader.tell(event)

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
        self.started = True
        self.token_ids += output.token_ids
        if self._tells_logprobs:
            self.logprobs += output.logprobs or [_UNTOLD] * len(output.token_ids)
        if output.logprobs:
            self._note_logprobs(output.token_ids, output.logprobs, output.index)
        if output.text:
            self.add_text(output.text, output.index)
        if output.finish_reason is not None:
            self.reasons[output.index] = output.finish_reason

    def _note_logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs], index: int) -> None:
        """Notes the log probabilities of tokens, and how many of these are reasoning, which comes first."""
        num_before = self.num_output_tokens - len(token_ids)
        num_reasoning = max(0, self.num_reasoning_tokens - num_before)
        self._script.note(token_ids, logprobs, index, num_reasoning)
        self._num_held += self._logprob_bytes(len(logprobs))

    def _logprob_bytes(self, num_tokens: int) -> int:
        num_top = self.request.sampling.num_logprobs
        return 0 if num_top is None else LOGPROB_BYTES * (1 + num_top) * num_tokens

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

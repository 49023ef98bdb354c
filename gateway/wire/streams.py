"""Streams: what the engine brought for one reply and its reader has not taken yet.

Nobody waits for a reader. What it has not taken is kept and joined: the slower it is, the longer the pieces; past a
bound it is cut off. All of this happens on the event loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.planning.request import FinishReason, Output, Request, Timings, TokenLogprobs
from penstock.gateway.access.quotas import Reservation
from penstock.gateway.http.connections import Connection, Timeouts
from penstock.gateway.http.correlation import CORRELATION
from penstock.gateway.http.errors import ApiError, internal, log_fault
from penstock.gateway.wire.reading import Thoughts
from penstock.priority.lanes import Lane
from penstock.priority.verdict import Forecast

MAX_PENDING_BYTES = 1024 * 1024
"""A reader with more unsent bytes than this is cut off."""
LOGPROB_BYTES = 100
"""The approximate bytes of one log probability, here and on the wire."""


_UNANSWERED = frozenset({FinishReason.CANCELLED, FinishReason.FAILED})


@dataclass(slots=True)
class Delta:
    """The output of one choice since the reader last took it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """The log probabilities of these tokens; if the prompt is echoed, first those of its tokens, None for the first."""
    prompt_token_ids: Sequence[int] = ()
    """The prompt, in the first delta of a choice, if something of it was asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """The log probabilities of the prompt's tokens from the second one on, if they were asked for."""
    embedding: list[float] | None = None
    """The embedding of the prompt, if it was asked for."""
    scores: list[float] | None = None
    """The log probabilities of its candidates, if it is a branch."""
    finish_reason: FinishReason | None = None
    stop: str | None = None
    """The stop string that ended the choice, if one did."""

    def add(self, output: Output) -> None:
        self.text += output.text
        self.finish_reason, self.stop = output.finish_reason, output.stop
        self.token_ids += output.token_ids
        self.embedding, self.scores = output.embedding, output.scores
        if output.logprobs:
            self.logprobs += output.logprobs


def joined(outputs: Iterable[Output]) -> list[Output]:
    """Joins the outputs of each choice to one, which stands where the choice's first one was."""
    pieces: dict[tuple[str, int], Output] = {}
    for output in outputs:
        piece = pieces.setdefault((output.request_id, output.index), output)
        if piece is not output:
            piece.token_ids += output.token_ids
            piece.text += output.text
            if output.logprobs:
                piece.logprobs = (piece.logprobs or []) + output.logprobs
            piece.finish_reason, piece.stop = output.finish_reason, output.stop
            piece.error, piece.timings = output.error, output.timings
    return list(pieces.values())


class Generation:
    """All choices of all requests of one reply, from submission to the last of them.

    Ends in exactly one of finished (every choice has its finish_reason), failed (`error` is set) or left (nobody wants
    it any more).
    """

    may_join = True
    """Whether the outputs of several steps may be joined."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        asked = CORRELATION.get()
        self.correlation = "" if asked is None else asked.request_id
        """The `x-request-id` of the HTTP request."""
        if asked is not None:
            asked.account = self.account
        self.error: ApiError | None = None
        self.timings: list[Timings] = []
        self.finish_reasons: list[FinishReason] = []
        """The reasons for which choices ended, in the order in which they did."""
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.thoughts: Thoughts | None = None
        """Counts the reasoning among the output tokens; None if there is none, or no more of it comes."""
        self.num_reasoning_tokens = 0
        self.predicted_ttft_s: float | None = None
        """The forecast at admission of the time from arrival to the first token; of several requests, the longest."""
        self.promised_ttft_s: float | None = None
        """The time to the first token that was promised at admission; None if none was."""
        self.left = False
        self.kept: dict[int, Delta] = {}
        """The whole output of each choice, if it is kept to the end; see KeptStream."""
        self.reservation: Reservation | None = None
        """The part of the tenant's quota that it may use."""
        self.was_begun = False
        """Whether a request had reached the engine when it was cancelled, so that its prompt may have been computed."""
        self._unfinished = {request.request_id: request.n for request in requests}
        self._num_choices = self._num_unfinished = sum(self._unfinished.values())

    def account(self) -> dict[str, object]:
        """Returns what the access log says of a request that led to this generation."""
        return {
            "lane": self.lane.label,
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
        }

    @property
    def lane(self) -> Lane:
        """The lane of all its requests; of a stream that tries another one first, from when it was let in."""
        return Lane(self.requests[0].lane)

    @property
    def finished(self) -> bool:
        return not self._num_unfinished

    @property
    def ended(self) -> bool:
        return not self._num_unfinished or self.error is not None or self.left

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_used_tokens(self) -> int:
        """The tokens that count in the tenant's quota: prompt and output; none if it never left the queue or failed."""
        answers_without_tokens = not _UNANSWERED.issuperset(self.finish_reasons)
        if not self.num_output_tokens and not self.was_begun and not answers_without_tokens:
            return 0
        return self.num_output_tokens + self.num_prompt_tokens

    def note_let_in(self, requests: Sequence[Request], forecast: Forecast | None, now: float) -> None:
        """Notes that it was let in, with its requests as they were."""
        self.requests = list(requests)
        if forecast is not None:
            self.predicted_ttft_s = now - self.requests[0].arrival_s + forecast.seconds

    def num_unfinished(self, request_id: str) -> int:
        """The number of one request's choices that the engine has not ended."""
        return self._unfinished[request_id]

    def push(self, output: Output) -> None:
        """Takes the output of one step for one choice."""
        if output.finish_reason is not None:
            self._end_choice(output)
        if not self.left and self.error is None:
            self.num_output_tokens += len(output.token_ids)
            if self.thoughts is not None:
                self._count_reasoning(self.thoughts, output)
            self.receive(output)

    def _count_reasoning(self, thoughts: Thoughts, output: Output) -> None:
        self.num_reasoning_tokens += thoughts.count(self.choice_of(output), output.token_ids)
        if thoughts.num_over == self._num_choices:
            self.thoughts = None

    def choice_of(self, output: Output) -> Hashable:
        """The key that tells the choice of an output from the reply's others."""
        return output.request_id, output.index

    def receive(self, output: Output) -> None:
        """Passes the output of one step for one choice to the reader."""
        raise NotImplementedError

    def wake(self) -> None:
        """Wakes the reader."""
        raise NotImplementedError

    def look_after(self, now: float, timeouts: Timeouts) -> None:
        """Checks the clock; called several times a second until the generation has ended."""
        raise NotImplementedError

    def fail(self, error: ApiError) -> None:
        if not self.ended:
            self.error = error
            self.wake()

    def leave(self) -> None:
        """Notes that nobody reads it any more."""
        self.left = True
        self.wake()

    def _end_choice(self, output: Output) -> None:
        self._unfinished[output.request_id] -= 1
        self._num_unfinished -= 1
        if output.finish_reason is not None:
            self.finish_reasons.append(output.finish_reason)
        if output.timings is not None:
            self.timings.append(output.timings)
            # The choices of one request share its prompt.
            self.num_cached_tokens += output.timings.num_cached_tokens if output.index == 0 else 0
        if output.finish_reason in (FinishReason.FAILED, FinishReason.CANCELLED) and not self.left:
            # Nobody cancels what somebody still reads: for the reader that, too, is a fault.
            self.error = self.error or internal(output.error or "The server ended the request.")
            self.wake()


class WholeWriter(Protocol):
    """Writes one reply in one wire format as a whole."""

    def whole(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> dict[str, object]:
        """The reply's JSON; lists that may be large are iterators, for `gateway.wire.frames.json_pieces`."""


class Writer(WholeWriter, Protocol):
    """Writes one reply in one wire format, streamed or whole, and remembers what it has written so far."""

    media_type: str
    """The media type of a stream."""

    def text(self, index: int, text: str) -> bytes:
        """Returns the frames of new text of a choice that goes on; it is called for every token."""

    def news(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> bytes:
        """Returns the frames of all new output, and of the stream's end if the generation has finished.

        This is the first that is asked of a stream's writer.
        """

    def fault(self, error: ApiError) -> bytes:
        """Returns the last frames of a stream that fails after it has begun."""

    def keepalive(self) -> bytes:
        """Returns a frame that only keeps the connection alive."""


class Stream(Generation):
    """A reply with one reader, over the connection that its request came by, with which it ends."""

    def __init__(
        self,
        requests: list[Request],
        reservation: Reservation,
        writer: Writer | None = None,
        *,
        thoughts: Thoughts | None = None,
        echoes: Sequence[str] = (),
        in_full: bool = False,
    ) -> None:
        """
        Args:
            writer: writes what the reader is sent; None if it is sent nothing before the end.
            thoughts: counts the reasoning in the answers.
            echoes: the texts of the requests' prompts, if choices begin with them.
            in_full: the reader wants to know more than texts of each choice, of its prompt as well.
        """
        super().__init__(requests)
        self.reservation, self.thoughts = reservation, thoughts
        self.connection: Connection
        """The connection of the reader, from the moment on in which the stream is submitted."""
        self.is_streamed = writer is not None
        self.media_type = "" if writer is None else writer.media_type
        self.at_end = False
        """Whether everything has been taken."""
        self._writer = writer
        self._first_choice = _first_choices(requests)
        self._echoes = {request.request_id: text for request, text in zip(requests, echoes, strict=False)}
        self._unbegun = {
            self._first_choice[request.request_id] + index: request
            for request in requests
            if echoes or in_full or request.sampling.num_prompt_logprobs is not None
            for index in range(request.n)
        }
        """The choices that begin with something of their prompt and have not begun."""
        self._in_full = in_full
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._pending: dict[int, Delta] = {}
        self._pending_bytes = 0

    def receive(self, output: Output) -> None:
        index = self._first_choice[output.request_id] + output.index
        if index in self._unbegun:
            self._begin(index, output)
        is_plain = output.finish_reason is None and not (output.logprobs or self._pending or self._in_full)
        if is_plain and self._writer is not None and self.connection.is_ready:
            # Nothing waits, and no task wakes up.
            if body := self._writer.text(index, output.text):
                self.connection.send_now(body)
            return
        self._keep(index, output)
        if self._writer is not None and self._pending_bytes > MAX_PENDING_BYTES:
            self.connection.cut()
        elif self._writer is not None or self.ended:
            self.wake()

    def wake(self) -> None:
        self.connection.wake()

    def look_after(self, now: float, timeouts: Timeouts) -> None:
        if self._writer is not None or self.connection.committed:
            self.connection.look_after(now, timeouts)

    @property
    def refusal(self) -> ApiError | None:
        """The error that is the whole reply if nothing of it was sent yet."""
        return self.error

    async def news(self) -> None:
        """Returns when there is something to send, or the connection is gone."""
        if not (self._pending or self.ended or self.connection.overdue or self.connection.gone):
            await self.connection.sleep()

    async def end(self) -> None:
        """Returns when the reply has ended."""
        while not self.ended:
            await self.connection.sleep()

    def take(self) -> bytes:
        """Returns everything that can be sent now; empty while a character is incomplete, for example."""
        assert self._writer is not None
        frames, self.at_end = self._writer.news(self, self.take_deltas()), self.ended
        if self.error is not None:
            log_fault(self.error)
            frames += self._writer.fault(self.error)
        return frames

    def keepalive(self) -> bytes:
        assert self._writer is not None
        return self._writer.keepalive()

    def take_deltas(self) -> Iterable[tuple[int, Delta]]:
        """Takes out all new output, by choice."""
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        return pending.items()

    def _begin(self, index: int, output: Output) -> None:
        """Keeps the parts of the prompt that a choice begins with. The first choice of a prompt has them for all."""
        request = self._unbegun.pop(index)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[request.request_id] = output.prompt_logprobs
        told = self._prompt_logprobs.get(request.request_id)
        self._pending[index] = delta = Delta(prompt_token_ids=request.prompt_token_ids, prompt_logprobs=told)
        if request.request_id in self._echoes:
            delta.text = self._echoes[request.request_id]
            if told is not None and request.sampling.num_logprobs is not None:
                delta.logprobs += [None, *told]

    def _keep(self, index: int, output: Output) -> None:
        pending = self._pending.get(index)
        if pending is None:
            pending = self._pending[index] = Delta()
        pending.add(output)
        self._pending_bytes += len(output.text)
        if output.logprobs:
            self._pending_bytes += LOGPROB_BYTES * sum(1 + len(found.top) for found in output.logprobs)


class KeptStream(Stream):
    """A stream that keeps what it has sent, so that the whole reply can be made at its end."""

    def receive(self, output: Output) -> None:
        index = self._first_choice[output.request_id] + output.index
        self.kept.setdefault(index, Delta()).add(output)
        super().receive(output)


def _first_choices(requests: list[Request]) -> dict[str, int]:
    """Returns the number of each request's first choice; choices of one prompt are consecutive (OpenAI's order)."""
    first, number = {}, 0
    for request in requests:
        first[request.request_id] = number
        number += request.n
    return first

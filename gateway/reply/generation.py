"""Generations: the requests of one reply on their way through queue and engine, and what became of them.

Nobody waits for the reader of a live reply. Output that it has not taken is kept and joined: the slower it is, the
longer the pieces; past a bound it is cut off. All of this happens on the event loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import cast

from penstock.engine.planning.request import FinishReason, Output, Request, TokenLogprobs
from penstock.engine.planning.timings import Timings
from penstock.gateway.access.quotas import QuotaReservation
from penstock.gateway.errors import ApiError, internal
from penstock.gateway.http.connections import Connection, Timeouts
from penstock.gateway.http.correlation import CORRELATION, log_fault
from penstock.gateway.wire.reasoning import Thoughts
from penstock.gateway.wire.writing import ANSWERED, Delta, Outputs, Reply, WholeWriter, Writer
from penstock.priority.lanes import Lane
from penstock.priority.verdict import Forecast

MAX_PENDING_BYTES = 1024 * 1024
"""A reader with more unsent bytes than this is cut off."""
LOGPROB_BYTES = 100
"""The approximate bytes of one log probability, here and on the wire."""


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
        http = CORRELATION.get()
        self.correlation = "" if http is None else http.request_id
        """The `x-request-id` of the HTTP request."""
        if http is not None:
            http.account = self.account
        self.error: ApiError | None = None
        self.timings: list[Timings] = []
        self.timings_json: dict[str, object] | None = None
        """The `timings` of the reply, once they were made."""
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
        """The whole output of each choice, if it is kept to the end."""
        self.reservation: QuotaReservation | None = None
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
        answers_without_tokens = not ANSWERED.isdisjoint(self.finish_reasons)
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


class Live(Generation):
    """A reply with one reader, over the connection that its request came by, with which it ends.

    A `gateway.endpoints.answering.Sender` takes from it what from a reader of a recording.
    """

    def __init__(
        self,
        requests: list[Request],
        reservation: QuotaReservation,
        writer: WholeWriter[Reply],
        *,
        streamed: bool = False,
        thoughts: Thoughts | None = None,
        echoes: Sequence[str] = (),
        in_full: bool = False,
        keeps: bool = False,
    ) -> None:
        """
        Args:
            streamed: the reader is sent output as it comes, by a Writer.
            thoughts: counts the reasoning in the answers.
            echoes: the texts of the requests' prompts, if choices begin with them.
            in_full: the reader wants to know more than texts of each choice, of its prompt as well.
            keeps: the whole output of a stream is kept, so that the whole reply can be made at its end.
        """
        super().__init__(requests)
        self.reservation, self.thoughts = reservation, thoughts
        self.connection: Connection
        """The connection of the reader, from the moment on in which the reply is submitted."""
        self.is_streamed = streamed
        self.at_end = False
        """Whether everything has been taken."""
        self.is_behind = False
        """Whether there is more to take at once: never, for what is joined is taken together."""
        self.writer = cast("Writer[Reply]", writer)  # it writes wholes alone where nothing is streamed
        self._is_open = False
        """Whether the frames that open the stream were taken."""
        self._keeps = keeps
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
        if self._keeps:
            self.kept.setdefault(index, Delta()).add(output)
        if index in self._unbegun:
            self._begin(index, output)
        is_plain = output.finish_reason is None and not (output.logprobs or self._pending or self._in_full)
        if is_plain and self._is_open and self.connection.is_ready:
            # Nothing waits, and no task wakes up.
            if frames := self.writer.text(index, output.text):
                self.connection.send_now(b"".join(frames))
            return
        self._keep(index, output)
        if self.is_streamed and self._pending_bytes > MAX_PENDING_BYTES:
            self.connection.cut()
        elif self.is_streamed or self.ended:
            self.wake()

    def wake(self) -> None:
        self.connection.wake()

    def look_after(self, now: float, timeouts: Timeouts) -> None:
        if self.is_streamed or self.connection.committed:
            self.connection.look_after(now, timeouts)

    # As a Reader

    @property
    def reply(self) -> Live:
        return self

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
        return b"".join(self.frames())

    def frames(self) -> list[bytes]:
        """Returns what `take` does, frame by frame."""
        frames: list[bytes] = []
        outputs, self.at_end = self._take_pending(), self.ended
        if not self._is_open and (outputs or self.writer.opens_early):
            self._is_open = True
            frames += self.writer.begin(self)
        for index, delta in outputs:
            frames += self.writer.more(self, index, delta)
        if self.at_end and not self.left:
            frames += [*self.writer.end(self), self.writer.tail]
            if self.error is not None:
                log_fault(self.error)
        return frames

    def outputs(self) -> Outputs:
        """Returns the whole output of each choice."""
        return sorted(self.kept.items() if self._keeps else self._take_pending())

    def _take_pending(self) -> list[tuple[int, Delta]]:
        """Takes out all new output, by choice."""
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        return list(pending.items())

    def _begin(self, index: int, output: Output) -> None:
        """Keeps the parts of the prompt that a choice begins with. The first choice of a prompt has them for all."""
        request = self._unbegun.pop(index)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[request.request_id] = output.prompt_logprobs
        logprobs = self._prompt_logprobs.get(request.request_id)
        self._pending[index] = delta = Delta(
            prompt_token_ids=request.prompt_token_ids, prompt_logprobs=logprobs
        )
        if request.request_id in self._echoes:
            delta.texts.append(self._echoes[request.request_id])
            if logprobs is not None and request.sampling.num_logprobs is not None:
                delta.logprobs += [None, *logprobs]

    def _keep(self, index: int, output: Output) -> None:
        pending = self._pending.get(index)
        if pending is None:
            pending = self._pending[index] = Delta()
        pending.add(output)
        self._pending_bytes += len(output.text)
        if output.logprobs:
            self._pending_bytes += LOGPROB_BYTES * sum(1 + len(one.top) for one in output.logprobs)


def _first_choices(requests: list[Request]) -> dict[str, int]:
    """Returns the number of each request's first choice; choices of one prompt are consecutive (OpenAI's order)."""
    first, number = {}, 0
    for request in requests:
        first[request.request_id] = number
        number += request.n
    return first

"""Generations: the requests of one reply on their way through queue and engine, and what became of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from penstock.engine.planning.request import FinishReason, Output, Request, Timings
from penstock.gateway.access.quotas import Reservation
from penstock.gateway.errors import ApiError, internal
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.http.correlation import CORRELATION
from penstock.gateway.wire.reasoning import Thoughts
from penstock.gateway.wire.writing import ANSWERED, Delta
from penstock.priority.lanes import Lane
from penstock.priority.verdict import Forecast


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

"""Live replies: what the engine brought for one reply and its only reader has not taken yet.

Nobody waits for a reader. Output that it has not taken is kept and joined: the slower it is, the longer the pieces;
past a bound it is cut off. All of this happens on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from penstock.engine.planning.request import Output, Request, TokenLogprobs
from penstock.gateway.access.quotas import Reservation
from penstock.gateway.errors import ApiError
from penstock.gateway.http.connections import Connection, Timeouts
from penstock.gateway.http.correlation import log_fault
from penstock.gateway.reply.generation import Generation
from penstock.gateway.wire.reasoning import Thoughts
from penstock.gateway.wire.writing import Counts, Delta, Outputs, WholeWriter, Writer

MAX_PENDING_BYTES = 1024 * 1024
"""A reader with more unsent bytes than this is cut off."""
LOGPROB_BYTES = 100
"""The approximate bytes of one log probability, here and on the wire."""


class Live(Generation):
    """A reply with one reader, over the connection that its request came by, with which it ends.

    A `gateway.endpoints.replies.Sender` takes from it what from a reader of a recording.
    """

    def __init__(
        self,
        requests: list[Request],
        reservation: Reservation,
        writer: WholeWriter[Counts],
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
        self.writer = cast("Writer[Counts]", writer)  # it writes wholes alone where nothing is streamed
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
        return b"".join(frames)

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

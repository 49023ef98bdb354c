"""A reply whose pieces are the test's to choose."""

from __future__ import annotations

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.gateway.reply.generation import Generation
from penstock.gateway.wire.parsing import Piece, ReplyParser
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.writing import Delta, Head, Reply, Writer
from tests.gateway.harness import make_timings

HEAD = Head(id="id-1", created=7, model="m")
MAX_TOKENS = 16


class ScriptedParser:
    """A parser that makes one piece of each character that it is fed."""

    def __init__(self, *pieces: Piece) -> None:
        self._pieces = list(pieces)

    @property
    def text(self) -> str:
        return "x" * len(self._pieces)

    def feed(self, text: str) -> list[Piece]:
        fed, self._pieces = self._pieces[: len(text)], self._pieces[len(text) :]
        return fed

    def finish(self) -> list[Piece]:
        return self._pieces


class ScriptedReading(Reading):
    """A reading whose parsers all make these pieces."""

    script: tuple[Piece, ...]

    def __init__(self, *pieces: Piece) -> None:
        super().__init__()
        object.__setattr__(self, "script", pieces)

    @property
    def text(self) -> str:
        return ScriptedParser(*self.script).text

    def parser(self, reply_id: str, choice: int = 0) -> ReplyParser:  # noqa: ARG002
        return ScriptedParser(*self.script)


class EndedGeneration(Generation):
    """It came to its end."""

    def __init__(self) -> None:
        super().__init__(
            [
                Request(
                    request_id="r",
                    prompt_token_ids=(1, 2, 3, 4, 5, 6),
                    sampling=SamplingParams(max_tokens=MAX_TOKENS),
                )
            ]
        )

    def receive(self, output: Output) -> None:
        pass

    def wake(self) -> None:
        pass


def ending(
    reason: FinishReason = FinishReason.STOP, stop: str | None = None
) -> tuple[EndedGeneration, Delta]:
    """A generation with its last delta, which has no text."""
    generation = EndedGeneration()
    timings = make_timings(generation.requests[0])
    generation.push(Output("r", 0, [7], "", finish_reason=reason, timings=timings, stop=stop))
    return generation, Delta(finish_reason=reason, stop=stop)


def streamed(writer: Writer[Reply], text: str, reason: FinishReason = FinishReason.STOP) -> str:
    """All that is said of a text that comes a character at a time."""
    frames = writer.begin(EndedGeneration())
    for character in text:
        frames += writer.text(0, character)
    return (b"".join(frames) + ended(writer, *ending(reason))).decode("ascii")


def ended(writer: Writer[Reply], generation: EndedGeneration, last: Delta) -> bytes:
    """All that is said at the end."""
    return b"".join([*writer.more(generation, 0, last), *writer.end(generation), writer.tail])

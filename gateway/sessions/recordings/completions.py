"""Chat and text completions as recordings: the usual chunks, each with its number as the event's id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from penstock.engine.planning.request import FinishReason, TokenLogprobs
from penstock.gateway.http.errors import ApiError
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.wire.frames import DONE, StreamWriter, error_frame, usage_of
from penstock.gateway.wire.parsing import Answer, CallBegun, Piece
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.shapes import ChatShape, CompletionShape, Extras, Head, Shape, TokenText
from penstock.gateway.wire.streams import Delta

CHAT, TEXT = "chat", "completion"
"""The kinds of recordings."""
_NOTHING: tuple[tuple[int, ...], tuple[TokenLogprobs, ...]] = ((), ())


def details_of(
    head: Head,
    reading: Reading,
    *,
    stream: bool,
    include_usage: bool,
    num_choices: int = 1,
    stored: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the request's details for a recording, as JSON; `stored` if its completion is to be stored."""
    return {
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
        "stream": stream,
        "include_usage": include_usage,
        "reading": asdict(reading),
        "num_choices": num_choices,
        "stored": stored,
    }


def script(reply_id: str, details: dict[str, Any]) -> CompletionScript:
    """`num_choices` is missing where an earlier version wrote the journal: there was one."""
    return CompletionScript(reply_id, Reading(**details["reading"]), details.get("num_choices", 1))


class Said(NamedTuple):
    """A piece of one choice, with its tokens. A piece of an only choice without log probabilities stands for itself."""

    choice: int
    piece: Piece | None
    token_ids: tuple[int, ...] = ()
    """The tokens not yet in an event, if log probabilities are reported."""
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def delta(self) -> Delta | None:
        """The log probabilities of these tokens, if there are some."""
        return Delta("", list(self.token_ids), list(self.logprobs)) if self.logprobs else None


class CompletionScript:
    """A `gateway.sessions.recordings.recording.Script`: the pieces of each choice."""

    def __init__(self, reply_id: str, reading: Reading, num_choices: int) -> None:
        self._parsers = [reading.parser(reply_id, index) for index in range(num_choices)]
        self._noted: dict[int, tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]] = {}
        """The tokens of each choice that wait for its next piece, and their log probabilities."""

    def note(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        index: int,
        num_reasoning: int,  # noqa: ARG002
    ) -> None:
        """Keeps them for the next piece, those of reasoning as well, as where nothing is recorded."""
        known, found = self._noted.get(index, _NOTHING)
        self._noted[index] = (*known, *token_ids), (*found, *logprobs)

    def feed(self, text: str, index: int = 0) -> list[Piece | Said]:
        return self._said(index, self._parsers[index].feed(text))

    def finish(self, _: FinishReason, index: int = 0) -> list[Piece | Said]:
        pieces = self._parsers[index].finish()
        return self._said(index, pieces or [None] if index in self._noted else pieces)

    def _said(self, index: int, pieces: Sequence[Piece | None]) -> list[Piece | Said]:
        """Returns the pieces as events; the first has the log probabilities of the tokens so far."""
        said: list[Piece | Said] = []
        for piece in pieces:
            noted = self._noted.pop(index, _NOTHING)
            if noted is _NOTHING and piece is not None and len(self._parsers) == 1:
                said.append(piece)
            else:
                said.append(Said(index, piece, *noted))
        return said


class CompletionFormat:
    """The events of one completion."""

    tail = DONE

    def __init__(self, recording: Recording, tokens: TokenText, position: int = -1) -> None:
        """
        Args:
            position: number of the last event that the client has; where the next token stands follows from those.
        """
        self._head = Head(
            id=recording.id,
            created=recording.created,
            model=recording.details["model"],
            system_fingerprint=recording.details.get("system_fingerprint"),
        )
        extras = Extras(num_top=recording.request.sampling.num_logprobs or 0)
        shape = ChatShape if recording.kind == CHAT else CompletionShape
        self._shape: Shape = shape(tokens, extras)
        self._include_usage: bool = recording.details["include_usage"]
        self._writer = StreamWriter(self._shape, self._head, include_usage=self._include_usage)
        self._writer.begin(recording.lane)
        opened = [self._writer.text(index, "") for index in range(recording.request.n)]
        self._opening = list(filter(None, opened))
        self.num_opening = len(self._opening)
        if recording.kind == TEXT:
            for event in recording.events_from(0)[: position + 1]:
                if isinstance(event, Said) and event.delta is not None:
                    self._shape.logprobs(event.choice, event.delta)

    def opening(self, _: Recording) -> list[bytes]:
        return [_numbered(number, frame) for number, frame in enumerate(self._opening)]

    def event(self, number: int, event: Piece | Said) -> bytes:
        said = event if isinstance(event, Said) else Said(0, event)
        return _numbered(number, self._writer.piece(said.choice, said.piece, said.delta))

    def closing(self, recording: Recording, first: int) -> list[bytes]:
        """Returns the end of every choice; the last one has the timings."""
        last = recording.request.n - 1
        callers = {index for index, piece in map(_indexed, recording.events_from(0)) if _calls(piece)}
        frames = [
            self._writer.finish(
                index,
                reason,
                recording.timings_json if index == last else None,
                has_calls=index in callers,
            )
            for index, reason in sorted(recording.reasons.items())
        ]
        if self._include_usage:
            frames.append(self._writer.usage(recording))
        return [_numbered(number, frame) for number, frame in enumerate(frames, first)]

    def fault(self, _recording: Recording, error: ApiError, _number: int) -> list[bytes]:
        return [error_frame(error)]

    def body(self, recording: Recording) -> dict[str, object]:
        answers = [Answer() for _ in range(recording.request.n)]
        for index, piece in map(_indexed, recording.events):
            answers[index].add([] if piece is None else [piece])
        choices = []
        for index, (choice, answer) in enumerate(zip(recording.choices, answers, strict=True)):
            delta = Delta(answer.text, choice.token_ids, [*choice.logprobs])
            delta.finish_reason = recording.reasons[index]
            choices.append((index, delta, answer))
        body = self._shape.whole(self._head, recording.lane, choices)
        return {**body, "usage": usage_of(recording), "timings": recording.timings_json}


def _indexed(event: Piece | Said) -> tuple[int, Piece | None]:
    return (event.choice, event.piece) if isinstance(event, Said) else (0, event)


def _calls(piece: Piece | None) -> bool:
    return isinstance(piece, CallBegun)


def _numbered(number: int, frame: bytes) -> bytes:
    return b"id: %d\n%b" % (number, frame)

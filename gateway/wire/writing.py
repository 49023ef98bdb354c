"""What writers of replies read: outputs, counts and times; and what they make: frames, and whole replies.

A frame is the bytes of one event. The frames of a recorded reply are numbered from 0 and are a pure function of its
tokens, so that a server which makes the same tokens again makes the same frames under the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from penstock.engine.planning.request import FinishReason, Output, Request, TokenLogprobs
from penstock.engine.planning.timings import Timings
from penstock.gateway.errors import ApiError
from penstock.priority.lanes import Lane

ANSWERED = frozenset({FinishReason.STOP, FinishReason.LENGTH})
"""The reasons of choices that came to their end."""


@dataclass(slots=True)
class Delta:
    """Output of one choice: what came since a reader last took it, or all of it."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """The log probabilities of these tokens; if the prompt is echoed, first those of its tokens, None for the first."""
    num_reasoning: int = 0
    """The number of these tokens that are reasoning, which comes first; counted where replies are recorded."""
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

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def add(self, output: Output) -> None:
        self.texts.append(output.text)
        self.finish_reason, self.stop = output.finish_reason, output.stop
        self.token_ids += output.token_ids
        self.embedding, self.scores = output.embedding, output.scores
        if output.logprobs:
            self.logprobs += output.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields that all chunks of one reply have."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    """Equal for servers that make the same texts; None if it is not shown."""
    kv_transfer: Mapping[str, object] | None = None
    """Says where another server finds the KV of the prompt; None if nobody asked."""


class Reply(Protocol):
    """The part of `gateway.reply.generation.Generation` that writers read."""

    @property
    def requests(self) -> Sequence[Request]: ...
    @property
    def lane(self) -> Lane: ...
    @property
    def error(self) -> ApiError | None: ...
    @property
    def correlation(self) -> str: ...
    @property
    def timings(self) -> Sequence[Timings]: ...
    @property
    def timings_json(self) -> dict[str, object] | None: ...
    @property
    def predicted_ttft_s(self) -> float | None: ...
    @property
    def promised_ttft_s(self) -> float | None: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_reasoning_tokens(self) -> int: ...
    @property
    def kept(self) -> Mapping[int, Delta]: ...


Outputs = Iterable[tuple[int, Delta]]
"""The outputs of choices, by the number of the choice."""
Whole = dict[str, object] | Iterator[object]
"""The JSON of a reply: an object, or a list."""
ReplyT = TypeVar("ReplyT", contravariant=True)


class WholeWriter(Protocol[ReplyT]):
    """Writes one reply in one wire format as a whole."""

    def whole(self, reply: ReplyT, outputs: Outputs) -> Whole:
        """Returns the reply's JSON; lists that may be large are iterators, for `gateway.wire.frames.json_pieces`.

        It may be called several times, and off the event loop.
        """


class Writer(WholeWriter[ReplyT], Protocol[ReplyT]):
    """Writes one reply in one wire format, streamed or whole, and remembers what it has written of the stream."""

    media_type: str
    """The media type of a stream; empty for events."""
    keepalive: bytes
    """A frame that only keeps the connection alive."""
    tail: bytes
    """The bytes after the last frame, which have no number."""
    common: bytes
    """The bytes that most of the latest frames have; empty if they have none."""
    opens_early: bool
    """Whether a stream opens before its first token, if that is late."""

    def begin(self, reply: ReplyT) -> list[bytes]:
        """Returns the frames that open a stream, before any other."""

    def text(self, index: int, text: str) -> list[bytes]:
        """Returns the frames of new text of a choice that goes on; it is called for every token."""

    def more(self, reply: ReplyT, index: int, delta: Delta) -> list[bytes]:
        """Returns the frames of any new output of a choice, which may end with it."""

    def end(self, reply: ReplyT) -> list[bytes]:
        """Returns the last frames of a reply that has ended, be it in an error."""

    def fault(self, reply: ReplyT, error: ApiError, position: int) -> bytes:
        """Returns the bytes that end one connection of a reply which goes on without it.

        Args:
            position: the number of the last event that the connection was sent.
        """

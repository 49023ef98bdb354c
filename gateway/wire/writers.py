"""What a wire format has to be able to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gateway.http.errors import ApiError
from gateway.wire.streams import Delta, Generation


class WholeWriter(Protocol):
    """One reply in one wire format that comes in one piece."""

    def whole(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> dict[str, object]:
        """The reply's JSON; lists that may be large are iterators, for `gateway.wire.frames.json_pieces`."""


class Writer(WholeWriter, Protocol):
    """One reply in one wire format, streamed or whole. It knows what it has said so far."""

    media_type: str
    """Of a stream."""

    def text(self, index: int, text: str) -> bytes:
        """New text of a choice that goes on; every token comes by here. Empty if there is nothing to show."""

    def news(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> bytes:
        """All that is new, by choice; with the end of the stream if the generation has finished.

        Of a stream, this is the first that is asked for.
        """

    def fault(self, error: ApiError) -> bytes:
        """What a stream that has begun ends with if it fails."""

    def keepalive(self) -> bytes:
        """Says that the client is not forgotten."""

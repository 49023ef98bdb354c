"""`/v1/embeddings` on the wire."""

from __future__ import annotations

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gateway.http.errors import ApiError
from gateway.wire.frames import usage_of
from gateway.wire.schemas import Many, ServiceTier, StrictBody
from gateway.wire.streams import Delta, Generation


class EmbeddingsBody(StrictBody):
    """`POST /v1/embeddings`."""

    MOST: ClassVar[Mapping[str, str | int]] = {"dimensions": 2**20}

    model: Annotated[str, Field(min_length=1)]
    input: str | Many[str] | Many[int] | Many[Many[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    service_tier: ServiceTier | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None


class EmbeddingWriter:
    """A reply of embeddings; a `gateway.wire.writers.Writer` of which no stream is asked."""

    media_type = "application/json"

    def __init__(self, body: EmbeddingsBody, *, is_normalised: bool) -> None:
        self._body = body
        self._is_normalised = is_normalised

    def whole(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> dict[str, object]:
        num_tokens = usage_of(generation).prompt_tokens
        return {
            "object": "list",
            "data": (
                {"object": "embedding", "index": index, "embedding": self._spelt(delta.embedding or [])}
                for index, delta in deltas
            ),
            "model": self._body.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def text(self, index: int, text: str) -> bytes:
        raise NotImplementedError

    def news(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> bytes:
        raise NotImplementedError

    def fault(self, error: ApiError) -> bytes:
        raise NotImplementedError

    def keepalive(self) -> bytes:
        raise NotImplementedError

    def _spelt(self, embedding: list[float]) -> list[float] | str:
        values = shortened(embedding, self._body.dimensions, is_normalised=self._is_normalised)
        return as_base64(values) if self._body.encoding_format == "base64" else values


def shortened(embedding: list[float], dimensions: int | None, *, is_normalised: bool) -> list[float]:
    """Its first numbers, all of them without `dimensions`; then, if it is normalised, of length 1."""
    values = embedding[:dimensions]
    if not is_normalised:
        return values
    length = math.hypot(*values) or 1.0
    return [value / length for value in values]


def as_base64(values: Iterable[float]) -> str:
    """float32, little-endian."""
    words = array("f", values)
    if sys.byteorder == "big":
        words.byteswap()
    return b64encode(words.tobytes()).decode("ascii")

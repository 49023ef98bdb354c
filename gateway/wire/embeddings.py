"""`/v1/embeddings` on the wire, and the uses of embeddings: scores and ranked documents."""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Annotated, ClassVar, Literal

from pydantic import Field, with_config
from typing_extensions import TypedDict

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.wire.ask import Ask, Texts, split_prompt
from penstock.gateway.wire.mistakes import missing
from penstock.gateway.wire.schemas import Dimensions, ModelRequest, ServiceTier, Truncation
from penstock.gateway.wire.strict import STRICT, Many, Most
from penstock.gateway.wire.writing import Outputs, Reply


class Embedded(ModelRequest):
    """The fields of all bodies whose texts are embedded."""

    user: str | None = None
    service_tier: ServiceTier | None = None
    truncate_prompt_tokens: Truncation | None = None


class EmbeddingsBody(Embedded):
    """`POST /v1/embeddings`."""

    input: str | Many[str] | Many[int] | Many[Many[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    add_special_tokens: bool | None = None


@with_config(STRICT)
class Document(TypedDict):
    text: str


class RerankBody(Embedded):
    """`POST /rerank`, as Jina and Cohere have it."""

    NOT_SUPPORTED = frozenset({"max_chunks_per_doc", "max_tokens_per_doc", "rank_fields"})

    query: str
    documents: Annotated[Many[str | Document], Field(min_length=1), Most("max_inputs")]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document["text"] for document in self.documents]


Side = str | Annotated[Many[str], Field(min_length=1), Most("max_inputs")]


class ScoreBody(Embedded):
    """`POST /score`, as vLLM has it; `queries` and `documents` are other names of the two."""

    ALIASES: ClassVar[Mapping[str, str]] = {"queries": "text_1", "documents": "text_2"}

    text_1: Side | None = None
    text_2: Side | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Returns the texts to be compared, one with all others or pair by pair.

        Raises:
            ApiError: 400, if it cannot be said which with which.
        """
        first, second = _texts("text_1", self.text_1), _texts("text_2", self.text_2)
        if len(first) not in (1, len(second)):
            message = f"{len(first)} texts cannot be compared with {len(second)}: give one, or as many."
            raise invalid(message, "text_1")
        return first, second


def _texts(field: str, given: str | list[str] | None) -> list[str]:
    if given is None:
        raise missing(field)
    return [given] if isinstance(given, str) else given


def embeddings_ask(body: EmbeddingsBody, limits: Limits) -> Ask:
    texts, token_ids = split_prompt(body.input)
    if not 1 <= len(texts) + len(token_ids) <= limits.max_inputs:
        raise invalid(f"'input' must be 1 to {limits.max_inputs} texts.", "input")
    add_special = body.add_special_tokens is not False
    inputs = Texts(field="input", texts=texts, token_ids=token_ids, add_special=add_special)
    return _ask(body, inputs, dimensions=body.dimensions)


def rerank_ask(body: RerankBody, _: Limits) -> Ask:
    return _ask(body, Texts(field="query", texts=[body.query]), Texts(field="documents", texts=body.texts))


def score_ask(body: ScoreBody, _: Limits) -> Ask:
    first, second = body.sides()
    return _ask(body, Texts(field="text_1", texts=first), Texts(field="text_2", texts=second))


def _ask(body: Embedded, *inputs: Texts, dimensions: int | None = None) -> Ask:
    return Ask(
        model=body.model,
        field=inputs[0].field,
        input=inputs,
        service_tier=body.service_tier,
        truncate=body.truncate_prompt_tokens,
        dimensions=dimensions,
    )


class EmbeddingWriter:
    """Writes the embeddings themselves."""

    def __init__(self, body: EmbeddingsBody, *, is_normalised: bool) -> None:
        self._body = body
        self._is_normalised = is_normalised

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        return {
            "object": "list",
            "data": (
                {"object": "embedding", "index": index, "embedding": self._spelt(delta.embedding or [])}
                for index, delta in outputs
            ),
            "model": self._body.model,
            "usage": _usage(reply),
        }

    def _spelt(self, embedding: list[float]) -> list[float] | str:
        values = shortened(embedding, self._body.dimensions, is_normalised=self._is_normalised)
        return as_base64(values) if self._body.encoding_format == "base64" else values


class RerankWriter:
    """Writes the documents most like the query first; the first embedding is the query's."""

    def __init__(self, id: str, body: RerankBody) -> None:
        self._id = id
        self._body = body

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        query, *documents = _embeddings(outputs)
        scores = [likeness(query, document) for document in documents]
        best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
        texts, shows_texts = self._body.texts, self._body.return_documents is not False
        results = [
            {"index": index}
            | ({"document": {"text": texts[index]}} if shows_texts else {})
            | {"relevance_score": scores[index]}
            for index in best_first[: self._body.top_n]
        ]
        return {"id": self._id, "model": self._body.model, "usage": _usage(reply), "results": results}


class ScoreWriter:
    """Writes how alike texts are; the embeddings of the first side come before those of the second."""

    def __init__(self, id: str, created: int, model: str, num_first: int) -> None:
        self._head = {"id": id, "object": "list", "created": created, "model": model}
        self._num_first = num_first

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        embeddings = _embeddings(outputs)
        first, second = embeddings[: self._num_first], embeddings[self._num_first :]
        scores = map(likeness, first * len(second) if len(first) == 1 else first, second)
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {**self._head, "data": data, "usage": _usage(reply)}


def _embeddings(outputs: Outputs) -> list[list[float]]:
    return [delta.embedding or [] for _, delta in outputs]


def _usage(reply: Reply) -> dict[str, int]:
    num_tokens = reply.num_prompt_tokens
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def likeness(one: list[float], other: list[float]) -> float:
    """Returns the cosine of the angle between two vectors; 0 if one of them has no direction."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return max(-1.0, min(1.0, sum(map(mul, one, other)) / lengths)) if lengths else 0.0


def shortened(embedding: list[float], dimensions: int | None, *, is_normalised: bool) -> list[float]:
    """Returns the first `dimensions` numbers of an embedding, or all; scaled to length 1 if it is normalised."""
    values = embedding[:dimensions]
    if not is_normalised:
        return values
    length = math.hypot(*values) or 1.0
    return [value / length for value in values]


def as_base64(values: Sequence[float]) -> str:
    """Encodes numbers as little-endian float32 in base64."""
    return b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")

"""`/v1/embeddings`, `/rerank`, `/score`, `/v1/decisions`, `/v1/systemone`: prompts without answers, in the same queue.

Embeddings, and the scores made of them, are hidden states; decisions are the log probabilities of possible answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.answering import ModelEndpoints
from penstock.gateway.endpoints.intake import Arrival
from penstock.gateway.endpoints.operation import BY_PROMPT, serves
from penstock.gateway.endpoints.requests import Made
from penstock.gateway.wire.decided import DecisionsWriter, SystemOneWriter
from penstock.gateway.wire.decisions import DecisionsBody, SystemOneBody
from penstock.gateway.wire.embeddings import (
    EmbeddingsBody,
    EmbeddingWriter,
    RerankBody,
    RerankWriter,
    ScoreBody,
    ScoreWriter,
)
from penstock.gateway.wire.labels import Steps
from penstock.gateway.wire.questions import Question, Questions
from penstock.gateway.wire.writing import Counts, Head, WholeWriter


class EmbeddingsApi(ModelEndpoints):
    """Embeddings of one service."""

    @serves("POST /v1/embeddings", BY_PROMPT, EmbeddingsBody)
    async def embed(self, http: HttpRequest) -> Response:
        """Turn texts into vectors."""
        is_normalised = self._service.options.embedding.is_normalised
        return await self._answer(
            http,
            EmbeddingsBody,
            lambda _, came, __: EmbeddingWriter(came.body, is_normalised=is_normalised),
            prefix="embd-",
        )

    @serves("POST /rerank /v1/rerank /v2/rerank", BY_PROMPT, RerankBody)
    async def rerank(self, http: HttpRequest) -> Response:
        """Order documents by how like a query they are."""
        return await self._answer(
            http, RerankBody, lambda head, came, _: RerankWriter(head.id, came.body), prefix="rerank-"
        )

    @serves("POST /score /v1/score", BY_PROMPT, ScoreBody)
    async def score(self, http: HttpRequest) -> Response:
        """Say how alike texts are."""
        return await self._answer(
            http,
            ScoreBody,
            lambda head, came, _: ScoreWriter(head.id, head.created, head.model, len(came.body.sides()[0])),
            prefix="score-",
        )


class DecisionsApi(ModelEndpoints):
    """Decisions of one service."""

    @serves("POST /v1/decisions", BY_PROMPT, DecisionsBody)
    async def decide(self, http: HttpRequest) -> Response:
        """Answer questions about an input with probabilities.

        The format is OpenAI's.
        """
        return await self._answer(http, DecisionsBody, partial(_writer, DecisionsWriter), prefix="dec-")

    @serves("POST /v1/systemone", BY_PROMPT, SystemOneBody)
    async def decide_systems(self, http: HttpRequest) -> Response:
        """Answer questions about a state with probabilities.

        The format is TypeSafe's.
        """
        return await self._answer(http, SystemOneBody, partial(_writer, SystemOneWriter), prefix="dec-")


def _writer(
    make: Callable[[str, Sequence[Question], Sequence[Sequence[Steps]]], WholeWriter[Counts]],
    head: Head,
    came: Arrival,
    made: Made,
) -> WholeWriter[Counts]:
    assert isinstance(came.ask.input, Questions)
    return make(head.model, came.ask.input.questions, made.steps)

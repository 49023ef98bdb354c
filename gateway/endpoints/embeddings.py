"""`/v1/embeddings`, `/rerank`, `/score`: prompts that are computed for their hidden states, by the queue of all."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.engine.planning.prefix_index import with_hashes
from penstock.engine.planning.request import Request, SamplingParams
from penstock.gateway.endpoints.intake import Endpoints, as_sent, route
from penstock.gateway.endpoints.params import REQUEST_BYTES, Arrival, salt_of
from penstock.gateway.endpoints.replies import LiveReply
from penstock.gateway.http.errors import invalid
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.wire.embeddings import (
    EmbeddingsBody,
    EmbeddingWriter,
    RerankBody,
    RerankWriter,
    ScoreBody,
    ScoreWriter,
)
from penstock.gateway.wire.streams import Stream, WholeWriter
from penstock.priority.lanes import Urgency


class EmbeddingsApi(Endpoints):
    """Embeddings of one service."""

    def routes(self) -> list[Route]:
        return [
            route("/v1/embeddings", POST=self.embed),
            *(route(path, POST=self.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            *(route(path, POST=self.score) for path in ("/score", "/v1/score")),
        ]

    async def embed(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, EmbeddingsBody, as_sent)
        body = came.body
        urgency = self._intake.admit(came, body)
        self.check_dimensions(body.dimensions)
        prompts = await self._intake.prompting(came.tenant, urgency.lane).encode_inputs(body)
        is_normalised = self._service.options.embedding.is_normalised
        writer = EmbeddingWriter(body, is_normalised=is_normalised)
        return await self.reply(came, urgency, prompts, f"embd-{secrets.token_hex(16)}", writer)

    async def rerank(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, RerankBody, as_sent)
        body = came.body
        urgency = self._intake.admit(came, body)
        encode, id = (
            self._intake.prompting(came.tenant, urgency.lane).encode_texts,
            f"rerank-{secrets.token_hex(16)}",
        )
        prompts = [
            *await encode([body.query], "query", body),
            *await encode(body.texts, "documents", body),
        ]
        return await self.reply(came, urgency, prompts, id, RerankWriter(id, body))

    async def score(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, ScoreBody, as_sent)
        body = came.body
        first, second = body.sides()
        urgency = self._intake.admit(came, body)
        encode, id = (
            self._intake.prompting(came.tenant, urgency.lane).encode_texts,
            f"score-{secrets.token_hex(16)}",
        )
        prompts = [*await encode(first, "text_1", body), *await encode(second, "text_2", body)]
        writer = ScoreWriter(id, int(time.time()), body.model, len(first))
        return await self.reply(came, urgency, prompts, id, writer)

    # What all that embeds has in common

    def check_dimensions(self, dimensions: int | None) -> None:
        size = self._service.options.embedding.size
        if dimensions is not None and size is not None and dimensions > size:
            raise invalid(f"'dimensions' may be at most {size} for this model.", "dimensions")

    async def reply(
        self,
        came: Arrival[Any],
        urgency: Urgency,
        prompts: Sequence[Sequence[int]],
        id: str,
        writer: WholeWriter,
    ) -> LiveReply:
        """Returns the reply that a writer makes of the embeddings of prompts.

        Raises:
            ApiError: 429, if they are more than the client's quota has left.
        """
        sampling, options = SamplingParams(temperature=0.0, max_tokens=0), self._service.options

        def make(number: int, prompt: Sequence[int]) -> Request:
            request = Request(
                request_id=f"{id}-{number}",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                arrival_s=came.at_s,
                lane=urgency.lane,
                ttft_s=urgency.ttft_s,
                tenant=came.tenant.name,
                salt=salt_of(came.tenant),
                pooling=options.embedding.pooling,
            )
            return with_hashes(request, options.block_size)

        size = REQUEST_BYTES * len(prompts) + TOKEN_BYTES * sum(map(len, prompts))
        requests = await off_loop(size, lambda: [make(i, prompt) for i, prompt in enumerate(prompts)])
        reservation = await self._intake.reserve(came.client, requests)
        return LiveReply(self._service, Stream(requests, reservation), writer)

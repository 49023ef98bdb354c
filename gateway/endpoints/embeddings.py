"""`/v1/embeddings`, `/rerank`, `/score`: prompts that are computed for their hidden states, by the queue of all."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from engine.planning.prefix_index import with_hashes
from engine.planning.request import Request, SamplingParams
from gateway.access.keys import Client
from gateway.endpoints.intake import REQUEST_BYTES, Intake, Job, route, salt_of
from gateway.endpoints.replies import Reply
from gateway.http.errors import invalid
from gateway.http.off_loop import TOKEN_BYTES, off_loop
from gateway.service import Service
from gateway.wire.embeddings import (
    Embedded,
    EmbeddingsBody,
    EmbeddingWriter,
    RerankBody,
    RerankWriter,
    ScoreBody,
    ScoreWriter,
)
from gateway.wire.sampling import lane_of
from gateway.wire.writers import WholeWriter
from priority.lanes import Lane


class EmbeddingsApi:
    """Embeddings of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake

    def routes(self) -> list[Route]:
        return [
            route("/v1/embeddings", POST=self.embed),
            *(route(path, POST=self.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            *(route(path, POST=self.score) for path in ("/score", "/v1/score")),
        ]

    async def embed(self, http: HttpRequest) -> Response:
        arrival_s, client = self.begin(http)
        body = await self._intake.read(http, EmbeddingsBody)
        lane = await self.admit(http, client, body, arrival_s)
        self.check_dimensions(body.dimensions)
        prompts = await self._intake.prompting(client.tenant).encode_inputs(body)
        is_normalised = self._service.options.embedding.is_normalised
        writer = EmbeddingWriter(body, is_normalised=is_normalised)
        return await self.reply(client, lane, prompts, arrival_s, f"embd-{secrets.token_hex(16)}", writer)

    async def rerank(self, http: HttpRequest) -> Response:
        arrival_s, client = self.begin(http)
        body = await self._intake.read(http, RerankBody)
        lane = await self.admit(http, client, body, arrival_s)
        encode, id = self._intake.prompting(client.tenant).encode_texts, f"rerank-{secrets.token_hex(16)}"
        prompts = [
            *await encode([body.query], "query", body),
            *await encode(body.texts, "documents", body),
        ]
        return await self.reply(client, lane, prompts, arrival_s, id, RerankWriter(id, body))

    async def score(self, http: HttpRequest) -> Response:
        arrival_s, client = self.begin(http)
        body = await self._intake.read(http, ScoreBody)
        first, second = body.sides()
        lane = await self.admit(http, client, body, arrival_s)
        encode, id = self._intake.prompting(client.tenant).encode_texts, f"score-{secrets.token_hex(16)}"
        prompts = [*await encode(first, "text_1", body), *await encode(second, "text_2", body)]
        writer = ScoreWriter(id, int(time.time()), body.model, len(first))
        return await self.reply(client, lane, prompts, arrival_s, id, writer)

    # What all that embeds has in common

    def begin(self, http: HttpRequest) -> tuple[float, Client]:
        """When a request came, and whose it is; raises 401 and 503."""
        arrival_s = self._service.clock()
        client = self._intake.client(http)
        self._service.dispatch.check_open()
        return arrival_s, client

    async def admit(self, http: HttpRequest, client: Client, body: Embedded, arrival_s: float) -> Lane:
        """The lane of a request for a model; raises 404 for another model, 429 or 503 if the lane is full."""
        self._intake.check_model(body.model)
        lane = lane_of(body.service_tier, client.tenant)
        self._service.dispatch.check_room(lane, client.tenant.name, arrival_s, len(await http.body()))
        return lane

    def check_dimensions(self, dimensions: int | None) -> None:
        size = self._service.options.embedding.size
        if dimensions is not None and size is not None and dimensions > size:
            raise invalid(f"'dimensions' may be at most {size} for this model.", "dimensions")

    async def reply(
        self,
        client: Client,
        lane: Lane,
        prompts: Sequence[Sequence[int]],
        arrival_s: float,
        id: str,
        writer: WholeWriter,
    ) -> Reply:
        """What a writer makes of the embeddings of prompts.

        Raises:
            ApiError: 429, if they are more than the client's quota has left.
        """
        sampling, options = SamplingParams(temperature=0.0, max_tokens=0), self._service.options

        def make(number: int, prompt: Sequence[int]) -> Request:
            request = Request(
                request_id=f"{id}-{number}",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                arrival_s=arrival_s,
                lane=lane,
                tenant=client.tenant.name,
                salt=salt_of(client.tenant),
                pooling=options.embedding.pooling,
            )
            return with_hashes(request, options.block_size)

        size = REQUEST_BYTES * len(prompts) + TOKEN_BYTES * sum(map(len, prompts))
        requests = await off_loop(size, lambda: [make(i, prompt) for i, prompt in enumerate(prompts)])
        job = Job(
            writer=writer,
            requests=requests,
            reservation=await self._intake.reserve(client, requests),
        )
        return Reply(self._service, job)

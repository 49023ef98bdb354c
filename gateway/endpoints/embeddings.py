"""`/v1/embeddings`: prompts that are computed for their hidden states, by the same queue and engine as all others."""

from __future__ import annotations

import secrets

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from engine.planning.request import Request, SamplingParams
from gateway.endpoints.intake import Intake, Job, route, salt_of
from gateway.endpoints.replies import Reply
from gateway.http.errors import invalid
from gateway.service import Service
from gateway.wire.embeddings import EmbeddingsBody, EmbeddingWriter
from gateway.wire.sampling import lane_of


class EmbeddingsApi:
    """Embeddings of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake

    def routes(self) -> list[Route]:
        return [route("/v1/embeddings", POST=self.embed)]

    async def embed(self, http: HttpRequest) -> Response:
        arrival_s = self._service.clock()
        client = self._intake.client(http)
        self._service.dispatch.check_open()
        body = await self._intake.read(http, EmbeddingsBody)
        self._intake.check_model(body.model)
        embedding = self._service.options.embedding
        if body.dimensions is not None and embedding.size is not None and body.dimensions > embedding.size:
            raise invalid(f"'dimensions' may be at most {embedding.size} for this model.", "dimensions")
        lane = lane_of(body.service_tier, client.tenant)
        self._service.dispatch.check_room(lane, client.tenant.name)
        name = f"embd-{secrets.token_hex(16)}"
        requests = [
            Request(
                request_id=f"{name}-{number}",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0, max_tokens=0),
                arrival_s=arrival_s,
                lane=lane,
                tenant=client.tenant.name,
                salt=salt_of(client.tenant),
                pooling=embedding.pooling,
            )
            for number, prompt in enumerate(await self._intake.encode_inputs(body))
        ]
        job = Job(
            writer=EmbeddingWriter(body, is_normalised=embedding.is_normalised),
            requests=requests,
            stream=False,
            reservation=await self._intake.reserve(client, requests),
        )
        return Reply(self._service, job)

"""`/v1/chat/completions` and `/v1/completions`: the job that comes of a request, and its reply."""

from __future__ import annotations

import re
import secrets
import time
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.idempotency import idempotency_key, not_here
from gateway.access.keys import Client
from gateway.endpoints.attached import Attached, position_asked
from gateway.endpoints.intake import Batch, Intake, route
from gateway.endpoints.replies import Reply
from gateway.http.errors import invalid
from gateway.service import Service
from gateway.sessions.recordings.chat import KIND, ChatFormat, about
from gateway.sessions.recordings.recording import Recording
from gateway.wire.frames import Json, StreamWriter
from gateway.wire.sampling import MaxTokens, lane_of, tier_of
from gateway.wire.schemas import ChatBody, CompletionBody, Sampled, check_completion
from gateway.wire.shapes import ChatShape, CompletionShape, Head, Shape
from gateway.wire.structured import answer_form, form_of

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's older endpoint gives a request that does not say."""

CHAT_ID = re.compile(r"chatcmpl-[0-9a-f]{32}")


class CompletionsApi:
    """Chat and text completions of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake

    def routes(self) -> list[Route]:
        return [
            route("/v1/chat/completions", POST=self.chat),
            route("/v1/chat/completions/{id}", GET=self.follow, DELETE=self.discard),
            route("/v1/completions", POST=self.complete),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        arrival_s = self._service.clock()
        client = self._intake.client(http)
        self._service.dispatch.check_open()
        body = await self._intake.read(http, ChatBody)
        batch = await self._intake.chat(client, body, arrival_s)
        key = idempotency_key(http)
        if key is not None or (body.stream_options and body.stream_options.resumable):
            return await self._record(client, batch, body, key)
        self._intake.check_room(batch)
        prompt = await self._intake.encode_chat(body.messages)
        shape = ChatShape(self._service.tokenizer, batch.num_logprobs or 0)
        return await self._reply(client, batch, [prompt], shape, "chatcmpl")

    async def complete(self, http: HttpRequest) -> Response:
        arrival_s = self._service.clock()
        client = self._intake.client(http)
        self._service.dispatch.check_open()
        body = await self._intake.read(http, CompletionBody)
        check_completion(body, self._service.options.limits)
        if idempotency_key(http) is not None:
            raise invalid("'Idempotency-Key' is not supported on this endpoint.", "Idempotency-Key")
        self._intake.check_model(body.model)
        form = form_of(body, self._service.options.limits, answer_form(body.response_format))
        lane = lane_of(body.service_tier, client.tenant)
        self._service.dispatch.check_room(lane, client.tenant.name)
        prompts = await self._intake.encode_prompts(body)
        batch = Batch(
            body=body,
            prompt_field="prompt",
            asked=MaxTokens("max_tokens", body.max_tokens or self._default_completion(prompts)),
            num_logprobs=body.logprobs,
            num_choices=len(prompts) * (body.n or 1),
            tenant=client.tenant,
            lane=lane,
            arrival_s=arrival_s,
            grammar=await self._intake.grammar(client.tenant, form),
        )
        shape = CompletionShape(self._service.tokenizer, body.logprobs or 0)
        return await self._reply(client, batch, prompts, shape, "cmpl")

    def _default_completion(self, prompts: list[list[int]]) -> int:
        left = self._service.dispatch.context_length - max(map(len, prompts))
        return max(1, min(DEFAULT_COMPLETION_TOKENS, left))

    async def _reply(
        self, client: Client, batch: Batch, prompts: list[list[int]], shape: Shape, prefix: str
    ) -> Reply:
        head = _head(batch, f"{prefix}-{secrets.token_hex(16)}")
        writer = StreamWriter(shape, head, include_usage=_wants_usage(batch.body))
        return Reply(self._service, await self._intake.job(client, batch, prompts, head.id, writer))

    # Replies that are recorded

    async def _record(self, client: Client, batch: Batch, body: ChatBody, key: str | None) -> Response:
        if (body.n or 1) > 1 or body.logprobs:
            field = "logprobs" if body.logprobs else "n"
            what = "'stream_options.resumable'" if key is None else "the header 'Idempotency-Key'"
            raise invalid(f"'{field}' cannot be used together with {what}.", field)
        recording_id, tenant = f"chatcmpl-{secrets.token_hex(16)}", client.tenant.name
        start = partial(self._start, client, batch, body, recording_id)
        made = await self._service.idempotency.once(tenant, key, body, recording_id, start)
        recording = await self._intake.find_recording(tenant, made) if isinstance(made, str) else made
        if recording is None:
            raise not_here()
        return self._follow(recording, -1)

    async def _start(self, client: Client, batch: Batch, body: ChatBody, recording_id: str) -> Recording:
        self._intake.check_room(batch)
        prompt = await self._intake.encode_chat(body.messages)
        head = _head(batch, recording_id)
        request = self._intake.request(batch, prompt, recording_id)
        return await self._service.recordings.start(
            request,
            kind=KIND,
            about=about(head, stream=bool(batch.body.stream), include_usage=_wants_usage(batch.body)),
            created=head.created,
            detachable=True,
            journalled=True,
            max_detached_s=self._service.options.timeouts.detached_s,
            reservation=await self._intake.reserve(client, [request]),
        )

    def _follow(self, recording: Recording, position: int) -> Attached:
        return Attached(
            self._service,
            recording,
            ChatFormat(recording, self._service.tokenizer),
            position,
            streamed=recording.about["stream"],
        )

    async def follow(self, http: HttpRequest) -> Response:
        """A recorded reply again: its stream after the event that the client had last."""
        position = position_asked(http)
        return self._follow(await self._recording(http), position)

    async def discard(self, http: HttpRequest) -> Response:
        """Stops and forgets a recorded reply."""
        recording = await self._recording(http)
        await self._service.recordings.discard(recording)
        return Json({"id": recording.id, "object": "chat.completion.deleted", "deleted": True})

    async def _recording(self, http: HttpRequest) -> Recording:
        client, recording_id = self._intake.client(http), http.path_params["id"]
        if not CHAT_ID.fullmatch(recording_id):
            raise invalid("The id must be 'chatcmpl-' and 32 hexadecimal digits.", "id")
        recording = await self._intake.recording(client.tenant.name, recording_id)
        if recording.kind != KIND:
            raise invalid("The id is not that of a chat completion.", "id")
        return recording


def _head(batch: Batch, id: str) -> Head:
    return Head(id=id, created=int(time.time()), model=batch.body.model, service_tier=tier_of(batch.lane))


def _wants_usage(body: Sampled) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)

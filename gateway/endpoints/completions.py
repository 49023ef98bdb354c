"""`/v1/chat/completions` and `/v1/completions`: the job that comes of a request, and its reply."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.idempotency import idempotency_key, not_here
from gateway.access.keys import Client
from gateway.endpoints.attached import Attached, position_asked
from gateway.endpoints.intake import Batch, Intake, is_compared, route
from gateway.endpoints.replies import Reply
from gateway.http.errors import invalid
from gateway.http.off_loop import off_loop
from gateway.service import Service
from gateway.sessions.owners import owned_id
from gateway.sessions.recordings.completions import CHAT, TEXT, CompletionFormat, about, script
from gateway.sessions.recordings.recording import Recording
from gateway.wire.frames import Json, StreamWriter
from gateway.wire.sampling import MaxTokens, lane_of, tier_of
from gateway.wire.schemas import ChatBody, CompletionBody, Sampled, check_completion
from gateway.wire.shapes import Best, ChatShape, CompletionShape, Head, Shape, Told

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's older endpoint gives a request that does not say."""

PREFIXES = {CHAT: "chatcmpl-", TEXT: "cmpl-"}
"""What the ids of each kind begin with; 32 hexadecimal digits follow."""
CHAT_ID, TEXT_ID = (re.compile(prefix + r"[0-9a-f]{32}") for prefix in PREFIXES.values())


class CompletionsApi:
    """Chat and text completions of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake
        service.recordings.scripts |= dict.fromkeys((CHAT, TEXT), script)

    def routes(self) -> list[Route]:
        return [
            route("/v1/chat/completions", POST=self.chat),
            route("/v1/chat/completions/{id}", GET=self.follow_chat, DELETE=self.discard_chat),
            route("/v1/completions", POST=self.complete),
            route("/v1/completions/{id}", GET=self.follow_text, DELETE=self.discard_text),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        arrival_s = self._service.clock()
        client = self._intake.client(http)
        self._service.dispatch.check_open()
        body = await self._intake.read(http, ChatBody)
        batch = await self._intake.chat(client, body, arrival_s)
        if (asked := _recorded(http, body)) is not None:
            asked.check(body, {"functions": body.functions is not None})
            start = partial(self._start_chat, client, replace(batch, is_recorded=True), body)
            return await self._record(client, CHAT, asked, body, start)
        self._intake.check_room(batch, len(await http.body()))
        prompt, batch = await self._intake.prompt(batch, body)
        shape = ChatShape(self._service.tokenizer, _told(body, body.top_logprobs if body.logprobs else None))
        return await self._reply(client, batch, [prompt], shape, "chatcmpl")

    async def complete(self, http: HttpRequest) -> Response:
        arrival_s = self._service.clock()
        client = self._intake.client(http)
        self._service.dispatch.check_open()
        body = await self._intake.read(http, CompletionBody)
        check_completion(body, self._service.options.limits)
        self._intake.check_beams(body)
        if (asked := _recorded(http, body)) is not None:
            asked.check(body, {"echo": body.echo})
        self._intake.check_model(body.model)
        lane = lane_of(body.service_tier, client.tenant)
        self._service.dispatch.check_room(lane, client.tenant.name, arrival_s, len(await http.body()))
        prompts = await self._intake.prompting(client.tenant).encode_prompts(body)
        batch = Batch(
            body=body,
            prompt_field="prompt",
            asked=MaxTokens(
                "max_tokens",
                self._default_completion(prompts) if body.max_tokens is None else body.max_tokens,
            ),
            num_logprobs=0 if body.logprobs is None and is_compared(body) else body.logprobs,
            num_prompt_logprobs=_num_prompt_logprobs(body),
            num_choices=len(prompts) * body.num_generated,
            tenant=client.tenant,
            lane=lane,
            arrival_s=arrival_s,
            is_recorded=asked is not None,
            grammar=await self._intake.grammar(client.tenant, self._intake.form(body)),
        )
        if asked is not None:
            if len(prompts) > 1:
                raise invalid(f"There can only be one prompt together with {asked.way}.", "prompt")
            start = partial(self._start, client, batch, TEXT, prompts[0])
            return await self._record(client, TEXT, asked, body, start)
        shape = CompletionShape(self._service.tokenizer, _told(body, body.logprobs))
        echoed = 4 * sum(map(len, prompts)) if body.echo else 0
        echoes = await off_loop(echoed, self._texts, body, prompts) if body.echo else ()
        return await self._reply(client, batch, prompts, shape, "cmpl", echoes)

    def _texts(self, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
        """What each prompt says: as it was sent, or spelt out."""
        sent = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        decode = partial(self._service.tokenizer.decode, skip_special=False)
        return [
            text if isinstance(text, str) else decode(prompt)
            for text, prompt in zip(sent, prompts, strict=False)
        ]

    def _default_completion(self, prompts: list[list[int]]) -> int:
        left = self._service.dispatch.context_length - max(map(len, prompts))
        return max(1, min(DEFAULT_COMPLETION_TOKENS, left))

    async def _reply(
        self,
        client: Client,
        batch: Batch,
        prompts: list[list[int]],
        shape: Shape,
        prefix: str,
        echoes: Sequence[str] = (),
    ) -> Reply:
        head = _head(batch, f"{prefix}-{secrets.token_hex(16)}")
        writer = StreamWriter(
            shape,
            head,
            include_usage=_wants_usage(batch.body),
            usage_so_far=_wants_usage_so_far(batch.body),
            reading=batch.reading,
        )
        in_full = bool(batch.body.return_token_ids) or _wants_usage_so_far(batch.body)
        job = await self._intake.job(client, batch, prompts, head.id, writer, echoes=echoes, in_full=in_full)
        return Reply(self._service, job)

    # Replies that are recorded

    async def _record(
        self,
        client: Client,
        kind: str,
        asked: Recorded,
        body: ChatBody | CompletionBody,
        start: Callable[[str], Awaitable[Recording]],
    ) -> Response:
        """The reply that `start` begins under an id, or the one that was made of the same request before."""
        recording_id = owned_id(PREFIXES[kind], self._service.tag, 32)
        tenant, begin = client.tenant.name, partial(start, recording_id)
        made = await self._service.idempotency.once(tenant, asked.key, body, recording_id, begin)
        recording = await self._intake.find_recording(tenant, made) if isinstance(made, str) else made
        if recording is None:
            raise not_here()
        return self._follow(recording, -1)

    async def _start_chat(self, client: Client, batch: Batch, body: ChatBody, recording_id: str) -> Recording:
        self._intake.check_room(batch, self._service.dispatch.context_length)
        prompt, batch = await self._intake.prompt(batch, body)
        return await self._start(client, batch, CHAT, prompt, recording_id)

    async def _start(
        self, client: Client, batch: Batch, kind: str, prompt: list[int], recording_id: str
    ) -> Recording:
        head = _head(batch, recording_id)
        [request] = await self._intake.requests(batch, {recording_id: prompt})
        return await self._service.recordings.start(
            request,
            kind=kind,
            about=about(
                head,
                batch.reading,
                stream=bool(batch.body.stream),
                include_usage=_wants_usage(batch.body),
                num_choices=request.n,
            ),
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
            CompletionFormat(recording, self._service.tokenizer, position),
            position,
            streamed=recording.about["stream"],
        )

    async def follow_chat(self, http: HttpRequest) -> Response:
        """A recorded reply again: its stream after the event that the client had last."""
        return await self._follow_again(http, CHAT)

    async def follow_text(self, http: HttpRequest) -> Response:
        return await self._follow_again(http, TEXT)

    async def discard_chat(self, http: HttpRequest) -> Response:
        """Stops and forgets a recorded reply."""
        return await self._discard(http, CHAT, "chat.completion.deleted")

    async def discard_text(self, http: HttpRequest) -> Response:
        return await self._discard(http, TEXT, "text_completion.deleted")

    async def _follow_again(self, http: HttpRequest, kind: str) -> Response:
        position = position_asked(http)
        return self._follow(await self._recording(http, kind), position)

    async def _discard(self, http: HttpRequest, kind: str, object: str) -> Response:
        recording = await self._recording(http, kind)
        await self._service.recordings.discard(recording)
        return Json({"id": recording.id, "object": object, "deleted": True})

    async def _recording(self, http: HttpRequest, kind: str) -> Recording:
        client, recording_id = self._intake.client(http), http.path_params["id"]
        if not (CHAT_ID if kind == CHAT else TEXT_ID).fullmatch(recording_id):
            raise invalid(f"The id must be '{PREFIXES[kind]}' and 32 hexadecimal digits.", "id")
        recording = await self._intake.recording(client.tenant.name, recording_id)
        if recording.kind != kind:
            raise invalid("The id is that of another kind of reply.", "id")
        return recording


@dataclass(frozen=True, slots=True)
class Recorded:
    """How a reply that is recorded was asked for."""

    key: str | None

    @property
    def way(self) -> str:
        return "'stream_options.resumable'" if self.key is None else "the header 'Idempotency-Key'"

    def check(self, body: Sampled, unfit: Mapping[str, object]) -> None:
        """Raises 400 if something is asked for that recordings do not have, one of `unfit` say."""
        asked = {
            "use_beam_search": body.use_beam_search,
            "best_of": body.num_generated > (body.n or 1),
            "prompt_logprobs": body.prompt_logprobs is not None,
            "return_token_ids": body.return_token_ids,
            "stream_options.continuous_usage_stats": _wants_usage_so_far(body),
            **unfit,
        }
        field = next((field for field, is_asked in asked.items() if is_asked), None)
        if field is not None:
            raise invalid(f"'{field}' cannot be used together with {self.way}.", field)


def _recorded(http: HttpRequest, body: Sampled) -> Recorded | None:
    key = idempotency_key(http)
    is_asked = key is not None or (body.stream_options is not None and body.stream_options.resumable)
    return Recorded(key) if is_asked else None


def _head(batch: Batch, id: str) -> Head:
    return Head(id=id, created=int(time.time()), model=batch.body.model, service_tier=tier_of(batch.lane))


def _num_prompt_logprobs(body: CompletionBody) -> int | None:
    """An echo has the log probabilities of the prompt as the answer has its own."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((num for num in asked if num is not None), default=None)


def _told(body: ChatBody | CompletionBody, num_logprobs: int | None) -> Told:
    num, of = body.n or 1, body.num_generated
    shows_logprobs = body.logprobs is not None and body.logprobs is not False
    return Told(
        num_top=num_logprobs or 0,
        best=Best(num, of, shows_logprobs, bool(body.use_beam_search)) if of > num else None,
        num_prompt_top=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        functions=isinstance(body, ChatBody) and body.functions is not None,
    )


def _wants_usage(body: Sampled) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _wants_usage_so_far(body: Sampled) -> bool:
    return _wants_usage(body) and bool(body.stream_options and body.stream_options.continuous_usage_stats)

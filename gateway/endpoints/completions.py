"""`/v1/chat/completions` and `/v1/completions`: the job that comes of a request, and its reply."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.access.idempotency import idempotency_key, not_here
from penstock.gateway.endpoints.intake import Endpoints, Handler, Intake, as_sent, route
from penstock.gateway.endpoints.params import Arrival, GenerationParams, is_compared
from penstock.gateway.endpoints.replies import Attached, Keep, position_asked
from penstock.gateway.http.errors import invalid
from penstock.gateway.http.off_loop import off_loop
from penstock.gateway.service import Service
from penstock.gateway.sessions.chats import keep
from penstock.gateway.sessions.owners import owned_id
from penstock.gateway.sessions.recordings.completions import CHAT, TEXT, CompletionFormat, details_of, script
from penstock.gateway.sessions.recordings.reader import Reader
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses.schemas import check_metadata
from penstock.gateway.wire.frames import Json, StreamWriter, at_once
from penstock.gateway.wire.sampling import MaxTokens
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, Sampled, check_completion
from penstock.gateway.wire.shapes import Best, ChatShape, CompletionShape, Extras, Shape, TokenText
from penstock.gateway.wire.tokenizer import TokenNumbers

DEFAULT_COMPLETION_TOKENS = 16
"""The number of tokens that OpenAI's older endpoint gives a request that names none."""

PREFIXES = {CHAT: "chatcmpl-", TEXT: "cmpl-"}
"""The beginning of the ids of each kind; 32 hexadecimal digits follow."""
CHAT_ID, TEXT_ID = (re.compile(prefix + r"[0-9a-f]{32}") for prefix in PREFIXES.values())


class CompletionsApi(Endpoints):
    """Chat and text completions of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        service.recordings.scripts |= dict.fromkeys((CHAT, TEXT), script)
        service.recordings.on_end[CHAT] = self._keep_recorded

    def routes(self) -> list[Route]:
        return [
            route("/v1/completions", POST=self.complete),
            route("/v1/completions/{id}", **self.by_id(TEXT, "text_completion.deleted")),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, ChatBody, as_sent)
        body = came.body
        params, stored = await self._intake.chat(came, body), await self._stored(came, body)
        if (asked := _recorded(http, body)) is not None:
            asked.check(body, {"functions": body.functions is not None})
            params = replace(params, is_recorded=True)
            return await self._record(params, CHAT, asked, partial(self._start_chat, params, body, stored))
        self._intake.check_room(params, came.num_bytes)
        prompt, params = await self._intake.prompt(params, body)
        shape = ChatShape(self._tokens(body), _extras(body, body.top_logprobs if body.logprobs else None))
        kept = None if stored is None else partial(keep, self._service.store, params.tenant.name, stored)
        return await self._reply(params, CHAT, [prompt], shape, keep=kept)

    def _tokens(self, body: Sampled) -> TokenText:
        """Returns what log probabilities are spelt with."""
        return TokenNumbers() if body.return_tokens_as_token_ids else self._service.tokenizer

    async def _stored(self, came: Arrival[ChatBody], body: ChatBody) -> dict[str, Any] | None:
        """Returns the request's part of a stored completion; None if it is not to be stored."""
        if body.store:
            check_metadata(body.metadata)
            return await off_loop(came.num_bytes, _asked, body)
        if body.metadata:
            self._intake.ignore("metadata")
        return None

    async def _keep_recorded(self, recording: Recording) -> None:
        stored = recording.details.get("stored")
        if stored is not None and recording.error is None and not recording.num_dropped:
            body = CompletionFormat(recording, self._service.tokenizer).body(recording)
            await keep(self._service.store, recording.tenant, stored, at_once(body))

    async def complete(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, CompletionBody, as_sent)
        body = came.body
        check_completion(body, self._service.options.limits)
        self._intake.check_beams(body)
        if (asked := _recorded(http, body)) is not None:
            asked.check(body, {"echo": body.echo})
        urgency = self._intake.admit(came, body)
        prompts = await self._intake.prompting(came.tenant, urgency.lane).encode_prompts(body)
        params = GenerationParams(
            body=body,
            prompt_field="prompt",
            asked=MaxTokens(
                "max_tokens",
                self._default_completion(prompts) if body.max_tokens is None else body.max_tokens,
            ),
            num_logprobs=0 if body.logprobs is None and is_compared(body) else body.logprobs,
            num_prompt_logprobs=_num_prompt_logprobs(body),
            num_choices=len(prompts) * body.num_generated,
            client=came.client,
            urgency=urgency,
            arrival_s=came.at_s,
            is_recorded=asked is not None,
            grammar=await self._intake.grammar(came.tenant, self._intake.form(body)),
        )
        if asked is not None:
            if len(prompts) > 1:
                raise invalid(f"There can only be one prompt together with {asked.way}.", "prompt")
            return await self._record(params, TEXT, asked, partial(self._start, params, TEXT, prompts[0]))
        shape = CompletionShape(self._tokens(body), _extras(body, body.logprobs))
        echoed = 4 * sum(map(len, prompts)) if body.echo else 0
        echoes = await off_loop(echoed, self._texts, body, prompts) if body.echo else ()
        return await self._reply(params, TEXT, prompts, shape, echoes)

    def _texts(self, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
        """Returns the text of each prompt: as it was sent, or spelt out."""
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
        params: GenerationParams,
        kind: str,
        prompts: list[list[int]],
        shape: Shape,
        echoes: Sequence[str] = (),
        keep: Keep | None = None,
    ) -> Response:
        body = params.body
        head = self._intake.head(PREFIXES[kind] + secrets.token_hex(16), body.model)
        usage_so_far = _wants_usage_so_far(body)
        writer = StreamWriter(
            shape,
            head,
            include_usage=_wants_usage(body),
            usage_so_far=usage_so_far,
            reading=params.reading,
        )
        in_full = bool(body.return_token_ids) or usage_so_far
        return await self._intake.reply(
            params, prompts, head.id, writer, echoes=echoes, in_full=in_full, keep=keep
        )

    # Replies that are recorded

    async def _record(
        self,
        params: GenerationParams,
        kind: str,
        asked: Recorded,
        start: Callable[[str], Awaitable[Recording]],
    ) -> Response:
        """Sends the reply that `start` begins under an id, or the one that was made of the same request before."""
        recording_id = owned_id(PREFIXES[kind], self._service.tag, 32)
        tenant, begin = params.tenant.name, partial(start, recording_id)
        made = await self._service.idempotency.once(tenant, asked.key, params.body, recording_id, begin)
        recording = await self._intake.find_recording(tenant, made) if isinstance(made, str) else made
        if recording is None:
            raise not_here()
        return self._follow(recording, -1)

    async def _start_chat(
        self, params: GenerationParams, body: ChatBody, stored: dict[str, Any] | None, recording_id: str
    ) -> Recording:
        self._intake.check_room(params, self._service.dispatch.context_length)
        prompt, params = await self._intake.prompt(params, body)
        return await self._start(params, CHAT, prompt, recording_id, stored)

    async def _start(
        self,
        params: GenerationParams,
        kind: str,
        prompt: list[int],
        recording_id: str,
        stored: dict[str, Any] | None = None,
    ) -> Recording:
        head = self._intake.head(recording_id, params.body.model)
        [request] = await self._intake.requests(params, {recording_id: prompt})
        return await self._service.recordings.start(
            request,
            kind=kind,
            details=details_of(
                head,
                params.reading,
                stream=bool(params.body.stream),
                include_usage=_wants_usage(params.body),
                num_choices=request.n,
                stored=stored,
            ),
            created=head.created,
            detachable=True,
            journalled=True,
            max_detached_s=self._service.options.timeouts.detached_s,
            reservation=await self._intake.reserve(params.client, [request]),
        )

    def _follow(self, recording: Recording, position: int) -> Attached:
        format = CompletionFormat(recording, self._service.tokenizer, position)
        reader = Reader(recording, format, position)
        return Attached(self._service, reader, streamed=recording.details["stream"])

    def by_id(self, kind: str, deleted: str) -> dict[str, Handler]:
        """Returns the handlers that follow replies of one kind again, and stop and forget them."""

        async def follow(http: HttpRequest) -> Response:
            position = position_asked(http)
            return self._follow(await self._recording(http, kind), position)

        async def discard(http: HttpRequest) -> Response:
            recording = await self._recording(http, kind)
            await self._service.recordings.discard(recording)
            return Json({"id": recording.id, "object": deleted, "deleted": True})

        return {"GET": follow, "DELETE": discard}

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
    """The way in which a recorded reply was asked for: by an `Idempotency-Key`, or as a resumable stream."""

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
            "return_tokens_as_token_ids": body.return_tokens_as_token_ids,
            "stream_options.continuous_usage_stats": _wants_usage_so_far(body),
            **unfit,
        }
        field = next((field for field, is_asked in asked.items() if is_asked), None)
        if field is not None:
            raise invalid(f"'{field}' cannot be used together with {self.way}.", field)


def _asked(body: ChatBody) -> dict[str, Any]:
    """Returns the request of a completion as it is stored: the members that this server reads."""
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    return {"messages": messages, "metadata": body.metadata or {}}


def _recorded(http: HttpRequest, body: Sampled) -> Recorded | None:
    key = idempotency_key(http)
    is_asked = key is not None or (body.stream_options is not None and body.stream_options.resumable)
    return Recorded(key) if is_asked else None


def _num_prompt_logprobs(body: CompletionBody) -> int | None:
    """An echo has the log probabilities of the prompt as the answer has its own."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((num for num in asked if num is not None), default=None)


def _extras(body: ChatBody | CompletionBody, num_logprobs: int | None) -> Extras:
    num, of = body.n or 1, body.num_generated
    shows_logprobs = body.logprobs is not None and body.logprobs is not False
    return Extras(
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

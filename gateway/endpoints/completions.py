"""`/v1/chat/completions` and `/v1/completions`: the job that comes of a request, and its reply."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.intake import Endpoints, Handler, Intake, as_sent, route
from penstock.gateway.endpoints.params import Arrival, GenerationParams, is_compared
from penstock.gateway.endpoints.recorded import Recorder, Turn, recorded
from penstock.gateway.endpoints.replies import Keep
from penstock.gateway.http.errors import invalid
from penstock.gateway.http.off_loop import off_loop
from penstock.gateway.reply.whole import whole_json
from penstock.gateway.service import Service
from penstock.gateway.sessions.chats import keep
from penstock.gateway.sessions.recordings.kinds import CHAT, PREFIXES, TEXT
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses.schemas import check_metadata
from penstock.gateway.wire.completions import ChatWriter, CompletionWriter, Extras, TextWriter
from penstock.gateway.wire.logprobs import Best
from penstock.gateway.wire.sampling import MaxTokens
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, Sampled, check_completion

DEFAULT_COMPLETION_TOKENS = 16
"""The number of tokens that OpenAI's older endpoint gives a request that names none."""


class CompletionsApi(Endpoints):
    """Chat and text completions of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._recorder = Recorder(service, intake)
        service.recordings.on_end[CHAT] = self._keep_recorded

    def routes(self) -> list[Route]:
        return [
            route("/v1/completions", POST=self.complete),
            route("/v1/completions/{id}", **self._recorder.by_id(TEXT, deleted("text_completion"))),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, ChatBody, as_sent)
        body = came.body
        params, stored = await self._intake.chat(came, body), await self._stored(came, body)
        if (kept := recorded(http, body)) is not None:
            kept.check({**_unfit(body), "functions": body.functions is not None})
            begin = partial(self._chat_turn, replace(params, is_recorded=True), body, stored)
            return await self._recorder.reply(CHAT, came.tenant.name, kept.key, body, begin)
        self._intake.check_room(params, came.num_bytes)
        prompt, params = await self._intake.prompt(params, body)
        extras = _extras(body, body.top_logprobs if body.logprobs else None)
        store = None if stored is None else partial(keep, self._service.store, params.tenant.name, stored)
        return await self._reply(params, CHAT, [prompt], extras, keep=store)

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
        if stored is not None and recording.error is None:
            body, completion = await whole_json(recording.writer, recording, recording.outputs())
            await keep(self._service.store, recording.tenant, stored, completion, len(body))

    async def complete(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, CompletionBody, as_sent)
        body = came.body
        check_completion(body, self._service.options.limits)
        self._intake.check_beams(body)
        if (kept := recorded(http, body)) is not None:
            kept.check({**_unfit(body), "echo": body.echo})
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
            is_recorded=kept is not None,
            grammar=await self._intake.grammar(came.tenant, self._intake.form(body)),
        )
        if kept is not None:
            if len(prompts) > 1:
                raise invalid(f"There can only be one prompt together with {kept.way}.", "prompt")
            begin = partial(self._text_turn, params, prompts[0])
            return await self._recorder.reply(TEXT, came.tenant.name, kept.key, body, begin)
        echoed = 4 * sum(map(len, prompts)) if body.echo else 0
        echoes = await off_loop(echoed, self._texts, body, prompts) if body.echo else ()
        return await self._reply(params, TEXT, prompts, _extras(body, body.logprobs), echoes)

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
        extras: Extras,
        echoes: Sequence[str] = (),
        keep: Keep | None = None,
    ) -> Response:
        body = params.body
        head = self._intake.head(PREFIXES[kind] + secrets.token_hex(16), body.model)
        usage_so_far = _wants_usage_so_far(body)
        make: type[CompletionWriter] = ChatWriter if kind == CHAT else TextWriter
        writer = make(
            self._service.tokenizer,
            head,
            extras,
            reading=params.reading,
            include_usage=_wants_usage(body),
            usage_so_far=usage_so_far,
        )
        in_full = bool(body.return_token_ids) or usage_so_far
        return await self._intake.reply(
            params, prompts, head.id, writer, echoes=echoes, in_full=in_full, keep=keep
        )

    # Replies that are recorded

    async def _chat_turn(
        self, params: GenerationParams, body: ChatBody, stored: dict[str, Any] | None
    ) -> Turn:
        self._intake.check_room(params, self._service.dispatch.context_length)
        prompt, params = await self._intake.prompt(params, body)
        return Turn(params, prompt, {"include_usage": _wants_usage(body), "stored": stored})

    async def _text_turn(self, params: GenerationParams, prompt: list[int]) -> Turn:
        return Turn(params, prompt, {"include_usage": _wants_usage(params.body)})

    def by_id(self) -> dict[str, Handler]:
        """Returns the handlers that follow recorded chats again, and stop and forget them."""
        return self._recorder.by_id(CHAT, deleted("chat.completion"))


def deleted(name: str) -> dict[str, object]:
    return {"object": f"{name}.deleted", "deleted": True}


def _unfit(body: Sampled) -> dict[str, object]:
    """Returns the fields that recorded completions do not have, and whether they are set."""
    return {
        "use_beam_search": body.use_beam_search,
        "best_of": body.num_generated > (body.n or 1),
        "prompt_logprobs": body.prompt_logprobs is not None,
        "return_token_ids": body.return_token_ids,
        "stream_options.continuous_usage_stats": _wants_usage_so_far(body),
    }


def _asked(body: ChatBody) -> dict[str, Any]:
    """Returns the request of a completion as it is stored: the members that this server reads."""
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    return {"messages": messages, "metadata": body.metadata or {}}


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

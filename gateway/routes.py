"""The endpoints: who is it, what is asked, and the job that comes of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import anyio
import anyio.to_thread
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.request import Request, SamplingParams
from gateway.errors import ApiError, invalid, model_not_found
from gateway.limits import OFF_LOOP_BYTES, parse_object
from gateway.prompts import check_token_ids
from gateway.replies import Job, Reply
from gateway.sampling import MaxTokens, Room, context_exceeded, lane_of, sampling_params, tier_of
from gateway.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    Sampled,
    TokenizeBody,
    as_dict,
    check_chat,
    check_completion,
    check_messages,
    read,
)
from gateway.service import Service
from gateway.shapes import ChatShape, CompletionShape, Head, Shape
from priority.lanes import Lane, Tenant

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's older endpoint gives a request that does not say."""

_Result = TypeVar("_Result")


class Api:
    """The HTTP interface of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._threads = anyio.CapacityLimiter(2)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.show_model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    # Generation

    async def chat(self, http: HttpRequest) -> Response:
        arrival_s = self._service.clock()
        tenant = self._tenant(http)
        self._service.check_open()
        body = await self._read(http, ChatBody)
        check_chat(body, self._service.options.limits)
        self._check_model(body.model)
        lane = self._lane(body, tenant)
        prompt = await self._encode_chat(body.messages)
        asked = (
            MaxTokens("max_completion_tokens", body.max_completion_tokens)
            if body.max_tokens is None
            else MaxTokens("max_tokens", body.max_tokens)
        )
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        shape = ChatShape(self._service.tokenizer, num_logprobs or 0)
        batch = _Batch(body, "messages", asked, num_logprobs, tenant, lane, arrival_s)
        return self._reply(batch, [prompt], shape, "chatcmpl")

    async def complete(self, http: HttpRequest) -> Response:
        arrival_s = self._service.clock()
        tenant = self._tenant(http)
        self._service.check_open()
        body = await self._read(http, CompletionBody)
        check_completion(body, self._service.options.limits)
        self._check_model(body.model)
        lane = self._lane(body, tenant)
        prompts = await self._encode_prompts(body)
        asked = MaxTokens("max_tokens", body.max_tokens or self._default_completion(prompts))
        shape = CompletionShape(self._service.tokenizer, body.logprobs or 0)
        batch = _Batch(body, "prompt", asked, body.logprobs, tenant, lane, arrival_s)
        return self._reply(batch, prompts, shape, "cmpl")

    def _lane(self, body: Sampled, tenant: Tenant) -> Lane:
        """Where the request goes, if there is room; asked before its prompt is tokenised."""
        lane = lane_of(body.service_tier, tenant)
        self._service.check_room(lane, tenant.name)
        return lane

    def _default_completion(self, prompts: list[list[int]]) -> int:
        left = self._service.context_length - max(map(len, prompts))
        return max(1, min(DEFAULT_COMPLETION_TOKENS, left))

    def _reply(self, batch: _Batch, prompts: list[list[int]], shape: Shape, prefix: str) -> Reply:
        body = batch.body
        head = Head(
            id=f"{prefix}-{secrets.token_hex(16)}",
            created=int(time.time()),
            model=body.model,
            service_tier=tier_of(batch.lane),
        )
        requests = [
            self._request(batch, prompt, f"{head.id}-{number}") for number, prompt in enumerate(prompts)
        ]
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        job = Job(
            head=head,
            lane=batch.lane,
            shape=shape,
            requests=requests,
            stream=bool(body.stream),
            include_usage=include_usage,
        )
        return Reply(self._service, job)

    def _request(self, batch: _Batch, prompt: list[int], request_id: str) -> Request:
        # A tokenizer can know tokens that the model does not.
        if max(prompt, default=0) >= self._service.vocab_size:
            raise invalid("The prompt has tokens that the model does not know.", batch.prompt_field)
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=self._sampling(batch, len(prompt)),
            n=batch.body.n or 1,
            arrival_s=batch.arrival_s,
            lane=batch.lane,
            tenant=batch.tenant.name,
            salt=batch.tenant.name.encode(),
        )

    def _sampling(self, batch: _Batch, num_prompt_tokens: int) -> SamplingParams:
        room = Room(self._service.context_length, num_prompt_tokens)
        return sampling_params(
            batch.body,
            self._service.options.defaults,
            max_tokens=room.output_tokens(batch.asked, batch.prompt_field),
            num_logprobs=batch.num_logprobs,
            vocab_size=self._service.vocab_size,
        )

    # Prompts

    async def _encode_chat(self, messages: list[Message], *, add_generation_prompt: bool = True) -> list[int]:
        conversation = [as_dict(message) for message in messages]
        num_chars = sum(len(message["content"]) for message in conversation)
        self._check_length(num_chars, "messages")
        encode = partial(self._service.prompts.chat, add_generation_prompt=add_generation_prompt)
        return await self._off_loop(num_chars, encode, conversation)

    async def _encode_prompts(self, body: CompletionBody) -> list[list[int]]:
        texts, token_ids = _split_prompt(body.prompt)
        limits, num_prompts = self._service.options.limits, len(texts) + len(token_ids)
        if not num_prompts or num_prompts > limits.max_prompts:
            raise invalid(f"'prompt' must be 1 to {limits.max_prompts} prompts.", "prompt")
        if num_prompts * (body.n or 1) > limits.max_choices:
            raise invalid(f"'n' times the prompts must be at most {limits.max_choices}.", "n")
        for prompt in token_ids:
            self._check_prompt_ids(prompt)
        return token_ids or [await self._encode_text(text, "prompt") for text in texts]

    async def _encode_text(self, text: str, field: str, *, add_special: bool = True) -> list[int]:
        self._check_length(len(text), field)
        encode = partial(self._service.prompts.text, add_special=add_special)
        token_ids = await self._off_loop(len(text), encode, text)
        if not token_ids:
            raise invalid(f"'{field}' must not be empty.", field)
        return token_ids

    def _check_prompt_ids(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise invalid("'prompt' must not have an empty list of tokens.", "prompt")
        if len(prompt) >= self._service.context_length:
            raise context_exceeded(self._service.context_length, f"{len(prompt)} tokens", "prompt")
        check_token_ids(prompt, self._service.vocab_size, "prompt")

    def _check_length(self, num_chars: int, field: str) -> None:
        """Refuses what is too long whatever its tokens are, before it is tokenised."""
        context_length = self._service.context_length
        if num_chars > context_length * self._service.options.limits.max_bytes_per_token:
            raise context_exceeded(context_length, f"{num_chars} characters", field)

    async def _off_loop(self, size: int, work: Callable[..., _Result], *args: object) -> _Result:
        if size <= OFF_LOOP_BYTES:
            return work(*args)
        return await anyio.to_thread.run_sync(work, *args, limiter=self._threads)

    # Models and tokens

    async def list_models(self, http: HttpRequest) -> Response:
        self._tenant(http)
        models = [self._model(name) for name in self._service.options.models]
        return JSONResponse({"object": "list", "data": models})

    async def show_model(self, http: HttpRequest) -> Response:
        self._tenant(http)
        name = http.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.options.created,
            "owned_by": "penstock",
            "root": self._service.options.models[0],
            "max_model_len": self._service.context_length,
        }

    async def tokenize(self, http: HttpRequest) -> Response:
        self._tenant(http)
        body = await self._read(http, TokenizeBody)
        self._check_model(body.model or self._service.options.models[0])
        token_ids = await self._encode_either(body)
        reply: dict[str, object] = {
            "count": len(token_ids),
            "max_model_len": self._service.context_length,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            spell = self._service.tokenizer.token_bytes
            reply["token_strs"] = [spell(token_id).decode(errors="replace") for token_id in token_ids]
        return JSONResponse(reply)

    async def _encode_either(self, body: TokenizeBody) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either 'prompt' or 'messages'.", "prompt")
        if body.messages is not None:
            check_messages(body.messages, self._service.options.limits)
            return await self._encode_chat(body.messages, add_generation_prompt=body.add_generation_prompt)
        if not body.prompt:
            return []
        return await self._encode_text(body.prompt, "prompt", add_special=body.add_special_tokens)

    async def detokenize(self, http: HttpRequest) -> Response:
        self._tenant(http)
        body = await self._read(http, DetokenizeBody)
        self._check_model(body.model or self._service.options.models[0])
        tokenizer = self._service.tokenizer
        check_token_ids(body.tokens, tokenizer.vocab_size, "tokens")
        decode = partial(tokenizer.decode, skip_special=False)
        return JSONResponse({"prompt": await self._off_loop(len(body.tokens), decode, body.tokens)})

    # The operator's

    async def health(self, _: HttpRequest) -> Response:
        """Red means: restart this process."""
        health = self._service.health
        status = HTTPStatus.OK if health == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": health}, status)

    async def ready(self, _: HttpRequest) -> Response:
        """Red means: send requests elsewhere."""
        readiness = self._service.readiness
        status = HTTPStatus.OK if readiness == "ready" else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": readiness}, status)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self._service.render_metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    # What all share

    def _tenant(self, http: HttpRequest) -> Tenant:
        return self._service.access.tenant(http.headers.get("authorization"))

    async def _read(self, http: HttpRequest, kind: type[Body]) -> Body:
        media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # Any page may send a browser's form or text to this machine without being asked; JSON it may not.
            raise ApiError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "The request must have the header 'Content-Type: application/json'.",
                code="unsupported_media_type",
            )
        return read(kind, await parse_object(await http.body(), self._service.options.limits))

    def _check_model(self, name: str) -> None:
        if name not in self._service.options.models:
            raise model_not_found(name)


class _Batch:
    """What the requests of one body have in common."""

    def __init__(
        self,
        body: Sampled,
        prompt_field: str,
        asked: MaxTokens,
        num_logprobs: int | None,
        tenant: Tenant,
        lane: Lane,
        arrival_s: float,
    ) -> None:
        self.body = body
        self.prompt_field = prompt_field
        self.asked = asked
        self.num_logprobs = num_logprobs
        self.tenant = tenant
        self.lane = lane
        self.arrival_s = arrival_s


def _split_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """The four forms of `prompt` as texts or as token ids."""
    if isinstance(prompt, str):
        return [prompt], []
    if prompt and isinstance(prompt[0], int):
        return [], [[token_id for token_id in prompt if isinstance(token_id, int)]]
    texts = [text for text in prompt if isinstance(text, str)]
    return texts, [token_ids for token_ids in prompt if isinstance(token_ids, list)]

"""`/v1/completions/render` and `/v1/chat/completions/render`, as vLLM has them: a request as the model would get it.

Routers hash the tokens, to send a request to the replica that has its beginning in its cache.
"""

from __future__ import annotations

import secrets
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.engine.planning.request import SamplingParams
from penstock.gateway.endpoints.completions import DEFAULT_COMPLETION_TOKENS
from penstock.gateway.endpoints.intake import Endpoints, route
from penstock.gateway.endpoints.params import asked_tokens
from penstock.gateway.http.errors import invalid
from penstock.gateway.sessions.recordings.kinds import CHAT, PREFIXES, TEXT
from penstock.gateway.wire.frames import Json
from penstock.gateway.wire.sampling import MaxTokens, Room, sampling_params
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, check_chat, check_completion

_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "max_tokens", "min_tokens", "ignore_eos"),
)
"""The fields of vLLM's sampling parameters that the engine's have under the same name."""


class RenderApi(Endpoints):
    """The rendered requests of one service. They keep to the limits of what counts tokens."""

    def routes(self) -> list[Route]:
        return [
            route("/v1/completions/render", POST=self.completions),
            route("/v1/chat/completions/render", POST=self.chat),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        client = self._intake.client(http)
        async with self._intake.counted(client) as headers:
            body = await self._intake.read(http, ChatBody)
            check_chat(body, self._service.options.limits)
            self._check(body)
            prompt, _ = await self._intake.counting(client.tenant).conversation(body)
            asked = asked_tokens(body)
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            return Json(self._rendered(body, CHAT, prompt, "messages", asked, logprobs), headers=headers)

    async def completions(self, http: HttpRequest) -> Response:
        client = self._intake.client(http)
        async with self._intake.counted(client) as headers:
            body = await self._intake.read(http, CompletionBody)
            check_completion(body, self._service.options.limits)
            self._check(body)
            prompts = await self._intake.counting(client.tenant).encode_prompts(body)
            asked = MaxTokens("max_tokens", body.max_tokens)
            if body.max_tokens is None:
                asked = MaxTokens("max_tokens", DEFAULT_COMPLETION_TOKENS, may_be_fewer=True)
            rendered = [
                self._rendered(body, TEXT, prompt, "prompt", asked, body.logprobs) for prompt in prompts
            ]
            return Json(rendered, headers=headers)

    def _check(self, body: ChatBody | CompletionBody) -> None:
        self._intake.check_model(body.model)
        if body.use_beam_search:
            raise invalid("A search of beams cannot be rendered.", "use_beam_search")

    def _rendered(
        self,
        body: ChatBody | CompletionBody,
        kind: str,
        prompt: list[int],
        prompt_field: str,
        asked: MaxTokens,
        logprobs: int | None,
    ) -> dict[str, Any]:
        room = Room(self._service.dispatch.context_length, len(prompt))
        sampling = sampling_params(
            body,
            self._service.options.defaults,
            max_tokens=room.output_tokens(asked, prompt_field),
            num_logprobs=logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            bad_words=(),
            shown_special=frozenset(),
            vocab_size=self._service.vocab_size,
        )
        options = body.stream_options
        return {
            "request_id": PREFIXES[kind] + secrets.token_hex(16),
            "token_ids": prompt,
            "features": None,  # of images, which no prompt has
            "sampling_params": _sampling(body, sampling),
            "model": body.model,
            "stream": bool(body.stream),
            "stream_options": None if options is None else options.model_dump(exclude_unset=True),
            "cache_salt": body.cache_salt,
            "priority": 0,
            "kv_transfer_params": None,
        }


def _sampling(body: ChatBody | CompletionBody, sampling: SamplingParams) -> dict[str, Any]:
    """Returns the sampling parameters by vLLM's names."""
    return {
        **{name: getattr(sampling, name) for name in _SAME},
        "n": body.num_generated,
        "seed": body.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "include_stop_str_in_output": sampling.shows_stop,
        "skip_special_tokens": body.skip_special_tokens is not False,
        "bad_words": list(body.bad_words or ()),
        "logprobs": sampling.num_logprobs,
        "prompt_logprobs": sampling.num_prompt_logprobs,
        "logit_bias": body.logit_bias,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
    }

"""`/v1/completions/render` and `/v1/chat/completions/render`, as vLLM has them: a request as the model would get it.

Routers hash the tokens, to send a request to the replica that has its beginning in its cache.
"""

from __future__ import annotations

import secrets
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.planning.request import SamplingParams
from penstock.gateway.endpoints.intake import Arrival, Endpoints, Intake
from penstock.gateway.endpoints.operation import ANY, serves
from penstock.gateway.endpoints.requests import RequestMaker
from penstock.gateway.errors import invalid
from penstock.gateway.http.json_response import Json
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.kinds import CHAT, PREFIXES, TEXT
from penstock.gateway.wire.schemas import ChatBody, CompletionBody
from penstock.gateway.wire.strict import Body

_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "max_tokens", "min_tokens", "ignore_eos"),
)
"""The fields of vLLM's sampling parameters that the engine's have under the same name."""


class RenderApi(Endpoints):
    """The rendered requests of one service. They keep to the limits of what counts tokens."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._sampling = RequestMaker(service, intake).sampling

    @serves("POST /v1/chat/completions/render", ANY, ChatBody, statuses=(404, 429))
    async def chat(self, http: HttpRequest) -> Response:
        """Give a conversation's tokens and sampling parameters, for routers."""
        [rendered], headers = await self._rendered(http, ChatBody, PREFIXES[CHAT])
        return Json(rendered, headers=headers)

    @serves("POST /v1/completions/render", ANY, CompletionBody, statuses=(404, 429), json_types=("array",))
    async def completions(self, http: HttpRequest) -> Response:
        """Give each prompt's tokens and sampling parameters, for routers."""
        rendered, headers = await self._rendered(http, CompletionBody, PREFIXES[TEXT])
        return Json(rendered, headers=headers)

    async def _rendered(
        self, http: HttpRequest, kind: type[Body], prefix: str
    ) -> tuple[list[dict[str, Any]], Any]:
        came, prompts, headers = await self._intake.counted_prompts(http, kind)
        assert came.ask.sampling is not None
        if came.ask.sampling.use_beam_search:
            raise invalid("A search of beams cannot be rendered.", "use_beam_search")
        return [self._request(came, prompt, prefix) for prompt in prompts], headers

    def _request(self, came: Arrival, prompt: list[int], prefix: str) -> dict[str, Any]:
        body, options = came.body, came.body.stream_options
        return {
            "request_id": prefix + secrets.token_hex(16),
            "token_ids": prompt,
            "features": None,  # of images, which no prompt has
            "sampling_params": _sampling(body, self._sampling(came.ask, len(prompt))),
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

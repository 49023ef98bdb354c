"""The tokens of texts and conversations, whole requests as the model would get them, and which prompts are cached.

Rendered requests are as vLLM has them: routers hash the tokens, to send a request to the replica that has its beginning
in its cache.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.engine.planning.params import SamplingParams
from penstock.gateway.endpoints.intake import Endpoints, Inbound, Intake
from penstock.gateway.endpoints.operation import ANY, looks_up, serves
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.endpoints.requests import RequestMaker, salt_of, salts_of
from penstock.gateway.errors import invalid
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.limits import parse_messages
from penstock.gateway.off_loop import off_loop
from penstock.gateway.service import Service
from penstock.gateway.sessions.prefixes.sharing import parse_token_ids
from penstock.gateway.sessions.recordings.kinds import CHAT, PREFIXES, TEXT
from penstock.gateway.wire.anthropic.bodies import CountTokensBody
from penstock.gateway.wire.llama.bodies import TemplateBody
from penstock.gateway.wire.prompts import check_token_ids
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, DetokenizeBody, LocateBody, TokenizeBody
from penstock.gateway.wire.strict import BodyT, read
from penstock.gateway.wire.tools.use import tool_use

_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "max_tokens", "min_tokens", "ignore_eos"),
)
"""The fields of vLLM's sampling parameters that the engine's have under the same name."""
_MOST_PREFIXES = 100


class LocateQuery(TypedDict, total=False):
    """A prompt in one of two forms."""

    tokens: Annotated[str, Field(pattern="^[0-9]+(,[0-9]+)*$")]
    messages: Annotated[str, Field(json_schema_extra={"contentMediaType": "application/json"})]


class TokensApi(Endpoints):
    """The tokens of one service's model, and the prefixes that it has cached."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._sampling = RequestMaker(service, intake).sampling

    @serves("POST /tokenize", ANY, TokenizeBody, statuses=(404, 429))
    async def tokenize(self, http: HttpRequest) -> Response:
        """Give the tokens of a text or of messages."""
        async with self._intake.counted(http) as (_, counting, headers):
            body = await self._intake.read(http, TokenizeBody)
            self._intake.check_model(body.model or None)
            if body.content is not None:
                return JsonResponse(await self._contents(body, body.content, counting), headers=headers)
            token_ids = await self._encode_either(body, counting)
            reply: dict[str, object] = {
                "count": len(token_ids),
                "max_model_len": self._service.dispatch.context_length,
                "tokens": token_ids,
            }
            if body.return_token_strs:
                reply["token_strs"] = await off_loop(8 * len(token_ids), self._spell, token_ids)
            return JsonResponse(reply, headers=headers)

    async def _contents(self, body: TokenizeBody, content: str, counting: Prompting) -> dict[str, object]:
        """Returns the tokens of a text as llama.cpp has them."""
        if body.prompt is not None or body.messages is not None:
            raise invalid("Give either 'content' or 'prompt' or 'messages'.", "content")
        counting.check_length(len(content), "content")
        flags = {"add_special": body.add_special, "parse_special": body.parse_special}
        encode = partial(self._service.tokenizer.encode, content, **flags)
        token_ids = await counting.run(len(content), encode)
        if not body.with_pieces:
            return {"tokens": token_ids}
        return {"tokens": await off_loop(8 * len(token_ids), self._pieces, token_ids)}

    def _pieces(self, token_ids: list[int]) -> list[dict[str, object]]:
        """Returns tokens with their texts, or their bytes where these are no text of their own."""
        pieces: list[dict[str, object]] = []
        for token_id in token_ids:
            spelt = self._service.tokenizer.token_bytes(token_id)
            try:
                pieces.append({"id": token_id, "piece": spelt.decode()})
            except UnicodeDecodeError:
                pieces.append({"id": token_id, "piece": list(spelt)})
        return pieces

    def _spell(self, token_ids: list[int]) -> list[str]:
        spell = self._service.tokenizer.token_bytes
        return [spell(token_id).decode(errors="replace") for token_id in token_ids]

    async def _encode_either(self, body: TokenizeBody, counting: Prompting) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either 'prompt' or 'messages'.", "prompt")
        if body.messages is not None:
            use = tool_use([dict(tool) for tool in body.tools or ()])
            variables = counting.variables(body.chat_template_kwargs)
            return await counting.encode_chat(
                body.messages, use, variables, add_generation_prompt=body.add_generation_prompt
            )
        if not body.prompt:
            return []
        return await counting.encode_text(body.prompt, "prompt", add_special=body.add_special_tokens)

    @serves("POST /detokenize", ANY, DetokenizeBody, statuses=(404, 429))
    async def detokenize(self, http: HttpRequest) -> Response:
        """Give the text of tokens."""
        async with self._intake.counted(http) as (_, counting, headers):
            body = await self._intake.read(http, DetokenizeBody)
            self._intake.check_model(body.model or None)
            most = self._service.dispatch.context_length
            if len(body.tokens) > most:
                raise invalid(f"'tokens' may have at most {most} tokens, as many as the context.", "tokens")
            decode = partial(self._decode, body.tokens)
            text = await counting.run(4 * len(body.tokens), decode)
            return JsonResponse({"prompt": text}, headers=headers)

    def _decode(self, token_ids: list[int]) -> str:
        tokenizer = self._service.tokenizer
        check_token_ids(token_ids, tokenizer.vocab_size, "tokens")
        return tokenizer.decode(token_ids, skip_special=False)

    @looks_up("/v1/prefixes", ANY)
    async def list_prefixes(self, http: HttpRequest) -> Response:
        """List the prefixes that are cached.

        The caller's that were found most often, and last, are shown.
        """
        salts = salts_of(self._intake.client(http).tenant)
        data = [
            {
                "object": "prefix",
                "id": prefix.leaf.hex(),
                "num_tokens": prefix.num_tokens,
                "hits": prefix.hits,
                "last_used_at": int(prefix.last_used_s),
            }
            for prefix in self._service.prefixes.hottest(_MOST_PREFIXES, salts)
        ]
        return JsonResponse({"object": "list", "data": data})

    @serves("GET /v1/prefixes/locate", ANY, query=LocateQuery, statuses=(429,))
    @serves("POST /v1/prefixes/locate", ANY, LocateBody, statuses=(429,))
    async def locate(self, http: HttpRequest) -> Response:
        """Say which replica is warm for a prompt."""
        async with self._intake.counted(http) as (client, counting, headers):
            body = await self._locate_body(http)
            if (body.tokens is None) == (body.messages is None):
                raise invalid("Give either 'tokens' or 'messages'.", "tokens")
            token_ids = body.tokens or []
            if body.messages is None:
                counting.check_prompt_ids(token_ids, "tokens")
            else:
                token_ids = await counting.encode_chat(body.messages)
            return JsonResponse(
                await self._service.locator.locate(salt_of(client.tenant), token_ids), headers=headers
            )

    async def _locate_body(self, http: HttpRequest) -> LocateBody:
        if http.method == "POST":
            return await self._intake.read(http, LocateBody)
        limits = self._service.options.limits
        values: dict[str, object] = dict(http.query_params)
        if "tokens" in values:
            values["tokens"] = parse_token_ids(http.query_params["tokens"])
        if "messages" in values:
            values["messages"] = parse_messages(http.query_params["messages"], limits)
        return read(LocateBody, values, limits)

    # Prompts as they are made of bodies

    @serves("POST /v1/messages/count_tokens", ANY, CountTokensBody, statuses=(404, 429))
    async def count(self, http: HttpRequest) -> Response:
        """Count the tokens of such a conversation."""
        _, [prompt], headers = await self._intake.counted_prompts(http, CountTokensBody)
        return JsonResponse({"input_tokens": len(prompt)}, headers=headers)

    @serves("POST /apply-template", ANY, TemplateBody, statuses=(404, 429))
    async def apply(self, http: HttpRequest) -> Response:
        """Give the text of a conversation.

        What the tokenizer puts before every text is left out.
        """
        inbound, [prompt], headers = await self._intake.counted_prompts(http, TemplateBody)
        spell = partial(self._spelt, prompt)
        text = await self._intake.prompting(inbound.tenant).run(len(prompt), spell)
        return JsonResponse({"prompt": text}, headers=headers)

    def _spelt(self, prompt: list[int]) -> str:
        tokenizer = self._service.tokenizer
        first = tokenizer.encode("", add_special=True)[:1]
        return tokenizer.decode(prompt[len(first) if prompt[:1] == first else 0 :], skip_special=False)

    @serves("POST /v1/chat/completions/render", ANY, ChatBody, statuses=(404, 429))
    async def render_chat(self, http: HttpRequest) -> Response:
        """Give a conversation's tokens and sampling parameters, for routers."""
        [rendered], headers = await self._rendered(http, ChatBody, PREFIXES[CHAT])
        return JsonResponse(rendered, headers=headers)

    @serves("POST /v1/completions/render", ANY, CompletionBody, statuses=(404, 429), json_types=("array",))
    async def render_texts(self, http: HttpRequest) -> Response:
        """Give each prompt's tokens and sampling parameters, for routers."""
        rendered, headers = await self._rendered(http, CompletionBody, PREFIXES[TEXT])
        return JsonResponse(rendered, headers=headers)

    async def _rendered(
        self, http: HttpRequest, kind: type[BodyT], prefix: str
    ) -> tuple[list[dict[str, Any]], Any]:
        inbound, prompts, headers = await self._intake.counted_prompts(http, kind)
        assert inbound.ask.sampling is not None
        if inbound.ask.sampling.use_beam_search:
            raise invalid("A search of beams cannot be rendered.", "use_beam_search")
        return [self._render(inbound, prompt, prefix) for prompt in prompts], headers

    def _render(self, inbound: Inbound, prompt: list[int], prefix: str) -> dict[str, Any]:
        body, options = inbound.body, inbound.body.stream_options
        return {
            "request_id": prefix + secrets.token_hex(16),
            "token_ids": prompt,
            "features": None,  # of images, which no prompt has
            "sampling_params": _sampling(body, self._sampling(inbound.ask, len(prompt))),
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

"""The names of the model, in OpenAI's format or in Anthropic's; its tokens; and which prompts are cached."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.cursors import CursorQuery, cursor_page, window
from penstock.gateway.endpoints.intake import Endpoints, route
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.endpoints.requests import salt_of, salts_of
from penstock.gateway.errors import invalid
from penstock.gateway.http.json_response import Json
from penstock.gateway.http.refusals import speaks_anthropic
from penstock.gateway.limits import parse_messages
from penstock.gateway.off_loop import off_loop
from penstock.gateway.sessions.prefixes.sharing import parse_token_ids
from penstock.gateway.wire.conversation import thinking_switches
from penstock.gateway.wire.prompts import check_token_ids
from penstock.gateway.wire.schemas import DetokenizeBody, LocateBody, TokenizeBody
from penstock.gateway.wire.strict import read, validated
from penstock.gateway.wire.tools.use import tool_use
from penstock.priority.lanes import Lane, Tenant

_MOST_PREFIXES = 100


class ModelsApi(Endpoints):
    """The names under which one service serves its model."""

    def routes(self) -> list[Route]:
        return [
            route("/v1/models", GET=self.list_models),
            route("/v1/models/{name:path}", GET=self.show),
        ]

    async def list_models(self, http: HttpRequest) -> Response:
        tenant = self._intake.client(http).tenant
        names = self._service.options.models
        if not speaks_anthropic(http):
            return Json({"object": "list", "data": [self._model(name, tenant) for name in names]})
        ids, has_more = window(names, validated(CursorQuery, http.query_params))
        return Json(cursor_page([self._model_info(name) for name in ids], ids, has_more=has_more))

    async def show(self, http: HttpRequest) -> Response:
        tenant = self._intake.client(http).tenant
        name = http.path_params["name"]
        self._intake.check_model(name)
        return Json(self._model_info(name) if speaks_anthropic(http) else self._model(name, tenant))

    def _model(self, name: str, tenant: Tenant) -> dict[str, Any]:
        """The model as OpenAI's API shows it, with the lanes that the client's key may name."""
        return {
            "id": name,
            "object": "model",
            "created": self._service.options.created,
            "owned_by": "penstock",
            "root": self._service.options.models[0],
            "max_model_len": self._service.dispatch.context_length,
            "defaults": asdict(self._service.options.defaults),
            "lanes": [lane.label for lane in Lane if lane >= tenant.top_lane],
            "reasoning": reasoning_of(self._service.prompts.variables),
        }

    def _model_info(self, name: str) -> dict[str, Any]:
        """The model as Anthropic's API shows it."""
        context_length = self._service.dispatch.context_length
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": f"{datetime.fromtimestamp(self._service.options.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
            "lifecycle": "active",
            "max_input_tokens": context_length,
            "max_tokens": context_length,
        }


def reasoning_of(variables: Collection[str]) -> Literal["effort", "switch"] | None:
    """Returns what `reasoning_effort` sets in the chat template that reads these variables."""
    if "reasoning_effort" in variables:
        return "effort"
    return "switch" if any(name in variables for name in thinking_switches(True)) else None


class TokensApi(Endpoints):
    """The tokens of one service's model, and the prefixes that it has cached."""

    def routes(self) -> list[Route]:
        return [
            route("/tokenize", POST=self.tokenize),
            route("/detokenize", POST=self.detokenize),
            route("/v1/prefixes", GET=self.list_prefixes),
            route("/v1/prefixes/locate", GET=self.locate, POST=self.locate),
        ]

    async def tokenize(self, http: HttpRequest) -> Response:
        client = self._intake.client(http)
        async with self._intake.counted(client) as headers:
            body = await self._intake.read(http, TokenizeBody)
            self._intake.check_model(body.model or self._service.options.models[0])
            counting = self._intake.counting(client.tenant)
            if body.content is not None:
                return Json(await self._contents(body, body.content, counting), headers=headers)
            token_ids = await self._encode_either(body, counting)
            reply: dict[str, object] = {
                "count": len(token_ids),
                "max_model_len": self._service.dispatch.context_length,
                "tokens": token_ids,
            }
            if body.return_token_strs:
                reply["token_strs"] = await off_loop(8 * len(token_ids), self._spell, token_ids)
            return Json(reply, headers=headers)

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

    async def detokenize(self, http: HttpRequest) -> Response:
        client = self._intake.client(http)
        async with self._intake.counted(client) as headers:
            body = await self._intake.read(http, DetokenizeBody)
            self._intake.check_model(body.model or self._service.options.models[0])
            most = self._service.dispatch.context_length
            if len(body.tokens) > most:
                raise invalid(f"'tokens' may have at most {most} tokens, as many as the context.", "tokens")
            decode = partial(self._decode, body.tokens)
            text = await self._intake.counting(client.tenant).run(4 * len(body.tokens), decode)
            return Json({"prompt": text}, headers=headers)

    def _decode(self, token_ids: list[int]) -> str:
        tokenizer = self._service.tokenizer
        check_token_ids(token_ids, tokenizer.vocab_size, "tokens")
        return tokenizer.decode(token_ids, skip_special=False)

    async def list_prefixes(self, http: HttpRequest) -> Response:
        """Lists the caller's cached prefixes that were found most often, and last."""
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
        return Json({"object": "list", "data": data})

    async def locate(self, http: HttpRequest) -> Response:
        """Says which replica has most of a prompt of the caller's in its cache."""
        client = self._intake.client(http)
        async with self._intake.counted(client) as headers:
            body = await self._locate_body(http)
            if (body.tokens is None) == (body.messages is None):
                raise invalid("Give either 'tokens' or 'messages'.", "tokens")
            counting, token_ids = self._intake.counting(client.tenant), body.tokens or []
            if body.messages is None:
                counting.check_prompt_ids(token_ids, "tokens")
            else:
                token_ids = await counting.encode_chat(body.messages)
            return Json(
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

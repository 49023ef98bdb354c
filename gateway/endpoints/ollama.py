"""`/api/chat` and what else Ollama's clients ask: a chat under other names."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from hashlib import sha256

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.embeddings import EmbeddingsApi
from penstock.gateway.endpoints.intake import Endpoints, Intake, Read, route
from penstock.gateway.endpoints.params import Arrival
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.endpoints.shortening import answer_room, shortened
from penstock.gateway.http.errors import invalid
from penstock.gateway.http.limits import Limits
from penstock.gateway.service import Service
from penstock.gateway.sessions.responses.threads import since, turns
from penstock.gateway.wire.conversation import chat_tools
from penstock.gateway.wire.embeddings import Embedded
from penstock.gateway.wire.frames import Json
from penstock.gateway.wire.ollama.bodies import (
    EmbeddingAsked,
    OllamaChatBody,
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
    Understood,
    named,
    plain_name,
    understand_chat,
    understand_embed,
    understand_embedding,
    understand_prompt,
)
from penstock.gateway.wire.ollama.lines import EmbeddingWriter, EmbedWriter, LineWriter, timestamp, unasked
from penstock.gateway.wire.schemas import ChatBody, Message
from penstock.gateway.wire.streams import WholeWriter

VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients ask for it, and do without what an older one lacks."""
_NEVER = "9999-12-31T23:59:59Z"
"""The time at which the model is to be unloaded."""


class OllamaApi(Endpoints):
    """The Ollama API of one service."""

    def __init__(self, service: Service, intake: Intake, embeddings: EmbeddingsApi) -> None:
        super().__init__(service, intake)
        self._embeddings = embeddings

    def routes(self) -> list[Route]:
        return [
            route("/api/chat", POST=self.chat),
            route("/api/generate", POST=self.generate),
            route("/api/embed", POST=self.embed),
            route("/api/embeddings", POST=self.embed_prompt),
            route("/api/tags", GET=self.list_models),
            route("/api/ps", GET=self.list_loaded),
            route("/api/show", POST=self.show),
            route("/api/pull", POST=self.pull),
            route("/api/create", POST=self.create),
            route("/api/copy", POST=self.copy),
            route("/api/version", GET=self.version),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, OllamaChatBody, understand_chat, is_chat=True)

    async def generate(self, http: HttpRequest) -> Response:
        return await self._answer(http, OllamaGenerateBody, understand_prompt, is_chat=False)

    async def _answer(
        self,
        http: HttpRequest,
        kind: type[Read],
        understand: Callable[[Read, Limits], Understood],
        *,
        is_chat: bool,
    ) -> Response:
        came = await self._intake.begin(http, kind, understand)
        asked = came.body
        self._intake.check_model(asked.model)
        if asked.chat is None:
            return Json(unasked(asked.model, int(time.time()), is_chat=is_chat))
        params = await self._intake.chat(came, asked.chat, may_be_fewer=True)
        self._intake.check_room(params, came.num_bytes)
        prompting = self._intake.prompting(params.tenant, params.urgency.lane)
        if asked.raw is None:
            prompt = await self._conversation(prompting, asked, asked.chat, is_chat=is_chat)
            use, shows_reasoning = chat_tools(asked.chat), asked.chat.shows_reasoning
            params = await self._intake.with_tools(params, prompt, use, shows_reasoning=shows_reasoning)
        else:
            prompt = await prompting.encode_text(
                asked.raw, "prompt", suffix=asked.suffix or "", is_cut=asked.truncates
            )
            prompt = self._cut(prompt, asked.chat) if asked.truncates else prompt
        head = self._intake.head(secrets.token_hex(16), asked.model)
        tells_context = not is_chat and asked.raw is None
        writer = LineWriter(
            head,
            is_chat=is_chat,
            tells_context=tells_context,
            parser=params.reading.parser(head.id),
            tokens=self._service.tokenizer if asked.chat.logprobs else None,
            num_top=asked.chat.top_logprobs or 0,
        )
        return await self._intake.reply(params, [prompt], head.id, writer, keeps=tells_context)

    async def _conversation(
        self, prompting: Prompting, asked: Understood, chat: ChatBody, *, is_chat: bool
    ) -> list[int]:
        """Returns the prompt, shortened where it is too long: a chat by its oldest turns, else by its first tokens."""
        if not asked.truncates:
            return (await prompting.conversation(chat, asked.context))[0]
        context_length = self._service.dispatch.context_length
        if not is_chat:
            whole = chat.model_copy(update={"truncate_prompt_tokens": sys.maxsize})
            before = asked.context[-(context_length - 1) :]
            return self._cut((await prompting.conversation(whole, before))[0], chat)
        messages = chat.messages

        async def encode(start: int) -> list[int]:
            kept = list(since(messages, start, _role))
            return (await prompting.conversation(chat.model_copy(update={"messages": kept})))[0]

        room = self._answer_room(chat)
        return await shortened(encode, turns(messages, _role), context_length, least_room=1, room=room)

    def _cut(self, prompt: list[int], chat: ChatBody) -> list[int]:
        """Returns the end of a prompt that leaves no room for an answer."""
        context_length = self._service.dispatch.context_length
        return prompt if len(prompt) < context_length else prompt[self._answer_room(chat) - context_length :]

    def _answer_room(self, chat: ChatBody) -> int:
        room = answer_room(self._service.dispatch.context_length)
        return max(1, room if chat.max_tokens is None else min(room, chat.max_tokens))

    async def embed(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, OllamaEmbedBody, understand_embed)
        self._embeddings.check_dimensions(came.body.dimensions)
        nothing = {"model": came.body.model, "embeddings": []}
        return await self._embedded(came, "input", EmbedWriter(came.body), nothing)

    async def embed_prompt(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, OllamaEmbeddingBody, understand_embedding)
        return await self._embedded(came, "prompt", EmbeddingWriter(), {"embedding": []})

    async def _embedded(
        self, came: Arrival[EmbeddingAsked], field: str, writer: WholeWriter, nothing: Mapping[str, object]
    ) -> Response:
        """The embeddings of the texts in a field; `nothing` if there are no texts."""
        asked, body = came.body, Embedded(model=came.body.model)
        if not asked.texts:
            self._intake.check_model(asked.model)
            return Json(nothing)
        urgency = self._intake.admit(came, body)
        longest = self._service.dispatch.context_length - 1 if asked.truncates else None
        encode = self._intake.prompting(came.tenant, urgency.lane).encode_texts
        prompts = await encode(asked.texts, field, body, longest=longest)
        return await self._embeddings.reply(came, urgency, prompts, f"embd-{secrets.token_hex(16)}", writer)

    # The model

    async def list_models(self, http: HttpRequest) -> Response:
        self._intake.client(http)
        modified = timestamp(self._service.options.created)
        return Json({"models": [{**self._model(name), "modified_at": modified} for name in self._names]})

    async def list_loaded(self, http: HttpRequest) -> Response:
        self._intake.client(http)
        context_length = self._service.dispatch.context_length
        loaded = {
            "expires_at": _NEVER,
            "size_vram": self._service.options.num_bytes,
            "context_length": context_length,
        }
        return Json({"models": [{**self._model(name), **loaded} for name in self._names]})

    async def show(self, http: HttpRequest) -> Response:
        self._intake.client(http)
        name = await self._intake.read_as(http, OllamaShowBody, named)
        self._intake.check_model(name)
        template = self._service.tokenizer.chat_template
        return Json(
            {
                "modelfile": f"FROM {name}",
                "parameters": "",
                "template": template or "",
                "details": _DETAILS,
                "model_info": {
                    "general.architecture": "penstock",
                    "general.basename": name,
                    "penstock.context_length": self._service.dispatch.context_length,
                    "penstock.vocab_size": self._service.vocab_size,
                },
                "capabilities": self._capabilities(),
                "modified_at": timestamp(self._service.options.created),
            }
        )

    async def pull(self, http: HttpRequest) -> Response:
        """Reports success for a model that is served; raises 404 for others."""
        return await self._there(http, OllamaPullBody)

    async def create(self, http: HttpRequest) -> Response:
        return await self._there(http, OllamaCreateBody)

    async def _there(self, http: HttpRequest, kind: type[OllamaPullBody | OllamaCreateBody]) -> Response:
        self._intake.client(http)
        body = await self._intake.read(http, kind)
        self._intake.check_model(named(body, self._service.options.limits))
        if isinstance(body, OllamaCreateBody) and body.from_ is not None:
            self._intake.check_model(plain_name(body.from_))
        if body.stream is False:
            return Json({"status": "success"})
        return Response('{"status": "success"}\n', media_type=LineWriter.media_type)

    async def copy(self, http: HttpRequest) -> Response:
        self._intake.client(http)
        body = await self._intake.read(http, OllamaCopyBody)
        self._intake.check_model(plain_name(body.source))
        if plain_name(body.destination) not in self._names:
            message = (
                "'destination' is not supported: which names there are the operator of this server chooses."
            )
            raise invalid(message, "destination", "unsupported_value")
        return Json({})

    def _capabilities(self) -> list[str]:
        formats = self._service.formats
        able = {"completion": True, "tools": formats.tools, "thinking": formats.reasoning}
        return [name for name, is_there in able.items() if is_there]

    async def version(self, _: HttpRequest) -> Response:
        return Json({"version": VERSION})

    @property
    def _names(self) -> tuple[str, ...]:
        return self._service.options.models

    def _model(self, name: str) -> dict[str, object]:
        digest = sha256(f"{name} {self._service.options.created}".encode()).hexdigest()
        return {
            "name": name,
            "model": name,
            "size": self._service.options.num_bytes,
            "digest": digest,
            "details": _DETAILS,
        }


def _role(message: Message) -> str:
    return message.role


_DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "penstock",
    "families": ["penstock"],
    "parameter_size": "",
    "quantization_level": "",
}

"""`/api/chat` and what else Ollama's clients ask: a chat under other names."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from hashlib import sha256

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.keys import Client
from gateway.endpoints.embeddings import EmbeddingsApi
from gateway.endpoints.intake import Intake, Read, route
from gateway.endpoints.replies import Reply
from gateway.http.limits import Limits
from gateway.service import Service
from gateway.wire.embeddings import Embedded
from gateway.wire.frames import Json
from gateway.wire.ollama.bodies import (
    EmbeddingAsked,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OllamaGenerateBody,
    OllamaShowBody,
    Understood,
    named,
    understand_chat,
    understand_embed,
    understand_embedding,
    understand_prompt,
)
from gateway.wire.ollama.lines import EmbeddingWriter, EmbedWriter, LineWriter, timestamp, unasked
from gateway.wire.sampling import tier_of
from gateway.wire.shapes import Head
from gateway.wire.writers import WholeWriter

VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients ask for it, and do without what an older one lacks."""
_NEVER = "9999-12-31T23:59:59Z"
"""When the model is to be unloaded."""


class OllamaApi:
    """One service, for clients of Ollama."""

    def __init__(self, service: Service, intake: Intake, embeddings: EmbeddingsApi) -> None:
        self._service = service
        self._intake = intake
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
        arrival_s = self._service.clock()
        client = self._intake.client(http)
        self._service.dispatch.check_open()
        asked = await self._intake.read_as(http, kind, understand)
        self._intake.check_model(asked.model)
        if asked.chat is None:
            return Json(unasked(asked.model, int(time.time()), is_chat=is_chat))
        batch = await self._intake.chat(client, asked.chat, arrival_s, may_be_fewer=True)
        self._intake.check_room(batch, len(await http.body()))
        if asked.raw is None:
            prompt, batch = await self._intake.prompt(batch, asked.chat)
        else:
            prompt = await self._intake.prompting(client.tenant).encode_text(
                asked.raw, "prompt", suffix=asked.suffix or ""
            )
        id, tier = secrets.token_hex(16), tier_of(batch.lane)
        head = Head(id=id, created=int(time.time()), model=asked.model, service_tier=tier)
        writer = LineWriter(
            head,
            is_chat=is_chat,
            parser=batch.reading.parser_of(id),
            tokens=self._service.tokenizer if asked.chat.logprobs else None,
            num_top=asked.chat.top_logprobs or 0,
        )
        return Reply(self._service, await self._intake.job(client, batch, [prompt], id, writer))

    async def embed(self, http: HttpRequest) -> Response:
        arrival_s, client = self._embeddings.begin(http)
        asked = await self._intake.read_as(http, OllamaEmbedBody, understand_embed)
        self._embeddings.check_dimensions(asked.dimensions)
        if not asked.texts:
            self._intake.check_model(asked.model)
            return Json({"model": asked.model, "embeddings": []})
        return await self._embedded(http, client, asked, arrival_s, "input", EmbedWriter(asked))

    async def embed_prompt(self, http: HttpRequest) -> Response:
        arrival_s, client = self._embeddings.begin(http)
        asked = await self._intake.read_as(http, OllamaEmbeddingBody, understand_embedding)
        if not asked.texts:
            self._intake.check_model(asked.model)
            return Json({"embedding": []})
        return await self._embedded(http, client, asked, arrival_s, "prompt", EmbeddingWriter())

    async def _embedded(
        self,
        http: HttpRequest,
        client: Client,
        asked: EmbeddingAsked,
        arrival_s: float,
        field: str,
        writer: WholeWriter,
    ) -> Response:
        body = Embedded(model=asked.model)
        lane = await self._embeddings.admit(http, client, body, arrival_s)
        longest = self._service.dispatch.context_length - 1 if asked.truncates else None
        prompts = await self._intake.prompting(client.tenant).encode_texts(
            asked.texts, field, body, longest=longest
        )
        id = f"embd-{secrets.token_hex(16)}"
        return await self._embeddings.reply(client, lane, prompts, arrival_s, id, writer)

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


_DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "penstock",
    "families": ["penstock"],
    "parameter_size": "",
    "quantization_level": "",
}

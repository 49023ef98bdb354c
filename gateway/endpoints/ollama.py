"""`/api/chat` and what else Ollama's clients ask: a chat under other names."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.embeddings import EmbeddingsApi
from penstock.gateway.endpoints.intake import Endpoints, Intake, Read, route
from penstock.gateway.endpoints.params import Arrival, GenerationParams
from penstock.gateway.endpoints.recorded import Recorder, Turn, recorded
from penstock.gateway.http.limits import Limits
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.kinds import LINES
from penstock.gateway.wire.embeddings import Embedded
from penstock.gateway.wire.frames import Json
from penstock.gateway.wire.ollama.bodies import (
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
from penstock.gateway.wire.ollama.lines import EmbeddingWriter, EmbedWriter, LineWriter, timestamp, unasked
from penstock.gateway.wire.writing import Counts, WholeWriter

VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients ask for it, and do without what an older one lacks."""
_NEVER = "9999-12-31T23:59:59Z"
"""The time at which the model is to be unloaded."""


class OllamaApi(Endpoints):
    """The Ollama API of one service."""

    def __init__(self, service: Service, intake: Intake, embeddings: EmbeddingsApi) -> None:
        super().__init__(service, intake)
        self._embeddings = embeddings
        self._recorder = Recorder(service, intake)

    def routes(self) -> list[Route]:
        by_id = self._recorder.by_id(LINES, {"deleted": True})
        return [
            route("/api/chat", POST=self.chat),
            route("/api/generate", POST=self.generate),
            route("/api/embed", POST=self.embed),
            route("/api/embeddings", POST=self.embed_prompt),
            route("/api/tags", GET=self.list_models),
            route("/api/ps", GET=self.list_loaded),
            route("/api/show", POST=self.show),
            route("/api/version", GET=self.version),
            *(route(f"/api/{name}/{{id}}", **by_id) for name in ("chat", "generate")),
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
        tells_context = not is_chat and asked.raw is None
        if (kept := recorded(http, asked.chat)) is not None:
            details = {"is_chat": is_chat, "tells_context": tells_context}
            begin = partial(self._turn, replace(params, is_recorded=True), asked, details)
            return await self._recorder.reply(LINES, came.tenant.name, kept.key, (is_chat, asked), begin)
        self._intake.check_room(params, came.num_bytes)
        prompt, params = await self._prompt(params, asked)
        head = self._intake.head(secrets.token_hex(16), asked.model)
        writer = LineWriter(
            head,
            is_chat=is_chat,
            tells_context=tells_context,
            reading=params.reading,
            tokens=self._service.tokenizer if asked.chat.logprobs else None,
            num_top=asked.chat.top_logprobs or 0,
        )
        return await self._intake.reply(params, [prompt], head.id, writer, keeps=tells_context)

    async def _turn(self, params: GenerationParams, asked: Understood, details: dict[str, Any]) -> Turn:
        self._intake.check_room(params, self._service.dispatch.context_length)
        prompt, params = await self._prompt(params, asked)
        return Turn(params, prompt, details)

    async def _prompt(
        self, params: GenerationParams, asked: Understood
    ) -> tuple[list[int], GenerationParams]:
        assert asked.chat is not None
        if asked.raw is None:
            return await self._intake.prompt(params, asked.chat, asked.context)
        encode = self._intake.prompting(params.tenant, params.urgency.lane).encode_text
        return await encode(asked.raw, "prompt", suffix=asked.suffix or ""), params

    async def embed(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, OllamaEmbedBody, understand_embed)
        self._embeddings.check_dimensions(came.body.dimensions)
        nothing = {"model": came.body.model, "embeddings": []}
        return await self._embedded(came, "input", EmbedWriter(came.body), nothing)

    async def embed_prompt(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, OllamaEmbeddingBody, understand_embedding)
        return await self._embedded(came, "prompt", EmbeddingWriter(), {"embedding": []})

    async def _embedded(
        self,
        came: Arrival[EmbeddingAsked],
        field: str,
        writer: WholeWriter[Counts],
        nothing: Mapping[str, object],
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

"""`/api/chat` and what else Ollama's clients ask: a chat under other names."""

from __future__ import annotations

import time
from functools import partial
from hashlib import sha256
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.answering import Answering, Made, ModelEndpoints
from penstock.gateway.endpoints.intake import Arrival, Intake, route
from penstock.gateway.endpoints.recorded import ReplyRecorder
from penstock.gateway.errors import invalid
from penstock.gateway.http.json_response import Json
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.kinds import LINES
from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.ollama.bodies import (
    OllamaChatBody,
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
    plain_name,
    shown_name,
)
from penstock.gateway.wire.ollama.lines import (
    LineWriter,
    NormalEmbeddingWriter,
    PlainEmbeddingWriter,
    timestamp,
    unasked,
)
from penstock.gateway.wire.writing import Head

VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients ask for it, and do without what an older one lacks."""
_NEVER = "9999-12-31T23:59:59Z"
"""The time at which the model is to be unloaded."""


class OllamaApi(ModelEndpoints):
    """The Ollama API of one service."""

    def __init__(self, service: Service, intake: Intake, answering: Answering) -> None:
        super().__init__(service, intake, answering)
        self._chats = ReplyRecorder(service, intake, LINES, partial(_details, is_chat=True))
        self._prompts = ReplyRecorder(service, intake, LINES, partial(_details, is_chat=False))

    def routes(self) -> list[Route]:
        by_id = self._chats.by_id({"deleted": True})
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
            *(route(f"/api/{name}/{{id}}", **by_id) for name in ("chat", "generate")),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        write, load = partial(self._writer, is_chat=True), partial(_loaded, is_chat=True)
        return await self._answer(http, OllamaChatBody, write, "", self._chats, load)

    async def generate(self, http: HttpRequest) -> Response:
        write, load = partial(self._writer, is_chat=False), partial(_loaded, is_chat=False)
        return await self._answer(http, OllamaGenerateBody, write, "", self._prompts, load)

    async def embed(self, http: HttpRequest) -> Response:
        return await self._answer(
            http,
            OllamaEmbedBody,
            _embed_writer,
            "embd-",
            load=lambda ask: {"model": ask.model, "embeddings": []},
        )

    async def embed_prompt(self, http: HttpRequest) -> Response:
        return await self._answer(
            http, OllamaEmbeddingBody, _embedding_writer, "embd-", load=lambda _: {"embedding": []}
        )

    def _writer(self, head: Head, came: Arrival, made: Made, *, is_chat: bool) -> LineWriter:
        ask = came.ask
        return LineWriter(
            head,
            is_chat=is_chat,
            tells_context=ask.kept.output,
            reading=made.guidance.reading,
            tokens=None if ask.num_logprobs is None else self._service.tokenizer,
            num_top=ask.shown.extras.num_top,
        )

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
        name = shown_name(await self._intake.read(http, OllamaShowBody))
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
        self._intake.check_model(shown_name(body))
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


def _details(ask: Ask, *, is_chat: bool) -> dict[str, Any]:
    return {"is_chat": is_chat, "tells_context": ask.kept.output}


def _loaded(ask: Ask, *, is_chat: bool) -> dict[str, object]:
    return unasked(ask.model, int(time.time()), is_chat=is_chat)


def _embed_writer(_: Head, came: Arrival, __: Made) -> NormalEmbeddingWriter:
    return NormalEmbeddingWriter(came.ask)


def _embedding_writer(_: Head, __: Arrival, ___: Made) -> PlainEmbeddingWriter:
    return PlainEmbeddingWriter()


_DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "penstock",
    "families": ["penstock"],
    "parameter_size": "",
    "quantization_level": "",
}

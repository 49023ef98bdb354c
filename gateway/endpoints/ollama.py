"""`/api/chat` and what else Ollama's clients ask: a chat under other names."""

from __future__ import annotations

import time
from hashlib import sha256
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.answering import ModelEndpoints
from penstock.gateway.endpoints.intake import Arrival, Intake
from penstock.gateway.endpoints.operation import ANY, BY_ID, BY_PROMPT, LINED, answers, follows, serves
from penstock.gateway.endpoints.recorded import ReplyRecorder
from penstock.gateway.endpoints.requests import Made
from penstock.gateway.errors import invalid
from penstock.gateway.http.json_response import Json
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.kinds import LINES
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
from penstock.gateway.wire.ollama.lines import EmbeddingWriter, EmbedWriter, LineWriter, timestamp, unasked
from penstock.gateway.wire.writing import Head

VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients ask for it, and do without what an older one lacks."""
_NEVER = "9999-12-31T23:59:59Z"
"""The time at which the model is to be unloaded."""


class OllamaApi(ModelEndpoints):
    """The Ollama API of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._recorder = ReplyRecorder(service, intake, LINES, _details, {"deleted": True})

    @answers("/api/chat", OllamaChatBody, LINED)
    async def chat(self, http: HttpRequest) -> Response:
        """Answer a conversation in Ollama's format, streamed or whole."""
        return await self._answer(http, OllamaChatBody, self._writer, self._recorder, load=_loaded)

    @answers("/api/generate", OllamaGenerateBody, LINED)
    async def generate(self, http: HttpRequest) -> Response:
        """Answer a prompt in Ollama's format, streamed or whole."""
        return await self._answer(http, OllamaGenerateBody, self._writer, self._recorder, load=_loaded)

    @serves("POST /api/embed", BY_PROMPT, OllamaEmbedBody)
    async def embed(self, http: HttpRequest) -> Response:
        """Turn texts into vectors, for Ollama's clients."""
        return await self._answer(
            http,
            OllamaEmbedBody,
            lambda _, came, __: EmbedWriter(came.ask),
            prefix="embd-",
            load=lambda came: {"model": came.ask.model, "embeddings": []},
        )

    @serves("POST /api/embeddings", BY_PROMPT, OllamaEmbeddingBody)
    async def embed_prompt(self, http: HttpRequest) -> Response:
        """Turn a text into a vector, for Ollama's older clients."""
        return await self._answer(
            http,
            OllamaEmbeddingBody,
            lambda *_: EmbeddingWriter(),
            prefix="embd-",
            load=lambda _: {"embedding": []},
        )

    def _writer(self, head: Head, came: Arrival, made: Made) -> LineWriter:
        ask = came.ask
        return LineWriter(
            head,
            **_details(came),
            reading=made.reading,
            tokens=None if ask.num_logprobs is None else self._service.tokenizer,
            num_top=ask.shown.extras.num_top,
        )

    @follows("/api/chat/{id} /api/generate/{id}", LINED)
    async def follow(self, http: HttpRequest) -> Response:
        """Follow a resumable answer, after the line that was seen last."""
        return await self._recorder.show(http)

    @serves("DELETE /api/chat/{id} /api/generate/{id}", BY_ID)
    async def forget(self, http: HttpRequest) -> Response:
        """Stop and forget a resumable answer."""
        return await self._recorder.discard(http)

    # The model

    @serves("GET /api/tags", ANY)
    async def list_models(self, http: HttpRequest) -> Response:
        """List the names of the model, for Ollama's clients."""
        self._intake.client(http)
        modified = timestamp(self._service.options.created)
        return Json({"models": [{**self._model(name), "modified_at": modified} for name in self._names]})

    @serves("GET /api/ps", ANY)
    async def list_loaded(self, http: HttpRequest) -> Response:
        """List the same as loaded, for Ollama's clients."""
        self._intake.client(http)
        context_length = self._service.dispatch.context_length
        loaded = {
            "expires_at": _NEVER,
            "size_vram": self._service.options.num_bytes,
            "context_length": context_length,
        }
        return Json({"models": [{**self._model(name), **loaded} for name in self._names]})

    @serves("POST /api/show", ANY, OllamaShowBody, statuses=(404,))
    async def show(self, http: HttpRequest) -> Response:
        """Show the model, for Ollama's clients."""
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

    @serves("POST /api/pull", ANY, OllamaPullBody, answers=LINED, statuses=(404,))
    async def pull(self, http: HttpRequest) -> Response:
        """Report that a model is there.

        Raises 404 for a model that is not served.
        """
        return await self._there(http, OllamaPullBody)

    @serves("POST /api/create", ANY, OllamaCreateBody, answers=LINED, statuses=(404,))
    async def create(self, http: HttpRequest) -> Response:
        """Report that a model is there; none is made of it."""
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

    @serves("POST /api/copy", ANY, OllamaCopyBody, statuses=(404,))
    async def copy(self, http: HttpRequest) -> Response:
        """Report that both names are the model's."""
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

    @serves("GET /api/version", ANY, is_open=True)
    async def version(self, _: HttpRequest) -> Response:
        """Say the version of Ollama whose API this is."""
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


def _details(came: Arrival) -> dict[str, Any]:
    return {"is_chat": _is_chat(came), "tells_context": came.ask.kept.output}


def _loaded(came: Arrival) -> dict[str, object]:
    return unasked(came.ask.model, int(time.time()), is_chat=_is_chat(came))


def _is_chat(came: Arrival) -> bool:
    return isinstance(came.body, OllamaChatBody)


_DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "penstock",
    "families": ["penstock"],
    "parameter_size": "",
    "quantization_level": "",
}

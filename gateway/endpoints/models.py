"""The model and its names, as each API shows them: OpenAI's, Anthropic's, Ollama's and llama.cpp's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.cursors import CursorQuery, cursor_page, window
from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.operation import ANY, LINED, serves
from penstock.gateway.errors import invalid
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.http.refusals import speaks_anthropic
from penstock.gateway.reply.generation import Generation
from penstock.gateway.wire.conversation import thinking_switches
from penstock.gateway.wire.ollama.bodies import (
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaPullBody,
    OllamaShowBody,
    plain_name,
    shown_name,
)
from penstock.gateway.wire.ollama.lines import LineWriter, timestamp
from penstock.gateway.wire.strict import validated
from penstock.priority.lanes import Lane, Tenant

VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients ask for it, and do without what an older one lacks."""
_NEVER = "9999-12-31T23:59:59Z"
"""The time at which the model is to be unloaded."""
_DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "penstock",
    "families": ["penstock"],
    "parameter_size": "",
    "quantization_level": "",
}


class ModelsApi(Endpoints):
    """The names under which one service serves its model."""

    @serves("GET /v1/models", ANY)
    async def list_models(self, http: HttpRequest) -> Response:
        """List the names of the model, in Anthropic's format to its clients."""
        tenant = self._intake.client(http).tenant
        names = self._service.options.models
        if not speaks_anthropic(http):
            return JsonResponse({"object": "list", "data": [self._model(name, tenant) for name in names]})
        ids, has_more = window(names, validated(CursorQuery, http.query_params))
        return JsonResponse(cursor_page([self._model_info(name) for name in ids], ids, has_more=has_more))

    @serves("GET /v1/models/{name:path}", ANY, statuses=(404,))
    async def show(self, http: HttpRequest) -> Response:
        """Show the model under one of its names."""
        tenant = self._intake.client(http).tenant
        name = http.path_params["name"]
        self._intake.check_model(name)
        return JsonResponse(self._model_info(name) if speaks_anthropic(http) else self._model(name, tenant))

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


class OllamaModelsApi(Endpoints):
    """The model as Ollama's clients see it."""

    @serves("GET /api/tags", ANY)
    async def list_models(self, http: HttpRequest) -> Response:
        """List the names of the model, for Ollama's clients."""
        self._intake.client(http)
        modified = timestamp(self._service.options.created)
        return JsonResponse(
            {"models": [{**self._model(name), "modified_at": modified} for name in self._names]}
        )

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
        return JsonResponse({"models": [{**self._model(name), **loaded} for name in self._names]})

    @serves("POST /api/show", ANY, OllamaShowBody, statuses=(404,))
    async def show(self, http: HttpRequest) -> Response:
        """Show the model, for Ollama's clients."""
        self._intake.client(http)
        name = shown_name(await self._intake.read(http, OllamaShowBody))
        self._intake.check_model(name)
        template = self._service.tokenizer.chat_template
        return JsonResponse(
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
            return JsonResponse({"status": "success"})
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
        return JsonResponse({})

    def _capabilities(self) -> list[str]:
        formats = self._service.formats
        able = {"completion": True, "tools": formats.tools, "thinking": formats.reasoning}
        return [name for name, is_there in able.items() if is_there]

    @serves("GET /api/version", ANY, is_open=True)
    async def version(self, _: HttpRequest) -> Response:
        """Say the version of Ollama whose API this is."""
        return JsonResponse({"version": VERSION})

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


class LlamaServerApi(Endpoints):
    """The server as llama.cpp's clients see it."""

    @serves("GET /props", ANY)
    async def props(self, http: HttpRequest) -> Response:
        """Say what llama.cpp's clients ask of a server."""
        self._intake.client(http)
        tokenizer, options = self._service.tokenizer, self._service.options
        defaults = options.defaults
        params = {
            "temperature": defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "repeat_penalty": defaults.repetition_penalty,
            "n_predict": -1,
            "seed": -1,
        }
        return JsonResponse(
            {
                "default_generation_settings": {
                    "n_ctx": self._service.dispatch.context_length,
                    "params": params,
                },
                "total_slots": self._service.engine_stats().max_num_seqs,
                "model_alias": options.models[0],
                "model_path": options.models[0],
                "modalities": {"vision": False, "audio": False, "video": False},
                "chat_template": tokenizer.chat_template or "",
                "bos_token": tokenizer.special_tokens.get("bos_token", ""),
                "eos_token": tokenizer.special_tokens.get("eos_token", ""),
                "build_info": f"penstock-{version('penstock')}",
                "is_sleeping": False,
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": not options.metrics_elsewhere,
            }
        )

    @serves("GET /slots", ANY, json_types=("array",))
    async def slots(self, http: HttpRequest) -> Response:
        """List the caller's generations, as llama.cpp does.

        An operator's key is shown all of them, and seats without one.
        """
        client = self._intake.client(http)
        shown = [
            generation
            for generation in self._service.dispatch
            if client.is_operator or generation.requests[0].tenant == client.tenant.name
        ]
        num_free = max(0, self._service.engine_stats().max_num_seqs - len(shown))
        seats: list[Generation | None] = [*shown, *[None] * num_free]
        return JsonResponse([self._slot(i, generation) for i, generation in enumerate(seats)])

    def _slot(self, number: int, generation: Generation | None) -> dict[str, object]:
        slot: dict[str, object] = {
            "id": number,
            "n_ctx": self._service.dispatch.context_length,
            "speculative": False,
            "is_processing": generation is not None,
        }
        if generation is not None:
            slot |= {
                "n_prompt_tokens": generation.num_prompt_tokens,
                "next_token": [{"n_decoded": generation.num_output_tokens}],
            }
        return slot

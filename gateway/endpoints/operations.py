"""The table of all routes: the input and output of each, and the replica that gets it."""

from __future__ import annotations

from starlette.routing import compile_path

from penstock.gateway.endpoints.batches import BatchesApi, MessageBatchesApi
from penstock.gateway.endpoints.conversations import ConversationsApi
from penstock.gateway.endpoints.events import EventsApi
from penstock.gateway.endpoints.files import FilesApi
from penstock.gateway.endpoints.inference import InferenceApi
from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.kv import KvApi
from penstock.gateway.endpoints.models import LlamaServerApi, ModelsApi, OllamaModelsApi
from penstock.gateway.endpoints.operation import ANY, Operation, served
from penstock.gateway.endpoints.operator import MetricsApi, ProbesApi, ServerInfoApi, UsageApi
from penstock.gateway.endpoints.prefill import PrefillApi
from penstock.gateway.endpoints.replies import RepliesApi
from penstock.gateway.endpoints.responses import ResponsesApi
from penstock.gateway.endpoints.state import StateApi
from penstock.gateway.endpoints.stored_chats import StoredChatsApi
from penstock.gateway.endpoints.tokens import TokensApi

PLAIN_APIS: tuple[type[Endpoints], ...] = (
    *(RepliesApi, StoredChatsApi, TokensApi, ResponsesApi, ConversationsApi, ModelsApi, OllamaModelsApi),
    *(LlamaServerApi, EventsApi, UsageApi, ServerInfoApi, ProbesApi, InferenceApi),
)
"""The endpoints that are made of a service and its intake alone."""
CLUSTER_APIS: tuple[type[Endpoints], ...] = (StateApi, KvApi, PrefillApi)
"""Those that there are for the members of a cluster alone."""


def _operations() -> dict[str, dict[str, Operation]]:
    page = "Give the chat page, or to a client that does not take pages, Ollama's greeting"
    operations = {
        "/openapi.json": {"GET": Operation(ANY, "Give this description", is_open=True)},
        "/": {"GET": Operation(ANY, page, answers=("text/html", "text/plain"), is_open=True, is_cached=True)},
        "/static/{path}": {
            "GET": Operation(
                ANY,
                "Give a file of the chat page",
                answers=("*/*",),
                statuses=(404,),
                is_open=True,
                is_cached=True,
            )
        },
    }
    for api in (*PLAIN_APIS, FilesApi, BatchesApi, MessageBatchesApi, *CLUSTER_APIS, MetricsApi):
        for path, verb, operation, _ in served(api):
            operations.setdefault(compile_path(path)[1], {})[verb] = operation
    return operations


OPERATIONS = _operations()
"""The operations by path and method."""

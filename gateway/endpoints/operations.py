"""The table of all routes: the input and output of each, and the replica that gets it."""

from __future__ import annotations

from starlette.routing import compile_path

from penstock.gateway.endpoints.batches import BatchesApi
from penstock.gateway.endpoints.conversations import ConversationsApi
from penstock.gateway.endpoints.events import EventsApi
from penstock.gateway.endpoints.files import FilesApi
from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.message_batches import MessageBatchesApi
from penstock.gateway.endpoints.models import LlamaServerApi, ModelsApi, OllamaModelsApi
from penstock.gateway.endpoints.operation import ANY, Operation, served
from penstock.gateway.endpoints.operator import MetricsApi, OperatorApi, UsageApi
from penstock.gateway.endpoints.replies import RepliesApi
from penstock.gateway.endpoints.responses import ResponsesApi
from penstock.gateway.endpoints.state import StateApi
from penstock.gateway.endpoints.stored_chats import StoredChatsApi
from penstock.gateway.endpoints.tokens import TokensApi

PLAIN_APIS: tuple[type[Endpoints], ...] = (
    *(RepliesApi, StoredChatsApi, TokensApi, ResponsesApi, ConversationsApi, ModelsApi, OllamaModelsApi),
    *(LlamaServerApi, EventsApi, UsageApi, OperatorApi),
)
"""The endpoints that are made of a service and its intake alone."""
_APIS = (*PLAIN_APIS, FilesApi, BatchesApi, MessageBatchesApi, StateApi, MetricsApi)
_PAGE = "Give the chat page, or to a client that does not take pages, Ollama's greeting"

OPERATIONS: dict[str, dict[str, Operation]] = {}
"""The operations by path and method."""
for _path, _verb, _operation, _ in (each for api in _APIS for each in served(api)):
    OPERATIONS.setdefault(compile_path(_path)[1], {})[_verb] = _operation
OPERATIONS |= {
    "/openapi.json": {"GET": Operation(ANY, "Give this description", is_open=True)},
    "/": {"GET": Operation(ANY, _PAGE, answers=("text/html", "text/plain"), is_open=True, is_cached=True)},
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

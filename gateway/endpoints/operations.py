"""The table of all routes: the input and output of each, and the replica that gets it."""

from __future__ import annotations

from typing import Any

from penstock.gateway.endpoints.batches import BatchBody, MessageBatchBody
from penstock.gateway.endpoints.conversations import AddBody, CreateBody, UpdateBody
from penstock.gateway.endpoints.cursors import CursorQuery
from penstock.gateway.endpoints.files import FilesQuery, UploadForm
from penstock.gateway.endpoints.operation import (
    EVENTS,
    JSON,
    LINES,
    EventsQuery,
    FollowHeaders,
    FollowQuery,
    IdempotencyHeaders,
    LocateQuery,
    Operation,
    Passing,
    StateQuery,
    UsageQuery,
)
from penstock.gateway.endpoints.stored_chats import ChatsQuery, ChatUpdateBody
from penstock.gateway.sessions.responses.schemas import InputTokensBody, PageQuery, ResponseBody, StreamQuery
from penstock.gateway.wire.anthropic.bodies import CountTokensBody, MessagesBody
from penstock.gateway.wire.decisions import DecisionsBody, SystemOneBody
from penstock.gateway.wire.embeddings import EmbeddingsBody, RerankBody, ScoreBody
from penstock.gateway.wire.llama.bodies import InfillBody, LlamaBody, TemplateBody
from penstock.gateway.wire.ollama.bodies import (
    OllamaChatBody,
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
)
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, DetokenizeBody, LocateBody, TokenizeBody
from penstock.gateway.wire.strict import StrictBody

ANY, OWN, ONCE = Passing.ANY, Passing.OWN, Passing.ONCE
BY_PROMPT, BY_ID, RECORDED = Passing.BY_PROMPT, Passing.BY_ID, Passing.RECORDED

_STREAMED, _LINED = (JSON, EVENTS), (JSON, LINES)
_LIST, _ANY = ("array",), ("object", "array")


def _recorded(summary: str, body: type[StrictBody], answers: tuple[str, ...] = _STREAMED) -> Operation:
    return Operation(BY_PROMPT | RECORDED, summary, body, headers=IdempotencyHeaders, answers=answers)


def _followed(summary: str, answers: tuple[str, ...] = _STREAMED) -> Operation:
    return Operation(
        BY_ID | RECORDED,
        summary,
        query=FollowQuery,
        headers=FollowHeaders,
        answers=answers,
        statuses=(410,),
        is_lookup=True,
    )


def _kept(passing: Passing, summary: str, **details: Any) -> Operation:
    return Operation(passing, summary, is_lookup=True, **details)


def _open(passing: Passing, summary: str, media_type: str = JSON) -> Operation:
    return Operation(passing, summary, answers=(media_type,), is_open=True)


_RERANK = Operation(BY_PROMPT, "Order documents by how like a query they are", RerankBody)
_SCORE = Operation(BY_PROMPT, "Say how alike texts are", ScoreBody)

OPERATIONS: dict[str, dict[str, Operation]] = {
    "/v1/chat/completions": {
        "GET": _kept(ANY, "List stored answers", query=ChatsQuery, statuses=(503,)),
        "POST": _recorded("Answer a conversation, streamed or whole", ChatBody),
    },
    "/v1/chat/completions/render": {
        "POST": Operation(
            ANY,
            "Give a conversation's tokens and sampling parameters, for routers",
            ChatBody,
            statuses=(404, 429),
        )
    },
    "/v1/chat/completions/{id}": {
        "GET": _followed(
            "Show a stored answer, or follow a resumable one, after the event that was seen last"
        ),
        "POST": Operation(BY_ID, "Replace the metadata of a stored answer", ChatUpdateBody),
        "DELETE": Operation(BY_ID, "Forget a stored answer, or stop and forget a resumable one"),
    },
    "/v1/chat/completions/{id}/messages": {
        "GET": _kept(BY_ID, "List the messages that a stored answer is for", query=PageQuery)
    },
    "/v1/completions": {"POST": _recorded("Continue texts, streamed or whole", CompletionBody)},
    "/v1/completions/render": {
        "POST": Operation(
            ANY,
            "Give each prompt's tokens and sampling parameters, for routers",
            CompletionBody,
            statuses=(404, 429),
            json_types=_LIST,
        )
    },
    "/v1/completions/{id}": {
        "GET": _followed("Follow a resumable continuation, after the event that was seen last"),
        "DELETE": Operation(BY_ID, "Stop and forget a resumable continuation"),
    },
    "/v1/decisions": {
        "POST": Operation(BY_PROMPT, "Answer questions about an input with probabilities", DecisionsBody)
    },
    "/v1/systemone": {
        "POST": Operation(BY_PROMPT, "Answer questions about a state with probabilities", SystemOneBody)
    },
    "/v1/embeddings": {"POST": Operation(BY_PROMPT, "Turn texts into vectors", EmbeddingsBody)},
    **{path: {"POST": _RERANK} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{path: {"POST": _SCORE} for path in ("/score", "/v1/score")},
    "/v1/files": {
        "GET": _kept(
            ANY, "List the files that were uploaded or made by batches", query=FilesQuery, statuses=(503,)
        ),
        "POST": Operation(ONCE, "Upload the input of a batch", UploadForm, is_form=True, statuses=(403, 503)),
    },
    "/v1/files/{file_id}": {
        "GET": _kept(BY_ID, "Show a file"),
        "DELETE": Operation(BY_ID, "Forget a file"),
    },
    "/v1/files/{file_id}/content": {
        "GET": _kept(
            BY_ID, "Give the content of a file", answers=("application/octet-stream",), statuses=(410,)
        )
    },
    "/v1/batches": {
        "GET": _kept(ANY, "List batches", query=PageQuery, statuses=(503,)),
        "POST": Operation(ONCE, "Run the requests in a file", BatchBody, statuses=(404, 429, 503)),
    },
    "/v1/batches/{batch_id}": {"GET": _kept(BY_ID, "Show a batch")},
    "/v1/batches/{batch_id}/cancel": {"POST": Operation(BY_ID, "Stop a batch")},
    "/v1/messages": {
        "POST": _recorded("Answer a conversation in Anthropic's format, streamed or whole", MessagesBody)
    },
    "/v1/messages/count_tokens": {
        "POST": Operation(
            ANY, "Count the tokens of such a conversation", CountTokensBody, statuses=(404, 429)
        )
    },
    "/v1/messages/batches": {
        "GET": _kept(ANY, "List batches of messages", query=CursorQuery, statuses=(503,)),
        "POST": Operation(ONCE, "Run requests for messages", MessageBatchBody, statuses=(429, 503)),
    },
    "/v1/messages/batches/{message_batch_id}": {
        "GET": _kept(BY_ID, "Show a batch of messages"),
        "DELETE": Operation(BY_ID, "Forget a batch of messages that has ended"),
    },
    "/v1/messages/batches/{message_batch_id}/cancel": {"POST": Operation(BY_ID, "Stop a batch of messages")},
    "/v1/messages/batches/{message_batch_id}/results": {
        "GET": _kept(
            BY_ID,
            "Give the results of a batch of messages that has ended",
            answers=("application/x-jsonl",),
            statuses=(410,),
        )
    },
    "/v1/messages/{id}": {
        "GET": _followed("Follow a resumable message, after the event that was seen last"),
        "DELETE": Operation(BY_ID, "Stop and forget a resumable message"),
    },
    "/v1/responses": {
        "POST": _recorded("Take a turn of a conversation, waited for or in the background", ResponseBody)
    },
    "/v1/responses/input_tokens": {
        "POST": Operation(ANY, "Count the tokens of a turn", InputTokensBody, statuses=(404, 429, 503))
    },
    "/v1/responses/{id}": {
        "GET": _kept(
            BY_ID | RECORDED,
            "Show a response as it is now, or its events",
            query=StreamQuery,
            answers=_STREAMED,
            statuses=(410,),
        ),
        "DELETE": Operation(BY_ID, "End and forget a response"),
    },
    "/v1/responses/{id}/cancel": {"POST": Operation(BY_ID, "End a response in the background")},
    "/v1/responses/{id}/input_items": {
        "GET": _kept(BY_ID, "List what a response was given", query=PageQuery)
    },
    "/v1/conversations": {
        "GET": _kept(ANY, "List the caller's conversations", query=PageQuery, statuses=(503,)),
        "POST": Operation(ONCE, "Begin a conversation", CreateBody, statuses=(503,)),
    },
    "/v1/conversations/{conversation_id}": {
        "GET": _kept(BY_ID, "Show a conversation"),
        "POST": Operation(BY_ID, "Replace the metadata of a conversation", UpdateBody),
        "DELETE": Operation(BY_ID, "Forget a conversation"),
    },
    "/v1/conversations/{conversation_id}/items": {
        "GET": _kept(BY_ID, "List the messages of a conversation", query=PageQuery),
        "POST": Operation(BY_ID | ONCE, "Add messages to a conversation", AddBody),
    },
    "/v1/conversations/{conversation_id}/items/{item_id}": {
        "GET": _kept(BY_ID, "Show a message"),
        "DELETE": Operation(BY_ID, "Forget a message"),
    },
    "/api/chat": {
        "POST": _recorded(
            "Answer a conversation in Ollama's format, streamed or whole", OllamaChatBody, answers=_LINED
        )
    },
    "/api/generate": {
        "POST": _recorded(
            "Answer a prompt in Ollama's format, streamed or whole", OllamaGenerateBody, answers=_LINED
        )
    },
    **{
        f"/api/{name}/{{id}}": {
            "GET": _followed("Follow a resumable answer, after the line that was seen last", _LINED),
            "DELETE": Operation(BY_ID, "Stop and forget a resumable answer"),
        }
        for name in ("chat", "generate")
    },
    "/api/embed": {
        "POST": Operation(BY_PROMPT, "Turn texts into vectors, for Ollama's clients", OllamaEmbedBody)
    },
    "/api/embeddings": {
        "POST": Operation(
            BY_PROMPT, "Turn a text into a vector, for Ollama's older clients", OllamaEmbeddingBody
        )
    },
    "/api/tags": {"GET": Operation(ANY, "List the names of the model, for Ollama's clients")},
    "/api/ps": {"GET": Operation(ANY, "List the same as loaded, for Ollama's clients")},
    "/api/show": {
        "POST": Operation(ANY, "Show the model, for Ollama's clients", OllamaShowBody, statuses=(404,))
    },
    "/api/pull": {
        "POST": Operation(
            ANY, "Report that a model is there", OllamaPullBody, answers=_LINED, statuses=(404,)
        )
    },
    "/api/create": {
        "POST": Operation(
            ANY,
            "Report that a model is there; none is made of it",
            OllamaCreateBody,
            answers=_LINED,
            statuses=(404,),
        )
    },
    "/api/copy": {
        "POST": Operation(ANY, "Report that both names are the model's", OllamaCopyBody, statuses=(404,))
    },
    "/api/version": {"GET": _open(ANY, "Say the version of Ollama whose API this is")},
    "/completion": {
        "POST": Operation(
            BY_PROMPT,
            "Continue texts, for llama.cpp's clients",
            LlamaBody,
            answers=_STREAMED,
            json_types=_ANY,
        )
    },
    "/infill": {
        "POST": Operation(
            BY_PROMPT,
            "Fill in the text between two others, for llama.cpp's clients",
            InfillBody,
            answers=_STREAMED,
            json_types=_ANY,
        )
    },
    "/apply-template": {
        "POST": Operation(ANY, "Give the text of a conversation", TemplateBody, statuses=(404, 429))
    },
    "/props": {"GET": Operation(ANY, "Say what llama.cpp's clients ask of a server")},
    "/slots": {"GET": Operation(ANY, "List the caller's generations, as llama.cpp does", json_types=_LIST)},
    "/v1/models": {
        "GET": Operation(ANY, "List the names of the model, in Anthropic's format to its clients")
    },
    "/v1/models/{name}": {"GET": Operation(ANY, "Show the model under one of its names", statuses=(404,))},
    "/tokenize": {
        "POST": Operation(ANY, "Give the tokens of a text or of messages", TokenizeBody, statuses=(404, 429))
    },
    "/detokenize": {"POST": Operation(ANY, "Give the text of tokens", DetokenizeBody, statuses=(404, 429))},
    "/v1/prefixes": {"GET": _kept(ANY, "List the prefixes that are cached")},
    "/v1/prefixes/locate": {
        "GET": Operation(ANY, "Say which replica is warm for a prompt", query=LocateQuery, statuses=(429,)),
        "POST": Operation(ANY, "Say which replica is warm for a prompt", LocateBody, statuses=(429,)),
    },
    "/v1/prefixes/events": {
        "GET": Operation(
            ANY, "Tell of blocks as they are stored and removed", answers=(EVENTS,), statuses=(429,)
        )
    },
    "/internal/state": {
        "GET": Operation(
            OWN,
            "Tell a switch of the state of a replica",
            query=StateQuery,
            answers=(LINES,),
            statuses=(503,),
        )
    },
    "/v1/events": {
        "GET": Operation(
            ANY,
            "Tell of the server's state; of a request that waits; in detail, of steps, KV blocks and tenants",
            query=EventsQuery,
            answers=(EVENTS,),
            statuses=(429,),
        )
    },
    "/v1/usage": {
        "GET": Operation(
            ANY,
            "Say what tenants used of their limits, and what is left",
            query=UsageQuery,
            statuses=(404,),
        )
    },
    "/health": {
        "GET": Operation(
            OWN,
            "Red means: restart this process; with --health ready, what /ready says",
            is_open=True,
            is_probe=True,
        )
    },
    "/ready": {"GET": Operation(OWN, "Red means: send requests elsewhere", is_open=True, is_probe=True)},
    "/ping": {"GET": Operation(OWN, "Say what /health says, for SageMaker", is_open=True, is_probe=True)},
    "/server_info": {"GET": Operation(ANY, "Show the server's settings to its operator", statuses=(403,))},
    "/load": {"GET": _open(ANY, "Say how many requests wait or run")},
    "/version": {"GET": _open(ANY, "Say the version of Penstock")},
    "/metrics": {"GET": _open(OWN, "Give the metrics, for Prometheus", "text/plain")},
    "/openapi.json": {"GET": _open(ANY, "Give this description")},
    "/": {
        "GET": Operation(
            ANY,
            "Give the chat page, or to a client that does not take pages, Ollama's greeting",
            answers=("text/html", "text/plain"),
            is_open=True,
            is_cached=True,
        )
    },
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
"""The operations by path and method."""

"""What every route takes and answers, as the types that its handler checks with or makes, and who gets its requests."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from gateway.endpoints import answers
from gateway.endpoints.batches import BatchBody
from gateway.endpoints.conversations import AddBody, CreateBody, UpdateBody
from gateway.endpoints.files import FilesQuery, UploadForm
from gateway.endpoints.operation import (
    EventsQuery,
    FollowHeaders,
    FollowQuery,
    IdempotencyHeaders,
    LocateQuery,
    Operation,
    Passing,
    StateQuery,
)
from gateway.http.refusals import OVERLOADED
from gateway.sessions.responses.objects import Item
from gateway.sessions.responses.schemas import PageQuery, ResponseBody, StreamQuery
from gateway.wire.anthropic.bodies import CountTokensBody, MessagesBody
from gateway.wire.embeddings import EmbeddingsBody, RerankBody, ScoreBody
from gateway.wire.ollama.bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from gateway.wire.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LocateBody,
    TokenizeBody,
)

ANY, OWN, ONCE = Passing.ANY, Passing.OWN, Passing.ONCE
BY_PROMPT, BY_ID, RECORDED = Passing.BY_PROMPT, Passing.BY_ID, Passing.RECORDED
_WORK = (403, 404, 429, 503)
"""Statuses of refused work: no such tier or model, no room now."""

_CHAT_EVENTS = {"": answers.ChatChunk | answers.Error}
_TEXT_EVENTS = {"": answers.TextChunk | answers.Error}


def _by_type(*kinds: Any) -> dict[str, Any]:
    """Events, by their names."""
    return {name: kind for kind in kinds for name in get_args(get_type_hints(kind)["type"])}


_RESPONSE_EVENTS = _by_type(*answers.RESPONSE_EVENTS)

_RERANK = Operation(
    BY_PROMPT,
    summary="Order documents by how like a query they are",
    body=RerankBody,
    answer=answers.Reranked,
    statuses=_WORK,
)
_SCORE = Operation(
    BY_PROMPT, summary="How alike texts are", body=ScoreBody, answer=answers.Scores, statuses=_WORK
)

OPERATIONS: dict[str, dict[str, Operation]] = {
    "/v1/chat/completions": {
        "POST": Operation(
            BY_PROMPT | RECORDED,
            summary="Answer a conversation, streamed or whole",
            body=ChatBody,
            headers=IdempotencyHeaders,
            answer=answers.ChatCompletion,
            events=_CHAT_EVENTS,
            statuses=(*_WORK, 409),
        )
    },
    "/v1/chat/completions/{id}": {
        "GET": Operation(
            BY_ID | RECORDED,
            summary="Follow a resumable answer, after the event that was seen last",
            query=FollowQuery,
            headers=FollowHeaders,
            answer=answers.ChatCompletion,
            events=_CHAT_EVENTS,
            statuses=(404, 410, 429, 503),
        ),
        "DELETE": Operation(
            BY_ID,
            summary="Stop and forget a resumable answer",
            answer=answers.ChatDeleted,
            statuses=(404, 503),
        ),
    },
    "/v1/completions": {
        "POST": Operation(
            BY_PROMPT | RECORDED,
            summary="Continue texts, streamed or whole",
            body=CompletionBody,
            headers=IdempotencyHeaders,
            answer=answers.TextCompletion,
            events=_TEXT_EVENTS,
            statuses=(*_WORK, 409),
        )
    },
    "/v1/completions/{id}": {
        "GET": Operation(
            BY_ID | RECORDED,
            summary="Follow a resumable continuation, after the event that was seen last",
            query=FollowQuery,
            headers=FollowHeaders,
            answer=answers.TextCompletion,
            events=_TEXT_EVENTS,
            statuses=(404, 410, 429, 503),
        ),
        "DELETE": Operation(
            BY_ID,
            summary="Stop and forget a resumable continuation",
            answer=answers.TextDeleted,
            statuses=(404, 503),
        ),
    },
    "/v1/embeddings": {
        "POST": Operation(
            BY_PROMPT,
            summary="Turn texts into vectors",
            body=EmbeddingsBody,
            answer=answers.Embeddings,
            statuses=_WORK,
        )
    },
    **{path: {"POST": _RERANK} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{path: {"POST": _SCORE} for path in ("/score", "/v1/score")},
    "/v1/files": {
        "GET": Operation(
            ANY,
            summary="Files that were uploaded, and those that batches made",
            query=FilesQuery,
            answer=answers.FilePage,
            statuses=(503,),
        ),
        "POST": Operation(
            ONCE,
            summary="Upload the input of a batch",
            body=UploadForm,
            is_form=True,
            answer=answers.File,
            statuses=(403, 503),
        ),
    },
    "/v1/files/{file_id}": {
        "GET": Operation(BY_ID, summary="One of them", answer=answers.File, statuses=(404, 503)),
        "DELETE": Operation(BY_ID, summary="Forget a file", answer=answers.FileDeleted, statuses=(404, 503)),
    },
    "/v1/files/{file_id}/content": {
        "GET": Operation(
            BY_ID, summary="What is in it", media_type="application/octet-stream", statuses=(404, 410, 503)
        )
    },
    "/v1/batches": {
        "GET": Operation(ANY, summary="Batches", query=PageQuery, answer=answers.BatchPage, statuses=(503,)),
        "POST": Operation(
            ONCE,
            summary="Run the requests in a file",
            body=BatchBody,
            answer=answers.Batch,
            statuses=(404, 429, 503),
        ),
    },
    "/v1/batches/{batch_id}": {
        "GET": Operation(BY_ID, summary="One of them", answer=answers.Batch, statuses=(404, 503))
    },
    "/v1/batches/{batch_id}/cancel": {
        "POST": Operation(BY_ID, summary="Stop a batch", answer=answers.Batch, statuses=(404, 503))
    },
    "/v1/messages": {
        "POST": Operation(
            BY_PROMPT,
            summary="Answer a conversation in Anthropic's format, streamed or whole",
            body=MessagesBody,
            answer=answers.AnthropicMessage,
            events=_by_type(*answers.MESSAGE_EVENTS),
            error=answers.AnthropicError,
            statuses=(403, 404, 429, OVERLOADED),
        )
    },
    "/v1/messages/count_tokens": {
        "POST": Operation(
            ANY,
            summary="How many tokens such a conversation has",
            body=CountTokensBody,
            answer=answers.InputTokens,
            error=answers.AnthropicError,
            statuses=(404,),
        )
    },
    "/v1/responses": {
        "POST": Operation(
            BY_PROMPT | RECORDED,
            summary="A turn of a conversation, waited for or in the background",
            body=ResponseBody,
            headers=IdempotencyHeaders,
            answer=answers.Response,
            events=_RESPONSE_EVENTS,
            statuses=(*_WORK, 409),
        )
    },
    "/v1/responses/{id}": {
        "GET": Operation(
            BY_ID | RECORDED,
            summary="A response as it is now, or its events",
            query=StreamQuery,
            answer=answers.Response,
            events=_RESPONSE_EVENTS,
            statuses=(404, 410, 503),
        ),
        "DELETE": Operation(
            BY_ID, summary="End and forget a response", answer=answers.ResponseDeleted, statuses=(404, 503)
        ),
    },
    "/v1/responses/{id}/cancel": {
        "POST": Operation(
            BY_ID, summary="End a response in the background", answer=answers.Response, statuses=(404, 503)
        )
    },
    "/v1/responses/{id}/input_items": {
        "GET": Operation(
            BY_ID,
            summary="What a response was given",
            query=PageQuery,
            answer=answers.ItemPage,
            statuses=(404, 503),
        )
    },
    "/v1/conversations": {
        "GET": Operation(
            ANY,
            summary="The caller's conversations",
            query=PageQuery,
            answer=answers.ConversationPage,
            statuses=(503,),
        ),
        "POST": Operation(
            ONCE, summary="A new conversation", body=CreateBody, answer=answers.Conversation, statuses=(503,)
        ),
    },
    "/v1/conversations/{conversation_id}": {
        "GET": Operation(BY_ID, summary="One conversation", answer=answers.Conversation, statuses=(404, 503)),
        "POST": Operation(
            BY_ID,
            summary="Replace the metadata",
            body=UpdateBody,
            answer=answers.Conversation,
            statuses=(404, 503),
        ),
        "DELETE": Operation(
            BY_ID, summary="Forget a conversation", answer=answers.ConversationDeleted, statuses=(404, 503)
        ),
    },
    "/v1/conversations/{conversation_id}/items": {
        "GET": Operation(
            BY_ID, summary="Its messages", query=PageQuery, answer=answers.ItemPage, statuses=(404, 503)
        ),
        "POST": Operation(
            BY_ID | ONCE, summary="Add messages", body=AddBody, answer=answers.ItemPage, statuses=(404, 503)
        ),
    },
    "/v1/conversations/{conversation_id}/items/{item_id}": {
        "GET": Operation(BY_ID, summary="One message", answer=Item, statuses=(404, 503)),
        "DELETE": Operation(
            BY_ID, summary="Forget a message", answer=answers.Conversation, statuses=(404, 503)
        ),
    },
    "/api/chat": {
        "POST": Operation(
            BY_PROMPT,
            summary="Answer a conversation in Ollama's format, streamed or whole",
            body=OllamaChatBody,
            answer=answers.OllamaChat,
            lines=answers.OllamaChat | answers.OllamaError,
            error=answers.OllamaError,
            statuses=_WORK,
        )
    },
    "/api/generate": {
        "POST": Operation(
            BY_PROMPT,
            summary="Answer a prompt in Ollama's format, streamed or whole",
            body=OllamaGenerateBody,
            answer=answers.OllamaText,
            lines=answers.OllamaText | answers.OllamaError,
            error=answers.OllamaError,
            statuses=_WORK,
        )
    },
    "/api/embed": {
        "POST": Operation(
            BY_PROMPT,
            summary="Turn texts into vectors, for Ollama's clients",
            body=OllamaEmbedBody,
            answer=answers.OllamaEmbeddings,
            error=answers.OllamaError,
            statuses=_WORK,
        )
    },
    "/api/embeddings": {
        "POST": Operation(
            BY_PROMPT,
            summary="Turn a text into a vector, for Ollama's older clients",
            body=OllamaEmbeddingBody,
            answer=answers.OllamaEmbedding,
            error=answers.OllamaError,
            statuses=_WORK,
        )
    },
    "/api/tags": {
        "GET": Operation(
            ANY,
            summary="The names of the model, for Ollama's clients",
            answer=answers.OllamaModels,
            error=answers.OllamaError,
        )
    },
    "/api/ps": {
        "GET": Operation(
            ANY,
            summary="The same: it is always loaded",
            answer=answers.OllamaLoadedModels,
            error=answers.OllamaError,
        )
    },
    "/api/show": {
        "POST": Operation(
            ANY,
            summary="One of them",
            body=OllamaShowBody,
            answer=answers.OllamaShown,
            error=answers.OllamaError,
            statuses=(404,),
        )
    },
    "/api/version": {
        "GET": Operation(
            ANY,
            summary="The version of Ollama whose API this is",
            answer=answers.Version,
            error=answers.OllamaError,
            is_open=True,
        )
    },
    "/v1/models": {"GET": Operation(ANY, summary="The names of the model", answer=answers.Models)},
    "/v1/models/{name}": {
        "GET": Operation(ANY, summary="One of them", answer=answers.Model, statuses=(404,))
    },
    "/tokenize": {
        "POST": Operation(
            ANY,
            summary="The tokens of a text or of messages",
            body=TokenizeBody,
            answer=answers.Tokens,
            statuses=(404,),
        )
    },
    "/detokenize": {
        "POST": Operation(
            ANY, summary="The text of tokens", body=DetokenizeBody, answer=answers.Text, statuses=(404,)
        )
    },
    "/v1/prefixes": {"GET": Operation(ANY, summary="Prefixes that are cached", answer=answers.Prefixes)},
    "/v1/prefixes/locate": {
        "GET": Operation(
            ANY, summary="Which replica is warm for a prompt", query=LocateQuery, answer=answers.Location
        ),
        "POST": Operation(
            ANY, summary="Which replica is warm for a prompt", body=LocateBody, answer=answers.Location
        ),
    },
    "/v1/prefixes/events": {
        "GET": Operation(
            ANY,
            summary="Blocks as they are stored and removed",
            events={"stored": answers.Blocks, "removed": answers.Blocks},
        )
    },
    "/internal/state": {
        "GET": Operation(
            OWN,
            summary="What a replica says of itself to its switches",
            query=StateQuery,
            lines=dict[str, Any],
            statuses=(503,),
        )
    },
    "/v1/events": {
        "GET": Operation(
            ANY,
            summary="The state of the server; of a request that waits; in detail, of its steps and KV blocks",
            query=EventsQuery,
            events={
                "server": answers.ServerStatus,
                "request": answers.QueueStatus,
                "steps": answers.StepsStatus,
                "kv": answers.BlocksStatus,
            },
        )
    },
    "/health": {
        "GET": Operation(
            OWN,
            summary="Red means: restart this process",
            answer=answers.Health,
            unavailable=answers.Health,
            statuses=(503,),
            is_open=True,
        )
    },
    "/ready": {
        "GET": Operation(
            OWN,
            summary="Red means: send requests elsewhere",
            answer=answers.Readiness,
            unavailable=answers.Readiness,
            statuses=(503,),
            is_open=True,
        )
    },
    "/load": {
        "GET": Operation(ANY, summary="How many requests wait or run", answer=answers.Load, is_open=True)
    },
    "/version": {"GET": Operation(ANY, summary="Penstock's version", answer=answers.Version, is_open=True)},
    "/metrics": {"GET": Operation(OWN, summary="For Prometheus", media_type="text/plain", is_open=True)},
    "/openapi.json": {"GET": Operation(ANY, summary="This document", answer=dict[str, Any], is_open=True)},
    "/": {"GET": Operation(ANY, summary="The chat page", media_type="text/html", is_open=True, cached=True)},
    "/static/{path}": {
        "GET": Operation(
            ANY, summary="Its files", media_type="*/*", statuses=(404,), cached=True, is_open=True
        )
    },
}

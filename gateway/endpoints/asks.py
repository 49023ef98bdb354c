"""The translation of bodies: the function that makes an Ask of each kind, for replicas and switches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.gateway.limits import Limits
from penstock.gateway.sessions.responses.objects import turn_ask
from penstock.gateway.sessions.responses.schemas import InputTokensBody, ResponseBody
from penstock.gateway.wire import decisions, embeddings, schemas
from penstock.gateway.wire.anthropic import bodies as anthropic
from penstock.gateway.wire.ask import Ask, chat_ask, completion_ask
from penstock.gateway.wire.llama import bodies as llama
from penstock.gateway.wire.ollama import bodies as ollama
from penstock.gateway.wire.strict import Body, StrictBody, read

_TRANSLATORS: Mapping[type[StrictBody], Callable[[Any, Limits], Ask]] = {
    schemas.ChatBody: chat_ask,
    schemas.CompletionBody: completion_ask,
    ResponseBody: turn_ask,
    InputTokensBody: turn_ask,
    anthropic.MessagesBody: anthropic.message_ask,
    anthropic.CountTokensBody: anthropic.message_ask,
    ollama.OllamaChatBody: ollama.ollama_chat_ask,
    ollama.OllamaGenerateBody: ollama.prompt_ask,
    ollama.OllamaEmbedBody: ollama.embed_ask,
    ollama.OllamaEmbeddingBody: ollama.embedding_ask,
    llama.LlamaBody: llama.llama_ask,
    llama.InfillBody: llama.infill_ask,
    llama.TemplateBody: chat_ask,
    embeddings.EmbeddingsBody: embeddings.embeddings_ask,
    embeddings.RerankBody: embeddings.rerank_ask,
    embeddings.ScoreBody: embeddings.score_ask,
    decisions.DecisionsBody: decisions.decisions_ask,
    decisions.SystemOneBody: decisions.system_ask,
}


def read_ask(
    kind: type[Body],
    values: Mapping[str, object],
    limits: Limits,
    ignore: Callable[[str], None] = lambda _: None,
) -> tuple[Body, Ask]:
    """Returns a checked body, and its translation; raises 400 that names the first field that is wrong."""
    body = read(kind, values, limits, ignore)
    ask = _TRANSLATORS[kind](body, limits)
    for field in ask.ignored:
        ignore(field)
    return body, ask

"""Arrivals: requests for the model, read and translated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.planning.grammar import CompiledGrammar
from penstock.engine.planning.thinking import ThinkingBudget
from penstock.gateway.access.keys import Client
from penstock.gateway.http.limits import Limits
from penstock.gateway.sessions.responses import asks as responses
from penstock.gateway.sessions.responses.schemas import ResponseBody
from penstock.gateway.wire import decisions, embeddings, schemas, translation
from penstock.gateway.wire.anthropic import bodies as anthropic
from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.ollama import bodies as ollama
from penstock.gateway.wire.reading import PLAIN, Reading
from penstock.gateway.wire.strict import Body, StrictBody, read
from penstock.priority.lanes import Tenant, Urgency

_TRANSLATORS: Mapping[type[StrictBody], Callable[[Any, Limits], Ask]] = {
    schemas.ChatBody: translation.chat_ask,
    schemas.CompletionBody: translation.completion_ask,
    ResponseBody: responses.turn_ask,
    responses.InputTokensBody: responses.turn_ask,
    anthropic.MessagesBody: anthropic.message_ask,
    anthropic.CountTokensBody: anthropic.message_ask,
    ollama.OllamaChatBody: ollama.ollama_chat_ask,
    ollama.OllamaGenerateBody: ollama.prompt_ask,
    ollama.OllamaEmbedBody: ollama.embed_ask,
    ollama.OllamaEmbeddingBody: ollama.embedding_ask,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that was read and translated."""

    at_s: float
    client: Client
    body: Any
    ask: Ask
    num_bytes: int
    """The size of the body as it was sent."""
    urgency: Urgency
    is_recorded: bool = False
    """Whether the reply is recorded as a whole, even if it is streamed."""

    @property
    def tenant(self) -> Tenant:
        return self.client.tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """The formats in which the answers to one prompt are read, and the bounds on their text."""

    reading: Reading = PLAIN
    grammar: CompiledGrammar | None = None
    """The grammar that each answer has to match."""
    thinking: ThinkingBudget | None = None
    """The bound on the reasoning of each answer."""


FREE = Guidance()

"""Reads of a request what the choice of a replica goes by: lane, tenant, and the hashes of its prompt's blocks.

The prompt is made by the code that makes it in a replica. Where that cannot be done, since a body is wrong or a thread
is known to its owner alone, the request has no hashes; a replica will say what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.engine.planning.prefix_index import extend_hashes
from penstock.engine.planning.request import Pooling
from penstock.gateway.endpoints.params import salt_of
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.http.errors import ApiError
from penstock.gateway.http.limits import Limits
from penstock.gateway.http.off_loop import FairThreads, off_loop
from penstock.gateway.sessions.owners import tag_in
from penstock.gateway.sessions.responses.objects import as_messages, input_items
from penstock.gateway.sessions.responses.schemas import ResponseBody
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.wire.anthropic.bodies import MessagesBody, as_chat
from penstock.gateway.wire.decisions import (
    DecidedBody,
    Decisions,
    DecisionsBody,
    SystemOneBody,
    understand_decisions,
    understand_system,
)
from penstock.gateway.wire.embeddings import Embedded, EmbeddingsBody, RerankBody, ScoreBody
from penstock.gateway.wire.lanes import Slo, urgency_of
from penstock.gateway.wire.llama.bodies import InfillBody, LlamaBody
from penstock.gateway.wire.ollama.bodies import (
    EmbeddingAsked,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OllamaGenerateBody,
    Understood,
    understand_chat,
    understand_embed,
    understand_embedding,
    understand_prompt,
)
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, Sampled
from penstock.gateway.wire.strict import StrictBody, read
from penstock.priority.lanes import Lane, LanePolicy, Tenant
from penstock.priority.routing.router import RouteQuery

_CHARS_PER_TOKEN = 4
"""The assumed length of a token where only the length of a body is known."""

_WAITING_BYTES = 64 * 1024 * 1024
"""The bytes of one tenant's texts that may wait to be tokenised; a request beyond them goes on without hashes."""

_UNDERSTAND: dict[type[StrictBody], Callable[[Any, Limits], object]] = {
    DecisionsBody: understand_decisions,
    SystemOneBody: understand_system,
    MessagesBody: as_chat,
    OllamaChatBody: understand_chat,
    OllamaGenerateBody: understand_prompt,
    OllamaEmbedBody: understand_embed,
    OllamaEmbeddingBody: understand_embedding,
}
"""The functions that turn bodies of other APIs into OpenAI's."""

Body = Mapping[str, Any]


class QueryReader:
    """Reads the requests for one model."""

    def __init__(self, prompts: Prompts, block_size: int, limits: Limits, pooling: Pooling) -> None:
        """`pooling` is how the model's embeddings are made."""
        self._prompts = prompts
        self._block_size = block_size
        self._limits = limits
        self._pooling = pooling
        self._threads = FairThreads(2, _WAITING_BYTES)

    async def read(
        self,
        kind: type[StrictBody],
        body: Body,
        num_bytes: int,
        tenant: Tenant,
        slo: Slo,
        policies: Mapping[Lane, LanePolicy],
    ) -> RouteQuery:
        """
        Args:
            kind: the body's type, that of an operation that is passed on by its prompt.
            num_bytes: of the body.
            policies: those of the replicas.

        Raises:
            ApiError: 400 or 403, for a lane or a promise that the tenant may not have.
        """
        asked: object = None
        prompts: list[list[int]] = []
        try:
            understood = await off_loop(num_bytes, self._understood, kind, body)
            asked = _body_of(understood)
            prompting = Prompting(self._prompts, self._limits, self._threads, tenant.name)
            prompts = await self._encode(understood, prompting)
        except (ApiError, RecursionError):  # the replica will say so
            pass
        tier = asked.service_tier if isinstance(asked, Sampled | Embedded | DecidedBody) else None
        streams = isinstance(asked, Sampled) and bool(asked.stream)
        urgency = urgency_of(tier, tenant, streams=streams, slo=slo, policies=policies)
        num_prompt = sum(map(len, prompts)) or max(1, num_bytes // _CHARS_PER_TOKEN)
        is_shared = isinstance(asked, Sampled | DecidedBody) or self._pooling is Pooling.LAST
        hashes = await self._hashes(max(prompts, key=len), asked, tenant) if prompts and is_shared else []
        return RouteQuery(
            lane=urgency.lane,
            tried=urgency.tried,
            ttft_s=urgency.ttft_s,
            tenant=tenant.name,
            num_prompt=num_prompt,
            hashes=hashes,
        )

    async def _hashes(self, prompt: list[int], asked: object, tenant: Tenant) -> list[bytes]:
        """Returns the hashes of a prompt's blocks but for that of the last token, which is computed in any case."""
        hashes: list[bytes] = []
        num_blocks, salt = (len(prompt) - 1) // self._block_size, self._salt(asked, tenant)
        size = _CHARS_PER_TOKEN * len(prompt)
        await off_loop(size, extend_hashes, hashes, prompt, num_blocks, self._block_size, salt)
        return hashes

    def _understood(self, kind: type[StrictBody], body: Body) -> object:
        asked = read(kind, body, self._limits)
        return _UNDERSTAND[kind](asked, self._limits) if kind in _UNDERSTAND else asked

    async def _encode(self, asked: object, prompting: Prompting) -> list[list[int]]:
        """Returns the prompts of a request; none if it asks for nothing, or goes on from what its owner alone knows."""
        match asked:
            case ChatBody():
                return [(await prompting.conversation(asked))[0]]
            case Understood(chat=ChatBody() as chat, raw=None, context=before):
                return [(await prompting.conversation(chat, before))[0]]
            case Understood(chat=ChatBody(), raw=str() as text, suffix=suffix):
                return [await prompting.encode_text(text, "prompt", suffix=suffix or "")]
            case InfillBody():
                return [await prompting.infill(asked)]
            case LlamaBody():
                return await prompting.encode_prompts(asked, parse_special=True)
            case CompletionBody():
                return await prompting.encode_prompts(asked)
            case ResponseBody(previous_response_id=None, conversation=None):
                return [await prompting.turn(asked)(Thread(), as_messages(input_items(asked.input)))]
            case Decisions():
                shared, rests = await prompting.branched(asked)
                return [shared + rests[0], *rests[1:]]
            case EmbeddingsBody():
                return await prompting.encode_inputs(asked)
            case RerankBody():
                return await prompting.encode_texts([asked.query, *asked.texts], "documents", asked)
            case ScoreBody():
                first, second = asked.sides()
                return await prompting.encode_texts([*first, *second], "text_1", asked)
            case EmbeddingAsked():
                return await prompting.encode_texts(asked.texts, "input", Embedded(model=asked.model))
        return []

    def _salt(self, asked: object, tenant: Tenant) -> bytes:
        if isinstance(asked, Sampled):
            return salt_of(tenant, is_private=asked.store is False, asked=asked.cache_salt)
        return salt_of(tenant)


def _body_of(understood: object) -> object:
    """The body that says who asks for which lane."""
    if isinstance(understood, Understood):
        return understood.chat
    return understood.body if isinstance(understood, Decisions) else understood


def owner_tag(body: Body) -> str | None:
    """Returns the tag of the replica that has what a new response goes on from; None if it goes on from nothing."""
    for name in ("previous_response_id", "conversation"):
        given = body.get(name)
        given = given.get("id") if isinstance(given, dict) else given
        if isinstance(given, str) and (tag := tag_in(given)) is not None:
            return tag
    return None

"""What the choice of a replica has to know of a request: lane, tenant, and the hashes of its prompt's blocks.

The prompt is made as a replica makes it. Where that cannot be done, since a body is wrong or a thread is known to its
owner alone, the request has no hashes; a replica will say what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.planning.prefix_index import extend_hashes
from gateway.endpoints.intake import salt_of
from gateway.endpoints.prompting import truncated
from gateway.http.errors import ApiError
from gateway.http.limits import Limits
from gateway.sessions.owners import tag_in
from gateway.sessions.responses.objects import as_messages, input_items, response_tools
from gateway.sessions.responses.schemas import ResponseBody
from gateway.sessions.responses.threads import Thread, extend
from gateway.wire.anthropic.bodies import MessagesBody, as_chat
from gateway.wire.conversation import as_dict, chat_tools
from gateway.wire.embeddings import EmbeddingsBody, RerankBody, ScoreBody
from gateway.wire.ollama.bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OllamaGenerateBody,
    understand_chat,
    understand_prompt,
)
from gateway.wire.prompts import Prompts
from gateway.wire.sampling import lane_of
from gateway.wire.schemas import ChatBody, CompletionBody, read
from priority.lanes import Tenant
from priority.routing.router import Ask

_EMBEDDED = (EmbeddingsBody, RerankBody, ScoreBody, OllamaEmbedBody, OllamaEmbeddingBody)
_CHARS_PER_TOKEN = 4
"""Where only the length of a body is known."""

Body = Mapping[str, Any]


class Asks:
    """For one model."""

    def __init__(self, prompts: Prompts, block_size: int, limits: Limits) -> None:
        self._prompts = prompts
        self._block_size = block_size
        self._limits = limits
        self._readers: dict[object, Callable[[Body], tuple[Any, Sequence[int]]]] = {
            ChatBody: lambda body: self._chat(read(ChatBody, body, limits)),
            CompletionBody: self._completion,
            ResponseBody: self._response,
            MessagesBody: lambda body: self._chat(as_chat(read(MessagesBody, body, limits), limits)),
            OllamaChatBody: lambda body: self._ollama(
                understand_chat(read(OllamaChatBody, body, limits), limits)
            ),
            OllamaGenerateBody: lambda body: self._ollama(
                understand_prompt(read(OllamaGenerateBody, body, limits), limits)
            ),
            **dict.fromkeys(_EMBEDDED, lambda _: (None, ())),
        }

    def read(self, kind: object, body: Body, num_bytes: int, tenant: Tenant) -> Ask:
        """
        Args:
            kind: the body's type, that of an operation that is passed on by its prompt.
            num_bytes: of the body.

        Raises:
            ApiError: 403, for a lane that the tenant may not use.
        """
        try:
            asked, token_ids = self._readers[kind](body)
        except (ApiError, RecursionError):
            asked, token_ids = None, ()
        lane = tenant.default_lane if asked is None else lane_of(asked.service_tier, tenant)
        if not token_ids:
            num_prompt = max(1, num_bytes // _CHARS_PER_TOKEN)
            return Ask(lane=lane, tenant=tenant.name, num_prompt=num_prompt)
        salt = salt_of(tenant, is_private=asked.store is False, asked=asked.cache_salt)
        hashes: list[bytes] = []
        # The block of the last token is computed in any case.
        num_blocks = (len(token_ids) - 1) // self._block_size
        extend_hashes(hashes, token_ids, num_blocks, self._block_size, salt)
        return Ask(lane=lane, tenant=tenant.name, num_prompt=len(token_ids), hashes=hashes)

    def _chat(self, body: ChatBody) -> tuple[ChatBody, list[int]]:
        continues = bool(body.continue_final_message)
        prompt = self._prompts.chat(
            [as_dict(message) for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continues=continues,
            tools=chat_tools(body).tools,
            variables=body.chat_template_kwargs,
        )
        return body, truncated(prompt, body)

    def _completion(self, given: Body) -> tuple[CompletionBody, list[int]]:
        """By the first of its prompts."""
        body = read(CompletionBody, given, self._limits)
        first = body.prompt if isinstance(body.prompt, str) else body.prompt[0] if body.prompt else ""
        if isinstance(first, int):
            return body, truncated([token_id for token_id in body.prompt if isinstance(token_id, int)], body)
        if isinstance(first, list):
            return body, truncated(first, body)
        if body.suffix:
            return body, self._prompts.around(first, body.suffix)
        prompt = self._prompts.text(first, add_special=body.add_special_tokens is not False)
        return body, truncated(prompt, body)

    def _response(self, given: Body) -> tuple[ResponseBody, list[int]]:
        body = read(ResponseBody, given, self._limits)
        if body.previous_response_id is not None or body.conversation is not None:
            return body, []
        messages = as_messages(input_items(body.input))
        return body, extend(
            self._prompts,
            Thread(),
            messages,
            instructions=body.instructions,
            tools=response_tools(body).tools,
            variables=body.chat_template_kwargs,
        )

    def _ollama(self, asked: Any) -> tuple[ChatBody | None, list[int]]:
        if asked.chat is None:
            return None, []
        if asked.raw is not None:
            return asked.chat, self._prompts.text(asked.raw)
        return self._chat(asked.chat)


def owner_tag(body: Body) -> str | None:
    """The tag of the replica that has what a new response goes on from; None if it goes on from nothing."""
    for name in ("previous_response_id", "conversation"):
        given = body.get(name)
        given = given.get("id") if isinstance(given, dict) else given
        if isinstance(given, str) and (tag := tag_in(given)) is not None:
            return tag
    return None

"""Reads the facts of a request by which a replica is chosen: lane, tenant, and the hashes of its prompt's blocks.

The prompt is made by the code that makes it in a replica. Where that cannot be done, since a body is wrong or a thread
is known to its owner alone, the request has no hashes; a replica will say what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.engine.planning.params import Pooling
from penstock.engine.planning.prefix_index import PRIVATE, extend_hashes
from penstock.gateway.endpoints.prefill import PrefillOrder
from penstock.gateway.endpoints.prompting import Prompting, read_ask
from penstock.gateway.endpoints.requests import ask_salt
from penstock.gateway.errors import ApiError
from penstock.gateway.http.fair_threads import FairThreads
from penstock.gateway.limits import Limits
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.sessions.owners import tag_in
from penstock.gateway.wire.ask import Ask, Turn
from penstock.gateway.wire.lanes import Slo, urgency_of
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.questions import Questions
from penstock.gateway.wire.strict import StrictBody
from penstock.priority.lanes import Lane, LanePolicy, Tenant
from penstock.priority.routing.router import RouteQuery

_CHARS_PER_TOKEN = 4
"""The assumed length of a token where only the length of a body is known."""

_WAITING_BYTES = 64 * 1024 * 1024
"""The bytes of one tenant's texts that may wait to be tokenised; a request beyond them goes on without hashes."""

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReadQuery:
    """What was read of a request."""

    query: RouteQuery
    order: PrefillOrder | None = None
    """Its prompt, for a replica that computes it for the one that serves the request; None if it has not just one, or
    a private one, whose KV stays where it is."""


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
    ) -> ReadQuery:
        """
        Args:
            kind: the body's type, that of an operation that is passed on by its prompt.
            num_bytes: of the body.
            policies: those of the replicas.

        Raises:
            ApiError: 400 or 403, for a lane or a promise that the tenant may not have.
        """
        ask: Ask | None = None
        prompts: list[list[int]] = []
        with suppress(ApiError, RecursionError):  # the replica will say what is wrong
            ask = (await off_loop(num_bytes, read_ask, kind, body, self._limits))[1]
            if not (isinstance(ask.input, Turn) and ask.input.continues):
                make = Prompting(self._prompts, self._limits, self._threads, tenant.name).prompts
                prompts = await make(ask)
        tier, streams = (None, False) if ask is None else (ask.service_tier, ask.streams)
        urgency = urgency_of(tier, tenant, streams=streams, slo=slo, policies=policies)
        query = RouteQuery(
            lane=urgency.lane,
            tried=urgency.tried,
            ttft_s=urgency.ttft_s,
            tenant=tenant.name,
            num_prompt=sum(map(len, prompts)) or max(1, num_bytes // _CHARS_PER_TOKEN),
            hashes=await self._hashes(ask, max(prompts, key=len), tenant) if ask and prompts else [],
        )
        if ask is None or ask.sampling is None or len(prompts) != 1:
            return ReadQuery(query)
        salt, lane = ask_salt(ask, tenant), urgency.lane if urgency.tried is None else urgency.tried
        if salt.endswith(PRIVATE):
            return ReadQuery(query)
        order = PrefillOrder(token_ids=prompts[0], salt=salt.hex(), tenant=tenant.name, lane=lane)
        return ReadQuery(query, order)

    async def _hashes(self, ask: Ask, prompt: list[int], tenant: Tenant) -> list[bytes]:
        """Returns the hashes of a prompt's blocks but for that of the last token, which is computed in any case."""
        hashes: list[bytes] = []
        is_whole = ask.sampling is None and not isinstance(ask.input, Questions)
        if is_whole and self._pooling is not Pooling.LAST:
            return hashes  # all of the prompt is computed
        num_blocks, salt = (len(prompt) - 1) // self._block_size, ask_salt(ask, tenant)
        size = TOKEN_BYTES * len(prompt)
        await off_loop(size, extend_hashes, hashes, prompt, num_blocks, self._block_size, salt)
        return hashes


def owner_tag(body: Body) -> str | None:
    """Returns the tag of the replica that has what a new response goes on from; None if it goes on from nothing."""
    for name in ("previous_response_id", "conversation"):
        given = body.get(name)
        given = given.get("id") if isinstance(given, dict) else given
        if isinstance(given, str) and (tag := tag_in(given)) is not None:
            return tag
    return None

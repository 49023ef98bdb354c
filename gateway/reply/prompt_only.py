"""A prompt that is computed for its KV alone."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.prefix_index import with_hashes
from penstock.engine.planning.request import Output, Request
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.reply.generation import Generation
from penstock.priority.lanes import Lane


def prompt_request(token_ids: Sequence[int], salt: bytes, now: float, *, lane: Lane, tenant: str) -> Request:
    """Returns a request for the KV of a prompt, with the least output that there is."""
    return Request(
        request_id=f"prompt-{secrets.token_hex(8)}",
        prompt_token_ids=tuple(token_ids),
        sampling=SamplingParams(temperature=0.0, max_tokens=1),
        arrival_s=now,
        lane=lane,
        tenant=tenant,
        salt=salt,
    )


class PromptOnly(Generation):
    """Computes one prompt once; its only output token is thrown away."""

    def __init__(
        self,
        token_ids: Sequence[int],
        salt: bytes,
        now: float,
        *,
        lane: Lane,
        tenant: str,
        block_size: int | None = None,
    ) -> None:
        """With a `block_size`, the prompt is hashed here and not when it starts."""
        request = prompt_request(token_ids, salt, now, lane=lane, tenant=tenant)
        super().__init__([request if block_size is None else with_hashes(request, block_size)])
        self._over = asyncio.Event()

    async def over(self) -> None:
        """Returns when it has ended; raises its exception if it failed."""
        await self._over.wait()
        if self.error is not None:
            raise self.error

    def receive(self, output: Output) -> None:  # noqa: ARG002
        if self.ended:
            self._over.set()

    def wake(self) -> None:
        self._over.set()

    def look_after(self, now: float, timeouts: Timeouts) -> None:
        """Does nothing, for nobody reads it."""

"""Prompts that are computed for their KV alone, while nobody needs the engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from engine.planning.request import Output, Request, SamplingParams
from gateway.http.connections import Timeouts
from gateway.wire.streams import Generation
from priority.lanes import Lane

TENANT = "warm-up"
"""Who is charged for it in the queue."""


class Warming(Generation):
    """One prompt, computed once; its only output token is thrown away."""

    def __init__(self, token_ids: Sequence[int], salt: bytes, now: float) -> None:
        request = Request(
            request_id=f"warm-up-{secrets.token_hex(8)}",
            prompt_token_ids=tuple(token_ids),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            arrival_s=now,
            lane=Lane.BATCH,
            tenant=TENANT,
            salt=salt,
        )
        super().__init__([request])
        self._over = asyncio.Event()

    async def over(self) -> None:
        """
        Raises:
            ApiError: it failed.
        """
        await self._over.wait()
        if self.error is not None:
            raise self.error

    def receive(self, output: Output) -> None:  # noqa: ARG002
        if self.ended:
            self._over.set()

    def wake(self) -> None:
        self._over.set()

    def look_after(self, now: float, timeouts: Timeouts) -> None:
        """Nobody waits for it."""

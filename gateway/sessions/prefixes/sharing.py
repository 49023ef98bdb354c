"""Shares the cached prefixes of replicas by way of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from penstock.engine.planning.prefix_index import prompt_hashes
from penstock.gateway.background import every, meanwhile
from penstock.gateway.errors import invalid
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.sessions.prefixes.tracker import PrefixTracker
from penstock.gateway.store.interface import Durable, PrefixChange, StoreUnavailable

PRIVATE = b"\0private"
"""Salts end with this where the tokens of their prompts stay in this process."""


@dataclass(slots=True)
class PrefixWriter:
    """A PrefixWriter tells the store what changed, a batch at a time, whatever state the store is in."""

    tracker: PrefixTracker
    store: Durable
    with_tokens: bool = True
    """Without tokens, replicas see each other's prefixes, but nothing can be recomputed from the store."""
    every_s: float = 0.1
    max_changes: int = 200
    num_losses: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_losses = self.store.num_losses

    def running(self) -> AbstractAsyncContextManager[None]:
        """Writes changes as they come, while it is entered."""
        return meanwhile(every(self.every_s, self.write, "writing what is cached"))

    async def write(self) -> None:
        """Writes one batch. What cannot be written now is kept for later."""
        if self.store.num_losses != self.num_losses:
            self.num_losses = self.store.num_losses
            self.tracker.rewrite()
        changes = self.tracker.changes(self.max_changes)
        if not changes:
            return
        try:
            await self.store.write_prefixes([self._without_secrets(change) for change in changes])
        except BaseException as error:
            self.tracker.failed(changes)
            if not isinstance(error, StoreUnavailable):
                raise

    def _without_secrets(self, change: PrefixChange) -> PrefixChange:
        if self.with_tokens and not change.salt.endswith(PRIVATE):
            return change
        return replace(change, token_ids=())


@dataclass(frozen=True, slots=True)
class PrefixLocator:
    """A PrefixLocator finds the replicas that hold the beginning of a prompt."""

    store: Durable | None
    replica: str
    block_size: int
    find_cached: Callable[[Sequence[bytes], Sequence[int]], tuple[int, int]]
    """The engine's: about itself it knows better than the store."""

    async def locate(self, salt: bytes, token_ids: Sequence[int]) -> dict[str, object]:
        """The part of this prompt that each replica would find, the best replica first; this one is always among them.

        A prompt never finds the block of its last token: its logits are needed.
        """
        hashes = await off_loop(TOKEN_BYTES * len(token_ids), prompt_hashes, token_ids, self.block_size, salt)
        held = await self._held_elsewhere(hashes)
        cached = {replica: count * self.block_size for replica, count in held.items()}
        cached[self.replica] = self.find_cached(hashes, token_ids)[0]
        best_first = sorted(cached, key=lambda name: (-cached[name], name != self.replica, name))
        return {
            "object": "prefix.location",
            "block_size": self.block_size,
            "num_tokens": len(token_ids),
            "replicas": [
                {"replica": name, "num_cached_tokens": cached[name], "this": name == self.replica}
                for name in best_first
            ],
        }

    async def _held_elsewhere(self, hashes: Sequence[bytes]) -> dict[str, int]:
        if self.store is None or not hashes:
            return {}
        try:
            return await self.store.locate(hashes)
        except StoreUnavailable:
            return {}


def parse_token_ids(text: str, field: str = "tokens") -> list[int]:
    """Reads token ids that are separated by commas; raises 400 if it is anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise invalid(f"'{field}' must be token ids separated by commas.", field) from None

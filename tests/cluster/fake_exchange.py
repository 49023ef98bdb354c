"""The blocks of a gateway whose engine is in the test's hands; a `gateway.kv.KvExchange`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.planning.request import Request
from penstock.engine.tiers.block_file import BlockKey, Payload, digest_of


class FakeExchange:
    """Has the blocks that a test puts into it, and remembers what is expected and pulled from others."""

    digest = digest_of(["fake"])
    tokens_per_s = 1e6

    def __init__(self) -> None:
        self.payloads: dict[BlockKey, bytes] = {}
        self.expected: list[tuple[str, list[bytes]]] = []
        self.pulled: list[tuple[str, list[bytes]]] = []

    async def read(self, keys: Sequence[BlockKey]) -> Sequence[Payload]:
        found = []
        for key in keys:
            if key not in self.payloads:
                break
            found.append(self.payloads[key])
        return found

    def expect(self, source: str, hashes: Sequence[bytes]) -> None:
        self.expected.append((source, list(hashes)))

    def pull(self, source: str, prompt: Request, first: int, end: int) -> None:
        self.pulled.append((source, list(prompt.block_hashes[first:end])))

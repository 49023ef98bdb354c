"""The tier in host memory: for what a device with a memory of its own evicts."""

from __future__ import annotations

import threading
from collections import OrderedDict

from penstock.engine.tiers.block_file import BlockKey, Payload
from penstock.engine.tiers.tier import TierStats


class HostTier:
    """Blocks in ordinary memory of this process; see `Tier`. Those that were used longest ago make room for others."""

    name = "host"
    keeps = True
    read_rate = None

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[BlockKey, Payload] = OrderedDict()
        """Those that were used longest ago come first."""
        self._num_bytes = 0
        self._num_hits = self._num_misses = self._bytes_written = self._bytes_read = 0
        self._lock = threading.Lock()

    def has(self, key: BlockKey) -> bool:
        return key in self._blocks

    def read(self, key: BlockKey) -> Payload | None:
        with self._lock:
            payload = self._blocks.get(key)
            if payload is None:
                self._num_misses += 1
                return None
            self._blocks.move_to_end(key)
            self._num_hits += 1
            self._bytes_read += len(payload)
        return payload

    def write(self, key: BlockKey, payload: Payload) -> None:
        with self._lock:
            if len(payload) > self._max_bytes or key in self._blocks:
                return
            while self._num_bytes + len(payload) > self._max_bytes:
                _, oldest = self._blocks.popitem(last=False)
                self._num_bytes -= len(oldest)
            self._blocks[key] = payload
            self._num_bytes += len(payload)
            self._bytes_written += len(payload)

    def forget(self, key: BlockKey) -> None:
        with self._lock:
            payload = self._blocks.pop(key, None)
            self._num_bytes -= 0 if payload is None else len(payload)

    def look_over(self) -> None:
        """Nobody else writes here."""

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                num_blocks=len(self._blocks),
                num_bytes=self._num_bytes,
                max_bytes=self._max_bytes,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                bytes_written=self._bytes_written,
                bytes_read=self._bytes_read,
            )

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._num_bytes = 0

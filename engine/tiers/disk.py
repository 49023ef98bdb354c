"""The tier on disk: one file for each block, which outlives the server."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from penstock.engine.sizes import size_text
from penstock.engine.tiers.block_file import BadBlock, BlockKey, Payload, header, unpack
from penstock.engine.tiers.folder import SUFFIX, BlockFolder
from penstock.engine.tiers.tier import TierStats

log = logging.getLogger("penstock.engine")

_PAUSE_S = 60.0
"""So long nothing is written after a write that failed: the disk is full, or has become read-only."""


class DiskTier:
    """Blocks in a folder's files; see `Tier`."""

    name = "disk"
    keeps = True
    read_rate = None

    def __init__(
        self, folder: BlockFolder, digest: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`digest` says which of the folder's blocks can be read here."""
        self._folder, self._digest, self._clock = folder, digest, clock
        self._digits = digest.hex()
        self._paused_until_s = -1.0
        self._num_hits = self._num_misses = self._num_failures = 0
        self._bytes_written = self._bytes_read = 0
        self._read_seconds = 0.0
        self._lock = threading.Lock()
        """Guards the counts."""
        own = sum(name.startswith(self._digits) for name in folder.files)
        log.info(
            "KV blocks on disk: %d of this model in %s, which has %s of at most %s",
            *(own, folder.path, size_text(folder.num_bytes), size_text(folder.max_bytes)),
        )

    def has(self, key: BlockKey) -> bool:
        return self._name(key) in self._folder.files

    def read(self, key: BlockKey) -> Payload | None:
        name, started = self._name(key), self._clock()
        try:
            data = self._folder.read(name)
            payload = None if data is None else unpack(data, key, self._digest)
        except (BadBlock, OSError) as error:
            self._give_up(name, error)
            payload = None
        with self._lock:
            self._num_hits += payload is not None
            self._num_misses += payload is None
            self._bytes_read += 0 if payload is None else len(payload)
            self._read_seconds += self._clock() - started
        return payload

    def write(self, key: BlockKey, payload: Payload) -> None:
        if self._clock() < self._paused_until_s:
            return
        try:
            is_new = self._folder.write(self._name(key), header(key, payload, self._digest), payload)
        except OSError as error:
            log.warning(
                "KV blocks on disk: %s: %s; none are written for %.0f s, those that are there are read",
                *(self._folder.path, error.strerror, _PAUSE_S),
            )
            self._paused_until_s = self._clock() + _PAUSE_S
            with self._lock:
                self._num_failures += 1
            return
        with self._lock:
            self._bytes_written += len(payload) if is_new else 0

    def forget(self, key: BlockKey) -> None:
        try:
            self._folder.delete(self._name(key))
        except OSError as error:
            log.warning("KV blocks on disk: a block that is not to be trusted stays: %s", error)

    def look_over(self) -> None:
        """Finds what other servers have written or deleted."""
        try:
            self._folder.look_over_if_changed()
        except OSError as error:
            log.warning("KV blocks on disk: %s: %s", self._folder.path, error.strerror)

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                num_blocks=len(self._folder.files),
                num_bytes=self._folder.num_bytes,
                max_bytes=self._folder.max_bytes,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                bytes_written=self._bytes_written,
                bytes_read=self._bytes_read,
                read_seconds=self._read_seconds,
                num_failures=self._num_failures,
            )

    def close(self) -> None:
        self._folder.close()

    def _give_up(self, name: str, error: Exception) -> None:
        """Gives up a file that is damaged, or cannot be read."""
        log.warning("KV blocks on disk: %s is lost, its tokens are computed again: %s", name, error)
        with self._lock:
            self._num_failures += 1
        self._folder.overlook(name)
        if isinstance(error, BadBlock):
            with contextlib.suppress(OSError):
                self._folder.delete(name)

    def _name(self, key: BlockKey) -> str:
        text = key.text
        return f"{self._digits}/{text[:2]}/{text}{SUFFIX}"

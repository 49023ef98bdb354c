"""How much of the KV in use no token fills, while a workload runs."""

from __future__ import annotations

import math
from statistics import fmean
from threading import Event, Thread
from types import TracebackType

from penstock.app.bench.server_process import samples

EVERY_S = 0.2


class KVWatch:
    """Reads a server's gauge a few times a second, between entering and leaving.

    Args:
        url: the address of the server; None if it has no such gauge.
    """

    def __init__(self, url: str | None) -> None:
        self._url, self._seen, self._ended = url, list[float](), Event()
        self._thread = Thread(target=self._watch, daemon=True)

    @property
    def unfilled(self) -> float:
        """The mean share while sequences held blocks; nan if none was seen to."""
        return fmean(self._seen) if self._seen else math.nan

    def __enter__(self) -> KVWatch:
        if self._url is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._url is not None:
            self._thread.join()

    def _watch(self) -> None:
        while True:
            found = {sample.name: sample.value for sample in samples(self._url or "")}
            if found["penstock_kv_usage_ratio"]:
                self._seen.append(found["penstock_kv_unfilled_ratio"])
            if self._ended.wait(EVERY_S):
                return

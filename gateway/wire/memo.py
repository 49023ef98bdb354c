"""A memory of results with a bound in bytes, which forgets what was not used for the longest time."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result", str, tuple[int, ...])

_ENTRY_BYTES = 256
"""About what an entry takes beside its result."""


class Memo(Generic[_Key, _Result]):
    """Remembers results by their keys. Its method may be called from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._results: OrderedDict[_Key, _Result] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key, make: Callable[[], _Result]) -> _Result:
        """Returns the result of a key, made if it is not remembered."""
        with self._lock:
            if (known := self._results.get(key)) is not None:
                self._results.move_to_end(key)
                return known
        result = make()
        with self._lock:
            if key not in self._results:
                self._results[key] = result
                self._num_bytes += _size(result)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(self._results.popitem(last=False)[1])
        return result


def _size(result: object) -> int:
    return _ENTRY_BYTES + sys.getsizeof(result)

"""Work on what is large is done in a thread: it would hold every stream up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

OFF_LOOP_BYTES = 32 * 1024
"""JSON, text or other work of this size takes about a millisecond."""

TOKEN_BYTES = 4
"""Hashing a token of a prompt takes about as long as other work on so many bytes."""

# Threads take turns with the event loop on one interpreter: the more of them, the less is left for it.
_SHORT = anyio.CapacityLimiter(2)
TOKENIZING = anyio.CapacityLimiter(2)
"""For work that takes up to seconds, so that none that takes milliseconds stands behind it."""

_Result = TypeVar("_Result")


async def off_loop(
    size: int, work: Callable[..., _Result], *args: object, threads: anyio.CapacityLimiter = _SHORT
) -> _Result:
    """The result of `work(*args)`, done in a thread if its `size`, about the bytes it looks at, is large."""
    if size <= OFF_LOOP_BYTES:
        return work(*args)
    return await anyio.to_thread.run_sync(work, *args, limiter=threads)

"""The heap of the C library, where torch and numpy take memory."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Gives freed memory back to the system, where the C library would keep it for later (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

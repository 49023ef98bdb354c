"""Sizes as operators read them."""

from __future__ import annotations

GIB, MIB = 1 << 30, 1 << 20


def size_text(num_bytes: int) -> str:
    """Writes a size as "1.25 GiB", or as "17.5 MiB" if it is less than a tenth of a GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB // 10 else f"{num_bytes / MIB:.1f} MiB"

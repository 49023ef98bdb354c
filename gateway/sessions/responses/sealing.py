"""Reasoning as one opaque string, which clients that keep nothing else of it send back.

It is base64 and no cipher: a client may read the reasoning anyway.
"""

from __future__ import annotations

from base64 import b64decode, b64encode

_SEAL = "penstock1."


def sealed(text: str) -> str:
    """Seals a text."""
    return _SEAL + b64encode(text.encode(errors="replace")).decode("ascii")


def unsealed(text: str | None) -> str | None:
    """Returns the text that was sealed; None if another server did it."""
    if text is None or not text.startswith(_SEAL):
        return None
    try:
        return b64decode(text.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return None

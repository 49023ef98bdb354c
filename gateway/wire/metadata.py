"""Metadata that clients attach to what is kept for them."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.errors import invalid

MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 512


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises 400 for metadata beyond OpenAI's bounds."""
    for key, value in (metadata or {}).items():
        if len(key) > MAX_KEY_CHARS:
            message = f"A key of 'metadata' may have at most {MAX_KEY_CHARS} characters."
            raise invalid(message, "metadata")
        if len(value) > MAX_VALUE_CHARS:
            message = f"A value of 'metadata' may have at most {MAX_VALUE_CHARS} characters."
            raise invalid(message, "metadata")

"""API keys of tenants for a server under test."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from penstock.gateway.access.keys import digest_of


@contextmanager
def key_file(tenants: Iterable[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The path of a file for --api-keys-file, and the new keys that are in it by name."""
    keys = {name: secrets.token_urlsafe(24) for name in tenants}
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        lines = (f"{name}:sha256:{digest_of(key).hex()} top=interactive\n" for name, key in keys.items())
        file.writelines(lines)
        file.flush()
        yield file.name, keys

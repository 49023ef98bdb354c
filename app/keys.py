"""The file of API keys: one `name:key` or `key` a line; blank lines and lines with a # in front are passed over."""

from __future__ import annotations

from pathlib import Path

from app.errors import OperatorError
from gateway.access import digest_of

_SHORTEST_KEY = 16


def read_keys(path: Path) -> dict[bytes, str]:
    """Tenant by digest of its key; the keys themselves are forgotten here.

    Raises:
        OperatorError: naming the file, and the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise OperatorError(f"--api-keys-file {path}: {reason}") from None
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            name, key = _parse(text, number, path)
            if tenants.setdefault(digest_of(key), name) != name:
                raise OperatorError(
                    f"--api-keys-file {path}, line {number}: another tenant has this key already"
                )
    if not tenants:
        raise OperatorError(f"--api-keys-file {path}: there is no key in it")
    return tenants


def _parse(text: str, number: int, path: Path) -> tuple[str, str]:
    name, separator, key = text.rpartition(":")
    name = name.strip() if separator else f"key-{number}"
    key = key.strip()
    if not name or len(key) < _SHORTEST_KEY or any(character.isspace() for character in key):
        wanted = f"`name:key` or `key` of at least {_SHORTEST_KEY} characters without spaces"
        raise OperatorError(f"--api-keys-file {path}, line {number}: not {wanted}")
    return name, key

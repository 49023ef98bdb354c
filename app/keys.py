"""The file of API keys: one `name:key` or `key` a line; blank lines and lines with a # in front are passed over.

After a key may stand what its tenant is entitled to, each with its default:

    alice:KEY weight=1 lane=standard top=interactive

`weight` is its share among tenants, `lane` where its requests go that do not say, `top` the most urgent lane they may
name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.errors import OperatorError
from gateway.access import digest_of
from priority.lanes import Lane, Tenant, parse_lane

_SHORTEST_KEY = 16


def read_keys(path: Path) -> dict[bytes, Tenant]:
    """Tenant by digest of its key; the keys themselves are forgotten here.

    Raises:
        OperatorError: naming the file, and the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise OperatorError(f"--api-keys-file {path}: {reason}") from None
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            key, tenant = _parse(text, number, path)
            if tenants.setdefault(digest_of(key), tenant) != tenant:
                raise OperatorError(
                    f"--api-keys-file {path}, line {number}: another tenant has this key already"
                )
    if not tenants:
        raise OperatorError(f"--api-keys-file {path}: there is no key in it")
    return tenants


def _parse(text: str, number: int, path: Path) -> tuple[str, Tenant]:
    """The key of a line and whose it is."""
    where = f"--api-keys-file {path}, line {number}"
    entry, *attributes = text.replace(" :", ":").replace(": ", ":").split()
    name, separator, key = entry.rpartition(":")
    name = name if separator else f"key-{number}"
    if not name or len(key) < _SHORTEST_KEY or not key.isascii():
        wanted = f"`name:key` or `key` of at least {_SHORTEST_KEY} ASCII characters without spaces"
        raise OperatorError(f"{where}: not {wanted}")
    try:
        return key, Tenant(name=name, **_entitlements(attributes))
    except ValueError as error:
        raise OperatorError(f"{where}: {error}") from None


def _entitlements(attributes: list[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for attribute in attributes:
        name, _, value = attribute.partition("=")
        if name == "weight":
            if not value.lstrip("-").isdigit():
                raise ValueError(f"weight must be a whole number, not {value!r}")
            given["weight"] = int(value)
        elif name in ("lane", "top"):
            given["default_lane" if name == "lane" else "top_lane"] = parse_lane(value)
        else:
            raise ValueError("after the key may stand weight=, lane= and top=, without spaces around the =")
    if "top_lane" in given:
        given.setdefault("default_lane", max(Lane.STANDARD, given["top_lane"]))
    return given
